"""Whatever is asked for, whoever drafts and chooses: the text is that of plain decoding, and the log adds up."""

import warnings

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from metasd_live.drafters import Arm, Draft
from metasd_live.drafters.causal import CausalDrafter
from metasd_live.drafters.ngram import Ngram, NgramSettings, train_ngram
from metasd_live.engines.torch_model import TorchModel
from metasd_live.multi import MultiDrafter

from .live_cases import (
    VOCABULARY,
    NotTwice,
    Oracle,
    SlowProcessors,
    arms_of,
    check_log,
    end_of,
    plain_text,
    tiny_target,
)
from .test_live_multi import FAILURES

POLICIES = ["random", "metasd-ucb", "metasd-ucb:reward=bd", "kl-ucb-trials", "thompson-trials", "hedge", "fixed:0"]
LIMIT = 16


class Failing:
    """Drafts the last token again and again, until it fails in its round `after`, or in its first `open`."""

    point_mass = True

    def __init__(self, how, after):
        self.how, self.after, self.rounds, self.name = how, after, 0, f"failing-{how}-{after}"

    def open(self, prompt):
        if not self.after:
            raise ValueError("closed")
        return self

    def draft(self, context, limit, rule, position):
        self.rounds += 1
        assert self.rounds <= self.after, "asked again after it failed"
        return FAILURES[self.how](limit) if self.rounds == self.after else Draft([context[-1]] * limit)


def short_drafter(positions):
    """Its model has room for so many tokens."""
    torch.manual_seed(positions)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=positions, **sizes))
    return CausalDrafter(TorchModel(model, "short"), f"short-{positions}", VOCABULARY)


def an_arm(data, target, texts, plain):
    kind = data.draw(
        st.sampled_from(["oracle", "oracle", "none", "lookup", "layers:1", "plain", "ngram", "short", "failing"])
    )
    length = data.draw(st.integers(1, 7))
    if kind in ("none", "lookup", "layers:1"):
        return arms_of(target, kind, draft_length=length)[0]
    if kind == "ngram":
        texts = [*plain.values(), *texts.values()]
        return Arm(kind, Ngram(train_ngram(texts, target.tokenizer_hash, NgramSettings(2, 1, 0.0))), length)
    if kind == "short":
        return Arm(kind, short_drafter(data.draw(st.integers(1, 24))), length)
    if kind == "failing":
        return Arm(kind, Failing(data.draw(st.sampled_from(sorted(FAILURES))), data.draw(st.integers(0, 4))), length)
    wrong = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    return Arm(kind, Oracle(texts if kind == "oracle" else plain, wrong), length)


def the_processors(data):
    """Options of generate, and the slow processors that mean the same."""
    option = st.sampled_from([None, None, 1.0])
    options = {
        "repetition_penalty": data.draw(st.sampled_from([None, 1.3, 0.8])),
        "frequency_penalty": data.draw(st.sampled_from([None, 0.6, -0.3])),
        "presence_penalty": data.draw(option),
        "logit_bias": data.draw(
            st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.0, 2.0]), max_size=3)
        ),
        "logits_processor": [NotTwice()] if data.draw(st.booleans()) else [],
    }
    if data.draw(st.booleans()):
        options = {}

    def slow(prompt_tokens):
        penalties = SlowProcessors(
            prompt_tokens,
            options.get("logit_bias"),
            options.get("repetition_penalty") or 1.0,
            options.get("frequency_penalty") or 0.0,
            options.get("presence_penalty") or 0.0,
        )
        return [penalties, *options.get("logits_processor", [])]

    return options, slow


def an_ending(data, tokenizer, texts):
    """Ids and strings, of the texts or not."""
    tokens = sorted({token for text in texts for token in text})
    eos = data.draw(st.lists(st.sampled_from(tokens) | st.integers(0, VOCABULARY - 1), max_size=3))
    stops = []
    for _ in range(data.draw(st.integers(0, 2))):
        text = data.draw(st.sampled_from(texts))
        start = data.draw(st.integers(0, len(text) - 1))
        piece = tokenizer.decode(text[start : start + data.draw(st.integers(1, 3))])
        stops.append(piece[data.draw(st.integers(0, 1)) : len(piece) - data.draw(st.integers(0, 1))] or piece)
    return eos, stops


