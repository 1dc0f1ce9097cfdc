"""Exponential weights and full information against hand-derived probabilities and slow references."""

import math
from functools import partial

import numpy as np
import pytest
from scipy.optimize import brentq

from metasd_sim.environments import StationaryEnvironment
from metasd_sim.policies import Exp3, Exp3IX, Exp3Spec, Hedge, NormalHedge, make_policy, policy_specs
from metasd_sim.policies.base import draw_arms
from metasd_sim.policies.full_information import length_loss, normal_hedge_weights, overlap_loss
from metasd_sim.rewards import AcceptanceTrials, BlockEfficiency, TokensPerSecond, VerifiedDivergence
from tests.sim_cases import Feedback, arm_names, make_context, make_rounds, refuses, z_limit
from tests.test_sim_policies import drive

ROW = np.array([0])


class Chosen:
    """Uniforms given beforehand: 0 draws the first arm, nearly 1 the last."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self, shape):
        return np.full(shape, self.values.pop(0))


def probabilities(policy, plays, max_draft=2, n_arms=2, keep=None, eligible=None):
    """P(arm 0) after each of the `(arm, accepted)` in turn, the first or the last arm each."""
    draws = [0.0 if arm == 0 else 1 - 1e-9 for arm, _ in plays]
    policy.start(1, arm_names(n_arms), max_draft, Chosen(*draws))
    out = []
    for arm, accepted in plays:
        assert policy.select(ROW, make_context(1, n_arms)).tolist() == [arm]
        policy.update(ROW, make_rounds([arm], [accepted], max_draft))
        if keep is not None:
            policy.restart(ROW, keep)
        out.append(policy.probabilities(ROW, make_context(1, n_arms, eligible))[0, 0])
    return out


# --- weights of the arm played


def test_exp3_with_a_constant_gamma():
    """K = 2, gamma 1/2. Arm 0, r = 1, p = 1/2: S_0 = 2, p_0 = .5 / (1 + exp(-.5)) + .25 = .561230. Arm 1, r = 1/2:
    S_1 = .5 / .438770 = 1.139548, and gamma (S_0 - S_1) / K = .215113: p_0 = .5 / (1 + exp(-.215113)) + .25 = .526786.
    """
    got = probabilities(Exp3(BlockEfficiency(), 0.5), [(0, 2), (1, 1)])
    assert got == pytest.approx([0.5612297, 0.5267859], abs=1e-6)


def test_exp3_without_gamma_uses_the_round_for_the_horizon():
    """gamma_t = min(1, sqrt(2 ln 2 / ((e - 1) t))): .898215 at t = 1, .635134 at t = 2, .518585 at t = 3.

    Arm 0, r = 1, p = 1/2: S_0 = 2, p_0 = (1 - .635134) / (1 + exp(-.635134)) + .635134 / 2 = .556063. Arm 1, r = 0:
    p_0 = (1 - .518585) / (1 + exp(-.518585)) + .518585 / 2 = .561052.
    """
    got = probabilities(Exp3(BlockEfficiency()), [(0, 2), (1, 0)])
    assert got == pytest.approx([0.5560626, 0.5610515], abs=1e-6)
    policy = Exp3(BlockEfficiency())
    policy.start(1, arm_names(9), 2, np.random.default_rng(0))  # sqrt(9 ln 9 / 1.718) > 1: uniform
    assert policy.probabilities(ROW, make_context(1, 9)) == pytest.approx(np.full((1, 9), 1 / 9))


def test_exp3_spec():
    """L = 2. Arm 0, N = 0, Y = 1: loss (2 + 1 - 1) / (2 / 2) = 2; eta_2 = sqrt(ln 2 / 4) = .416277:
    p_0 = 1 / (1 + exp(2 eta_2)) = .303105. Arm 1, N = 1, Y = 2: loss 1 / (2 * .696895) = .717468;
    eta_3 = sqrt(ln 2 / 6) = .339889: p_0 = 1 / (1 + exp((2 - .717468) eta_3)) = .392714.
    Half forgotten after the first: loss 1, t = 1.5, eta = sqrt(ln 2 / 3) = .480678: 1 / (1 + exp(eta)) = .382093
    """
    plays = [(0, 0), (1, 1)]
    assert probabilities(Exp3Spec(), plays) == pytest.approx([0.3031052, 0.3927140], abs=1e-6)
    assert probabilities(Exp3Spec(), plays[:1], keep=0.5) == pytest.approx([0.3820926], abs=1e-6)


def test_exp3_ix():
    """Arm 0, r = 0, p = 1/2, gamma_1 = sqrt(ln 2 / 2) / 2 = .294353: loss 1 / .794353 = 1.258887; eta_2 = .416277:
    p_0 = 1 / (1 + exp(.524046)) = .371907. Arm 1, r = 1/2, p = .628093, gamma_2 = .208139: loss .5 / .836232 = .597920;
    eta_3 = .339889: p_0 = 1 / (1 + exp(.339889 * .660967)) = .444071.
    """
    got = probabilities(Exp3IX(BlockEfficiency()), [(0, 0), (1, 1)])
    assert got == pytest.approx([0.3719066, 0.4440712], abs=1e-6)


def test_feedback_that_comes_late_is_weighed_by_its_own_arms_probability():
    policy = Exp3Spec()
    policy.start(1, arm_names(2), 2, Chosen(0.0, 1 - 1e-9))
    policy.select(ROW, make_context(1, 2))
    policy.update(ROW, make_rounds([0], [0], 2))  # p_0 is .303105 from here on
    policy.select(ROW, make_context(1, 2))
    policy.update(ROW, make_rounds([0], [0], 2))  # of the first round, when p_0 was 1/2: loss 2 again
    assert policy.score[0].tolist() == [4.0, 0.0]


@pytest.mark.parametrize(
    "make", [partial(Exp3, BlockEfficiency(), 0.3), Exp3Spec, partial(Exp3IX, BlockEfficiency()), Hedge, NormalHedge]
)
def test_ineligible_arms_have_probability_zero(make):
    policy = make()
    policy.start(1, arm_names(3), 2, np.random.default_rng(0))
    policy.score[0] = [1e6, 1.0, 0.5]  # far out: the first would swamp any direct exponential
    whole = policy.probabilities(ROW, make_context(1, 3))
    part = policy.probabilities(ROW, make_context(1, 3, np.array([[False, True, True]])))
    assert np.all(np.isfinite(whole))
    assert whole.sum() == pytest.approx(1)
    assert part[0, 0] == 0
    assert part.sum() == pytest.approx(1)
    assert np.all(part[0, 1:] > 0)


def test_normal_hedge_is_uniform_over_the_eligible_where_none_of_them_has_a_positive_regret():
    policy = NormalHedge()
    policy.start(1, arm_names(3), 2, np.random.default_rng(0))
    policy.score[0] = [3.0, -1.0, 0.0]
    got = policy.probabilities(ROW, make_context(1, 3, np.array([[False, True, True]])))
    assert got.tolist() == [[0, 0.5, 0.5]]


def test_rewards_out_of_the_unit_interval_are_refused():
    for policy in (Exp3, Exp3IX):
        with refuses("reward", "exp3", "tokens-per-second", "use be"):
            policy(TokensPerSecond())
    with refuses("exp3-ix", "tokens-per-second"):
        make_policy("exp3-ix", reward="tokens-per-second")
    with refuses("'reward=be'"):
        make_policy("exp3-spec:reward=be")
    for gamma in (0.0, 1.1, np.nan, -1.0):
        with refuses("gamma", str(gamma)):
            Exp3(BlockEfficiency(), gamma)


def test_all_leaves_out_what_refuses_the_default_reward():
    gives = frozenset({"seconds", "overlap", "block_overlap"})
    timed = policy_specs("all", ("a", "b"), gives, reward="tokens-per-second")
    assert {"metasd-ucb", "sw-ucb", "sequential-halving", "exp3-spec"} <= set(timed)
    assert not {"exp3", "exp3-ix", "change-ucb"} & set(timed)
    assert {"exp3", "exp3-ix", "change-ucb"} <= set(policy_specs("all", ("a", "b"), gives, reward="bd"))
    with refuses("reward", "'speed'"):
        policy_specs("all", ("a", "b"), gives, reward="speed")


def test_draws_follow_the_weights():
    uniform = np.array([0.0, 0.24, 0.26, 0.99])
    assert draw_arms(np.tile([0.0, 1.0, 0.0, 3.0], (4, 1)), uniform).tolist() == [1, 1, 3, 3]
    tiny = np.tile([1e-300, 0.0], (1, 1))
    assert draw_arms(tiny, np.array([np.nextafter(1, 0)])).tolist() == [0]


# --- losses of full information


def hedge_spec_length(beta):
    """`sum_{k=1..gamma+1} k (1 - beta_k) prod_{j<k} beta_j` with beta_{gamma+1} = 0, in plain Python."""
    padded = [*beta, 0.0]
    return sum(k * (1 - padded[k - 1]) * math.prod(padded[: k - 1]) for k in range(1, len(padded) + 1))


def test_length_loss_is_hedge_specs_on_a_full_block():
    scores = np.random.default_rng(0).random((50, 3, 6))
    want = [[1 - hedge_spec_length(arm[:5]) / 6 for arm in row] for row in scores]
    np.testing.assert_allclose(length_loss(scores), want, atol=1e-14)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_length_loss_takes_a_short_block_as_a_shorter_draft(v):
    """gamma = 3; d = min(v, 3)."""
    scores = np.random.default_rng(v).random((50, 2, 4))
    scores[:, :, v:] = np.nan
    d = min(v, 3)
    want = [[1 - hedge_spec_length(arm[:d]) / (d + 1) for arm in row] for row in scores]
    got = length_loss(scores)
    np.testing.assert_allclose(got, want, atol=1e-14)
    assert np.all((got >= 0) & (got <= d / (d + 1)))


def test_losses_at_their_ends():
    one, none = np.ones((1, 1, 4)), np.zeros((1, 1, 4))
    assert overlap_loss(one).item() == length_loss(one).item() == 0
    assert overlap_loss(none).item() == 1
    assert length_loss(none).item() == 0.75
    short = np.array([[[0.5, 0.5, np.nan, np.nan]]])  # (.5 + .5) / 4;  1 - (1 + 1/2 + 1/4) / 3
    assert overlap_loss(short).item() == 0.25
    assert length_loss(short).item() == pytest.approx(5 / 12)


def test_expected_overlap_loss_is_exact_where_a_mean_is_biased():
    """E[loss_i | arm played] = (1 - alpha_i) E v / (gamma + 1), by Wald; 9 statistics, false alarm 1e-3 in all."""
    alphas, gamma, rows = np.array([0.9, 0.6, 0.3]), 3, 40_000
    environment = StationaryEnvironment(alphas, gamma)
    worst = 0.0
    for arm in range(3):
        environment.reset(rows, np.random.default_rng(arm), frozenset({"every_arm"}))
        environment.observe(np.arange(rows))
        played = environment.step(np.arange(rows), np.full(rows, arm))
        gap = overlap_loss(played.every_arm) - (1 - alphas) * (played.emitted[:, None] / (gamma + 1))
        z = gap.mean(axis=0) / (gap.std(axis=0) / np.sqrt(rows))
        assert np.all(np.abs(z) < z_limit(9))
        biased = 1 - np.nanmean(played.every_arm, axis=2) - (1 - alphas)
        worst = max(worst, np.abs(biased.mean(axis=0) / (biased.std(axis=0) / np.sqrt(rows))).max())
    assert worst > 20  # what a mean over the scored positions would give


def test_hedge_by_the_length_of_blocks():
    """Scores (1, .5) and (.5, .5) of two emitted tokens, gamma 2: losses 1 - (1 + 1 + .5) / 3 and 1 - 1.75 / 3;
    eta = sqrt(8 ln 2 / 2) = 1.665109: P(arm 0) = 1 / (1 + exp(-.25 eta)) = .602592
    """
    policy = Hedge(loss="length")
    policy.start(1, arm_names(2), 2, np.random.default_rng(0))
    scores = np.array([[[1.0, 0.5, 0.3], [0.5, 0.5, 0.3]]])
    policy.update(ROW, make_rounds([0], [1], 2, every_arm=scores, n_arms=2))
    assert policy.probabilities(ROW, make_context(1, 2))[0, 0] == pytest.approx(0.6025921, abs=1e-6)
    assert str(policy) == "hedge:loss=length"
    for make in (Hedge, NormalHedge):
        with refuses("loss", "overlap, length", "'speed'"):
            make(loss="speed")


# --- NormalHedge


def slow_normal_hedge(regret):
    """Probabilities of one row by scipy's bracketing solver, in plain Python."""
    positive = [max(r, 0.0) for r in regret]
    largest = max(positive)
    if largest == 0:
        return [1 / len(regret)] * len(regret)

    def excess(c):
        return sum(math.exp(r * r / (2 * c)) for r in positive) / len(regret) - math.e

    low, high = largest**2 / (2 * (1 + math.log(len(regret)))), largest**2 / 2
    c = low if excess(low) <= 0 else high if excess(high) >= 0 else brentq(excess, low, high, xtol=1e-15 * high)
    weight = [r / c * math.exp(r * r / (2 * c)) for r in positive]
    return [w / sum(weight) for w in weight]


