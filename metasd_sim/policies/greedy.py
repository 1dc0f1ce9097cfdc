"""The best estimate, now and then any arm."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from ..environments.base import Context
from ..errors import InputError
from ..rewards import Reward
from ..rounds import FloatArray, IntArray
from .base import IndexPolicy, draw_arms


class ExploringPolicy(IndexPolicy):
    """Plays by index, but any eligible arm with a small probability once each was played."""

    @abstractmethod
    def exploration(self, rows: IntArray) -> FloatArray | float:
        """The probability, [n] or the same for all."""

    def select(self, rows: IntArray, context: Context) -> IntArray:
        arms = super().select(rows, context)
        coin, which = self.rng.random((2, len(self.pulls)))[:, rows]
        played = self.pulls[rows] > 0
        allowed = np.ones_like(played) if context.eligible is None else context.eligible
        explores = (coin < self.exploration(rows)) & (played | ~allowed).all(axis=1)
        return np.where(explores, draw_arms(allowed.astype(float), which), arms)


class EpsilonGreedy(ExploringPolicy):
    """The largest `mu_i`; with probability `epsilon`, or `min(1, decay / t)`, any eligible arm.

    Auer, Cesa-Bianchi, Fischer (2002); `t` is the round about to be played. `epsilon` is 0.1 unless told.
    """

    def __init__(
        self, reward: Reward, epsilon: float | None = None, decay: float | None = None, objective: str = "rounds"
    ) -> None:
        super().__init__(reward, objective)
        if epsilon is not None and not 0 <= epsilon <= 1:
            raise InputError(f"epsilon: expected a probability, found {epsilon}")
        if decay is not None and not (np.isfinite(decay) and decay > 0):
            raise InputError(f"decay: expected a finite number above 0, found {decay}")
        if epsilon is not None and decay is not None:
            raise InputError(f"decay: expected epsilon or decay, found both ({epsilon} and {decay}); leave one out")
        self.epsilon, self.decay = epsilon, decay

    def index(self, rows: IntArray | slice) -> FloatArray:
        return self.estimates(rows)[0]

    def exploration(self, rows: IntArray) -> FloatArray | float:
        if self.decay is None:
            return 0.1 if self.epsilon is None else self.epsilon
        return np.minimum(1.0, self.decay / (self.pulls[rows].sum(axis=1) + 1))

    def __str__(self) -> str:
        return self.spec("epsilon-greedy", reward=self.reward.name, epsilon=self.epsilon, decay=self.decay)
