"""Stopping-time regret, its decomposition and its estimators.

Statistical tests have fixed seeds; a comment beside each states how often it would fail on fresh ones.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest

from metasd_sim import acceptance
from metasd_sim.costs import CostModel
from metasd_sim.environments import StationaryEnvironment
from metasd_sim.policies import FixedArm, KLUCBTrials, MetaSDUCB, RandomArm
from metasd_sim.regret import (
    Estimate,
    best_arm_ratio,
    comparator,
    decomposition_residual,
    speedup,
    stopping_time,
    stopping_time_regret,
    time_regret,
)
from metasd_sim.rewards import BlockEfficiency
from metasd_sim.simulate import simulate
from tests.sim_cases import POLICY_CASES, GivesEverything, refuses, z_limit


class InTurn:
    """Arms 0, 1, .., 0, 1, .. in turn, by the row's own clock."""

    needs = frozenset()

    def start(self, rows, arms, max_draft, rng, horizon=None):
        self.at, self.n_arms = np.zeros(rows, dtype=int), len(arms)

    def restart(self, rows, keep=0.0, horizon=None):
        pass

    def select(self, rows, context):
        self.at[rows] += 1
        return (self.at[rows] - 1) % self.n_arms

    def update(self, rows, rounds):
        pass


# --- numbers by hand: a perfect drafter (4 tokens a round) and a useless one (1 token)

COSTS = CostModel.linear([0.5, 0.0], 3, 1.0)  # rounds of 2.5 s and 1 s, plain decoding 1 s a token
PERFECT_AND_USELESS = StationaryEnvironment([1.0, 0.0], 3, costs=COSTS)
BUDGETS = [2, 4, 8, 9]


@pytest.mark.parametrize(
    ("policy", "regret", "seconds", "ratio", "faster"),
    [
        # tau 1, 1, 2, 3 in 2.5, 2.5, 5, 7.5 s: the fastest but at B = 2, where two rounds without drafts take 2 s
        (FixedArm(0), [0, 0, 0, 0], [0.5, 0, 0, 0], [1, 1, 1, 1], [1.6, 1.6, 1.6, 1.6]),
        # tau 2, 4, 8, 9 against 1, 1, 2, 3; seconds 2, 4, 8, 9 against 2, 2.5, 5, 7.5; one token a second
        (FixedArm(1), [1, 3, 6, 6], [0, 1.5, 3, 1.5], [0, 0, 0, 0], [1, 1, 1, 1]),
        # tokens 4, 5, 9: tau 1, 1, 3, 3; seconds 2.5, 2.5, 6, 6 against 2, 2.5, 5, 7.5; speedup 4 / 2.5 and 9 / 6
        (InTurn(), [0, 0, 1, 0], [0.5, 0, 1, -1.5], [1, 1, 2 / 3, 2 / 3], [1.6, 1.6, 1.5, 1.5]),
    ],
    ids=["perfect", "useless", "in turn"],
)
def test_hand_derived_numbers(policy, regret, seconds, ratio, faster):
    outcome = simulate(policy, PERFECT_AND_USELESS, BUDGETS, runs=3)
    for estimate, expected in (
        (stopping_time_regret(outcome, PERFECT_AND_USELESS), regret),
        (time_regret(outcome, PERFECT_AND_USELESS), seconds),
        (speedup(outcome, PERFECT_AND_USELESS), faster),
    ):
        np.testing.assert_allclose(estimate.mean, expected, atol=1e-12)
        np.testing.assert_allclose(estimate.se, 0, atol=1e-12)
    np.testing.assert_allclose(best_arm_ratio(outcome, PERFECT_AND_USELESS), ratio)


def test_catch_up_is_part_of_time_regret():
    costs = CostModel.linear([0.5, 0.0], 3, 1.0, catch_up=0.1, overhead=0.5)
    environment = StationaryEnvironment([1.0, 0.0], 3, costs=costs)
    outcome = simulate(InTurn(), environment, 8, runs=2)
    # rounds of 3 and 1.5 s; arm 1 then catches up on 4 tokens, arm 0 on 1: 3 + 1.9 + 3.1 = 8, against 2 * 3
    assert outcome.seconds[:, 0] == pytest.approx([8.0, 8.0])
    assert time_regret(outcome, environment).mean[0] == pytest.approx(2.0)
    assert speedup(outcome, environment).mean[0] == pytest.approx(9 * 1.5 / 8)


