"""Environments whose best arm changes: exact comparators against hand numbers, dynamic programming and simulation.

Statistical tests have fixed seeds; a comment beside each states how often it would fail on fresh ones.
"""

import tracemalloc
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare

from metasd_sim.adversary import fooling_sequence
from metasd_sim.costs import CostModel
from metasd_sim.environments import (
    AdversarialEnvironment,
    DomainEnvironment,
    DriftingEnvironment,
    PiecewiseEnvironment,
    StationaryEnvironment,
    renewal,
    staying,
)
from metasd_sim.environments.base import BLOCK_OVERLAP, EVERY_ARM, FEATURES, OVERLAP, TRUTH
from metasd_sim.policies import FixedArm, KLUCBTrials, MetaSDUCB, RandomArm, argmax_random
from metasd_sim.regret import speedup, stopping_time, stopping_time_regret, time_regret
from metasd_sim.rewards import BlockEfficiency
from metasd_sim.simulate import simulate
from tests.sim_cases import refuses, z_limit
from tests.test_sim_environments import by_row, play

NOTHING = frozenset()
RATES = [[0.9, 0.3, 0.5], [0.2, 0.8, 0.5], [0.6, 0.7, 1.0]]


def costs(lengths, catch_up=0.0):
    return CostModel.linear([0.1, 0.02, 0.05][: len(lengths)], max(lengths), 1.0, 0.01, catch_up, 0.02)


class Knowing:
    """Plays the arm that the environment's truth names; `leave_to_chance` ties."""

    needs = frozenset({TRUTH})

    def __init__(self, scope, objective="rounds"):
        self.scope, self.objective = scope, objective

    def start(self, rows, arms, max_draft, rng, horizon=None):
        self.rng, self.rows = rng, rows

    def restart(self, rows, keep=0.0, horizon=None):
        pass

    def select(self, rows, context):
        return argmax_random(context.truth(self.scope, self.objective), self.rng.random(self.rows)[rows])

    def update(self, rows, rounds):
        pass


class Drawn(RandomArm):
    """Random arms that ask for signals, so that the environment draws them."""

    def __init__(self, needs):
        self.needs = needs


def same_mean(measured, expected, limit):
    """measured [runs, budgets] against exact means [budgets]."""
    error = measured.std(axis=0, ddof=1) / np.sqrt(len(measured))
    np.testing.assert_array_less(np.abs(measured.mean(axis=0) - expected), limit * error + 1e-9)


def accept_law(alpha, gamma, decay=1.0, silent=0.0):
    """P(N = n) and the chance of a draft, from first principles: walk down the block."""
    law, reached = [0.0] * (gamma + 1), 1.0
    for depth in range(gamma):
        rate = alpha * decay**depth
        law[depth] = reached * (1 - rate)
        reached *= rate
    law[gamma] += reached
    return [(1 - silent) * p + silent * (n == 0) for n, p in enumerate(law)]


# --- pieces of text


def test_piecewise_by_hand():
    # One drafted token. Perfect rounds emit 2, useless ones 1. Rates of the arms: 1, 0 for 3 tokens, then 0, 1.
    # First arm: rounds start at 0 2 4 5 6; second: 0 1 2 3 5 7; the best of each segment: 0 2 4 6
    environment = PiecewiseEnvironment([[1.0, 0.0], [0.0, 1.0]], 3, draft_length=1)
    fixed = environment.fixed_arms(np.arange(1, 8))
    np.testing.assert_allclose(fixed.rounds.T, [[1, 1, 2, 2, 3, 4, 5], [1, 2, 3, 4, 4, 5, 5]])
    np.testing.assert_allclose(fixed.segment_rounds, [1, 1, 2, 2, 3, 3, 4])
    assert fixed.tokens_per_round is None
    assert fixed.seconds is None
    assert fixed.segment_seconds is None
    # repeated: segments start at 0 3 6 9. First arm: 0 2 4 5 6 8 10 11 12
    cycled = PiecewiseEnvironment([[1.0, 0.0], [0.0, 1.0]], 3, cycle=True, draft_length=1)
    np.testing.assert_allclose(cycled.fixed_arms(np.array([9, 10, 11, 12, 13])).rounds[:, 0], [6, 6, 7, 8, 9])


