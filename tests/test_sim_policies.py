"""Conformance of every policy, then each rule against hand-derived numbers and slow references.

Statistical tests have fixed seeds; a comment beside each states how often it would fail on fresh ones.
"""

import math
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import beta as beta_law
from scipy.stats import chisquare, kstest

from metasd_sim.costs import CostModel
from metasd_sim.environments import StationaryEnvironment
from metasd_sim.environments.base import SIGNALS
from metasd_sim.policies import (
    MOSS,
    POLICIES,
    FixedArm,
    Hedge,
    IndexPolicy,
    KLUCBTrials,
    MetaSDUCB,
    Policy,
    RandomArm,
    ThompsonTrials,
    argmax_random,
    make_policy,
    policy_specs,
)
from metasd_sim.policies.kl_ucb import kl_upper
from metasd_sim.rewards import REWARDS, AcceptanceTrials, BlockDivergence, BlockEfficiency, TokensPerSecond, make_reward
from metasd_sim.simulate import simulate
from tests.sim_cases import (
    POLICY_CASES,
    Feedback,
    GivesEverything,
    arm_names,
    make_context,
    make_rounds,
    refuses,
)

ALPHAS, MAX_DRAFT = (0.8, 0.5, 0.3), 4
N_ARMS = len(ALPHAS)


def policies(choose):
    cases = [pytest.param(case, id=name) for name, case in POLICY_CASES.items() if choose(case)]
    return pytest.mark.parametrize("case", cases)


every_policy = policies(lambda case: True)
every_learner = policies(lambda case: case.learns)
every_forced_start = policies(lambda case: case.each_once_first)
every_index_policy = policies(lambda case: isinstance(case.make(), IndexPolicy))
every_independent_policy = policies(lambda case: case.rows_independent)


def drive(policy, feedback, rows, steps, rng, last=None, eligible=None, restart=None, start=True):
    """Arms played, [rows, steps], -1 after a row has left.

    last: row -> steps it plays; eligible [rows, steps, arms]; restart(step) -> (rows, keep) or None.
    """
    if start:
        policy.start(rows, arm_names(feedback.n_arms), feedback.max_draft, rng, 1000)
    played = np.full((rows, steps), -1)
    for step in range(steps):
        active = np.array([r for r in range(rows) if step < (last or {}).get(r, steps)])
        event = restart(step) if restart else None
        if event is not None:
            policy.restart(*event)
        context = make_context(
            len(active), feedback.n_arms, None if eligible is None else eligible[active, step], new_query=step == 0
        )
        arms = policy.select(active, context)
        assert arms.shape == active.shape
        assert arms.dtype.kind == "i"
        assert np.all((arms >= 0) & (arms < feedback.n_arms))
        policy.update(active, feedback(active, step, arms))
        played[active, step] = arms
    return played


def feedback_for(seed=0, rows=5, steps=60):
    return Feedback(seed, rows, steps, ALPHAS, MAX_DRAFT)


# --- conformance


def test_every_registered_policy_has_a_case():
    assert {name.partition(":")[0] for name in POLICY_CASES} == set(POLICIES)
    assert {f"metasd-ucb:{reward}" for reward in REWARDS} <= set(POLICY_CASES)


@every_policy
def test_protocol(case):
    policy = case.make()
    assert isinstance(policy, Policy)
    assert policy.needs <= SIGNALS
    name = str(policy)
    assert name.partition(":")[0] in POLICIES
    again = make_policy(name, arms=arm_names(N_ARMS))  # the name in a result makes the policy again
    assert (type(again), str(again)) == (type(policy), name)


@every_policy
def test_shapes_with_one_row_one_arm_and_a_horizon(case):
    policy = case.make()
    n_arms = policy.arm + 1 if isinstance(policy, FixedArm) else 1
    feedback = Feedback(0, 1, 30, [0.6] * n_arms, 1)
    restarts = {0: (np.array([0]), 0.0, np.array([77])), 9: (np.array([0]), 0.5, None)}
    played = drive(policy, feedback, 1, 30, np.random.default_rng(0), restart=restarts.get)
    assert np.all(played == n_arms - 1)


@every_policy
def test_never_an_ineligible_arm(case):
    feedback = feedback_for(1, rows=8, steps=120)
    eligible = np.random.default_rng(2).random((8, 120, N_ARMS)) < 0.5
    eligible[0] = [True, False, False]  # its other arms are never played, so their indices stay infinite
    eligible[1, :60] = [False, True, True]  # an arm that joins late, never played before
    eligible[1, 60:] = True
    eligible[2, 60:] = [False, False, True]  # arms that leave
    eligible[~eligible.any(axis=2), 1] = True
    before = eligible.copy()
    played = drive(case.make(), feedback, 8, 120, np.random.default_rng(3), eligible=eligible)
    assert np.take_along_axis(eligible, played[:, :, None], axis=2).all()
    np.testing.assert_array_equal(eligible, before)
    if case.each_once_first:
        assert played[1, 60] == 0  # at once, when it joins
        assert set(played[3][:40]) == {0, 1, 2}


