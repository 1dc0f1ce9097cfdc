"""Feedback signals by hand, against the law of a round, and the region where one reward beats another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metasd_sim import acceptance, plots, signals
from metasd_sim.environments.synthetic import beta_atoms
from metasd_sim.rewards import AcceptanceTrials, BlockDivergence, BlockEfficiency, TokensPerSecond, VerifiedDivergence
from tests.sim_cases import refuses

BE, BD, TRIALS, VERIFIED = BlockEfficiency(), BlockDivergence(), AcceptanceTrials(), VerifiedDivergence()


@pytest.mark.parametrize(
    ("reward", "overlaps", "expected"),
    [
        # gamma 2, rates 1/4 and 1/2: E N = .3125, .75; Var N = .4375 - .097656 and 1.25 - .5625
        (BE, "beta", 0.21875**2 / (0.6875 / 4)),
        # Var beta = .25 / 6, halved by gamma
        (BD, "beta", 0.0625 / (0.25 / 12)),
        (BD, "bernoulli", 0.0625 / 0.125),
        # E m = 1.25 and 1.5: .1875 / 1.25 = .15 and .25 / 1.5 = 1/6
        (TRIALS, "beta", 0.0625 * 6),
        (VERIFIED, "beta", 0.0625 * 36),
        (VERIFIED, "bernoulli", 0.0625 * 6),
    ],
)
def test_signals_by_hand(reward, overlaps, expected):
    assert signals.feedback_signal(0.25, 0.5, 2, reward, overlaps) == pytest.approx(expected)
    # the variances of both arms count alike
    assert signals.feedback_signal(0.5, 0.25, 2, reward, overlaps) == pytest.approx(expected)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_moments_are_those_of_a_round(alpha, gamma):
    law, n = acceptance.pmf(alpha, gamma), np.arange(gamma + 1)
    mean, variance = signals.reward_moments(alpha, gamma, BE)
    assert mean == pytest.approx(law @ n / gamma)
    assert variance == pytest.approx(law @ n**2 / gamma**2 - mean**2, abs=1e-12)
    # a ratio of sums: the variance of N - alpha m, over (E m)^2
    m = np.minimum(n + 1, gamma)
    _, variance = signals.reward_moments(alpha, gamma, TRIALS)
    assert variance == pytest.approx(law @ (n - alpha * m) ** 2 / (law @ m) ** 2)
    # Beta overlaps: the simulator's own table of them
    assert signals.overlap_variance(alpha, "beta", 5.0) == pytest.approx(beta_atoms(alpha, 5.0).var(), rel=0.01)


@pytest.mark.parametrize(("gamma", "smallest", "median", "bernoulli"), [(2, 3.32, 9.4, 0.86), (16, 2.59, 94.0, 0.99)])
def test_the_documented_region(gamma, smallest, median, bernoulli):
    rates, ratio = signals.signal_grid(gamma, BD, BE)
    assert len(rates) == 99
    found = ratio[~np.isnan(ratio)]
    assert len(found) == 99 * 98 / 2
    assert found.min() == pytest.approx(smallest, abs=0.005)
    assert np.median(found) == pytest.approx(median, abs=0.05)
    lost = signals.signal_grid(gamma, BD, BE, "bernoulli")[1]
    assert np.mean(lost[~np.isnan(lost)] > 1) == pytest.approx(bernoulli, abs=0.005)


def test_the_smallest_ratio_of_the_documented_grid():
    smallest = [np.nanmin(signals.signal_grid(gamma, BD, BE)[1]) for gamma in range(1, 17)]
    assert min(smallest) == smallest[5] == pytest.approx(1.955, abs=0.001)  # gamma 6
    assert signals.signal_ratio(0.448, 0.999, 16, BD, BE) == pytest.approx(0.77, abs=0.005)


def test_at_one_token_the_rewards_differ_by_the_overlaps_alone():
    ratio = signals.signal_grid(1, BD, BE, concentration=3.0)[1]
    np.testing.assert_allclose(ratio[~np.isnan(ratio)], 4.0)


@pytest.mark.parametrize("gamma", [2, 5, 16])
def test_limits_of_the_corner(gamma):
    """Best arm to 1 before the other goes to 0: 6 / gamma. The other way round: (gamma + 1) (2 gamma + 1)."""
    assert signals.signal_ratio(1e-4, 1 - 1e-10, gamma, BD, BE) == pytest.approx(6 / gamma, rel=1e-3)
    assert signals.signal_ratio(1e-10, 1 - 1e-4, gamma, BD, BE) == pytest.approx(
        (gamma + 1) * (2 * gamma + 1), rel=2e-2
    )


def test_the_boundary_separates_the_regions():
    best = np.array([0.9, 0.999, 0.99999999])
    none, pair, corner = signals.signal_boundary(best, 16, BD, BE)
    assert len(none) == 0
    np.testing.assert_allclose(pair, [0.3770, 0.5537], atol=1e-4)
    for alpha in pair:
        assert signals.signal_ratio(alpha, 0.999, 16, BD, BE) == pytest.approx(1, abs=1e-6)
    assert signals.signal_ratio(pair.mean(), 0.999, 16, BD, BE) < 1
    assert signals.signal_ratio(pair[0] - 0.01, 0.999, 16, BD, BE) > 1
    # towards a perfect arm: 6 gamma (1 - a) Var N = a (gamma - E N)^2
    a = corner[-1]
    left = 6 * 16 * (1 - a) * acceptance.var_accepted(a, 16)
    assert left == pytest.approx(a * (16 - acceptance.mean_accepted(a, 16)) ** 2, rel=1e-4)
    # with overlaps of 0 and 1 block efficiency wins near a perfect arm at gamma 2 too
    (crossings,) = signals.signal_boundary(0.95, 2, BD, BE, "bernoulli")
    np.testing.assert_allclose(crossings, [0.1197, 0.6544], atol=1e-4)
    assert signals.signal_ratio(0.4, 0.95, 2, BD, BE, "bernoulli") < 1


def test_degenerate_signals():
    assert signals.feedback_signal(0.5, 0.5, 3, BE) == 0
    assert signals.feedback_signal(0.0, 1.0, 3, BD) == np.inf
    assert np.isnan(signals.signal_ratio([0.5, 0.0], [0.5, 1.0], 3, BD, BE)).all()


def test_bad_input_is_refused():
    with refuses("be, bd", "tokens-per-second"):
        signals.feedback_signal(0.2, 0.5, 3, TokensPerSecond())
    with refuses("overlaps", "constant"):
        signals.feedback_signal(0.2, 0.5, 3, BD, "constant")
    with refuses("concentration"):
        signals.overlap_variance(0.5, concentration=0)
    with refuses("step"):
        signals.signal_grid(3, BD, BE, step=0.5)
    with refuses("alpha"):
        signals.feedback_signal(1.2, 0.5, 3, BD)


@pytest.mark.parametrize("gamma", [5, 16])
def test_figure_of_the_region(gamma):
    figure = plots.plot_signal_region(gamma, step=0.02)
    axes = figure.axes[0]
    image = axes.get_images()[0].get_array()
    assert image.shape == (49, 49)
    # rows are the best arm: log10 of the ratio at alpha_i = .5, alpha_* = .9
    assert image[44, 24] == pytest.approx(np.log10(signals.signal_ratio(0.5, 0.9, gamma, BD, BE)))
    boundary = axes.lines[0].get_xydata()
    assert (len(boundary) > 0) == (gamma == 16)
    assert np.all(boundary[:, 1] > 0.998)
