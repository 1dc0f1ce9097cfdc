"""Upper confidence bounds that forget, by hand, against slow references, and where arms change."""

import math
from functools import partial

import numpy as np
import pytest
from scipy.stats import binomtest

from metasd_sim.acceptance import sample_accepted
from metasd_sim.environments.base import Context
from metasd_sim.policies import ChangeUCB, DiscountedUCB, MetaSDUCB, SlidingWindowUCB, make_policy
from metasd_sim.rewards import BlockDivergence, BlockEfficiency, TokensPerSecond, VerifiedDivergence
from metasd_sim.rounds import Rounds
from metasd_sim.simulate import simulate
from tests.sim_cases import Feedback, arm_names, make_context, make_rounds, refuses
from tests.test_sim_policies import PLAYS, drive, trained

ROW = np.array([0])
ALPHAS = (0.8, 0.7, 0.3)


# --- sliding window


def test_index_of_a_sliding_window():
    # The last 4 of PLAYS: arm 2 accepted 4, arm 0 2, arm 1 3 and 0. Means of BE 2/4, 3/8, 1; ln min(7, 4) = 1.386294;
    # bonuses sqrt(.6 * 1.386294 / n), n = 1, 2, 1: .912018, .644894, .912018
    index = trained(SlidingWindowUCB(BlockEfficiency(), 4), PLAYS).index(ROW)
    np.testing.assert_allclose(index, [[1.412018, 1.019894, 1.912018]], atol=1e-6)
    # block divergence: .3 + N / 8 (make_rounds), B = 1 / sqrt 4; xi 2.4 makes up for it
    index = trained(SlidingWindowUCB(BlockDivergence(), 4, 2.4), PLAYS).index(ROW)
    np.testing.assert_allclose(index, [[0.55 + 0.912018, 0.4875 + 0.644894, 0.8 + 0.912018]], atol=1e-6)
    # tokens per second: 3 / 1, 5 / 1, 5 / 4, divided by 5; B = 1/2 on pulls
    index = trained(SlidingWindowUCB(TokensPerSecond(), 4), PLAYS).index(ROW)
    np.testing.assert_allclose(index, [[0.6 + 0.456009, 1 + 0.322447, 0.25 + 0.456009]], atol=1e-6)


def test_an_arm_that_has_left_the_window_is_played_at_once():
    policy = trained(SlidingWindowUCB(BlockEfficiency(), 3), PLAYS)  # arms 0, 1, 1 are in it
    assert policy.pulls.tolist() == [[1, 2, 0]]
    assert (policy.value[0, 2], policy.weight[0, 2]) == (0, 0)
    assert policy.select(ROW, make_context(1, 3)).tolist() == [2]


def test_a_partial_restart_keeps_the_newest_rounds():
    policy = trained(SlidingWindowUCB(BlockEfficiency(), 5), PLAYS)  # 1 2 0 1 1
    policy.restart(ROW, 0.5)  # floor(2.5): arm 1 twice, accepted 3 and 0
    assert policy.pulls.tolist() == [[0, 2, 0]]
    assert policy.value.tolist() == [[0, 0.75, 0]]
    policy.update(ROW, make_rounds([2], [4], 4))
    for _ in range(2):
        policy.update(ROW, make_rounds([0], [1], 4))
    assert policy.pulls.tolist() == [[2, 2, 1]]  # five in all: none has left
    policy.update(ROW, make_rounds([0], [1], 4))
    assert policy.pulls.tolist() == [[3, 1, 1]]
    assert policy.value[0, 1] == 0  # the older of arm 1's two, which accepted 3


def test_a_window_longer_than_the_run_is_metasd_ucb():
    """sqrt(xi ln t / n) = beta sqrt(2 ln t / n) at beta = sqrt(xi / 2)."""
    feedback = Feedback(1, 5, 150, ALPHAS, 4)
    for xi in (0.6, 2.0):
        window = SlidingWindowUCB(BlockEfficiency(), 200, xi)
        plain = MetaSDUCB(BlockEfficiency(), math.sqrt(xi / 2))
        got, want = (drive(policy, feedback, 5, 150, np.random.default_rng(2)) for policy in (window, plain))
        np.testing.assert_array_equal(got, want)


# --- discount