@every_policy
def test_deterministic_given_the_seed(case):
    first, again, other = (drive(case.make(), feedback_for(), 5, 60, np.random.default_rng(seed)) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    if case.random and not isinstance(case.make(), FixedArm):
        assert np.any(first != other)


@every_policy
def test_global_random_state_is_not_touched(case):
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    drive(case.make(), feedback_for(), 5, 20, np.random.default_rng(0))
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


@every_independent_policy
def test_rows_that_finish_early_change_nothing_for_the_others(case):
    whole = drive(case.make(), feedback_for(), 5, 60, np.random.default_rng(4))
    last = {1: 7, 3: 1, 0: 30}
    part = drive(case.make(), feedback_for(), 5, 60, np.random.default_rng(4), last=last)
    for row in range(5):
        steps = last.get(row, 60)
        np.testing.assert_array_equal(part[row, :steps], whole[row, :steps])


@every_independent_policy
def test_what_other_rows_see_changes_nothing(case):
    whole = drive(case.make(), feedback_for(0), 5, 60, np.random.default_rng(4))
    mixed, other = feedback_for(0), feedback_for(99)
    for column in ("accepted", "overlap", "seconds", "every_arm"):
        getattr(mixed, column)[[0, 3]] = getattr(other, column)[[0, 3]]
    part = drive(case.make(), mixed, 5, 60, np.random.default_rng(4))
    np.testing.assert_array_equal(part[[1, 2, 4]], whole[[1, 2, 4]])


@every_independent_policy
def test_a_restart_of_one_row_leaves_the_others(case):
    whole = drive(case.make(), feedback_for(), 5, 60, np.random.default_rng(4))
    part = drive(
        case.make(), feedback_for(), 5, 60, np.random.default_rng(4), restart={20: (np.array([1, 3]), 0.0)}.get
    )
    np.testing.assert_array_equal(part[[0, 2, 4]], whole[[0, 2, 4]])
    np.testing.assert_array_equal(part[:, :20], whole[:, :20])
    if case.each_once_first:
        assert all(sorted(part[row, 20:23]) == [0, 1, 2] for row in (1, 3))


@every_policy
def test_restart_without_keeping_equals_a_fresh_start(case):
    rng = np.random.default_rng(5)
    policy = case.make()
    drive(policy, feedback_for(1), 5, 60, rng)
    policy.restart(np.arange(5), 0.0)
    rng.bit_generator.state = np.random.default_rng(6).bit_generator.state
    again = drive(policy, feedback_for(2), 5, 60, rng, start=False)
    fresh = drive(case.make(), feedback_for(2), 5, 60, np.random.default_rng(6))
    np.testing.assert_array_equal(again, fresh)


@every_policy
def test_a_second_start_forgets_the_first(case):
    policy = case.make()
    drive(policy, feedback_for(1), 5, 60, np.random.default_rng(5))
    again = drive(policy, feedback_for(2), 5, 60, np.random.default_rng(6))
    fresh = drive(case.make(), feedback_for(2), 5, 60, np.random.default_rng(6))
    np.testing.assert_array_equal(again, fresh)


@every_policy
def test_restart_that_keeps_all_changes_nothing(case):
    def often(step):
        return (np.arange(5), 1.0) if step % 4 == 3 else None

    never = drive(case.make(), feedback_for(), 5, 60, np.random.default_rng(4))
    kept = drive(case.make(), feedback_for(), 5, 60, np.random.default_rng(4), restart=often)
    np.testing.assert_array_equal(never, kept)


@every_forced_start
def test_each_eligible_arm_once_first(case):
    rows = 600
    feedback = feedback_for(3, rows=rows, steps=3)
    played = drive(case.make(), feedback, rows, 3, np.random.default_rng(0))
    assert np.all(np.sort(played, axis=1) == np.arange(3))
    # in an order without preference; all six orders, false alarm 1e-4
    orders = np.unique(played @ [9, 3, 1], return_counts=True)[1]
    assert len(orders) == 6
    assert chisquare(orders).pvalue > 1e-4
    without_0 = np.ones((rows, 3, 3), dtype=bool)
    without_0[:, :, 0] = False
    played = drive(case.make(), feedback, rows, 2, np.random.default_rng(0), eligible=without_0)
    assert np.all(np.sort(played, axis=1) == [1, 2])


def enough_for(policy, alphas, draft_length=5):
    costs = CostModel.linear([0.02] * len(alphas), draft_length)
    environment = StationaryEnvironment(alphas, draft_length, costs=costs)
    return environment if policy.needs <= environment.gives else None


@every_learner
def test_learners_beat_random_play(case):
    """Arms .9 and .1, 500 tokens, 100 runs: by more than 6 standard errors; a tie passes once in 1e9."""
    policy = case.make()
    environment = enough_for(policy, [0.9, 0.1])
    if environment is None:
        pytest.skip("needs an environment with more signals")
    tau = simulate(policy, environment, 500, runs=100, seed=1).rounds[:, 0]
    guess = simulate(RandomArm(), environment, 500, runs=100, seed=2).rounds[:, 0]
    assert guess.mean() - tau.mean() > 6 * np.hypot(guess.std(), tau.std()) / 10


@every_policy
@pytest.mark.parametrize("alphas", [(0.6, 0.6, 0.6), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)])
def test_identical_drafters(case, alphas):
    """Any play of equal arms is optimal; at rates 0 and 1 every run takes the same number of rounds."""
    policy = case.make()
    environment = enough_for(policy, alphas)
    if environment is None:
        pytest.skip("needs an environment with more signals")
    outcome = simulate(policy, environment, 120, runs=20, seed=3)
    assert np.all(outcome.pulls.sum(axis=2) == outcome.rounds)
    if alphas[0] != 0.6:
        assert np.all(outcome.rounds == (20 if alphas[0] == 1 else 120))


