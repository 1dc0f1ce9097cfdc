"""The categorical environment: its laws by hand, and simulated rounds against them."""

import numpy as np
import pytest
from scipy.stats import chi2

from metasd_sim.costs import CostModel
from metasd_sim.environments import CategoricalEnvironment
from metasd_sim.environments.base import BLOCK_OVERLAP, EVERY_ARM, OVERLAP, SECONDS, TRUTH
from metasd_sim.policies import make_policy
from metasd_sim.simulate import simulate
from tests.sim_cases import refuses, z_limit

# two contexts over three tokens
P = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]
A = [[0.5, 0.25, 0.25], [0.4, 0.3, 0.3]]  # overlaps .5 + .25 + .2 = .95, .1 + .1 + .3 = .5
B = [[0.1, 0.1, 0.8], [0.0, 0.1, 0.9]]  # overlaps .1 + .1 + .2 = .4, .1 + .8 = .9
# the mixture: (.3, .175, .525), (.2, .2, .6): overlaps .3 + .175 + .2 = .675, .1 + .1 + .6 = .8
ARMS = ["A@2", "A@3?max-confidence=0.45", "B", "ensemble(A,B)@2", "none", "ensemble(A,B)@2?max-confidence=0.55"]
BETA = [[0.95, 0.95, 0.4, 0.675, 0.0, 0.675], [0.5, 0.5, 0.9, 0.8, 0.0, 0.8]]
GO = [
    [1, 1, 1, 1, 0, 0],
    [1, 0, 1, 1, 0, 1],
]  # A is sure enough (.5) in the first context only, the mixture (.6) in the second
LENGTHS = [2, 3, 4, 2, 0, 2]
COSTS = CostModel.linear([0.1, 0.3], 4, 1.0, 0.05, [0.02, 0.04], 0.1)


def small(costs=COSTS):
    return CategoricalEnvironment(P, {"A": A, "B": B}, ARMS, draft_length=4, costs=costs)


def test_laws_by_hand():
    environment = small()
    np.testing.assert_allclose(environment.beta, BETA)
    np.testing.assert_array_equal(environment.go, np.array(GO, dtype=bool))
    assert environment.draft_lengths.tolist() == LENGTHS
    assert environment.max_draft == 4
    # mean over contexts: .725, .95 / 2 = .475, .65, .7375, 0, .8 / 2 = .4
    np.testing.assert_allclose(environment.rates, [0.725, 0.475, 0.65, 0.7375, 0.0, 0.4])
    g = [1 + 0.725 + 0.725**2, 1 + 0.475 + 0.475**2 + 0.475**3, 1 + sum(0.65**k for k in (1, 2, 3, 4))]
    g += [1 + 0.7375 + 0.7375**2, 1.0, 1 + 0.4 + 0.4**2]
    np.testing.assert_allclose(environment.tokens_per_round(), g)
    # a token costs .1, .3 or .4 to draft and .05 to verify; stopped drafts have 1/2 + 1/4 + 1/8 and 1/2 + 1/4 tokens
    tokens = np.array([2, 0.875, 4, 2, 0, 0.75])
    seconds = 1.1 + tokens * (np.array([0.1, 0.1, 0.3, 0.4, 0.0, 0.4]) + 0.05)
    np.testing.assert_allclose(environment.seconds_per_round(), seconds)
    environment.reset(2, np.random.default_rng(0), frozenset())
    truth = environment.observe(np.arange(2)).truth
    for scope in ("stream", "segment", "query", "round"):
        np.testing.assert_allclose(truth(scope, "rounds"), [g, g])
        np.testing.assert_allclose(truth(scope, "time"), [np.array(g) / seconds] * 2)
    with refuses("truth", "day"):
        truth("day", "rounds")
    assert environment.gives == {OVERLAP, BLOCK_OVERLAP, EVERY_ARM, TRUTH, SECONDS}
    assert small(None).gives == {OVERLAP, BLOCK_OVERLAP, EVERY_ARM, TRUTH}
    with refuses("truth", "costs"):
        other = small(None)
        other.reset(1, np.random.default_rng(0), frozenset())
        other.observe(np.arange(1)).truth("query", "time")


