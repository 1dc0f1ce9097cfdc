"""Index policies: hand-derived indices, slow scalar references, limits in which rules agree, and refusals.

Statistical tests have fixed seeds; a comment beside each states how often it would fail on fresh ones.
"""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import entr, gammaincinv
from scipy.stats import beta as beta_law
from scipy.stats import chisquare, kstest
from scipy.stats import gamma as gamma_law

from metasd_sim.environments import StationaryEnvironment
from metasd_sim.environments.base import OVERLAP, SECONDS, SIGNALS
from metasd_sim.policies import (
    MOSS,
    UCBV,
    KLUCBOverlap,
    KLUCBTrials,
    MetaSDUCB,
    TapOut,
    ThompsonOverlap,
    ThompsonTrials,
    UCB1Tuned,
    UCBSpec,
    argmax_random,
    make_policy,
    policy_specs,
)
from metasd_sim.policies.kl_ucb import KLUCB, kl_upper
from metasd_sim.policies.thompson import gamma_draws
from metasd_sim.rewards import REWARDS, BlendedAcceptance, TokensPerRound, VerifiedFractions, make_reward
from metasd_sim.simulate import simulate
from metasd_sim.summary import summarize
from tests.sim_cases import Feedback, arm_names, make_context, make_rounds, refuses
from tests.test_sim_policies import LEVELS, MEANS, PLAYS, drive, feedback_for, slow_kl_upper, trained

ROW = np.array([0])
# PLAYS, gamma 4: arm 0 accepted 4 and 2, arm 1 accepted 1, 3 and 0, arm 2 accepted 4. t = 7, ln 7 = 1.945910
LN7 = math.log(7)


def indices(policy, horizon=None):
    """Of one row after PLAYS; [arms]."""
    policy = trained(policy, PLAYS)
    if horizon is not None:
        policy.stream = policy.horizon[0] = horizon
    return policy.index(ROW)[0]


# --- UCB1-Tuned


def test_index_of_ucb1_tuned_where_the_variance_is_capped():
    # BE: sqrt(2 ln 7 / n) is above 1/4 for n = 2, 3, 1, so the bonus is sqrt(ln 7 / 4 n) = .493192, .402690, .697479
    expected = [0.75 + 0.493192, 1 / 3 + 0.402690, 1 + 0.697479]
    assert indices(UCB1Tuned(make_reward("be"))) == pytest.approx(expected, abs=1e-6)
    # trials 7, 7, 4 with successes 6, 4, 4: sqrt(ln 7 / 28) = .263623, sqrt(ln 7 / 16) = .348740
    expected = [6 / 7 + 0.263623, 4 / 7 + 0.263623, 1 + 0.348740]
    assert indices(UCB1Tuned(make_reward("trials"))) == pytest.approx(expected, abs=1e-6)
    # BD means .675, .466667, .8 and cap 1 / (4 gamma) = 1/16: half of the bonuses of BE
    expected = [0.675 + 0.246596, 0.466667 + 0.201345, 0.8 + 0.348740]
    assert indices(UCB1Tuned(make_reward("bd"))) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("reward", "accepted", "index"),
    [
        # 400 pulls of arm 0 and one of each other: t = 403, ln t = 5.998937, sqrt(2 ln t / 400) = .173190
        ("be", (2, 2), 0.5 + 0.050965),  # V = 0: sqrt(.173190 ln t / 400)
        ("be", (3, 1), 0.5 + 0.059454),  # V = 1/16: sqrt(.235690 ln t / 400)
        ("be", (4, 0), 0.5 + 0.061232),  # V = 1/4, capped: sqrt(ln t / 1600)
        # bits: 400 rounds of 3 trials, 1200 in all, 2/3 of them successes; V = 2/9, sqrt(2 ln t / 1200) = .099991
        ("trials", (2, 2), 2 / 3 + 0.035352),  # capped at 1/4: .222222 + .099991 is more
        # overlaps .8, .8, .3: V = (.64 + .64 + .09) / 3 - (1.9 / 3)^2 = .055556; sqrt(.155547 ln t / 1200)
        ("bd-verified", (2, 2), 1.9 / 3 + 0.027886),
    ],
)
def test_index_of_ucb1_tuned_with_its_variance(reward, accepted, index):
    policy = trained(UCB1Tuned(make_reward(reward)), [(0, n, 1.0) for n in accepted * 200] + [(1, 1, 1), (2, 1, 1)])
    assert policy.index(ROW)[0, 0] == pytest.approx(index, abs=1e-6)


# --- UCB-V


