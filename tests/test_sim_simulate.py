"""The loop: what it counts, when it stops, and what it tells the policy and the environment."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metasd_sim.costs import CostModel
from metasd_sim.environments import StationaryEnvironment
from metasd_sim.environments.base import OVERLAP, SECONDS, Context
from metasd_sim.policies import FixedArm, KLUCBTrials, MetaSDUCB, RandomArm
from metasd_sim.rewards import BlockEfficiency, TokensPerSecond, VerifiedDivergence
from metasd_sim.rounds import Rounds
from metasd_sim.simulate import parse_carry_over, simulate
from tests.sim_cases import GivesEverything, arm_names, refuses

GAMMA = 3


class Scripted:
    """Rows of known rounds, whatever is played. script[row] = [(query, accepted, emitted, seconds), ...]."""

    max_draft, endless = GAMMA, False

    def __init__(self, script, gives=(SECONDS, OVERLAP), horizons=None, tokens=None):
        self.script, self.gives, self.horizons = script, frozenset(gives), horizons
        self.arms = arm_names(3)
        self.queries = 1 + max(query for row in script for query, *_ in row)
        if tokens is not None:
            self.tokens = tokens

    def reset(self, rows, rng, needs):
        assert rows == len(self.script)
        self.asked = needs
        self.luck = rng.random(4)
        self.at = [0] * rows
        self.done = np.zeros(rows, dtype=bool)

    def observe(self, rows):
        query = np.array([self.script[r][self.at[r]][0] for r in rows])
        before = np.array([self.script[r][self.at[r] - 1][0] if self.at[r] else -1 for r in rows])
        horizon = None if self.horizons is None else np.array(self.horizons)[query]
        return Context(query, query != before, horizon=horizon)

    def step(self, rows, arms):
        assert not self.done[rows].any()
        _, accepted, emitted, seconds = zip(*(self.script[r][self.at[r]] for r in rows), strict=True)
        for r in rows:
            self.at[r] += 1
            self.done[r] = self.at[r] == len(self.script[r])
        return Rounds(
            arms,
            np.full(len(rows), GAMMA),
            np.array(accepted),
            np.array(emitted),
            GAMMA,
            np.array(seconds) if SECONDS in self.gives else None,
        )

    def fixed_arms(self, budgets):
        return None


class Playing:
    """Plays arms[row][step] and keeps all that it is told."""

    needs = frozenset({OVERLAP})

    def __init__(self, arms):
        self.arms = arms

    def start(self, rows, arms, max_draft, rng, horizon=None):
        self.started = (rows, arms, max_draft, horizon)
        self.luck = rng.random(4)
        self.at, self.log = [0] * rows, []

    def restart(self, rows, keep=0.0, horizon=None):
        self.log.append(("restart", rows.tolist(), keep, None if horizon is None else horizon.tolist()))

    def select(self, rows, context):
        self.log.append(("select", rows.tolist(), context.query.tolist()))
        return np.array([self.arms[r][self.at[r]] for r in rows])

    def update(self, rows, rounds):
        self.log.append(("update", rows.tolist(), rounds.arm.tolist(), rounds.accepted.tolist()))
        for r in rows:
            self.at[r] += 1

    def __str__(self):
        return "playing"


# Row 0 emits 4, 1, 3, 2, 4: 4, 5, 8, 10, 14 so far. Row 1 emits 1, 1, 4, 4, 1: 1, 2, 6, 10, 11.
ONE_QUERY = [
    [(0, 3, 4, 1.0), (0, 0, 1, 2.0), (0, 2, 3, 3.0), (0, 1, 2, 4.0), (0, 3, 4, 5.0)],
    [(0, 0, 1, 0.5), (0, 0, 1, 0.5), (0, 3, 4, 0.5), (0, 3, 4, 0.5), (0, 0, 1, 0.5)],
]
ARMS = [[0, 1, 1, 0, 2], [2, 2, 0, 0, 1]]


def test_counts_at_several_budgets():
    policy, environment = Playing(ARMS), Scripted(ONE_QUERY)
    outcome = simulate(policy, environment, [3, 5, 10], runs=2, seed=9)
    assert outcome.budgets.tolist() == [3, 5, 10]
    assert outcome.reached.all()
    assert outcome.rounds.tolist() == [[1, 2, 4], [3, 3, 4]]
    assert outcome.tokens.tolist() == [[4, 5, 10], [6, 6, 10]]
    assert outcome.pulls.tolist() == [[[1, 0, 0], [1, 1, 0], [2, 2, 0]], [[1, 0, 2], [1, 0, 2], [2, 0, 2]]]
    assert outcome.switches.tolist() == [[0, 1, 2], [1, 1, 1]]
    assert outcome.seconds.tolist() == [[1, 3, 10], [1.5, 1.5, 2]]
    assert outcome.query_rounds.tolist() == [[4], [4]]
    assert outcome.query_tokens.tolist() == [[10], [10]]
    assert outcome.query_seconds.tolist() == [[10], [2]]
    assert (outcome.policy, outcome.arms, outcome.max_draft) == ("playing", arm_names(3), GAMMA)
    assert (outcome.seed, outcome.carry_over, outcome.runs) == (9, "none", 2)
    assert outcome.history is None
    assert environment.at == [4, 4]  # no round is played after the last budget
    assert environment.asked == policy.needs
    assert policy.started == (2, arm_names(3), GAMMA, 10)


def test_one_block_may_cross_several_budgets():
    outcome = simulate(Playing(ARMS), Scripted(ONE_QUERY), [1, 2, 3, 4, 6], runs=2)
    assert outcome.rounds.tolist() == [[1, 1, 1, 1, 3], [1, 2, 3, 3, 3]]
    assert outcome.tokens.tolist() == [[4, 4, 4, 4, 8], [1, 2, 6, 6, 6]]


@pytest.mark.parametrize("budget", range(1, 12))
def test_each_single_budget(budget):
    outcome = simulate(Playing(ARMS), Scripted(ONE_QUERY), budget, runs=2)
    cumulative = np.array([[4, 5, 8, 10, 14], [1, 2, 6, 10, 11]])
    stop = (cumulative < budget).sum(axis=1)
    assert outcome.rounds[:, 0].tolist() == (stop + 1).tolist()
    assert outcome.tokens[:, 0].tolist() == cumulative[[0, 1], stop].tolist()


def test_history_and_callback_show_every_round():
    seen = []
    outcome = simulate(
        Playing(ARMS),
        Scripted(ONE_QUERY),
        6,
        runs=2,
        history=True,
        on_round=lambda rows, rounds: seen.append((rows.tolist(), rounds.arm.tolist())),
    )
    assert outcome.history.step.tolist() == [0, 0, 1, 1, 2, 2]
    assert outcome.history.row.tolist() == [0, 1, 0, 1, 0, 1]
    assert outcome.history.query.tolist() == [0] * 6
    assert outcome.history.rounds.arm.tolist() == [0, 2, 1, 2, 1, 0]
    assert outcome.history.of_row(0).accepted.tolist() == [3, 0, 2]
    assert outcome.history.of_row(1).emitted.tolist() == [1, 1, 4]
    assert outcome.history.of_row(1).seconds.tolist() == [0.5] * 3
    assert seen == [([0, 1], [0, 2]), ([0, 1], [1, 2]), ([0, 1], [1, 0])]


# Three queries. Row 0: 4 + 2 tokens, 1 + 3, 2 (cut by the end of the text). Row 1: one long round each.
THREE_QUERIES = [
    [(0, 3, 4, 1.0), (0, 2, 2, 1.0), (1, 0, 1, 2.0), (1, 3, 3, 2.0), (2, 2, 2, 4.0)],
    [(0, 3, 4, 8.0), (1, 3, 3, 8.0), (2, 3, 3, 8.0)],
]
QUERY_ARMS = [[0, 1, 1, 2, 2], [1, 1, 0]]


def test_counts_of_queries_and_a_whole_stream():
    outcome = simulate(Playing(QUERY_ARMS), Scripted(THREE_QUERIES), None, runs=2, history=True)
    assert outcome.budgets.tolist() == [12]  # the longest stream
    assert outcome.reached.tolist() == [[True], [True]]
    assert outcome.rounds.tolist() == [[5], [3]]
    assert outcome.tokens.tolist() == [[12], [10]]
    assert outcome.switches.tolist() == [[2], [1]]
    assert outcome.query_rounds.tolist() == [[2, 2, 1], [1, 1, 1]]
    assert outcome.query_tokens.tolist() == [[6, 4, 2], [4, 3, 3]]
    assert outcome.query_seconds.tolist() == [[2, 4, 4], [8, 8, 8]]
    assert outcome.seconds.tolist() == [[10], [24]]
    assert outcome.history.query[outcome.history.row == 0].tolist() == [0, 0, 1, 1, 2]
    assert outcome.history.step[outcome.history.row == 1].tolist() == [0, 1, 2]


def test_a_stream_that_ends_before_the_budget():
    outcome = simulate(Playing(QUERY_ARMS), Scripted(THREE_QUERIES), [5, 11, 50], runs=2)
    assert outcome.reached.tolist() == [[True, True, False], [True, False, False]]
    assert outcome.rounds.tolist() == [[2, 5, 5], [2, 3, 3]]
    assert outcome.tokens.tolist() == [[6, 12, 12], [7, 10, 10]]
    assert outcome.pulls[:, -1].tolist() == [[1, 2, 2], [1, 2, 0]]
    assert outcome.seconds.tolist() == [[2, 10, 10], [16, 24, 24]]


def test_a_budget_reached_by_the_last_round_of_the_stream():
    outcome = simulate(Playing(QUERY_ARMS), Scripted(THREE_QUERIES), [10, 12], runs=2)
    assert outcome.reached.tolist() == [[True, True], [True, False]]
    assert outcome.tokens.tolist() == [[10, 12], [10, 10]]


def test_query_counts_stop_at_the_last_budget():
    outcome = simulate(Playing(QUERY_ARMS), Scripted(THREE_QUERIES), 7, runs=2)
    assert outcome.query_rounds.tolist() == [[2, 1, 0], [1, 1, 0]]
    assert outcome.query_tokens.tolist() == [[6, 1, 0], [4, 3, 0]]
    assert outcome.query_seconds.tolist() == [[2, 2, 0], [8, 8, 0]]


@pytest.mark.parametrize(("carry_over", "keep"), [("none", 0.0), ("keep", 1.0), ("discount:0.25", 0.25)])
def test_restarts_come_before_the_first_choice_of_each_query(carry_over, keep):
    policy = Playing(QUERY_ARMS)
    outcome = simulate(policy, Scripted(THREE_QUERIES, horizons=[70, 80, 90]), None, runs=2, carry_over=carry_over)
    assert outcome.carry_over == carry_over
    assert policy.log == [
        ("restart", [0, 1], keep, [70, 70]),
        ("select", [0, 1], [0, 0]),
        ("update", [0, 1], [0, 1], [3, 3]),
        ("restart", [1], keep, [80]),
        ("select", [0, 1], [0, 1]),
        ("update", [0, 1], [1, 1], [2, 3]),
        ("restart", [0, 1], keep, [80, 90]),
        ("select", [0, 1], [1, 2]),
        ("update", [0, 1], [1, 0], [0, 3]),
        ("select", [0], [1]),
        ("update", [0], [2], [3]),
        ("restart", [0], keep, [90]),
        ("select", [0], [2]),
        ("update", [0], [2], [2]),
    ]
    assert policy.started[3] is None  # no budget, no horizon


def test_carry_over_reaches_the_statistics():
    # Two queries of two rounds; one arm of three is best and two are useless. With statistics kept, the second query
    # has no arm left to try first.
    class TwoQueries(GivesEverything):
        queries = 2

        def reset(self, rows, rng, needs):
            super().reset(rows, rng, needs)
            self.played = 0

        def observe(self, rows):
            context = super().observe(rows)
            context.query[:] = self.played >= 4
            context.new_query[:] = self.played in (0, 4)
            return context

        def step(self, rows, arms):
            self.played += 1
            accepted = np.where(arms == 1, 2, 0)
            return Rounds(arms, np.full(len(rows), 2), accepted, accepted + 1, 2)

    for carry_over, tries_all in (("none", True), ("keep", False), ("discount:0.5", False), ("discount:0", True)):
        history = simulate(
            MetaSDUCB(BlockEfficiency(), beta=0.1), TwoQueries(), 16, carry_over=carry_over, history=True
        ).history
        second = history.rounds.arm[4:7].tolist()
        assert (sorted(second) == [0, 1, 2]) == tries_all
        assert tries_all or second == [1, 1, 1]


def test_policy_and_environment_draw_from_different_streams():
    luck = {}
    for seed in (0, 1):
        policy, environment = Playing(ARMS), Scripted(ONE_QUERY)
        simulate(policy, environment, 5, runs=2, seed=seed)
        luck[seed] = (policy.luck, environment.luck)
    draws = [tuple(draw) for pair in luck.values() for draw in pair]
    assert len(set(draws)) == 4
    again = Playing(ARMS)
    simulate(again, Scripted(ONE_QUERY), 5, runs=2, seed=1)
    np.testing.assert_array_equal(again.luck, luck[1][0])


def test_the_policy_does_not_change_the_environments_luck():
    """Two policies that play the same arms see the same rounds, whatever they draw for themselves."""

    class Thirsty(FixedArm):
        def select(self, rows, context):
            self.rng.random(17)
            return super().select(rows, context)

        def start(self, rows, arms, max_draft, rng, horizon=None):
            self.rng = rng
            super().start(rows, arms, max_draft, rng, horizon)

    environment = StationaryEnvironment([0.7, 0.4], 4)
    plain, thirsty = (simulate(p, environment, 200, runs=3, history=True) for p in (FixedArm(0), Thirsty(0)))
    np.testing.assert_array_equal(plain.history.rounds.accepted, thirsty.history.rounds.accepted)


def test_without_seconds_there_are_none():
    outcome = simulate(Playing(ARMS), Scripted(ONE_QUERY, gives=(OVERLAP,)), 5, runs=2)
    assert outcome.seconds is None
    assert outcome.query_seconds is None


# --- properties on the stationary model

INSTANCES = st.tuples(
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(
        [RandomArm, KLUCBTrials, lambda: MetaSDUCB(BlockEfficiency()), lambda: MetaSDUCB(TokensPerSecond())]
    ),
    st.lists(st.integers(1, 80), min_size=1, max_size=4, unique=True).map(sorted),
    st.integers(1, 5),
    st.integers(0, 2**32),
)


def instance(alphas, gamma):
    costs = CostModel.linear([0.1] * len(alphas), gamma, catch_up=0.01)
    return StationaryEnvironment(alphas, gamma, costs=costs)


@given(INSTANCES)
def test_the_last_block_is_the_one_that_reaches_the_budget(drawn):
    alphas, gamma, make, budgets, runs, seed = drawn
    outcome = simulate(make(), instance(alphas, gamma), budgets, runs=runs, seed=seed, history=True)
    assert outcome.reached.all()
    assert np.all(outcome.rounds >= 1)
    assert np.all(outcome.rounds <= outcome.budgets)  # tau <= B
    assert np.all(outcome.tokens >= outcome.budgets)
    assert np.all(outcome.tokens <= outcome.budgets + gamma)
    np.testing.assert_array_equal(outcome.pulls.sum(axis=2), outcome.rounds)
    for row in range(runs):
        played = outcome.history.of_row(row)
        for j, budget in enumerate(budgets):
            tau = outcome.rounds[row, j]
            until = played[:tau]
            assert until.emitted.sum() == outcome.tokens[row, j]
            assert outcome.tokens[row, j] - until.emitted[-1] < budget  # S - (N_tau + 1) < B
            np.testing.assert_array_equal(np.bincount(until.arm, minlength=len(alphas)), outcome.pulls[row, j])
            assert np.count_nonzero(np.diff(until.arm)) == outcome.switches[row, j]
            assert until.seconds.sum() == pytest.approx(outcome.seconds[row, j])
        assert len(played) == outcome.rounds[row, -1] == outcome.query_rounds[row, 0]


@given(INSTANCES)
def test_one_pass_over_budgets_equals_a_run_for_each(drawn):
    alphas, gamma, make, budgets, runs, seed = drawn
    together = simulate(make(), instance(alphas, gamma), budgets, runs=runs, seed=seed)
    for j, budget in enumerate(budgets):
        alone = simulate(make(), instance(alphas, gamma), budget, runs=runs, seed=seed)
        for name in ("reached", "rounds", "tokens", "pulls", "switches", "seconds"):
            np.testing.assert_array_equal(getattr(alone, name)[:, 0], getattr(together, name)[:, j])


@pytest.mark.parametrize("seed", [0, 1])
def test_outcomes_are_reproducible(seed):
    environment = instance([0.9, 0.5], 4)
    first, again = (simulate(MetaSDUCB(BlockEfficiency()), environment, 200, runs=5, seed=seed) for _ in range(2))
    other = simulate(MetaSDUCB(BlockEfficiency()), environment, 200, runs=5, seed=seed + 10)
    np.testing.assert_array_equal(first.pulls, again.pulls)
    np.testing.assert_array_equal(first.seconds, again.seconds)
    assert np.any(first.pulls != other.pulls)
    assert len(np.unique(first.tokens)) > 1 or len(np.unique(first.rounds)) > 1  # rows differ


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": 0}, ["budget", "0"]),
        ({"budget": -5}, ["budget", "-5"]),
        ({"budget": 2.5}, ["budget", "2.5"]),
        ({"budget": np.nan}, ["budget", "nan"]),
        ({"budget": np.inf}, ["budget", "inf"]),
        ({"budget": 1e30}, ["budget", "1e+30"]),
        ({"budget": "ten"}, ["budget", "ten"]),
        ({"budget": []}, ["budget", "[]"]),
        ({"budget": [5, 5]}, ["budget", "increasing", "[5, 5]"]),
        ({"budget": [7, 3]}, ["budget", "increasing", "[7, 3]"]),
        ({"budget": [[3, 7]]}, ["budget", "[[3, 7]]"]),
        ({"budget": None}, ["budget", "never ends"]),
        ({"runs": 0}, ["runs", "0"]),
        ({"runs": -1}, ["runs", "-1"]),
        ({"carry_over": "all"}, ["carry_over", "none, keep or discount:SHARE", "'all'"]),
    ],
)
def test_invalid_arguments_are_refused(arguments, words):
    with refuses(*words):
        simulate(RandomArm(), instance([0.5, 0.4], 3), **{"budget": 10, **arguments})


def test_a_budget_beyond_the_recorded_tokens_is_refused():
    with refuses("budget", "12", "13"):
        simulate(Playing(QUERY_ARMS), Scripted(THREE_QUERIES, tokens=12), [5, 13], runs=2)
    assert simulate(Playing(QUERY_ARMS), Scripted(THREE_QUERIES, tokens=12), 12, runs=2).tokens[0] == 12


def test_unmet_needs_are_refused_before_anything_is_drawn():
    class Untouchable(Scripted):
        def reset(self, rows, rng, needs):
            raise AssertionError("the environment was started")

    environment = Untouchable(ONE_QUERY, gives=())
    with refuses("metasd-ucb:reward=bd-verified", "overlap", "accepted tokens only"):
        simulate(MetaSDUCB(VerifiedDivergence()), environment, 5, runs=2)


@pytest.mark.parametrize(
    ("text", "share"),
    [("none", 0.0), ("keep", 1.0), ("discount:0.9", 0.9), ("discount:0", 0.0), ("discount:1", 1.0)],
)
def test_carry_over_is_a_share(text, share):
    assert parse_carry_over(text) == share


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Keep",
        "none:",
        "keep:1",
        "discount",
        "discount:",
        "discount:x",
        "discount:-0.1",
        "discount:1.1",
        "discount:nan",
    ],
)
def test_other_carry_overs_are_refused(text):
    with refuses("carry_over", repr(text)):
        parse_carry_over(text)


def test_memory_does_not_grow_with_the_budget():
    def peak(budget):
        tracemalloc.start()
        simulate(MetaSDUCB(BlockEfficiency()), StationaryEnvironment([0.9, 0.5], 9), budget, runs=3)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(100)  # what is made once, at the first use
    assert abs(peak(20_000) - peak(1_000)) < 20_000  # bytes, for thousands of rounds
