"""Sampling is lossless: what is written has the target's law, whatever is drafted.

Three checks that can fail, and that are shown to reject wrong verifiers: one enumerates drafts, acceptances and
replacements over several rounds, one follows every turn of the verification rule itself, one samples texts through the
public interface. Seeds are fixed; each sampling test has at most one false alarm in a thousand seeds.
"""

from collections import Counter
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import softmax

from metasd_live import verify
from metasd_live.decode import LiveEnvironment, draft_tokens, generate
from metasd_live.drafters import Arm, Draft
from metasd_live.prompts import Prompt
from metasd_live.record import Recorder
from metasd_live.verify import GumbelText, RejectionText, Rule, Verdict
from metasd_sim import make_policy, simulate

from .chain_models import (
    ChainTarget,
    TableDrafter,
    chain_logits,
    fit_p_value,
    law_arm,
    next_law,
    no_draft,
    same_law_p_value,
    table_arm,
    text_laws,
)
from .sim_cases import z_limit

PROMPT = (1, 2)
ROWS = 200
FAMILY = 1e-3  # chance of any false alarm in one test


def some_arms(vocabulary=4, seed=0):
    """Two drafters with laws, one of them sharp and with zeros; a point mass; none. All differ from the target."""
    near = chain_logits(seed, vocabulary) + chain_logits(seed + 1, vocabulary, 0.7)
    return [
        law_arm("near", near, 3),
        law_arm("sharp", chain_logits(seed + 2, vocabulary, 3.0, 0.3), 5),
        table_arm("table", seed + 3, vocabulary, 2),
        no_draft(),
    ]


# --- every draft token, acceptance and replacement, over several rounds


def speculative_law(target, drafters, length, tokens):
    """Law of the first `tokens` tokens; text -> probability.

    target, drafters: tables of laws [last two, next]; a drafter of None drafts `table[last two]` as a point mass.
    The drafter of a round depends on the text before it.
    """

    @cache
    def moves(pair, name):
        """What becomes of one drafted position: (token, whether it is the drafted one, probability)."""
        p, q = torch.from_numpy(target[pair]), drafters[name][pair]
        point_mass = q.ndim == 0
        q_law = None if point_mass else torch.from_numpy(q)
        found = []
        for y in range(len(p)) if not point_mass else [int(q)]:
            drafted = 1.0 if point_mass else q[y]
            stands = float(verify.acceptance(p[None], None if q_law is None else q_law[None], [y])[0])
            replaced = verify.residual(p, q_law, y).tolist()
            found.append((y, True, drafted * stands))
            found += [(x, False, drafted * (1 - stands) * r) for x, r in enumerate(replaced)]
        return [move for move in found if move[2] > 0]

    states = {(PROMPT, 0, 0): 1.0}  # context, drafted tokens accepted in this round, its drafter
    for _ in range(tokens):
        following = Counter()
        for (context, accepted, name), weight in states.items():
            pair = context[-2:]
            bonus = [(x, False, p) for x, p in enumerate(target[pair])]
            for token, stood, probability in bonus if accepted == length else moves(pair, name):
                longer = (*context, token)
                state = (longer, accepted + 1, name) if stood else (longer, 0, sum(longer) % len(drafters))
                following[state] += weight * probability
        states = following
    law = Counter()
    for (context, _, _), weight in states.items():
        law[context[len(PROMPT) :]] += weight
    return law


def largest_difference(law, expected):
    return max(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in {*law, *expected})


def enumerated_difference(vocabulary, length, seed, target_scale=1.0, scale=1.0, zeros=0.0, tokens=3):
    target = chain_logits(seed, vocabulary, target_scale, zeros / 2)
    drafters = [
        softmax(chain_logits(seed + 1, vocabulary, scale, zeros), axis=-1),
        softmax(target + chain_logits(seed + 2, vocabulary, 0.2), axis=-1),
        np.random.default_rng(seed).integers(0, vocabulary, size=(vocabulary, vocabulary)),
        target.argmax(axis=2),
    ]
    law = speculative_law(softmax(target, axis=-1), drafters, length, tokens)
    return largest_difference(law, text_laws(target, 1.0, PROMPT, tokens))


@given(
    vocabulary=st.integers(4, 8),
    length=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    target_scale=st.sampled_from([0.0, 1.0, 4.0]),
    scale=st.sampled_from([0.0, 1.0, 4.0, 50.0]),  # of one drafter's logits: from flat to nearly a point mass
    zeros=st.sampled_from([0.0, 0.5]),
)
@example(vocabulary=4, length=1, seed=0, target_scale=1.0, scale=1.0, zeros=0.8)
def test_the_enumerated_law_is_the_targets(vocabulary, length, seed, target_scale, scale, zeros):
    assert enumerated_difference(vocabulary, length, seed, target_scale, scale, zeros) < 1e-10


