"""Thompson sampling."""

from __future__ import annotations

import numpy as np

from ..errors import InputError
from ..rewards import AcceptanceTrials
from ..rounds import FloatArray, IntArray
from .base import IndexPolicy, active


class ThompsonTrials(IndexPolicy):
    """A draw of each arm's Beta(prior_a + successes, prior_b + failures) on acceptance trials; the largest plays.

    Thompson (1933), with a uniform prior by default. The prior stands in for the first pulls: no arm is forced.
    The sampler rejects, so a row's draws, though never their law, depend on which other rows are still running.
    """

    play_each_first = False

    def __init__(self, prior_a: float = 1.0, prior_b: float = 1.0, objective: str = "rounds") -> None:
        super().__init__(AcceptanceTrials(), objective)
        for name, value in (("prior_a", prior_a), ("prior_b", prior_b)):
            if not (np.isfinite(value) and value > 0):
                raise InputError(f"{name}: expected a finite number above 0, found {value}")
        self.prior = (prior_a, prior_b)

    def index(self, rows: IntArray | slice) -> FloatArray:
        # transposed: the generator reads and writes in C order, and an arm's column is what is contiguous here
        successes, trials = active(self.value, rows).T, active(self.weight, rows).T
        return self.rng.beta(self.prior[0] + successes, self.prior[1] + trials - successes).T

    def __str__(self) -> str:
        a, b = self.prior
        uniform = a == b == 1
        return self.spec("thompson-trials", prior_a=None if uniform else a, prior_b=None if uniform else b)
