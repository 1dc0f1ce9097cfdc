"""Greedy decoding equals transformers' own on tiny random models of many architectures, under every option."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from metasd_live.compare import first_difference
from metasd_live.drafters import Arm
from metasd_live.multi import MultiDrafter
from metasd_live.target import Target
from metasd_sim.errors import InputError

from .live_cases import (
    SIZES,
    VOCABULARY,
    NotTwice,
    Oracle,
    SlowProcessors,
    arms_of,
    check_log,
    end_of,
    plain_text,
    tiny_model,
    tiny_prompts,
    tiny_tokenizer,
)
from .sim_cases import refuses

LIMIT = 18
PROMPTS = [*tiny_prompts(2, seed=3), [6]]
GEMMA = SIZES | {
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
}
ALIKE = {"hidden_size": 32, "vocab_size": VOCABULARY, "initializer_range": 0.4}
ALIKE |= {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

MODELS = {
    "llama": lambda: tiny_model("llama"),
    "gpt2": lambda: tiny_model("gpt2"),
    "mistral": lambda: tiny_model("sliding"),  # a window of 8
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(final_logit_softcapping=5.0, attn_logit_softcapping=3.0, **GEMMA)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(
            intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256, **ALIKE
        )
    ),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES)),
    "falcon": lambda: FalconForCausalLM(FalconConfig(num_hidden_layers=2, num_attention_heads=4, **ALIKE)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            init_std=0.4,
            word_embed_proj_dim=32,
            **ALIKE,
        )
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(n_layer=2, n_head=4, **ALIKE)),
}
SLIDING = ("mistral", "gemma2", "gemma3")
SEEDS = {"gpt_neox": 2, "bloom": 3, "gemma3": 3}  # others repeat one token
WITHOUT_ROWS = (*SLIDING, "bloom")  # one prompt at a time only
WITHOUT_SKIPPING = ("opt",)  # their layers are not where layers:K looks


@cache
def a_target(kind, dtype=torch.float32):
    torch.manual_seed(SEEDS.get(kind, 5))
    model = MODELS[kind]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # norms and biases, which begin as ones and zeros
                weight += 0.3 * torch.randn_like(weight)
    model.generation_config.eos_token_id = None
    return Target(model.to(dtype), tiny_tokenizer(), f"tiny-{kind}")


@cache
def plain(kind, prompt, option=None):
    """transformers' text under the processors of an option, without an end."""
    processors = {
        "penalties": [SlowProcessors(len(prompt), None, 1.4, 0.5, 0.25)],
        "bias": [SlowProcessors(0, BIAS)],
        "custom": [NotTwice()],
        "all": [SlowProcessors(len(prompt), BIAS, 1.4, 0.5, 0.25), NotTwice()],
    }
    return plain_text(a_target(kind), prompt, LIMIT, processors.get(option, []))


BIAS = {token: -100.0 if token % 3 == 0 else 1.5 for token in range(0, VOCABULARY, 2)}
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.25}
OPTIONS = {
    "nothing": {},
    "penalties": PENALTIES,
    "bias": {"logit_bias": BIAS},
    "custom": {"logits_processor": [NotTwice()]},
    "all": PENALTIES | {"logit_bias": BIAS, "logits_processor": [NotTwice()]},
    "no draft": {"draft": False},
    "some drafts": {"draft": [True, False, True]},
    "short ones": {"draft_up_to": 1},
}


def the_arms(kind, option=None):
    target = a_target(kind)
    texts = {tuple(prompt): plain(kind, tuple(prompt), option) for prompt in PROMPTS}
    arms = [Arm("oracle", Oracle(texts, 0.3), 6), Arm("wrong", Oracle(texts, 1.0), 3), *arms_of(target, "lookup")]
    return arms if kind in WITHOUT_SKIPPING else [*arms, *arms_of(target, "layers:1@4")]


def decode(kind, option=None, policy="random", seed=0, **options):
    """The output and whose text it must be."""
    arms = the_arms(kind, option)
    output = MultiDrafter(a_target(kind), arms, policy).generate(PROMPTS, max_new_tokens=LIMIT, seed=seed, **options)
    assert not output.retired
    for generation, rounds in zip(output.generations, output.rounds, strict=True):
        check_log(rounds, len(generation.token_ids), {arm.name: arm.length for arm in arms})
    return output


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("option", OPTIONS)
def test_texts_equal_those_of_transformers(kind, option):
    output = decode(kind, option, **OPTIONS[option])
    assert [g.token_ids for g in output.generations] == [plain(kind, tuple(prompt), option) for prompt in PROMPTS]
    drafted = [sum(played["drafted"] for played in rounds) for rounds in output.rounds]
    expected = {"no draft": [0, 0, 0], "some drafts": [1, 0, 1], "short ones": [0, 0, 1]}.get(option, [1, 1, 1])
    assert [min(n, 1) for n in drafted] == expected


