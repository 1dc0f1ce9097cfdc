"""Upper bounds of exponential weights: EXP3Spec (the arm played), Hedge and NormalHedge (all arms)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .. import acceptance
from ..errors import InputError
from ..rounds import FloatArray
from .common import horizons, instance, regret_horizon, rooted


def exp3_spec_tokens(arms: int, gamma: int, rounds: ArrayLike) -> FloatArray:
    """E sum_{t <= T} (Y_{t,k} - Y_{t,I_t}) <= 2 gamma sqrt(E T K ln K) for every arm k and any stopping time T.

    For any sequence of Y in [1, gamma + 1] fixed beforehand (Bubeck, Cesa-Bianchi 2012, Theorem 3.1). A bound on
    tokens, not on rounds: see docs/theory.md.
    """
    if not gamma >= 1:
        raise InputError(f"gamma: expected a draft length of 1 or more tokens, found {gamma}")
    return 2 * gamma * np.sqrt(regret_horizon(arms, horizons(rounds)) * arms * np.log(arms))


def exp3_spec_upper(alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    """Reg <= (gamma + gamma sqrt(E tau K ln K) (1 + V / K)) / g_*, V = sum_i E (1 - N_i / gamma)^2 <= K.

    EXP3Spec with eta_t = sqrt(ln K / (t K)) in the stationary model with one draft length; shape of `budgets`.
    """
    rates, g, _ = instance(alphas, gamma)
    arms = len(rates)
    squares = (acceptance.pmf(rates, gamma) * (1 - np.arange(gamma + 1) / gamma) ** 2).sum()
    scale = gamma * np.sqrt(arms * np.log(arms)) * (1 + squares / arms) / g.max()
    return gamma / g.max() + rooted(lambda t: scale * np.sqrt(t), horizons(budgets, "budget"), float(g.max()), gamma)


def hedge_regret(arms: int, rounds: ArrayLike, eta: float | None = None) -> FloatArray:
    """sum_t (p_t . loss_t - loss_{t,k}) <= ln K / eta + eta T / 8 for losses in [0, 1], whatever they are.

    3 sqrt(T ln K / 8) for the anytime eta_t = sqrt(8 ln K / t), the default (Cesa-Bianchi, Lugosi 2006, Theorem 2.3
    has 2 sqrt(T ln K / 2) + sqrt(ln K / 8)).
    """
    horizon = regret_horizon(arms, rounds)
    if eta is None:
        return 3 * np.sqrt(horizon * np.log(arms) / 8)
    if not (np.isfinite(eta) and eta > 0):
        raise InputError(f"eta: expected a finite number above 0, found {eta}")
    return np.log(arms) / eta + eta * horizon / 8


_WIDTHS = np.geomspace(1.0, 1e12, 2000)  # candidates for the free constant of `normal_hedge_regret`


def normal_hedge_regret(arms: int, rounds: ArrayLike) -> FloatArray:
    """sum_t (p_t . loss_t - loss_{t,k}) <= sqrt(2 c y) for NormalHedge and losses in [0, 1], whatever they are.

    y = ln(K e - K + 1); c = min(T^2 / 2, min_a (a + sqrt(2 a) + 1/2 + T D(a))), x = sqrt(2 a y),
        D(a) = exp((2 x + 1) / (2 a)) (1 + 2 (K e - K + 1) y / (K e) + (2 x + 1) / a) / 2.
    Own derivation (docs/theory.md); the order is that of Chaudhuri, Freund, Hsu (2009), Theorem 1.
    """
    horizon = regret_horizon(arms, rounds)[..., None]
    if arms == 1:
        return np.zeros_like(horizon[..., 0])
    largest = arms * np.e - arms + 1
    y = np.log(largest)
    step = 2 * np.sqrt(2 * _WIDTHS * y) + 1
    growth = np.exp(step / (2 * _WIDTHS)) * (1 + 2 * largest * y / (arms * np.e) + step / _WIDTHS) / 2
    width = (_WIDTHS + np.sqrt(2 * _WIDTHS) + 0.5 + horizon * growth).min(axis=-1)
    return np.sqrt(2 * y * np.minimum(width, horizon[..., 0] ** 2 / 2))


def _full_information(alphas: ArrayLike, gamma: int) -> tuple[float, float]:
    """g_* and max_i (g_* - g_i) (gamma + 1) / ((alpha_* - alpha_i) g_i g_*): rounds of regret per unit of loss."""
    rates, g, wasted = instance(alphas, gamma)
    worse = wasted > 0
    cost = (gamma + 1) * wasted[worse] / ((rates.max() - rates[worse]) * g[worse])
    return float(g.max()), float(cost.max(initial=0.0))


def hedge_upper(alphas: ArrayLike, gamma: int, budgets: ArrayLike, eta: float | None = None) -> FloatArray:
    """Reg <= gamma / g_* + max_i (g_* - g_i) (gamma + 1) / ((alpha_* - alpha_i) g_i g_*) H(E tau), H `hedge_regret`.

    Hedge with the loss sum_j (1 - beta_j) / (gamma + 1) over the emitted positions. Stationary model, one draft length,
    overlaps independent between positions (those of several arms may depend on each other). Shape of `budgets`.
    """
    best, cost = _full_information(alphas, gamma)
    arms = np.size(alphas)
    return gamma / best + rooted(lambda t: cost * hedge_regret(arms, t, eta), horizons(budgets, "budget"), best, gamma)


def normal_hedge_upper(alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    """`hedge_upper` with H `normal_hedge_regret`: NormalHedge with the same loss, under the same conditions."""
    best, cost = _full_information(alphas, gamma)
    arms = np.size(alphas)
    return gamma / best + rooted(
        lambda t: cost * normal_hedge_regret(arms, t), horizons(budgets, "budget"), best, gamma
    )
