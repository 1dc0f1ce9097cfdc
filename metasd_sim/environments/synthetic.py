"""Synthetic rounds from a stated law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from .. import acceptance
from ..costs import CostModel, RoundClock
from ..errors import InputError
from ..rounds import BoolArray, FloatArray, IntArray, Rounds, view_of
from .base import (
    BLOCK_OVERLAP,
    EVERY_ARM,
    OVERLAP,
    SECONDS,
    TRUTH,
    Context,
    FixedArms,
    StreamTruth,
)
from .laws import OVERLAPS, RoundLaw, beta_atoms
from .renewal import stationary_rounds


class SyntheticEnvironment(StreamTruth):
    """Rounds of a `RoundLaw`, whose segment may depend on the row and its position, with the seconds of `costs`."""

    queries = 1
    endless = True
    scopes: tuple[str, ...] = ("stream",)  # over which the best arm may differ
    is_stationary_model = False  # the model of `bounds`: i.i.d. overlaps, one full draft length

    def __init__(self, law: RoundLaw, costs: CostModel | None, names: Sequence[str]) -> None:
        self.law, self.costs, self.arms = law, costs, tuple(names)
        if len(self.arms) != len(law.lengths) or len(set(self.arms)) != len(self.arms):
            raise InputError(f"names: expected {len(law.lengths)} different names, found {', '.join(self.arms)}")
        self.draft_lengths, self.max_draft = law.lengths, law.max_draft
        if costs is not None and costs.draft.shape != (len(self.arms), self.max_draft + 1):
            shape = [len(self.arms), self.max_draft + 1]
            raise InputError(f"costs: expected draft of shape {shape}, found {list(costs.draft.shape)}")
        self.gives = frozenset({OVERLAP, BLOCK_OVERLAP, EVERY_ARM, TRUTH} | ({SECONDS} if costs else set()))
        self._moves = costs is not None or len(law.alphas) > 1  # whether a row's position matters

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self.done: BoolArray = np.zeros(rows, dtype=bool)
        self._needs = needs
        self._fresh = np.ones(rows, dtype=bool)
        self._position = np.zeros(rows, dtype=np.int64)
        self._clock = None if self.costs is None else RoundClock(self.costs, rows)
        self.law.reset(rows, rng, needs)

    def observe(self, rows: IntArray) -> Context:
        view = view_of(rows, len(self._fresh))
        context = Context(query=np.zeros(len(rows), dtype=np.int64), new_query=self._fresh[view].copy())
        context.truth = lambda scope, objective: self.truth(rows, scope, objective)
        self._fresh[view] = False
        return context

    def _segment(self, rows: IntArray) -> IntArray | int:
        """Segment of the law in which the rows' next rounds start."""
        return 0

    def _left(self, rows: IntArray) -> IntArray | None:
        """Tokens left of the rows' texts; None where they never end."""
        return None

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        drafted, accepted, overlap, every_arm = self.law.draw(rows, self._segment(rows), arms)
        left = self._left(rows)
        emitted = accepted + 1
        if left is not None:
            drafted = np.minimum(drafted, left)
            accepted = np.minimum(accepted, left)
            emitted = np.minimum(emitted, left)
        if overlap is not None:
            depth = np.arange(self.max_draft)
            overlap[depth >= (drafted if BLOCK_OVERLAP in self._needs else np.minimum(drafted, emitted))[:, None]] = (
                np.nan
            )
            if not self._needs & {OVERLAP, BLOCK_OVERLAP}:
                overlap = None
        if every_arm is not None:
            past = np.arange(self.max_draft + 1) >= emitted[:, None]
            every_arm[np.broadcast_to(past[:, None], every_arm.shape)] = np.nan
        seconds = None
        if self._moves:
            position = self._position[rows]
            if self._clock is not None:
                seconds = self._clock.seconds(rows, arms, drafted, position, emitted, every_arm is not None)
            self._position[rows] = position + emitted
        return Rounds(arms, drafted, accepted, emitted, self.max_draft, seconds, overlap, every_arm)

    def seconds_per_round(self, most: int | None = None) -> FloatArray | None:
        """c_i without catch-up, drafts cut at `most` tokens; a silent round costs a draft of nothing. [arms]"""
        if self.costs is None:
            return None
        arms, lengths = np.arange(len(self.arms)), self.law.lengths
        drafting = self.costs.seconds(arms, lengths if most is None else np.minimum(lengths, most))
        return (1 - self.law.silent) * drafting + self.law.silent * self.costs.seconds(arms, np.zeros_like(lengths))

    def truth(self, rows: IntArray, scope: str, objective: str) -> FloatArray:
        """Tokens per round of each arm over the scope, or per second without catch-up; [n, arms]."""
        if scope == "stream" and self.horizon is not None:
            return np.tile(self.stream_truth(objective, self.horizon), (len(rows), 1))
        tokens = np.broadcast_to(self._tokens_of(scope, self._segment(rows)), (len(rows), len(self.arms)))
        return tokens / (1.0 if objective == "rounds" else self._seconds_or_refuse())

    def _tokens_of(self, scope: str, segment: IntArray | int) -> FloatArray:
        """Tokens per round, [arms] or [n, arms]."""
        return self.law.tokens[segment]

    def _seconds_or_refuse(self) -> FloatArray:
        seconds = self.seconds_per_round()
        if seconds is None:
            raise InputError("objective: expected rounds from an environment without costs, found time")
        return seconds


