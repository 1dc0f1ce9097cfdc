"""Bounds on stopping-time regret (rounds) under the stationary model; derivations in docs/theory.md.

An instance is the arms' acceptance rates `alphas` [arms], one draft length `gamma` for all, full drafts.
Each bound states its conditions and refuses an instance that breaks them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import rel_entr, zeta

from . import acceptance
from .errors import InputError
from .rewards import AcceptanceTrials, BlockDivergence, BlockEfficiency, Reward, VerifiedDivergence
from .rounds import FloatArray


def _instance(alphas: ArrayLike, gamma: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """alphas, g_i and the weights 1 - g_i / g_* of the arms."""
    rates = np.atleast_1d(acceptance.check(alphas, gamma))
    g = acceptance.tokens_per_round(rates, gamma)
    return rates, g, 1 - g / g.max()


def kl(p: ArrayLike, q: ArrayLike) -> FloatArray:
    """Relative entropy of Bernoulli laws, p ln(p/q) + (1 - p) ln((1 - p)/(1 - q)), in nats."""
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    return rel_entr(p, q) + rel_entr(1 - p, 1 - q)


def ucb_upper_pulls(
    alphas: ArrayLike, gamma: int, rounds: ArrayLike, reward: Reward, beta: float | None = None
) -> FloatArray:
    """Bound on E n_i(T), the rounds that MetaSD-UCB gives to each arm within `T = rounds`; [..., arms].

    inf at the best arms.
    With sigma-sub-Gaussian rewards and beta >= 2 sigma (Auer et al. 2002, with a free beta):
        8 beta^2 ln T / Delta_i^2 + 1 + pi^2/3
    Delta_i = (g_* - g_i) / gamma for block efficiency, alpha_* - alpha_i for block divergence. Rewards whose
    weights count as samples (trials, verified block divergence; sigma = 1/2 each):
        (8 beta^2 ln T / Delta_i^2 + gamma) / E m_i + 2 gamma zeta(3),  Delta_i = alpha_* - alpha_i
    """
    rates, g, _ = _instance(alphas, gamma)
    horizon = np.asarray(rounds, dtype=float)[..., None]
    sigma = reward.sigma(gamma)
    if sigma is None or not isinstance(
        reward, BlockEfficiency | BlockDivergence | VerifiedDivergence | AcceptanceTrials
    ):
        raise InputError(
            f"bound: expected a reward with a known sigma (be, bd, bd-verified, trials); found {reward.name}"
        )
    beta = 2 * sigma if beta is None else beta
    if not beta >= 2 * sigma * (1 - 1e-12):
        raise InputError(
            f"bound: expected beta >= 2 sigma = {2 * sigma:.6g} for reward {reward.name}, found {beta:.6g}"
        )
    if not np.all(horizon >= 1):
        raise InputError(f"bound: expected a horizon of 1 or more, found {horizon.min():g}")
    gap = (g.max() - g) / gamma if isinstance(reward, BlockEfficiency) else rates.max() - rates
    with np.errstate(divide="ignore", invalid="ignore"):  # ln 1 / 0 at the best arm; replaced below
        leading = 8 * beta**2 * np.log(horizon) / gap**2
    leading = np.where(gap > 0, leading, np.inf)
    if isinstance(reward, VerifiedDivergence | AcceptanceTrials):
        return (leading + gamma) / acceptance.trials_per_round(rates, gamma) + 2 * gamma * float(zeta(3))
    return leading + 1 + np.pi**2 / 3


def ucb_upper(
    alphas: ArrayLike, gamma: int, budgets: ArrayLike, reward: Reward, beta: float | None = None
) -> FloatArray:
    """Reg <= gamma / g_* + sum_{i != *} (1 - g_i / g_*) E n_i(B), with E n_i of `ucb_upper_pulls`; shape of `budgets`.

    Conditions: one draft length, full drafts, overlaps i.i.d. (for block divergence also within the block),
    beta >= 2 sigma. The last round of the virtual run is B, since tau <= B.
    """
    _, g, wasted = _instance(alphas, gamma)
    pulls = ucb_upper_pulls(alphas, gamma, budgets, reward, beta)
    return gamma / g.max() + np.where(wasted > 0, wasted * np.where(wasted > 0, pulls, 0.0), 0.0).sum(axis=-1)


def lower_slope(alphas: ArrayLike, gamma: int) -> float:
    """liminf Reg / ln B >= sum_{i != *} (1 - g_i / g_*) / (E m_i kl(alpha_i, alpha_*)): Lai, Robbins (1985)
    on the capped geometric law, for consistent policies that see accepted tokens only.

    Asymptotic: regret at a finite budget may lie under it. 0 for arms when alpha_* = 1, where kl is infinite.
    """
    rates, _, wasted = _instance(alphas, gamma)
    worse = wasted > 0
    information = acceptance.trials_per_round(rates, gamma)[worse] * kl(rates[worse], rates.max())
    return float((wasted[worse] / information).sum())


def lower(alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    """`lower_slope * ln B`, the asymptotic lower bound drawn at finite budgets."""
    tokens = np.asarray(budgets, dtype=float)
    if not np.all(tokens >= 1):
        raise InputError(f"bound: expected a budget of 1 or more tokens, found {tokens.min():g}")
    return lower_slope(alphas, gamma) * np.log(tokens)
