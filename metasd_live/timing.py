"""Where the time of live rounds goes, outside the models: to the policy and to the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from metasd_sim.environments.base import Context
from metasd_sim.policies import Policy
from metasd_sim.rounds import IntArray, Rounds

if TYPE_CHECKING:
    from .decode import Text


@dataclass
class _Step:
    rows: list[int]
    start: float
    policy_seconds: float


class TimedPolicy:
    """The policy, with the seconds of its calls noted step by step."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.needs = policy, policy.needs
        self.steps: list[_Step] = []
        self._restarted: tuple[float, float] | None = None  # when and for how long, before the next step

    def __str__(self) -> str:
        return str(self.policy)

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.policy.start(rows, arms, max_draft, rng, horizon)

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        start = time.perf_counter()
        self.policy.restart(rows, keep, horizon)
        self._restarted = start, time.perf_counter() - start

    def select(self, rows: IntArray, context: Context) -> IntArray:
        start = time.perf_counter()
        arms = self.policy.select(rows, context)
        begun, restart = self._restarted or (start, 0.0)
        self.steps.append(_Step(rows.tolist(), begun, restart + time.perf_counter() - start))
        self._restarted = None
        return arms

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        start = time.perf_counter()
        self.policy.update(rows, rounds)
        self.steps[-1].policy_seconds += time.perf_counter() - start

    def account(self, texts: Sequence[Sequence[Text]]) -> None:
        """Adds to the rounds of `texts` [rows][queries], all played by now, what the policy and the loop took.

        A step ends where the next one starts; a prefill between them belongs to neither. Rows share alike.
        """
        end = time.perf_counter()
        queues = [_rounds(own) for own in texts]
        for i, step in enumerate(self.steps):
            whole = (self.steps[i + 1].start if i + 1 < len(self.steps) else end) - step.start
            played = [next(queues[row]) for row in step.rows]
            models = sum(text.rounds[j].seconds for text, j, _ in played) + sum(prefill for _, _, prefill in played)
            share = 1 / len(played)
            for text, j, _ in played:
                rest = max(whole - models - step.policy_seconds, 0.0)
                text.rounds[j] = replace(
                    text.rounds[j], policy_seconds=share * step.policy_seconds, rest_seconds=share * rest
                )


def _rounds(texts: Sequence[Text]) -> Iterator[tuple[Text, int, float]]:
    """A row's rounds in order: text, number, seconds of the prefill that follows."""
    for text, after in zip(texts, [*texts[1:], None], strict=True):
        for j in range(len(text.rounds)):
            last = j + 1 == len(text.rounds) and after is not None
            yield text, j, after.prefill_seconds if last and after is not None else 0.0