def test_piecewise_seconds_by_hand():
    # The same, with rounds of 1.1 s and 1.9 s: in time the first arm is best where both emit 1.
    # g/c of segment 0: 2/1.1, 1/1.9; of segment 1: 1/1.1 = .909, 2/1.9 = 1.053
    model = CostModel.linear([0.1, 0.9], 1)
    environment = PiecewiseEnvironment([[1.0, 0.0], [0.0, 1.0]], 3, draft_length=1, costs=model)
    fixed = environment.fixed_arms(np.array([3, 5]))
    np.testing.assert_allclose(fixed.seconds, [[2.2, 3 * 1.9], [3.3, 4 * 1.9]])
    np.testing.assert_allclose(fixed.segment_seconds, [2.2, 2.2 + 1.9])
    assert fixed.plain == 1.0
    slow = PiecewiseEnvironment(
        [[1.0, 0.0], [0.0, 1.0]], 3, draft_length=1, costs=CostModel.linear([0.1, 1.3], 1)
    )  # 2/2.3 = .870: now the first arm is best throughout in time, not in rounds
    np.testing.assert_allclose(slow.fixed_arms(np.array([5])).segment_seconds, [3.3])
    np.testing.assert_allclose(slow.fixed_arms(np.array([5])).segment_rounds, [3])


@pytest.mark.parametrize("cycle", [False, True])
@pytest.mark.parametrize("tokens", [[1, 1, 1], [2, 3, 1], [7, 4, 9]])
def test_piecewise_equals_a_dynamic_programme(tokens, cycle):
    """E(t) = price + sum_n P(N = n) E(t + n + 1) with the law of t's segment, backwards from the budget."""
    lengths, silent, decay = [4, 2, 3], [0.0, 0.3, 0.1], 0.9
    model = costs(lengths)
    environment = PiecewiseEnvironment(
        RATES, tokens, cycle, draft_length=lengths, decay=decay, silent=silent, costs=model
    )
    price = [
        (1 - silent[a]) * model.seconds(a, lengths[a]) + silent[a] * model.seconds(a, 0) for a in range(3)
    ]  # fmt: skip
    of_text = np.repeat(np.arange(3), tokens)
    law = [[accept_law(RATES[s][a], lengths[a], decay, silent[a]) for a in range(3)] for s in range(3)]
    worth = [[1 + sum(n * p for n, p in enumerate(law[s][a])) for a in range(3)] for s in range(3)]
    budgets = np.array([1, 2, 3, 5, 8, 13, 20, 29])

    def programme(choose, pay):
        expected = []
        for budget in budgets:
            rest = np.zeros(budget + 6)
            for t in range(budget - 1, -1, -1):
                s = of_text[t % len(of_text)] if cycle else of_text[min(t, len(of_text) - 1)]
                a = choose(s)
                rest[t] = pay(a) + sum(p * rest[t + n + 1] for n, p in enumerate(law[s][a]))
            expected.append(rest[0])
        return expected

    fixed = environment.fixed_arms(budgets)
    for arm in range(3):
        np.testing.assert_allclose(fixed.rounds[:, arm], programme(lambda s, a=arm: a, lambda a: 1.0))
        np.testing.assert_allclose(fixed.seconds[:, arm], programme(lambda s, a=arm: a, lambda a: price[a]))
    np.testing.assert_allclose(fixed.segment_rounds, programme(lambda s: int(np.argmax(worth[s])), lambda a: 1.0))
    np.testing.assert_allclose(
        fixed.segment_seconds, programme(lambda s: int(np.argmax(np.divide(worth[s], price))), lambda a: price[a])
    )
    np.testing.assert_allclose(environment.law.tokens, worth)


def test_chunks_of_a_long_text_do_not_show(monkeypatch):
    environment = PiecewiseEnvironment(RATES, [100, 50, 70], costs=costs([5] * 3))
    budgets = np.array([1, 99, 100, 101, 163, 400, 1000])
    whole = environment.fixed_arms(budgets)
    monkeypatch.setattr(renewal, "CHUNK", 9)
    parts = PiecewiseEnvironment(RATES, [100, 50, 70], costs=costs([5] * 3)).fixed_arms(budgets)
    np.testing.assert_allclose(parts.rounds, whole.rounds)
    np.testing.assert_allclose(parts.segment_seconds, whole.segment_seconds)


