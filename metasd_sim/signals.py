"""Feedback signal of a reward, R_i = Delta_i^2 / max(Var r_i, Var r_*): how easily it tells arm i from the best one."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from . import acceptance
from .errors import InputError
from .rewards import AcceptanceTrials, BlockDivergence, BlockEfficiency, Reward, VerifiedDivergence
from .rounds import FloatArray

LAWS = ("beta", "bernoulli")


def overlap_variance(alpha: ArrayLike, overlaps: str = "beta", concentration: float = 5.0) -> FloatArray:
    """Var beta_j: alpha (1 - alpha) / (c + 1) for Beta(c alpha, c (1 - alpha)), alpha (1 - alpha) for {0, 1}."""
    rate = acceptance.check(alpha, 1)
    if overlaps not in LAWS:
        raise InputError(f"overlaps: expected one of {', '.join(LAWS)}; found {overlaps!r}")
    if not (np.isfinite(concentration) and concentration > 0):
        raise InputError(f"concentration: expected a finite number above 0, found {concentration}")
    return rate * (1 - rate) / (concentration + 1 if overlaps == "beta" else 1.0)


def reward_moments(
    alpha: ArrayLike, gamma: int, reward: Reward, overlaps: str = "beta", concentration: float = 5.0
) -> tuple[FloatArray, FloatArray]:
    """Mean of a reward and its variance per round; shape of `alpha`.

    be: E N / gamma, Var N / gamma^2.  bd: alpha, Var beta / gamma.  trials, bd-verified (ratios of sums, hence the
    limit for many rounds): alpha, alpha (1 - alpha) / E m and Var beta / E m. Stationary model.
    """
    rate = acceptance.check(alpha, gamma)
    if isinstance(reward, BlockEfficiency):
        return acceptance.mean_accepted(rate, gamma) / gamma, acceptance.var_accepted(rate, gamma) / gamma**2
    if isinstance(reward, BlockDivergence):
        return rate, overlap_variance(rate, overlaps, concentration) / gamma
    if isinstance(reward, AcceptanceTrials):
        return rate, rate * (1 - rate) / acceptance.trials_per_round(rate, gamma)
    if isinstance(reward, VerifiedDivergence):
        return rate, overlap_variance(rate, overlaps, concentration) / acceptance.trials_per_round(rate, gamma)
    raise InputError(f"reward: expected be, bd, bd-verified or trials for a feedback signal, found {reward.name}")


def feedback_signal(
    alpha: ArrayLike, best: ArrayLike, gamma: int, reward: Reward, overlaps: str = "beta", concentration: float = 5.0
) -> FloatArray:
    """R = (mean r_* - mean r_i)^2 / max(Var r_i, Var r_*); `alpha` and `best` broadcast. inf without any variance."""
    (mean, variance), (top, spread) = (
        reward_moments(rate, gamma, reward, overlaps, concentration) for rate in (alpha, best)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        signal = (top - mean) ** 2 / np.maximum(variance, spread)
    return np.where(np.isnan(signal), 0.0, signal)  # 0 / 0: equal arms


def signal_ratio(
    alpha: ArrayLike,
    best: ArrayLike,
    gamma: int,
    first: Reward,
    second: Reward,
    overlaps: str = "beta",
    concentration: float = 5.0,
) -> FloatArray:
    """R of the reward `first` over R of `second`: above 1 where `first` tells the arms apart more easily.

    NaN where alpha = best, or where both arms are certain (0 and 1).
    """
    rate, top = np.broadcast_arrays(np.asarray(alpha, dtype=float), np.asarray(best, dtype=float))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = feedback_signal(rate, top, gamma, first, overlaps, concentration) / feedback_signal(
            rate, top, gamma, second, overlaps, concentration
        )
    return np.where(rate == top, np.nan, ratio)


def signal_grid(
    gamma: int,
    first: Reward,
    second: Reward,
    overlaps: str = "beta",
    concentration: float = 5.0,
    step: float = 0.01,
) -> tuple[FloatArray, FloatArray]:
    """Rates step, 2 step, ... < 1 and `signal_ratio` at [alpha_i, alpha_*], NaN where alpha_i >= alpha_*."""
    if not 0 < step < 0.5:
        raise InputError(f"step: expected a number above 0 and below 1/2, found {step}")
    rates: FloatArray = np.arange(1, round(1 / step), dtype=np.float64) * step
    ratio = signal_ratio(rates[:, None], rates, gamma, first, second, overlaps, concentration)
    return rates, np.where(rates[:, None] < rates, ratio, np.nan)


def signal_boundary(
    best: ArrayLike,
    gamma: int,
    first: Reward,
    second: Reward,
    overlaps: str = "beta",
    concentration: float = 5.0,
    points: int = 2000,
) -> list[FloatArray]:
    """For each rate of the best arm the rates alpha_i < alpha_* at which the ratio crosses 1, increasing.

    Crossings between `points` values of alpha_i, each then bisected; an empty array where one reward wins throughout.
    """
    crossings = []
    for top in np.atleast_1d(np.asarray(best, dtype=float)):
        at = top * (np.arange(points) + 0.5) / points

        def excess(alpha: FloatArray, top: float = top) -> FloatArray:
            return signal_ratio(alpha, top, gamma, first, second, overlaps, concentration) - 1

        above = excess(at) > 0
        left = np.flatnonzero(above[1:] != above[:-1])
        low, high = at[left], at[left + 1]
        for _ in range(50):
            middle = (low + high) / 2
            same = (excess(middle) > 0) == above[left]
            low, high = np.where(same, middle, low), np.where(same, high, middle)
        crossings.append((low + high) / 2)
    return crossings