def test_the_best_arm_in_time_need_not_be_best_in_rounds():
    costs = CostModel.linear([2.0, 0.0], 3, 1.0)  # 7 s for 4 tokens, 1 s for 1
    environment = StationaryEnvironment([1.0, 0.0], 3, costs=costs)
    outcome = simulate(FixedArm(0), environment, 8)
    assert stopping_time_regret(outcome, environment).mean[0] == 0
    assert time_regret(outcome, environment).mean[0] == pytest.approx(14 - 8)
    assert best_arm_ratio(outcome, environment)[0] == 1
    assert speedup(outcome, environment).mean[0] == pytest.approx(8 / 14)


def test_the_best_arm_is_that_of_each_budget():
    # at B = 3 the short careful drafter, later the long one that emits more per round
    environment = StationaryEnvironment([0.9, 0.66], [2, 10])
    outcome = simulate(FixedArm(0), environment, [3, 1000], runs=4)
    assert best_arm_ratio(outcome, environment).tolist() == [1, 0]
    outcome = simulate(FixedArm(1), environment, [3, 1000], runs=4)
    assert best_arm_ratio(outcome, environment).tolist() == [0, 1]


# --- the decomposition

# alphas, draft lengths, law of the overlaps; the first two by hand, the others drawn once
INSTANCES = [
    ([0.8, 0.6, 0.5], 5, "beta"),
    ([0.97, 0.02, 0.9, 0.9], [2, 7, 1, 4], "bernoulli"),
    *(
        (rng.uniform(0.05, 0.95, 3).tolist(), rng.integers(1, 8, 3).tolist(), ("beta", "bernoulli", "constant")[i])
        for i, rng in enumerate(map(np.random.default_rng, (101, 102, 103)))
    ),
]
HORIZONS = np.array([20, 150])
RUNS = 300
TESTS = len(POLICY_CASES) * len(INSTANCES) * len(HORIZONS)


def make_environment(alphas, lengths, law):
    costs = CostModel.linear(np.linspace(0.01, 0.1, len(alphas)), int(np.max(lengths)), catch_up=0.002)
    return StationaryEnvironment(alphas, lengths, law, costs=costs)


def z_of_residual(policy, environment, seed):
    """mean / standard error of the residual at each budget."""
    outcome = simulate(policy, environment, HORIZONS, runs=RUNS, seed=seed)
    residual = decomposition_residual(outcome, environment.tokens_per_round())
    return residual.mean(axis=0) / (residual.std(axis=0, ddof=1) / np.sqrt(RUNS))


@pytest.mark.parametrize("number", range(len(INSTANCES)))
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in POLICY_CASES.items()])
def test_residual_has_mean_zero_for_whoever_does_not_look_ahead(case, number):
    """Family-wise false alarm 1e-3 over all policies, instances and budgets (Bonferroni: |z| under about 4.5)."""
    policy, environment = case.make(), make_environment(*INSTANCES[number])
    if not policy.needs <= environment.gives:
        pytest.skip("needs an environment with more signals")
    assert np.all(np.abs(z_of_residual(policy, environment, seed=1000 + number)) <= z_limit(TESTS))


class Peeking(RandomArm):
    """Tries every arm on a copy of the environment, and plays `choose` of what each would have accepted."""

    def __init__(self, environment, choose):
        self.environment, self.choose = environment, choose

    def select(self, rows, context):
        tried = [
            copy.deepcopy(self.environment).step(rows, np.full(len(rows), arm)).accepted for arm in range(self.arms)
        ]
        return self.choose(np.stack(tried, axis=1))


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    "choose",
    [
        lambda accepted: np.where(accepted.max(axis=1) >= 2, 0, 1),  # arm 0 in the lucky rounds only
        lambda accepted: np.where(accepted.max(axis=1) == 0, 1, 0),  # arm 1 gets the failures
    ],
    ids=["lucky rounds", "failures"],
)
def test_a_policy_that_looks_ahead_is_found_out(choose, number):
    environment = make_environment(*INSTANCES[number])
    assert np.all(np.abs(z_of_residual(Peeking(environment, choose), environment, seed=1)) > 2 * z_limit(TESTS))