@pytest.mark.parametrize("needs", [NOTHING, frozenset({OVERLAP}), frozenset({EVERY_ARM, BLOCK_OVERLAP})])
def test_equal_segments_are_the_stationary_environment(needs):
    """The same draws, not only the same law: one segment, or several with the same rates."""
    options = {"draft_length": [4, 2, 0], "decay": 0.9, "silent": [0.2, 0, 0], "costs": costs([4, 2, 0], 0.01)}
    stationary = StationaryEnvironment(RATES[0], **options)
    expected = by_row(play(stationary, needs))
    budgets = np.array([1, 7, 60])
    for alphas, tokens in (([RATES[0]], 10), ([RATES[0]] * 3, 4)):
        for cycle in (False, True):
            environment = PiecewiseEnvironment(alphas, tokens, cycle, **options)
            assert by_row(play(environment, needs)) == expected
            fixed, known = environment.fixed_arms(budgets), stationary.fixed_arms(budgets)
            np.testing.assert_allclose(fixed.rounds, known.rounds)
            np.testing.assert_allclose(fixed.seconds, known.seconds)
            best = stationary.law.tokens[0].argmax()
            np.testing.assert_allclose(fixed.segment_rounds, known.rounds[:, best])


def test_a_round_has_the_law_of_the_segment_in_which_it_starts():
    # certain rounds: 4 tokens in the first segment of 6, so one starts at 4 and reaches into the second; then 1 each
    environment = PiecewiseEnvironment([[1.0], [0.0]], 6, draft_length=3)
    (rounds,) = by_row(play(environment, rows=1, tokens=14)).values()
    assert [values[4] for values in rounds] == [3, 3, 0, 0, 0, 0, 0, 0]
    edge = PiecewiseEnvironment([[1.0], [0.0]], 8, draft_length=3)  # one starts at 8, the second's first token
    (rounds,) = by_row(play(edge, rows=1, tokens=10)).values()
    assert [values[4] for values in rounds] == [3, 3, 0, 0]
    cycled = PiecewiseEnvironment([[1.0], [0.0]], 6, True, draft_length=3)
    (rounds,) = by_row(play(cycled, rows=1, tokens=20)).values()
    assert [values[4] for values in rounds] == [3, 3, 0, 0, 0, 0, 3, 3]  # starts 0 4 8 9 10 11 12 16


def test_the_best_of_each_segment_is_what_an_oracle_reaches():
    """z of E tau and E seconds at 3 budgets, 2 environments; false alarm 1e-3 over 12 (Bonferroni)."""
    budgets = [40, 170, 500]
    for cycle in (False, True):
        environment = PiecewiseEnvironment(RATES, [60, 90, 31], cycle, draft_length=[5, 3, 2], costs=costs([5, 3, 2]))
        fixed = environment.fixed_arms(np.array(budgets))
        outcome = simulate(Knowing("segment"), environment, budgets, runs=2000)
        same_mean(outcome.rounds, fixed.segment_rounds, z_limit(12))
        timed = simulate(Knowing("segment", "time"), environment, budgets, runs=2000, seed=1)
        same_mean(timed.seconds, fixed.segment_seconds, z_limit(12))
        assert np.all(fixed.segment_rounds <= fixed.rounds.min(axis=1) + 1e-9)


def test_truth_of_pieces_by_hand():
    # one drafted token: g = 1 + alpha. Over 30 + 10 tokens arm 0 takes 30/2 + 10/1 = 25 rounds, arm 1 30/1.5 + 10/1.5
    model = CostModel.linear([1.0, 0.0], 1)
    environment = PiecewiseEnvironment([[1.0, 0.5], [0.0, 0.5]], [30, 10], costs=model, draft_length=1)
    environment.reset(2, np.random.default_rng(0), NOTHING)
    truth = environment.observe(np.arange(2)).truth
    np.testing.assert_allclose(truth("stream", "rounds"), [[40 / 25, 1.5]] * 2)
    np.testing.assert_allclose(truth("segment", "rounds"), [[2, 1.5]] * 2)
    np.testing.assert_allclose(truth("segment", "time"), [[1, 1.5]] * 2)
    for _ in range(15):
        environment.step(np.array([1]), np.array([0]))
    np.testing.assert_allclose(environment.observe(np.arange(2)).truth("segment", "rounds"), [[2, 1.5], [1, 1.5]])
    with refuses("objective", "costs"):
        plain = PiecewiseEnvironment([[0.5]])
        plain.reset(1, np.random.default_rng(0), NOTHING)
        plain.observe(np.array([0])).truth("segment", "time")


