"""The capped geometric law of accepted tokens under the stationary model.

Overlaps are i.i.d. with mean `alpha` and a round drafts `gamma` tokens, so P(N >= k) = alpha^k for
k <= gamma. All functions broadcast `alpha` (any shape, in [0, 1]) with integer `gamma` >= 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .errors import InputError
from .rounds import FloatArray, IntArray


def check(alpha: ArrayLike, gamma: int) -> FloatArray:
    """`alpha` as a float array; refuses values outside [0, 1] and `gamma` < 1."""
    try:
        array = np.asarray(alpha, dtype=float)
    except (TypeError, ValueError):
        raise InputError(f"alpha: expected acceptance rates in [0, 1], found {alpha!r}") from None
    if not np.all((array >= 0) & (array <= 1)):
        bad = array[~((array >= 0) & (array <= 1))].flat[0]
        raise InputError(f"alpha: expected acceptance rates in [0, 1], found {bad}")
    if not 1 <= gamma < np.inf or int(gamma) != gamma:
        raise InputError(f"gamma: expected a draft length of 1 or more tokens, found {gamma}")
    return array


def survival(alpha: ArrayLike, gamma: int) -> FloatArray:
    """P(N >= k) = alpha^k for k = 1..gamma; [..., gamma]."""
    return check(alpha, gamma)[..., None] ** np.arange(1, int(gamma) + 1)


def pmf(alpha: ArrayLike, gamma: int) -> FloatArray:
    """P(N = n) = alpha^n (1 - alpha) for n < gamma, and alpha^gamma for n = gamma; [..., gamma + 1]."""
    at_least = survival(alpha, gamma)
    padded = np.concatenate([np.ones_like(at_least[..., :1]), at_least, np.zeros_like(at_least[..., :1])], axis=-1)
    return padded[..., :-1] - padded[..., 1:]


def mean_accepted(alpha: ArrayLike, gamma: int) -> FloatArray:
    """E N = sum_{k=1..gamma} alpha^k."""
    return survival(alpha, gamma).sum(axis=-1)


def var_accepted(alpha: ArrayLike, gamma: int) -> FloatArray:
    """Var N, from E N^2 = sum_k (2k - 1) alpha^k."""
    at_least = survival(alpha, gamma)
    return (at_least * (2 * np.arange(1, int(gamma) + 1) - 1)).sum(axis=-1) - at_least.sum(axis=-1) ** 2


def tokens_per_round(alpha: ArrayLike, gamma: int) -> FloatArray:
    """g(alpha) = 1 + E N = (1 - alpha^(gamma+1)) / (1 - alpha), and gamma + 1 at alpha = 1."""
    return 1.0 + mean_accepted(alpha, gamma)


def trials_per_round(alpha: ArrayLike, gamma: int) -> FloatArray:
    """E m = (1 - alpha^gamma) / (1 - alpha), and gamma at alpha = 1."""
    at_least = survival(alpha, gamma)
    return 1.0 + at_least[..., :-1].sum(axis=-1)


def sample_accepted(alpha: ArrayLike, gamma: int, uniform: ArrayLike) -> IntArray:
    """N by inversion of its law, from one `uniform` in [0, 1) of the shape of `alpha`."""
    return np.count_nonzero(np.asarray(uniform)[..., None] < survival(alpha, gamma), axis=-1)
