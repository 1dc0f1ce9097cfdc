"""Logits processors: their values, what is refused, and texts that keep the law of plain decoding under them."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.special import softmax
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from metasd_live import cli, verify
from metasd_live.decode import LiveEnvironment, draft_tokens
from metasd_live.drafters import Arm
from metasd_live.multi import MultiDrafter
from metasd_live.sampling import check_processors, make_rule, recorded_rule
from metasd_live.verify import RejectionText, Rule
from metasd_sim import make_policy, simulate

from .chain_models import ChainTarget, chain_logits, fit_p_value, law_arm, no_draft, table_arm
from .live_cases import NotTwice, Oracle, arms_of, plain_text, reference_text, tiny_prompts, tiny_target
from .sim_cases import refuses
from .test_live_lossless import Branches, largest_difference

LIMIT = 24
PROMPTS = tiny_prompts(3, seed=5)


def processed(rule, logits, context, tokens=(), prompt_tokens=0):
    text = rule.open(np.random.SeedSequence(0), 9, prompt_tokens)
    return text.process(torch.tensor(logits), context, tokens)


# --- values


def test_penalties_by_hand():
    logits = [[2.0, -2.0, 1.0, 3.0]]
    # 0 and 1 occur: a positive logit is divided, a negative one multiplied
    found = processed(make_rule(repetition_penalty=2.0), logits, [0, 1, 1])
    assert found.tolist() == [[1.0, -4.0, 1.0, 3.0]]
    # the prompt [0, 1] does not count; then 1 twice, 3 once
    found = processed(make_rule(frequency_penalty=0.5, presence_penalty=0.25), logits, [0, 1, 1, 3, 1], prompt_tokens=2)
    assert found.tolist() == [[2.0, -3.25, 1.0, 2.25]]
    assert processed(make_rule(logit_bias={2: 1.5, 0: -100.0}), logits, [3]).tolist() == [[-98.0, -2.0, 2.5, 3.0]]
    # first the bias, then the penalties: (2 - 1) / 2 - 0.5
    both = make_rule(logit_bias={0: -1.0}, repetition_penalty=2.0, frequency_penalty=0.5)
    assert processed(both, logits, [3, 0], prompt_tokens=1)[0, 0].item() == 0.0


def test_every_row_of_a_block_sees_the_drafts_before_it():
    found = processed(make_rule(frequency_penalty=1.0), [[0.0] * 4] * 3, [3, 0], [1, 1], prompt_tokens=1)
    assert found.tolist() == [[-1.0, 0.0, 0.0, 0.0], [-1.0, -1.0, 0.0, 0.0], [-1.0, -2.0, 0.0, 0.0]]
    found = processed(make_rule(logits_processor=[NotTwice()]), [[0.0] * 3] * 2, [1], [2])
    assert found.tolist() == [[0.0, -math.inf, 0.0], [0.0, 0.0, -math.inf]]


def test_truncation_by_hand():
    law = [0.5, 0.25, 0.15, 0.1]

    def laws(temperature=1.0, **options):
        rule = make_rule(temperature, **options).open(np.random.SeedSequence(0), 9)
        return rule.laws(torch.tensor([law], dtype=torch.float64).log())[0].tolist()

    assert laws(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert laws(top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0])  # 0.5 is short of it
    assert laws(top_p=0.76) == pytest.approx([5 / 9, 2.5 / 9, 1.5 / 9, 0])
    assert laws(min_p=0.4) == pytest.approx([2 / 3, 1 / 3, 0, 0])  # at least 0.2
    squares = np.square(law) / np.square(law).sum()
    assert laws(0.5) == pytest.approx(squares)
    assert laws(0.5, min_p=0.2) == pytest.approx([0.8, 0.2, 0, 0])  # after the temperature: 1/16 of 1/4 and more
    assert laws(top_k=3, top_p=0.6) == pytest.approx([2 / 3, 1 / 3, 0, 0])  # of what the first has left: 0.5 / 0.9


NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0}
NEUTRAL |= {"presence_penalty": 0.0, "logit_bias": {}, "logits_processor": ()}


def test_neutral_values_are_no_processors():
    assert make_rule(**NEUTRAL) == Rule()
    assert make_rule(0.7, **NEUTRAL) == Rule("rejection", 0.7)
    assert make_rule(0.7, "gumbel") == Rule("gumbel", 0.7)
    truncated = make_rule(top_k=5, top_p=0.5, min_p=0.1)  # none of them moves the argmax
    assert (truncated.warpers, truncated.processors) == ((), ())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: -math.inf}),
        ("logits_processor", ["not callable"]),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_values_out_of_range_are_refused(option, value, temperature):
    with refuses(option, "expected", "found"):
        make_rule(temperature, **{option: value})


def test_a_rule_is_made_again_from_the_words_of_a_trace():
    options = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2345678901, "frequency_penalty": -0.5}
    options |= {"presence_penalty": 1 / 3, "logit_bias": {7: -100.0, 3: 0.1234567890}}
    rule = make_rule(0.8, **options)
    again = recorded_rule(0.8, "rejection", rule.settings)
    assert again.settings == rule.settings
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    context = [7, 3, 5, 5]
    opened = [one.open(np.random.SeedSequence(0), 9, 2) for one in (rule, again)]
    laws = [one.laws(one.process(logits, context)) for one in opened]
    torch.testing.assert_close(laws[0], laws[1])
    assert make_rule(repetition_penalty=1.0000001).settings != make_rule(repetition_penalty=1.0000002).settings
    with refuses("processors", "NotTwice"):
        recorded_rule(0.0, "greedy", make_rule(logits_processor=[NotTwice()]).settings)


# --- processors that are refused


class Counting(LogitsProcessor):
    """Bans the token after as many calls: a state that rejected drafts would spoil."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, self.calls % scores.shape[1]] = -1e9
        return scores


