"""What a round is worth under each reward, and the columns of Rounds that they read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metasd_sim.environments.base import BLOCK_OVERLAP, OVERLAP, SECONDS, SIGNALS
from metasd_sim.policies import MetaSDUCB
from metasd_sim.rewards import (
    REWARDS,
    AcceptanceTrials,
    BlockDivergence,
    BlockEfficiency,
    Reward,
    TokensPerSecond,
    VerifiedDivergence,
    make_reward,
)
from metasd_sim.rounds import Rounds
from tests.sim_cases import refuses

NAN = np.nan

# Five rounds of an environment whose longest draft is 4:
#   0  full draft, rejected at the third token           N 2, m 3
#   1  full draft, all accepted                          N 4, m 4: the bonus token is no trial
#   2  short draft of 2, all accepted                    N 2, m 3: the missing third token is one failure
#   3  empty draft (a look-up without a match)           N 0, m 1: one failed trial
#   4  the text ended after two accepted tokens          N 2, m 2: emitted == accepted, nothing failed
ROUNDS = Rounds(
    arm=np.array([0, 1, 2, 1, 0]),
    drafted=np.array([4, 4, 2, 0, 2]),
    accepted=np.array([2, 4, 2, 0, 2]),
    emitted=np.array([3, 5, 3, 1, 2]),
    max_draft=4,
    seconds=np.array([0.5, 2.0, 1.0, 0.25, 1.0]),
    overlap=np.array(
        [
            [0.9, 0.8, 0.3, 0.6],  # the last was never verified
            [1.0, 0.5, 0.5, 0.4],
            [0.7, 0.6, NAN, NAN],
            [NAN, NAN, NAN, NAN],
            [0.2, 0.4, NAN, NAN],
        ]
    ),
)


@pytest.mark.parametrize(
    ("reward", "values", "weights"),
    [
        (BlockEfficiency(), [2 / 4, 4 / 4, 2 / 4, 0, 2 / 4], [1, 1, 1, 1, 1]),
        (BlockDivergence(), [2.6 / 4, 2.4 / 4, 1.3 / 4, 0, 0.6 / 4], [1, 1, 1, 1, 1]),
        (VerifiedDivergence(), [2.0, 2.4, 1.3, 0, 0.6], [3, 4, 3, 1, 2]),
        (AcceptanceTrials(), [2, 4, 2, 0, 2], [3, 4, 3, 1, 2]),
        (TokensPerSecond(), [3, 5, 3, 1, 2], [0.5, 2.0, 1.0, 0.25, 1.0]),
    ],
)
def test_hand_derived_values(reward, values, weights):
    value, weight = reward(ROUNDS)
    np.testing.assert_allclose(value, values)
    np.testing.assert_allclose(weight, weights)


def test_trials_of_short_empty_and_cut_blocks():
    assert ROUNDS.trials.tolist() == [3, 4, 3, 1, 2]


def test_a_ratio_of_sums_ranks_arms_where_a_mean_of_rates_would_not():
    # A round of 1 s with 2 tokens and one of 0.1 s with 1: 3 tokens in 1.1 s, while the mean of the rates is 6
    rounds = Rounds(*(np.array(c) for c in ([0, 0], [1, 1], [1, 0], [2, 1])), max_draft=1, seconds=np.array([1.0, 0.1]))
    value, weight = TokensPerSecond()(rounds)
    assert value.sum() / weight.sum() == pytest.approx(3 / 1.1)


def test_a_reward_leaves_the_round_as_it_was():
    before = ROUNDS.overlap.copy()
    for make in REWARDS.values():
        make()(ROUNDS)
    np.testing.assert_array_equal(ROUNDS.overlap, before)


# --- conformance of every registered reward


@st.composite
def rounds_batches(draw):
    max_draft = draw(st.integers(1, 6))
    n = draw(st.integers(1, 5))
    drafted = np.array(draw(st.lists(st.integers(0, max_draft), min_size=n, max_size=n)))
    accepted = np.array([draw(st.integers(0, int(d))) for d in drafted])
    cut = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n))) & (accepted > 0) & (accepted == drafted)
    unit = st.one_of(st.floats(0, 1), st.just(NAN))
    overlap = np.array(draw(st.lists(unit, min_size=n * max_draft, max_size=n * max_draft))).reshape(n, max_draft)
    seconds = np.array(draw(st.lists(st.floats(1e-6, 1e3), min_size=n, max_size=n)))
    emitted = accepted + 1 - cut
    return Rounds(np.zeros(n, dtype=int), drafted, accepted, emitted, max_draft, seconds, overlap)


@pytest.mark.parametrize("name", REWARDS)
@given(rounds=rounds_batches())
def test_values_stay_within_range_times_weight(name, rounds):
    reward = make_reward(name)
    value, weight = reward(rounds)
    assert value.shape == weight.shape == (len(rounds),)
    assert np.all(np.isfinite(value))
    assert np.all(weight > 0)
    low, high = reward.range
    assert np.all(value >= low * weight - 1e-12)
    assert np.all(value <= high * weight + 1e-12)


@pytest.mark.parametrize("name", REWARDS)
def test_protocol_and_needs(name):
    reward = make_reward(name)
    assert isinstance(reward, Reward)
    assert reward.name == name
    assert reward.needs <= SIGNALS
    assert MetaSDUCB(reward).needs == reward.needs
    # a reward reads nothing that it does not ask for: it works on rounds without everything else ...
    columns = {OVERLAP: "overlap", BLOCK_OVERLAP: "overlap", SECONDS: "seconds"}
    given_only = {columns[need]: getattr(ROUNDS, columns[need]) for need in reward.needs}
    bare = Rounds(ROUNDS.arm, ROUNDS.drafted, ROUNDS.accepted, ROUNDS.emitted, ROUNDS.max_draft, **given_only)
    for got, expected in zip(reward(bare), reward(ROUNDS), strict=True):
        np.testing.assert_array_equal(got, expected)
    # ... and says by name what is missing
    if reward.needs:
        with refuses(columns[min(reward.needs)]):
            reward(Rounds(ROUNDS.arm, ROUNDS.drafted, ROUNDS.accepted, ROUNDS.emitted, ROUNDS.max_draft))


@pytest.mark.parametrize("name", [name for name in REWARDS if make_reward(name).sigma(4) is not None])
@pytest.mark.parametrize("max_draft", [1, 2, 5, 16])
def test_sub_gaussian_constant_covers_the_worst_case(name, max_draft):
    """log E exp(s (X - E X)) <= sigma^2 s^2 / 2 on a grid, for the hardest law that the reward may have.

    One unit of weight has a law on [0, 1]; a block divergence is the mean of `max_draft` independent ones.
    """
    sigma = make_reward(name).sigma(max_draft)
    assert sigma > 0
    samples = max_draft if name == "bd" else 1
    s = np.concatenate([-np.logspace(-2, 2, 60), np.logspace(-2, 2, 60)])
    for p in (0.01, 0.1, 0.5, 0.9, 0.99):
        with np.errstate(over="ignore"):
            cumulant = samples * (np.log1p(p * np.expm1(s / samples)) - p * s / samples)  # bernoulli overlaps
        assert np.all(cumulant <= sigma**2 * s**2 / 2 + 1e-9)
    # and it is no larger than needed: at p = 1/2 and small s the two sides agree
    small = 1e-2 * np.sqrt(samples)
    tight = samples * (np.log1p(0.5 * np.expm1(small / samples)) - 0.5 * small / samples)
    assert tight == pytest.approx(sigma**2 * small**2 / 2, rel=1e-3)


def test_tokens_per_second_claims_no_constant():
    assert TokensPerSecond().sigma(5) is None


@pytest.mark.parametrize(
    ("name", "after", "bias"),
    [("trials", 1, -0.19), ("trials", 5, -0.033), ("bd-verified", 1, -0.03), ("bd-verified", 5, -0.006)],
)
def test_ratios_of_sums_are_biased_low_as_stated(name, after, bias):
    """alpha .7, gamma 5, Beta(3.5, 1.5) overlaps, 200,000 repetitions, fixed seed.

    Standard error at most .001; the stated figures are rounded to two digits.
    """
    rng = np.random.default_rng(5)
    n = 200_000
    overlap = rng.beta(3.5, 1.5, (n * after, 5))
    accepted = np.cumprod(rng.random((n * after, 5)) < overlap, axis=1).sum(axis=1)
    full = np.full(n * after, 5)
    value, weight = make_reward(name)(Rounds(full, full, accepted, accepted + 1, 5, overlap=overlap))
    ratio = value.reshape(n, after).sum(axis=1) / weight.reshape(n, after).sum(axis=1)
    assert ratio.mean() - 0.7 == pytest.approx(bias, abs=0.006 if abs(bias) > 0.1 else 0.0035)


def test_unknown_rewards_are_refused_with_the_known_names():
    with refuses("reward", *REWARDS, "'speed'"):
        make_reward("speed")


# --- Rounds


def test_rows_of_rounds_can_be_chosen_and_joined():
    for pick in (np.array([3, 0]), np.array([True, False, False, True, False]), slice(1, 3)):
        some = ROUNDS[pick]
        assert some.max_draft == 4
        assert some.every_arm is None
        for name in ("arm", "drafted", "accepted", "emitted", "seconds", "overlap"):
            np.testing.assert_array_equal(getattr(some, name), getattr(ROUNDS, name)[pick])
    both = Rounds.concatenate([ROUNDS[:2], ROUNDS[2:]])
    assert len(both) == 5
    np.testing.assert_array_equal(both.overlap, ROUNDS.overlap)
    np.testing.assert_array_equal(both.trials, ROUNDS.trials)
    untimed = ROUNDS[:2]
    untimed.seconds = None
    assert Rounds.concatenate([untimed, ROUNDS[2:]]).seconds is None
    with pytest.raises(ValueError, match="at least one"):
        Rounds.concatenate([])