# --- every turn of the verification rule itself


class Branches:
    """Stands in for all randomness of the code under test, and takes every turn of every choice."""

    def choose(self, law):
        options = [i for i, p in enumerate(law) if p > 0]
        if len(self.taken) == len(self.path):
            self.untried += [(*self.taken, other) for other in options[1:]]
            self.path += (options[0],)
        choice = self.path[len(self.taken)]
        self.taken.append(choice)
        self.probability *= law[choice]
        return choice

    def __lt__(self, chance):
        """As a uniform that may be below `chance`."""
        return self.choose([chance, 1.0 - chance]) == 0

    def walk(self, run):
        """Result and probability of each path through `run`."""
        self.untried = [()]
        while self.untried:
            self.path, self.taken, self.probability = self.untried.pop(), [], 1.0
            yield run(), self.probability


def verified_difference(monkeypatch, temperature=0.7, eos=(), limit=3, lengths=(3, 2, 1), vocabulary=4, seed=0):
    """Largest difference between the law of whole texts and the target's; a round's arm depends on the text."""
    logits = chain_logits(seed, vocabulary)
    target = ChainTarget(logits, eos)
    arms = [Arm(arm.name, arm.drafter, n) for arm, n in zip(some_arms(vocabulary, seed), lengths, strict=False)]
    streams = [arm.drafter.open(PROMPT) for arm in arms]
    rule = RejectionText(Rule("rejection", temperature), np.random.SeedSequence(0), limit)
    branches = Branches()
    rule.accept = [branches] * limit
    monkeypatch.setattr(verify, "sample", lambda law, uniform: branches.choose(law.tolist()))

    @cache
    def rounds_after(text):
        context, left = [*PROMPT, *text], limit - len(text)
        arm = sum(context) % len(arms)

        def play():
            length = min(arms[arm].length, left)
            draft = draft_tokens(streams[arm], context, length, rule, len(text), target.eos)
            logits = target.forward(target.prefill(context), [context[-1], *draft.tokens])
            return tuple(rule.verify(logits, draft, len(text), target.eos, left).emitted)

        law = Counter()
        for emitted, probability in branches.walk(play):
            law[emitted] += probability
        return law

    texts, finished = {(): 1.0}, Counter()
    while texts:
        longer = Counter()
        for text, weight in texts.items():
            if len(text) >= limit or set(text) & set(eos):
                finished[text] += weight
                continue
            for emitted, probability in rounds_after(text).items():
                longer[text + emitted] += weight * probability
        texts = longer
    return largest_difference(finished, text_laws(logits, temperature, PROMPT, limit, eos))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("eos", [(), (0,), (1, 3)])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 2, 1), (2, 5, 3)])
def test_every_turn_of_the_rule_gives_the_targets_law(monkeypatch, temperature, eos, lengths):
    assert verified_difference(monkeypatch, temperature, eos, lengths=lengths) < 1e-10


# --- texts sampled through the public interface