class Random(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise RuntimeError("no such token\nand more")


class Shrinking(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores[:, :-1]


@pytest.mark.parametrize("kind", [Counting, Random, Failing, Shrinking])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}])
def test_processors_that_are_no_functions_of_the_text_are_refused_by_name(kind, options):
    target = tiny_target()
    words = ("no such token",) if kind is Failing else ("text so far",)
    with refuses("logits_processor", kind.__name__, *words):
        MultiDrafter(target, arms_of(target, "lookup")).generate([[5, 6]], logits_processor=[kind()], **options)


def test_guidance_and_biases_past_the_vocabulary_are_refused():
    target = tiny_target()
    drafter = MultiDrafter(target, arms_of(target, "lookup"))
    guided = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, target.model)
    with refuses("logits_processor", "UnbatchedClassifierFreeGuidanceLogitsProcessor", "state"):
        drafter.generate([[5, 6]], logits_processor=[guided])
    with refuses("logits_processor", "LogitBias", "64 tokens"):
        drafter.generate([[5, 6]], logit_bias={64: 1.0})
    check_processors(make_rule(logit_bias={63: 1.0}, logits_processor=[NotTwice()]), 64)


# --- each against transformers, greedily

BAN = [[token] for token in range(0, 64, 3)]
TRANSFORMERS = {  # options of generate -> what transformers calls them
    "repetition_penalty": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "reward for repetition": ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "logit_bias": ({"logit_bias": {20: -9.0, 47: 4.0}}, {"sequence_bias": {(20,): -9.0, (47,): 4.0}}),
    "bias and penalty": (
        {"logit_bias": {20: -3.0, 47: 3.0}, "repetition_penalty": 1.5},
        {"sequence_bias": {(20,): -3.0, (47,): 3.0}, "repetition_penalty": 1.5},
    ),
    "no n-gram twice": ({"logits_processor": [NoRepeatNGramLogitsProcessor(2)]}, {"no_repeat_ngram_size": 2}),
    "bad words": ({"logits_processor": [NoBadWordsLogitsProcessor(BAN, eos_token_id=[1])]}, {"bad_words_ids": BAN}),
    "suppressed": ({"logits_processor": [SuppressTokensLogitsProcessor([20, 47])]}, {"suppress_tokens": [20, 47]}),
    "a sequence's bias": (
        {"logits_processor": [SequenceBiasLogitsProcessor({(53, 38): -20.0, (47,): -1.0})]},
        {"sequence_bias": {(53, 38): -20.0, (47,): -1.0}},
    ),
    "custom": ({"logits_processor": [NotTwice()]}, {"logits_processor": [NotTwice()]}),
    "top-k": ({"top_k": 3, "top_p": 0.5, "min_p": 0.2}, {}),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_equal_those_of_transformers_with_the_same_option(name, batch_size):
    ours, theirs = TRANSFORMERS[name]
    target = tiny_target()
    plain = {tuple(prompt): reference_text(target, prompt, LIMIT) for prompt in PROMPTS}
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": LIMIT, "pad_token_id": 0}
        written = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **theirs)
        expected.append(written[0, len(prompt) :].tolist())
    assert (expected == list(plain.values())) == (name == "top-k")
    oracle = Oracle(dict(zip(plain, expected, strict=True)), 0.3)
    arms = [Arm("oracle", oracle, 5), Arm("unprocessed", Oracle(plain, 0.0), 4), *arms_of(target, "layers:1", "lookup")]
    output = MultiDrafter(target, arms, "random").generate(PROMPTS, max_new_tokens=LIMIT, batch_size=batch_size, **ours)
    assert [g.token_ids for g in output.generations] == expected
    assert sum(played["accepted"] for rounds in output.rounds for played in rounds) > 10


