"""Conformance of every environment, then the laws and exact expectations of the stationary model.

Statistical tests have fixed seeds; a comment beside each states how often it would fail on fresh ones.
"""

import tracemalloc

import numpy as np
import pytest
from scipy.stats import beta as beta_law
from scipy.stats import chisquare, kstest

from metasd_sim import acceptance
from metasd_sim.costs import CostModel
from metasd_sim.environments import Environment, StationaryEnvironment
from metasd_sim.environments.base import BLOCK_OVERLAP, EVERY_ARM, OVERLAP, SECONDS, SIGNALS
from metasd_sim.environments.renewal import stationary_rounds
from metasd_sim.environments.synthetic import beta_atoms
from metasd_sim.policies import FixedArm, MetaSDUCB
from metasd_sim.rewards import BlockEfficiency
from metasd_sim.simulate import simulate
from metasd_sim.summary import lower_bound, upper_bound
from tests.sim_cases import ENVIRONMENT_CASES, refuses, z_limit

every_environment = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for name, case in ENVIRONMENT_CASES.items()]
)
NOTHING = frozenset()


def play(environment, needs=NOTHING, rows=6, seed=0, tokens=60, choices=1, leave=None):
    """Random arms, each row until `tokens` or the end of its stream; [(rows, context, rounds)].

    leave: row -> step after which it is no longer played.
    """
    environment.reset(rows, np.random.default_rng(seed), needs)
    arm_table = np.random.default_rng(choices).integers(0, len(environment.arms), (rows, 10_000))
    emitted, active, out = np.zeros(rows, dtype=int), np.arange(rows), []
    while active.size:
        step = len(out)
        context = environment.observe(active)
        arms = arm_table[active, step]
        if context.eligible is not None:
            arms = np.where(context.eligible[np.arange(len(active)), arms], arms, context.eligible.argmax(axis=1))
        rounds = environment.step(active, arms)
        np.testing.assert_array_equal(rounds.arm, arms)
        emitted[active] += rounds.emitted
        out.append((active, context, rounds))
        going = (emitted[active] < tokens) & ~environment.done[active]
        active = active[going & [step + 1 < (leave or {}).get(row, 10_000) for row in active]]
    return out


def by_row(log):
    """row -> its rounds as a list of plain tuples, NaN as -1."""
    rows = {}
    for active, context, rounds in log:
        for i, row in enumerate(active.tolist()):
            columns = [context.query, context.new_query, rounds.arm, rounds.drafted, rounds.accepted, rounds.emitted]
            columns += [c for c in (rounds.seconds, rounds.overlap, rounds.every_arm) if c is not None]
            values = tuple(np.nan_to_num(np.asarray(c[i], dtype=float), nan=-1.0).tolist() for c in columns)
            rows.setdefault(row, []).append(values)
    return rows


# --- conformance


@every_environment
def test_protocol(case):
    environment = case.make()
    assert isinstance(environment.arms, tuple)
    assert all(isinstance(arm, str) for arm in environment.arms)
    assert len(set(environment.arms)) == len(environment.arms)
    assert environment.max_draft >= 1
    assert environment.queries >= 1
    assert environment.gives <= SIGNALS
    environment.reset(3, np.random.default_rng(0), NOTHING)
    assert isinstance(environment, Environment)
    assert environment.done.shape == (3,)
    assert environment.done.dtype == bool
    assert not environment.done.any()


@every_environment
def test_rounds_keep_their_promises(case):
    environment = case.make()
    for needs in (NOTHING, *(environment.gives & {signal} for signal in environment.gives), environment.gives):
        log = play(environment, needs)
        cut, query = dict.fromkeys(range(6), False), dict.fromkeys(range(6), -1)
        for active, context, rounds in log:
            n = len(active)
            for column in (rounds.arm, rounds.drafted, rounds.accepted, rounds.emitted, context.query):
                assert column.shape == (n,)
                assert column.dtype.kind == "i"
            assert context.new_query.shape == (n,)
            assert rounds.max_draft == environment.max_draft
            assert np.all((rounds.accepted >= 0) & (rounds.accepted <= rounds.drafted))
            assert np.all(rounds.drafted <= environment.max_draft)
            assert np.all(rounds.emitted >= 1)
            assert np.all((rounds.emitted == rounds.accepted + 1) | (rounds.emitted == rounds.accepted))
            for i, row in enumerate(active):
                # a query's first round is announced, and a block is cut by the end of its query alone
                assert context.new_query[i] == (context.query[i] != query[row])
                assert not (cut[row] and context.query[i] == query[row])
                assert query[row] <= context.query[i] < environment.queries
                query[row], cut[row] = context.query[i], rounds.emitted[i] == rounds.accepted[i]
            if context.eligible is not None:
                assert context.eligible.shape == (n, len(environment.arms))
                assert context.eligible.any(axis=1).all()
            check_signals(environment, needs, rounds, n)
        for row, was_cut in cut.items():
            assert not was_cut or environment.done[row]
        if getattr(environment, "endless", False):
            assert not environment.done.any()
            assert not any(cut.values())