def test_index_of_a_discount():
    # arm 0 with N = 4, arm 1 with N = 2, arm 0 with N = 0 of 4, discount 1/2: n = 1/4 + 1, 1/2; values 1/4 + 0, 1/4;
    # means .2, .5; ln 1.75 = .559616; bonuses 2 sqrt(.6 * .559616 / n) = 1.036563, 1.638950
    policy = trained(DiscountedUCB(BlockEfficiency(), 0.5), [(0, 4, 1), (1, 2, 1), (0, 0, 1)], n_arms=2)
    np.testing.assert_allclose(policy.index(ROW), [[1.236563, 2.138950]], atol=1e-6)
    # no discount: n = 2, 1, sum 3: 2 sqrt(.6 ln 3 / n) = 1.148188, 1.623782
    policy = trained(DiscountedUCB(BlockEfficiency(), 1.0), [(0, 4, 1), (1, 2, 1), (0, 0, 1)], n_arms=2)
    np.testing.assert_allclose(policy.index(ROW), [[0.5 + 1.148188, 0.5 + 1.623782]], atol=1e-6)
    policy.restart(ROW, 0.1)  # .3 pulls in all: the logarithm stops at 0
    np.testing.assert_allclose(policy.index(ROW), [[0.5, 0.5]])


# --- CUSUM


def cusum(accepted, **options):
    """Statistics of one arm's detector after each of the rounds `accepted` of 4."""
    policy = ChangeUCB(BlockEfficiency(), **{"warm": 2, "drift": 0.1, "threshold": 1.0, "epsilon": 0.0} | options)
    policy.start(1, arm_names(1), 4, np.random.default_rng(0))
    out = []
    for n in accepted:
        policy.update(ROW, make_rounds([0], [n], 4, n_arms=1))
        out.append((policy.above[0, 0], policy.below[0, 0], policy.pulls[0, 0]))
    return out


def test_alarm_times():
    # baseline (.25 + .75) / 2 = .5; samples of 1 add .4 to g+: .4, .8, 1.2 >= 1 at the third; those of 0 the same to g-
    for n, side in ((4, 0), (0, 1)):
        got = cusum([1, 3, n, n, n, n, n])
        assert [step[side] for step in got] == pytest.approx([0, 0, 0.4, 0.8, 0, 0, 0])
        assert [step[2] for step in got] == [1, 2, 3, 4, 0, 1, 2]  # the alarm forgets its own sample, and warms up anew
    # g+ falls back by drift + gap and not under 0: 1 adds .4, .5 takes .1, 0 takes .6
    got = cusum([1, 3, 4, 2, 4, 0, 0])
    assert [step[0] for step in got] == pytest.approx([0, 0, 0.4, 0.3, 0.7, 0.1, 0.0])
    assert [step[1] for step in got] == pytest.approx([0, 0, 0, 0, 0, 0.4, 0.8])
    # an alarm at the threshold itself: two samples of 1 with drift 0
    assert [step[2] for step in cusum([2, 2, 4, 4, 4], drift=0.0)] == [1, 2, 3, 0, 1]
    # within the drift nothing adds up
    assert cusum([2, 2] + [3] * 200, drift=0.25)[-1] == (0, 0, 202)
    assert cusum([2, 2] + [4] * 200, threshold=math.inf)[-1][2] == 202


def test_an_alarm_resets_its_own_arm_and_row_alone():
    policy = ChangeUCB(BlockEfficiency(), warm=1, drift=0.0, threshold=1.0)
    policy.start(2, arm_names(2), 4, np.random.default_rng(0))
    rows = np.arange(2)
    for arms, accepted in (([0, 0], [0, 0]), ([1, 1], [2, 2]), ([0, 0], [4, 3])):  # g+ 1 in row 0, .75 in row 1
        policy.update(rows, make_rounds(arms, accepted, 4))
    assert policy.pulls.tolist() == [[0, 1], [2, 1]]
    assert policy.value.tolist() == [[0, 0.5], [0.75, 0.5]]
    assert policy.count.tolist() == [[0, 1], [1, 1]]
    assert policy.select(rows[:1], make_context(1, 2)).tolist() == [0]  # played again at once
    policy.restart(rows, 0.5)
    for statistic, value in ((policy.pulls, 1), (policy.count, 0.5), (policy.total, 0), (policy.above, 0.375)):
        assert statistic[1, 0] == value


def test_index_of_change_ucb_and_its_exploration():
    # n = 2, 3, 1 and means 6/8, 4/12, 1 as for MetaSD-UCB; ln 6 = 1.791759
    # bonuses sqrt(.6 ln 6 / n) = .733163, .598625, 1.036849
    index = trained(ChangeUCB(BlockEfficiency()), PLAYS).index(ROW)
    np.testing.assert_allclose(index, [[0.75 + 0.733163, 1 / 3 + 0.598625, 1 + 1.036849]], atol=1e-6)
    rows = np.arange(20_000)
    policy = ChangeUCB(BlockEfficiency(), epsilon=0.3, xi=0.0)
    policy.start(len(rows), arm_names(3), 4, np.random.default_rng(1))
    for arm in range(3):
        policy.update(rows, make_rounds([arm] * len(rows), [4 - arm] * len(rows), 4))
    away = int(np.count_nonzero(policy.select(rows, make_context(len(rows), 3))))
    assert binomtest(away, len(rows), 0.2).pvalue > 1e-4  # epsilon times 2 of 3; false alarm 1e-4


