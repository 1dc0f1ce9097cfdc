"""Wrappers: what the policy is shown, what it never learns, and what a change of the arm costs.

Statistical tests have fixed seeds; a comment beside each states how often it would fail on fresh ones.
"""

import copy
import pickle

import numpy as np
import pytest
from scipy.stats import chisquare

from metasd_sim.costs import CostModel
from metasd_sim.environments import (
    DomainEnvironment,
    Environment,
    LostFeedback,
    NoisyFeedback,
    PiecewiseEnvironment,
    StationaryEnvironment,
    SwitchingCost,
)
from metasd_sim.environments.base import BLOCK_OVERLAP, EVERY_ARM
from metasd_sim.policies import FixedArm, KLUCBTrials, MetaSDUCB
from metasd_sim.rewards import BlockEfficiency, VerifiedDivergence
from metasd_sim.simulate import simulate
from metasd_sim.summary import lower_bound, summarize, upper_bound
from tests.sim_cases import refuses, z_limit
from tests.test_sim_environments import play

NOTHING = frozenset()
COSTS = CostModel.linear([0.1, 0.2, 0.0], 4, catch_up=0.01)
WRAPPERS = {
    "noise": lambda inner: NoisyFeedback(inner, 0.5, 0.2),
    "loss": lambda inner: LostFeedback(inner, 0.5),
    "switching": lambda inner: SwitchingCost(inner, 0.5),
    "all": lambda inner: SwitchingCost(LostFeedback(NoisyFeedback(inner, 0.5, 0.2), 0.5), 0.5),
}


def stationary():
    return StationaryEnvironment([0.9, 0.6, 0.3], [4, 2, 3], silent=[0, 0, 0.3], costs=COSTS)


def domains():
    return DomainEnvironment([[0.9, 0.6, 0.3], [0.2, 0.8, 0.5]], 9, 8, draft_length=[4, 2, 3], costs=COSTS)


class Witness(FixedArm):
    """Plays random arms and keeps all that it is shown."""

    def __init__(self, needs=NOTHING):
        super().__init__(0)
        self.needs = needs
        self.shown = []

    def start(self, rows, arms, max_draft, rng, horizon=None):
        self.rows, self.arms, self.rng = rows, len(arms), rng

    def select(self, rows, context):
        return self.rng.integers(0, self.arms, self.rows)[rows]

    def update(self, rows, rounds):
        self.shown.append((rows, rounds))


@pytest.mark.parametrize("make", [stationary, domains])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_rounds_are_those_of_the_bare_environment(wrap, make):
    """Wrapped or not, the same seed plays the same rounds; seconds only gain what switches cost."""
    for needs in (NOTHING, make().gives):
        bare = play(make(), needs, tokens=50)
        wrapped = play(wrap(make()), needs, tokens=50)
        last = np.full(6, -1)
        assert len(bare) == len(wrapped)
        for (rows, context, rounds), (other_rows, other_context, others) in zip(bare, wrapped, strict=True):
            np.testing.assert_array_equal(rows, other_rows)
            np.testing.assert_array_equal(context.query, other_context.query)
            for name in ("arm", "drafted", "accepted", "emitted", "overlap", "every_arm"):
                np.testing.assert_array_equal(getattr(rounds, name), getattr(others, name))
            if context.features is not None:
                np.testing.assert_array_equal(context.features, other_context.features)
            changed = (rounds.arm != last[rows]) & (last[rows] >= 0)
            extra = 0.5 * changed if isinstance(wrap(make()), SwitchingCost) else 0.0
            np.testing.assert_allclose(others.seconds, rounds.seconds + extra)
            last[rows] = rounds.arm


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_everything_else_is_the_inner_environment(wrap):
    inner = domains()
    environment = wrap(inner)
    environment.reset(2, np.random.default_rng(0), NOTHING)
    assert isinstance(environment, Environment)
    assert environment.arms == inner.arms
    assert environment.gives == inner.gives
    assert environment.queries == 8
    assert environment.tokens == 72
    assert environment.endless is False
    assert environment.scopes == inner.scopes
    assert environment.done is inner.done
    budgets = np.array([10, 72])
    np.testing.assert_array_equal(environment.fixed_arms(budgets).rounds, inner.fixed_arms(budgets).rounds)
    with pytest.raises(AttributeError):
        environment.nothing_of_the_kind  # noqa: B018
    for other in (copy.deepcopy(environment), pickle.loads(pickle.dumps(wrap(domains())))):
        assert other.tokens == 72