class StationaryEnvironment(SyntheticEnvironment):
    """Arms whose overlaps are i.i.d. with mean `alpha`; given the overlaps, acceptances are independent Bernoulli.

    `draft_length` and `silent` are one for all arms or one each; `RoundLaw` says what the other parameters do, which
    leave the i.i.d. model. With `costs` it gives seconds.
    """

    def __init__(
        self,
        alphas: ArrayLike,
        draft_length: int | Sequence[int] = 5,
        overlaps: str = "beta",
        concentration: float = 5.0,
        costs: CostModel | None = None,
        names: Sequence[str] | None = None,
        decay: float = 1.0,
        silent: ArrayLike = 0.0,
        block_correlation: float = 0.0,
        arm_correlation: float = 0.0,
    ) -> None:
        self.alphas = np.atleast_1d(acceptance.check(alphas, 1))  # [arms]
        if self.alphas.ndim != 1 or not self.alphas.size:
            raise InputError(f"alphas: expected one acceptance rate per arm, found shape {list(self.alphas.shape)}")
        law = RoundLaw(
            self.alphas[None], draft_length, overlaps, concentration, decay, silent, block_correlation, arm_correlation
        )
        super().__init__(law, costs, arm_names(self.alphas[None]) if names is None else names)
        self.overlaps, self.concentration = overlaps, concentration

    @property
    def is_stationary_model(self) -> bool:  # type: ignore[override]
        """Whether `bounds` holds: overlaps i.i.d. over depths and rounds, and every arm drafts `max_draft` tokens."""
        return self.law.is_geometric and bool(np.all(self.draft_lengths == self.max_draft))

    def tokens_per_round(self) -> FloatArray:
        """g_i of each arm; [arms]."""
        return self.law.tokens[0]

    def fixed_arms(self, budgets: IntArray) -> FixedArms:
        """Seconds by Wald's identity."""
        rounds = np.stack([stationary_rounds(law, np.asarray(budgets)) for law in self.law.pmf()[0]], axis=1)
        price = self.seconds_per_round()
        if self.costs is None or price is None:
            return FixedArms(rounds, tokens_per_round=self.tokens_per_round())
        return FixedArms(rounds, rounds * price, self.tokens_per_round(), plain=self.costs.plain)


def arm_names(alphas: FloatArray) -> tuple[str, ...]:
    """An arm's rates as its name, `0.9` or `0.9/0.2` of two segments; equal ones are numbered, `0.5#1`, `0.5#2`."""
    texts = ["/".join(f"{alpha:g}" for alpha in column) for column in alphas.T]
    if len(alphas) > 4:
        texts = [f"arm{i}" for i in range(len(texts))]
    seen: dict[str, int] = {}
    names = []
    for text in texts:
        seen[text] = seen.get(text, 0) + 1
        names.append(f"{text}#{seen[text]}" if texts.count(text) > 1 else text)
    return tuple(names)


__all__ = ["OVERLAPS", "StationaryEnvironment", "SyntheticEnvironment", "arm_names", "beta_atoms"]