def test_memory_does_not_grow_with_the_budget():
    environment = PiecewiseEnvironment([[0.9, 0.3], [0.2, 0.8]], 50, cycle=True)

    def peak(action):
        action()  # imports and caches
        tracemalloc.start()
        action()
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    short, long = (peak(lambda b=b: simulate(RandomArm(), environment, b, runs=50)) for b in (500, 10_000))
    assert long < 1.1 * short + 10_000

    def comparator(budget):
        environment._known = None
        environment.fixed_arms(np.array([budget]))

    short, long = (peak(lambda b=b: comparator(b)) for b in (5_000, 50_000))
    assert long < 1.1 * short + 10_000


# --- drift


def test_drifting_rates_by_hand():
    # knots 100 tokens apart, steps of 40, 40, 20: rates of the middles 20, 60, 90, then the last knot for ever
    environment = DriftingEnvironment([[0.2, 0.8], [0.6, 0.8]], 100, 40)
    np.testing.assert_allclose(environment.alphas.T, [[0.28, 0.44, 0.56, 0.6], [0.8] * 4])
    assert environment.segment_tokens[:3].tolist() == [40, 40, 20]
    assert environment.arms == ("0.2/0.6", "0.8/0.8")
    back = DriftingEnvironment([[0.2], [0.6]], 100, 100, cycle=True)
    np.testing.assert_allclose(back.alphas, [[0.4], [0.4]])
    wave = DriftingEnvironment.sinusoid([0.5, 0.4], [0.3, 0.0], 8, [0.0, 0.7], every=2)
    # sin of pi/4, 3 pi/4, 5 pi/4, 7 pi/4
    height = 0.3 / np.sqrt(2)
    np.testing.assert_allclose(wave.alphas.T, [0.5 + height * np.array([1, 1, -1, -1]), [0.4] * 4])
    assert wave.cycle
    assert wave.segment_tokens.tolist() == [2, 2, 2, 2]


def test_a_drift_that_goes_nowhere_is_stationary():
    budgets = np.array([1, 50, 3000])
    expected = StationaryEnvironment([0.7, 0.4]).fixed_arms(budgets).rounds
    for flat in (
        DriftingEnvironment([[0.7, 0.4]] * 3, 500),
        DriftingEnvironment.sinusoid([0.7, 0.4], 0.0, 500),
    ):
        np.testing.assert_allclose(flat.fixed_arms(budgets).rounds, expected)
        assert by_row(play(flat)) == by_row(play(StationaryEnvironment([0.7, 0.4])))


# --- domains


