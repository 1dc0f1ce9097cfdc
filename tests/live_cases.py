"""Tiny models and drafters that the live tests share: no network, no weights."""

import os
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
)
from transformers import PreTrainedTokenizerFast as FastTokenizer

from metasd_live.drafters import Arm, Draft, build_arms, parse_arm
from metasd_live.target import Target
from metasd_live.verify import GreedyText

torch.set_num_threads(1)  # the models are too small to share

VOCABULARY = 64
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
CHAT_TEMPLATE += "{% if add_generation_prompt %}{{ 'answer' }}{% endif %}"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": VOCABULARY}
# weights large enough for margins far above rounding
SIZES |= {"initializer_range": 0.4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tiny_tokenizer(words=None, chat_template=CHAT_TEMPLATE):
    words = words or ["<unk>", "answer", *(f"w{i}" for i in range(2, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = FastTokenizer(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = chat_template
    return fast


def tiny_model(kind="llama", seed=0):
    torch.manual_seed(seed)
    if kind == "gpt2":
        ids = {"bos_token_id": None, "eos_token_id": None}
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.4, **ids
        )
        return GPT2LMHeadModel(config).eval()
    if kind == "sliding":
        return MistralForCausalLM(MistralConfig(sliding_window=8, **SIZES)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@cache
def tiny_target(kind="llama", seed=0, eos=()):
    """A target whose texts end at any token of `eos`."""
    model = tiny_model(kind, seed)
    model.generation_config.eos_token_id = list(eos) or None
    return Target(engine_of(model, kind), tiny_tokenizer(), f"tiny-{kind}")


def engine_of(model, name):
    """The model, or what the engine makes of it that `METASD_TEST_ENGINE` names, if it knows the model."""
    if os.environ.get("METASD_TEST_ENGINE") != "openvino" or model.config.model_type == "gpt2":
        return model
    from metasd_live.engines.openvino_model import OpenVINOModel
    from metasd_live.engines.weights import of_model

    return OpenVINOModel(model.config, model.generation_config, lambda: of_model(model), lambda: model, name)


def tiny_prompts(count, seed=0, length=12):
    """Token ids with repeats, so that lookup has something to find."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(2, 12, size=rng.integers(2, length + 1))).tolist() for _ in range(count)]


def reference_text(target, prompt, max_new_tokens):
    """transformers' own greedy text."""
    return list(_reference(target, tuple(prompt), max_new_tokens))


@cache
def _reference(target, prompt, max_new_tokens):
    ids = torch.tensor([prompt], device=target.device)
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(target.eos) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@dataclass
class Oracle:
    """Drafts the text that is known to follow, each token spoilt with probability `wrong`; drafts short at times."""

    texts: dict[tuple[int, ...], list[int]]  # prompt -> text
    wrong: float = 0.3
    seed: int = 0
    name: str = "oracle"
    point_mass: bool = True

    def open(self, prompt):
        return self

    def draft(self, context, limit, rule, position):
        prompt = next(p for p in self.texts if tuple(context[: len(p)]) == p)
        rng = np.random.default_rng([self.seed, len(context)])  # a function of the context
        rest = self.texts[prompt][len(context) - len(prompt) :]
        rest += [0] * limit  # past the text's end: nothing that is right
        spoilt = rng.random(limit) < self.wrong
        return Draft([(token + wrong) % VOCABULARY for token, wrong in zip(rest, spoilt, strict=False)])


def oracle_arms(target, prompts, max_new_tokens, length=5):
    """Drafters that are always right, often right, and always wrong."""
    texts = {tuple(p): reference_text(target, p, max_new_tokens) for p in prompts}
    return [Arm(f"oracle-{wrong}", Oracle(texts, wrong), length) for wrong in (0.0, 0.3, 1.0)]


def draft(drafter, context, limit=8):
    """The tokens that a drafter without a law proposes after `context`."""
    return drafter.open(context).draft(context, limit, GreedyText(), 0).tokens


def arms_of(target, *specs, draft_length=5):
    return build_arms([parse_arm(spec) for spec in specs], target, draft_length)


class SlowProcessors(LogitsProcessor):
    """Bias, then repetition, frequency and presence penalties, token by token."""

    def __init__(self, prompt_tokens=0, bias=None, repetition=1.0, frequency=0.0, presence=0.0):
        self.prompt_tokens, self.bias = prompt_tokens, bias or {}
        self.repetition, self.frequency, self.presence = repetition, frequency, presence

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, text in enumerate(input_ids.tolist()):
            for token, value in self.bias.items():
                scores[row, token] += value
            for token in set(text):
                score = scores[row, token]
                scores[row, token] = score / self.repetition if score > 0 else score * self.repetition
            for token, count in Counter(text[self.prompt_tokens :]).items():
                scores[row, token] -= self.frequency * count + self.presence
        return scores


class NotTwice(LogitsProcessor):
    """A custom processor: no token follows itself. It answers for any text, so drafters ask it too."""

    any_text = True

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def end_of(tokenizer, text, eos=(), stops=()):
    """The text up to the first token of `eos`, or that completes a stop string."""
    for n in range(1, len(text) + 1):
        written = tokenizer.decode(text[:n])
        if text[n - 1] in eos or any(stop in written for stop in stops):
            return text[:n]
    return text


def plain_text(target, prompt, max_new_tokens, processors=(), eos=(), stops=()):
    """transformers' greedy text without an end of its own, cut where it should end."""
    ids = torch.tensor([list(prompt)], device=target.device)
    written = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList(processors),
    )
    return end_of(target.tokenizer, written[0, len(prompt) :].tolist(), eos, stops)


def check_log(rounds, new_tokens, lengths):
    """Every count of a text's log adds up; `lengths` are the arms' draft lengths."""
    assert sum(played["emitted"] for played in rounds) == new_tokens
    for i, played in enumerate(rounds):
        assert 0 <= played["accepted"] <= played["drafted"] <= lengths[played["arm"]]
        assert played["emitted"] - played["accepted"] in ((0, 1) if i == len(rounds) - 1 else (1,))
        assert played["emitted"] >= 1
        assert played["seconds"] >= 0