def test_a_minimum_length_with_an_end_of_sequence():
    target, prompt = tiny_target(), PROMPTS[0]
    text = reference_text(target, prompt, LIMIT)
    eos = next(token for i, token in enumerate(text) if 2 <= i < 9 and token not in text[:i])
    shortest = MinNewTokensLengthLogitsProcessor(len(prompt), 9, eos)
    expected = plain_text(target, prompt, LIMIT, [shortest], eos=[eos])
    drafter = MultiDrafter(target, arms_of(target, "lookup", "layers:1"), "random")
    output = drafter.generate([prompt], max_new_tokens=LIMIT, eos_token_id=eos, logits_processor=[shortest])
    assert output.generations[0].token_ids == expected
    assert len(expected) >= 9 > len(drafter.generate([prompt], eos_token_id=eos).generations[0].token_ids)


# --- the law of sampled texts, exactly


def plain_law(logits, settings, prompt, limit, eos=(), before=()):
    """Probability of every text after the new tokens `before`: processors by hand, in double precision."""

    def law(context, new):
        scores = np.array(logits[([0, *context])[-2]][context[-1]])
        o = settings
        for token, value in o.get("logit_bias", {}).items():
            scores[token] += value
        r = o.get("repetition_penalty", 1.0)
        for token in set(context):
            scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
        for token, count in Counter(new).items():
            scores[token] -= o.get("frequency_penalty", 0.0) * count + o.get("presence_penalty", 0.0)
        if o.get("custom"):
            scores[context[-1]] = -np.inf
        scores = scores / o.get("temperature", 1.0)
        if "top_k" in o:
            scores[scores < np.sort(scores)[-o["top_k"]]] = -np.inf
        if "top_p" in o:
            order = np.argsort(-scores)
            before = np.cumsum(softmax(scores)[order]) - softmax(scores)[order]
            scores[order[before >= o["top_p"]]] = -np.inf
        if "min_p" in o:
            p = softmax(scores)
            scores[p < o["min_p"] * p.max()] = -np.inf
        return softmax(scores)

    texts, finished = {(): 1.0}, {}
    while texts:
        longer = {}
        for text, weight in texts.items():
            if len(text) == limit or set(text[-1:]) & set(eos):
                finished[text] = weight
                continue
            for token, p in enumerate(law([*prompt, *before, *text], [*before, *text])):
                longer[(*text, token)] = weight * p
        texts = longer
    return {text: p for text, p in finished.items() if p > 0}


LAWS = {
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 0.9, "presence_penalty": 0.4},
    "bias": {"logit_bias": {0: 1.0, 2: -100.0}},
    "custom": {"custom": True},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7, "temperature": 0.8},
    "min-p": {"min_p": 0.3},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "logit_bias": {1: 0.7},
        "custom": True,
        "top_k": 3,
        "top_p": 0.95,
        "min_p": 0.05,
        "temperature": 0.9,
    },
}
PROMPT = (1, 2)


def chain_arms(vocabulary=4, seed=0):
    near = chain_logits(seed, vocabulary) + chain_logits(seed + 1, vocabulary, 0.7)
    return [
        law_arm("near", near, 3),
        law_arm("far", chain_logits(seed + 2, vocabulary, 2.0), 2),
        table_arm("table", seed + 3, vocabulary, 2),
        no_draft(),
    ]


def rule_of(settings, verification):
    options = {key: value for key, value in settings.items() if key not in ("custom", "temperature")}
    custom = [NotTwice()] if settings.get("custom") else ()
    return make_rule(settings.get("temperature", 1.0), verification, logits_processor=custom, **options)


