"""What every bound is made of: the instance, relative entropy, and regret from pulls or from a root of the time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import rel_entr

from .. import acceptance
from ..errors import InputError
from ..rewards import Reward
from ..rounds import BoolArray, FloatArray


def instance(alphas: ArrayLike, gamma: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """alphas, g_i and the weights 1 - g_i / g_* of the arms."""
    rates = np.atleast_1d(acceptance.check(alphas, gamma))
    if rates.ndim != 1 or not rates.size:
        raise InputError(f"alphas: expected acceptance rates, one per arm, found shape {list(rates.shape)}")
    g = acceptance.tokens_per_round(rates, gamma)
    return rates, g, 1 - g / g.max()


def horizons(rounds: ArrayLike, name: str = "horizon") -> FloatArray:
    """`rounds` as floats; refuses any under 1, or infinite."""
    return _at_least(1, rounds, name)


def _at_least(least: float, rounds: ArrayLike, name: str) -> FloatArray:
    horizon = np.asarray(rounds, dtype=float)
    bad = horizon[~((horizon >= least) & (horizon < np.inf))]
    if bad.size:
        raise InputError(f"bound: expected a finite {name} of {least:g} or more, found {bad.flat[0]:g}")
    return horizon


def regret_horizon(arms: int, rounds: ArrayLike) -> FloatArray:
    """`rounds`, 0 or more, as floats, of a regret over `arms`, 1 or more."""
    if not (arms >= 1 and int(arms) == arms):
        raise InputError(f"bound: expected 1 arm or more, found {arms}")
    return _at_least(0, rounds, "number of rounds")


def kl(p: ArrayLike, q: ArrayLike) -> FloatArray:
    """Relative entropy of Bernoulli laws, p ln(p/q) + (1 - p) ln((1 - p)/(1 - q)), in nats."""
    p, q = np.asarray(p, dtype=float), np.asarray(q, dtype=float)
    return rel_entr(p, q) + rel_entr(1 - p, 1 - q)


def sub_gaussian(reward: Reward, gamma: int, allowed: tuple[type, ...]) -> float:
    """The reward's sigma; refuses a reward that the bound is not derived for."""
    sigma = reward.sigma(gamma)
    if sigma is None or not isinstance(reward, allowed):
        names = ", ".join(kind.name for kind in allowed)  # type: ignore[attr-defined]
        raise InputError(f"bound: expected a reward with a known sigma ({names}); found {reward.name}")
    return sigma


def pace(alphas: ArrayLike, gamma: int, seconds: ArrayLike) -> tuple[FloatArray, FloatArray, float]:
    """The arms' c_i, what a round of each wastes, c_i - g_i r (0 for the best), and r = min_i c_i / g_i; in seconds."""
    rates, g, _ = instance(alphas, gamma)
    cost = np.asarray(seconds, dtype=float)
    if cost.shape not in ((), rates.shape) or not np.all(np.isfinite(cost) & (cost > 0)):
        raise InputError(f"seconds: expected seconds per round above 0, one number or one per arm; found {seconds!r}")
    cost = np.broadcast_to(cost, rates.shape)
    per_token = float((cost / g).min())
    wasted = cost - g * per_token
    return cost, np.where(wasted > 1e-12 * cost, wasted, 0.0), per_token


def rate_of_tokens(tokens: ArrayLike, gamma: int) -> FloatArray:
    """The rate `a` with g(a) = `tokens`, by bisection; inf where not even a = 1 gives as many."""
    wanted = np.asarray(tokens, dtype=float)
    low, high = np.zeros_like(wanted), np.ones_like(wanted)
    for _ in range(60):
        middle = (low + high) / 2
        above = acceptance.tokens_per_round(middle, gamma) >= wanted
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.where(wanted > gamma + 1, np.inf, high)


def weighted_sum(wasted: FloatArray, pulls: FloatArray) -> FloatArray:
    """sum_i wasted_i pulls_i over the arms that waste anything; pulls [..., arms], inf allowed at the others."""
    worse: BoolArray = wasted > 0
    return (wasted[worse] * pulls[..., worse]).sum(axis=-1)


def rooted(regret: Callable[[FloatArray], FloatArray], budgets: FloatArray, best: float, gamma: int) -> FloatArray:
    """Bound on sum_i (1 - g_i / g_*) E n_i <= regret(E tau), `regret` increasing and concave in the rounds.

    tau <= B, and E tau <= (B + gamma) / g_* + the sum itself, so each turn of the loop bounds it again, and better.
    """
    bound = regret(budgets)
    for _ in range(50):
        bound = np.minimum(bound, regret(np.minimum(budgets, (budgets + gamma) / best + bound)))
    return bound