def check_signals(environment, needs, rounds, n):
    """A round carries seconds where the environment gives them, and overlaps only where asked for."""
    assert (rounds.seconds is None) == (SECONDS not in environment.gives)
    if rounds.seconds is not None:
        assert rounds.seconds.shape == (n,)
        assert np.all(rounds.seconds > 0)
    assert (rounds.every_arm is None) == (EVERY_ARM not in needs)
    if rounds.every_arm is not None:
        assert rounds.every_arm.shape == (n, len(environment.arms), environment.max_draft + 1)
        emitted = np.arange(environment.max_draft + 1) < rounds.emitted[:, None, None]
        np.testing.assert_array_equal(~np.isnan(rounds.every_arm), np.broadcast_to(emitted, rounds.every_arm.shape))
        assert np.nanmin(rounds.every_arm) >= 0
        assert np.nanmax(rounds.every_arm) <= 1
    if not needs & {OVERLAP, BLOCK_OVERLAP}:
        assert rounds.overlap is None
        return
    assert rounds.overlap.shape == (n, environment.max_draft)
    known = ~np.isnan(rounds.overlap)
    assert np.all((rounds.overlap[known] >= 0) & (rounds.overlap[known] <= 1))
    position = np.arange(environment.max_draft)
    assert not known[position >= rounds.drafted[:, None]].any()
    if BLOCK_OVERLAP not in needs:
        assert not known[position >= rounds.emitted[:, None]].any()  # only what was verified has been seen


@every_environment
def test_same_seed_same_rounds(case):
    environment = case.make()
    for needs in (NOTHING, environment.gives):
        first = by_row(play(environment, needs, seed=3))
        assert by_row(play(environment, needs, seed=3)) == first  # after a reset
        assert by_row(play(case.make(), needs, seed=3)) == first


@every_environment
def test_draws_of_a_row_do_not_depend_on_the_others(case):
    environment = case.make()
    for needs in (NOTHING, environment.gives):
        whole = by_row(play(environment, needs, seed=4))
        leave = {0: 3, 2: 1, 5: 5}
        part = by_row(play(environment, needs, seed=4, leave=leave))
        for row in range(6):
            assert part[row] == whole[row][: leave.get(row, len(whole[row]))]


@every_environment
def test_seeds_differ_where_there_is_chance(case):
    environment = case.make()
    first, other = (by_row(play(environment, environment.gives, seed=seed)) for seed in (5, 6))
    assert (first != other) == case.random


class Watching(FixedArm):
    """Plays one arm, and asks for overlaps, so that the environment draws them."""

    def __init__(self, arm, needs):
        super().__init__(arm)
        self.needs = needs


FIXED_BUDGETS = 2
FIXED_TESTS = sum(
    2 * 3 * FIXED_BUDGETS * len(case.make().arms) for case in ENVIRONMENT_CASES.values()
)  # clocks, needs, budgets and arms