# --- slow references


def slow_run(kind, reward, feedback, row, luck, eligible, restarts):
    """The arms of one row from the list of its rounds so far; luck [steps, 3]: tie, coin, exploration."""
    k, gamma = feedback.n_arms, feedback.max_draft
    past, played = [], []  # past: [arm, value, weight, pulls]
    baseline, walk = [[] for _ in range(k)], [[0.0, 0.0] for _ in range(k)]
    for step in range(len(luck)):
        keep = restarts.get(step, 1.0)
        if keep < 1:
            if kind == "window":
                past = past[len(past) - int(len(past) * keep) :]
            else:
                past = [[arm, keep * v, keep * w, keep * n] for arm, v, w, n in past]
            if keep == 0:
                baseline, walk = [[] for _ in range(k)], [[0.0, 0.0] for _ in range(k)]
        pulls = [sum(entry[3] for entry in past if entry[0] == arm) for arm in range(k)]
        value = [sum(entry[1] for entry in past if entry[0] == arm) for arm in range(k)]
        weight = [sum(entry[2] for entry in past if entry[0] == arm) for arm in range(k)]
        index = []
        for arm in range(k):
            if pulls[arm] == 0:
                index.append(math.inf)
                continue
            log = {
                "window": math.log(min(len(past) + 1, 25)),
                "discount": math.log(max(sum(pulls), 1)),
                "cusum": math.log(max(sum(pulls), 1)),
            }[kind]
            factor = 2 if kind == "discount" else 1
            index.append(value[arm] / weight[arm] + factor * math.sqrt(0.6 * log / weight[arm]))
        allowed = [arm for arm in range(k) if eligible[row, step, arm]]
        best = max(index[arm] for arm in allowed)
        tied = [arm for arm in allowed if index[arm] == best]
        arm = tied[int(luck[step][0] * len(tied))]
        if kind == "cusum" and luck[step][1] < 0.2 and all(pulls[a] > 0 for a in allowed):
            arm = allowed[int(luck[step][2] * len(allowed))]
        accepted = int(feedback.accepted[row, step, arm])
        trials = min(accepted + 1, gamma)
        overlap = [float(b) for b in feedback.overlap[row, step, arm]]
        v, w = (accepted / gamma, 1) if reward == "be" else (sum(overlap[:trials]), trials)
        if kind == "discount":
            past = [[a, 0.9 * x, 0.9 * y, 0.9 * n] for a, x, y, n in past]
        past.append([arm, v, w, 1])
        if kind == "window":
            past = past[-25:]
        if kind == "cusum":
            if len(baseline[arm]) < 5:
                baseline[arm].append(v / w)
            else:
                gap = v / w - sum(baseline[arm]) / 5
                walk[arm] = [max(0.0, walk[arm][0] + gap - 0.05), max(0.0, walk[arm][1] - gap - 0.05)]
                if max(walk[arm]) >= 0.8:
                    past = [entry for entry in past if entry[0] != arm]
                    baseline[arm], walk[arm] = [], [0.0, 0.0]
        played.append(arm)
    return played


@pytest.mark.parametrize("reward", [BlockEfficiency(), VerifiedDivergence()], ids=lambda reward: reward.name)
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("window", partial(SlidingWindowUCB, window=25)),
        ("discount", partial(DiscountedUCB, discount=0.9)),
        ("cusum", partial(ChangeUCB, warm=5, drift=0.05, threshold=0.8, epsilon=0.2)),
    ],
)
def test_vectorised_policy_equals_a_slow_scalar_one(kind, make, reward):
    rows, steps, n_arms = 5, 160, 3
    feedback = Feedback(41, rows, steps, ALPHAS, 4)
    eligible = np.ones((rows, steps, n_arms), dtype=bool)
    eligible[3:] = np.random.default_rng(42).random((2, steps, n_arms)) < 0.7
    eligible[~eligible.any(axis=2), 0] = True
    restarts = {70: 0.0, 130: 1.0} | ({} if kind == "cusum" else {100: 0.5})
    played = drive(
        make(reward),
        feedback,
        rows,
        steps,
        np.random.default_rng(43),
        eligible=eligible,
        restart=lambda step: (np.arange(rows), restarts[step]) if step in restarts else None,
    )
    draws = 3 if kind == "cusum" else 1
    luck = np.random.default_rng(43).random((steps, draws, rows))
    for row in range(rows):
        assert played[row].tolist() == slow_run(kind, reward.name, feedback, row, luck[:, :, row], eligible, restarts)
    assert len({tuple(row) for row in played}) == rows


# --- where arms change