def test_no_noise_and_no_loss_change_nothing():
    clean = simulate(KLUCBTrials(), stationary(), 200, runs=20, seed=3)
    for wrapped in (
        NoisyFeedback(stationary(), 0.0),
        LostFeedback(stationary(), 0.0),
        SwitchingCost(stationary(), 0.0),
    ):
        outcome = simulate(KLUCBTrials(), wrapped, 200, runs=20, seed=3)
        np.testing.assert_array_equal(outcome.pulls, clean.pulls)
        np.testing.assert_array_equal(outcome.seconds, clean.seconds)


def test_noise_shows_uniform_counts_to_the_policy_alone():
    """Chi-square of 30,000 shown counts of 0..4, and of the share replaced; false alarm 2e-3."""
    environment = NoisyFeedback(StationaryEnvironment([1.0, 0.5], 4), 0.4)
    policy = Witness()
    outcome = simulate(policy, environment, 300, runs=300, history=True)
    played = outcome.history.rounds
    shown = np.concatenate([rounds.accepted for _, rounds in policy.shown])
    assert len(shown) == len(played)
    perfect = played.arm == 0
    assert np.all(played.accepted[perfect] == 4)
    counts = np.bincount(shown[perfect], minlength=5)
    # 4 is shown where the truth is, .6, and in a fifth of the rest
    assert chisquare(counts, perfect.sum() * np.array([0.08, 0.08, 0.08, 0.08, 0.68])).pvalue > 1e-3
    assert np.all(np.concatenate([rounds.emitted for _, rounds in policy.shown]) == shown + 1)
    assert all(rounds.feedback is None for _, rounds in policy.shown)
    always = NoisyFeedback(StationaryEnvironment([1.0], 4), 1.0)
    policy = Witness()
    simulate(policy, always, 300, runs=100)
    shown = np.concatenate([rounds.accepted for _, rounds in policy.shown])
    assert chisquare(np.bincount(shown, minlength=5)).pvalue > 1e-3


@pytest.mark.parametrize("make", [stationary, domains])
def test_shown_rounds_are_possible_ones(make):
    """Counts within the draft, a cut text never longer than it was, and nothing seen that was not."""
    needs = frozenset({BLOCK_OVERLAP, EVERY_ARM})
    changed = disturbed = cut = 0
    for _, _, rounds in play(NoisyFeedback(make(), 0.8, 0.3), needs, rows=40, tokens=70):
        shown = rounds.feedback
        assert np.all((shown.accepted >= 0) & (shown.accepted <= rounds.drafted))
        np.testing.assert_array_equal(shown.drafted, rounds.drafted)
        assert np.all((shown.emitted == shown.accepted + 1) | (shown.emitted == shown.accepted))
        assert np.all(shown.emitted >= 1)
        ended = rounds.emitted == rounds.accepted
        assert np.all(shown.emitted[ended] <= rounds.emitted[ended])
        assert np.all(ended[shown.emitted == shown.accepted])
        for name in ("overlap", "every_arm"):
            true, seen = getattr(rounds, name), getattr(shown, name)
            np.testing.assert_array_equal(np.isnan(true), np.isnan(seen))
            assert np.nanmin(seen) >= 0
            assert np.nanmax(seen) <= 1
            disturbed += np.count_nonzero(true[~np.isnan(true)] != seen[~np.isnan(seen)])
        changed += np.count_nonzero(shown.accepted != rounds.accepted)
        cut += np.count_nonzero(ended)
        np.testing.assert_array_equal(shown.seconds, rounds.seconds)
    assert changed > 100
    assert disturbed > 1000
    assert (cut > 0) == (make is domains)