@pytest.mark.parametrize("kind", MODELS)
def test_the_models_and_options_of_the_test_differ(kind):
    """Comparisons above can fail: texts vary, options change them, drafts stand in part."""
    texts = [plain(kind, tuple(prompt)) for prompt in PROMPTS]
    assert max(len(set(text)) for text in texts) > 4
    for option in ("penalties", "bias", "custom"):
        assert [plain(kind, tuple(prompt), option) for prompt in PROMPTS] != texts
    played = [played for rounds in decode(kind).rounds for played in rounds]
    assert 0 < sum(r["accepted"] for r in played) < sum(r["drafted"] for r in played)


@pytest.mark.parametrize("kind", MODELS)
def test_ends_of_sequence_and_stop_strings(kind):
    texts = [plain(kind, tuple(prompt)) for prompt in PROMPTS]
    tokenizer = a_target(kind).tokenizer
    eos = [texts[0][9], texts[1][6]]
    stops = [tokenizer.decode(texts[2][7:9])[1:], "no such thing"]
    for ends, stop in ((eos, []), ([], stops), (eos, stops)):
        output = decode(kind, eos_token_id=ends, stop_strings=stop)
        expected = [end_of(tokenizer, text, ends, stop) for text in texts]
        assert [g.token_ids for g in output.generations] == expected
        assert any(len(text) < LIMIT for text in expected)
        assert output.texts == [a_target(kind).decode(text) for text in expected]


@pytest.mark.parametrize("kind", MODELS)
def test_batches(kind):
    if kind in WITHOUT_ROWS:
        with refuses("batch size", f"tiny-{kind}", kind, "window" if kind in SLIDING else "position_ids"):
            decode(kind, batch_size=2)
        return
    texts = [plain(kind, tuple(prompt)) for prompt in PROMPTS]
    for size in (2, 3):
        assert [g.token_ids for g in decode(kind, batch_size=size).generations] == texts
    eos, tokenizer = [texts[1][4]], a_target(kind).tokenizer
    output = decode(kind, batch_size=3, eos_token_id=eos)  # rows end one by one
    assert [g.token_ids for g in output.generations] == [end_of(tokenizer, text, eos) for text in texts]
    output = decode(kind, "all", batch_size=3, **OPTIONS["all"])
    assert [g.token_ids for g in output.generations] == [plain(kind, tuple(prompt), "all") for prompt in PROMPTS]


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_layers_draft(kind):
    target = a_target(kind)
    if kind in WITHOUT_SKIPPING:
        with refuses("layers", f"tiny-{kind}", "leave layers:K out"):
            arms_of(target, "layers:1")
        return
    output = MultiDrafter(target, arms_of(target, "layers:1"), "fixed:0").generate(PROMPTS, max_new_tokens=LIMIT)
    assert [g.token_ids for g in output.generations] == [plain(kind, tuple(prompt)) for prompt in PROMPTS]
    assert sum(played["drafted"] for rounds in output.rounds for played in rounds) > 20
    with pytest.raises(InputError, match=r"K in 1\.\.1"):
        arms_of(target, "layers:2")


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma2", "phi"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_texts_leave_plain_ones_at_near_ties_only(kind, dtype):
    target = a_target(kind, dtype)
    assert next(target.model.parameters()).dtype == dtype
    arms = arms_of(target, "lookup", "layers:1")
    output = MultiDrafter(target, arms, "random").generate(PROMPTS, max_new_tokens=LIMIT)
    for prompt, generation in zip(PROMPTS, output.generations, strict=True):
        found = first_difference(target, prompt, generation.token_ids, plain_text(target, prompt, LIMIT))
        assert found is None or found.near_tie, str(found)


def test_a_softcap_bounds_the_logits():
    """Where logits are capped, the argmax stays and the laws do not: passes of the package must apply it too."""
    target = a_target("gemma2")
    logits = target.forward(target.prefill(PROMPTS[0]), PROMPTS[0][-1:])
    assert 3 < float(logits.abs().max()) <= 5
    assert isinstance(a_target("gpt2").model, GPT2LMHeadModel)
    np.testing.assert_allclose(
        logits[0].numpy(), target.model(torch.tensor([PROMPTS[0]])).logits[0, -1].detach().numpy(), atol=1e-4
    )