def enumerated(monkeypatch, rule, limit=3, eos=(), vocabulary=4):
    """The law of whole texts, by every turn of every draft, acceptance and replacement; a round's arm depends on the
    text."""
    target = ChainTarget(chain_logits(0, vocabulary), eos)
    arms = chain_arms(vocabulary)
    streams = [arm.drafter.open(PROMPT) for arm in arms]
    text_rule = rule.open(np.random.SeedSequence(0), limit, len(PROMPT))
    branches = Branches()
    text_rule.accept = [branches] * limit
    monkeypatch.setattr(verify, "sample", lambda law, uniform: branches.choose(law.tolist()))
    texts, finished = {(): 1.0}, Counter()
    while texts:
        longer = Counter()
        for text, weight in texts.items():
            if len(text) >= limit or set(text) & set(eos):
                finished[text] += weight
                continue
            context, left = [*PROMPT, *text], limit - len(text)
            arm = sum(context) % len(arms)

            def play(text=text, context=context, left=left, arm=arm):
                length = min(arms[arm].length, left)
                draft = draft_tokens(streams[arm], context, length, text_rule, len(text), target.eos)
                raw = target.forward(target.prefill(context), [context[-1], *draft.tokens])
                logits = text_rule.process(raw, context, draft.tokens)
                return tuple(text_rule.verify(logits, draft, len(text), target.eos, left).emitted)

            for emitted, probability in branches.walk(play):
                longer[text + emitted] += weight * probability
        texts = longer
    return finished


@pytest.mark.parametrize("eos", [(), (0,)])
@pytest.mark.parametrize("name", LAWS)
def test_every_turn_of_the_rule_gives_the_law_of_plain_decoding(monkeypatch, name, eos):
    """Drafters with laws and without, their drafts after the same processors."""
    settings = LAWS[name]
    law = plain_law(chain_logits(0, 4), settings, PROMPT, 3, eos)
    assert sum(law.values()) == pytest.approx(1.0)
    with torch.inference_mode():
        found = enumerated(monkeypatch, rule_of(settings, "rejection"), eos=eos)
    assert largest_difference(found, law) < 1e-6  # biases are kept in single precision
    without = plain_law(chain_logits(0, 4), {}, PROMPT, 3, eos)
    assert largest_difference(without, law) > 0.01  # the check tells laws apart


def test_processors_that_do_not_see_the_drafts_are_found(monkeypatch):
    """A wrong rule, which the check must reject."""
    settings = LAWS["all"]
    law = plain_law(chain_logits(0, 4), settings, PROMPT, 3)
    right = RejectionText.process

    def forgets_drafts(self, logits, context, tokens=()):
        return torch.cat([right(self, row[None], context) for row in logits])

    monkeypatch.setattr(RejectionText, "process", forgets_drafts)
    with torch.inference_mode():
        assert largest_difference(enumerated(monkeypatch, rule_of(settings, "rejection")), law) > 0.01