@pytest.mark.parametrize("make", [stationary, domains])
def test_positions_shown_as_verified_were_scored(make):
    """So that none counts as an overlap of 0: the reward of what is shown is that of the true round."""
    reward = VerifiedDivergence()
    for _, _, rounds in play(NoisyFeedback(make(), 1.0), reward.needs, rows=40, tokens=70):
        shown = rounds.feedback
        verified = np.arange(4) < np.minimum(shown.trials, shown.drafted)[:, None]
        assert not np.isnan(shown.overlap[verified]).any()
        np.testing.assert_array_equal(reward(shown), reward(rounds))


def test_overlap_noise_has_the_spread_that_was_asked_for():
    """Noise of overlaps .5, 20,000 draws; false alarm about 1e-4 (4 standard errors each). Cut at 0 and 1."""
    needs = frozenset({BLOCK_OVERLAP})
    for noise in (0.05, 0.1):
        environment = NoisyFeedback(StationaryEnvironment([0.5], 4, "constant"), 0.0, noise)
        environment.reset(5000, np.random.default_rng(0), needs)
        shown = environment.step(np.arange(5000), np.zeros(5000, dtype=int)).feedback.overlap
        assert abs(shown.mean() - 0.5) < 4 * noise / np.sqrt(20_000)
        assert abs(shown.std() - noise) < 4 * noise / np.sqrt(40_000)
    sure = NoisyFeedback(StationaryEnvironment([1.0], 4, "constant"), 0.0, 0.1)
    sure.reset(100, np.random.default_rng(0), needs)
    shown = sure.step(np.arange(100), np.zeros(100, dtype=int)).feedback.overlap
    assert shown.max() == 1.0
    assert 0.3 < (shown == 1.0).mean() < 0.7


def test_lost_rounds_are_played_but_not_learnt_from():
    """Share of rounds seen, z with false alarm 1e-3."""
    policy = Witness()
    outcome = simulate(policy, LostFeedback(stationary(), 0.3), 300, runs=200, history=True)
    total = outcome.rounds.sum()
    seen = sum(len(rows) for rows, _ in policy.shown)
    assert all(len(rows) == len(rounds) for rows, rounds in policy.shown)
    assert abs(seen - 0.7 * total) < z_limit(1) * np.sqrt(0.21 * total)
    assert outcome.history.rounds.seen.sum() == seen
    blind = Witness()
    simulate(blind, LostFeedback(stationary(), 1.0), 100, runs=5)
    assert not blind.shown
    # lost twice: seen where both have seen
    twice = LostFeedback(LostFeedback(stationary(), 0.5), 0.5)
    outcome = simulate(Witness(), twice, 300, runs=200, history=True)
    seen, total = outcome.history.rounds.seen.sum(), outcome.rounds.sum()
    assert abs(seen - 0.25 * total) < z_limit(1) * np.sqrt(0.1875 * total)


def test_a_switch_costs_by_hand():
    # perfect and useless arms, a pass of 1 s and free drafts; arms 0, 0, 1, 0 switch twice
    model = CostModel.linear([0.0, 0.0], 2)
    environment = SwitchingCost(StationaryEnvironment([1.0, 0.0], 2, costs=model), 0.25)
    environment.reset(2, np.random.default_rng(0), NOTHING)
    row = np.array([0])
    seconds = [environment.step(row, np.array([arm])).seconds[0] for arm in (0, 0, 1, 0)]
    assert seconds == [1.0, 1.0, 1.25, 1.25]
    # the other row's first arm is no switch, and a reset forgets
    assert environment.step(np.array([1]), np.array([1])).seconds[0] == 1.0
    environment.reset(2, np.random.default_rng(0), NOTHING)
    assert environment.step(row, np.array([1])).seconds[0] == 1.0


