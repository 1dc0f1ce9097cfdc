"""Schedules that explore and then commit, the arms in turn, and epsilon-greedy, by hand and against slow references."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binomtest, chisquare

from metasd_sim.environments import StationaryEnvironment
from metasd_sim.policies import EpsilonGreedy, ExploreThenCommit, MetaSDUCB, RoundRobin, SequentialHalving
from metasd_sim.policies.elimination import exploration_tokens
from metasd_sim.rewards import AcceptanceTrials, BlockEfficiency, TokensPerSecond
from metasd_sim.simulate import simulate
from tests.sim_cases import Feedback, arm_names, make_context, make_rounds, refuses
from tests.test_sim_policies import drive, sequence

ROW = np.array([0])


def play(policy, accepted, steps, max_draft, seed=0, seconds=1.0, horizon=None, eligible=None):
    """Arms played by one row where arm a always accepts accepted[a]; eligible: step -> arms, or None."""
    n_arms = len(accepted)
    policy.start(1, arm_names(n_arms), max_draft, np.random.default_rng(seed), horizon)
    played = []
    for step in range(steps):
        allowed = None if eligible is None else np.isin(np.arange(n_arms), eligible(step))[None]
        arm = int(policy.select(ROW, make_context(1, n_arms, allowed))[0])
        seen = np.broadcast_to(seconds, n_arms)[arm]
        policy.update(ROW, make_rounds([arm], [accepted[arm]], max_draft, seconds=[seen], n_arms=n_arms))
        played.append(arm)
    return played


def runs_of(played):
    """[(arm, length)] of contiguous plays."""
    runs = []
    for arm in played:
        if runs and runs[-1][0] == arm:
            runs[-1][1] += 1
        else:
            runs.append([arm, 1])
    return [tuple(run) for run in runs]


# --- sequential halving


@pytest.mark.parametrize("seed", range(6))
def test_schedule_of_eight_arms(seed):
    """gamma 7, explore 960, three phases of 960 / (|S| 3 8): 5, 10 and 20 pulls for 8, 4 and 2 arms.

    Arm a accepts a, so 4..7, then 6 and 7 survive. 40 rounds a phase, then arm 7 alone. The first phase has 8 runs; a
    later one has a run fewer than it has survivors if the arm that played last is among them.
    """
    played = play(SequentialHalving(BlockEfficiency(), 960.0), range(8), 150, 7, seed)
    assert sorted(runs_of(played[:40])) == [(arm, 5) for arm in range(8)]
    assert sorted(runs_of(played[40:80])) == [(arm, 10) for arm in range(4, 8)]
    assert sorted(runs_of(played[80:120])) == [(6, 20), (7, 20)]
    assert played[120:] == [7] * 30
    for end, survivors in ((40, range(4, 8)), (80, (6, 7))):
        assert (played[end] == played[end - 1]) == (played[end - 1] in survivors)
    switches = len(runs_of(played)) - 1
    saved = (played[39] >= 4) + (played[79] >= 6) + (played[119] == 7)
    assert switches == 7 + 4 + 2 + 1 - saved


def test_schedule_of_three_arms_with_an_odd_half():
    # 3 arms, gamma 4: ceil(log2 3) = 2 phases of 60 / (3 2 5) = 2 and floor(60 / (2 2 5)) = 3 pulls; 2, then 1 survive
    played = play(SequentialHalving(BlockEfficiency(), 60.0), [4, 2, 0], 30, 4)
    assert sorted(runs_of(played[:6])) == [(0, 2), (1, 2), (2, 2)]
    assert sorted(runs_of(played[6:12])) == [(0, 3), (1, 3)]
    assert played[12:] == [0] * 18


def test_estimates_count_all_phases():
    # arm 0 accepts 4 4, then 0 0 0: 8 of 20; arm 1 accepts 2 2, then 1 1 1: 7 of 20, though more in the last phase
    policy = SequentialHalving(BlockEfficiency(), 60.0)
    policy.start(1, arm_names(3), 4, np.random.default_rng(0))
    pulls = [0, 0, 0]
    accepts = [[4, 4, 0, 0, 0], [2, 2, 1, 1, 1], [0, 0]]
    for _ in range(12):
        arm = int(policy.select(ROW, make_context(1, 3))[0])
        policy.update(ROW, make_rounds([arm], [accepts[arm][pulls[arm]]], 4))
        pulls[arm] += 1
    assert pulls == [5, 5, 2]
    assert policy.select(ROW, make_context(1, 3))[0] == 0


def test_exploration_keeps_to_its_tokens_unless_a_phase_has_no_room():
    for explore, arms in ((100.0, 3), (333.0, 5), (960.0, 8), (2000.0, 7)):
        played = play(SequentialHalving(BlockEfficiency(), explore), [4] * arms, 600, 4)  # ties, full blocks
        last = max(i for i in range(1, 600) if played[i] != played[i - 1])
        phases = math.ceil(math.log2(arms))
        assert last * 5 <= explore
        assert explore - last * 5 < 600  # it uses what it may, but for rounding down and the last run
        counts = np.bincount(played[:last])
        assert counts.max() <= sum(math.floor(explore / (math.ceil(arms / 2**r) * phases * 5)) for r in range(phases))
    played = play(SequentialHalving(BlockEfficiency(), 1.0), [3, 2, 1, 0], 20, 4)  # one pull each, whatever it costs
    assert sorted(played[:4]) == [0, 1, 2, 3]
    assert sorted(played[4:6]) == [0, 1]
    assert played[6:] == [0] * 14


def test_default_exploration():
    """K = 4, 1,000 tokens: (4 * 2)^(1/3) 1000^(2/3) = 2 * 100; 10 tokens: at most half of them; unknown: 1000."""
    assert exploration_tokens(4, 1000) == pytest.approx(200)
    assert exploration_tokens(4, [8000, 10]) == pytest.approx([800, 5])
    policy = SequentialHalving(BlockEfficiency())
    policy.start(3, arm_names(4), 4, np.random.default_rng(0), 1000)
    assert policy.budget == pytest.approx([200] * 3)
    assert policy.left[0].tolist() == [5] * 4  # 200 / (4 * 2 * 5)
    policy.restart(np.array([0, 2]), 0.0, np.array([8000, 10]))  # each query has its own horizon
    assert policy.budget == pytest.approx([800, 200, 5])
    assert policy.left[:, 0].tolist() == [20, 5, 1]
    policy.restart(np.array([0]), 0.5, np.array([1000]))  # carried over: the schedule stays
    assert policy.budget == pytest.approx([800, 200, 5])
    policy.start(1, arm_names(4), 4, np.random.default_rng(0))
    assert policy.budget.tolist() == [1000]


def test_a_partial_restart_scales_statistics_and_keeps_the_schedule():
    policy = SequentialHalving(AcceptanceTrials(), 60.0)
    policy.start(1, arm_names(3), 4, np.random.default_rng(0))
    arm = int(policy.select(ROW, make_context(1, 3))[0])
    policy.update(ROW, make_rounds([arm], [2], 4))
    policy.restart(ROW, 0.5)
    assert (policy.value[0, arm], policy.weight[0, arm], policy.pulls[0, arm]) == (1.0, 1.5, 0.5)
    assert policy.left[0, arm] == 1
    assert policy.select(ROW, make_context(1, 3))[0] == arm


def test_an_arm_that_is_not_eligible_is_skipped():
    # 2 pulls each in phase 1. Arm 0, the best, is away for the first 4 rounds: it has had no pulls when arms 1 and 2
    # are through, is worst, and is dropped; the phase of 3 pulls each of 1 and 2 follows
    away = play(
        SequentialHalving(BlockEfficiency(), 60.0), [4, 2, 1], 20, 4, eligible=lambda t: (1, 2) if t < 5 else (0, 1, 2)
    )
    assert sorted(runs_of(away[:4])) == [(1, 2), (2, 2)]
    assert sorted(runs_of(away[4:10])) == [(1, 3), (2, 3)]
    assert away[10:] == [1] * 10
    # back before the phase is over, it has its turn
    back = play(
        SequentialHalving(BlockEfficiency(), 60.0), [4, 2, 1], 20, 4, eligible=lambda t: (1, 2) if t < 3 else (0, 1, 2)
    )
    assert back[12:] == [0] * 8
    # once committed to arm 0: the best of the others while it is away
    gone = play(
        SequentialHalving(BlockEfficiency(), 60.0),
        [4, 1, 2],
        20,
        4,
        eligible=lambda t: (1, 2) if t == 15 else (0, 1, 2),
    )
    assert gone[12:] == [0, 0, 0, 2, 0, 0, 0, 0]


def test_any_reward_will_do_as_the_order_alone_counts():
    # arm 0: 5 tokens in 10 s, arm 1: 1 token in 1 s
    played = play(SequentialHalving(TokensPerSecond(), 50.0), [4, 0], 30, 4, seconds=[10.0, 1.0])
    assert played[10:] == [1] * 20
    assert play(SequentialHalving(BlockEfficiency(), 50.0), [4, 0], 30, 4, seconds=[10.0, 1.0])[10:] == [0] * 20


def test_one_arm_and_bad_parameters():
    assert play(SequentialHalving(BlockEfficiency()), [2], 9, 4) == [0] * 9
    for explore in (0.0, -1.0, np.nan, np.inf):
        for make in (SequentialHalving, partial(ExploreThenCommit, pulls=None)):
            with refuses("explore", str(explore)):
                make(BlockEfficiency(), explore=explore)
    for pulls in (0.0, 2.5, np.nan, np.inf):
        with refuses("pulls", str(pulls)):
            ExploreThenCommit(BlockEfficiency(), pulls)
    with refuses("pulls or explore"):
        ExploreThenCommit(BlockEfficiency(), 2, 50)


def test_explore_then_commit():
    played = play(ExploreThenCommit(BlockEfficiency(), 3), [1, 4, 2], 20, 4)
    assert sorted(runs_of(played[:9])) == [(0, 3), (1, 3), (2, 3)]
    assert played[9:] == [1] * 11
    # by default explore / (K (gamma + 1)) pulls: (4 * 2)^(1/3) 1000^(2/3) / (4 * 5) = 10
    played = play(ExploreThenCommit(BlockEfficiency()), [1, 4, 2, 0], 60, 4, horizon=1000)
    assert sorted(runs_of(played[:40])) == [(arm, 10) for arm in range(4)]
    assert played[40:] == [1] * 20


def test_few_switches_and_the_best_arm_committed_to():
    """Arms .9, .5, .3, 3,000 tokens, 200 runs: at most 2 + 2 + 1 switches, and arm 0 in the end in nearly all."""
    environment = StationaryEnvironment([0.9, 0.5, 0.3], 5)
    halving = simulate(SequentialHalving(BlockEfficiency()), environment, 3000, runs=200, seed=1)
    ucb = simulate(MetaSDUCB(BlockEfficiency()), environment, 3000, runs=200, seed=1)
    assert halving.switches.max() <= 5
    assert ucb.switches.mean() > 10 * halving.switches.mean()
    assert (halving.pulls[:, 0].argmax(axis=1) == 0).mean() > 0.97


def slow_halving(halves, explore, feedback, row, luck, eligible, restarts):
    """Arms of one row, in loops; `halves`: sequential halving, else explore-then-commit; tokens per second."""
    k, gamma = feedback.n_arms, feedback.max_draft
    phases = math.ceil(math.log2(k)) if halves else 1

    def fresh(arms):
        each = max(1, math.floor(explore / (len(arms) * phases * (gamma + 1))))
        return dict.fromkeys(arms, each)

    value, weight, left, current, played = [0.0] * k, [0.0] * k, fresh(range(k)), None, []
    for step in range(len(luck)):
        keep = restarts.get(step, 1.0)
        value, weight = [keep * v for v in value], [keep * w for w in weight]
        if keep == 0:
            left, current = fresh(range(k)), None
        fortune = luck[step]
        estimate = [v / w if w else -math.inf for v, w in zip(value, weight, strict=True)]
        allowed = [arm for arm in range(k) if eligible[row, step, arm]]
        able = [arm for arm in left if arm in allowed]
        if able and len(left) > 1 and not any(left[arm] for arm in able):
            ranked = sorted(left, key=lambda arm: (-estimate[arm], fortune[arm]))
            left = fresh(sorted(ranked[: (len(left) + 1) // 2 if halves else 1]))
            able = [arm for arm in left if arm in allowed]
        due = [arm for arm in able if left[arm]] or able
        if not able:
            current = min(allowed, key=lambda arm: (-estimate[arm], fortune[arm]))
        elif current not in due:
            current = max(due, key=lambda arm: fortune[arm])
        value[current] += int(feedback.accepted[row, step, current]) + 1
        weight[current] += float(feedback.seconds[row, step, current])
        if current in left:
            left[current] = max(left[current] - 1, 0)
        played.append(current)
    return played


@pytest.mark.parametrize("halves", [True, False])
def test_vectorised_policy_equals_a_slow_scalar_one(halves):
    rows, steps, n_arms = 6, 200, 5
    feedback = Feedback(31, rows, steps, (0.8, 0.7, 0.6, 0.5, 0.4), 3)
    eligible = np.ones((rows, steps, n_arms), dtype=bool)
    eligible[3:] = np.random.default_rng(32).random((3, steps, n_arms)) < 0.6
    eligible[~eligible.any(axis=2), 0] = True
    restarts = {80: 0.0, 110: 0.5, 140: 1.0}
    make = SequentialHalving(TokensPerSecond(), 200.0) if halves else ExploreThenCommit(TokensPerSecond(), explore=200)
    played = drive(
        make,
        feedback,
        rows,
        steps,
        np.random.default_rng(33),
        eligible=eligible,
        restart=lambda step: (np.arange(rows), restarts[step]) if step in restarts else None,
    )
    luck = np.random.default_rng(33).random((steps, rows, n_arms))  # the policy draws one uniform per arm
    for row in range(rows):
        assert played[row].tolist() == slow_halving(halves, 200, feedback, row, luck[:, row], eligible, restarts)
    assert len({tuple(row) for row in played}) == rows


# --- arms in turn


def test_round_robin_takes_turns():
    played = play(RoundRobin(), [4, 0, 2], 30, 4)
    assert [(b - a) % 3 for a, b in pairwise(played)] == [1] * 29
    # arm 1 away at steps 3 to 8
    played = play(RoundRobin(), [4, 0, 2], 15, 4, eligible=lambda t: (0, 2) if 3 <= t < 9 else (0, 1, 2))
    assert all(a != b for a, b in pairwise(played[3:9]))
    assert set(played[3:9]) == {0, 2}
    policy = RoundRobin()
    policy.start(3000, arm_names(3), 4, np.random.default_rng(0))
    first = policy.select(np.arange(3000), make_context(3000, 3))
    assert chisquare(np.bincount(first)).pvalue > 1e-4  # from a random arm on; false alarm 1e-4
    policy.restart(np.arange(3000), 0.5)
    np.testing.assert_array_equal(policy.select(np.arange(3000), make_context(3000, 3)), (first + 1) % 3)


# --- epsilon-greedy


def test_epsilon_greedy_without_epsilon_never_strays():
    assert sequence(EpsilonGreedy(BlockEfficiency(), 0.0), [4, 0], 200)[2:] == [0] * 198
    timed = EpsilonGreedy(TokensPerSecond(), 0.0)
    assert sequence(timed, [4, 0], 50, seconds=[10.0, 1.0])[2:] == [1] * 48


@pytest.mark.parametrize(
    ("options", "step", "share"),
    [({}, 10, 0.1), ({"epsilon": 0.6}, 10, 0.6), ({"epsilon": 1.0}, 5, 1.0), ({"decay": 3.0}, 10, 0.3)],
)
def test_epsilon_greedy_explores_as_often_as_it_should(options, step, share):
    """The worse of two arms in round `step`: half of the explorations; 20,000 rows, false alarm 1e-4 a case."""
    rows = np.arange(20_000)
    policy = EpsilonGreedy(BlockEfficiency(), **options)
    policy.start(len(rows), arm_names(2), 4, np.random.default_rng(4))
    for _ in range(step):  # the last is round `step`, t = step
        arms = policy.select(rows, make_context(len(rows), 2))
        policy.update(rows, make_rounds(arms, np.where(arms == 0, 4, 1), 4))
    assert binomtest(int(arms.sum()), len(rows), share / 2).pvalue > 1e-4


def test_epsilon_greedy_explores_eligible_arms_alone_after_each_was_played():
    policy = EpsilonGreedy(BlockEfficiency(), 1.0)
    played = play(policy, [4, 0, 2], 200, 4, eligible=lambda t: (0, 2))
    assert sorted(played[:2]) == [0, 2]
    assert set(played) == {0, 2}
    for epsilon in (-0.1, 1.1, np.nan):
        with refuses("epsilon", str(epsilon)):
            EpsilonGreedy(BlockEfficiency(), epsilon)
    for decay in (0.0, np.inf, np.nan):
        with refuses("decay", str(decay)):
            EpsilonGreedy(BlockEfficiency(), decay=decay)
    with refuses("epsilon or decay"):
        EpsilonGreedy(BlockEfficiency(), 0.1, 5.0)
