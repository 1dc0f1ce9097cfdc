"""The OpenVINO engine: the same numbers as torch, whatever is read, forgotten, batched or kept."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from metasd_live.decode import generate
from metasd_live.drafters import Arm
from metasd_live.drafters.causal import CausalDrafter, skip_layers
from metasd_live.drafters.lookup import PromptLookup
from metasd_live.engines import load_model
from metasd_live.engines.threads import _quota
from metasd_live.engines.weights import Groups, _q4_0, _q4_1, _q8_0, _row_order, of_model, to_int8
from metasd_live.prompts import Prompt
from metasd_live.target import Target, load_target
from metasd_live.verify import Rule
from metasd_sim.policies import make_policy
from tests.live_cases import SIZES, VOCABULARY, reference_text, tiny_prompts, tiny_target, tiny_tokenizer
from tests.sim_cases import refuses

openvino_model = pytest.importorskip("metasd_live.engines.openvino_model")

# what differs between the families, and within one: biases, norms of heads, a window, a head of its own, a rotation
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "one key for each head": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "biased": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "scaled": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=None, **SIZES)),
    "sliding": lambda: MistralForCausalLM(MistralConfig(sliding_window=8, **SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SIZES)),
}
TOLERANCE = {"atol": 5e-4, "rtol": 1e-4}  # logits of these models are up to 100 in size


@cache
def torch_model(kind, dtype=torch.float32):
    torch.manual_seed(3)
    model = MODELS[kind]().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms of one and biases of zero would hide what reads them
            parameter.data += 0.3 * torch.randn_like(parameter) + (0.0 if "bias" not in name else 0.1)
    return model.to(dtype)  # a fresh one each time: `to` works in place


@cache
def openvino_target(kind, mode="", dtype=torch.float32):
    model = torch_model(kind, dtype)
    engine = openvino_model.OpenVINOModel(
        model.config, model.generation_config, lambda: of_model(model), lambda: model, kind, mode
    )
    return Target(engine, tiny_tokenizer(), kind)


@torch.inference_mode()
def reference(kind, ids):
    """Logits after each of `ids`, by transformers in one pass."""
    return torch_model(kind)(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_torch_in_blocks_of_any_width(kind):
    rng = np.random.default_rng(0)
    ids = rng.integers(VOCABULARY, size=40).tolist()
    target, expected = openvino_target(kind), reference(kind, ids)
    state, at = target.prefill(ids[:4]), 3
    for width in (1, 2, 5, 9, 16, 4):
        torch.testing.assert_close(target.forward(state, ids[at : at + width]), expected[at : at + width], **TOLERANCE)
        at += width
    assert state.length == at == 40


@settings(deadline=None, max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_logits_after_rejections_equal_a_fresh_pass(kind, data):
    """Rejected tokens stay in the cache, masked; compaction, here early, changes nothing."""
    target = openvino_target(kind)
    tokens = st.integers(0, VOCABULARY - 1)
    ids = data.draw(st.lists(tokens, min_size=2, max_size=12))
    state = target.prefill(ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openvino_model, "SPARE_PLACES", data.draw(st.sampled_from([0, 3, 128])))
        for _ in range(data.draw(st.integers(1, 5))):
            block = data.draw(st.lists(tokens, max_size=6))
            logits = target.forward(state, [ids[-1], *block])
            kept = data.draw(st.integers(0, len(block)))
            expected = reference(kind, ids + block)[len(ids) - 1 :]
            torch.testing.assert_close(logits, expected, **TOLERANCE)
            target.rollback(state, len(block) - kept)
            ids = [*ids, *block[:kept], data.draw(tokens)]
            assert state.length == len(ids) - 1


def test_places_are_cleared_out_when_many_are_masked(monkeypatch):
    monkeypatch.setattr(openvino_model, "SPARE_PLACES", 10)
    target = openvino_target("llama")
    state = target.prefill([1, 2, 3])
    used = []
    for _ in range(8):
        target.forward(state, [4] * 4)
        target.rollback(state, 4)
        used.append(state.cache.used)
    assert used == [6, 10, 2, 6, 10, 2, 6, 10]  # 2 tokens held: more than 10 + 2 // 4 masked places are cleared
    with pytest.raises(ValueError, match=r"0\.\.2"):
        target.rollback(state, 3)


@pytest.mark.parametrize("kind", ["llama", "sliding", "qwen3"])
def test_rows_of_unequal_lengths_equal_single_ones(kind, monkeypatch):
    monkeypatch.setattr(openvino_model, "SPARE_PLACES", 4)
    target, rng = openvino_target(kind), np.random.default_rng(1)
    texts = [rng.integers(VOCABULARY, size=n).tolist() for n in (1, 9, 4)]
    state = target.prefill_rows(texts, features=True)
    assert state.length == [0, 8, 3]
    names = [0, 1, 2]
    for turn in range(6):
        blocks = [[texts[name][-1], *rng.integers(VOCABULARY, size=rng.integers(0, 5))] for name in names]
        blocks = [[int(token) for token in block] for block in blocks]
        logits = target.forward_rows(state, blocks)
        kept = [int(rng.integers(1, len(block) + 1)) for block in blocks]
        for name, block, own in zip(names, blocks, logits, strict=True):
            expected = reference(kind, texts[name] + block[1:])[len(texts[name]) - 1 :]
            torch.testing.assert_close(own, expected, **TOLERANCE)
        target.rollback_rows(state, [len(block) - k for block, k in zip(blocks, kept, strict=True)])
        for row, (name, block, k) in enumerate(zip(names, blocks, kept, strict=True)):
            texts[name] = [*texts[name], *block[1:k], int(rng.integers(VOCABULARY))]
            assert state.length[row] == len(state.features[row]) == len(texts[name]) - 1
        if turn == 2:  # the first row is done
            names = [2, 1]
            target.select_rows(state, names)
            assert state.length == [len(texts[name]) - 1 for name in names]


def test_states_do_not_disturb_each_other_and_what_is_looked_at_stays():
    target = openvino_target("llama")
    one, two = target.prefill([1, 2, 3]), target.prefill([9, 8, 7, 6])
    first = target.forward(one, [3])
    kept, expected = first.clone(), reference("llama", [1, 2, 3])[-1:]
    target.forward(two, [6])
    del one
    for _ in range(3):  # states that could take the request over, were nobody looking
        target.forward(target.prefill([5, 5]), [5, 4])
    assert torch.equal(first, kept)
    torch.testing.assert_close(first, expected, **TOLERANCE)


def test_hidden_states_feed_the_head():
    target, model = openvino_target("llama"), torch_model("llama")
    ids = [5, 6, 7, 8, 9]
    state = target.prefill(ids, features=True)
    target.forward(state, ids[-1:])
    with torch.inference_mode():
        expected = model.base_model(torch.tensor([ids])).last_hidden_state[0]
    torch.testing.assert_close(state.features[0:5], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.hidden(target.prefill([]), ids, keep=2), expected[-2:], atol=1e-4, rtol=1e-4)
    weight, bias = target.head()
    assert bias is None
    torch.testing.assert_close(weight, model.lm_head.weight)
    torch.testing.assert_close(target.embedding(), model.get_input_embeddings().weight)


def test_layers_in_between_are_outputs_on_request():
    model = torch_model("llama")
    shape = openvino_model.shape_of(model.config)
    built = openvino_model.graph.build(shape, of_model(model), layers=[1])
    assert [next(iter(output.get_names())) for output in built.outputs] == ["logits", "hidden", "layer.1"]
    request = openvino_model.ov.Core().compile_model(built, "CPU", openvino_model.EXACT).create_infer_request()
    tokens = np.array([[3, 4, 5]])
    mask = np.triu(np.full((1, 1, 3, 3), openvino_model.MASKED, dtype=np.float32), 1)
    values = (tokens, np.arange(3)[None], mask, np.zeros(1, dtype=np.int32), np.array([1]))
    request.infer(dict(zip(openvino_model.graph.INPUTS, values, strict=True)))
    with torch.inference_mode():
        expected = model.base_model(torch.tensor(tokens), output_hidden_states=True).hidden_states[1]
    np.testing.assert_allclose(request.get_tensor("layer.1").data, expected, atol=1e-4)


def test_the_first_layers_equal_the_model_cut_short():
    drafter = skip_layers(1, "layers:1", openvino_target("llama"))
    expected = skip_layers(1, "layers:1", Target(torch_model("llama"), tiny_tokenizer(), "llama"))
    ids = [4, 5, 6, 7]
    for one in (drafter, expected):
        assert one.model.layers == 1
    logits = [one.model.forward(one.model.prefill(ids), ids[-1:]) for one in (drafter, expected)]
    torch.testing.assert_close(*logits, **TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "sliding"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_greedy_text_is_plain_text(kind, batch_size):
    target = openvino_target(kind)
    prompts = tiny_prompts(6, length=20)
    arms = [
        Arm("lookup", PromptLookup(), 4),
        Arm("layers", skip_layers(1, "layers:1", target), 3),
        Arm("other", CausalDrafter(openvino_target("tied").engine, "other", VOCABULARY), 5),
    ]
    named = [Prompt(str(i), " ".join(f"w{t}" for t in prompt)) for i, prompt in enumerate(prompts)]
    policy = make_policy("random", arms=[arm.name for arm in arms])
    written = generate(target, arms, named, policy, 24, Rule(), chat_template=False, batch_size=batch_size)
    accepted = sum(played["accepted"] for one in written for played in one.rounds)
    assert accepted > 0
    theirs = Target(torch_model(kind), tiny_tokenizer(), kind)
    for one, prompt in zip(written, named, strict=True):
        assert one.token_ids == reference_text(theirs, theirs.encode(prompt.text, False), 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_taken_as_they_are(dtype):
    target = openvino_target("llama", dtype=dtype)
    ids = [5, 6, 7, 8]
    same = MODELS["llama"]().eval()  # the same weights, all else in float32
    same.load_state_dict(torch_model("llama", dtype).state_dict())
    with torch.inference_mode():
        expected = same(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(target.forward(target.prefill([]), ids), expected, **TOLERANCE)
    assert target.settings["weights"] == {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]


def test_8_bit_weights_come_near_and_say_so():
    target = openvino_target("llama", "int8")
    ids = np.random.default_rng(0).integers(VOCABULARY, size=30).tolist()
    p, q = (x.softmax(-1) for x in (reference("llama", ids), target.forward(target.prefill([]), ids)))
    overlap = torch.minimum(p, q).sum(-1).mean()
    assert 0.8 < overlap < 0.9999
    assert target.settings["weights"] == "i8"
    exact = openvino_target("llama")
    assert exact.settings["weights"] == "f32"
    assert exact.settings["dynamic_quantization_group_size"] == "0"


def test_groups_of_gguf_files_by_hand():
    half = lambda *values: np.array(values, dtype=np.float16).view(np.uint8)  # noqa: E731
    numbers = np.arange(32) % 16
    packed = (numbers[:16] | numbers[16:] << 4).astype(np.uint8)
    q4_1 = _q4_1(np.concatenate([half(0.5, -2.0), packed])[None])
    assert np.array_equal(q4_1.dense()[0], 0.5 * numbers - 2.0)
    flat = _q4_1(np.concatenate([half(0.0, 1.5), packed])[None])  # no scale: all are the minimum
    assert np.array_equal(flat.dense()[0], np.full(32, 1.5))
    assert np.array_equal(_q4_0(np.concatenate([half(2.0), packed])[None]).dense()[0], 2.0 * (numbers - 8))
    signed = np.arange(-16, 16)
    q8_0 = _q8_0(np.concatenate([half(0.25), signed.astype(np.int8).view(np.uint8)])[None])
    assert np.array_equal(q8_0.dense()[0], 0.25 * signed)
    assert _row_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_8_bit_rows_round_to_the_nearest_of_255_steps():
    weights = {"a.weight": torch.tensor([[-1.27, 0.0, 0.634], [0.0, 0.0, 0.0]]), "n.weight": torch.ones(3)}
    made = to_int8(weights)
    assert isinstance(made["a.weight"], Groups)
    assert made["a.weight"].q.tolist() == [[[-127, 0, 63]], [[0, 0, 0]]]
    assert made["n.weight"] is weights["n.weight"]


def test_the_engine_is_chosen_and_refused(tmp_path, caplog):
    llama, gpt2 = tmp_path / "llama", tmp_path / "gpt2"
    for folder, kind in ((llama, "llama"), (gpt2, "gpt2")):
        tiny_target(kind).model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    assert load_target(str(llama), device="cpu").settings["name"] == "openvino"
    assert load_target(str(llama), device="cpu", engine="torch").settings == {"name": "torch"}
    assert load_target(str(llama), device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert load_target(str(gpt2), device="cpu").settings["name"] == "torch"
    assert "gpt2 runs on torch, since openvino does not know type gpt2" in caplog.text
    with refuses("engine:", "gpt2", "torch"):
        load_target(str(gpt2), device="cpu", engine="openvino")
    with refuses("engine:", "bfloat16", "torch"):
        load_target(str(llama), device="cpu", dtype="bfloat16", engine="openvino")
    with refuses("engine:", "onnx"):
        load_model(str(llama), "tiny", engine="onnx")


def test_threads_follow_the_container(tmp_path):
    file = tmp_path / "cpu.max"
    for text, expected in (("150000 100000\n", 2), ("max 100000\n", 1 << 30), ("400000 100000", 4)):
        file.write_text(text)
        assert _quota(file) == expected
    assert _quota(tmp_path / "none") == 1 << 30