def test_domains_by_hand():
    # 3 drafted tokens, texts of 6. A perfect arm's rounds start at 0, 4 (2 left: drafts 2, emits 2); a useless one's at
    # each token. Tasks 0 1 0 for sure: arm 0 is perfect in task 0, arm 1 in task 1.
    environment = DomainEnvironment(
        [[1.0, 0.0], [0.0, 1.0]], 6, 3, [[0, 1], [1, 0]], [1, 0], 0.0, CostModel.linear([1.0, 0.0], 3), draft_length=3
    )
    assert environment.tokens == 18
    budgets = np.array([1, 4, 5, 6, 7, 10, 12, 13, 17, 18])
    fixed = environment.fixed_arms(budgets)
    np.testing.assert_allclose(fixed.rounds.T, [[1, 1, 2, 2, 3, 6, 8, 9, 10, 10], [1, 4, 5, 6, 7, 7, 8, 9, 13, 14]])
    np.testing.assert_allclose(fixed.segment_rounds, [1, 1, 2, 2, 3, 3, 4, 5, 6, 6])
    # seconds of arm 0: 1 + drafted; 4 and 3 in task 0. In task 1, left 6 5 4 3 2 1: 4 4 4 4 3 2. Arm 1: 1 a round
    np.testing.assert_allclose(fixed.seconds[:, 0], [4, 4, 7, 7, 11, 23, 28, 32, 35, 35])
    np.testing.assert_allclose(fixed.seconds[:, 1], fixed.rounds[:, 1])
    # in time arm 1 is best in both tasks: 6 s against 7, and 2 against 21
    np.testing.assert_allclose(fixed.segment_seconds, fixed.seconds[:, 1])
    environment.reset(2, np.random.default_rng(0), frozenset({FEATURES}))
    assert environment.tasks.tolist() == [[0, 1, 0]] * 2
    context = environment.observe(np.arange(2))
    np.testing.assert_allclose(context.features, [[1, 0]] * 2)
    np.testing.assert_allclose(context.truth("query", "rounds"), [[3, 1]] * 2)
    np.testing.assert_allclose(context.truth("query", "time"), [[6 / 7, 1]] * 2)
    np.testing.assert_allclose(context.truth("stream", "rounds"), [[1.8, 18 / 14]] * 2)
    assert context.horizon.tolist() == [6, 6]
    first, second = (environment.step(np.array([0]), np.array([0])) for _ in range(2))
    assert (first.drafted[0], first.accepted[0], first.emitted[0], first.seconds[0]) == (3, 3, 4, 4.0)
    assert (second.drafted[0], second.accepted[0], second.emitted[0], second.seconds[0]) == (2, 2, 2, 3.0)
    later = environment.observe(np.arange(2))
    assert later.query.tolist() == [1, 0]
    assert later.new_query.tolist() == [True, True]
    np.testing.assert_allclose(later.truth("round", "rounds"), [[1, 4], [4, 1]])
    np.testing.assert_allclose(later.truth("round", "time"), [[1 / 4, 4], [1, 1]])
    environment.step(np.array([0]), np.array([1]))
    assert environment.observe(np.array([0])).truth("round", "rounds").tolist() == [[1, 2]]  # 2 left


def test_domains_equal_an_enumeration_of_chains_and_a_dynamic_programme():
    """Every chain of 3 queries, and within them E(t) backwards from the budget, texts ending where they do."""
    lengths, silent, model = [4, 2], [0.1, 0.0], costs([4, 2])
    rates, chain, start = [[0.9, 0.3], [0.2, 0.8]], [[0.9, 0.1], [0.4, 0.6]], [0.3, 0.7]
    size, queries = 5, 3
    environment = DomainEnvironment(
        rates, size, queries, chain, start, costs=model, draft_length=lengths, decay=0.95, silent=silent
    )
    law = [[accept_law(rates[k][a], lengths[a], 0.95, silent[a]) for a in range(2)] for k in range(2)]

    def price(arm, left):
        drafting = model.seconds(arm, min(lengths[arm], left))
        return (1 - silent[arm]) * drafting + silent[arm] * model.seconds(arm, 0)

    def programme(tasks, choose, budget, timed):
        @cache
        def rest(t):
            if t >= budget:
                return 0.0
            task, left = tasks[t // size], size - t % size
            arm = choose(task)
            pay = price(arm, left) if timed else 1.0
            return pay + sum(p * rest(t + min(n + 1, left)) for n, p in enumerate(law[task][arm]))

        return rest(0)

    best = {
        timed: [min((0, 1), key=lambda a, k=k: programme((k,), lambda _: a, size, timed)) for k in range(2)]
        for timed in (False, True)
    }
    budgets = np.array([1, 2, 4, 5, 6, 9, 10, 13, 15])
    expected = np.zeros((6, len(budgets)))
    for tasks in product(range(2), repeat=queries):
        weight = start[tasks[0]] * chain[tasks[0]][tasks[1]] * chain[tasks[1]][tasks[2]]
        rules = [(lambda _, a=a: a, timed) for timed in (False, True) for a in range(2)]
        rules += [(lambda k, timed=timed: best[timed][k], timed) for timed in (False, True)]
        for i, (rule, timed) in enumerate(rules):
            expected[i] += [weight * programme(tasks, rule, b, timed) for b in budgets]
    fixed = environment.fixed_arms(budgets)
    np.testing.assert_allclose(fixed.rounds.T, expected[:2])
    np.testing.assert_allclose(fixed.seconds.T, expected[2:4])
    np.testing.assert_allclose(fixed.segment_rounds, expected[4])
    np.testing.assert_allclose(fixed.segment_seconds, expected[5])


def test_one_query_of_one_task_is_a_stationary_text_until_it_ends():
    budgets = np.array([1, 10, 199, 200])
    environment = DomainEnvironment([[0.9, 0.4]], 200, 1, draft_length=4)
    expected = StationaryEnvironment([0.9, 0.4], 4).fixed_arms(budgets).rounds
    np.testing.assert_allclose(environment.fixed_arms(budgets).rounds, expected)


def test_an_oracle_reaches_the_best_of_each_query():
    """z of E tau and E seconds at 3 budgets; false alarm 1e-3 over 6 (Bonferroni)."""
    environment = DomainEnvironment(RATES, 23, 12, staying(3, 0.7), draft_length=[5, 3, 2], costs=costs([5, 3, 2]))
    budgets = [30, 130, environment.tokens]
    fixed = environment.fixed_arms(np.array(budgets))
    outcome = simulate(Knowing("query"), environment, budgets, runs=2000)
    same_mean(outcome.rounds, fixed.segment_rounds, z_limit(6))
    timed = simulate(Knowing("query", "time"), environment, budgets, runs=2000, seed=1)
    same_mean(timed.seconds, fixed.segment_seconds, z_limit(6))


def test_tasks_follow_the_chain():
    """Chi-square of first tasks and of each task's successors, 400 rows of 50; false alarm 1e-3 over 4 (Bonferroni)."""
    chain, start = np.array([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5], [0.3, 0.3, 0.4]]), np.array([0.2, 0.5, 0.3])
    environment = DomainEnvironment(RATES, 5, 50, chain, start)
    environment.reset(400, np.random.default_rng(0), NOTHING)
    tasks = environment.tasks
    assert chisquare(np.bincount(tasks[:, 0], minlength=3), 400 * start).pvalue > 1e-3 / 4
    for task in range(3):
        followers = np.bincount(tasks[:, 1:][tasks[:, :-1] == task], minlength=3)
        possible = chain[task] > 0
        assert not followers[~possible].any()
        assert chisquare(followers[possible], followers.sum() * chain[task][possible]).pvalue > 1e-3 / 4
    assert not np.array_equal(tasks[0], tasks[1])
    other = environment.tasks.copy()
    environment.reset(400, np.random.default_rng(1), NOTHING)
    assert not np.array_equal(other, environment.tasks)