def test_normal_hedge_weights_against_a_bracketing_solver():
    rng = np.random.default_rng(1)
    for arms in (1, 2, 3, 8, 40):
        regret = rng.normal(size=(60, arms)) * rng.choice([1e-3, 1.0, 300.0], size=(60, 1))
        regret[0] = 2.5  # all equal
        regret[1] = -1.0
        regret[1, 0] = 1e-9  # one alone
        weight = normal_hedge_weights(regret)
        for row in range(60):
            if regret[row].max() <= 0:
                assert np.all(weight[row] == 0)
            else:
                want = slow_normal_hedge(regret[row].tolist())
                np.testing.assert_allclose(weight[row] / weight[row].sum(), want, rtol=1e-9, atol=1e-15)
        np.testing.assert_array_equal(normal_hedge_weights(regret * 2.0**300), weight)  # ratios alone count


def test_normal_hedge_in_closed_form():
    # one positive regret of K = 2: (exp(u) + 1) / 2 = e, weights 1 and 0; two equal ones of K = 2: exp(u) = e, u = 1
    assert normal_hedge_weights(np.array([[3.0, -1.0]])) == pytest.approx(
        np.array([[2 * math.e - 1, 0]])  # x exp(x^2 u) with x = 1
    )
    assert normal_hedge_weights(np.array([[3.0, 3.0]])) == pytest.approx(np.array([[math.e, math.e]]))


