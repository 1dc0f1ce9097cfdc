"""Replay of a recorded trace: the law of a live run given its text, for any policy.

The text is drawn from the target whatever is drafted, and given the text a draft token is accepted with the
recorded probability. So a round walks along the text: it accepts while its uniform allows, and jumps N + 1.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..costs import CostModel, RoundClock
from ..rounds import BoolArray, FloatArray, IntArray, Rounds
from ..traces import Trace
from .base import BLOCK_OVERLAP, EVERY_ARM, FEATURES, OVERLAP, SECONDS, TRUTH, Context, FixedArms, StreamTruth


class ReplayEnvironment(StreamTruth):
    """All queries of a trace in one stream, in their order (`trace.select` chooses or reorders them).

    Seconds are predicted by `costs` (default: the cost model in the trace); every arm is current when a
    query starts, since prefill is outside the rounds.
    """

    endless = False
    scopes: tuple[str, ...] = ("stream", "query", "round")  # a segment is a query

    def __init__(self, trace: Trace, costs: CostModel | None = None) -> None:
        self.trace, self.arms, self.max_draft = trace, trace.arms, trace.max_draft
        self.drafters = trace.drafters
        self.queries, self.tokens = len(trace.queries), len(trace.tokens)
        self.costs = costs or trace.costs
        overlaps = set() if trace.overlap is None else {OVERLAP, EVERY_ARM}
        if overlaps and trace.block_tail is not None:
            overlaps |= {BLOCK_OVERLAP}
        features = set() if trace.features is None else {FEATURES}
        self.gives = frozenset(overlaps | features | {TRUTH} | ({SECONDS} if self.costs else set()))
        self._survival = np.cumprod(trace.accept.astype(float), axis=2)  # [T, arms, depth] P(N >= depth + 1)
        self._drafted = trace.drafted.astype(np.int64)
        self._remaining = trace.remaining()
        in_query = np.arange(self.tokens) - np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
        prompts = [query.prompt_tokens for query in trace.queries]
        self._context = in_query + np.repeat(prompts, np.diff(trace.offsets))  # [T] tokens before each position
        self._query = np.repeat(np.arange(self.queries), np.diff(trace.offsets))  # [T]

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self.done: BoolArray = np.zeros(rows, dtype=bool)
        self._rng, self._rows, self._needs = rng, rows, needs
        self._position = np.zeros(rows, dtype=np.int64)
        self._clock = None if self.costs is None else RoundClock(self.costs, rows)

    def observe(self, rows: IntArray) -> Context:
        position = self._position[rows]
        query = self._query[position]
        start = np.asarray(self.trace.offsets)[query]
        new_query = position == start
        if self._clock is not None:
            self._clock.restart(rows[new_query], start[new_query])
        return Context(
            query,
            new_query,
            horizon=np.full(len(rows), self.trace.max_new_tokens),
            features=None if self.trace.features is None else self.trace.features[query].astype(float),
            truth=lambda scope, objective: self.truth(rows, scope, objective),
        )

    def truth(self, rows: IntArray, scope: str, objective: str) -> FloatArray:
        """Tokens per expected round or second of each arm played throughout the stream or the row's query; [n, arms].

        Of the round that starts here: its expected tokens, or these per predicted second, catch-up included.
        """
        position = self._position[rows]
        if scope == "round":
            tokens = self._round_tokens[position]
            if objective == "rounds":
                return tokens
            assert self._clock is not None
            arms = np.arange(len(self.arms))
            missed = position[:, None] - self._clock.current[rows]
            context = self._context[position, None]
            return tokens / self._clock.costs.seconds(arms, self._drafted[position], missed, context)
        if scope == "stream":
            return np.tile(self.stream_truth(objective, self.horizon or self.tokens), (len(rows), 1))
        fixed = self._whole
        of_query = fixed.query_rounds if objective == "rounds" else fixed.query_seconds
        assert of_query is not None
        query = self._query[position]  # a segment is a query
        return np.diff(self.trace.offsets)[query, None] / of_query[query]

    @cached_property
    def _whole(self) -> FixedArms:
        return self.fixed_arms(np.array([self.tokens]))

    @cached_property
    def _round_tokens(self) -> FloatArray:
        """E emitted of a round, `sum_{k < left} P(N >= k)` with `left` tokens of the query to come; [T, arms]."""
        within = np.arange(1, self.max_draft + 1) < self._remaining[:, None]  # [T, depth]
        return 1 + np.einsum("tad,td->ta", self._survival, within.astype(float))

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        # draws for the whole batch: a row's luck does not depend on which others still run
        uniform = self._rng.random(self._rows)[rows, None]
        position = self._position[rows]
        accepted = np.count_nonzero(uniform < self._survival[position, arms], axis=1)
        emitted = np.minimum(accepted + 1, self._remaining[position])
        drafted = self._drafted[position, arms]
        overlap = every_arm = seconds = None
        if self._needs & {OVERLAP, BLOCK_OVERLAP} and self.trace.overlap is not None:
            overlap = self.trace.overlap[position, arms].astype(float)
            depth = np.arange(self.max_draft)
            overlap[depth >= emitted[:, None]] = np.nan  # only verified positions were seen
            if BLOCK_OVERLAP in self._needs and self.trace.block_tail is not None:
                tail = self.trace.block_tail[position, arms, np.minimum(accepted, self.max_draft - 1)].astype(float)
                past = (depth > accepted[:, None]) & (depth < drafted[:, None]) & (emitted > accepted)[:, None]
                overlap = np.where(past, tail[:, None], overlap)  # its mean at each: their sum is what counts
        if EVERY_ARM in self._needs:
            every_arm = self._score_arms(position, emitted)
        if self._clock is not None:
            context = self._context[position]
            seconds = self._clock.seconds(rows, arms, drafted, position, emitted, every_arm is not None, context)
        self._position[rows] = position + emitted
        self.done[rows] = position + emitted >= self.tokens
        return Rounds(arms, drafted, accepted, emitted, self.max_draft, seconds, overlap, every_arm)

    def _score_arms(self, position: IntArray, emitted: IntArray) -> FloatArray:
        """[n, arms, max_draft + 1], NaN past the emitted tokens."""
        offset = np.arange(self.max_draft + 1)
        at = np.minimum(position[:, None] + offset, self.tokens - 1)
        return np.where((offset < emitted[:, None])[:, None, :], self._first_overlap[at].transpose(0, 2, 1), np.nan)

    @cached_property
    def _first_overlap(self) -> FloatArray:
        """Overlap of each arm's own first token at each position, 0 where it has none; [T, arms]."""
        assert self.trace.overlap is not None
        return np.nan_to_num(self.trace.overlap[:, :, 0].astype(float))

    @cached_property
    def visits(self) -> FloatArray:
        """Probability that an arm played throughout starts a round at each position; [T, arms]."""
        law = np.concatenate([np.ones_like(self._survival[:, :, :1]), self._survival], axis=2)
        law[:, :, :-1] -= self._survival  # [T, arms, depth + 1] P(N = n)
        law = np.ascontiguousarray(law.transpose(0, 2, 1))
        visits = np.zeros((self.tokens, len(self.arms)))
        for position, left in enumerate(self._remaining):
            if position in self._starts:
                visits[position] = 1.0
            jumps = min(left - 1, self.max_draft + 1)  # to later positions of the same query
            visits[position + 1 : position + 1 + jumps] += visits[position] * law[position, :jumps]
        return visits

    @cached_property
    def _starts(self) -> frozenset[int]:
        return frozenset(np.asarray(self.trace.offsets)[:-1].tolist())

    def fixed_arms(self, budgets: IntArray) -> FixedArms:
        """Exact expectations given the text, from the probabilities that a round starts at each position.

        The segments are the queries: in each the arm that is best over all of it, where the budget cuts it too.
        """
        ends = np.minimum(budgets, self.tokens) - 1
        starts = np.asarray(self.trace.offsets)[:-1]
        cost = plain = None
        if self.costs is not None:
            context = self._context[:, None]
            cost = self.visits * self.costs.seconds(np.arange(len(self.arms)), self._drafted, 0, context)
            plain = self.costs.plain + self.costs.per_context * self._context  # [T]
        return FixedArms(
            rounds=self.visits.cumsum(axis=0)[ends],
            seconds=None if cost is None else cost.cumsum(axis=0)[ends],
            query_rounds=np.add.reduceat(self.visits, starts, axis=0),
            query_seconds=None if cost is None else np.add.reduceat(cost, starts, axis=0),
            query_tokens=np.diff(self.trace.offsets),
            plain=None if plain is None else float(plain.mean()),
            query_plain=None if plain is None else np.add.reduceat(plain, starts),
            segment_rounds=self._best_of_each_query(self.visits)[ends],
            segment_seconds=None if cost is None else self._best_of_each_query(cost)[ends],
        )

    def _best_of_each_query(self, spent: FloatArray) -> FloatArray:
        """What has been spent up to and with each position, by the arm that spends least over the query; [T]."""
        best = np.add.reduceat(spent, np.asarray(self.trace.offsets)[:-1], axis=0).argmin(axis=1)[self._query]
        return spent[np.arange(self.tokens), best].cumsum()
