"""Environments around another one: noisy or lost feedback, and a price for changing the arm. They nest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import InputError
from ..rounds import BoolArray, FloatArray, IntArray, Rounds
from .base import OVERLAP, SECONDS, Context, Environment, FixedArms
from .laws import share


class Wrapper:
    """All of `inner`, unless a subclass says otherwise. The inner rounds are those of the bare environment."""

    is_stationary_model = False  # `bounds` knows nothing of what a wrapper changes

    def __init__(self, inner: Environment) -> None:
        self.inner = inner
        self.arms, self.max_draft, self.queries, self.gives = inner.arms, inner.max_draft, inner.queries, inner.gives

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def horizon(self) -> int | None:
        return self.inner.horizon  # type: ignore[attr-defined]

    @horizon.setter
    def horizon(self, tokens: int | None) -> None:
        self.inner.horizon = tokens  # type: ignore[attr-defined]

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self.inner.reset(rows, rng, needs)
        self.done: BoolArray = self.inner.done
        self._rows, self._rng = rows, rng.spawn(1)[0]

    def observe(self, rows: IntArray) -> Context:
        return self.inner.observe(rows)

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        return self.inner.step(rows, arms)

    def fixed_arms(self, budgets: IntArray) -> FixedArms | None:
        return self.inner.fixed_arms(budgets)


class NoisyFeedback(Wrapper):
    """With `probability` the policy is shown a uniform number of accepted tokens, 0..drafted, instead of the true one.

    Not so a policy that needs the overlaps of verified positions: these are as many as the true number says, so it
    sees that number (another one would call positions verified that have no overlap, or leave out the rejected one).
    `overlap_noise` is the standard deviation of Gaussian noise on every overlap, cut to [0, 1].
    """

    def __init__(self, inner: Environment, probability: float = 0.1, overlap_noise: float = 0.0) -> None:
        super().__init__(inner)
        self.probability = float(share("probability", probability))
        if not 0 <= overlap_noise < np.inf:
            raise InputError(f"overlap_noise: expected a standard deviation of 0 or more, found {overlap_noise}")
        self.overlap_noise = overlap_noise

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        super().reset(rows, rng, needs)
        self._miscount = 0.0 if OVERLAP in needs else self.probability

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        rounds = self.inner.step(rows, arms)
        shown = rounds if rounds.feedback is None else rounds.feedback
        wrong, uniform = self._rng.random((2, self._rows))[:, rows]
        accepted = np.where(wrong < self._miscount, (uniform * (shown.drafted + 1)).astype(np.int64), shown.accepted)
        cut = shown.emitted == shown.accepted  # the text left no more tokens than these
        emitted = np.where(cut, np.minimum(accepted + 1, shown.emitted), accepted + 1)
        feedback = replace(
            shown,
            accepted=accepted,
            emitted=emitted,
            overlap=self._disturb(shown.overlap, rows),
            every_arm=self._disturb(shown.every_arm, rows),
            feedback=None,
            seen=None,
        )
        return replace(rounds, feedback=feedback)

    def _disturb(self, overlap: FloatArray | None, rows: IntArray) -> FloatArray | None:
        if overlap is None or not self.overlap_noise:
            return overlap
        noise = self._rng.standard_normal((self._rows, *overlap.shape[1:]))[rows]
        return np.clip(overlap + self.overlap_noise * noise, 0.0, 1.0)


class LostFeedback(Wrapper):
    """The policy learns nothing of a round, with `probability`; it was played and counts all the same."""

    def __init__(self, inner: Environment, probability: float = 0.1) -> None:
        super().__init__(inner)
        self.probability = float(share("probability", probability))

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        rounds = self.inner.step(rows, arms)
        seen = self._rng.random(self._rows)[rows] >= self.probability
        return replace(rounds, seen=seen if rounds.seen is None else seen & rounds.seen)


class SwitchingCost(Wrapper):
    """Adds `seconds` to each round whose arm differs from the row's last one. A fixed arm never pays."""

    def __init__(self, inner: Environment, seconds: float = 0.1) -> None:
        super().__init__(inner)
        if SECONDS not in inner.gives:
            raise InputError("switching cost: expected an environment with seconds, found none; give it costs")
        if not 0 <= seconds < np.inf:
            raise InputError(f"seconds: expected a switch to cost 0 seconds or more, found {seconds}")
        self.seconds = seconds

    @property
    def is_stationary_model(self) -> bool:  # type: ignore[override]
        """Bounds are of rounds, which cost what they did."""
        return getattr(self.inner, "is_stationary_model", False)

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        super().reset(rows, rng, needs)
        self._last: IntArray = np.full(rows, -1)

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        rounds = self.inner.step(rows, arms)
        extra = self.seconds * ((arms != self._last[rows]) & (self._last[rows] >= 0))
        self._last[rows] = arms
        feedback = rounds.feedback
        if feedback is not None and feedback.seconds is not None:
            feedback = replace(feedback, seconds=feedback.seconds + extra)
        assert rounds.seconds is not None
        return replace(rounds, seconds=rounds.seconds + extra, feedback=feedback)
