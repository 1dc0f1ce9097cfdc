"""Upper bounds of index policies: MetaSD-UCB, in rounds and in time, and UCBSpec."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import zeta

from .. import acceptance
from ..errors import InputError
from ..rewards import AcceptanceTrials, BlockDivergence, BlockEfficiency, Reward, VerifiedDivergence
from ..rounds import BoolArray, FloatArray
from .common import horizons, instance, pace, rate_of_tokens, sub_gaussian, weighted_sum

_PER_ROUND = (BlockEfficiency, BlockDivergence)
_PER_TRIAL = (VerifiedDivergence, AcceptanceTrials)


def _ucb_pulls(
    gap: FloatArray, rates: FloatArray, gamma: int, rounds: ArrayLike, reward: Reward, beta: float | None
) -> FloatArray:
    """E n_i(T) where arm i plays, its mean and the best arm's being in their intervals, only if 2 bonus >= gap_i."""
    sigma = sub_gaussian(reward, gamma, _PER_ROUND + _PER_TRIAL)
    beta = 2 * sigma if beta is None else beta
    if not 2 * sigma * (1 - 1e-12) <= beta < np.inf:
        raise InputError(
            f"bound: expected a finite beta >= 2 sigma = {2 * sigma:.6g} for reward {reward.name}, found {beta:.6g}"
        )
    horizon = horizons(rounds)[..., None]
    # ln 1 / 0 at the best arm is replaced below; past the largest number the bound is infinite, and still one
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        leading = 8 * np.log(horizon) * np.square(beta / gap)
    leading = np.where(gap > 0, leading, np.inf)
    if isinstance(reward, _PER_TRIAL):
        return (leading + gamma) / acceptance.trials_per_round(rates, gamma) + 2 * gamma * float(zeta(3))
    return leading + 1 + np.pi**2 / 3


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
    rates, g, _ = instance(alphas, gamma)
    gap = (g.max() - g) / gamma if isinstance(reward, BlockEfficiency) else rates.max() - rates
    return _ucb_pulls(gap, rates, gamma, rounds, reward, beta)


def ucb_upper(
    alphas: ArrayLike, gamma: int, budgets: ArrayLike, reward: Reward, beta: float | None = None
) -> FloatArray:
    """Reg <= gamma / g_* + sum_{i != *} (1 - g_i / g_*) E n_i(B), with E n_i of `ucb_upper_pulls`; shape of `budgets`.

    Conditions: one draft length, full drafts, overlaps i.i.d. (for block divergence also within the block),
    beta >= 2 sigma. The last round of the virtual run is B, since tau <= B.
    """
    _, g, wasted = instance(alphas, gamma)
    return gamma / g.max() + weighted_sum(wasted, ucb_upper_pulls(alphas, gamma, budgets, reward, beta))


def ucb_time_upper(
    alphas: ArrayLike,
    gamma: int,
    budgets: ArrayLike,
    seconds: ArrayLike,
    reward: Reward,
    beta: float | None = None,
) -> FloatArray:
    """Regret in seconds of MetaSD-UCB with the objective "time" <= gamma r + sum_i (c_i - g_i r) E n_i(B), r = c_*/g_*.

    E n_i as in `ucb_upper_pulls`, with Delta_i what the index of arm i has to gain to be worth c_i g_* / c_* tokens:
    (c_i g_* / c_* - g_i) / gamma for block efficiency, a_i - alpha_i with g(a_i) = c_i g_* / c_* for the others;
    infinite where c_i g_* / c_* > gamma + 1. `seconds` [arms] c_i: each round of an arm takes the same time, which
    excludes catch-up. Other conditions as for `ucb_upper`. Shape of `budgets`.
    """
    rates, g, _ = instance(alphas, gamma)
    cost, wasted, per_token = pace(alphas, gamma, seconds)
    wanted = cost / per_token
    reach = (wanted - 1) / gamma if isinstance(reward, BlockEfficiency) else rate_of_tokens(wanted, gamma)
    have = (g - 1) / gamma if isinstance(reward, BlockEfficiency) else rates
    gap = np.where(wasted > 0, np.where(wanted > gamma + 1, np.inf, reach - have), 0.0)
    return gamma * per_token + weighted_sum(wasted, _ucb_pulls(gap, rates, gamma, budgets, reward, beta))


def ucb_spec_upper_pulls(alphas: ArrayLike, gamma: int, rounds: ArrayLike, delta: float = 1.0) -> FloatArray:
    """Bound on the rounds that UCBSpec gives to each arm within `T = rounds`; [..., arms], inf at the best arms.

    u_i + 1 + (2 / K) e^(-1/2) delta pi^2 / 6, where 2 w(u_i) = g_* - g_i and
        w(n) = (gamma / 2) sqrt((1 + n) / n^2 (1 + 2 ln(K T^2 sqrt(1 + n) / delta)))
    is its half width (arXiv 2505.15141), a self-normalised bound (Abbasi-Yadkori et al. 2011). 0 < delta <= 1.
    """
    _, g, _ = instance(alphas, gamma)
    if not 0 < delta <= 1:
        raise InputError(f"delta: expected a number above 0 and at most 1, found {delta}")
    horizon = horizons(rounds)[..., None]
    arms, gap = len(g), g.max() - g

    def too_narrow(n: FloatArray) -> BoolArray:
        log = 1 + 2 * np.log(arms * horizon**2 * np.sqrt(1 + n) / delta)
        return gamma * np.sqrt((1 + n) * log) / n < gap

    worse = gap > 0
    low = np.ones(np.broadcast_shapes(horizon.shape, gap.shape))
    high = low.copy()
    while np.any(more := ~too_narrow(high) & worse):  # 2 w falls with n, from more than gamma at 1
        high = np.where(more, 2 * high, high)
    for _ in range(60):
        middle = (low + high) / 2
        narrow = too_narrow(middle)
        low, high = np.where(narrow, low, middle), np.where(narrow, middle, high)
    return np.where(worse, high, np.inf) + 1 + 2 / arms * np.exp(-0.5) * delta * np.pi**2 / 6


def ucb_spec_upper(alphas: ArrayLike, gamma: int, budgets: ArrayLike, delta: float = 1.0) -> FloatArray:
    """Reg <= gamma / g_* + sum_{i != *} (1 - g_i / g_*) E n_i(B), with E n_i of `ucb_spec_upper_pulls`."""
    _, g, wasted = instance(alphas, gamma)
    return gamma / g.max() + weighted_sum(wasted, ucb_spec_upper_pulls(alphas, gamma, budgets, delta))