@every_policy
def test_needs_are_refused_by_name(case):
    policy = case.make()
    for need in policy.needs:
        with refuses(need, str(policy), "choose another"):
            simulate(policy, GivesEverything(without={need}), 10)
    unneeded = SIGNALS - policy.needs
    outcome = simulate(policy, GivesEverything(without=unneeded), 10)
    assert outcome.rounds.tolist() == [[5]]  # two tokens a round


@every_index_policy
@pytest.mark.parametrize("accepted", [0, 2, 4])
def test_long_runs_of_one_arm_keep_indices_finite(case, accepted):
    """Every arm once, then arm 0 fifty and five thousand times: others' indices are refreshed and grow."""
    policy = case.make()
    policy.start(2, arm_names(3), 4, np.random.default_rng(0))
    rows = np.arange(2)
    policy.select(rows, make_context(2, 3))  # some read the context
    for arm in (0, 1, 2):
        policy.update(rows, make_rounds([arm] * 2, [accepted] * 2, 4))
    seen = []
    for step in range(5001):
        if step in (0, 50, 5000):
            index = policy.index(rows)
            assert index.shape == (2, 3)
            assert np.all(np.isfinite(index))
            seen.append(index[0])
        policy.update(rows, make_rounds([0, 0], [accepted] * 2, 4))
        if step % 500 == 0:
            policy.select(rows, make_context(2, 3))
    grows = case.each_once_first and case.index_grows
    if grows and not (accepted == 4 and isinstance(policy, KLUCBTrials)):  # 1 is the largest mean
        assert np.all(np.diff([index[1:] for index in seen], axis=0) > 0)
        assert seen[0][0] > seen[1][0]
        # the bonus of moss ends with an arm's fair share of the rounds
        assert seen[1][0] >= seen[2][0] - 1e-9 if isinstance(policy, MOSS) else seen[1][0] > seen[2][0]


@every_policy
@pytest.mark.parametrize("keep", [0.9, 1e-3, 1e-9])
def test_discounted_statistics_stay_usable(case, keep):
    restarts = {step: (np.arange(5), keep) for step in range(3, 60, 3)}
    played = drive(case.make(), feedback_for(), 5, 60, np.random.default_rng(0), restart=restarts.get)
    assert played.min() >= 0


@every_policy
def test_short_empty_and_cut_blocks_are_learnt_from(case):
    policy = case.make()
    policy.start(4, arm_names(3), 4, np.random.default_rng(0))
    rows = np.arange(4)
    overlap = np.full((4, 4), np.nan)
    overlap[0, :2], overlap[2, :2], overlap[3] = 0.6, 0.5, 0.7
    for _ in range(30):
        arms = policy.select(rows, make_context(4, 3))
        policy.update(rows, make_rounds(arms, [2, 0, 2, 4], 4, [2, 0, 2, 4], [3, 1, 2, 5], overlap))
        if isinstance(policy, IndexPolicy):
            assert np.all(np.isfinite(policy.index(rows)[policy.pulls > 0]))


# --- ties


