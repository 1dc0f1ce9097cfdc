"""Upper confidence bounds in Kullback-Leibler divergence."""

from __future__ import annotations

import numpy as np
from scipy.special import entr, xlogy

from ..errors import InputError
from ..rewards import AcceptanceTrials
from ..rounds import FloatArray, IntArray
from .base import IndexPolicy

_TINY = 1e-300


def kl_upper(mean: FloatArray, level: FloatArray) -> FloatArray:
    """`max{a in [mean, 1] : kl(mean, a) <= level}` for the Bernoulli relative entropy; arguments broadcast.

    Newton's iteration from above: kl is convex and increasing in `a` there, so it falls monotonically to the
    root. Both starting points are upper bounds: Pinsker's, and one that is tight near 1 since
    kl(p, a) >= -H(p) - (1 - p) ln(1 - a). Solved for `1 - a`, where no digits are lost near 1.
    """
    mean, level = np.broadcast_arrays(np.clip(mean, 0.0, 1.0), np.maximum(level, 0.0))
    miss = 1.0 - mean
    entropy = entr(mean) + entr(miss)
    with np.errstate(over="ignore", under="ignore"):
        near_one = np.exp(-(level + entropy) / np.maximum(miss, _TINY))
    gap = np.maximum(miss - np.sqrt(level / 2), near_one)  # 1 - a, a lower bound of the root's
    for _ in range(8):
        gap = np.clip(gap, _TINY, 1.0)
        a = 1.0 - gap
        excess = -entropy - xlogy(mean, np.maximum(a, _TINY)) - miss * np.log(gap) - level
        slope = (miss - gap) / (gap * np.maximum(a, _TINY))  # d kl / d a = (a - p) / (a (1 - a))
        gap = gap + np.where(slope > 0, np.maximum(excess, 0.0) / np.where(slope > 0, slope, 1.0), 0.0)
    return 1.0 - np.clip(gap, 0.0, miss)


class KLUCBTrials(IndexPolicy):
    """`max{a : n_i kl(mean_i, a) <= ln t + c ln ln t}`: KL-UCB (Garivier, Cappe 2011) on acceptance trials.

    `n_i` counts the arm's acceptance trials, `t` the round about to be played. With c = 0, as in practice; the
    standard proof wants c >= 3 (`ln ln t` is clamped at 0).
    """

    def __init__(self, c: float = 0.0, objective: str = "rounds") -> None:
        super().__init__(AcceptanceTrials(), objective)
        if not (np.isfinite(c) and c >= 0):
            raise InputError(f"c: expected a finite number, 0 or larger; found {c}")
        self.c = c

    def index(self, rows: IntArray | slice) -> FloatArray:
        trials = np.maximum(self.weight[rows], _TINY)
        log_t = np.log(self.pulls[rows].sum(axis=1) + 1)
        level = log_t + self.c * np.log(np.maximum(log_t, 1.0)) if self.c else log_t
        return kl_upper(self.value[rows] / trials, level[:, None] / np.maximum(self.weight[rows], 1e-12))

    def __str__(self) -> str:
        return self.spec("kl-ucb-trials", c=self.c or None)
