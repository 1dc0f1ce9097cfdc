"""Slopes of regret on ln B and B: by hand on made-up pulls, and logarithmic against linear policies."""

from dataclasses import replace

import numpy as np
import pytest

from metasd_sim import bounds
from metasd_sim.environments import StationaryEnvironment
from metasd_sim.growth import growth, pseudo_regret
from metasd_sim.policies import FixedArm, KLUCBTrials, MetaSDUCB
from metasd_sim.rewards import BlockEfficiency
from metasd_sim.simulate import simulate
from tests.sim_cases import refuses

BUDGETS = [250, 500, 1000, 2000, 4000, 8000]


def outcome_of(regret, budgets):
    """An Outcome whose worse arm, of 1.5 against 3 tokens a round, was played twice `regret` [runs, budgets] times."""
    pulls = np.stack([np.zeros_like(regret), 2 * np.asarray(regret)], axis=2)
    one = simulate(FixedArm(0), StationaryEnvironment([0.5, 0.4], 1), [10, 20, 30], runs=2)
    return replace(
        one,
        budgets=np.asarray(budgets),
        pulls=pulls,
        rounds=np.zeros(regret.shape, dtype=np.int64),
        reached=np.ones(regret.shape, dtype=bool),
    )


def test_slopes_by_hand():
    budgets = np.array([1, 10, 100, 1000, 10_000])
    log = np.log10(budgets)
    # two runs, exactly 2 and 4 per decade
    found = growth(outcome_of(np.stack([2 * log, 1 + 4 * log]), budgets), [3.0, 1.5])
    assert found.log_slope == pytest.approx(3 / np.log(10))
    assert found.log_se == pytest.approx(1 / np.log(10))  # sd sqrt 2 over sqrt 2 runs
    assert found.log_ratio == pytest.approx(1)
    assert found.log_ratio_se == pytest.approx(0, abs=1e-12)
    assert found.linear_ratio == pytest.approx((100 - 1) / (10_000 - 100))
    # exactly linear
    found = growth(outcome_of(np.stack([0.1 * budgets, 0.3 * budgets]), budgets), [3.0, 1.5])
    assert found.linear_slope == pytest.approx(0.2)
    assert found.linear_se == pytest.approx(0.1)
    assert found.linear_ratio == pytest.approx(1)
    assert found.log_ratio == pytest.approx((10_000 - 100) / (100 - 1))


def test_standard_errors_of_ratios_by_the_delta_method():
    # increments (1, 3) below and (2, 2) above: ratio 1, residuals (1, -1), sd sqrt 2; over sqrt 2 runs and the mean 2
    found = growth(outcome_of(np.array([[0, 1, 3], [0, 3, 5]]), [1, 10, 100]), [3.0, 1.5])
    assert found.log_ratio == pytest.approx(1)
    assert found.log_ratio_se == pytest.approx(0.5)
    assert np.isnan(growth(outcome_of(np.zeros((2, 3)), [1, 10, 100]), [3.0, 1.5]).log_ratio)


@pytest.mark.parametrize(("policy", "later"), [(KLUCBTrials(), 1), (MetaSDUCB(BlockEfficiency()), 4)], ids=str)
def test_learning_policies_grow_logarithmically(policy, later):
    """KL-UCB meets the lower bound's constant in the limit; by 8,000 tokens within a factor of two."""
    environment = StationaryEnvironment([0.7, 0.3], 2)
    found = growth(
        simulate(policy, environment, [later * budget for budget in BUDGETS], runs=100), environment.tokens_per_round()
    )
    lower = bounds.lower_slope([0.7, 0.3], 2)
    assert found.log_slope + 4 * found.log_se > lower
    if str(policy) == "kl-ucb-trials":
        assert found.log_slope + 4 * found.log_se < 2 * lower
    assert abs(found.log_ratio - 1) < 0.1 + 4 * found.log_ratio_se
    assert found.linear_ratio + 4 * found.linear_ratio_se < 0.5


def test_a_wrong_arm_throughout_grows_linearly():
    environment = StationaryEnvironment([0.7, 0.3], 2)
    g = environment.tokens_per_round()
    outcome = simulate(FixedArm(1), environment, BUDGETS, runs=40)
    found = growth(outcome, g)
    # 1 / g_i - 1 / g_* rounds a token, with an overshoot that the slope does not see
    assert found.linear_slope == pytest.approx(1 / g[1] - 1 / g[0], abs=4 * found.linear_se)
    assert found.linear_ratio == pytest.approx(1, abs=4 * found.linear_ratio_se)
    assert found.log_ratio - 4 * found.log_ratio_se > 4
    np.testing.assert_allclose(pseudo_regret(outcome, g), outcome.rounds * (1 - g[1] / g[0]))


def test_bad_input_is_refused():
    environment = StationaryEnvironment([0.7, 0.3], 2)
    three = simulate(FixedArm(1), environment, [10, 20, 30], runs=2)
    with refuses("tokens_per_round", "2"):
        growth(three, [1.0])
    with refuses("3 or more budgets", "found 2 and 2"):
        growth(simulate(FixedArm(1), environment, [10, 20], runs=2), [2, 1.5])
    with refuses("2 or more runs", "found 3 and 1"):
        growth(simulate(FixedArm(1), environment, [10, 20, 30], runs=1), [2, 1.5])
    with refuses("reach every budget"):
        growth(replace(three, reached=np.zeros((2, 3), dtype=bool)), [2, 1.5])