def test_index_of_ucb_v():
    # BE: V = .0625, .097222, 0; zeta ln 7 / n = 1.167546, .778364, 2.335092
    # sqrt(2 V zeta ln t / n) = .382025, .389036, 0 and 3 zeta ln t / n = 3.502638, 2.335092, 7.005276
    expected = [0.75 + 0.382025 + 3.502638, 1 / 3 + 0.389036 + 2.335092, 8.005276]
    assert indices(UCBV(make_reward("be"))) == pytest.approx(expected, abs=1e-5)
    # zeta .5, c .1: sqrt(V ln 7 / n) = .246596 and .15 ln 7 / n = .145943 for arm 0
    assert indices(UCBV(make_reward("be"), 0.5, 0.1))[0] == pytest.approx(0.75 + 0.246596 + 0.145943, abs=1e-6)
    # overlaps of 7 verified positions: 6 of .8 and one of .3; mean 5.1 / 7, V = 3.93 / 7 - (5.1 / 7)^2 = .030612
    # zeta ln 7 / 7 = .333585: sqrt(2 V .333585) = .142911 and 1.000754
    expected = 5.1 / 7 + 0.142911 + 1.000754
    assert indices(UCBV(make_reward("bd-verified")))[0] == pytest.approx(expected, abs=1e-5)
    # bits, 6 of 7: V = 6/49, sqrt(2 V .333585) = .285828
    assert indices(UCBV(make_reward("trials")))[0] == pytest.approx(6 / 7 + 0.285828 + 1.000754, abs=1e-5)


@pytest.mark.parametrize("make", [UCB1Tuned, UCBV])
@pytest.mark.parametrize("reward", [name for name in REWARDS if name != "tokens-per-second"])
def test_the_variance_is_that_of_the_samples(make, reward):
    """Against numpy's variance of the samples themselves, and unchanged by a discount."""
    policy = make(make_reward(reward))
    policy.start(1, arm_names(1), 4, np.random.default_rng(0))
    rng, samples = np.random.default_rng(1), []
    for _ in range(50):
        accepted, overlap = int(rng.integers(0, 5)), rng.random(4)
        policy.update(ROW, make_rounds([0], [accepted], 4, overlap=[overlap], n_arms=1))
        m = min(accepted + 1, 4)
        samples += {
            "be": [accepted / 4],
            "bd": [overlap.mean()],
            "bd-verified": list(overlap[:m]),
            "trials": [1.0] * accepted + [0.0] * (m - accepted),
        }[reward]
    for keep in (1.0, 0.25):
        policy.restart(ROW, keep)
        mean, n = policy.estimates(ROW)
        assert n[0, 0] == pytest.approx(keep * len(samples))
        assert policy.variance(ROW, mean, n)[0, 0] == pytest.approx(np.var(samples))


# --- MOSS


def test_index_of_moss():
    # horizon 100, 3 arms: ln(100 / 6) / 2 = 1.406705, ln(100 / 9) / 3 = .802649, ln(100 / 3) = 3.506558
    expected = [0.75 + 1.186046, 1 / 3 + 0.895907, 1 + 1.872581]
    assert indices(MOSS(make_reward("be")), 100) == pytest.approx(expected, abs=1e-6)
    # no bonus after a fair share of the rounds: ln(6 / 6) = 0, ln(6 / 9) < 0, ln(6 / 3) = .693147
    assert indices(MOSS(make_reward("be")), 6) == pytest.approx([0.75, 1 / 3, 1 + 0.832555], abs=1e-6)
    # trials count as samples: ln(100 / 21) / 7 = .222950, ln(100 / 12) / 4 = .530066
    expected = [6 / 7 + 0.472176, 4 / 7 + 0.472176, 1 + 0.728056]
    assert indices(MOSS(make_reward("trials")), 100) == pytest.approx(expected, abs=1e-6)
    # block divergence: 2 sigma = 1 / sqrt gamma = 1/2
    assert indices(MOSS(make_reward("bd")), 100)[0] == pytest.approx(0.675 + 0.593023, abs=1e-6)
    # tokens per second: 4, 7/3, 5/4 over the largest, pulls as samples and 2 sigma = 1/2
    expected = [1 + 0.593023, 7 / 12 + 0.447953, 5 / 16 + 0.936291]
    assert indices(MOSS(make_reward("tokens-per-second")), 100) == pytest.approx(expected, abs=1e-6)


def test_index_of_anytime_moss():
    # t = 7, factor 2.35 / 2: sqrt(1.175 ln(7 / 6) / 2) = .300938, ln(7 / 9) < 0, sqrt(1.175 ln(7 / 3)) = .997785
    expected = [0.75 + 0.300938, 1 / 3, 1 + 0.997785]
    assert indices(MOSS(make_reward("be"))) == pytest.approx(expected, abs=1e-6)
    # alpha 1: sqrt(ln(7 / 6) / 2) = .277624; 18 trials so far, T = 19: ln(19 / 21) < 0, sqrt(ln(19 / 12) / 4) = .338944
    assert indices(MOSS(make_reward("be"), alpha=1.0))[0] == pytest.approx(0.75 + 0.277624, abs=1e-6)
    assert indices(MOSS(make_reward("trials"), alpha=1.0)) == pytest.approx([6 / 7, 4 / 7, 1.338944], abs=1e-6)