def test_default_start_is_the_stationary_law():
    # pi = pi P for stay .9 and .6: pi_0 .1 = pi_1 .4
    environment = DomainEnvironment(RATES[:2], transition=[[0.9, 0.1], [0.4, 0.6]])
    np.testing.assert_allclose(environment.start, [0.8, 0.2])
    np.testing.assert_allclose(
        DomainEnvironment(RATES[:2], transition=np.eye(2)).start, [0.5, 0.5]
    )  # every law is kept
    np.testing.assert_allclose(DomainEnvironment(RATES).start, [1 / 3] * 3)
    np.testing.assert_allclose(staying(3, 0.8), [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
    np.testing.assert_allclose(staying(1, 0.8), [[1.0]])


def test_features_tell_the_task_through_noise():
    """Mean and spread of 40,000 draws; false alarm about 1e-4 (4 standard errors each)."""
    environment = DomainEnvironment(RATES[:2], 5, 50, feature_noise=0.3)
    environment.reset(400, np.random.default_rng(0), frozenset({FEATURES}))
    noise = environment._features - np.eye(2)[environment.tasks]
    assert abs(noise.mean()) < 4 * 0.3 / np.sqrt(noise.size)
    assert abs(noise.std() - 0.3) < 4 * 0.3 / np.sqrt(2 * noise.size)
    # constant within a query, and not drawn at the rounds' expense
    bare, shown = (play(environment, needs) for needs in (NOTHING, frozenset({FEATURES})))
    assert by_row(bare) == by_row(shown)
    seen = {}
    for rows, context, _ in shown:
        for row, query, features in zip(rows, context.query, context.features, strict=True):
            np.testing.assert_array_equal(seen.setdefault((row, query), features), features)
    assert len({tuple(features) for features in seen.values()}) == len(seen)
    assert bare[0][1].features is None


def test_errors_of_domains_come_from_independent_rows():
    """Rows draw their own chains: the error of the mean is that of the runs, not of the queries."""
    environment = DomainEnvironment(RATES, 20, 6, costs=costs([5] * 3))
    outcome = simulate(RandomArm(), environment, None, runs=300)
    expected = outcome.rounds[:, 0].std(ddof=1) / np.sqrt(300)
    for estimate in (stopping_time(outcome, environment), stopping_time_regret(outcome, environment)):
        assert estimate.se[0] == pytest.approx(expected)
    assert time_regret(outcome, environment).se[0] == pytest.approx(outcome.seconds.std(ddof=1) / np.sqrt(300))
    assert speedup(outcome, environment).se[0] > 0


# --- adversaries


def test_adversarial_rounds_by_hand():
    # emitted per round: arm 0: 1 3 2, arm 1: 4 1 1, of 6 tokens a repetition each
    environment = AdversarialEnvironment([[0, 3], [2, 0], [1, 0]], 3)
    fixed = environment.fixed_arms(np.array([1, 2, 4, 5, 6, 7, 10, 16, 1206]))
    assert fixed.rounds.T.tolist() == [[1, 2, 2, 3, 3, 4, 5, 8, 603], [1, 1, 1, 2, 3, 4, 4, 7, 603]]
    (rounds,) = by_row(play(environment, rows=1, tokens=30)).values()
    table = [[0, 3], [2, 0], [1, 0]]
    assert [r[4] for r in rounds] == [table[t % 3][int(r[2])] for t, r in enumerate(rounds)]
    environment.reset(1, np.random.default_rng(0), NOTHING)
    row = np.array([0])
    np.testing.assert_allclose(environment.observe(row).truth("stream", "rounds"), [[2, 2]])
    np.testing.assert_allclose(environment.observe(row).truth("round", "rounds"), [[1, 4]])
    environment.step(row, np.array([0]))
    np.testing.assert_allclose(environment.observe(row).truth("round", "rounds"), [[3, 1]])


@pytest.mark.parametrize("make", [KLUCBTrials, lambda: MetaSDUCB(BlockEfficiency()), RandomArm])
def test_a_rule_whose_code_and_seed_are_known_loses_linearly(make):
    arms, gamma = 3, 4
    for rounds in (60, 600):
        environment = AdversarialEnvironment(fooling_sequence(make(), arms, gamma, rounds, seed=7), gamma)
        outcome = simulate(make(), environment, rounds, seed=7, history=True)
        assert outcome.rounds[0, 0] == outcome.tokens[0, 0] == rounds  # one token a round: every choice foreseen
        assert not outcome.history.rounds.accepted.any()
        # the arm played least is good in 2/3 of the rounds: 5 tokens there, 1 else, 11/3 on average
        best = environment.fixed_arms(np.array([rounds])).rounds.min()
        assert best < rounds / 2
    # chance that the adversary cannot foresee helps: random play meets a good arm twice in three rounds
    if make is RandomArm:
        assert simulate(RandomArm(), environment, 600, seed=8).rounds[0, 0] < 250
    milder = fooling_sequence(make(), arms, gamma, 60, seed=7, others=1)
    assert set(np.unique(milder)) == {0, 1}
    assert np.all((milder == 0).sum(axis=1) == 1)


# --- all of them


ALL = {
    "piecewise": lambda: PiecewiseEnvironment(RATES, [9, 2, 5], draft_length=[4, 2, 3], silent=0.1),
    "cycle": lambda: PiecewiseEnvironment(RATES, 7, True, draft_length=4, block_correlation=0.5),
    "drift": lambda: DriftingEnvironment(RATES, 30, 4),
    "domains": lambda: DomainEnvironment(RATES, 13, 9),
    "adversarial": lambda: AdversarialEnvironment([[0, 3, 1], [2, 0, 0], [1, 0, 3]], 3),
}


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_streams_stop_at_the_first_round_that_reaches_the_budget(make):
    environment = make()
    budgets = [1, 2, 17, 60]
    outcome = simulate(RandomArm(), environment, budgets, runs=50, history=True)
    for row in range(50):
        emitted = outcome.history.of_row(row).emitted
        sums = emitted.cumsum()
        for b, budget in enumerate(budgets):
            last = outcome.rounds[row, b] - 1
            assert outcome.tokens[row, b] == sums[last]
            assert sums[last] - emitted[last] < budget <= sums[last] <= budget + environment.max_draft


@pytest.mark.parametrize("name", ["piecewise", "cycle", "drift", "domains"])
def test_what_is_drawn_besides_does_not_change_the_law(name):
    """z of random play's rounds, no overlaps against all signals, 1500 runs each; false alarm 1e-3 over 4."""
    environment = ALL[name]()
    few = simulate(RandomArm(), environment, 60, runs=1500, seed=1).rounds[:, 0]
    all_signals = simulate(Drawn(environment.gives), environment, 60, runs=1500, seed=2).rounds[:, 0]
    error = np.sqrt((few.var() + all_signals.var()) / 1500)
    assert abs(few.mean() - all_signals.mean()) < z_limit(4) * error


def test_identical_arms_have_no_regret():
    """z of regret of random play over equal arms against 0; false alarm 1e-3 over 3 (Bonferroni)."""
    for environment in (
        PiecewiseEnvironment([[0.9, 0.9], [0.2, 0.2]], 50, True),
        DriftingEnvironment.sinusoid([0.5, 0.5], 0.4, 60),
        DomainEnvironment([[0.9, 0.9], [0.2, 0.2]], 20, 10),
    ):
        loss = stopping_time_regret(simulate(RandomArm(), environment, 200, runs=1000), environment)
        assert abs(loss.mean[0]) < z_limit(3) * loss.se[0]
        fixed = environment.fixed_arms(np.array([200]))
        np.testing.assert_allclose(fixed.segment_rounds, fixed.rounds[:, 0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PiecewiseEnvironment([0.5, 0.6]), ["alphas", "[segments, arms]", "[2]"]),
        (lambda: PiecewiseEnvironment([[0.5, 1.6]]), ["alpha", "1.6"]),
        (lambda: PiecewiseEnvironment([[0.5], [0.6]], [1, 2, 3]), ["tokens", "2", "[1, 2, 3]"]),
        (lambda: PiecewiseEnvironment([[0.5], [0.6]], [1, 0]), ["tokens", "0"]),
        (lambda: PiecewiseEnvironment([[0.5]], 2.5), ["tokens", "2.5"]),
        (lambda: PiecewiseEnvironment([[0.5, 0.6]], draft_length=0), ["draft_length", "0"]),
        (lambda: DriftingEnvironment([[0.5]]), ["knots", "1"]),
        (lambda: DriftingEnvironment([[0.5], [0.6]], every=0), ["every", "0"]),
        (lambda: DriftingEnvironment.sinusoid([0.9], 0.2), ["amplitude", "0.2"]),
        (lambda: DomainEnvironment([[0.5]], query_tokens=0), ["query_tokens", "0"]),
        (lambda: DomainEnvironment([[0.5]], queries=1.5), ["queries", "1.5"]),
        (lambda: DomainEnvironment([[0.5], [0.6]], transition=[[1.0]]), ["transition", "[2, 2]", "[1, 1]"]),
        (lambda: DomainEnvironment([[0.5], [0.6]], transition=[[0.5, 0.6], [0, 1]]), ["transition", "0.6"]),
        (lambda: DomainEnvironment([[0.5], [0.6]], start=[1.5, -0.5]), ["start", "-0.5"]),
        (lambda: DomainEnvironment([[0.5]], feature_noise=-1), ["feature_noise", "-1"]),
        (lambda: staying(2, 1.5), ["stay", "1.5"]),
        (lambda: AdversarialEnvironment([1, 2], 3), ["accepted", "[2]"]),
        (lambda: AdversarialEnvironment([[1, 4]], 3), ["accepted", "0..3", "4"]),
        (lambda: AdversarialEnvironment([[1, 0.5]], 3), ["accepted", "0.5"]),
        (lambda: AdversarialEnvironment([[1, 2]], 3, ["a", "a"]), ["names", "different"]),
        (lambda: fooling_sequence(FixedArm(0), 2, 3, 0), ["rounds", "0"]),
        (lambda: fooling_sequence(FixedArm(0), 2, 3, 5, others=4), ["others", "4"]),
    ],
)
def test_bad_instances_are_refused(make, words):
    with refuses(*words):
        make()