@every_environment
def test_fixed_arms_are_the_means_of_runs(case):
    """E tau and E seconds of every arm against 400 runs, whatever is drawn besides.

    Family-wise false alarm 1e-3 over all environments (Bonferroni, |z| limit about 4.5).
    """
    environment = case.make()
    limit = z_limit(FIXED_TESTS)
    tokens = case.budget or environment.tokens
    budgets = np.array([1 + tokens // 3, tokens])
    fixed = environment.fixed_arms(budgets)
    n_arms = len(environment.arms)
    assert fixed.rounds.shape == (FIXED_BUDGETS, n_arms)
    assert np.all(np.diff(fixed.rounds, axis=0) > 0)
    assert np.all(fixed.rounds <= budgets[:, None])
    assert (fixed.seconds is None) == (fixed.plain is None) == (SECONDS not in environment.gives)
    for needs in {NOTHING, environment.gives & {OVERLAP}, environment.gives & {BLOCK_OVERLAP}}:
        for arm in range(n_arms):
            outcome = simulate(Watching(arm, needs), environment, budgets, runs=400, seed=arm)
            clocks = [(outcome.rounds, fixed.rounds)]
            if fixed.seconds is not None:
                clocks.append((outcome.seconds, fixed.seconds))
            for measured, expected in clocks:
                difference = np.abs(measured.mean(axis=0) - expected[:, arm])
                assert np.all(difference <= limit * measured.std(axis=0, ddof=1) / 20 + 1e-9)


# --- the stationary law

LAWS = ("beta", "bernoulli", "constant")
NEEDS = (NOTHING, frozenset({OVERLAP}), frozenset({BLOCK_OVERLAP}), frozenset({EVERY_ARM}))
RATES, LENGTHS = (0.97, 0.6, 0.2), (5, 2, 4)


def one_arm(environment, arm, needs, rows=20_000, seed=0):
    environment.reset(rows, np.random.default_rng(seed), needs)
    return environment.step(np.arange(rows), np.full(rows, arm))


@pytest.mark.parametrize("needs", NEEDS, ids=["no overlaps", "verified", "block", "every arm"])
@pytest.mark.parametrize("law", LAWS)
def test_accepted_tokens_follow_the_capped_geometric_law(law, needs):
    """Chi-square on 20,000 rounds; false alarm 1e-3 over the 36 tests together (Bonferroni)."""
    environment = StationaryEnvironment(RATES, LENGTHS, law)
    for arm, (alpha, gamma) in enumerate(zip(RATES, LENGTHS, strict=True)):
        rounds = one_arm(environment, arm, needs, seed=arm)
        assert np.all(rounds.drafted == gamma)
        assert np.all(rounds.emitted == rounds.accepted + 1)
        counts = np.bincount(rounds.accepted, minlength=gamma + 1)
        assert len(counts) == gamma + 1
        assert chisquare(counts, 20_000 * acceptance.pmf(alpha, gamma)).pvalue > 1e-3 / 36


@pytest.mark.parametrize("law", LAWS)
def test_overlaps_are_seen_where_verified_and_mean_what_they_say(law):
    """z of the martingales below on 20,000 rounds; false alarm 1e-3 over 18 (Bonferroni)."""
    environment = StationaryEnvironment(RATES, LENGTHS, law)
    limit = z_limit(18)
    position = np.arange(environment.max_draft)
    for arm, (alpha, gamma) in enumerate(zip(RATES, LENGTHS, strict=True)):
        verified = one_arm(environment, arm, frozenset({OVERLAP}), seed=arm)
        block = one_arm(environment, arm, frozenset({OVERLAP, BLOCK_OVERLAP}), seed=arm)
        np.testing.assert_array_equal(verified.accepted, block.accepted)
        # all drafted positions, or the accepted ones and the first rejected
        np.testing.assert_array_equal(~np.isnan(block.overlap), np.broadcast_to(position < gamma, (20_000, 5)))
        seen = position < np.minimum(verified.accepted + 1, gamma)[:, None]
        np.testing.assert_array_equal(~np.isnan(verified.overlap), seen)
        np.testing.assert_array_equal(verified.overlap[seen], block.overlap[seen])
        # E sum beta = alpha E m over verified positions; given overlaps, P(N >= 2) = beta_1 beta_2
        excess = np.nansum(verified.overlap - alpha, axis=1)
        first, second = block.overlap[:, 0], block.overlap[:, 1]
        luck = ((block.accepted >= 2) - first * second) * (first + second)
        for mean_zero in (excess, luck):
            assert abs(mean_zero.mean()) <= limit * mean_zero.std() / np.sqrt(20_000) + 1e-12
        if law != "constant":  # independent within the block
            assert abs(np.corrcoef(first, second)[0, 1]) < limit / np.sqrt(20_000)


@pytest.mark.parametrize("law", LAWS)
def test_every_arm_is_scored_on_the_emitted_tokens(law):
    """Mean of each arm's score whoever plays, on 20,000 rounds; false alarm 1e-3 over 27 (Bonferroni)."""
    environment = StationaryEnvironment(RATES, LENGTHS, law)
    for arm in range(3):
        rounds = one_arm(environment, arm, frozenset({OVERLAP, EVERY_ARM}), seed=arm)
        seen = ~np.isnan(rounds.overlap)
        np.testing.assert_array_equal(rounds.every_arm[:, arm, :-1][seen], rounds.overlap[seen])
        excess = np.nansum(rounds.every_arm - np.reshape(RATES, (3, 1)), axis=2)  # [n, arms] a stopped martingale
        assert np.all(np.abs(excess.mean(axis=0)) <= z_limit(27) * excess.std(axis=0) / np.sqrt(20_000) + 1e-12)
        if law != "constant":  # arms are independent
            first = rounds.every_arm[:, :, 0]
            assert np.all(np.abs(np.corrcoef(first.T)[np.triu_indices(3, 1)]) < z_limit(27) / np.sqrt(20_000))


def test_law_of_the_overlaps():
    """Kolmogorov-Smirnov on 20,000 overlaps, false alarm 1e-4 for beta; a binomial count within 4.5 sd for 0 or 1."""
    needs = frozenset({BLOCK_OVERLAP})
    constant = one_arm(StationaryEnvironment([0.6], 4, "constant"), 0, needs).overlap
    assert np.all(constant == 0.6)
    bits = one_arm(StationaryEnvironment([0.6], 4, "bernoulli"), 0, needs).overlap
    assert set(np.unique(bits)) == {0.0, 1.0}
    assert abs(bits.mean() - 0.6) < 4.5 * np.sqrt(0.24 / bits.size)
    for concentration in (1.0, 5.0, 40.0):
        environment = StationaryEnvironment([0.3, 0.6], 4, concentration=concentration)
        overlap = one_arm(environment, 1, needs).overlap
        law = beta_law(0.6 * concentration, 0.4 * concentration)
        # atoms of weight 1/1024 are no further than that from the law they stand for
        assert kstest(overlap[:, 2], law.cdf).statistic < 1 / 1024 + 2.23 / np.sqrt(20_000)
        # Var BD = Var beta / gamma = .24 / (c + 1) / 4
        assert overlap.mean(axis=1).var() == pytest.approx(0.06 / (concentration + 1), rel=0.05)


@pytest.mark.parametrize("concentration", [0.1, 0.5, 1.0, 5.0, 50.0, 1e4])
@pytest.mark.parametrize("mean", [0.0, 0.001, 0.01, 0.2, 0.5, 0.8, 0.95, 0.97, 0.99, 0.999, 1.0])
def test_atoms_of_beta_have_its_mean_and_nearly_its_variance(mean, concentration):
    atoms = beta_atoms(mean, concentration)
    assert atoms.shape == (1024,)
    assert atoms.mean() == pytest.approx(mean, abs=1e-12)
    assert np.all((atoms >= 0) & (atoms <= 1))
    assert np.all(np.diff(atoms) >= -1e-9)
    if 0 < mean < 1:
        law = beta_law(concentration * mean, concentration * (1 - mean))
        # short of the variance by that within a cell: most for a law that is nearly one rare event
        assert law.var() * (0.99 if 0.1 < mean < 0.9 else 0.9) <= atoms.var() <= law.var() * (1 + 1e-9)
        mirrored = 1 - beta_atoms(1 - mean, concentration)[::-1]
        np.testing.assert_allclose(atoms, mirrored, atol=1e-9)
        inner = np.arange(1, 1023)
        assert np.all(atoms[inner] >= law.ppf(inner / 1024) - 1e-9)
        assert np.all(atoms[inner] <= law.ppf((inner + 1) / 1024) + 1e-9)


def test_hand_derived_expectations():
    # alpha 1/2, gamma 1: a round emits 1 or 2 tokens, so E tau(B) = 1 + E tau(B - 1) / 2 + E tau(B - 2) / 2:
    # 1, 1 + 1/2, 1 + 3/4 + 1/2, 1 + 9/8 + 3/4
    fixed = StationaryEnvironment([0.5, 0.0, 1.0], 1).fixed_arms(np.array([1, 2, 3, 4]))
    np.testing.assert_allclose(fixed.rounds[:, 0], [1, 1.5, 2.25, 2.875])
    np.testing.assert_allclose(fixed.rounds[:, 1], [1, 2, 3, 4])
    np.testing.assert_allclose(fixed.rounds[:, 2], [1, 1, 2, 2])
    np.testing.assert_allclose(fixed.tokens_per_round, [1.5, 1, 2])
    assert fixed.seconds is None
    assert fixed.query_rounds is None


def test_expected_seconds_by_hand():
    # arm 0 drafts 2 at .1, arm 1 drafts 3 at .2; a pass of 1 + .05 a token, overhead .3; catch-up never matters to a
    # fixed arm. Seconds of a round: .2 + 1.1 + .3 = 1.6 and .6 + 1.15 + .3 = 2.05; E tau(4) = 4 at rate 0, 1 at rate 1
    costs = CostModel.linear([0.1, 0.2], 3, 1.0, 0.05, catch_up=9.0, overhead=0.3)
    fixed = StationaryEnvironment([0.0, 1.0], [2, 3], costs=costs).fixed_arms(np.array([4, 5]))
    np.testing.assert_allclose(fixed.seconds, [[6.4, 2.05], [8.0, 4.1]])
    assert fixed.plain == pytest.approx(1.3)


def enumerated_rounds(alpha, gamma, budget):
    """E tau over every sequence of accept bits, each path to its end."""
    paths, expected = [(0, 0, 1.0)], 0.0
    while paths:
        tokens, rounds, weight = paths.pop()
        if tokens >= budget:
            expected += rounds * weight
            continue
        for n in range(gamma + 1):
            chance = alpha**n * (1 - alpha if n < gamma else 1)
            paths.append((tokens + n + 1, rounds + 1, weight * chance))
    return expected


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8])
def test_expected_rounds_equal_an_enumeration(budget):
    environment = StationaryEnvironment([0.0, 0.3, 0.66, 0.9, 1.0], [2, 1, 3, 2, 4])
    fixed = environment.fixed_arms(np.array([budget]))
    arms = zip(environment.alphas, environment.draft_lengths, strict=True)
    expected = [enumerated_rounds(alpha, int(gamma), budget) for alpha, gamma in arms]
    np.testing.assert_allclose(fixed.rounds[0], expected)