@torch.inference_mode()
def sampled_p_value(rule, eos=(), limit=3, texts=20_000):
    logits = chain_logits(0, 4)
    environment = LiveEnvironment(ChainTarget(logits, eos), some_arms(), [PROMPT] * (texts // ROWS), limit, rule)
    simulate(make_policy("random"), environment, runs=ROWS, seed=0)
    written = [tuple(text.token_ids) for row in environment.texts for text in row]
    return fit_p_value(written, text_laws(logits, rule.temperature, PROMPT, limit, eos))


SAMPLED = [
    (Rule("rejection", 0.7), (), 3),
    (Rule("rejection", 1.0), (0,), 4),
    (Rule("gumbel", 0.7), (0,), 4),
    (Rule("gumbel", 1.0), (), 3),
]


@pytest.mark.parametrize(("rule", "eos", "limit"), SAMPLED)
def test_sampled_texts_have_the_targets_law(rule, eos, limit):
    assert sampled_p_value(rule, eos, limit) > FAMILY / len(SAMPLED)


@pytest.mark.parametrize("policy", ["metasd-ucb:reward=bd,beta=0.2", "hedge"])
def test_texts_of_generate_have_the_targets_law_under_a_policy_that_learns(policy):
    """Whole blocks, overlaps after a rejection included, or the scores of all arms are shown to the policy."""
    logits = chain_logits(0, 4)
    prompts = [Prompt(str(i), "1 2") for i in range(2_000)]
    rule = Rule("rejection", 1.0)
    written = generate(ChainTarget(logits), some_arms(), prompts, make_policy(policy), 4, rule, seed=3)
    assert fit_p_value([tuple(g.token_ids) for g in written], text_laws(logits, 1.0, PROMPT, 4)) > FAMILY / 2
    assert len({played["arm"] for g in written for played in g.rounds}) == 4


# --- wrong verifiers, which the checks must reject


def keeps_tokens_after_a_rejection(stands, draft, own, eos, limit):
    emitted = [token for token, stood in zip(draft, stands, strict=True) if stood][:limit]
    emitted = emitted[: next((i + 1 for i, token in enumerate(emitted) if token in eos), limit)]
    accepted = len(emitted)
    if accepted == limit or set(emitted) & set(eos):
        return Verdict(accepted, emitted, True)
    emitted.append(own(accepted))
    return Verdict(accepted, emitted, len(emitted) == limit or emitted[-1] in eos)


def forgets_the_residual(p, q, token):
    return p


def accepts_every_point_mass(right, p, q, tokens):
    return right(p, q, tokens) if q is not None else torch.ones(len(tokens), dtype=p.dtype)


def takes_point_masses_for_samples(right, p, q, tokens):
    """Of a uniform law."""
    return right(p, torch.full_like(p, 1 / p.shape[1]) if q is None else q, tokens)


MUTANTS = {
    "keeps tokens after a rejection": ("settle", keeps_tokens_after_a_rejection),
    "forgets the residual": ("residual", forgets_the_residual),
    "accepts every point mass": ("acceptance", partial(accepts_every_point_mass, verify.acceptance)),
    "takes point masses for samples": ("acceptance", partial(takes_point_masses_for_samples, verify.acceptance)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_verifiers_are_rejected(monkeypatch, name):
    """By each check that looks at the part which is wrong; the first knows how acceptances are put together."""
    where, wrong = MUTANTS[name]
    monkeypatch.setattr(verify, where, wrong)
    if where != "settle":
        assert max(enumerated_difference(4, length, seed=0) for length in (1, 3)) > 0.01
    assert verified_difference(monkeypatch) > 0.01
    monkeypatch.undo()
    monkeypatch.setattr(verify, where, wrong)
    assert sampled_p_value(Rule("rejection", 0.7), texts=2_000) < 1e-6
    if where != "settle":
        assert sampled_p_value(Rule("rejection", 1.0), (0,), 4, texts=2_000) < 1e-6


# --- the Gumbel rule


LAWS = [
    ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]),
    ([0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]),
    ([0.6, 0.4, 0.0], [0.0, 0.5, 0.5]),
    ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
]


def match_probability(p, q):
    """`sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)` over the x that both may choose."""
    p, q = np.array(p), np.array(q)
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p)) if p[x] > 0 and q[x] > 0)


def test_match_probability_by_hand():
    assert match_probability([0.5, 0.5], [0.25, 0.75]) == pytest.approx(1 / 4 + 1 / 2)  # 1/(1 + 3) + 1/(1 + 1)
    assert match_probability([0.5, 0.5], [0.5, 0.5]) == pytest.approx(1.0)
    assert match_probability([1.0, 0.0], [0.0, 1.0]) == 0.0


@pytest.mark.parametrize(("p", "q"), LAWS)
def test_gumbel_drafts_match_as_often_as_they_should(p, q):
    n, temperature = 5_000, 0.7
    rule = GumbelText(Rule("gumbel", temperature), np.random.SeedSequence(0))
    with np.errstate(divide="ignore"):
        p_logits, q_logits = (torch.from_numpy(temperature * np.log(law)) for law in (p, q))
    drafted = [rule.draft(q_logits, t) for t in range(n)]
    emitted = [rule.verify(p_logits[None], Draft(), t, (), 2).emitted[0] for t in range(n)]
    for chosen, law in ((drafted, q), (emitted, p)):
        assert fit_p_value(chosen, dict(enumerate(law))) > FAMILY / (4 * len(LAWS))
    expected = match_probability(p, q)
    overlap = np.minimum(p, q).sum()
    assert overlap / (2 - overlap) <= expected + 1e-12  # (1 - TV) / (1 + TV)
    assert expected <= overlap + 1e-12
    matches = np.mean(np.equal(drafted, emitted))
    assert abs(matches - expected) <= z_limit(len(LAWS), FAMILY / 2) * np.sqrt(expected * (1 - expected) / n) + 1e-12