@settings(max_examples=120)
@given(st.data())
def test_texts_are_those_of_plain_decoding_and_the_log_adds_up(data):
    kind = data.draw(st.sampled_from(["llama", "gpt2", "sliding"]))
    target = tiny_target(kind)
    one = st.lists(st.integers(2, 9), min_size=1, max_size=12)
    prompts = data.draw(st.lists(one, min_size=1, max_size=3))
    limit = data.draw(st.integers(1, LIMIT))
    options, slow = the_processors(data)
    plain = {tuple(prompt): plain_text(target, prompt, limit) for prompt in prompts}
    whole = {tuple(prompt): plain_text(target, prompt, limit, slow(len(prompt))) for prompt in prompts}
    eos, stops = an_ending(data, target.tokenizer, list(whole.values()))
    texts = [end_of(target.tokenizer, whole[tuple(prompt)], eos, stops) for prompt in prompts]
    # an oracle knows its prompt by the beginning of the context
    known = sorted(map(tuple, prompts), key=len, reverse=True)
    arms = [
        an_arm(data, target, {p: whole[p] for p in known}, {p: plain[p] for p in known})
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    arms = [Arm(f"{i}-{arm.name}", arm.drafter, arm.length) for i, arm in enumerate(arms)]
    batch_size = data.draw(st.integers(1, 3)) if kind != "sliding" else 1
    each = st.lists(st.booleans(), min_size=len(prompts), max_size=len(prompts))
    draft = data.draw(st.sampled_from([True, True, True, False]) | each)
    draft_up_to = data.draw(st.sampled_from([None, None, None, 1, 5, 9]))
    carry_over = data.draw(st.sampled_from(["none", "keep", "discount:0.5"])) if batch_size == 1 else "none"
    gumbel = data.draw(st.integers(0, 3)) == 0
    policy = data.draw(st.sampled_from(POLICIES))
    if gumbel and policy == "metasd-ucb:reward=bd":
        policy = "metasd-ucb:reward=bd-verified"  # what a rejected draft shows would tell of noise to come
    decoder = MultiDrafter(target, arms, policy, carry_over=carry_over)
    shared = {"max_new_tokens": limit, "eos_token_id": eos, "stop_strings": stops, **options}
    shared |= {"seed": data.draw(st.integers(0, 9))}
    if gumbel:
        shared |= {"do_sample": True, "temperature": data.draw(st.sampled_from([0.3, 1.0])), "verification": "gumbel"}
        reference = MultiDrafter(target, arms_of(target, "none"), "random").generate(prompts, **shared)
        texts = [generation.token_ids for generation in reference.generations]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "drafter .* is retired")
        output = decoder.generate(prompts, batch_size=batch_size, draft=draft, draft_up_to=draft_up_to, **shared)
    assert [generation.token_ids for generation in output.generations] == texts
    assert output.texts == [target.decode(text) for text in texts]
    wanted = [draft] * len(prompts) if isinstance(draft, bool) else draft
    lengths = {arm.name: arm.length for arm in arms}
    for prompt, text, rounds, yes in zip(prompts, texts, output.rounds, wanted, strict=True):
        check_log(rounds, len(text), lengths)
        if not yes or (draft_up_to is not None and len(prompt) > draft_up_to):
            assert sum(played["drafted"] for played in rounds) == 0
        else:
            context = len(prompt)
            for played in rounds:
                arm = next(arm for arm in arms if arm.name == played["arm"])
                if played["drafted"] and arm.max_length is not None:
                    assert context + arm.length <= arm.max_length
                context += played["emitted"]
    assert set(output.retired) <= {arm.name for arm in arms if isinstance(arm.drafter, Failing)}
    event(f"accepted something: {any(r['accepted'] for rounds in output.rounds for r in rounds)}")
    event(f"ended early: {any(len(text) < limit for text in texts)}")
    event(f"retired: {bool(output.retired)}")
    event(f"batch: {batch_size > 1 and len(prompts) > 1}")
    fits = all(arm.max_length is None or max(map(len, prompts)) + limit <= arm.max_length for arm in arms)
    failing = any(isinstance(arm.drafter, Failing) for arm in arms)
    if fits and not gumbel and not failing:
        trace = output.trace()
        trace.check()
        assert trace.tokens.tolist() == [token for text in texts for token in text]
        np.testing.assert_array_equal(np.diff(trace.offsets), [len(text) for text in texts])