def test_wrong_rates_are_found_out():
    """The residual of a law that is not the one stated: rates off by .02."""
    environment = make_environment(*INSTANCES[0])
    outcome = simulate(RandomArm(), environment, 2000, runs=RUNS, seed=3)
    wrong = acceptance.tokens_per_round(environment.alphas + 0.02, 5)
    residual = decomposition_residual(outcome, wrong)[:, 0]
    assert residual.mean() / (residual.std() / np.sqrt(RUNS)) > 2 * z_limit(TESTS)


def test_residual_is_the_decomposition():
    environment = make_environment(*INSTANCES[1])
    outcome = simulate(KLUCBTrials(), environment, [10, 90], runs=7, seed=4)
    g = environment.tokens_per_round()
    wasted = sum((1 - g[i] / g.max()) * outcome.pulls[:, :, i] for i in range(len(g)))
    np.testing.assert_allclose(
        decomposition_residual(outcome, g), outcome.rounds - outcome.tokens / g.max() - wasted, atol=1e-10
    )


# --- the estimators


def exact_rounds(law, budget):
    """E tau of rounds with P(N = n) = law[n], by the recursion in plain Python."""
    expected = [0.0]
    for left in range(1, budget + 1):
        expected.append(1 + sum(p * expected[left - n - 1] for n, p in enumerate(law) if n + 1 <= left))
    return expected[budget]


@pytest.mark.parametrize("number", range(len(INSTANCES)))
def test_regret_of_random_play_is_that_of_the_mixed_law(number):
    """Random play has i.i.d. rounds of the arms' mixed law, so its regret is known. False alarm 1e-3 over 5."""
    alphas, lengths, law = INSTANCES[number]
    environment = make_environment(alphas, lengths, law)
    laws = np.zeros((len(alphas), environment.max_draft + 1))
    for arm, gamma in enumerate(environment.draft_lengths):
        laws[arm, : gamma + 1] = acceptance.pmf(alphas[arm], int(gamma))
    exact = exact_rounds(laws.mean(axis=0), 400) - min(exact_rounds(arm, 400) for arm in laws)
    outcome = simulate(RandomArm(), environment, 400, runs=400, seed=20 + number)
    regret = stopping_time_regret(outcome, environment)
    assert abs(regret.mean[0] - exact) <= z_limit(5) * regret.se[0]
    assert exact > 20 * regret.se[0]  # far from nothing


@pytest.mark.parametrize("number", range(len(INSTANCES)))
@pytest.mark.parametrize("arm", [0, 1, 2])
def test_regret_of_fixed_arms_is_known(arm, number):
    """False alarm 1e-3 over the 60 tests together."""
    environment = make_environment(*INSTANCES[number])
    outcome = simulate(FixedArm(arm), environment, HORIZONS, runs=400, seed=30 + number)
    fixed = environment.fixed_arms(HORIZONS)
    for estimate, exact in (
        (stopping_time_regret(outcome, environment), fixed.rounds[:, arm] - fixed.rounds.min(axis=1)),
        (time_regret(outcome, environment), fixed.seconds[:, arm] - fixed.seconds.min(axis=1)),
    ):
        assert np.all(np.abs(estimate.mean - exact) <= z_limit(60) * estimate.se + 1e-9)