def test_horizon_of_moss():
    policy = MOSS(make_reward("trials"))
    policy.start(3, arm_names(2), 4, np.random.default_rng(0), 50)
    assert policy.horizon.tolist() == [50, 50, 50]
    policy.update(np.arange(3), make_rounds([0, 0, 0], [1, 4, 0], 4))  # 2, 4 and 1 trials
    policy.restart(np.array([0, 1]), 0.5, np.array([20, 80]))  # 1 and 2 trials are kept; the stream has 50 tokens
    assert policy.horizon.tolist() == [21, 50, 50]
    policy.restart(ROW)  # a query of unknown length
    assert policy.horizon.tolist() == [50, 50, 50]
    policy = MOSS(make_reward("be"))
    policy.start(2, arm_names(2), 4, np.random.default_rng(0))
    policy.restart(ROW, 0.0, np.array([30]))  # only the query's limit is known
    assert policy.horizon.tolist() == [30, np.inf]
    policy = MOSS(make_reward("be"), alpha=1.0)  # asked to do without
    policy.start(1, arm_names(2), 4, np.random.default_rng(0), 50)
    policy.restart(ROW, 0.0, np.array([30]))
    assert policy.horizon.tolist() == [np.inf]


def test_samples_of_moss_never_exceed_the_horizon():
    """Before the last round, the tokens so far are below the budget, and each sample cost at least one."""
    for reward in ("be", "trials", "bd-verified"):
        policy = MOSS(make_reward(reward))
        environment = StationaryEnvironment([0.9, 0.0], [6, 1])
        simulate(policy, environment, 300, runs=50, seed=0)
        assert np.all(policy.weight.sum(axis=1) < 300 + 6)
        assert policy.weight.sum(axis=1).max() > 50


# --- UCBSpec


def test_index_of_ucb_spec():
    # mean Y 4, 7/3, 5; ln(3 * 7^2) = 4.990433, gamma / 2 = 2
    # n = 2: 2 sqrt(3/4 (1 + 2 (4.990433 + ln(3) / 2))) = 6.019836; n = 3: 2 sqrt(4/9 (1 + 2 (4.990433 + ln(4) / 2)))
    # = 4.688931; n = 1: 2 sqrt(2 (1 + 2 (4.990433 + ln(2) / 2))) = 9.663960
    expected = [4 + 6.019836, 7 / 3 + 4.688931, 5 + 9.663960]
    assert indices(UCBSpec()) == pytest.approx(expected, abs=1e-5)
    # delta .1 adds 2 ln 10 = 4.605170 within the root: 2 sqrt(.75 (12.079478 + 4.605170)) = 7.074882
    assert indices(UCBSpec(0.1))[0] == pytest.approx(4 + 7.074882, abs=1e-5)


def test_ucb_spec_in_time_divides_by_the_seconds_of_a_round():
    # seconds a round 2 / 2 = 1, 3 / 3 = 1, 4: 10.02, 7.02, 14.66 / 4 = 3.67: arm 0 instead of arm 2
    for objective, arm in (("rounds", 2), ("time", 0)):
        policy = trained(UCBSpec(objective=objective), PLAYS)
        assert policy.select(ROW, make_context(1, 3)).tolist() == [arm]
    assert UCBSpec(objective="time").needs == {SECONDS}
    assert UCBSpec().needs == frozenset()


# --- TapOut


def test_blend_of_length_and_rate():
    # gamma 4; full and partly accepted, short and all accepted, empty, the text ended after 2
    rounds = make_rounds([0] * 5, [4, 1, 2, 0, 2], 4, drafted=[4, 4, 2, 0, 3], emitted=[5, 2, 3, 1, 2])
    value, weight = BlendedAcceptance()(rounds)
    assert value.tolist() == pytest.approx([1, 0.25, 0.25 + 0.5, 0, 0.25 + 1 / 3])
    assert weight.tolist() == [1] * 5
    assert BlendedAcceptance(1.0)(rounds)[0].tolist() == pytest.approx([1, 0.25, 0.5, 0, 0.5])
    assert BlendedAcceptance(0.0)(rounds)[0].tolist() == pytest.approx([1, 0.25, 1, 0, 2 / 3])
    assert BlendedAcceptance(0.25)(rounds)[0].tolist() == pytest.approx([1, 0.25, 0.875, 0, 0.625])


def test_index_of_tapout():
    # full drafts: the rate is N / gamma too. UCB1's bonus sqrt(2 ln 7 / n) with n = 2, 3, 1
    expected = [0.75 + 1.394959, 1 / 3 + 1.138979, 1 + 1.972770]
    assert indices(TapOut()) == pytest.approx(expected, abs=1e-6)
    # a short draft, 2 of 2: .75, and t = 2: sqrt(2 ln 2) = 1.177410
    policy = trained(TapOut(), [])
    policy.update(ROW, make_rounds([0], [2], 4, drafted=[2], emitted=[3]))
    assert policy.index(ROW)[0, 0] == pytest.approx(0.75 + 1.177410, abs=1e-6)


def test_tapout_prefers_the_rate_or_the_length():
    """Arm 0 drafts 8 and has 4 accepted, arm 1 drafts 2 and has both: alike at blend 2/3, where 1/2 = blend / 4 + ...

    blend 4/8 + (1 - blend) 4/8 = 1/2 against blend 2/8 + (1 - blend) = 1 - 3/4 blend, equal at blend 2/3.
    """
    for blend, arm in ((0.6, 1), (0.7, 0)):
        policy = TapOut(blend)
        policy.start(1, arm_names(2), 8, np.random.default_rng(0))
        for played, accepted, drafted in ((0, 4, 8), (1, 2, 2)):
            policy.update(ROW, make_rounds([played], [accepted], 8, drafted=[drafted], emitted=[accepted + 1]))
        assert policy.select(ROW, make_context(1, 2)).tolist() == [arm]