@pytest.mark.parametrize("tied", [[0], [2], [0, 1], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("top", [0.7, np.inf])
def test_ties_are_broken_fairly(tied, top):
    """20,000 rows, false alarm 1e-4 a case."""
    index = np.full((20_000, 4), -np.inf if top < 1 else 0.2)
    index[:, tied] = top
    arm = argmax_random(index, np.random.default_rng(len(tied)).random(len(index)))
    counts = np.bincount(arm, minlength=4)
    assert counts.sum() == counts[tied].sum() == 20_000
    if len(tied) > 1:
        assert chisquare(counts[tied]).pvalue > 1e-4


def test_ties_are_broken_by_the_rows_own_uniform():
    index = np.array([[1.0, 5.0, 5.0, 5.0]] * 5 + [[1.0, 2.0, 3.0, 0.0]])
    uniform = np.array([0.0, 0.34, 0.67, 1 / 3 - 1e-9, np.nextafter(1, 0), 0.9])
    assert argmax_random(index, uniform).tolist() == [1, 2, 3, 1, 3, 2]


# --- MetaSD-UCB


def trained(policy, plays, max_draft=4, n_arms=3):
    """One row that has played `(arm, accepted, seconds)` in order."""
    policy.start(1, arm_names(n_arms), max_draft, np.random.default_rng(0))
    for arm, accepted, seconds in plays:
        policy.update(np.array([0]), make_rounds([arm], [accepted], max_draft, seconds=[seconds]))
    return policy


# Six rounds, so t = 7 and ln 7 = 1.945910: arm 0 accepted 4 and 2, arm 1 accepted 1, 3 and 0, arm 2 accepted 4
PLAYS = [(0, 4, 1.0), (1, 1, 2.0), (2, 4, 4.0), (0, 2, 1.0), (1, 3, 0.5), (1, 0, 0.5)]


def test_index_of_block_efficiency():
    # means 6/8, 4/12, 4/4; bonuses sqrt(2 * 1.945910 / n) with n = 2, 3, 1: 1.394959, 1.138979, 1.972770
    index = trained(MetaSDUCB(BlockEfficiency()), PLAYS).index(np.array([0]))
    np.testing.assert_allclose(index, [[2.144959, 1.472312, 2.972770]], atol=1e-6)
    index = trained(MetaSDUCB(BlockEfficiency(), beta=0.1), PLAYS).index(np.array([0]))
    np.testing.assert_allclose(index, [[0.75 + 0.1394959, 1 / 3 + 0.1138979, 1.197277]], atol=1e-6)
    index = trained(MetaSDUCB(BlockEfficiency(), beta=0.0), PLAYS).index(np.array([0]))
    np.testing.assert_allclose(index, [[0.75, 1 / 3, 1.0]])


def test_index_of_trials_counts_trials_as_samples():
    # successes 6, 4, 4 in trials m = min(N + 1, 4): 4 + 3 = 7, 2 + 4 + 1 = 7, 4; sqrt(2 ln 7 / m) = .745636, .986385
    index = trained(MetaSDUCB(AcceptanceTrials()), PLAYS).index(np.array([0]))
    np.testing.assert_allclose(index, [[6 / 7 + 0.745636, 4 / 7 + 0.745636, 1 + 0.986385]], atol=1e-6)


def test_index_of_block_divergence_has_beta_one_over_root_gamma():
    # overlaps .8 at accepted and .3 at other positions (make_rounds): N .8 + (4 - N) .3 over 4 = .3 + N / 8
    # means .3 + 3/8, .3 + (4/3)/8, .3 + 4/8; default beta 2 sigma = 1 / sqrt 4 = 1/2 on the bonuses of the first test
    index = trained(MetaSDUCB(BlockDivergence()), PLAYS).index(np.array([0]))
    np.testing.assert_allclose(index, [[0.675 + 0.6974795, 0.4666667 + 0.5694895, 0.8 + 0.986385]], atol=1e-6)


def test_index_of_tokens_per_second_is_scaled_by_the_best():
    # tokens N + 1 over seconds: 8 / 2 = 4, 7 / 3, 5 / 4; divided by 4: 1, .583333, .3125; beta .5 and pulls 2, 3, 1
    index = trained(MetaSDUCB(TokensPerSecond()), PLAYS).index(np.array([0]))
    np.testing.assert_allclose(index, [[1 + 0.6974795, 0.5833333 + 0.5694895, 0.3125 + 0.986385]], atol=1e-6)
    index = trained(MetaSDUCB(TokensPerSecond(), beta=0.0), PLAYS).index(np.array([0]))
    np.testing.assert_allclose(index, [[1, 7 / 12, 5 / 16]])
    hours = [(arm, n, 3600 * s) for arm, n, s in PLAYS]  # the unit of time does not matter
    np.testing.assert_allclose(
        trained(MetaSDUCB(TokensPerSecond()), hours).index(np.array([0])),
        trained(MetaSDUCB(TokensPerSecond()), PLAYS).index(np.array([0])),
    )


def test_index_after_a_discount():
    # half of everything: means as before, pulls 1, 1.5, .5, so t = 4: sqrt(2 ln 4 / n) = 1.665109, 1.359556, 2.354820
    policy = trained(MetaSDUCB(BlockEfficiency()), PLAYS)
    policy.restart(np.array([0]), 0.5)
    np.testing.assert_allclose(policy.index(np.array([0])), [[2.415109, 1 / 3 + 1.359556, 3.354820]], atol=1e-6)


def sequence(policy, accepted, steps, n_arms=2, max_draft=4, seconds=1.0):
    """Arms played by one row where arm a always accepts accepted[a]."""
    policy.start(1, arm_names(n_arms), max_draft, np.random.default_rng(0))
    played = []
    for _ in range(steps):
        arm = int(policy.select(np.array([0]), make_context(1, n_arms))[0])
        policy.update(
            np.array([0]),
            make_rounds([arm], [accepted[arm]], max_draft, seconds=[np.broadcast_to(seconds, n_arms)[arm]]),
        )
        played.append(arm)
    return played


def test_arm_sequence_of_metasd_ucb():
    # Arm 0 always accepts 4 of 4 (BE 1), arm 1 none (BE 0). t: index 0, index 1
    #   3: 1 + sqrt(2 ln 3 / 1) = 2.482, 1.482   4: 1 + sqrt(2 ln 4 / 2) = 2.177, 1.665   5: 2.036, 1.794
    #   6: 1 + sqrt(2 ln 6 / 4) = 1.947, 1.893   7: 1 + sqrt(2 ln 7 / 5) = 1.882, 1.973 -> arm 1
    #   8: 1 + sqrt(2 ln 8 / 5) = 1.912, sqrt(2 ln 8 / 2) = 1.442 -> arm 0
    played = sequence(MetaSDUCB(BlockEfficiency()), [4, 0], 8)
    assert sorted(played[:2]) == [0, 1]
    assert played[2:] == [0, 0, 0, 0, 1, 0]
    # beta 1/2: arm 1, played once, waits until sqrt(2 ln t) (1 - 1 / sqrt(t - 2)) > 2: 1.9836 at t = 24, 2.0082 at 25
    played = sequence(MetaSDUCB(BlockEfficiency(), beta=0.5), [4, 0], 26)
    assert played[2:] == [0] * 22 + [1] + [0]
    # no bonus: never again
    assert sequence(MetaSDUCB(BlockEfficiency(), beta=0.0), [4, 0], 200)[2:] == [0] * 198


def test_arm_sequence_of_tokens_per_second_follows_time_not_tokens():
    # Arm 0: 5 tokens in 10 s, arm 1: 1 token in 1 s; arm 1 is twice as fast, and is the one to play
    played = sequence(MetaSDUCB(TokensPerSecond(), beta=0.0), [4, 0], 50, seconds=[10.0, 1.0])
    assert played[2:] == [1] * 48
    assert sequence(MetaSDUCB(BlockEfficiency(), beta=0.0), [4, 0], 50, seconds=[10.0, 1.0])[2:] == [0] * 48


def reward_of_one_round(name, accepted, max_draft, overlap, seconds):
    """(value, weight) of one full round in plain Python, from the table of definitions."""
    trials = min(accepted + 1, max_draft)
    if name == "be":
        return accepted / max_draft, 1.0
    if name == "bd":
        return sum(overlap) / max_draft, 1.0
    if name == "bd-verified":
        return sum(overlap[:trials]), float(trials)
    if name == "trials":
        return float(accepted), float(trials)
    assert name == "tokens-per-second"
    return accepted + 1.0, seconds


def slow_index(kind, beta, value, weight, pulls):
    """Indices of one row's arms in plain Python; infinite without pulls."""
    t = sum(pulls) + 1
    means = [v / w if n else 0.0 for v, w, n in zip(value, weight, pulls, strict=True)]
    out = []
    for arm, n in enumerate(pulls):
        if n == 0:
            out.append(math.inf)
        elif kind == "kl":
            out.append(slow_kl_upper(means[arm], math.log(t) / weight[arm]))
        elif kind == "tokens-per-second":
            out.append(means[arm] / max(means) + beta * math.sqrt(2 * math.log(t) / n))
        else:
            samples = weight[arm] if kind in ("trials", "bd-verified") else n
            out.append(means[arm] + beta * math.sqrt(2 * math.log(t) / samples))
    return out


def slow_run(kind, beta, feedback, row, ties, eligible, restarts):
    """The arms of one row: a loop over rounds and arms, with the same luck as the vectorised run."""
    n_arms = feedback.n_arms
    value, weight, pulls, played = [0.0] * n_arms, [0.0] * n_arms, [0.0] * n_arms, []
    for step in range(len(ties)):
        if step in restarts:
            value, weight, pulls = ([restarts[step] * x for x in column] for column in (value, weight, pulls))
        index = slow_index(kind, beta, value, weight, pulls)
        allowed = [arm for arm in range(n_arms) if eligible[row, step, arm]]
        best = max(index[arm] for arm in allowed)
        tied = [arm for arm in allowed if index[arm] == best]
        arm = tied[int(ties[step] * len(tied))]
        accepted = int(feedback.accepted[row, step, arm])
        v, w = reward_of_one_round(
            "trials" if kind == "kl" else kind,
            accepted,
            feedback.max_draft,
            [float(x) for x in feedback.overlap[row, step, arm]],
            float(feedback.seconds[row, step, arm]),
        )
        value[arm] += v
        weight[arm] += w
        pulls[arm] += 1
        played.append(arm)
    return played


@pytest.mark.parametrize(
    ("kind", "beta", "make"),
    [
        *(
            (name, {"bd": 0.5, "tokens-per-second": 0.5}.get(name, 1.0), partial(MetaSDUCB, make_reward(name)))
            for name in REWARDS
        ),
        ("be", 0.2, partial(MetaSDUCB, BlockEfficiency(), 0.2)),
        ("kl", None, KLUCBTrials),
    ],
)
def test_vectorised_policy_equals_a_slow_scalar_one(kind, beta, make):
    rows, steps = 6, 250
    feedback = feedback_for(11, rows, steps)
    eligible = np.ones((rows, steps, N_ARMS), dtype=bool)
    eligible[3:] = np.random.default_rng(12).random((3, steps, N_ARMS)) < 0.7
    eligible[~eligible.any(axis=2), 0] = True
    restarts = {100: 0.0, 160: 0.5, 200: 1.0}
    played = drive(
        make(),
        feedback,
        rows,
        steps,
        np.random.default_rng(13),
        eligible=eligible,
        restart=lambda step: (np.arange(rows), restarts[step]) if step in restarts else None,
    )
    ties = np.random.default_rng(13).random((steps, rows))  # the policy draws one uniform per row and step
    for row in range(rows):
        assert played[row].tolist() == slow_run(kind, beta, feedback, row, ties[:, row], eligible, restarts)
    assert len({tuple(row) for row in played}) == rows  # the rows really differ


@pytest.mark.parametrize("beta", [-0.1, np.nan, np.inf])
def test_metasd_ucb_refuses_a_bad_beta(beta):
    with refuses("beta", str(beta)):
        MetaSDUCB(BlockEfficiency(), beta)


# --- KL-UCB


def slow_kl_upper(mean, level):
    """`max{a : kl(mean, a) <= level}` by bracketing ln(1 - a)."""
    if mean >= 1:
        return 1.0
    if level <= 0:
        return mean

    def excess(log_gap):
        a = -math.expm1(log_gap)
        first = mean * (math.log(mean) - math.log(a)) if mean > 0 else 0.0
        return first + (1 - mean) * (math.log1p(-mean) - log_gap) - level

    high = math.log1p(-mean) if mean > 0 else -1e-300
    low = high - 1.0
    while excess(low) < 0:
        low = high + 2 * (low - high)
    return -math.expm1(brentq(excess, low, high, xtol=1e-13, rtol=1e-14))


MEANS = [0.0, 1e-12, 1e-6, 0.001, 0.05, 0.3, 0.5, 0.77, 0.95, 0.999, 1 - 1e-6, 1 - 1e-12, 1.0]
LEVELS = [0.0, 1e-12, 1e-8, 1e-4, 0.01, 0.1, 0.5, 1.0, 3.0, 9.2, 40.0, 700.0]


@pytest.mark.parametrize("mean", MEANS)
def test_kl_upper_against_a_bracketing_solver(mean):
    got = kl_upper(np.full(len(LEVELS), mean), np.array(LEVELS))
    np.testing.assert_allclose(got, [slow_kl_upper(mean, level) for level in LEVELS], atol=1e-7, rtol=0)
    assert np.all(got >= mean - 1e-15)
    assert np.all(got <= 1)


def test_kl_upper_in_closed_form():
    level = np.array([0.0, 1e-3, 0.2, 1.0, 5.0])
    # kl(0, a) = -ln(1 - a);  kl(1/2, a) = -ln(4 a (1 - a)) / 2;  kl(1, a) = -ln a
    np.testing.assert_allclose(kl_upper(np.zeros(5), level), -np.expm1(-level), atol=1e-12)
    np.testing.assert_allclose(kl_upper(np.full(5, 0.5), level), (1 + np.sqrt(-np.expm1(-2 * level))) / 2, atol=1e-9)
    assert kl_upper(np.ones(5), level).tolist() == [1.0] * 5
    assert kl_upper(np.array(0.4), np.array([[0.1, 0.2]])).shape == (1, 2)


@given(mean=st.floats(0, 1), level=st.floats(0, 50), more=st.floats(0, 50))
def test_kl_upper_is_an_upper_level_set(mean, level, more):
    low, high = kl_upper(np.array([mean, mean]), np.array([level, level + more]))
    assert mean - 1e-15 <= low <= 1
    assert low <= high + 1e-7
    assert low == pytest.approx(slow_kl_upper(mean, level), abs=1e-7)


def test_index_of_kl_ucb():
    # t = 7. Trials 7, 7, 4 and successes 6, 4, 4 as above; arm 2 has mean 1. A run with mean 1/2 has a closed form:
    # N = 1 twice with gamma 2: 2 successes in 4 trials, and once on the other arm (0 of 1), so t = 4, level ln 4 / 4
    index = trained(KLUCBTrials(), PLAYS).index(np.array([0]))[0]
    assert index == pytest.approx([slow_kl_upper(6 / 7, math.log(7) / 7), slow_kl_upper(4 / 7, math.log(7) / 7), 1.0])
    half = trained(KLUCBTrials(), [(0, 1, 1), (0, 1, 1), (1, 0, 1)], max_draft=2, n_arms=2).index(np.array([0]))[0]
    # (1 + sqrt(1 - exp(-2 ln 4 / 4))) / 2 = (1 + sqrt(1 - 1/2)) / 2 = .853553;  1 - exp(-ln 4) = 3/4
    assert half == pytest.approx([0.8535534, 0.75])


def test_index_of_kl_ucb_with_c():
    # c = 3, t = 4: ln 4 + 3 ln ln 4 = 1.386294 + 3 * .326634 = 2.366197; mean 0, 1 trial: 1 - exp(-2.366197) = .906163
    plays = [(0, 1, 1), (0, 1, 1), (1, 0, 1)]
    index = trained(KLUCBTrials(c=3), plays, max_draft=2, n_arms=2).index(np.array([0]))[0]
    assert index[1] == pytest.approx(0.906163, abs=1e-6)
    assert index[0] == pytest.approx((1 + math.sqrt(1 - math.exp(-2 * 2.366197 / 4))) / 2, abs=1e-6)
    # ln ln t is clamped at 0: at t = 2, ln 2 alone, so 1 - 1/2
    assert trained(KLUCBTrials(c=3), plays[2:], max_draft=2, n_arms=2).index(np.array([0]))[0, 1] == pytest.approx(0.5)
    for c in (-1.0, np.nan, np.inf):
        with refuses("c:", str(c)):
            KLUCBTrials(c)


# --- Thompson sampling


@pytest.mark.parametrize(
    ("plays", "prior", "keep", "law"),
    [
        ([], (1.0, 1.0), 1.0, (1, 1)),
        ([(0, 4), (0, 2), (0, 0)], (1.0, 1.0), 1.0, (7, 3)),  # trials 4 + 3 + 1 = 8, successes 6
        ([(0, 4), (0, 2), (0, 0)], (0.5, 2.0), 1.0, (6.5, 4)),
        ([(0, 4), (0, 2), (0, 0)], (1.0, 1.0), 0.25, (2.5, 1.5)),  # fractions of trials, as carried over
    ],
)
def test_thompson_draws_from_the_posterior(plays, prior, keep, law):
    """Kolmogorov-Smirnov on 5,000 rows, false alarm 1e-4 a case."""
    rows = np.arange(5000)
    policy = ThompsonTrials(*prior)
    policy.start(len(rows), arm_names(2), 4, np.random.default_rng(1))
    for arm, accepted in plays:
        policy.update(rows, make_rounds([arm] * len(rows), [accepted] * len(rows), 4))
    policy.restart(rows, keep)
    draws = policy.index(rows)
    assert kstest(draws[:, 0], beta_law(*law).cdf).pvalue > 1e-4
    assert kstest(draws[:, 1], beta_law(*prior).cdf).pvalue > 1e-4
    assert abs(np.corrcoef(draws.T)[0, 1]) < 4 / np.sqrt(len(rows))


def test_thompson_plays_an_arm_with_the_probability_that_it_is_best():
    """Beta(5, 1) against Beta(3, 3): P[first larger] by quadrature; 20,000 rows, false alarm 1e-4."""
    rows = np.arange(20_000)
    policy = ThompsonTrials()
    policy.start(len(rows), arm_names(2), 4, np.random.default_rng(2))
    for arm, accepted in ((0, 4), (1, 1), (1, 1)):  # 4 of 4; 2 of 4
        policy.update(rows, make_rounds([arm] * len(rows), [accepted] * len(rows), 4))
    first = quad(lambda x: beta_law(5, 1).pdf(x) * beta_law(3, 3).cdf(x), 0, 1)[0]
    counts = np.bincount(policy.select(rows, make_context(len(rows), 2)), minlength=2)
    assert chisquare(counts, len(rows) * np.array([first, 1 - first])).pvalue > 1e-4


@pytest.mark.parametrize("prior", [0.0, -1.0, np.nan, np.inf])
def test_thompson_refuses_a_bad_prior(prior):
    with refuses("prior_a", str(prior)):
        ThompsonTrials(prior_a=prior)
    with refuses("prior_b", str(prior)):
        ThompsonTrials(prior_b=prior)


# --- full information


def test_hedge_plays_by_the_exponential_of_its_losses():
    """Chi-square on 20,000 rows, false alarm 1e-4 a case.

    Two rounds of gamma = 2, so t = 3. The first emits two tokens: losses (0 + .5) / 3 and (.5 + .5) / 3. The second
    emits one: .4 / 3 and .45 / 3. Sums .9 / 3 and 1.45 / 3, apart by d = .183333; eta = sqrt(8 ln 2 / 3) = 1.359556:
    P(arm 0) = 1 / (1 + exp(-d eta)) = 0.561992. With eta = 4: 1 / (1 + exp(-4 d)) = 0.675536. Half forgotten, t = 2:
    eta = sqrt(8 ln 2 / 2) = 1.665109 and half the sums: 1 / (1 + exp(-d eta / 2)) = 0.538085
    """
    rows = np.arange(20_000)
    n = len(rows)
    scores = [[[[1.0, 0.5, 9.0], [0.5, 0.5, 9.0]]], [[[0.6, 9.0, 9.0], [0.55, 9.0, 9.0]]]]  # 9: not emitted, not read
    for eta, keep, first in ((None, 1.0, 0.561992), (4.0, 1.0, 0.675536), (None, 0.5, 0.538085)):
        policy = Hedge(eta)
        policy.start(n, arm_names(2), 2, np.random.default_rng(5))
        for accepted, every_arm in zip((1, 0), scores, strict=True):
            policy.update(rows, make_rounds([0] * n, [accepted] * n, 2, every_arm=every_arm, n_arms=2))
        policy.restart(rows, keep)
        counts = np.bincount(policy.select(rows, make_context(n, 2)), minlength=2)
        assert chisquare(counts, [n * first, n * (1 - first)]).pvalue > 1e-4


def test_hedge_learns_arms_that_it_does_not_play():
    policy = Hedge(eta=5.0)
    policy.start(1, arm_names(2), 2, np.random.default_rng(0))
    for _ in range(20):
        policy.update(np.array([0]), make_rounds([0], [0], 2, every_arm=[[[0.1] * 3, [0.9] * 3]], n_arms=2))
    assert policy.select(np.array([0]), make_context(1, 2))[0] == 1


def test_hedge_refuses_what_it_cannot_use():
    for eta in (0.0, -1.0, np.nan, np.inf):
        with refuses("eta", str(eta)):
            Hedge(eta)
    blind = make_rounds([0], [1], 2, n_arms=2)
    blind.every_arm = None
    policy = Hedge()
    policy.start(1, arm_names(2), 2, np.random.default_rng(0))
    with refuses("every_arm"):
        policy.update(np.array([0]), blind)


# --- policies that do not learn


def test_random_is_uniform_over_the_eligible_arms():
    """30,000 rows, false alarm 1e-4 a case."""
    rows = np.arange(30_000)
    policy = RandomArm()
    policy.start(len(rows), arm_names(4), 4, np.random.default_rng(3))
    counts = np.bincount(policy.select(rows, make_context(len(rows), 4)), minlength=4)
    assert chisquare(counts).pvalue > 1e-4
    eligible = np.tile([True, False, True, True], (len(rows), 1))
    counts = np.bincount(policy.select(rows, make_context(len(rows), 4, eligible)), minlength=4)
    assert counts[1] == 0
    assert chisquare(counts[[0, 2, 3]]).pvalue > 1e-4


def test_fixed_plays_its_arm_or_the_first_eligible():
    policy = FixedArm("arm 1")
    policy.start(3, arm_names(3), 4, np.random.default_rng(0))
    eligible = np.array([[True, True, True], [True, False, True], [False, False, True]])
    assert policy.select(np.arange(3), make_context(3, 3)).tolist() == [1, 1, 1]
    assert policy.select(np.arange(3), make_context(3, 3, eligible)).tolist() == [1, 0, 2]
    with refuses("fixed", "arm 0, arm 1", "'arm 9'"):
        FixedArm("arm 9").start(1, arm_names(2), 4, np.random.default_rng(0))
    for arm in (2, -1):
        with refuses("fixed", "0..1", str(arm)):
            FixedArm(arm).start(1, arm_names(2), 4, np.random.default_rng(0))


# --- names


def test_names_make_policies_with_their_parameters():
    policy = make_policy("metasd-ucb:reward=bd,beta=0.25")
    assert (policy.reward.name, policy.beta) == ("bd", 0.25)
    assert make_policy("metasd-ucb").reward.name == "be"
    assert make_policy("metasd-ucb", reward="trials").reward.name == "trials"
    assert make_policy("metasd-ucb:reward=bd", reward="trials").reward.name == "bd"
    assert make_policy("kl-ucb-trials:c=3", reward="bd").c == 3.0
    assert make_policy("thompson-trials:prior_a=2,prior_b=0.5").prior == (2.0, 0.5)


def test_fixed_finds_an_arm_by_name_then_drafter_then_index():
    arms, drafters = ("quick", "1"), ("lookup@5", "model:x:y")
    assert make_policy("fixed:quick", arms=arms, drafters=drafters).arm == "quick"
    assert make_policy("fixed:model:x:y", arms=arms, drafters=drafters).arm == "1"  # all after the first colon
    assert make_policy("fixed:1", arms=arms, drafters=drafters).arm == "1"  # a name before an index
    assert make_policy("fixed:0", arms=arms, drafters=drafters).arm == "quick"  # names are not mistaken
    assert make_policy("fixed:#1", arms=("1", "0"), drafters=("1", "0")).arm == 1
    assert make_policy("fixed:lookup", arms=arms, drafters=drafters).arm == "quick"  # the only one of its length
    for arm in ("fixed:2", "fixed:-1", "fixed", "fixed:"):
        with refuses("fixed", "quick, 1"):
            make_policy(arm, arms=arms, drafters=drafters)
    with refuses("fixed"):
        make_policy("fixed:a", arms=("x", "y"), drafters=("a", "a"))  # which of the two?
    with refuses("fixed"):
        make_policy("fixed:a", arms=("x", "y"), drafters=("a@2", "a@5"))


def test_the_name_of_an_index_is_no_arms_name():
    """Of the arms 1 and 0 the policy of the first is not called as if it played the second."""
    arms = ("1", "0")
    for index in (0, 1):
        for again in (make_policy(str(FixedArm(index))), make_policy(str(FixedArm(index)), arms=arms)):
            again.start(1, arms, 5, np.random.default_rng(0))
            assert again.chosen == index


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ucb", ["policy", "metasd-ucb", "'ucb'"]),
        ("metasd-ucb:gamma=2", ["reward=...", "beta=...", "'gamma=2'"]),
        ("metasd-ucb:beta", ["'beta'"]),
        ("metasd-ucb:beta=wide", ["beta", "'wide'"]),
        ("metasd-ucb:reward=speed", ["reward", "'speed'"]),
        ("kl-ucb-trials:reward=bd", ["c=...", "'reward=bd'"]),
        ("metasd-ucb:", ["after metasd-ucb:", "found nothing"]),
        ("random:x=1", ["no parameters", "'x=1'"]),
    ],
)
def test_bad_names_are_refused(spec, words):
    with refuses(*words):
        make_policy(spec)


def test_all_is_every_policy_that_the_environment_can_feed():
    gives_nothing = policy_specs("all", ("a", "b"), frozenset())
    assert {"fixed:a", "fixed:b", "random", "kl-ucb-trials", "thompson-trials", "metasd-ucb:reward=be"} <= set(
        gives_nothing
    )
    assert not any(re.search("bd|second", spec) for spec in gives_nothing)
    everything = policy_specs("all", ("a", "b"), SIGNALS)
    assert {f"metasd-ucb:reward={reward}" for reward in REWARDS} <= set(everything)
    assert len(set(everything)) == len(everything)
    assert "metasd-ucb" in policy_specs("all", ("a",), SIGNALS, reward="bd")
    assert policy_specs("random", ("a",), frozenset()) == ["random"]
