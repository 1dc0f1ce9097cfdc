"""Environments whose best arm changes: with the text's position, with the prompt's task, or by an adversary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .. import acceptance
from ..costs import CostModel
from ..errors import InputError
from ..rounds import BoolArray, FloatArray, IntArray, Rounds
from .base import FEATURES, TRUTH, Context, FixedArms, StreamTruth
from .laws import RoundLaw, share
from .renewal import expected_rounds, expected_starts
from .synthetic import SyntheticEnvironment, arm_names


def _table(name: str, alphas: ArrayLike) -> FloatArray:
    table = acceptance.check(alphas, 1)
    if table.ndim != 2 or not table.size:
        raise InputError(f"alphas: expected acceptance rates [{name}, arms], found shape {list(table.shape)}")
    return table


def _whole(name: str, value: float) -> int:
    if not (np.ndim(value) == 0 and 1 <= value < np.inf and int(value) == value):
        raise InputError(f"{name}: expected a whole number of 1 or more, found {value}")
    return int(value)


class PiecewiseEnvironment(SyntheticEnvironment):
    """Rates change with the position in the text: a round has the law of the segment in which it starts.

    alphas [segments, arms]; `tokens` per segment, one number or one each. The last segment goes on for ever, or with
    `cycle` the first follows it. `law`: parameters of `RoundLaw`.
    """

    scopes = ("stream", "segment")

    def __init__(
        self,
        alphas: ArrayLike,
        tokens: int | Sequence[int] | IntArray = 1000,
        cycle: bool = False,
        costs: CostModel | None = None,
        names: Sequence[str] | None = None,
        **law: Any,
    ) -> None:
        self.alphas = _table("segments", alphas)
        if np.ndim(tokens) and np.shape(tokens) != self.alphas.shape[:1]:
            raise InputError(f"tokens: expected one number or {len(self.alphas)}, one per segment; found {tokens}")
        lengths = [_whole("tokens", length) for length in np.ravel(tokens)]
        self.segment_tokens: IntArray = np.broadcast_to(lengths, len(self.alphas)).astype(np.int64)  # [segments]
        self.cycle = cycle
        super().__init__(RoundLaw(self.alphas, **law), costs, arm_names(self.alphas) if names is None else names)
        self._ends = self.segment_tokens.cumsum()
        self._moves = True
        self._known: tuple[bytes, FixedArms] | None = None

    def _segment(self, rows: IntArray) -> IntArray:
        position = self._position[rows]
        if self.cycle:
            position = position % self._ends[-1]
        return np.searchsorted(self._ends[:-1], position, side="right")

    def _tokens_of(self, scope: str, segment: IntArray | int) -> FloatArray:
        if scope in ("segment", "round"):
            return self.law.tokens[segment]
        # of no stated budget the schedule: tokens over rounds of all segments
        return self._ends[-1] / (self.segment_tokens[:, None] / self.law.tokens).sum(axis=0)

    def fixed_arms(self, budgets: IntArray) -> FixedArms:
        """Exact E tau, rounds reaching into the next segment; `segment_*` plays argmax g, or g/c, of each segment.

        `segment_seconds` leaves out the catch-up of an arm that takes over, which an oracle has to pay.
        """
        budgets = np.asarray(budgets)
        if self._known is None or self._known[0] != budgets.tobytes():
            self._known = budgets.tobytes(), self._fixed_arms(budgets)
        return self._known[1]

    def _fixed_arms(self, budgets: IntArray) -> FixedArms:
        segments, arms = np.arange(len(self.alphas)), np.arange(len(self.arms))
        seconds = self.seconds_per_round()
        price = np.zeros(len(arms)) if seconds is None else seconds
        best = self.law.tokens.argmax(axis=1)
        fastest = best if seconds is None else (self.law.tokens / seconds).argmax(axis=1)
        played = np.column_stack([np.tile(arms, (len(segments), 1)), best, fastest])  # [segments, arms + 2]
        pmf = self.law.pmf()[segments[:, None], played]

        def pieces() -> Iterator[tuple[float, FloatArray, FloatArray]]:
            while True:
                for s, length in enumerate(self.segment_tokens):
                    endless = s == segments[-1] and not self.cycle
                    yield np.inf if endless else float(length), pmf[s], price[played[s]]

        rounds, paid = expected_rounds(pieces(), budgets)
        if self.costs is None:
            return FixedArms(rounds[:, :-2], segment_rounds=rounds[:, -2])
        return FixedArms(
            rounds[:, :-2],
            paid[:, :-2],
            plain=self.costs.plain,
            segment_rounds=rounds[:, -2],
            segment_seconds=paid[:, -1],
        )


class DriftingEnvironment(PiecewiseEnvironment):
    """Rates move along straight lines between knots [knots, arms], `tokens` apart, and stay at the last (or `cycle`).

    They change every `every` tokens, to the rates of the middle of the next step.
    """

    def __init__(
        self, knots: ArrayLike, tokens: int = 1000, every: int = 16, cycle: bool = False, **options: Any
    ) -> None:
        table = _table("knots", knots)
        if len(table) < 2:
            raise InputError(f"knots: expected 2 or more, found {len(table)}; one list of rates for each")
        tokens = _whole("tokens", tokens)
        options["names"] = options.get("names") or arm_names(table)
        at = np.arange(len(table) + cycle) * tokens
        path = np.concatenate([table, table[:1]]) if cycle else table
        self._follow(
            lambda t: np.stack([np.interp(t, at, rates) for rates in path.T], axis=1), at[-1], every, cycle, options
        )

    @classmethod
    def sinusoid(
        cls,
        mean: ArrayLike,
        amplitude: ArrayLike,
        period: int = 4000,
        phase: ArrayLike = 0.0,
        every: int = 16,
        **options: Any,
    ) -> DriftingEnvironment:
        """alpha_i(t) = mean_i + amplitude_i sin(2 pi (t / period + phase_i)); arguments [arms], phases in periods."""
        shape = np.broadcast_shapes((1,), *(np.shape(value) for value in (mean, amplitude, phase)))
        middle, height, shift = (np.broadcast_to(np.asarray(v, dtype=float), shape) for v in (mean, amplitude, phase))
        if np.any(middle - np.abs(height) < 0) or np.any(middle + np.abs(height) > 1):
            raise InputError(
                f"amplitude: expected rates within [0, 1], found mean {mean!r} and amplitude {amplitude!r}"
            )
        environment = cls.__new__(cls)
        period = _whole("period", period)
        environment._follow(
            lambda t: middle + height * np.sin(2 * np.pi * (t[:, None] / period + shift)), period, every, True, options
        )
        return environment

    def _follow(
        self, rates: Callable[[FloatArray], FloatArray], span: int, every: int, cycle: bool, options: dict[str, Any]
    ) -> None:
        starts = np.arange(0, span, _whole("every", every))
        tokens = np.diff(starts, append=span)
        table = rates(starts + tokens / 2)
        if not cycle:  # where the path ends, for ever
            table, tokens = np.concatenate([table, rates(np.array([float(span)]))]), np.append(tokens, every)
        super().__init__(np.clip(table, 0.0, 1.0), tokens, cycle, **options)


def staying(tasks: int, stay: float) -> FloatArray:
    """Transitions [tasks, tasks]: the task stays with probability `stay`, else another comes, each as likely."""
    share("stay", stay)
    if tasks == 1:
        return np.ones((1, 1))
    return np.where(np.eye(tasks) > 0, stay, (1 - stay) / (tasks - 1))


class DomainEnvironment(SyntheticEnvironment):
    """A stream of mixed prompts: the task of each query follows a Markov chain, each row its own, and sets the rates.

    alphas [tasks, arms]; `transition` [tasks, tasks] (default: each task as likely, whatever came before),
    `start` [tasks] (default: the chain's stationary law, uniform where it has several). Texts end at `query_tokens`.
    Features: the task, one-hot, plus Gaussian noise of standard deviation `feature_noise`, one draw per query.
    """

    endless = False
    scopes = ("stream", "query", "round")  # a segment is a query

    def __init__(
        self,
        alphas: ArrayLike,
        query_tokens: int = 200,
        queries: int = 50,
        transition: ArrayLike | None = None,
        start: ArrayLike | None = None,
        feature_noise: float = 0.5,
        costs: CostModel | None = None,
        names: Sequence[str] | None = None,
        **law: Any,
    ) -> None:
        self.alphas = _table("tasks", alphas)
        n_tasks = len(self.alphas)
        chain = np.full((n_tasks, n_tasks), 1 / n_tasks) if transition is None else np.asarray(transition, dtype=float)
        self.transition = _laws("transition", chain, (n_tasks, n_tasks))
        self.start = _laws("start", _stationary(chain) if start is None else np.asarray(start, dtype=float), (n_tasks,))
        if not 0 <= feature_noise < np.inf:
            raise InputError(f"feature_noise: expected a standard deviation of 0 or more, found {feature_noise}")
        self.query_tokens, self.queries = _whole("query_tokens", query_tokens), _whole("queries", queries)
        self.tokens = self.queries * self.query_tokens
        self.feature_noise = feature_noise
        super().__init__(RoundLaw(self.alphas, **law), costs, arm_names(self.alphas) if names is None else names)
        self.gives = self.gives | {FEATURES}
        self._moves = True
        self._query_means: tuple[FloatArray, FloatArray] | None = None

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        uniform = rng.random((rows, self.queries))
        self.tasks: IntArray = np.empty((rows, self.queries), dtype=np.int64)
        law = np.broadcast_to(self.start, (rows, len(self.start)))
        for q in range(self.queries):
            self.tasks[:, q] = np.count_nonzero(uniform[:, q, None] >= law.cumsum(axis=1)[:, :-1], axis=1)
            law = self.transition[self.tasks[:, q]]
        self._features: FloatArray | None = None
        if FEATURES in needs:  # from a generator beside, so that the rounds are the same with and without
            noise = rng.spawn(1)[0].standard_normal((rows, self.queries, len(self.start)))
            self._features = np.eye(len(self.start))[self.tasks] + self.feature_noise * noise
        super().reset(rows, rng, needs)

    def observe(self, rows: IntArray) -> Context:
        query, into = np.divmod(self._position[rows], self.query_tokens)
        new_query = into == 0
        if self._clock is not None:
            self._clock.restart(rows[new_query], self._position[rows[new_query]])
        return Context(
            query,
            new_query,
            horizon=np.full(len(rows), self.query_tokens),
            features=None if self._features is None else self._features[rows, query],
            truth=lambda scope, objective: self.truth(rows, scope, objective),
        )

    def _segment(self, rows: IntArray) -> IntArray:
        return self.tasks[rows, self._position[rows] // self.query_tokens]

    def _left(self, rows: IntArray) -> IntArray:
        return self.query_tokens - self._position[rows] % self.query_tokens

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        rounds = super().step(rows, arms)
        self.done[rows] = self._position[rows] >= self.tokens
        return rounds

    def truth(self, rows: IntArray, scope: str, objective: str) -> FloatArray:
        if objective == "time":
            self._seconds_or_refuse()
        task = self._segment(rows)
        if scope == "round":
            left = np.minimum(self._left(rows), self.max_draft + 1)
            emitted = np.insert(self.law.survival, 0, 1.0, axis=2).cumsum(axis=2)  # of a round with 1.. tokens left
            tokens = emitted[task, :, left - 1]
            return tokens if objective == "rounds" else tokens / self._price_table()[left - 1]
        if scope == "stream":
            return np.tile(self.stream_truth(objective, self.horizon or self.tokens), (len(rows), 1))
        paid = self._of_query()[objective == "time"]  # [tasks, arms, query_tokens]
        return self.query_tokens / paid[task, :, -1]

    def _price_table(self) -> FloatArray:
        """Seconds of a round with 1..max_draft + 1 (or more) tokens left; [left, arms], 0 without costs."""
        prices = [self.seconds_per_round(left) for left in range(1, self.max_draft + 2)]
        return np.array([np.zeros(len(self.arms)) if price is None else price for price in prices])

    def _of_query(self) -> tuple[FloatArray, FloatArray]:
        """E rounds and E seconds of a query up to each of its tokens; [tasks, arms, query_tokens]."""
        if self._query_means is None:
            pmf = self.law.pmf()
            starts = np.array([[expected_starts(law, self.query_tokens) for law in of_task] for of_task in pmf])
            left = np.minimum(np.arange(self.query_tokens, 0, -1), self.max_draft + 1)
            self._query_means = starts.cumsum(axis=2), (starts * self._price_table()[left - 1].T).cumsum(axis=2)
        return self._query_means

    def _law_of_tasks(self) -> FloatArray:
        """P(task of query q = k); [queries, tasks]."""
        law = [self.start]
        while len(law) < self.queries:
            law.append(law[-1] @ self.transition)
        return np.array(law)

    def fixed_arms(self, budgets: IntArray) -> FixedArms:
        """Exact expectations over the chain; `segment_*` plays each query with the arm that is best for its task."""
        whole, rest = np.divmod(np.minimum(budgets, self.tokens), self.query_tokens)
        law = self._law_of_tasks()
        before = np.insert(law.cumsum(axis=0), 0, 0.0, axis=0)[whole]  # [budgets, tasks] expected whole queries
        now = law[np.minimum(whole, self.queries - 1)] * (rest > 0)[:, None]

        def expect(paid: FloatArray) -> FloatArray:
            """paid [tasks, ..., query_tokens] -> [budgets, ...]."""
            at_rest = paid[..., rest - 1]  # not looked at where rest is 0
            return np.tensordot(before, paid[..., -1], 1) + np.einsum("bk,k...b->b...", now, at_rest)

        rounds, seconds = self._of_query()
        tasks = np.arange(len(self.start))
        segment_rounds = expect(rounds[tasks, rounds[:, :, -1].argmin(axis=1)])
        if self.costs is None:
            return FixedArms(expect(rounds), segment_rounds=segment_rounds)
        return FixedArms(
            expect(rounds),
            expect(seconds),
            plain=self.costs.plain,
            segment_rounds=segment_rounds,
            segment_seconds=expect(seconds[tasks, seconds[:, :, -1].argmin(axis=1)]),
        )


def _laws(name: str, value: FloatArray, shape: tuple[int, ...]) -> FloatArray:
    if value.shape != shape:
        raise InputError(f"{name}: expected shape {list(shape)}, found {list(value.shape)}")
    if not (np.all(value >= 0) and np.allclose(value.sum(axis=-1), 1)):
        raise InputError(f"{name}: expected probabilities that sum to 1, found {value.tolist()}")
    return value


def _stationary(transition: FloatArray) -> FloatArray:
    """The law that the chain keeps; uniform where there are several."""
    n = len(transition)
    uniform = np.full(n, 1 / n)
    if transition.shape != (n, n) or np.linalg.matrix_rank(transition.T - np.eye(n)) < n - 1:
        return uniform
    law = np.linalg.lstsq(np.vstack([transition.T - np.eye(n), np.ones(n)]), np.append(np.zeros(n), 1.0), rcond=None)[0]
    return np.clip(law, 0.0, None) / np.clip(law, 0.0, None).sum()


class AdversarialEnvironment(StreamTruth):
    """An oblivious adversary fixed beforehand what every round of every arm accepts: accepted [rounds, arms], repeated.

    Nothing is random, and every row meets the same rounds.
    """

    queries = 1
    endless = True
    gives = frozenset({TRUTH})
    scopes: tuple[str, ...] = ("stream", "round")

    def __init__(self, accepted: ArrayLike, max_draft: int, names: Sequence[str] | None = None) -> None:
        table = np.asarray(accepted)
        self.max_draft = _whole("max_draft", max_draft)
        if table.ndim != 2 or not table.size:
            raise InputError(f"accepted: expected tokens [rounds, arms], found shape {list(table.shape)}")
        if not np.all((table >= 0) & (table <= self.max_draft) & (table == np.floor(table))):
            raise InputError(
                f"accepted: expected whole numbers in 0..{self.max_draft}, found {table.min()}..{table.max()}"
            )
        self.accepted: IntArray = table.astype(np.int64)
        self.arms = tuple(names) if names is not None else tuple(f"arm{i}" for i in range(table.shape[1]))
        if len(self.arms) != table.shape[1] or len(set(self.arms)) != len(self.arms):
            raise InputError(f"names: expected {table.shape[1]} different names, found {', '.join(self.arms)}")

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self.done: BoolArray = np.zeros(rows, dtype=bool)
        self._round = np.zeros(rows, dtype=np.int64)

    def observe(self, rows: IntArray) -> Context:
        now = self._round[rows]
        return Context(
            np.zeros(len(rows), dtype=np.int64),
            now == 0,
            truth=lambda scope, objective: self.truth(rows, scope, objective),
        )

    def truth(self, rows: IntArray, scope: str, objective: str) -> FloatArray:
        """Tokens of each arm's next round, or per round up to the budget (of none, the sequence); [n, arms]."""
        if objective == "time":
            raise InputError("objective: expected rounds from an environment without costs, found time")
        if scope == "round":
            return 1.0 + self.accepted[self._round[rows] % len(self.accepted)].astype(float)
        if self.horizon is not None:
            return np.tile(self.stream_truth(objective, self.horizon), (len(rows), 1))
        return np.tile(1.0 + self.accepted.mean(axis=0, dtype=float), (len(rows), 1))

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        accepted = self.accepted[self._round[rows] % len(self.accepted), arms]
        self._round[rows] += 1
        return Rounds(arms, np.full(len(rows), self.max_draft), accepted, accepted + 1, self.max_draft)

    def fixed_arms(self, budgets: IntArray) -> FixedArms:
        """tau by counting: whole repetitions, and the rounds of the one in which the budget is reached."""
        emitted = (self.accepted + 1).cumsum(axis=0)  # [rounds, arms]
        rounds = np.empty((len(budgets), len(self.arms)))
        for arm, sums in enumerate(emitted.T):
            repetitions, rest = np.divmod(np.asarray(budgets) - 1, sums[-1])
            rounds[:, arm] = repetitions * len(sums) + np.searchsorted(sums, rest, side="right") + 1
        return FixedArms(rounds)