# --- overlaps as fractions


def test_index_of_kl_ucb_on_overlaps():
    # verified overlaps: arm 0 six of .8 and one of .3, arm 1 four of .8 and three of .3, arm 2 four of .8
    levels = [LN7 / 7, LN7 / 7, LN7 / 4]
    expected = [slow_kl_upper(mean, level) for mean, level in zip([5.1 / 7, 4.1 / 7, 0.8], levels, strict=True)]
    assert indices(KLUCBOverlap()) == pytest.approx(expected, abs=1e-9)
    # in closed form: overlaps of mean 1/2 in 4 positions, t = 3: (1 + sqrt(1 - exp(-2 ln 3 / 4))) / 2 = .825056
    policy = trained(KLUCBOverlap(), [], n_arms=2)
    policy.update(ROW, make_rounds([0], [4], 4, overlap=[[0.2, 0.8, 0.4, 0.6]]))
    policy.update(ROW, make_rounds([1], [4], 4, overlap=[[0.1, 0.2, 0.3, 0.1]]))
    assert policy.index(ROW)[0, 0] == pytest.approx(0.5 + 0.5 * math.sqrt(1 - 3**-0.5), abs=1e-9)


def test_thompson_on_overlaps_draws_from_fractional_counts():
    """Sum .9 + .6 + .5 of 3 positions, then 1.2 of 4: Beta(1 + 3.2, 1 + 3.8); 5,000 rows, false alarm 1e-4 a case."""
    rows = np.arange(5000)
    for prior, keep, law in (((1, 1), 1.0, (4.2, 4.8)), ((0.5, 2), 1.0, (3.7, 5.8)), ((1, 1), 0.25, (1.8, 1.95))):
        policy = ThompsonOverlap(*prior)
        policy.start(len(rows), arm_names(2), 4, np.random.default_rng(1))
        for accepted, overlap in ((2, [0.9, 0.6, 0.5, np.nan]), (4, [0.3, 0.3, 0.3, 0.3])):
            shown = make_rounds([0] * 5000, [accepted] * 5000, 4, overlap=[overlap] * 5000)
            policy.update(rows, shown)
        policy.restart(rows, keep)
        draws = policy.index(rows)
        assert kstest(draws[:, 0], beta_law(*law).cdf).pvalue > 1e-4
        assert kstest(draws[:, 1], beta_law(*prior).cdf).pvalue > 1e-4


@pytest.mark.parametrize("make", [KLUCBOverlap, ThompsonOverlap])
def test_overlaps_out_of_range_are_refused(make):
    policy = make()
    policy.start(1, arm_names(2), 2, np.random.default_rng(0))
    for overlap in ([1.2, 0.3], [-0.2, 0.3], [np.inf, 0.3]):
        with refuses("overlap", "[0, 1]", str(policy), "clip"):
            policy.update(ROW, make_rounds([0], [1], 2, overlap=[overlap]))
    assert policy.weight.sum() == 0
    policy.update(ROW, make_rounds([0], [1], 2, overlap=[[1 + 1e-7, 1 + 1e-7]]))  # a record's rounding
    assert np.isfinite(policy.index(ROW)[0, 0])
    policy.select(ROW, make_context(1, 2))
    rounds = make_rounds([0], [1], 2)
    rounds.overlap = None
    with refuses("overlap"):
        policy.update(ROW, rounds)
    assert policy.needs == {OVERLAP}


# --- slow references


def slow_tokens(kind, index, gamma):
    """Tokens per round that an index stands for, full drafts."""
    if kind == "tokens":
        return index
    if kind == "be":
        return 1 + gamma * min(max(index, 0.0), 1.0)
    rate = min(max(index, 0.0), 1.0)
    return sum(rate**k for k in range(gamma + 1))


def slow_samples(kind, n, gamma, overlap):
    m = min(n + 1, gamma)
    return {
        "be": [n / gamma],
        "blend": [n / gamma],  # full drafts
        "tokens": [n + 1.0],
        "bd": [sum(overlap) / gamma],
        "bd-verified": overlap[:m],
        "trials": [1.0] * n + [0.0] * (m - n),
    }[kind]


def slow_ucb1_tuned(mean, n, var, t, pulls, total, cap=0.25):
    return mean + math.sqrt(math.log(t) / n * min(cap, var + math.sqrt(2 * math.log(t) / n)))


def slow_ucb_v(mean, n, var, t, pulls, total, zeta=1.2, c=1.0):
    return mean + math.sqrt(2 * var * zeta * math.log(t) / n) + 3 * c * zeta * math.log(t) / n


def slow_moss(mean, n, var, t, pulls, total, horizon=1000.0, width=1.0, alpha=None):
    if alpha is not None:
        return mean + width * math.sqrt((1 + alpha) / 2 * max(0.0, math.log((total + 1) / (3 * n))) / n)
    return mean + width * math.sqrt(max(0.0, math.log(horizon / (3 * n))) / n)


def slow_ucb_spec(mean, n, var, t, pulls, total, delta=1.0):
    return mean + 2 * math.sqrt((1 + n) / n**2 * (1 + 2 * math.log(3 * t**2 * math.sqrt(1 + n) / delta)))