def test_the_best_fixed_arm_at_a_small_budget_need_not_emit_most_per_round():
    # E tau(3) by hand. alpha .9, gamma 2: E tau(2) = 1 + .1 = 1.1; 1 + .1 * 1.1 + .09 * 1 = 1.2
    # alpha .66, gamma 10: E tau(2) = 1 + .34 = 1.34; 1 + .34 * 1.34 + .66 * .34 * 1 = 1.68
    environment = StationaryEnvironment([0.9, 0.66], [2, 10])
    fixed = environment.fixed_arms(np.array([3, 1000]))
    np.testing.assert_allclose(fixed.rounds[0], [1.2, 1.68])
    np.testing.assert_allclose(fixed.tokens_per_round, [2.71, 1 + 0.66 * (1 - 0.66**10) / 0.34])
    assert fixed.tokens_per_round.argmax() == 1  # 2.71 < 2.91
    assert fixed.rounds.argmin(axis=1).tolist() == [0, 1]


@pytest.mark.parametrize("budget", [100, 10_000])
def test_expected_rounds_of_long_streams_stay_within_wald(budget):
    environment = StationaryEnvironment([0.1, 0.5, 0.9, 1.0], [5, 1, 7, 3])
    fixed = environment.fixed_arms(np.array([budget]))
    tokens = fixed.rounds[0] * fixed.tokens_per_round  # E S = g E tau, and B <= S <= B + gamma
    assert np.all(tokens >= budget * (1 - 1e-12))
    assert np.all(tokens <= (budget + environment.draft_lengths) * (1 + 1e-12))


