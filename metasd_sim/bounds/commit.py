"""Upper bounds of policies that explore on a schedule and commit: sequential halving, explore-then-commit."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InputError
from ..policies.elimination import exploration_tokens
from ..rewards import BlockDivergence, BlockEfficiency, Reward
from ..rounds import FloatArray
from .common import horizons, instance, sub_gaussian


def _gaps(alphas: ArrayLike, gamma: int, reward: Reward) -> tuple[FloatArray, FloatArray, float, float]:
    """Gaps of the reward and weights 1 - g_i / g_* of the arms, g_*, and the reward's sigma."""
    sigma = sub_gaussian(reward, gamma, (BlockEfficiency, BlockDivergence))
    rates, g, wasted = instance(alphas, gamma)
    gap = (g.max() - g) / gamma if isinstance(reward, BlockEfficiency) else rates.max() - rates
    return gap, wasted, float(g.max()), sigma


def _pulls(explore: float, arms: int, phases: int, gamma: int) -> float:
    if not (np.isfinite(explore) and explore > 0):
        raise InputError(f"explore: expected a number of tokens above 0, found {explore}")
    return max(1.0, float(np.floor(explore / (arms * phases * (gamma + 1)))))


def _at_least(beats: FloatArray, count: int) -> float:
    """P(`count` or more of the events happen) <= min_q sum of all but the q likeliest / (count - q) (Markov)."""
    likeliest = np.sort(beats)[::-1]
    return min(1.0, *(likeliest[q:].sum() / (count - q) for q in range(count)))


def halving_error(alphas: ArrayLike, gamma: int, explore: float, reward: Reward) -> float:
    """Bound on P(sequential halving commits to an arm that is not best), `explore` tokens of exploration.

    Sum over phases r, with s survivors of which ceil(s/2) go on and n pulls of each so far, of
        (best arms) P(ceil(s/2) worse arms or more beat a best one) <= (best arms) min_q (Markov, q likeliest left out)
    with P(arm i beats it) <= exp(-n Delta_i^2 / (4 sigma^2)) (Hoeffding); cf. Karnin, Koren, Somekh (2013).
    """
    gap, wasted, _, sigma = _gaps(alphas, gamma, reward)
    worse = wasted > 0
    survivors, pulls, error = len(gap), 0.0, 0.0
    phases = int(np.ceil(np.log2(survivors)))
    while survivors > 1:
        pulls += _pulls(explore, survivors, phases, gamma)
        survivors = (survivors + 1) // 2
        beats = np.exp(-pulls * gap[worse] ** 2 / (4 * sigma**2))
        if survivors <= len(beats):
            error += np.count_nonzero(~worse) * _at_least(beats, survivors)
    return min(1.0, error)


def halving_upper(
    alphas: ArrayLike, gamma: int, budgets: ArrayLike, reward: Reward, explore: float | None = None
) -> FloatArray:
    """Reg <= gamma / g_* + sum_r n_r (the s_r largest 1 - g_i / g_*) + P(error) max_i (1 - g_i / g_*) B.

    Sequential halving with n_r = max(1, floor(explore / (s_r ceil(log2 K) (gamma + 1)))) pulls of each of the s_r
    survivors in phase r, P(error) of `halving_error`; reward be or bd. `explore` is in tokens, by default
    `exploration_tokens` of the last budget, the one that a run of them all knows. Shape of `budgets`.
    """
    _, wasted, best, _ = _gaps(alphas, gamma, reward)
    tokens = horizons(budgets, "budget")
    survivors = len(wasted)
    if survivors == 1:
        return np.full(tokens.shape, gamma / best)
    explore = float(exploration_tokens(survivors, tokens.max())) if explore is None else explore
    phases, largest, exploring = int(np.ceil(np.log2(survivors))), np.sort(wasted)[::-1], 0.0
    while survivors > 1:
        exploring += _pulls(explore, survivors, phases, gamma) * largest[:survivors].sum()
        survivors = (survivors + 1) // 2
    return gamma / best + exploring + halving_error(alphas, gamma, explore, reward) * wasted.max() * tokens


def explore_then_commit_upper(
    alphas: ArrayLike,
    gamma: int,
    budgets: ArrayLike,
    reward: Reward,
    pulls: float | None = None,
    explore: float | None = None,
) -> FloatArray:
    """Reg <= gamma / g_* + sum_i (1 - g_i / g_*) (n + max(B - K n, 0) exp(-n Delta_i^2 / (4 sigma^2))).

    Each arm n = `pulls` times, then the best estimate throughout; reward be or bd. `pulls` is
    max(1, floor(explore / (K (gamma + 1)))) unless told, `explore` as for `halving_upper`. Shape of `budgets`.
    """
    gap, wasted, best, sigma = _gaps(alphas, gamma, reward)
    tokens, arms = horizons(budgets, "budget"), len(gap)
    if arms == 1:
        return np.full(tokens.shape, gamma / best)
    if pulls is None:
        explore = float(exploration_tokens(arms, tokens.max())) if explore is None else explore
        pulls = _pulls(explore, arms, 1, gamma)
    elif not (np.isfinite(pulls) and pulls >= 1):
        raise InputError(f"pulls: expected 1 or more, found {pulls}")
    left = np.maximum(tokens - arms * pulls, 0.0)[..., None]
    wrong = np.exp(-pulls * gap**2 / (4 * sigma**2))
    return gamma / best + (wasted * (pulls + left * wrong)).sum(axis=-1)