def test_a_new_prompt_does_not_make_a_switch_free():
    model = CostModel.linear([0.0, 0.0], 2)
    environment = SwitchingCost(DomainEnvironment([[1.0, 1.0]], 3, 4, draft_length=2, costs=model), 0.25)
    environment.reset(1, np.random.default_rng(0), NOTHING)
    row, seconds = np.array([0]), []
    for arm in (0, 1, 1, 0):  # each round is a whole text of 3 tokens
        assert environment.observe(row).new_query[0]
        seconds.append(environment.step(row, np.array([arm])).seconds[0])
    assert seconds == [1.0, 1.25, 1.0, 1.25]
    assert environment.done[0]


def test_switches_are_paid_once_each_however_wrappers_nest():
    for inner, outer in ((NoisyFeedback, SwitchingCost), (SwitchingCost, NoisyFeedback)):
        policy = Witness()
        environment = outer(inner(stationary(), 0.5), 0.5)
        outcome = simulate(policy, environment, 100, runs=10, seed=2, history=True)
        bare = simulate(Witness(), stationary(), 100, runs=10, seed=2)
        np.testing.assert_allclose(outcome.seconds, bare.seconds + 0.5 * outcome.switches)
        # the policy is shown the seconds that it paid
        shown = np.concatenate([rounds.seconds for _, rounds in policy.shown])
        np.testing.assert_allclose(shown, outcome.history.rounds.seconds)


def test_fixed_arms_never_pay_for_switches():
    environment = SwitchingCost(stationary(), 5.0)
    for arm in range(3):
        outcome = simulate(FixedArm(arm), environment, 60, runs=50, seed=arm)
        bare = simulate(FixedArm(arm), stationary(), 60, runs=50, seed=arm)
        np.testing.assert_array_equal(outcome.seconds, bare.seconds)


def test_bounds_hold_for_true_feedback_alone():
    policy = MetaSDUCB(BlockEfficiency())
    costs = CostModel.linear([0.1, 0.1], 4)
    model = StationaryEnvironment([0.9, 0.6], 4, costs=costs)
    for environment, known in (
        (model, True),
        (SwitchingCost(model, 1.0), True),
        (NoisyFeedback(model, 0.1), False),
        (LostFeedback(model, 0.1), False),
        (SwitchingCost(NoisyFeedback(model, 0.1), 1.0), False),
        (SwitchingCost(PiecewiseEnvironment([[0.9, 0.6]], draft_length=4, costs=costs), 1.0), False),
    ):
        assert (upper_bound(policy, environment, [100]) is not None) == known
        assert (lower_bound(environment, [100]) is not None) == known
        assert ("upper_bound" in summarize(simulate(policy, environment, 100, runs=3), policy, environment)[0]) == known


def test_noise_makes_learning_harder():
    """Regret of a learner, noise against none, 300 runs each: more than 5 standard errors apart."""
    clean, noisy = (
        simulate(KLUCBTrials(), environment, 1500, runs=300).rounds[:, 0]
        for environment in (
            StationaryEnvironment([0.9, 0.5], 4),
            NoisyFeedback(StationaryEnvironment([0.9, 0.5], 4), 0.9),
        )
    )
    assert noisy.mean() - clean.mean() > 5 * np.sqrt((noisy.var() + clean.var()) / 300)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NoisyFeedback(stationary(), 1.5), ["probability", "1.5"]),
        (lambda: NoisyFeedback(stationary(), 0.5, -0.1), ["overlap_noise", "-0.1"]),
        (lambda: NoisyFeedback(stationary(), 0.5, np.nan), ["overlap_noise", "nan"]),
        (lambda: LostFeedback(stationary(), -0.5), ["probability", "-0.5"]),
        (lambda: SwitchingCost(stationary(), -1.0), ["seconds", "-1"]),
        (lambda: SwitchingCost(stationary(), np.inf), ["seconds", "inf"]),
        (lambda: SwitchingCost(StationaryEnvironment([0.5]), 1.0), ["switching cost", "seconds", "costs"]),
    ],
)
def test_bad_wrappers_are_refused(make, words):
    with refuses(*words):
        make()
