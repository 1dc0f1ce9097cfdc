"""The protocol of a policy, and what index policies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ..environments.base import Context
from ..rewards import Reward
from ..rounds import FloatArray, IntArray, Rounds


@runtime_checkable
class Policy(Protocol):
    """Chooses an arm for each active row and learns from its round.

    `start` is called once for `rows` streams; `restart` at the first round of each query, where `keep` in
    [0, 1] is the share of the statistics that is carried over; `horizon` counts tokens.
    """

    needs: frozenset[str]

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None: ...

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None: ...

    def select(self, rows: IntArray, context: Context) -> IntArray: ...

    def update(self, rows: IntArray, rounds: Rounds) -> None: ...


def parameter(value: float) -> str:
    """Short where that is exact, so that a policy's name makes the same policy again."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def argmax_random(index: FloatArray, uniform: FloatArray) -> IntArray:
    """Arm with the largest index in each row, ties broken by `uniform` in [0, 1).

    index [n, arms], uniform [n] -> arms [n].
    """
    tied = index == index.max(axis=1, keepdims=True)
    arm = tied.argmax(axis=1)
    if np.count_nonzero(tied) > len(tied):
        count = np.count_nonzero(tied, axis=1)
        rows = np.flatnonzero(count > 1)
        nth = (uniform[rows] * count[rows]).astype(np.int64)
        arm[rows] = (tied[rows].cumsum(axis=1) > nth[:, None]).argmax(axis=1)
    return arm


class IndexPolicy(ABC):
    """Plays the eligible arm with the largest index, each eligible arm once first, ties at random.

    Statistics per row and arm: pulls, and the sums of the reward's values and weights.
    """

    play_each_first: bool = True

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self.needs = reward.needs

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.rng = rng
        self.max_draft = max_draft
        # an arm's column is contiguous: there are many rows and few arms
        self.pulls = np.zeros((rows, len(arms)), order="F")  # [rows, arms]
        self.value = np.zeros((rows, len(arms)), order="F")  # [rows, arms]
        self.weight = np.zeros((rows, len(arms)), order="F")  # [rows, arms]

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        for statistic in (self.pulls, self.value, self.weight):
            statistic[rows] *= keep

    @abstractmethod
    def index(self, rows: IntArray | slice) -> FloatArray:
        """A new array [n, arms]; entries of arms without pulls are not looked at."""

    def select(self, rows: IntArray, context: Context) -> IntArray:
        total = len(self.pulls)
        # row numbers increase, so as many as there are means all of them: a view instead of a copy
        view = slice(None) if len(rows) == total else rows
        # one draw per row of the whole batch: a row's luck does not depend on which others still run
        uniform = self.rng.random(total)[view]
        index = self.index(view)
        if self.play_each_first:
            index[self.pulls[view] == 0] = np.inf
        if context.eligible is not None:
            index[~context.eligible] = -np.inf
        return argmax_random(index, uniform)

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        value, weight = self.reward(rounds)
        at = rounds.arm * len(self.pulls) + rows  # in the columns one after the other
        self.pulls.T.reshape(-1)[at] += 1
        self.value.T.reshape(-1)[at] += value
        self.weight.T.reshape(-1)[at] += weight