def slow_ucb1(mean, n, var, t, pulls, total):
    return mean + math.sqrt(2 * math.log(t) / n)


def slow_kl_ucb(mean, n, var, t, pulls, total):
    return slow_kl_upper(mean, math.log(t) / n)


def slow_run(rule, kind, time, feedback, row, ties, eligible, restarts):
    """The arms of one row: every sample is kept in a list with its share, and every statistic taken from the lists."""
    samples, rounds = [[] for _ in range(feedback.n_arms)], [[] for _ in range(feedback.n_arms)]
    played = []
    for step in range(len(ties)):
        if step in restarts:
            for kept in (*samples, *rounds):
                kept[:] = [(x, share * restarts[step]) for x, share in kept if restarts[step] > 0]
        t = sum(share for kept in rounds for _, share in kept) + 1
        total = sum(share for kept in samples for _, share in kept)
        index = []
        for arm in range(feedback.n_arms):
            if not rounds[arm]:
                index.append(math.inf)
                continue
            n = sum(share for _, share in samples[arm])
            mean = sum(x * share for x, share in samples[arm]) / n
            var = sum((x - mean) ** 2 * share for x, share in samples[arm]) / n
            pulls = sum(share for _, share in rounds[arm])
            value = rule(mean, n, var, t, pulls, total)
            if time:
                pace = sum(x * share for x, share in rounds[arm]) / pulls
                value = slow_tokens(kind, value, feedback.max_draft) / pace
            index.append(value)
        allowed = [arm for arm in range(feedback.n_arms) if eligible[row, step, arm]]
        tied = [arm for arm in allowed if index[arm] == max(index[a] for a in allowed)]
        arm = tied[int(ties[step] * len(tied))]
        n = int(feedback.accepted[row, step, arm])
        overlap = [float(x) for x in feedback.overlap[row, step, arm]]
        samples[arm] += [(x, 1.0) for x in slow_samples(kind, n, feedback.max_draft, overlap)]
        rounds[arm].append((float(feedback.seconds[row, step, arm]), 1.0))
        played.append(arm)
    return played


