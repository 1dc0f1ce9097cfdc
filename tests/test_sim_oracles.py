"""Oracles: the truth of every scope, and comparators that know the best arm of each query."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metasd_sim.costs import CostModel
from metasd_sim.environments import LostFeedback, PiecewiseEnvironment, ReplayEnvironment, StationaryEnvironment
from metasd_sim.environments.base import OBJECTIVES, SCOPES, SECONDS, SIGNALS, TRUTH
from metasd_sim.policies import FixedArm, Oracle, RandomArm, make_policy, policy_specs
from metasd_sim.simulate import simulate
from metasd_sim.summary import summarize
from tests.sim_cases import ENVIRONMENT_CASES, arm_names, make_context, make_trace, refuses, z_limit

ROW = np.array([0])


def accepting(lengths, depth, accepted, costs=None):
    """A greedy trace of arms that draft `depth` tokens; accepted[arm]: position -> tokens accepted there, else none."""
    trace = make_trace(lengths, arms=len(accepted), depth=depth, verification="greedy", costs=False)
    accept = np.zeros_like(trace.accept)
    for arm, at in enumerate(accepted):
        for position, n in at.items():
            accept[position, arm, :n] = 1
    trace = replace(trace, accept=accept, drafted=np.full_like(trace.drafted, depth), costs=costs)
    trace.check()
    return trace


# arm 0 accepts 2 tokens at 0 and 3 of the first query (5 tokens): 2 rounds; none in the second (2 tokens): 2 rounds.
# arm 1 accepts none in the first: 5 rounds; 1 at the start of the second: 1 round
TINY = [{0: 2, 3: 2}, {5: 1}]


def test_truths_of_a_tiny_trace_by_hand():
    costs = CostModel.linear([0.5, 0.0], 2, verify=1.0, catch_up=[0.0, 0.25])
    environment = ReplayEnvironment(accepting((5, 2), 2, TINY, costs))
    environment.reset(1, np.random.default_rng(0), frozenset())
    truth = environment.observe(ROW).truth
    np.testing.assert_allclose(truth("stream", "rounds"), [[7 / 4, 7 / 6]])
    np.testing.assert_allclose(truth("query", "rounds"), [[5 / 2, 1]])
    np.testing.assert_allclose(truth("segment", "rounds"), [[5 / 2, 1]])  # a segment of a replay is a query
    np.testing.assert_allclose(truth("round", "rounds"), [[3, 1]])
    # two drafted tokens at .5 s and a pass: 2 s a round of arm 0, 1 s of arm 1
    np.testing.assert_allclose(truth("stream", "time"), [[7 / 8, 7 / 6]])
    np.testing.assert_allclose(truth("query", "time"), [[5 / 4, 1]])
    np.testing.assert_allclose(truth("round", "time"), [[3 / 2, 1]])
    environment.step(ROW, np.array([0]))  # to position 3
    truth = environment.observe(ROW).truth
    np.testing.assert_allclose(truth("query", "rounds"), [[5 / 2, 1]])
    np.testing.assert_allclose(truth("round", "rounds"), [[2, 1]])  # both accepted tokens end the text: none of its own
    np.testing.assert_allclose(truth("round", "time"), [[2 / 2, 1 / 1.75]])  # arm 1 reads 3 missed tokens first
    environment.step(ROW, np.array([0]))  # the second query: prefill makes every arm current
    truth = environment.observe(ROW).truth
    np.testing.assert_allclose(truth("query", "rounds"), [[1, 2]])
    np.testing.assert_allclose(truth("round", "time"), [[1 / 2, 2 / 1]])
    np.testing.assert_allclose(truth("stream", "rounds"), [[7 / 4, 7 / 6]])


def test_rounds_of_the_oracles_by_hand():
    environment = ReplayEnvironment(accepting((5, 2), 2, TINY))
    taken = {spec: simulate(make_policy(spec), environment, history=True) for spec in ("oracle", "oracle:query")}
    assert taken["oracle"].history.rounds.arm.tolist() == [0, 0, 0, 0]
    assert taken["oracle:query"].history.rounds.arm.tolist() == [0, 0, 1]
    fixed = environment.fixed_arms(np.array([1, 5, 6, 7]))
    # the comparator plays 0 0 | 1, rounds at positions 0, 3, 5
    np.testing.assert_allclose(fixed.segment_rounds, [1, 2, 3, 3])
    assert fixed.segment_seconds is None
    record = summarize(taken["oracle"], Oracle(), environment)[0]
    assert (record["regret_mean"], record["segment_regret_mean"]) == (0.0, 1.0)
    assert "segment_seconds_regret_mean" not in record


def test_a_budget_cuts_the_query_of_the_arm_that_is_best_over_all_of_it():
    # 6 tokens, depth 4. Arm 0 accepts 1 token at 0, none later: 5 rounds; arm 1 accepts 4 tokens at 1 alone: 2 rounds
    environment = ReplayEnvironment(accepting((6,), 4, [{0: 1}, {1: 4}]))
    fixed = environment.fixed_arms(np.array([2, 6]))
    np.testing.assert_allclose(fixed.rounds, [[1, 2], [5, 2]])
    np.testing.assert_allclose(fixed.segment_rounds, [2, 2])  # arm 1 throughout, though arm 0 is first to 2 tokens


def test_the_oracle_of_the_round_is_myopic():
    """The same text: 2 tokens now leave the round past the place from where 5 could be had."""
    environment = ReplayEnvironment(accepting((6,), 4, [{0: 1}, {1: 4}]))
    assert simulate(Oracle("round"), environment).rounds.tolist() == [[5]]
    assert simulate(Oracle("query"), environment).rounds.tolist() == [[2]]


def test_time_chooses_another_arm():
    costs = CostModel.linear([0.5, 0.0], 2)
    environment = ReplayEnvironment(accepting((5, 2), 2, TINY, costs))
    pulls = {spec: simulate(make_policy(spec), environment).pulls[0, 0].tolist() for spec in
             ("oracle", "oracle:objective=time", "oracle:query,objective=time")}  # fmt: skip
    assert pulls == {"oracle": [4, 0], "oracle:objective=time": [0, 6], "oracle:query,objective=time": [2, 1]}
    fixed = environment.fixed_arms(np.array([7]))
    np.testing.assert_allclose(fixed.segment_seconds, [2 * 2 + 1])
    outcome = simulate(Oracle("stream", "time"), environment)
    assert summarize(outcome, Oracle(), environment)[0]["segment_seconds_regret_mean"] == pytest.approx(6 - 5)


def rounds_by_enumeration(trace, position, arm):
    """Expected emitted tokens of one round, summed over its outcomes."""
    left, total, reach = int(trace.remaining()[position]), 0.0, 1.0
    for n in range(trace.max_draft + 1):
        stop = reach * (1 - float(trace.accept[position, arm, n])) if n < trace.max_draft else reach
        total += stop * min(n + 1, left)
        reach -= stop
    return total


@settings(max_examples=30, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), depth=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_truths_and_comparators_of_random_traces(lengths, depth, seed):
    trace = make_trace(tuple(lengths), depth=depth, seed=seed)
    environment = ReplayEnvironment(trace)
    ends = np.cumsum(lengths)
    fixed = environment.fixed_arms(ends)
    environment.reset(1, np.random.default_rng(seed), frozenset())
    rng = np.random.default_rng(seed)
    while not environment.done[0]:
        position = environment._position[0]
        context = environment.observe(ROW)
        query = context.query[0]
        value = {(scope, objective): context.truth(scope, objective)[0] for scope in SCOPES for objective in OBJECTIVES}
        expected = [rounds_by_enumeration(trace, position, arm) for arm in range(3)]
        np.testing.assert_allclose(value["round", "rounds"], expected)
        np.testing.assert_allclose(value["query", "rounds"], lengths[query] / fixed.query_rounds[query])
        np.testing.assert_allclose(value["query", "time"], lengths[query] / fixed.query_seconds[query])
        np.testing.assert_allclose(value["stream", "rounds"], ends[-1] / fixed.rounds[-1])
        np.testing.assert_allclose(value["stream", "time"], ends[-1] / fixed.seconds[-1])
        arm = rng.integers(0, 3, 1)
        seconds = environment.step(ROW, arm).seconds[0]
        assert value["round", "time"][arm[0]] == pytest.approx(expected[arm[0]] / seconds)
    # at the end of each query the best of each is at least as good as one arm for all
    np.testing.assert_allclose(fixed.segment_rounds, np.cumsum(fixed.query_rounds.min(axis=1)))
    np.testing.assert_allclose(fixed.segment_seconds, np.cumsum(fixed.query_seconds.min(axis=1)))
    assert np.all(fixed.segment_rounds <= fixed.rounds.min(axis=1) * (1 + 1e-12))
    assert np.all(fixed.segment_seconds <= fixed.seconds.min(axis=1) * (1 + 1e-12))


def test_oracles_take_the_rounds_that_the_comparators_expect():
    """6 z-tests on 3,000 runs, family-wise false alarm 1e-3; within a query too, as the budget cuts it."""
    trace = make_trace((9, 6, 12), seed=5)
    environment = ReplayEnvironment(trace)
    budgets = np.array([4, 13, 27])
    fixed = environment.fixed_arms(budgets)
    limit = z_limit(6)
    for objective in OBJECTIVES:
        outcome = simulate(Oracle("query", objective), environment, budgets, runs=3000, seed=2)
        taken = outcome.rounds if objective == "rounds" else outcome.seconds
        expected = fixed.segment_rounds if objective == "rounds" else fixed.segment_seconds
        # no catch-up in the seconds: the oracle changes arms between queries only, when all are current
        error = taken.std(axis=0, ddof=1) / np.sqrt(3000)
        assert np.all(np.abs(taken.mean(axis=0) - expected) < limit * error + 1e-9)
    assert fixed.segment_rounds[-1] <= fixed.rounds[-1].min()


def test_stationary_truth_by_hand():
    # g: 1 + .5 + .25 = 1.75 with 2 tokens, 1 + .9 = 1.9 with one; seconds 1 + 2 * .1 + .05 and 1 + .3 + .05
    costs = CostModel.linear([0.1, 0.3], 2, verify=1.0, catch_up=5.0, overhead=0.05)
    environment = StationaryEnvironment([0.5, 0.9], [2, 1], costs=costs)
    environment.reset(3, np.random.default_rng(0), frozenset())
    context = environment.observe(np.array([0, 2]))
    for scope in SCOPES:
        np.testing.assert_allclose(context.truth(scope, "rounds"), [[1.75, 1.9]] * 2)
        np.testing.assert_allclose(context.truth(scope, "time"), [[1.75 / 1.25, 1.9 / 1.35]] * 2)
    outcome = simulate(Oracle(), StationaryEnvironment([0.2, 0.9, 0.5]), 200, runs=5)
    assert np.all(outcome.pulls[:, 0, [0, 2]] == 0)
    fast = StationaryEnvironment([0.9, 0.5], costs=CostModel.linear([1.0, 0.0], 5))
    assert simulate(Oracle("round", "time"), fast, 50).pulls[0, 0, 0] == 0  # 4.69 / 6 < 1.97 / 1


def test_oracle_plays_the_best_eligible_arm_and_breaks_ties_fairly():
    oracle = Oracle("query")
    oracle.start(6000, arm_names(4), 4, np.random.default_rng(0))
    rows = np.arange(6000)
    asked = []
    context = make_context(6000, 4)
    context.truth = lambda *of: asked.append(of) or np.tile([3.0, 5.0, 5.0, 1.0], (6000, 1))
    arms = oracle.select(rows, context)
    assert asked == [("query", "rounds")]
    assert set(arms) == {1, 2}
    assert abs(np.count_nonzero(arms == 1) - 3000) < 4 * np.sqrt(1500)  # false alarm 6e-5
    context.eligible = np.tile([True, False, False, True], (6000, 1))
    assert set(oracle.select(rows, context)) == {0}
    np.testing.assert_array_equal(oracle.select(rows[:9], make_tied(9)), arms[:9])  # and each row always the same way
    context.truth = None
    with refuses("truth"):
        oracle.select(rows, context)


def make_tied(n):
    context = make_context(n, 4)
    context.truth = lambda *of: np.tile([3.0, 5.0, 5.0, 1.0], (n, 1))
    return context


def test_arms_that_tie_over_a_query_are_not_mixed_within_it():
    # depth 1: arm 0 accepts a token at the start of each query of 4, arm 1 one later: 3 rounds either way, but with
    # arm 1 first and arm 0 after it 4
    trace = accepting((4, 4), 1, [{0: 1, 4: 1}, {1: 1, 5: 1}])
    outcome = simulate(Oracle("query"), ReplayEnvironment(trace), runs=200)
    assert np.all(outcome.rounds == 6)
    assert np.all(outcome.switches == 0)
    assert set(outcome.pulls[:, 0].argmax(axis=1)) == {0, 1}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_names(scope, objective):
    policy = make_policy(f"oracle:{scope},objective={objective}")
    assert (policy.scope, policy.objective) == (scope, objective)
    again = make_policy(str(policy))
    assert (again.scope, again.objective) == (scope, objective)
    assert policy.needs == {TRUTH} | ({SECONDS} if objective == "time" else set())
    if objective == "rounds":
        assert str(policy) == ("oracle" if scope == "stream" else f"oracle:{scope}")
        assert str(make_policy(f"oracle:scope={scope}")) == str(policy)


def test_bad_oracles_are_refused():
    with refuses("scope", "stream, segment, query, round", "'queries'"):
        make_policy("oracle:queries")
    with refuses("objective", "rounds, time", "'speed'"):
        make_policy("oracle:objective=speed")
    with refuses("seconds"):
        simulate(Oracle(objective="time"), ReplayEnvironment(make_trace(costs=False)))


def test_all_has_the_oracles_that_differ():
    def oracles(environment):
        specs = policy_specs("all", environment.arms, environment.gives, None, environment.scopes)
        return [spec for spec in specs if spec.startswith("oracle")]

    assert oracles(ReplayEnvironment(make_trace())) == ["oracle", "oracle:query", "oracle:round"]
    assert oracles(StationaryEnvironment([0.5, 0.4])) == ["oracle"]
    assert [s for s in policy_specs("all", ("a",), SIGNALS) if s.startswith("oracle")] == [
        "oracle", "oracle:segment", "oracle:query", "oracle:round"
    ]  # fmt: skip
    assert not any(spec.startswith("oracle") for spec in policy_specs("all", ("a",), frozenset()))


def test_segment_regret_of_policies_is_at_least_their_regret():
    environment = ReplayEnvironment(make_trace((9, 7, 8), seed=3))
    for policy in (RandomArm(), FixedArm(1)):
        record = summarize(simulate(policy, environment, runs=20), policy, environment)[0]
        assert record["segment_regret_mean"] >= record["regret_mean"]
        assert record["segment_seconds_regret_mean"] >= record["seconds_regret_mean"]
    stationary = StationaryEnvironment([0.5, 0.4])
    record = summarize(simulate(RandomArm(), stationary, 30, runs=3), RandomArm(), stationary)[0]
    assert "segment_regret_mean" not in record  # one segment: the regret itself


@pytest.mark.parametrize("name", ENVIRONMENT_CASES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_oracle_of_the_stream_is_the_comparator_at_every_budget(name, objective):
    """The arm that it plays is a best fixed arm up to that budget, also where another is best over the whole text."""
    environment = ENVIRONMENT_CASES[name].make()
    if objective == "time" and SECONDS not in environment.gives:
        with refuses("time"):
            simulate(Oracle(objective="time"), environment, 3)
        return
    for budget in (1, 2, 3, 5, 8, 13, 20, 21):
        outcome = simulate(Oracle(objective=objective), environment, budget, runs=2)
        fixed = environment.fixed_arms(np.array([budget]))
        spent = (fixed.rounds if objective == "rounds" else fixed.seconds)[0]
        played = outcome.pulls[:, 0].argmax(axis=1)
        assert np.all(outcome.pulls[:, 0].max(axis=1) == outcome.rounds[:, 0])  # one arm throughout
        assert spent[played] == pytest.approx(spent.min(), rel=1e-9)


def test_the_oracle_of_segments_that_the_budget_weighs_otherwise():
    # arm 1 is best over the two segments of 1000 tokens, arm 0 over the first 1,100, arm 1 over all that follows
    environment = PiecewiseEnvironment([[0.8, 0.2], [0.2, 0.7]])
    for budget, best in ((1100, 0), (10_000, 1)):
        assert environment.fixed_arms(np.array([budget])).rounds[0].argmin() == best
        outcome = simulate(Oracle(), environment, budget, runs=20)
        assert np.all(outcome.pulls[:, 0, 1 - best] == 0)
        record = summarize(outcome, Oracle(), environment)[0]
        assert abs(record["regret_mean"]) < 4 * record["regret_se"]  # false alarm 6e-5
        wrapped = LostFeedback(environment, 0.5)
        assert np.all(simulate(Oracle(), wrapped, budget, runs=2).pulls[:, 0, 1 - best] == 0)
