"""Oracles: what a policy that knows the truth would do, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..environments.base import OBJECTIVES, SCOPES, SECONDS, TRUTH, Context
from ..errors import InputError
from ..rounds import IntArray, Rounds
from .base import argmax_random


class Oracle:
    """`argmax_i` of the arm's true tokens per round, or per second with the objective "time", over its scope.

    `stream` is the best fixed arm up to the (last) budget, `segment` the best of each stretch with one law, `query`
    that of each query. `round` is myopic: best in expectation over the next round alone, and so not the optimum over
    the text, which would also weigh where the round leaves it (and, in seconds, which arms it leaves behind).
    """

    positional = "scope"

    def __init__(self, scope: str = "stream", objective: str = "rounds") -> None:
        for name, value, known in (("scope", scope, SCOPES), ("objective", objective, OBJECTIVES)):
            if value not in known:
                raise InputError(f"{name}: expected one of {', '.join(known)}; found {value!r}")
        self.scope, self.objective = scope, objective
        self.needs = frozenset({TRUTH} | ({SECONDS} if objective == "time" else set()))

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.uniform = rng.random(rows)  # [rows] breaks ties, always the same way: one arm throughout a scope

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        pass

    def select(self, rows: IntArray, context: Context) -> IntArray:
        if context.truth is None:
            raise InputError("truth: expected the environment's truth, found none; choose a policy that learns")
        value = context.truth(self.scope, self.objective)
        if context.eligible is not None:
            value = np.where(context.eligible, value, -np.inf)
        return argmax_random(value, self.uniform[rows])

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        pass

    def __str__(self) -> str:
        parts = [self.scope] if self.scope != "stream" else []
        parts += [f"objective={self.objective}"] if self.objective != "rounds" else []
        return ":".join(["oracle", ",".join(parts)] if parts else ["oracle"])