REFERENCES = {
    **{
        f"ucb1-tuned:{name}": (
            partial(slow_ucb1_tuned, cap=1 / 16 if name == "bd" else 0.25),
            name,
            False,
            partial(UCB1Tuned, make_reward(name)),
        )
        for name in ("be", "bd", "bd-verified", "trials")
    },
    "ucb-v:be": (slow_ucb_v, "be", False, partial(UCBV, make_reward("be"))),
    "ucb-v:bd-verified,zeta=0.3,c=0.1": (
        partial(slow_ucb_v, zeta=0.3, c=0.1),
        "bd-verified",
        False,
        partial(UCBV, make_reward("bd-verified"), 0.3, 0.1),
    ),
    "ucb-v:trials,time": (
        partial(slow_ucb_v, zeta=0.1, c=0.1),
        "trials",
        True,
        partial(UCBV, make_reward("trials"), 0.1, 0.1, "time"),
    ),
    "moss:be": (slow_moss, "be", False, partial(MOSS, make_reward("be"))),
    "moss:bd": (partial(slow_moss, width=0.5), "bd", False, partial(MOSS, make_reward("bd"))),
    "moss:trials,alpha=1.35": (
        partial(slow_moss, alpha=1.35),
        "trials",
        False,
        partial(MOSS, make_reward("trials"), 1.35),
    ),
    "ucb-spec": (slow_ucb_spec, "tokens", False, UCBSpec),
    "ucb-spec:delta=0.01": (partial(slow_ucb_spec, delta=0.01), "tokens", False, partial(UCBSpec, 0.01)),
    "ucb-spec:time": (slow_ucb_spec, "tokens", True, partial(UCBSpec, objective="time")),
    "tapout": (slow_ucb1, "blend", False, partial(TapOut, 0.7)),
    "kl-ucb-overlap": (slow_kl_ucb, "bd-verified", False, KLUCBOverlap),
    "kl-ucb-overlap:time": (slow_kl_ucb, "bd-verified", True, partial(KLUCBOverlap, objective="time")),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_vectorised_policy_equals_a_slow_scalar_one(name):
    rule, kind, time, make = REFERENCES[name]
    rows, steps = 4, 150
    feedback = feedback_for(11, rows, steps)
    eligible = np.ones((rows, steps, 3), dtype=bool)
    if name != "kl-ucb-overlap":  # without, its short cut is what is tested
        eligible[2:] = np.random.default_rng(12).random((2, steps, 3)) < 0.7
        eligible[~eligible.any(axis=2), 0] = True
    restarts = {60: 0.0, 100: 0.5, 120: 1.0}
    played = drive(
        make(),
        feedback,
        rows,
        steps,
        np.random.default_rng(13),
        eligible=None if name == "kl-ucb-overlap" else eligible,
        restart=lambda step: (np.arange(rows), restarts[step]) if step in restarts else None,
    )
    ties = np.random.default_rng(13).random((steps, rows))  # the policy draws one uniform per row and step
    for row in range(rows):
        assert played[row].tolist() == slow_run(rule, kind, time, feedback, row, ties[:, row], eligible, restarts)
    assert len({tuple(row) for row in played}) == rows


# --- limits in which two rules agree


def same_arms(one, other, feedback, **options):
    rows, steps = feedback.accepted.shape[:2]
    first, second = (
        drive(policy, feedback, rows, steps, np.random.default_rng(3), **options) for policy in (one, other)
    )
    np.testing.assert_array_equal(first, second)


def test_rules_agree_where_they_should():
    feedback = feedback_for(5, rows=20, steps=120)
    # full drafts: any blend is N / gamma, and UCB1 on it is MetaSD-UCB with beta 1
    same_arms(TapOut(0.3), MetaSDUCB(make_reward("be"), 1.0), feedback)
    # rounds of equal length: tokens per second rank arms as tokens per round do
    feedback.seconds[:] = 0.75
    same_arms(UCBSpec(), UCBSpec(objective="time"), feedback)
    # overlaps of 0 and 1 are the bits themselves
    feedback.overlap = (np.arange(4) < feedback.accepted[..., None]).astype(float)
    same_arms(KLUCBOverlap(), KLUCBTrials(), feedback)
    same_arms(KLUCBOverlap(2.0), KLUCBTrials(2.0), feedback)
    same_arms(ThompsonOverlap(2.0, 0.5), ThompsonTrials(2.0, 0.5), feedback)
    same_arms(UCBV(make_reward("bd-verified")), UCBV(make_reward("trials")), feedback)
    same_arms(UCB1Tuned(make_reward("bd-verified")), UCB1Tuned(make_reward("trials")), feedback)
    # drafts of one token: a round is one trial
    single = Feedback(6, 20, 120, (0.8, 0.5, 0.3), 1)
    for make in (UCB1Tuned, UCBV, MOSS):
        same_arms(make(make_reward("be")), make(make_reward("trials")), single)


def test_moss_with_the_horizon_now_is_anytime_moss_with_alpha_1():
    t = len(PLAYS) + 1
    assert indices(MOSS(make_reward("be")), t) == pytest.approx(indices(MOSS(make_reward("be"), alpha=1.0)))


def test_a_draft_that_is_never_proposed_is_learnt_to_be_worthless():
    """Arm 1 drafts nothing: N = 0 and one token a round, every round."""
    for make in (
        *(partial(make, make_reward(r)) for make in (UCB1Tuned, UCBV, MOSS) for r in ("be", "trials", "bd-verified")),
        UCBSpec,
        TapOut,
        KLUCBOverlap,
        ThompsonOverlap,
    ):
        policy = make()
        policy.start(1, arm_names(2), 4, np.random.default_rng(0), 4000)
        played = []
        for _ in range(400):
            arm = int(policy.select(ROW, make_context(1, 2))[0])
            short = make_rounds([1], [0], 4, drafted=[0], overlap=np.full((1, 4), np.nan))
            policy.update(ROW, short if arm else make_rounds([0], [4], 4))
            played.append(arm)
        assert np.mean(played[200:]) < 0.25, str(policy)
        assert sum(played) > 0 or isinstance(policy, ThompsonOverlap)


# --- the short cut of KL-UCB, and its equation


@pytest.mark.parametrize("mean", MEANS)
def test_kl_upper_to_nine_digits(mean):
    got = kl_upper(np.full(len(LEVELS), mean), np.array(LEVELS))
    np.testing.assert_allclose(got, [slow_kl_upper(mean, level) for level in LEVELS], atol=1e-9, rtol=0)


@given(mean=st.floats(0, 1), log_level=st.floats(-25, 5))
def test_kl_upper_everywhere(mean, log_level):
    level = math.exp(log_level)
    assert kl_upper(np.array(mean), np.array(level)) == pytest.approx(slow_kl_upper(mean, level), abs=2e-9)


def random_state(policy, rows, arms, rng):
    """Counts as they may be: few and many, means of 0 and 1, equal arms, arms not played, discounted."""
    policy.start(rows, arm_names(arms), 5, np.random.default_rng(0))
    weight = np.ceil(10 ** rng.uniform(0, 4, (rows, arms)))
    value = np.round(weight * rng.beta(2, 1, (rows, arms)))
    value[: rows // 10] = weight[: rows // 10]
    value[rows // 10 : rows // 5, ::2] = 0
    for count in (value, weight):
        count[rows // 5 : rows // 4, -1] = count[rows // 5 : rows // 4, 0]
    unplayed = rng.random((rows, arms)) < 0.02
    value[unplayed] = weight[unplayed] = 0
    scale = np.where(rng.random(rows) < 0.2, rng.uniform(0.01, 1, rows), 1.0)[:, None]
    policy.value[:], policy.weight[:] = value * scale, weight * scale
    policy.pulls[:] = np.ceil(weight / 3) * scale
    mean = value / np.maximum(weight, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nan_to_num(mean * np.log(mean)) - np.nan_to_num((1 - mean) * np.log(1 - mean))
    policy.entropy[:] = entropy * policy.weight
    policy._guess(slice(None), rng.uniform(-0.5, 1.5, rows))  # any must do


@pytest.mark.parametrize("c", [0.0, 3.0])
@pytest.mark.parametrize("arms", [1, 2, 6])
def test_short_cut_of_kl_ucb_plays_the_largest_index(arms, c):
    rows = 4000
    policy = KLUCBTrials(c)
    random_state(policy, rows, arms, np.random.default_rng(arms))
    index = policy.index(slice(None))
    index[policy.pulls == 0] = np.inf
    uniform = np.random.default_rng(9).random(rows)
    policy.rng = np.random.default_rng(9)
    played = policy.select(np.arange(rows), make_context(rows, arms))
    chosen = np.take_along_axis(index, played[:, None], axis=1)[:, 0]
    assert np.all((chosen >= index.max(axis=1) - 1e-9) | np.isinf(chosen))
    best = np.sort(index, axis=1)
    clear = np.ones(rows, dtype=bool) if arms == 1 else best[:, -1] > best[:, -2] + 1e-8
    tied = (index == index.max(axis=1, keepdims=True)).sum(axis=1) > 1
    sure = clear | tied
    assert sure.mean() > 0.9
    np.testing.assert_array_equal(played[sure], argmax_random(index, uniform)[sure])


def no_short_cut(policy, view):
    rows = len(policy.pulls[view])
    return np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=bool)


def test_short_cut_of_kl_ucb_in_a_run_equals_solving_for_every_index(monkeypatch):
    """The same arms over a whole run, with the short cut taken in nearly all rounds."""
    environment = [0.9, 0.85, 0.8, 0.7, 0.6]
    shares = []
    alone = KLUCBTrials._alone

    def counted(self, view):
        arms, sure = alone(self, view)
        if isinstance(view, slice):
            shares.append(sure.mean())
        return arms, sure

    monkeypatch.setattr(KLUCBTrials, "_alone", counted)
    quick = simulate(KLUCBTrials(), StationaryEnvironment(environment, 5), 3000, runs=100, seed=4, history=True)
    assert np.mean(shares[50:]) > 0.9
    monkeypatch.setattr(KLUCBTrials, "_alone", no_short_cut)
    solved = simulate(KLUCBTrials(), StationaryEnvironment(environment, 5), 3000, runs=100, seed=4, history=True)
    np.testing.assert_array_equal(quick.history.rounds.arm, solved.history.rounds.arm)


@pytest.mark.parametrize("make", [KLUCBTrials, partial(KLUCBOverlap, 3.0)])
def test_short_cut_of_kl_ucb_after_discounts(monkeypatch, make):
    feedback = Feedback(2, 60, 120, (0.8, 0.7, 0.6), 4)
    restarts = {step: (np.arange(0, 60, 2), keep) for step, keep in ((20, 0.5), (40, 0.1), (60, 0.0), (80, 0.9))}
    runs = []
    for solve in (False, True):
        if solve:
            monkeypatch.setattr(KLUCB, "_alone", no_short_cut)
        policy = make()
        runs.append(drive(policy, feedback, 60, 120, np.random.default_rng(8), restart=restarts.get))
        p = policy.value / policy.weight
        entropy = policy.weight * (entr(p) + entr(1 - p))
        np.testing.assert_allclose(policy.entropy, entropy, atol=1e-9)
    np.testing.assert_array_equal(*runs)


def test_equal_arms_share_the_ties_of_kl_ucb():
    """Two arms with the same counts, 20,000 rows; false alarm 1e-4."""
    rows = np.arange(20_000)
    policy = KLUCBTrials()
    policy.start(len(rows), arm_names(3), 4, np.random.default_rng(0))
    for arm, accepted in ((0, 2), (1, 2), (2, 0)):
        policy.update(rows, make_rounds([arm] * len(rows), [accepted] * len(rows), 4))
    counts = np.bincount(policy.select(rows, make_context(len(rows), 3)), minlength=3)
    assert counts[2] == 0
    assert chisquare(counts[:2]).pvalue > 1e-4


# --- draws of Thompson sampling


@pytest.mark.parametrize("shape", [1.0, 1.3, 4.0, 50.0, 2000.0])
def test_gamma_draws_have_their_law(shape):
    """50,000 draws, false alarm 1e-4 a case; also of the rejected alone, whose draws come from the inverse."""
    rng = np.random.default_rng(int(shape))
    n = 50_000
    normal, uniform = rng.standard_normal(n), rng.random(n)
    draws = gamma_draws(np.full(n, shape), normal, uniform)
    assert kstest(draws, gamma_law(shape).cdf).pvalue > 1e-4
    d = shape - 1 / 3
    v = (1 + normal / np.sqrt(9 * d)) ** 3
    with np.errstate(invalid="ignore", divide="ignore"):
        accept = np.where(v > 0, np.exp(normal**2 / 2 + d - d * v + d * np.log(v)), 0.0)
    kept = uniform < accept
    np.testing.assert_allclose(draws[kept], d * v[kept])
    np.testing.assert_allclose(draws[~kept], gammaincinv(shape, (uniform[~kept] - accept[~kept]) / (1 - accept[~kept])))
    assert kept.mean() > 0.94
    if shape < 10:
        assert kstest(draws[~kept], gamma_law(shape).cdf).pvalue > 1e-4
        assert kstest(draws[kept], gamma_law(shape).cdf).pvalue > 1e-4


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.5), (0.01, 2.0), (3.0, 0.2)])
def test_thompson_with_a_prior_below_one(a, b):
    """5,000 rows, false alarm 1e-4 a case."""
    policy = ThompsonTrials(a, b)
    policy.start(5000, arm_names(2), 4, np.random.default_rng(1))
    draws = policy.index(np.arange(5000))
    assert np.all((draws >= 0) & (draws <= 1))
    for arm in (0, 1):
        assert kstest(draws[:, arm], beta_law(a, b).cdf).pvalue > 1e-4
    assert abs(np.corrcoef(draws.T)[0, 1]) < 4 / np.sqrt(5000)


# --- refusals and names


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: UCB1Tuned(make_reward("tokens-per-second")), ["reward", "ucb1-tuned", "tokens-per-second", "time"]),
        (lambda: UCBV(make_reward("tokens-per-second")), ["reward", "ucb-v", "tokens-per-second"]),
        (lambda: MOSS(make_reward("tokens-per-second"), objective="time"), ["objective", "rounds"]),
        (lambda: UCB1Tuned(make_reward("be"), "speed"), ["objective", "'speed'"]),
        *(
            (partial(make, value), [name, str(value)])
            for name, make, bad in (
                ("zeta", lambda v: UCBV(make_reward("be"), zeta=v), (-1.0, np.nan, np.inf)),
                ("c:", lambda v: UCBV(make_reward("be"), c=v), (-1.0, np.nan, np.inf)),
                ("alpha", lambda v: MOSS(make_reward("be"), alpha=v), (-1.0, np.nan, np.inf)),
                ("delta", UCBSpec, (0.0, -1.0, 1.1, np.nan)),
                ("blend", TapOut, (-0.1, 1.1, np.nan)),
                ("c:", KLUCBOverlap, (-1.0, np.nan, np.inf)),
                ("prior_b", lambda v: ThompsonOverlap(prior_b=v), (0.0, np.nan)),
            )
            for value in bad
        ),
        (lambda: make_policy("ucb-spec:reward=bd"), ["delta=...", "'reward=bd'"]),
        (lambda: make_policy("kl-ucb-overlap:reward=bd"), ["c=...", "'reward=bd'"]),
        (lambda: make_policy("tapout:objective=time"), ["blend=...", "'objective=time'"]),
    ],
)
def test_bad_parameters_are_refused(make, words):
    with refuses(*words):
        make()


