"""Policies that do not learn: one arm throughout, any at random, or all in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..environments.base import Context
from ..errors import InputError
from ..rounds import IntArray, Rounds


class FixedArm:
    """Plays one arm, by name or index; where it is not eligible, the first arm that is."""

    needs: frozenset[str] = frozenset()

    def __init__(self, arm: str | int) -> None:
        self.arm = arm

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        if isinstance(self.arm, str):
            if self.arm not in arms:
                raise InputError(f"fixed: expected one of the arms {', '.join(arms)}; found {self.arm!r}")
            self.chosen = list(arms).index(self.arm)
        else:
            if not 0 <= self.arm < len(arms):
                raise InputError(f"fixed: expected an arm's index in 0..{len(arms) - 1}, found {self.arm}")
            self.chosen = self.arm

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        pass

    def select(self, rows: IntArray, context: Context) -> IntArray:
        arms = np.full(len(rows), self.chosen)
        if context.eligible is not None:
            arms = np.where(context.eligible[:, self.chosen], arms, context.eligible.argmax(axis=1))
        return arms

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        pass

    def __str__(self) -> str:
        return f"fixed:{self.arm}" if isinstance(self.arm, str) else f"fixed:#{self.arm}"  # no arm named "0"


class RandomArm:
    """Plays any eligible arm with equal probability."""

    needs: frozenset[str] = frozenset()

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.rows, self.arms, self.rng = rows, len(arms), rng

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        pass

    def select(self, rows: IntArray, context: Context) -> IntArray:
        uniform = self.rng.random(self.rows)[rows]
        if context.eligible is None:
            return (uniform * self.arms).astype(np.int64)
        up_to = context.eligible.cumsum(axis=1)  # [n, arms]
        nth = (uniform * up_to[:, -1]).astype(np.int64)
        return (up_to > nth[:, None]).argmax(axis=1)

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        pass

    def __str__(self) -> str:
        return "random"


class RoundRobin:
    """Plays the eligible arms in turn, each row from a random one on."""

    needs: frozenset[str] = frozenset()

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.arms, self.rng = len(arms), rng
        self.last = np.full(rows, -1)  # [rows] the arm just played, -1 before the first

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        if keep == 0:
            self.last[rows] = -1

    def select(self, rows: IntArray, context: Context) -> IntArray:
        uniform = self.rng.random(len(self.last))[rows]
        last = np.where(self.last[rows] < 0, (uniform * self.arms).astype(np.int64), self.last[rows])
        turn = (np.arange(self.arms) - last[:, None] - 1) % self.arms  # [n, arms] 0: the next one
        if context.eligible is not None:
            turn[~context.eligible] = self.arms
        chosen = turn.argmin(axis=1)
        self.last[rows] = chosen
        return chosen

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        pass

    def __str__(self) -> str:
        return "round-robin"
