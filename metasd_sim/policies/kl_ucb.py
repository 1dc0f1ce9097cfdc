"""KL-UCB: upper confidence bounds from the Bernoulli relative entropy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import entr

from ..environments.base import Context
from ..errors import InputError
from ..rewards import AcceptanceTrials, Reward, VerifiedFractions
from ..rounds import BoolArray, FloatArray, IntArray, Rounds
from .base import TINY, IndexPolicy, argmax_random

_TINY = 1e-300


def kl_upper(mean: FloatArray, level: FloatArray) -> FloatArray:
    """`max{a in [mean, 1] : kl(mean, a) <= level}` for the Bernoulli relative entropy; arguments broadcast.

    Householder's third-order iteration on `f(g) = kl(mean, 1 - g) - level`, where no digits are lost near a = 1. It
    starts from lower bounds of the root: Pinsker's, and one that is tight near 1 since
    kl(p, a) >= -H(p) - (1 - p) ln(1 - a). Five steps leave an error of 1e-10 at most.
    """
    mean, level = np.broadcast_arrays(np.clip(mean, 0.0, 1.0), np.maximum(level, 0.0))
    miss = 1.0 - mean
    target = level + entr(mean) + entr(miss)
    with np.errstate(over="ignore", under="ignore"):
        near_one = np.exp(-target / np.maximum(miss, _TINY))
    gap = np.maximum(miss - np.sqrt(0.5 * level), near_one)
    for _ in range(5):
        gap = np.clip(gap, _TINY, 1.0)
        a = np.maximum(1.0 - gap, _TINY)
        f = -mean * np.log(a) - miss * np.log(gap) - target
        # with x = miss - gap and ga = gap a, the derivatives are -x / ga, n2 / ga^2, 2 n3 / ga^3
        x = np.maximum(miss - gap, 0.0)
        ga, square = gap * a, gap * gap
        n2 = mean * square + miss * a * a
        n3 = mean * square * gap - miss * a * a * a
        fn2 = f * n2
        down = x * (x * x - fn2) - f * f * n3 / 3
        up = f * ga * (x * x - 0.5 * fn2)
        gap = gap + up / (down + _TINY)  # both may vanish, at the root
    return 1.0 - np.clip(gap, 0.0, miss)


class KLUCB(IndexPolicy):
    """`max{a : n_i kl(mean_i, a) <= ln t + c ln ln t}`: KL-UCB (Garivier, Cappe 2011) on samples in [0, 1].

    `n_i` counts the arm's samples (the reward's weight), `t` the round about to be played. With c = 0, as in practice;
    the standard proof wants c >= 3 (`ln ln t` is clamped at 0).
    """

    name: str

    def __init__(self, reward: Reward, c: float, objective: str) -> None:
        super().__init__(reward, objective)
        if not (np.isfinite(c) and c >= 0):
            raise InputError(f"c: expected a finite number, 0 or larger; found {c}")
        self.c = c

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        super().start(rows, arms, max_draft, rng, horizon)
        self.entropy = np.zeros((rows, len(arms)), order="F")  # [rows, arms] n_i H(mean_i)
        self.numbers = np.arange(len(arms), dtype=np.int16)[:, None]
        self.between = np.full(rows, 0.5)  # [rows] a guess between the two largest indices

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        super().restart(rows, keep, horizon)
        self.entropy[rows] *= keep

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        super().update(rows, rounds)
        at = rounds.arm * len(self.pulls) + rows
        value, weight = self.value.T.reshape(-1)[at], self.weight.T.reshape(-1)[at]
        failures = np.maximum(weight - value, 0.0)
        self.entropy.T.reshape(-1)[at] = -value * np.log(np.maximum(value, _TINY) / weight) - failures * np.log(
            np.maximum(failures, _TINY) / weight
        )

    def level(self, rows: IntArray | slice) -> FloatArray:
        """`ln t + c ln ln t`; [n]."""
        log_t = np.log(self.pulls[rows].sum(axis=1) + 1)
        return log_t + self.c * np.log(np.maximum(log_t, 1.0)) if self.c else log_t

    def index(self, rows: IntArray | slice) -> FloatArray:
        weight = self.weight[rows]
        return kl_upper(
            self.value[rows] / np.maximum(weight, _TINY), self.level(rows)[:, None] / np.maximum(weight, 1e-12)
        )

    def select(self, rows: IntArray, context: Context) -> IntArray:
        """The same arms as by `index`, mostly without solving for it."""
        if self.objective == "time" or context.eligible is not None:
            return super().select(rows, context)
        total = len(self.pulls)
        view = slice(None) if len(rows) == total else rows
        uniform = self.rng.random(total)[view]
        arms, alone = self._alone(view)
        rest = np.flatnonzero(~alone)
        if rest.size:  # once more, from a better guess
            arms[rest], alone[rest] = self._alone(rows[rest])
            rest = rest[~alone[rest]]
        if rest.size:
            some = rows[rest]
            index = self.index(some)
            self._guess(some, index.max(axis=1))
            index[self.pulls[some] == 0] = np.inf
            arms[rest] = argmax_random(index, uniform[rest])
        return arms

    def _alone(self, view: IntArray | slice) -> tuple[IntArray, BoolArray]:
        """The arm whose index alone is u or more, hence the largest, and whether there is just one such arm; [n].

        An arm's index is at least u if its mean is, or if n kl(mean, u) <= level: no equation to solve. Each row tries
        one u, midway between the two largest indices as Newton's step puts them from the row's last u.
        """
        value, weight, entropy = self.value[view].T, self.weight[view].T, self.entropy[view].T  # [arms, n]
        failures = weight - value
        known = entropy + self.level(view)

        def excess(u: FloatArray) -> FloatArray:
            """n kl(mean, u) - level, [arms, n]."""
            cost = value * -np.log(u)
            cost -= failures * np.log(1.0 - u)
            cost -= known
            return cost

        u = self.between[view]
        beyond = weight * u
        beyond -= value
        newton = excess(u)
        newton *= u * (u - 1.0)
        newton /= np.maximum(beyond, TINY)  # below 0 where the mean is beyond u
        newton += u
        first, second = newton[0], np.full(len(u), -np.inf)
        for other in newton[1:]:
            second = np.maximum(second, np.minimum(first, other))
            first = np.maximum(first, other)
        u = self._guess(view, 0.5 * (first + second))
        above = excess(u) <= 0
        above |= value >= weight * u
        count = np.add.reduce(above, axis=0, dtype=np.int16)
        arms = np.add.reduce(above * self.numbers, axis=0, dtype=np.int64)  # where there is one
        return arms, count == 1

    def _guess(self, view: IntArray | slice, u: FloatArray) -> FloatArray:
        """Stores `u`, kept where logarithms are finite."""
        self.between[view] = u = np.minimum(np.maximum(u, 1e-12), 1.0 - 1e-12)
        return u

    def __str__(self) -> str:
        return self.spec(self.name, c=self.c or None)


class KLUCBTrials(KLUCB):
    """KL-UCB on acceptance trials: each accept or reject bit is a Bernoulli sample."""

    name = "kl-ucb-trials"

    def __init__(self, c: float = 0.0, objective: str = "rounds") -> None:
        super().__init__(AcceptanceTrials(), c, objective)


class KLUCBOverlap(KLUCB):
    """KL-UCB on verified overlaps: each `beta_j` of a verified position is a sample, a fraction instead of a bit.

    The Bernoulli kl bounds any variable in [0, 1]: `E exp(s X) <= 1 + E X (e^s - 1)` (Garivier, Cappe 2011).
    """

    name = "kl-ucb-overlap"

    def __init__(self, c: float = 0.0, objective: str = "rounds") -> None:
        super().__init__(VerifiedFractions(self.name), c, objective)