def test_names_make_policies_with_their_parameters():
    policy = make_policy("ucb-v:reward=trials,zeta=2,c=0.5,objective=time")
    assert (policy.reward.name, policy.zeta, policy.c, policy.objective) == ("trials", 2.0, 0.5, "time")
    assert make_policy("ucb1-tuned").reward.name == "be"
    assert make_policy("moss", reward="bd").reward.name == "bd"
    assert make_policy("moss:alpha=0").alpha == 0.0
    assert make_policy("ucb-spec:delta=0.25").delta == 0.25
    assert make_policy("tapout:blend=1").blend == 1.0
    assert make_policy("thompson-overlap:prior_a=2,prior_b=0.5").prior == (2.0, 0.5)
    assert str(UCBV(make_reward("be"))) == "ucb-v:reward=be"
    assert str(MOSS(make_reward("bd"), objective="time")) == "moss:reward=bd,objective=time"
    assert str(UCBSpec()) == "ucb-spec"
    assert str(TapOut(0.25)) == "tapout:blend=0.25"


def test_all_leaves_out_what_refuses_the_default_reward():
    specs = policy_specs("all", ("a", "b"), SIGNALS, reward="tokens-per-second")
    assert {"metasd-ucb", "moss", "ucb-spec", "tapout"} <= set(specs)
    assert not {"ucb1-tuned", "ucb-v"} & set(specs)
    assert {"ucb1-tuned", "ucb-v"} <= set(policy_specs("all", ("a", "b"), frozenset(), reward="trials"))