class Switching:
    """Arms whose acceptance rates change at given rounds; each row has its own clock."""

    queries, endless, gives = 1, True, frozenset()

    def __init__(self, phases, at, max_draft=5):
        self.phases, self.at, self.max_draft = np.array(phases), np.array(at), max_draft
        self.arms = arm_names(self.phases.shape[1])

    def reset(self, rows, rng, needs):
        self.rng, self.played, self.done = rng, np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=bool)

    def observe(self, rows):
        return Context(np.zeros(len(rows), dtype=np.int64), self.played[rows] == 0)

    def step(self, rows, arms):
        phase = np.searchsorted(self.at, self.played[rows], side="right")
        uniform = self.rng.random(len(self.played))[rows]
        accepted = sample_accepted(self.phases[phase, arms], self.max_draft, uniform)
        self.played[rows] += 1
        return Rounds(arms, np.full(len(rows), self.max_draft), accepted, accepted + 1, self.max_draft)

    def fixed_arms(self, budgets):
        return None


@pytest.mark.parametrize("name", ["sw-ucb", "d-ucb:xi=0.15", "change-ucb"])
def test_forgetting_pays_where_the_best_arm_changes(name):
    """The best of three arms fades and another rises, after 1,000 and 2,000 rounds; 14,000 tokens, 60 runs.

    Measured: 3,505 rounds of MetaSD-UCB, 3,237, 3,309 and 3,392 of these; 3,622 of D-UCB with xi .6, whose published
    width `2 B` explores too much here. Rounds are fewer than MetaSD-UCB's by more than 6 standard errors; policies
    that do no better pass once in 1e9.
    """
    environment = Switching([[0.8, 0.3, 0.2], [0.6, 0.95, 0.2], [0.6, 0.6, 0.9]], [1000, 2000])
    tau = simulate(make_policy(name), environment, 14_000, runs=60, seed=1).rounds[:, 0]
    plain = simulate(MetaSDUCB(BlockEfficiency()), environment, 14_000, runs=60, seed=2).rounds[:, 0]
    assert plain.mean() - tau.mean() > 6 * np.hypot(plain.std(), tau.std()) / math.sqrt(60)


def test_forgetting_costs_where_nothing_changes():
    environment = Switching([[0.8, 0.6, 0.4]], [])
    plain = simulate(MetaSDUCB(BlockEfficiency(), 0.5), environment, 6000, runs=60, seed=3).rounds[:, 0]
    tau = simulate(SlidingWindowUCB(BlockEfficiency(), 50), environment, 6000, runs=60, seed=4).rounds[:, 0]
    assert tau.mean() - plain.mean() > 6 * np.hypot(plain.std(), tau.std()) / math.sqrt(60)


def test_change_ucb_seldom_raises_a_false_alarm_with_its_defaults():
    """One arm of alpha .8: 19% of runs within 2,000 rounds, as measured; 400 rows, false alarm below 1e-4."""
    rows = np.arange(400)
    rng = np.random.default_rng(5)
    policy = ChangeUCB(BlockEfficiency())
    policy.start(len(rows), arm_names(1), 5, rng)
    for _ in range(2000):
        accepted = sample_accepted(np.full(len(rows), 0.8), 5, rng.random(len(rows)))
        policy.update(rows, make_rounds([0] * len(rows), accepted, 5, n_arms=1))
    share = (policy.pulls[:, 0] < 2000).mean()
    assert 0.1 < share < 0.28
    seen, delay = np.zeros(len(rows), dtype=bool), 0
    while seen.mean() < 0.5:
        delay += 1
        accepted = sample_accepted(np.full(len(rows), 0.4), 5, rng.random(len(rows)))
        policy.update(rows, make_rounds([0] * len(rows), accepted, 5, n_arms=1))
        seen |= policy.pulls[:, 0] == 0
    assert 25 <= delay <= 40  # the median delay, 32 when measured


# --- refusals


def test_bad_parameters_are_refused():
    be = BlockEfficiency()
    for window in (0.0, 2.5, np.nan, np.inf):
        with refuses("window", str(window)):
            SlidingWindowUCB(be, window)
    with refuses("window", "3", "2"):
        SlidingWindowUCB(be, 2).start(1, arm_names(3), 4, np.random.default_rng(0))
    for discount in (0.0, 1.1, np.nan):
        with refuses("discount", str(discount)):
            DiscountedUCB(be, discount)
    for name, value in (("warm", 0.0), ("warm", 1.5), ("drift", -0.1), ("drift", 1.0), ("threshold", 0.0)):
        with refuses(name, str(value)):
            ChangeUCB(be, **{name: value})
    with refuses("epsilon", "nan"):
        ChangeUCB(be, epsilon=np.nan)
    for make in (SlidingWindowUCB, DiscountedUCB, ChangeUCB):
        with refuses("xi", "-1"):
            make(be, xi=-1.0)
    with refuses("change-ucb", "tokens-per-second"):
        ChangeUCB(TokensPerSecond())
