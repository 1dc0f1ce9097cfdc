"""The protocol of a source of rounds: synthetic, replayed or live."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from ..errors import InputError
from ..rounds import BoolArray, FloatArray, IntArray, Rounds

# What an environment may give and a policy may need.
OVERLAP = "overlap"  # overlaps of the verified positions
BLOCK_OVERLAP = "block_overlap"  # overlaps of all drafted positions, after a rejection too
SECONDS = "seconds"
EVERY_ARM = "every_arm"  # full information: every arm scored on the emitted tokens
FEATURES = "features"
TRUTH = "truth"  # oracles only
SCOPES = ("stream", "segment", "query", "round")  # over which an oracle knows the best arm
OBJECTIVES = ("rounds", "time")
SIGNALS = frozenset({OVERLAP, BLOCK_OVERLAP, SECONDS, EVERY_ARM, FEATURES, TRUTH})


@dataclass(slots=True)
class Context:
    """What a policy may know before it chooses arms for `n` rows."""

    query: IntArray  # [n] index of the row's query
    new_query: BoolArray  # [n] this is the query's first round
    eligible: BoolArray | None = None  # [n, arms]; None: every arm
    horizon: IntArray | None = None  # [n] tokens the query may emit; never the length it will have
    features: FloatArray | None = None  # [n, d] of the prompt
    # truth(scope, objective) -> [n, arms]: the arm's expected tokens per round, or per second, over the row's whole
    # stream, segment or query, or its next round (SCOPES, OBJECTIVES); the largest is best. For oracles only.
    truth: Callable[[str, str], FloatArray] | None = None


@dataclass(frozen=True)
class FixedArms:
    """Exact expectations of playing one arm throughout: the comparators of regret."""

    rounds: FloatArray  # [budgets, arms] E tau
    seconds: FloatArray | None = None  # [budgets, arms]
    tokens_per_round: FloatArray | None = None  # [arms] g_i, only where rounds are identically distributed
    query_rounds: FloatArray | None = None  # [queries, arms] E tau of each whole query
    query_seconds: FloatArray | None = None  # [queries, arms]
    query_tokens: IntArray | None = None  # [queries]
    plain: float | None = None  # seconds that plain decoding takes for one token, on average over the stream
    query_plain: FloatArray | None = None  # [queries] seconds that it takes for each
    segment_rounds: FloatArray | None = None  # [budgets] E tau, the best arm in each segment or query
    segment_seconds: FloatArray | None = None  # [budgets]


class StreamTruth(ABC):
    """What an oracle of the stream knows: `B / E tau(B)` of each arm, or `B` over its seconds, for the budget `B`.

    So its best arm is the comparator's of regret, also where the budget ends before the text, or between segments.
    """

    horizon: int | None = None  # B, which `simulate` sets before `reset`; None: the whole stream
    _of_horizon: tuple[int, FixedArms] | None = None

    @abstractmethod
    def fixed_arms(self, budgets: IntArray) -> FixedArms: ...

    def stream_truth(self, objective: str, horizon: int) -> FloatArray:
        """[arms]"""
        if self._of_horizon is None or self._of_horizon[0] != horizon:
            self._of_horizon = horizon, self.fixed_arms(np.array([horizon]))
        fixed = self._of_horizon[1]
        spent = fixed.rounds if objective == "rounds" else fixed.seconds
        if spent is None:
            raise InputError("objective: expected rounds from an environment without costs, found time")
        return horizon / spent[0]


@runtime_checkable
class Environment(Protocol):
    """`rows` streams of rounds.

    `rows` arguments are increasing row numbers, int [n]. Draws of a row do not depend on which other rows
    are still running. `fixed_arms` returns None where no expectation is known (live models). Where there is an
    attribute `horizon`, `simulate` sets it to its last budget (or None) before `reset`.
    """

    arms: tuple[str, ...]
    max_draft: int
    queries: int  # queries in one row's stream
    gives: frozenset[str]
    done: BoolArray  # [rows] the stream has ended

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None: ...

    def observe(self, rows: IntArray) -> Context: ...

    def step(self, rows: IntArray, arms: IntArray) -> Rounds: ...

    def fixed_arms(self, budgets: IntArray) -> FixedArms | None: ...