@given(seed=st.integers(0, 99), lengths=st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_gumbel_texts_do_not_depend_on_what_is_drafted(seed, lengths):
    arms = [*(Arm(arm.name, arm.drafter, n) for arm, n in zip(some_arms(5), lengths, strict=False)), no_draft()]
    environment = LiveEnvironment(
        ChainTarget(chain_logits(0, 5), (4,)), arms, [[1, 2], [3], [0, 4]], 12, Rule("gumbel", 0.9), seed
    )
    texts = []
    for policy in ("fixed:none", "fixed:near", "fixed:sharp", "fixed:table", "random"):
        simulate(make_policy(policy, arms=environment.arms), environment, seed=seed)
        texts.append([text.token_ids for text in environment.texts[0]])
    assert all(text == texts[0] for text in texts)


# --- temperatures near 0, seeds, empty drafts


def played(rule, arms, policy="random", seed=0, text_seed=7, limit=20):
    """Texts and rounds; texts of ten prompts end at token 4 or at the limit."""
    prompts = [[i % 5, i % 3] for i in range(10)]
    environment = LiveEnvironment(ChainTarget(chain_logits(0, 5), (4,)), arms, prompts, limit, rule, text_seed)
    outcome = simulate(make_policy(policy, arms=environment.arms), environment, seed=seed, history=True)
    rounds = outcome.history.rounds
    columns = [getattr(rounds, name).tolist() for name in ("arm", "drafted", "accepted", "emitted")]
    return [text.token_ids for text in environment.texts[0]], columns


@pytest.mark.parametrize("verification", ["rejection", "gumbel"])
@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_near_temperature_0_both_sides_are_greedy(verification, temperature):
    arms = some_arms(5)
    rule = Rule(verification, temperature)
    greedy = played(Rule(), arms)
    assert played(rule, arms) == greedy  # the same rounds: drafters are greedy, too
    assert 0 < sum(greedy[1][2]) < sum(greedy[1][1])
    logits = torch.from_numpy(chain_logits(0, 5)).reshape(-1, 5)
    for dtype in (torch.float32, torch.float64):
        laws = rule.open(np.random.SeedSequence(0), 9).laws(logits.to(dtype))
        np.testing.assert_array_equal(laws, np.eye(5)[logits.argmax(dim=1)])
    trace = Recorder(ChainTarget(chain_logits(0, 5), (4,)), arms, 20, rule).record(0, Prompt("a", "1 2"))
    assert set(np.unique(trace.accept)) == {0.0, 1.0}
    np.testing.assert_array_equal(trace.log_p, 0.0)
    drafted = np.arange(trace.max_draft) < np.minimum(trace.drafted, trace.remaining()[:, None])[:, :, None]
    followed = drafted & (np.cumprod(trace.accept, axis=2) > 0)
    assert np.isfinite(trace.overlap[followed]).all()


@pytest.mark.parametrize("rule", [Rule("rejection", 0.8), Rule("gumbel", 0.8)])
@pytest.mark.parametrize("text_seed", [7, None])
def test_the_same_seed_gives_the_same_rounds(rule, text_seed):
    first = played(rule, some_arms(5), text_seed=text_seed)
    assert played(rule, some_arms(5), text_seed=text_seed) == first
    assert played(rule, some_arms(5), seed=1, text_seed=text_seed)[1] != first[1]
    assert played(rule, some_arms(5), text_seed=8)[0] != first[0]


@pytest.mark.parametrize("rule", [Rule("rejection", 0.8), Rule("gumbel", 0.8), Rule()])
def test_a_drafter_that_finds_nothing_changes_nothing(rule):
    silent = Arm("silent", TableDrafter(np.full((5, 5), -1)), 4)
    assert played(rule, [silent], "fixed:0")[0] == played(rule, [no_draft()], "fixed:0")[0]
    plain = played(rule, [no_draft(), silent])[0]
    assert plain == played(rule, [no_draft()], "fixed:0")[0]


def test_the_laws_and_p_values_of_the_checks_by_hand():
    logits = np.log([[[0.5, 0.5], [0.25, 0.75]], [[0.1, 0.9], [0.6, 0.4]]])
    assert next_law(logits, 1.0, (1, 0)) == pytest.approx([0.1, 0.9])
    assert next_law(logits, 0.5, (0, 1)) == pytest.approx([0.1, 0.9])  # squares: 1/16 to 9/16
    laws = text_laws(logits, 1.0, (0, 1), 2, eos=(0,))
    assert laws == pytest.approx({(0,): 0.25, (1, 0): 0.75 * 0.6, (1, 1): 0.75 * 0.4})
    coin = {(0,): 0.5, (1,): 0.5, (2,): 0.0}
    assert fit_p_value([(0,)] * 60 + [(1,)] * 40, coin) == pytest.approx(0.0455, abs=1e-4)  # chi-square 4, 1 degree
    assert fit_p_value([(0,)] * 50 + [(1,)] * 50, coin) == pytest.approx(1.0)
    assert fit_p_value([(0,)] * 50 + [(2,)] * 50, coin) == 0.0
    assert same_law_p_value([0] * 60 + [1] * 40, [0] * 40 + [1] * 60) == pytest.approx(0.0047, abs=1e-4)  # 8, 1 degree
