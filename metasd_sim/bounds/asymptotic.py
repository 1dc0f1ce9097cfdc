"""Lower bounds for consistent policies that see accepted tokens only: asymptotic, in rounds and in time."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .. import acceptance
from ..rounds import FloatArray
from .common import horizons, instance, kl, pace, rate_of_tokens


def lower_slope(alphas: ArrayLike, gamma: int) -> float:
    """liminf Reg / ln B >= sum_{i != *} (1 - g_i / g_*) / (E m_i kl(alpha_i, alpha_*)): Lai, Robbins (1985)
    on the capped geometric law, for consistent policies that see accepted tokens only.

    Asymptotic: regret at a finite budget may lie under it. 0 for arms when alpha_* = 1, where kl is infinite.
    """
    rates, _, wasted = instance(alphas, gamma)
    worse = wasted > 0
    information = acceptance.trials_per_round(rates, gamma)[worse] * kl(rates[worse], rates.max())
    return float((wasted[worse] / information).sum())


def lower(alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    """`lower_slope * ln B`, the asymptotic lower bound drawn at finite budgets."""
    return lower_slope(alphas, gamma) * np.log(horizons(budgets, "budget"))


def lower_time_slope(alphas: ArrayLike, gamma: int, seconds: ArrayLike) -> float:
    """liminf (regret in seconds) / ln B >= sum_i (c_i - g_i c_*/g_*) / (E m_i kl(alpha_i, a_i)), g(a_i)/c_i = g_*/c_*.

    `*` maximises g/c, `seconds` [arms] are the c_i of a round, without catch-up. An arm that could not be as fast even
    if it accepted everything adds nothing: no round is needed to tell. Conditions as for `lower_slope`.
    """
    rates, _, _ = instance(alphas, gamma)
    cost, wasted, per_token = pace(alphas, gamma, seconds)
    reach = rate_of_tokens(cost / per_token, gamma)
    worse = (wasted > 0) & (reach <= 1)
    information = acceptance.trials_per_round(rates, gamma)[worse] * kl(rates[worse], reach[worse])
    return float((wasted[worse] / information).sum())


def lower_time(alphas: ArrayLike, gamma: int, budgets: ArrayLike, seconds: ArrayLike) -> FloatArray:
    """`lower_time_slope * ln B`, in seconds."""
    return lower_time_slope(alphas, gamma, seconds) * np.log(horizons(budgets, "budget"))