def test_normal_hedge_counts_regret_against_the_expected_loss():
    """gamma = 1, one token emitted: losses .1 and .4, expected .25, R = (.15, -.15): arm 0 alone. Then losses .5 and 0
    at p = (1, 0): R = (.15, .35), and P(arm 0) from the equation exp(9/49 u) + exp(u) = 2 e.
    """
    policy = NormalHedge()
    policy.start(1, arm_names(2), 1, Chosen(0.5, 0.5))
    for scores in ([0.8, 0.2], [0.0, 1.0]):
        policy.select(ROW, make_context(1, 2))
        every_arm = np.array([[[s, 0.5] for s in scores]])
        policy.update(ROW, make_rounds([0], [0], 1, every_arm=every_arm, n_arms=2))
    assert policy.score[0] == pytest.approx([0.15, 0.35])
    u = brentq(lambda u: math.exp(9 / 49 * u) + math.exp(u) - 2 * math.e, 1, 1 + math.log(2))
    first, second = 3 / 7 * math.exp(9 / 49 * u), math.exp(u)
    assert policy.probabilities(ROW, make_context(1, 2))[0, 0] == pytest.approx(first / (first + second))


# --- slow references


def softmax(scores):
    top = max(scores)
    weight = [math.exp(s - top) for s in scores]
    return [w / sum(weight) for w in weight]