def test_catch_up_is_paid_for_missed_tokens_only():
    # Perfect drafters of 2 tokens emit 3 a round. Arms 0, 0, 1, 1, 0, 2: arm 1 missed 6, then arm 0 6, arm 2 all 15
    costs = CostModel.linear([0.0, 0.0, 0.0], 2, catch_up=[0.1, 0.01, 0.001])
    environment = StationaryEnvironment([1.0, 1.0, 1.0], 2, costs=costs)
    environment.reset(1, np.random.default_rng(0), NOTHING)
    row = np.array([0])
    seconds = [environment.step(row, np.array([arm])).seconds[0] for arm in (0, 0, 1, 1, 0, 2)]
    np.testing.assert_allclose(seconds, [1, 1, 1.06, 1, 1.6, 1.015])


def test_arms_have_different_names():
    assert StationaryEnvironment([0.5, 0.25]).arms == ("0.5", "0.25")
    assert StationaryEnvironment([0.5, 0.25, 0.5]).arms == ("0.5#1", "0.25", "0.5#2")
    assert StationaryEnvironment([0.5, 0.5], names=["a", "b"]).arms == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"alphas": [0.5, 1.5]}, ["alpha", "1.5"]),
        ({"alphas": [np.nan]}, ["alpha", "nan"]),
        ({"alphas": []}, ["alphas", "[0]"]),
        ({"alphas": [[0.5]]}, ["alphas", "[1, 1]"]),
        ({"draft_length": 0}, ["draft_length", "0"]),
        ({"draft_length": 2.5}, ["draft_length", "2.5"]),
        ({"draft_length": np.nan}, ["draft_length", "nan"]),
        ({"draft_length": np.inf}, ["draft_length", "inf"]),
        ({"draft_length": [1, 2, 3]}, ["draft_length", "[1, 2, 3]"]),
        ({"overlaps": "gamma"}, ["overlaps", "beta, bernoulli, constant", "'gamma'"]),
        ({"concentration": 0}, ["concentration", "0"]),
        ({"concentration": np.nan}, ["concentration", "nan"]),
        ({"names": ["a"]}, ["names", "2", "a"]),
        ({"names": ["a", "a"]}, ["names", "different"]),
        ({"costs": CostModel.linear([0.1, 0.1], 4)}, ["costs", "[2, 6]", "[2, 5]"]),
    ],
)
def test_bad_instances_are_refused(arguments, words):
    with refuses(*words):
        StationaryEnvironment(**{"alphas": [0.5, 0.6], **arguments})