ROWS = 20_000
NEEDS = [frozenset(), frozenset({OVERLAP}), frozenset({BLOCK_OVERLAP, EVERY_ARM})]


@pytest.mark.parametrize("needs", NEEDS)
def test_rounds_have_the_stated_joint_law(needs):
    """Chi-square of (N, drafted) of every arm; family-wise false alarm 1e-3 over arms and needs."""
    environment = small()
    for arm in range(len(ARMS)):
        environment.reset(ROWS, np.random.default_rng(arm), needs)
        rounds = environment.step(np.arange(ROWS), np.full(ROWS, arm))
        joint = joint_law(arm)
        counts = np.zeros_like(joint)
        np.add.at(counts, (rounds.accepted, rounds.drafted), 1)
        assert counts[joint == 0].sum() == 0
        expected, seen = ROWS * joint[joint > 0], counts[joint > 0]
        assert expected.min() > 5
        p_value = chi2.sf(((seen - expected) ** 2 / expected).sum(), max(len(seen) - 1, 1))
        assert p_value > 1e-3 / (len(ARMS) * len(NEEDS))
        if EVERY_ARM not in needs:  # whose scoring takes time too
            expected = environment.costs.seconds(np.array(arm), rounds.drafted)
            np.testing.assert_allclose(rounds.seconds, expected)


def joint_law(arm):
    """P(N = n, drafted = d), [5, 5], by enumeration of the contexts of all positions and of the accept bits."""
    joint = np.zeros((5, 5))

    def walk(depth, accepted, going, probability):
        if depth == LENGTHS[arm]:
            joint[accepted, depth] += probability
            return
        for context in range(2):
            if not GO[context][arm]:
                joint[accepted, depth] += probability / 2
                continue
            beta = BETA[context][arm] if going else 0.0
            walk(depth + 1, accepted + 1, going, probability / 2 * beta)
            walk(depth + 1, accepted, False, probability / 2 * (1 - beta))

    walk(0, 0, True, 1.0)
    assert joint.sum() == pytest.approx(1)
    return joint


def test_arms_share_the_context_of_a_position():
    environment = small()
    environment.reset(2_000, np.random.default_rng(0), frozenset({EVERY_ARM, BLOCK_OVERLAP}))
    rounds = environment.step(np.arange(2_000), np.full(2_000, 2))
    scores = np.array(GO) * np.array(BETA)  # [contexts, arms]
    first = (rounds.every_arm[:, 2, :] == 0.9).astype(int)  # B tells the context
    known = ~np.isnan(rounds.every_arm[:, 2])
    np.testing.assert_array_equal(rounds.every_arm.transpose(0, 2, 1)[known], scores[first[known]])
    drafted = np.arange(4) <= rounds.accepted[:, None]
    np.testing.assert_array_equal(rounds.overlap[drafted], rounds.every_arm[:, 2, :4][drafted])
    assert not np.isnan(rounds.overlap).any()  # of all four drafted positions


def test_stopped_drafts_show_no_overlap_past_the_stop():
    environment = small()
    for needs in (OVERLAP, BLOCK_OVERLAP):
        environment.reset(2_000, np.random.default_rng(0), frozenset({needs}))
        rounds = environment.step(np.arange(2_000), np.full(2_000, 1))
        shown = np.arange(4) < rounds.drafted[:, None]
        if needs == OVERLAP:
            shown &= np.arange(4) <= rounds.accepted[:, None]
        np.testing.assert_array_equal(~np.isnan(rounds.overlap), shown)
        assert set(rounds.overlap[shown]) == {0.95}  # the rule draws in the first context only


