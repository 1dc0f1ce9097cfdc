"""The one loop of the project: a policy chooses arms, an environment plays their rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .environments.base import SECONDS, Environment
from .errors import InputError
from .policies.base import Policy
from .rounds import BoolArray, FloatArray, IntArray, Rounds, view_of


@dataclass(frozen=True)
class History:
    """Every round of every row, in the order played."""

    step: IntArray  # [rounds] 0, 1, ... within the row's stream
    row: IntArray  # [rounds]
    query: IntArray  # [rounds]
    rounds: Rounds

    def of_row(self, row: int) -> Rounds:
        """The rounds of one row, in order."""
        return self.rounds[self.row == row]


@dataclass(frozen=True)
class Outcome:
    """What `simulate` measured, at the first round in which a row's tokens reach each budget.

    A row whose stream ended first keeps its final counts, with `reached` False.
    """

    policy: str
    arms: tuple[str, ...]
    max_draft: int
    seed: int
    carry_over: str
    budgets: IntArray  # [budgets] tokens; the longest stream where none was given
    reached: BoolArray  # [runs, budgets]
    rounds: IntArray  # [runs, budgets] tau
    tokens: IntArray  # [runs, budgets] S, the last block not cut at the budget
    pulls: IntArray  # [runs, budgets, arms]
    switches: IntArray  # [runs, budgets] rounds whose arm differs from the row's last
    seconds: FloatArray | None  # [runs, budgets]
    query_rounds: IntArray  # [runs, queries]
    query_tokens: IntArray  # [runs, queries]
    query_seconds: FloatArray | None  # [runs, queries]
    history: History | None = None

    @property
    def runs(self) -> int:
        return len(self.rounds)


def parse_carry_over(text: str) -> float:
    """Share of the statistics kept at a new query: `none` 0, `keep` 1, `discount:0.9` 0.9."""
    kind, _, share = text.partition(":") if isinstance(text, str) else ("", "", "")
    if text in ("none", "keep"):
        return float(text == "keep")
    try:
        keep = float(share) if kind == "discount" else -1.0
    except ValueError:
        keep = -1.0
    if not 0 <= keep <= 1:
        raise InputError(f"carry_over: expected none, keep or discount:SHARE with SHARE in [0, 1]; found {text!r}")
    return keep


def check_needs(policy: Policy, environment: Environment) -> None:
    """Refuses a policy that needs what the environment does not give."""
    missing = policy.needs - environment.gives
    if missing:
        raise InputError(
            f"policy: {policy} needs {', '.join(sorted(missing))}, but this environment gives "
            f"{', '.join(sorted(environment.gives)) or 'accepted tokens only'}; choose another policy or reward"
        )


def check_budget(budget: ArrayLike | None) -> IntArray:
    """Budgets in tokens, [budgets], increasing; of None the largest number there is."""
    budgets = np.atleast_1d(np.asarray(np.iinfo(np.int64).max if budget is None else budget))
    with np.errstate(invalid="ignore"):  # NaN and infinity are refused below
        whole = budgets.astype(np.int64) if budgets.dtype.kind in "iuf" else np.zeros(budgets.shape, dtype=np.int64)
    if budgets.ndim != 1 or not len(whole) or np.any(whole != budgets) or np.any(np.diff(whole, prepend=0) <= 0):
        raise InputError(
            f"budget: expected a positive number of tokens or an increasing list of them; found {budget!r}"
        )
    return whole


def simulate(
    policy: Policy,
    environment: Environment,
    budget: int | Sequence[int] | None = None,
    runs: int = 1,
    seed: int = 0,
    carry_over: str = "none",
    history: bool = False,
    on_round: Callable[[IntArray, Rounds], None] | None = None,
    fresh_policy: bool = True,
) -> Outcome:
    """Plays `runs` independent rows until each has emitted the last budget, or its stream has ended.

    `budget` in tokens: a number, an increasing array (one pass gives the whole curve; for policies that
    do not look at the horizon), or None for the whole stream. `on_round(rows, rounds)` is called after
    every step. `fresh_policy` False goes on with a policy that has played as many rows before. Memory does
    not grow with the budget unless `history` is asked for.
    """
    for name, number, least in (("runs", runs, 1), ("seed", seed, 0)):
        if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < least:
            raise InputError(f"{name}: expected a whole number of {least} or more, found {number!r}")
    check_needs(policy, environment)
    keep = parse_carry_over(carry_over)
    budgets = check_budget(budget)
    tokens_in_stream = getattr(environment, "tokens", None)  # None: endless, or not known beforehand
    if budget is not None and tokens_in_stream is not None and budgets[-1] > tokens_in_stream:
        raise InputError(f"budget: expected at most the {tokens_in_stream} tokens of the stream, found {budgets[-1]}")
    if budget is None and getattr(environment, "endless", False):
        raise InputError("budget: expected a number of tokens, found none, and this environment never ends")

    policy_seed, environment_seed = np.random.SeedSequence(seed).spawn(2)
    n_arms = len(environment.arms)
    last = None if budget is None else int(budgets[-1])
    if hasattr(environment, "horizon"):  # for oracles: the best arm depends on where the budget ends
        environment.horizon = last
    environment.reset(runs, np.random.default_rng(environment_seed), policy.needs)
    if fresh_policy:
        policy.start(runs, environment.arms, environment.max_draft, np.random.default_rng(policy_seed), last)

    timed = SECONDS in environment.gives
    rounds_so_far = np.zeros(runs, dtype=np.int64)
    tokens = np.zeros(runs, dtype=np.int64)
    pulls = np.zeros((n_arms, runs), dtype=np.int64)
    switches = np.full(runs, -1)  # a row's first arm is no switch
    seconds = np.zeros(runs)
    last_arm = np.full(runs, -1)
    next_budget = np.zeros(runs, dtype=np.int64)
    target = np.full(runs, budgets[0])

    at_budget = (runs, len(budgets))
    out = Outcome(
        policy=str(policy),
        arms=tuple(environment.arms),
        max_draft=environment.max_draft,
        seed=seed,
        carry_over=carry_over,
        budgets=budgets,
        reached=np.zeros(at_budget, dtype=bool),
        rounds=np.zeros(at_budget, dtype=np.int64),
        tokens=np.zeros(at_budget, dtype=np.int64),
        pulls=np.zeros((*at_budget, n_arms), dtype=np.int64),
        switches=np.zeros(at_budget, dtype=np.int64),
        seconds=np.zeros(at_budget) if timed else None,
        query_rounds=np.zeros((runs, environment.queries), dtype=np.int64),
        query_tokens=np.zeros((runs, environment.queries), dtype=np.int64),
        query_seconds=np.zeros((runs, environment.queries)) if timed else None,
    )
    log: list[tuple[IntArray, IntArray, IntArray, Rounds]] = []

    def settle(rows: IntArray, reached: bool) -> None:
        """Writes the counts of `rows` at their next budget."""
        j = next_budget[rows]
        out.reached[rows, j] = reached
        out.rounds[rows, j] = rounds_so_far[rows]
        out.tokens[rows, j] = tokens[rows]
        out.pulls[rows, j] = pulls[:, rows].T
        out.switches[rows, j] = switches[rows]
        if out.seconds is not None:
            out.seconds[rows, j] = seconds[rows]
        next_budget[rows] += 1
        target[rows] = budgets[np.minimum(next_budget[rows], len(budgets) - 1)]

    # With many rows the C library would return the pages of every temporary to the system, at every step, at half the
    # speed. One large block, freed at once and never touched, raises the size from which it does so.
    np.empty(31 << 20, dtype=np.uint8)
    rows = np.arange(runs)
    while rows.size:
        context = environment.observe(rows)
        if np.count_nonzero(context.new_query):
            fresh = context.new_query
            horizon = None if context.horizon is None else context.horizon[fresh]
            policy.restart(rows[fresh], keep, horizon)
        arms = policy.select(rows, context)
        played = environment.step(rows, arms)
        shown = played if played.feedback is None else played.feedback
        if played.seen is None:
            policy.update(rows, shown)
        elif played.seen.any():
            policy.update(rows[played.seen], shown[played.seen])

        view = view_of(rows, runs)
        if history:
            log.append((rounds_so_far[rows], rows, context.query, played))
        if on_round is not None:
            on_round(rows, played)
        rounds_so_far[view] += 1
        tokens[view] += played.emitted
        np.add.at(pulls.reshape(-1), arms * runs + rows, 1)  # faster than pulls[arms, rows] += 1
        switches[view] += arms != last_arm[view]
        last_arm[view] = arms
        if played.seconds is not None:
            seconds[view] += played.seconds
        if environment.queries > 1:
            out.query_rounds[rows, context.query] += 1
            out.query_tokens[rows, context.query] += played.emitted
            if out.query_seconds is not None and played.seconds is not None:
                out.query_seconds[rows, context.query] += played.seconds

        crossed = tokens[view] >= target[view]
        ended = environment.done[view]
        if np.count_nonzero(crossed | ended):  # on few rows cheaper than any()
            while crossed.any():
                settle(rows[crossed], reached=True)
                crossed = (tokens[rows] >= target[rows]) & (next_budget[rows] < len(budgets))
            for row in rows[ended & (next_budget[rows] < len(budgets))]:
                while next_budget[row] < len(budgets):
                    settle(np.array([row]), reached=budget is None)
            rows = rows[next_budget[rows] < len(budgets)]

    if environment.queries == 1:
        out.query_rounds[:, 0], out.query_tokens[:, 0] = rounds_so_far, tokens
        if out.query_seconds is not None:
            out.query_seconds[:, 0] = seconds
    if budget is None:
        budgets[0] = tokens.max()
    if history:
        step, row, query, played_rounds = zip(*log, strict=True)
        object.__setattr__(
            out,
            "history",
            History(
                np.concatenate(step), np.concatenate(row), np.concatenate(query), Rounds.concatenate(played_rounds)
            ),
        )
    return out