# --- beyond the i.i.d. model


GENERAL = {
    "decay": {"decay": 0.7},
    "silent": {"silent": [0.3, 0.0, 1.0]},
    "no draft": {"draft_length": [5, 2, 0]},
    "one draw a block": {"block_correlation": 0.6},
    "common draws": {"arm_correlation": 0.7},
    "all": {"decay": 0.8, "silent": 0.2, "block_correlation": 0.6, "arm_correlation": 0.7, "draft_length": [5, 0, 3]},
}


@pytest.mark.parametrize("needs", NEEDS, ids=["no overlaps", "verified", "block", "every arm"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("options", GENERAL.values(), ids=GENERAL)
def test_accepted_tokens_follow_the_stated_law(options, law, needs):
    """Chi-square on 20,000 rounds by inversion or by overlaps; false alarm 1e-3 over the 216 tests (Bonferroni)."""
    environment = StationaryEnvironment(RATES, **{"draft_length": LENGTHS, "overlaps": law, **options})
    silent = np.broadcast_to(options.get("silent", 0.0), 3)
    for arm, length in enumerate(environment.draft_lengths):
        rounds = one_arm(environment, arm, needs, seed=arm)
        drafts = rounds.drafted == length
        assert np.all(drafts | (rounds.drafted == 0))
        if length:
            assert (
                abs(drafts.mean() - (1 - silent[arm])) < 4.5 * np.sqrt(silent[arm] * (1 - silent[arm]) / 20_000) + 1e-12
            )
        assert not rounds.accepted[rounds.drafted == 0].any()
        expected = 20_000 * environment.law.pmf()[0, arm]
        possible = expected > 1e-9
        counts = np.bincount(rounds.accepted, minlength=environment.max_draft + 1)
        assert not counts[~possible].any()
        if np.count_nonzero(possible) > 1:
            assert chisquare(counts[possible], expected[possible]).pvalue > 1e-3 / 216
        if rounds.overlap is not None:  # of nothing that was not drafted
            assert np.isnan(rounds.overlap[np.arange(environment.max_draft) >= rounds.drafted[:, None]]).all()


def test_survival_by_hand():
    # decay: .8, .8 .4 .. ; silent: a quarter proposes nothing; both
    def of(*arguments, **options):
        return StationaryEnvironment(*arguments, **options).law.survival[0, 0]

    np.testing.assert_allclose(of([0.8], 3, decay=0.5), [0.8, 0.8 * 0.4, 0.8 * 0.4 * 0.2])
    np.testing.assert_allclose(of([0.8], 2, silent=0.25), [0.6, 0.48])
    np.testing.assert_allclose(of([0.8], 2, decay=0.5, silent=0.25), [0.6, 0.24])
    np.testing.assert_allclose(of([0.8], 3, decay=0.0), [0.8, 0, 0])
    # one draw a block: bits are all or nothing, constants know no chance; a uniform overlap has E beta^k = 1/(k + 1)
    np.testing.assert_allclose(of([0.8], 3, "bernoulli", block_correlation=1.0), [0.8, 0.8, 0.8])
    np.testing.assert_allclose(of([0.8], 2, "bernoulli", block_correlation=0.5), [0.8, 0.72])
    np.testing.assert_allclose(of([0.8], 2, "bernoulli", decay=0.5, block_correlation=1.0), [0.8, 0.4])
    np.testing.assert_allclose(of([0.8], 3, "constant", block_correlation=1.0), [0.8, 0.64, 0.512])
    np.testing.assert_allclose(of([0.5], 3, concentration=2.0, block_correlation=1.0), [1 / 2, 1 / 3, 1 / 4], rtol=1e-5)
    # Beta(4, 1): E beta^k = 4/5, 4/5 5/6, 4/5 5/6 6/7
    np.testing.assert_allclose(of([0.8], 3, block_correlation=1.0), [4 / 5, 4 / 6, 4 / 7], rtol=1e-4)
    np.testing.assert_allclose(of([0.8], 2, block_correlation=0.25), [0.8, 0.75 * 0.64 + 0.25 * 4 / 6], rtol=1e-4)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8])