def test_private_rewards_keep_their_promises():
    """Values within range times weight, and a sigma that covers a value at either end of its range."""
    rounds = make_rounds([0, 1, 2], [4, 0, 2], 4, drafted=[4, 0, 2], emitted=[5, 1, 3])
    for reward in (BlendedAcceptance(0.3), TokensPerRound(), VerifiedFractions("kl-ucb-overlap")):
        value, weight = reward(rounds)
        assert np.all(value >= reward.range[0] * weight)
        assert np.all(value <= reward.range[1] * weight)
        assert reward.name not in REWARDS or reward.name == "bd-verified"
    # Hoeffding: half the width of the range, here 1 .. gamma + 1
    assert TokensPerRound().sigma(6) == 3
    assert TokensPerRound()(rounds)[0].tolist() == [5, 1, 3]
    with refuses("objective", "rounds"):
        BlendedAcceptance().tokens(np.ones((1, 1)), np.ones((1, 1)), 4)


@pytest.mark.parametrize("spec", ["ucb1-tuned", "moss", "tapout", "kl-ucb-overlap"])
def test_summaries_claim_no_bound_for_them(spec):
    policy, environment = make_policy(spec), StationaryEnvironment([0.8, 0.5], 4)
    (record,) = summarize(simulate(policy, environment, 200, runs=5), policy, environment)
    assert record["policy"] == str(policy)
    assert record.get("upper_bound") is None
