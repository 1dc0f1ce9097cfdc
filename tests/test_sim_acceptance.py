"""The capped geometric law of accepted tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metasd_sim import acceptance
from tests.sim_cases import refuses

ALPHAS = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e-300, 1e-12, 1 - 1e-12]))


def enumerate_pmf(alpha, gamma):
    """Every pattern of accept bits, with its probability: N counts those before the first reject."""
    law = np.zeros(gamma + 1)
    for bits in itertools.product([True, False], repeat=gamma):
        first_reject = bits.index(False) if False in bits else gamma
        law[first_reject] += np.prod([alpha if bit else 1 - alpha for bit in bits])
    return law


@pytest.mark.parametrize("gamma", [1, 2, 3, 7])
@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999, 1.0])
def test_pmf_is_that_of_enumerated_accept_bits(alpha, gamma):
    np.testing.assert_allclose(acceptance.pmf(alpha, gamma), enumerate_pmf(alpha, gamma), atol=1e-14)


def test_hand_derived_law():
    # alpha 1/2, gamma 2: P(0) = 1/2, P(1) = 1/4, P(2) = 1/4. E N = 3/4, E N^2 = 1/4 + 1 = 5/4, Var = 5/4 - 9/16 = 11/16
    np.testing.assert_allclose(acceptance.pmf(0.5, 2), [0.5, 0.25, 0.25])
    np.testing.assert_allclose(acceptance.survival(0.5, 2), [0.5, 0.25])
    assert acceptance.mean_accepted(0.5, 2) == pytest.approx(0.75)
    assert acceptance.var_accepted(0.5, 2) == pytest.approx(11 / 16)
    assert acceptance.tokens_per_round(0.5, 2) == pytest.approx(1.75)
    assert acceptance.trials_per_round(0.5, 2) == pytest.approx(1.5)  # the second token is tried half the time
    # alpha .8, gamma 5: (1 - .8^6) / .2 = (1 - .262144) / .2 and (1 - .8^5) / .2 = (1 - .32768) / .2
    assert acceptance.tokens_per_round(0.8, 5) == pytest.approx(3.68928)
    assert acceptance.trials_per_round(0.8, 5) == pytest.approx(3.3616)


@pytest.mark.parametrize(("alpha", "accepted"), [(0.0, 0), (1.0, 4)])
def test_perfect_and_useless_drafters(alpha, accepted):
    assert acceptance.pmf(alpha, 4).tolist() == [float(n == accepted) for n in range(5)]
    assert acceptance.mean_accepted(alpha, 4) == accepted
    assert acceptance.var_accepted(alpha, 4) == 0
    assert acceptance.tokens_per_round(alpha, 4) == accepted + 1
    assert acceptance.trials_per_round(alpha, 4) == max(accepted, 1)
    uniform = np.array([0.0, 0.5, np.nextafter(1.0, 0.0)])
    assert acceptance.sample_accepted(np.full(3, alpha), 4, uniform).tolist() == [accepted] * 3


@given(alpha=ALPHAS, gamma=st.integers(1, 40))
def test_moments_are_those_of_the_pmf(alpha, gamma):
    law, n = acceptance.pmf(alpha, gamma), np.arange(gamma + 1)
    assert law.min() >= 0
    assert law.sum() == pytest.approx(1, abs=1e-12)
    assert acceptance.mean_accepted(alpha, gamma) == pytest.approx(law @ n, rel=1e-9, abs=1e-12)
    assert acceptance.var_accepted(alpha, gamma) == pytest.approx(law @ n**2 - (law @ n) ** 2, rel=1e-9, abs=1e-9)
    assert acceptance.trials_per_round(alpha, gamma) == pytest.approx(law @ np.minimum(n + 1, gamma), rel=1e-9)
    assert acceptance.tokens_per_round(alpha, gamma) == pytest.approx(law @ (n + 1), rel=1e-9)


@given(alpha=st.floats(0, 0.999), gamma=st.integers(1, 40))
def test_closed_forms(alpha, gamma):
    assert acceptance.tokens_per_round(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))
    assert acceptance.trials_per_round(alpha, gamma) == pytest.approx((1 - alpha**gamma) / (1 - alpha))


@pytest.mark.parametrize("gamma", [1, 2, 6])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.77, 0.99, 1.0])
def test_sampling_inverts_the_law(alpha, gamma):
    # On a grid of m uniforms each value of N comes m times its probability, but for one at each of its two edges.
    m = 10_000
    drawn = acceptance.sample_accepted(np.full(m, alpha), gamma, (np.arange(m) + 0.5) / m)
    assert drawn.dtype.kind == "i"
    assert np.all(np.diff(drawn) <= 0)  # one monotone function of the uniform
    np.testing.assert_allclose(np.bincount(drawn, minlength=gamma + 1) / m, acceptance.pmf(alpha, gamma), atol=1.01 / m)


def test_sampling_at_the_edges_of_the_steps():
    # alpha 1/2, gamma 2: N = 2 below 1/4, 1 below 1/2, else 0
    uniform = np.array([0.0, np.nextafter(0.25, 0), 0.25, np.nextafter(0.5, 0), 0.5, 0.99])
    assert acceptance.sample_accepted(np.full(6, 0.5), 2, uniform).tolist() == [2, 2, 1, 1, 0, 0]


def test_arguments_broadcast():
    alphas = np.array([[0.1, 0.5, 1.0], [0.0, 0.9, 0.3]])
    assert acceptance.pmf(alphas, 4).shape == (2, 3, 5)
    assert acceptance.survival(alphas, 4).shape == (2, 3, 4)
    for moment in ("mean_accepted", "var_accepted", "tokens_per_round", "trials_per_round"):
        values = getattr(acceptance, moment)(alphas, 4)
        assert values.shape == (2, 3)
        assert values[1, 2] == getattr(acceptance, moment)(0.3, 4)
    assert acceptance.sample_accepted(alphas, 4, np.full((2, 3), 0.3)).shape == (2, 3)


@pytest.mark.parametrize("alpha", [-1e-9, 1 + 1e-9, np.nan, np.inf, [0.5, 2.0]])
def test_rates_outside_the_unit_interval_are_refused(alpha):
    bad = np.atleast_1d(alpha)[-1]
    with refuses("alpha", "[0, 1]", str(bad)):
        acceptance.pmf(alpha, 3)


@pytest.mark.parametrize("gamma", [0, -1, 2.5, np.nan, np.inf])
def test_draft_lengths_below_one_or_not_whole_are_refused(gamma):
    for function in (acceptance.pmf, acceptance.mean_accepted, acceptance.tokens_per_round):
        with refuses("gamma", str(gamma)):
            function(0.5, gamma)