def test_general_expectations_equal_an_enumeration(budget):
    costs = CostModel.linear([0.1, 0.2, 9.0], 3, 1.0, 0.05, catch_up=9.0, overhead=0.3)
    environment = StationaryEnvironment(
        [0.9, 0.5, 0.8], [3, 2, 0], decay=0.8, silent=[0.2, 0, 0.5], block_correlation=0.3, costs=costs
    )
    fixed = environment.fixed_arms(np.array([budget]))

    def rounds_of(law, tokens):
        return 0.0 if tokens <= 0 else 1 + sum(p * rounds_of(law, tokens - n - 1) for n, p in enumerate(law))

    expected = [rounds_of(law, budget) for law in environment.law.pmf()[0]]
    np.testing.assert_allclose(fixed.rounds[0], expected)
    # .2 of the first arm's rounds draft nothing: 1.3 s instead of 1.75; the last never drafts, whatever it would cost
    np.testing.assert_allclose(fixed.seconds[0], np.multiply(expected, [0.8 * 1.75 + 0.2 * 1.3, 1.8, 1.3]))


def test_silent_rounds_cost_a_draft_of_nothing():
    costs = CostModel.linear([1.0], 3)
    environment = StationaryEnvironment([1.0], 3, silent=0.5, costs=costs)
    for needs in NEEDS:
        rounds = one_arm(environment, 0, needs, rows=200)
        np.testing.assert_array_equal(rounds.seconds, np.where(rounds.drafted > 0, 4.0, 1.0))
        assert {0, 3} == set(rounds.drafted.tolist())
        np.testing.assert_array_equal(rounds.accepted, rounds.drafted)


def test_never_silent_and_always():
    plain = StationaryEnvironment(RATES, LENGTHS)
    never = StationaryEnvironment(RATES, LENGTHS, silent=0.0, decay=1.0, block_correlation=0.0, arm_correlation=0.0)
    assert by_row(play(plain, plain.gives)) == by_row(play(never, plain.gives))
    budgets = np.array([1, 20])
    always = StationaryEnvironment(RATES, LENGTHS, silent=1.0)
    np.testing.assert_allclose(always.fixed_arms(budgets).rounds, [[1] * 3, [20] * 3])
    no_draft = StationaryEnvironment([0.9, 0.9], [3, 0])
    np.testing.assert_allclose(no_draft.fixed_arms(budgets).rounds[:, 1], [1, 20])
    rounds = one_arm(no_draft, 1, frozenset({EVERY_ARM}), rows=50)
    assert not rounds.drafted.any()
    np.testing.assert_array_equal(rounds.every_arm[:, 1, 0], 0.0)  # nothing to score