def slow_run(kind, feedback, row, luck, eligible, restarts):
    """The arms of one row: loops over rounds and arms, with the same luck as the vectorised run."""
    k, gamma = feedback.n_arms, feedback.max_draft
    score, seen, played = [0.0] * k, 0.0, []
    for step, uniform in enumerate(luck):
        if step in restarts:
            score, seen = [restarts[step] * s for s in score], restarts[step] * seen
        allowed = [a for a in range(k) if eligible[row, step, a]]
        t = seen + 1
        eta = math.sqrt(math.log(k) / (t * k))
        if kind == "exp3":
            mix = min(1.0, math.sqrt(k * math.log(k) / ((math.e - 1) * t)))
            some = [(1 - mix) * w + mix / len(allowed) for w in softmax([mix * score[a] / k for a in allowed])]
        elif kind.startswith("exp3"):
            some = softmax([-eta * score[a] for a in allowed])
        elif kind.startswith("hedge"):
            some = softmax([-math.sqrt(8 * math.log(k) / t) * score[a] for a in allowed])
        else:
            some = [slow_normal_hedge(score)[a] for a in allowed]
            some = [s / sum(some) for s in some] if sum(some) > 0 else [1 / len(allowed)] * len(allowed)
        p = [0.0] * k
        for a, value in zip(allowed, some, strict=True):
            p[a] = value
        arm, reached = 0, p[0]
        while reached <= uniform:
            arm += 1
            reached += p[arm]
        accepted = int(feedback.accepted[row, step, arm])
        overlap = [float(b) for b in feedback.overlap[row, step, arm]]
        trials = min(accepted + 1, gamma)
        if kind == "exp3":
            score[arm] += accepted / trials / p[arm]
        elif kind == "exp3-spec":
            score[arm] += (gamma + 1 - (accepted + 1)) / (gamma * p[arm])
        elif kind == "exp3-ix":
            score[arm] += (1 - sum(overlap[:trials]) / trials) / (p[arm] + eta / 2)
        else:
            scores = [[float(b) for b in feedback.every_arm[row, step, a, : accepted + 1]] for a in range(k)]
            if kind.endswith("length"):
                losses = [1 - hedge_spec_length(s[:gamma]) / (len(s[:gamma]) + 1) for s in scores]
            else:
                losses = [sum(1 - b for b in s) / (gamma + 1) for s in scores]
            expected = sum(x * y for x, y in zip(p, losses, strict=True))
            score = [s + (x if kind.startswith("hedge") else expected - x) for s, x in zip(score, losses, strict=True)]
        seen += 1
        played.append(arm)
    return played


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("exp3", partial(Exp3, AcceptanceTrials())),
        ("exp3-spec", Exp3Spec),
        ("exp3-ix", partial(Exp3IX, VerifiedDivergence())),
        ("hedge:overlap", Hedge),
        ("hedge:length", partial(Hedge, loss="length")),
        ("normal-hedge:overlap", NormalHedge),
        ("normal-hedge:length", partial(NormalHedge, "length")),
    ],
)
def test_vectorised_policy_equals_a_slow_scalar_one(kind, make):
    rows, steps, n_arms = 5, 200, 3
    feedback = Feedback(21, rows, steps, (0.8, 0.7, 0.3), 4)
    eligible = np.ones((rows, steps, n_arms), dtype=bool)
    eligible[3:] = np.random.default_rng(22).random((2, steps, n_arms)) < 0.7
    eligible[~eligible.any(axis=2), 0] = True
    restarts = {90: 0.0, 130: 0.5, 160: 1.0}
    played = drive(
        make(),
        feedback,
        rows,
        steps,
        np.random.default_rng(23),
        eligible=eligible,
        restart=lambda step: (np.arange(rows), restarts[step]) if step in restarts else None,
    )
    luck = np.random.default_rng(23).random((steps, rows))  # one uniform per row and step
    for row in range(rows):
        assert played[row].tolist() == slow_run(kind, feedback, row, luck[:, row], eligible, restarts)
    assert len({tuple(row) for row in played}) == rows