@pytest.mark.parametrize("make", [RandomArm, KLUCBTrials, lambda: MetaSDUCB(BlockEfficiency())])
def test_the_control_variate_keeps_the_mean_and_cuts_the_error(make):
    """Against the plain difference of means, by the error of what was taken off; false alarm 1e-3 over 6."""
    environment = make_environment([0.8, 0.6, 0.5], 5, "beta")
    outcome = simulate(make(), environment, 2000, runs=400, seed=40)
    fixed = environment.fixed_arms(outcome.budgets)
    per_token = (fixed.seconds / fixed.rounds / fixed.tokens_per_round).min()
    residual = decomposition_residual(outcome, fixed.tokens_per_round)[:, 0]
    for estimate, measured, best, scale in (
        (stopping_time_regret(outcome, environment), outcome.rounds[:, 0], fixed.rounds.min(), 1.0),
        (time_regret(outcome, environment), outcome.seconds[:, 0], fixed.seconds.min(), per_token * 3.68928),
    ):
        taken_off = scale * residual.std(ddof=1) / 20
        assert abs(estimate.mean[0] - (measured.mean() - best)) <= z_limit(6) * taken_off
        assert 0 < estimate.se[0] < 0.75 * measured.std(ddof=1) / 20
    assert stopping_time(outcome, environment).mean[0] == pytest.approx(
        stopping_time_regret(outcome, environment).mean[0] + fixed.rounds.min()
    )
    assert stopping_time(outcome, environment).se[0] == stopping_time_regret(outcome, environment).se[0]


def test_standard_errors_are_honest():
    """200 experiments of 50 runs of a fixed arm, whose expectations are known.

    z has mean 0 and variance 1 (49/47 for Student's t): |mean| < .28 and variance in .65..1.5, about 4 standard
    deviations each way; false alarm about 1e-3 over the three.
    """
    environment = make_environment([0.7, 0.5], [3, 5], "constant")
    budgets = np.array([100])
    outcome = simulate(FixedArm(1), environment, budgets, runs=10_000, seed=50)
    fixed = environment.fixed_arms(budgets)
    per_second = fixed.plain * fixed.tokens_per_round[1] * fixed.rounds[0, 1] / fixed.seconds[0, 1]  # Wald
    exact = {
        stopping_time_regret: fixed.rounds[0, 1] - fixed.rounds[0].min(),
        time_regret: fixed.seconds[0, 1] - fixed.seconds[0].min(),
        speedup: per_second,
    }
    names = ("rounds", "tokens", "pulls", "seconds", "query_rounds", "query_seconds")
    for function, expected in exact.items():
        z = []
        for start in range(0, 10_000, 50):
            part = replace(outcome, **{name: getattr(outcome, name)[start : start + 50] for name in names})
            estimate = function(part, environment)
            z.append((estimate.mean[0] - expected) / estimate.se[0])
        assert abs(np.mean(z)) < 0.28
        assert 0.65 < np.var(z) < 1.5


def test_one_run_says_nothing_of_its_error():
    environment = make_environment(*INSTANCES[0])
    outcome = simulate(RandomArm(), environment, HORIZONS, runs=1)
    for function in (stopping_time, stopping_time_regret, time_regret, speedup):
        estimate = function(outcome, environment)
        assert np.all(np.isfinite(estimate.mean))
        assert np.all(np.isnan(estimate.se))


def test_intervals():
    low, high = Estimate(np.array([10.0, 0.0]), np.array([1.0, 2.0])).interval()
    np.testing.assert_allclose([low, high], [[8.04, -3.92], [11.96, 3.92]])


def test_what_is_not_known_is_refused_or_absent():
    environment = GivesEverything()
    outcome = simulate(RandomArm(), environment, 10, runs=3)
    estimate = stopping_time(outcome, environment)
    assert (estimate.mean.tolist(), estimate.se.tolist()) == ([5.0], [0.0])  # two tokens a round
    for function in (stopping_time_regret, time_regret, best_arm_ratio, speedup):
        with refuses("regret", "known expectations", "replay"):
            function(outcome, environment)
    untimed = StationaryEnvironment([0.5, 0.3])
    outcome = simulate(RandomArm(), untimed, 10, runs=3)
    assert time_regret(outcome, untimed) is None
    assert speedup(outcome, untimed) is None
    assert comparator(untimed, outcome.budgets).seconds is None