def test_correlated_overlaps_keep_each_arms_mean():
    """Means and correlations of first overlaps, 20,000 rounds; false alarm 1e-3 over 16 (Bonferroni).

    Common uniforms with probability kappa: corr = kappa for equal laws, within arms rho likewise.
    """
    needs, limit = frozenset({EVERY_ARM, BLOCK_OVERLAP}), z_limit(16) / np.sqrt(20_000)
    for kappa, rho in ((0.0, 0.6), (0.7, 0.0), (0.7, 0.6), (1.0, 1.0)):
        environment = StationaryEnvironment([0.6, 0.6], 4, block_correlation=rho, arm_correlation=kappa)
        environment.reset(20_000, np.random.default_rng(0), needs)
        # scores past the emitted tokens are hidden; the first of each arm and the played block are not
        rounds = environment.step(np.arange(20_000), np.zeros(20_000, dtype=int))
        first, second = rounds.every_arm[:, 0, 0], rounds.every_arm[:, 1, 0]
        assert abs(np.corrcoef(first, second)[0, 1] - kappa) < limit
        assert abs(np.corrcoef(rounds.overlap[:, 0], rounds.overlap[:, 3])[0, 1] - rho) < limit
        for overlap in (first, second):
            assert abs(overlap.mean() - 0.6) < limit * overlap.std()
        if kappa == 1:
            np.testing.assert_array_equal(first, second)


def test_bounds_are_of_the_stationary_model_alone():
    policy = MetaSDUCB(BlockEfficiency())
    for options, holds in (
        ({}, True),
        ({"overlaps": "bernoulli"}, True),
        ({"arm_correlation": 0.5}, True),  # a policy sees one arm a round
        ({"draft_length": [4, 4]}, True),
        ({"draft_length": [4, 3]}, False),
        ({"draft_length": [4, 0]}, False),
        ({"decay": 0.9}, False),
        ({"silent": [0.0, 0.1]}, False),
        ({"block_correlation": 0.1}, False),
    ):
        environment = StationaryEnvironment([0.9, 0.6], **options)
        assert environment.is_stationary_model == holds
        assert (upper_bound(policy, environment, [100]) is not None) == holds
        assert (lower_bound(environment, [100]) is not None) == holds


def test_truth_of_the_stationary_model_by_hand():
    # g = 1.5, 2 and 1; c = 1.5, 3 and 1
    costs = CostModel.linear([0.5, 2.0, 1.0], 1)
    environment = StationaryEnvironment([0.5, 1.0, 1.0], [1, 1, 0], costs=costs)
    environment.reset(2, np.random.default_rng(0), NOTHING)
    truth = environment.observe(np.arange(2)).truth
    for scope in ("stream", "segment", "query", "round"):
        np.testing.assert_allclose(truth(scope, "rounds"), [[1.5, 2, 1]] * 2)
        np.testing.assert_allclose(truth(scope, "time"), [[1, 2 / 3, 1]] * 2)
    half = StationaryEnvironment([1.0], 1, silent=0.5, costs=CostModel.linear([2.0], 1))
    half.reset(1, np.random.default_rng(0), NOTHING)
    assert half.observe(np.array([0])).truth("stream", "time") == pytest.approx(1.5 / 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"decay": 1.5}, ["decay", "1.5"]),
        ({"silent": -0.1}, ["silent", "-0.1"]),
        ({"silent": [0.1, 0.2, 0.3]}, ["silent", "[3]"]),
        ({"block_correlation": np.nan}, ["block_correlation", "nan"]),
        ({"arm_correlation": 2}, ["arm_correlation", "2"]),
        ({"draft_length": [0, 0]}, ["draft_length", "[0, 0]"]),
        ({"draft_length": [2, -1]}, ["draft_length", "-1"]),
    ],
)
def test_bad_laws_are_refused(arguments, words):
    with refuses(*words):
        StationaryEnvironment(**{"alphas": [0.5, 0.6], **arguments})


def test_expected_rounds_of_long_budgets_in_any_order():
    # alpha 1/2, one draft token: 1 or 2 tokens a round, E(B) = 1 + E(B - 1) / 2 + E(B - 2) / 2 with E(1) = 1 and
    # E(2) = 3/2, so E(B) = 2 B / 3 + (2 / 9) (1 - (-1/2)^B); at ten million within 1e-9 of that, relatively
    budgets = np.array([2, 10_000_000, 1, 7, 7])
    tracemalloc.start()
    rounds = stationary_rounds(np.array([0.5, 0.5]), budgets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_allclose(rounds, 2 * budgets / 3 + 2 / 9 * (1 - (-0.5) ** budgets), rtol=1e-9)
    assert peak < 1e5  # bytes