@torch.inference_mode()
def sampled(rule, arms, rows=50, texts=2_000, limit=3, eos=(), seed=0):
    environment = LiveEnvironment(ChainTarget(chain_logits(0, 4), eos), arms, [PROMPT] * (texts // rows), limit, rule)
    simulate(make_policy("random"), environment, runs=rows, seed=seed)
    played = [one for row in environment.texts for text in row for one in text.rounds]
    return [tuple(text.token_ids) for row in environment.texts for text in row], played


def test_sampled_texts_have_the_law_of_plain_decoding():
    """Through the public interface; false alarms in one seed of a thousand."""
    texts, played = sampled(rule_of(LAWS["all"], "rejection"), chain_arms(), eos=(0,))
    assert fit_p_value(texts, plain_law(chain_logits(0, 4), LAWS["all"], PROMPT, 3, (0,))) > 1e-3
    assert 0 < sum(one.accepted for one in played) < sum(one.drafted for one in played)
    texts, _ = sampled(Rule("rejection", 0.9), chain_arms(), texts=500, eos=(0,))
    assert fit_p_value(texts, plain_law(chain_logits(0, 4), LAWS["all"], PROMPT, 3, (0,))) < 1e-6


@pytest.mark.parametrize("name", LAWS)
def test_gumbel_texts_are_the_argmax_of_the_plain_law_and_the_noise(name):
    """The noise of a position, added to the log of the plain law: token by token, whatever is drafted."""
    settings, limit = LAWS[name], 6
    rule = rule_of(settings, "gumbel")
    environment = LiveEnvironment(ChainTarget(chain_logits(0, 4)), chain_arms(), [PROMPT] * 10, limit, rule, seed=3)
    simulate(make_policy("random"), environment, seed=1)
    for number, text in enumerate(environment.texts[0]):
        noise = rule.open(np.random.SeedSequence((3, number)), limit).noise
        expected = []
        for position in range(limit):
            scores = np.full(4, -np.inf)
            for (token,), p in plain_law(chain_logits(0, 4), settings, PROMPT, 1, before=expected).items():
                scores[token] = np.log(p)
            expected.append(int((scores + noise(position, 4).numpy()).argmax()))
        assert text.token_ids == expected
    assert len({tuple(text.token_ids) for text in environment.texts[0]}) > 3
    played = [one for text in environment.texts[0] for one in text.rounds]
    assert 0 < sum(one.accepted for one in played) < sum(one.drafted for one in played)


def test_drafts_are_drawn_after_the_same_processors():
    """A copy of the target as drafter is always accepted, since its `q` is the processed `p`."""
    same = [law_arm("same", chain_logits(0, 4), 3)]
    for name, settings in LAWS.items():
        for verification in ("rejection", "gumbel"):
            _, played = sampled(rule_of(settings, verification), same, texts=50, rows=10)
            assert all(one.accepted == one.drafted for one in played), name


def test_the_plain_law_of_the_check_by_hand():
    logits = np.log([[[0.5, 0.3, 0.2]] * 3] * 3)
    assert plain_law(logits, {}, (0, 0), 1) == pytest.approx({(0,): 0.5, (1,): 0.3, (2,): 0.2})
    assert plain_law(logits, {"top_k": 2}, (0, 0), 1) == pytest.approx({(0,): 0.625, (1,): 0.375})
    assert plain_law(logits, {"top_p": 0.6}, (0, 0), 1) == pytest.approx({(0,): 0.625, (1,): 0.375})
    assert plain_law(logits, {"min_p": 0.5}, (0, 0), 1) == pytest.approx({(0,): 0.625, (1,): 0.375})
    assert plain_law(logits, {"custom": True}, (0, 1), 1) == pytest.approx({(0,): 5 / 7, (2,): 2 / 7})
    # all logits are negative, so a penalty of 2 squares the probabilities of what occurred: 0.25, 0.3, 0.2
    found = plain_law(logits, {"repetition_penalty": 2.0}, (0, 0), 1)
    assert found == pytest.approx({(0,): 0.25 / 0.75, (1,): 0.3 / 0.75, (2,): 0.2 / 0.75})


# --- the command line


def test_options_of_the_command_line_reach_the_rule(monkeypatch, tmp_path, capsys):
    target = tiny_target()
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    seen = []
    monkeypatch.setattr("metasd_live.commands.generate", lambda *args, **options: seen.append((args, options)) or [])
    values = {"top-k": 7, "top-p": 0.9, "min-p": 0.1, "repetition-penalty": 1.1, "frequency-penalty": 0.2}
    values |= {"presence-penalty": 0.3, "temperature": 0.8, "verification": "gumbel"}
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    words += ["--logit-bias", "5:-100", "--logit-bias", "6:2", "--stop", "w5", "--stop", "w6"]
    words += ["--eos", "9", "--eos", "8"]
    words += ["--batch-size", "3", "--no-draft", "--draft-up-to", "17"]
    assert cli.main(["generate", "--target", str(tmp_path), "--drafter", "lookup", *words, "--quiet", "w5"]) == 0
    rule, options = seen[0][0][5], seen[0][1]
    assert (rule.verification, rule.temperature) == ("gumbel", 0.8)
    assert set(rule.settings) == {
        "top_k=7",
        "top_p=0.9",
        "min_p=0.1",
        "repetition_penalty=1.1",
        "frequency_penalty=0.2",
        "presence_penalty=0.3",
        "logit_bias=5:-100,6:2",
    }
    expected = {"batch_size": 3, "drafting": False, "draft_up_to": 17, "eos": [9, 8], "stop_strings": ["w5", "w6"]}
    assert {key: options[key] for key in expected} == expected
    assert cli.main(["generate", "--target", str(tmp_path), "--drafter", "lookup", "--no-eos", "--quiet", "w5"]) == 0
    assert seen[1][1]["eos"] == []
    capsys.readouterr()
    for wrong in (["--top-p", "2"], ["--logit-bias", "5"], ["--no-eos", "--eos", "3"], ["--top-k", "-3"]):
        assert cli.main(["generate", "--target", str(tmp_path), "--drafter", "lookup", *wrong, "w5"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