def test_expectations_of_fixed_arms():
    """E tau and E seconds at two budgets, |z| of 24 tests at a family-wise false alarm of 1e-3."""
    environment = small()
    budgets = np.array([7, 40])
    fixed = environment.fixed_arms(budgets)
    for arm, name in enumerate(ARMS):
        outcome = simulate(make_policy(f"fixed:{name}", arms=ARMS), environment, budgets, runs=2_000, seed=arm)
        for measured, exact in ((outcome.rounds, fixed.rounds), (outcome.seconds, fixed.seconds)):
            error = measured.std(axis=0, ddof=1) / np.sqrt(2_000)
            assert np.all(np.abs(measured.mean(axis=0) - exact[:, arm]) <= z_limit(24) * error + 1e-9)
    np.testing.assert_array_equal(fixed.rounds[:, 4], budgets)  # no draft
    assert fixed.plain == COSTS.plain
    np.testing.assert_array_equal(fixed.tokens_per_round, environment.tokens_per_round())


def test_random_instances():
    """A perfect drafter, noise that hurts, ensembles between their members as a rule, and one seed one instance."""
    make = CategoricalEnvironment.random
    environment = make({"same": 0.0, "near": 0.5, "far": 3.0}, ["same", "near", "far", "ensemble(near,far)"])
    rates = environment.rates
    assert rates[0] == pytest.approx(1)
    assert rates[0] > rates[1] > rates[2] + 0.2
    assert rates[3] >= (rates[1] + rates[2]) / 2  # overlap is concave in q
    assert environment.beta.shape == (2048, 4)
    np.testing.assert_array_equal(make({"a": 1.0}).beta, make({"a": 1.0}).beta)
    assert (make({"a": 1.0}, seed=1).beta != make({"a": 1.0}).beta).any()
    # a rule that stops where the drafter is unsure drafts where more is accepted
    unsure = make({"a": 1.0}, ["a?entropy=0.9"])
    stopped = unsure.rates[0] / unsure.go_rates[0]
    assert stopped > make({"a": 1.0}).rates[0] + 0.02
    # no rule, and one that never stops, are one arm; one that always stops is no draft
    twins = make({"a": 1.0}, ["a", "a?entropy=9", "a?max-confidence=1", "none"])
    np.testing.assert_array_equal(twins.beta[:, 0], twins.beta[:, 1])
    assert twins.rates[0] == twins.rates[1]
    assert twins.rates[2] == twins.rates[3] == 0


def test_switching_among_rules_of_one_drafter_misses_nothing():
    costs = CostModel.linear([0.0], 5, 1.0, 0.0, catch_up=0.5)
    environment = CategoricalEnvironment.random({"A": 1.0}, ["A@1", "A?entropy=1", "A@5"], costs=costs)
    outcome = simulate(make_policy("random"), environment, 200, runs=5)
    np.testing.assert_array_equal(outcome.seconds, outcome.rounds)  # one second a round, no catch-up


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p": [0.5, 0.5]}, ("p", "[contexts, vocabulary]")),
        ({"p": [[0.5, 0.4]]}, ("p", "sum to 1")),
        ({"laws": {"A": [[0.5, 0.5]]}}, ("A", "[2, 3]", "[1, 2]")),
        ({"laws": {"A": [[1.5, -0.5, 0.0], [1, 0, 0]]}}, ("A", "sum to 1")),
        ({"arms": ["A", "C"]}, ("arm", "'C'")),
        ({"arms": ["A", "A"]}, ("different arms",)),
        ({"draft_length": 0}, ("draft_length", "0")),
        ({"costs": CostModel.linear([0.1], 4)}, ("costs", "[1, 6]")),
        ({"costs": CostModel.linear([0.1, 0.2], 3)}, ("costs", "[1, 6]")),
    ],
)
def test_refusals(change, words):
    settings = {"p": P, "laws": {"A": A}} | change
    with refuses(*words):
        CategoricalEnvironment(**settings)


def test_random_refusals():
    for settings, word in (({"contexts": 0}, "contexts"), ({"sharpness": (2.0, 1.0)}, "sharpness")):
        with refuses(word):
            CategoricalEnvironment.random({"A": 1.0}, **settings)
    with refuses("noise"):
        CategoricalEnvironment.random({"A": -1.0})
