"""Faults that people met in tools like this one, each with the right value.

Those of replay and simulation are in test_sim_replay.py, test_sim_policies.py and test_sim_environments.py.
"""

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from metasd_live import cli, commands, compat
from metasd_live.compare import Difference, first_difference
from metasd_live.compare import plain_text as plain_text_of_the_package
from metasd_live.drafters import Arm, Draft, build_arms, parse_arm
from metasd_live.drafters.causal import CausalDrafter
from metasd_live.drafters.ngram import Ngram, NgramSettings, train_ngram
from metasd_live.ending import Ending
from metasd_live.engines.torch_model import TorchModel
from metasd_live.multi import MultiDrafter
from metasd_live.sampling import make_rule
from metasd_live.target import Target, load_target
from metasd_live.verify import RejectionText, Rule

from .live_cases import (
    VOCABULARY,
    Oracle,
    arms_of,
    oracle_arms,
    plain_text,
    reference_text,
    tiny_model,
    tiny_prompts,
    tiny_target,
    tiny_tokenizer,
)
from .sim_cases import refuses

LIMIT = 30
PROMPTS = tiny_prompts(4)


def ngram_arm(target, texts, length=5):
    return Arm("ngram", Ngram(train_ngram(texts, target.tokenizer_hash, NgramSettings(3, 1, 0.0))), length)


def total(output, key):
    return sum(played[key] for rounds in output.rounds for played in rounds)


def counts(output):
    """The rounds without their seconds."""
    return [[{k: v for k, v in r.items() if "seconds" not in k} for r in rounds] for rounds in output.rounds]


def written(target, arms, prompts=PROMPTS, policy="random", **options):
    options = {"max_new_tokens": LIMIT} | options
    return [g.token_ids for g in MultiDrafter(target, arms, policy).generate(prompts, **options).generations]


@torch.no_grad()
def fresh_logits(target, tokens):
    """Logits after `tokens`, without a cache."""
    return target.model(torch.tensor([tokens])).logits[0, -1]


# "n-gram drafting crashes without an EOS id"
@pytest.mark.parametrize("drafter", ["lookup", "ngram"])
def test_ngram_drafting_without_an_end_of_sequence_runs_to_the_budget(drafter):
    target = tiny_target()
    assert target.eos == frozenset()
    prompt = [5, 6, 7, 5, 6]  # its last bigram occurs earlier
    arm = ngram_arm(target, [[*prompt, 7, 5, 6, 7, 5]]) if drafter == "ngram" else arms_of(target, "lookup")[0]
    output = MultiDrafter(target, [arm]).generate(prompt, max_new_tokens=LIMIT)
    assert output.rounds[0][0]["drafted"] > 0
    assert output.generations[0].token_ids == reference_text(target, prompt, LIMIT)
    assert len(output.generations[0].token_ids) == LIMIT


# "stop string completed inside an accepted block is missed, or ids run past it"
def test_a_stop_string_inside_an_accepted_block_ends_text_ids_and_trace_together():
    target = tiny_target()
    prompt = PROMPTS[0]
    text = reference_text(target, prompt, LIMIT)
    stop = target.decode(text[2:4])[1:]  # two tokens, from within the first
    oracle = Arm("oracle", Oracle({tuple(prompt): text}, 0.0), 8)
    streamed = []
    recorder = MultiDrafter(target, [oracle, *arms_of(target, "none")], "fixed:oracle")
    output = recorder.generate(prompt, max_new_tokens=LIMIT, stop_strings=stop)
    assert output.generations[0].token_ids == text[:4]
    assert output.texts[0].endswith(stop)
    assert output.sequences.tolist() == [[*prompt, *text[:4]]]
    played = {"arm": "oracle", "drafted": 8, "accepted": 4, "emitted": 4, "missed": 0, "context": len(prompt)}
    assert counts(output)[0] == [played]
    trace = output.trace()
    assert trace.tokens.tolist() == text[:4]
    assert trace.expected_accepted()[:, 0].tolist() == [4, 3, 2, 1]  # each block may go to the text's end

    class Streamer:
        def put(self, value):
            streamed.extend(value.flatten().tolist())

        def end(self):
            streamed.append("end")

    recorder.generate(prompt, max_new_tokens=LIMIT, stop_strings=[stop], streamer=Streamer())
    assert streamed == [*prompt, *text[:4], "end"]


# "drafts of a deterministic drafter verified as if sampled"
def test_a_deterministic_draft_is_a_point_mass():
    p = torch.tensor([0.7, 0.2, 0.1])
    rule = RejectionText(Rule("rejection", 1.0), np.random.SeedSequence(0), 2)
    grid = ((np.arange(100) + 0.5) / 100).tolist()
    seen = Counter()
    for u in grid:
        for v in grid:
            rule.accept, rule.emit = [u, u], [v, v]
            verdict = rule.verify(p.log().expand(2, 3), Draft([2]), 0, (), 9)
            seen[verdict.accepted, verdict.emitted[0]] += 1
    assert seen[1, 2] == 1000  # accepted with p(x) = 0.1
    assert (0, 2) not in seen  # a rejected one is resampled from the others
    assert seen[0, 0] / 9000 == pytest.approx(7 / 9, abs=0.01)  # 0.7 / 0.9
    assert seen[0, 1] / 9000 == pytest.approx(2 / 9, abs=0.01)


# "logits processors not applied to every verified token"
def test_a_token_with_a_bias_of_minus_100_never_appears():
    target = tiny_target()
    text = reference_text(target, PROMPTS[1], LIMIT)
    token, count = Counter(text).most_common(1)[0]
    assert count >= 3  # greedy repeats it
    arms = [Arm("oracle", Oracle({tuple(PROMPTS[1]): text}, 0.0), 5), *arms_of(target, "lookup", "layers:1")]
    for policy in ("random", "fixed:0", "fixed:1", "fixed:2"):
        (found,) = written(target, arms, [PROMPTS[1]], policy, logit_bias={token: -100.0})
        assert token not in found
        assert found == plain_text(target, PROMPTS[1], LIMIT, [Bias(token)])
    (sampled,) = written(target, arms, [PROMPTS[1]], logit_bias={token: -100.0}, do_sample=True)
    assert token not in sampled


class Bias:
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.token] -= 100
        return scores


# "seed ignored; absent drafts consume random numbers"
@pytest.mark.parametrize("verification", ["rejection", "gumbel"])
def test_a_drafter_that_finds_nothing_changes_nothing_for_a_seed(verification):
    target = tiny_target()
    silent = ngram_arm(target, [[63, 62, 63]])
    prompts = [[2, 3, 4]]
    options = {"do_sample": True, "verification": verification, "logit_bias": {63: -100.0, 62: -100.0}}

    def run(arm, seed):
        output = MultiDrafter(target, [arm]).generate(prompts, max_new_tokens=LIMIT, seed=seed, **options)
        assert total(output, "drafted") == 0
        return output.sequences.tolist()

    plain = arms_of(target, "none")[0]
    assert run(silent, 3) == run(silent, 3) == run(plain, 3)
    assert run(silent, 3) != run(silent, 4)


# "verifier breaks argmax ties another way than plain greedy"
def test_ties_break_as_in_plain_decoding():
    model = tiny_model()
    best = Counter(reference_text(tiny_target(), PROMPTS[1], LIMIT)).most_common(1)[0][0]
    twin = (best + 9) % VOCABULARY
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    target = Target(model, tiny_tokenizer(), "tied")
    texts = [reference_text(target, prompt, LIMIT) for prompt in PROMPTS]
    assert min(best, twin) in chain(*texts)
    assert max(best, twin) not in chain(*texts)
    arms = [*oracle_arms(target, PROMPTS, LIMIT), *arms_of(target, "lookup", "layers:1")]
    assert written(target, arms) == texts
    assert written(target, arms, batch_size=3) == texts


# "greedy output differs because one-row and many-row forwards round differently"
def test_a_near_tie_is_told_from_a_mismatch_by_its_margin():
    model = tiny_model()
    prompt = PROMPTS[0]
    text = reference_text(tiny_target(), prompt, LIMIT)
    best, twin = text[3], (text[3] + 9) % VOCABULARY
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best] * (1 + 1e-7)
    target = Target(model, tiny_tokenizer(), "nearly tied")
    close = first_difference(target, prompt, text, [*text[:3], twin, 1, 2])
    assert (close.position, close.tokens) == (3, (best, twin))
    assert 0 <= close.margin < 1e-5
    assert close.near_tie
    assert "near-tie at new token 3" in str(close)
    wrong = first_difference(target, prompt, text, [*text[:5], (text[5] + 1) % VOCABULARY])
    logits = fresh_logits(target, prompt + text[:5])
    assert wrong.margin == pytest.approx(float(logits.max() - logits[(text[5] + 1) % VOCABULARY]), abs=1e-4)
    assert not wrong.near_tie
    assert "a mismatch at new token 5" in str(wrong)
    ended = first_difference(target, prompt, text, text[:7])
    assert (ended.position, ended.tokens, ended.near_tie) == (7, (text[7], None), False)
    json.dumps(ended.to_json(), allow_nan=False)
    assert first_difference(target, prompt, text, list(text)) is None
    with refuses("difference", "rejection"):
        first_difference(target, prompt, text, text[:2], Rule("rejection", 1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_texts_leave_plain_ones_at_near_ties_only(dtype):
    prompts = [[5] * 48, *PROMPTS]  # one word repeated
    target = Target(tiny_model().to(dtype), tiny_tokenizer(), "half")
    arms = arms_of(target, "lookup", "layers:1", "none")
    for options in ({}, {"batch_size": 5}):
        for prompt, text in zip(prompts, written(target, arms, prompts, **options), strict=True):
            found = first_difference(target, prompt, text, plain_text(target, prompt, LIMIT))
            assert found is None or found.near_tie, str(found)


def test_a_difference_in_processed_logits_has_their_margin():
    target, prompt = tiny_target(), PROMPTS[0]
    rule = make_rule(logit_bias={9: 50.0})
    text = plain_text_of_the_package(target, prompt, 4, rule)
    assert text == [9, 9, 9, 9]
    found = first_difference(target, prompt, text, [9, 8, 9, 9], rule)
    logits = fresh_logits(target, [*prompt, 9])
    assert found.margin == pytest.approx(float(logits[9] + 50 - logits[8]), abs=1e-4)
    assert not found.near_tie


def test_plain_texts_of_the_package_are_those_of_transformers():
    target = tiny_target()
    for prompt in PROMPTS:
        text = reference_text(target, prompt, LIMIT)
        stop = target.decode(text[4:6])
        assert plain_text_of_the_package(target, prompt, LIMIT) == text
        ending = Ending.of(target, [text[9]], [stop])
        expected = plain_text(target, prompt, LIMIT, eos=[text[9]], stops=[stop])
        assert plain_text_of_the_package(target, prompt, LIMIT, None, ending) == expected
    assert target.model.generation_config.max_new_tokens is None  # as it was


# "rollback leaves stale keys; the meaning of `crop` changed between versions"
@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding"])
def test_rollback_of_tiny_caches(kind):
    target = tiny_target(kind)
    ids = [5, 6, 7, 8]

    state = target.prefill(ids)
    assert state.length == 3
    target.rollback(state, 0)
    assert state.length == 3
    torch.testing.assert_close(target.forward(state, [8])[-1], fresh_logits(target, ids), atol=2e-5, rtol=1e-5)
    target.forward(state, [1, 2, 3, 4])
    target.rollback(state, 5)  # the 8 and what came after it
    assert state.length == 3
    torch.testing.assert_close(target.forward(state, [9])[-1], fresh_logits(target, [5, 6, 7, 9]), atol=2e-5, rtol=1e-5)
    target.rollback(state, 4)
    assert state.length == 0
    torch.testing.assert_close(target.forward(state, [9, 4])[-1], fresh_logits(target, [9, 4]), atol=2e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"0\.\.2"):
        target.rollback(state, 3)


# "sliding-window cache breaks once the window is reached"
def test_texts_past_a_sliding_window_equal_plain_ones():
    target = tiny_target("sliding")
    assert target.model.config.sliding_window == 8
    texts = [reference_text(target, prompt, 40) for prompt in PROMPTS]
    arms = [*oracle_arms(target, PROMPTS, 40), *arms_of(target, "lookup", "layers:1")]
    assert written(target, arms, max_new_tokens=40) == texts
    with refuses("batch size", "tiny-sliding", "mistral", "window"):
        written(target, arms, batch_size=2)


# "recurrent or hybrid models diverge silently after a rejection"
def recurrent_models():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    return {
        "mamba": lambda: MambaForCausalLM(MambaConfig(state_size=4, **sizes)),
        "rwkv": lambda: RwkvForCausalLM(RwkvConfig(attention_hidden_size=16, **sizes)),
        "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(layer_types=["conv", "full_attention"], **sizes, **attention)),
        "recurrent_gemma": lambda: RecurrentGemmaForCausalLM(
            RecurrentGemmaConfig(lru_width=16, head_dim=8, block_types=("recurrent", "attention"), **sizes, **attention)
        ),
        "qwen3_next": lambda: Qwen3NextForCausalLM(
            Qwen3NextConfig(
                head_dim=8,
                linear_num_value_heads=2,
                linear_num_key_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=8,
                shared_expert_intermediate_size=8,
                layer_types=["linear_attention", "full_attention"],
                **sizes,
                **attention,
            )
        ),
    }


@pytest.mark.parametrize("kind", recurrent_models())
def test_recurrent_and_hybrid_models_are_refused_by_name(kind):
    model = recurrent_models()[kind]()
    with refuses("my-model", kind, "rolled back"):
        Target(model, tiny_tokenizer(), "my-model")


def test_a_recurrent_drafter_is_refused_by_name(tmp_path):
    recurrent_models()["mamba"]().save_pretrained(tmp_path)
    with refuses(f"model:{tmp_path}", "mamba", "rolled back"):
        arms_of(tiny_target(), f"model:{tmp_path}")


# "same vocabulary size, other token ids"
def test_a_permuted_tokenizer_is_refused_naming_the_first_token(tmp_path):
    words = ["<unk>", "answer", *(f"w{i}" for i in range(2, VOCABULARY))]
    words[17], words[40] = words[40], words[17]
    tiny_model(seed=1).save_pretrained(tmp_path)
    tiny_tokenizer(words).save_pretrained(tmp_path)
    with refuses(f"model:{tmp_path}", "'w40'", "token 17", "'w17'"):
        MultiDrafter.from_pretrained(tiny_target(), [f"model:{tmp_path}"])
    tiny_tokenizer().save_pretrained(tmp_path)
    MultiDrafter.from_pretrained(tiny_target(), [f"model:{tmp_path}"])


# "drafter with a shorter context than the target crashes the run"
def short_drafter(positions=32):
    torch.manual_seed(4)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=positions, **sizes))
    return Arm("short", CausalDrafter(TorchModel(model, "short"), "short", VOCABULARY), 4)


@pytest.mark.parametrize("policy", ["metasd-ucb", "kl-ucb-trials", "thompson-trials", "hedge", "random", "fixed:short"])
def test_a_drafter_with_a_short_context_becomes_ineligible(policy):
    target = tiny_target()
    arms = [short_drafter(), *arms_of(target, "lookup")]
    output = MultiDrafter(target, arms, policy).generate([[7, 8] * 20], max_new_tokens=LIMIT)  # a prompt of 40
    assert output.generations[0].token_ids == reference_text(target, [7, 8] * 20, LIMIT)
    assert {played["arm"] for played in output.rounds[0]} == {"lookup"}
    assert not output.retired
    output = MultiDrafter(target, arms, policy).generate([[7, 8] * 10], max_new_tokens=LIMIT)  # outgrown on the way
    assert output.generations[0].token_ids == reference_text(target, [7, 8] * 10, LIMIT)
    assert not output.retired
    length = 20
    for played in output.rounds[0]:
        assert played["arm"] == "lookup" or length + 4 <= 32
        length += played["emitted"]
    assert "short" in {played["arm"] for played in output.rounds[0]}


def test_a_drafter_with_a_short_context_alone_leaves_plain_decoding():
    target = tiny_target()
    output = MultiDrafter(target, [short_drafter()]).generate([[7, 8] * 20, [7, 8]], max_new_tokens=LIMIT)
    assert [g.token_ids for g in output.generations] == [
        reference_text(target, p, LIMIT) for p in ([7, 8] * 20, [7, 8])
    ]
    assert sum(played["drafted"] for played in output.rounds[0]) == 0
    assert sum(played["drafted"] for played in output.rounds[1]) > 0


def test_a_target_whose_positions_are_all_taken():
    """Prompt and new tokens fill the positions to the last; what sets up the passes must not need more."""
    torch.manual_seed(4)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, initializer_range=0.4, **sizes)).eval()
    target = Target(model, tiny_tokenizer(), "short")
    prompt = [5, 6] * 7
    for new in (1, 2):
        assert written(target, arms_of(target, "lookup@8", "layers:1@8"), [prompt], max_new_tokens=new) == [
            plain_text(target, prompt, new)
        ]
    with refuses("16 positions", "14", "3"):
        written(target, arms_of(target, "lookup"), [prompt], max_new_tokens=3)


# "batches with left padding"
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_padded_on_the_left_equal_their_single_runs(kind):
    target = tiny_target(kind)
    arms = [*arms_of(target, "lookup", "layers:1"), *oracle_arms(target, PROMPTS, LIMIT)]
    prompts = [PROMPTS[0], PROMPTS[1][:2]]
    width = max(map(len, prompts))
    assert len(set(map(len, prompts))) == 2
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    drafter = MultiDrafter(target, arms[:2], "random")
    output = drafter.generate(ids, attention_mask=mask, max_new_tokens=LIMIT, batch_size=2)
    assert [g.token_ids for g in output.generations] == [reference_text(target, p, LIMIT) for p in prompts]
    assert output.sequences[:, :width].tolist() == ids.tolist()
    assert output.sequences[:, width:].tolist() == [g.token_ids for g in output.generations]


# "draft length not passed on, or its schedule survives into the next call"
def test_draft_lengths_are_honoured_and_calls_are_alike():
    target = tiny_target()
    drafter = MultiDrafter.from_pretrained(target, ["layers:1", "b=layers:1@3", "lookup"], "metasd-ucb", draft_length=5)
    first = drafter.generate(PROMPTS, max_new_tokens=LIMIT)
    longest = {
        arm: max(r["drafted"] for rounds in first.rounds for r in rounds if r["arm"] == arm)
        for arm in ("layers:1", "b")
    }
    assert longest == {"layers:1": 5, "b": 3}
    assert counts(drafter.generate(PROMPTS, max_new_tokens=LIMIT)) == counts(first)
    carrying = MultiDrafter.from_pretrained(
        target, ["layers:1", "b=layers:1@3", "lookup"], carry_over="keep", draft_length=5
    )
    before = carrying.generate(PROMPTS[:1], max_new_tokens=LIMIT)
    assert [r["arm"] for r in before.rounds[0][:3]] != [r["arm"] for r in before.rounds[0][1:4]]  # explores
    after = carrying.generate(PROMPTS[:1], max_new_tokens=LIMIT)
    assert counts(after) != counts(before)  # does not begin anew
    assert after.sequences.tolist() == before.sequences.tolist()


# "temperature near 0 gives inf or NaN"
@pytest.mark.parametrize("verification", ["rejection", "gumbel"])
def test_temperatures_near_0_are_greedy_in_drafter_and_verifier(verification):
    target = tiny_target()
    drafter = MultiDrafter(target, arms_of(target, "layers:1", "lookup"), "random")
    greedy = drafter.generate(PROMPTS, max_new_tokens=LIMIT)
    assert 0 < total(greedy, "accepted") < total(greedy, "drafted")
    near = drafter.generate(PROMPTS, max_new_tokens=LIMIT, do_sample=True, temperature=1e-6, verification=verification)
    zero = drafter.generate(PROMPTS, max_new_tokens=LIMIT, do_sample=True, temperature=0)
    assert counts(zero) == counts(greedy)
    assert counts(near) == counts(greedy)  # its drafts, too
    assert near.sequences.tolist() == zero.sequences.tolist() == greedy.sequences.tolist()


# "higher acceptance, lower speedup, unexplained"
def test_seconds_of_each_phase_stand_beside_acceptance(capsys, tmp_path):
    target = tiny_target()
    output = MultiDrafter(target, arms_of(target, "layers:1", "none"), "random").generate(PROMPTS, max_new_tokens=LIMIT)
    for played in (played for rounds in output.rounds for played in rounds):
        phases = [played[f"{phase}_seconds"] for phase in ("draft", "verify", "commit")]
        assert played["seconds"] == pytest.approx(sum(phases))
        assert min(phases) >= 0 < played["verify_seconds"]
        assert {"arm", "drafted", "accepted", "emitted", "missed"} <= set(played)
    drafting = [r["draft_seconds"] for rounds in output.rounds for r in rounds if r["arm"] == "layers:1"]
    idle = [r["draft_seconds"] for rounds in output.rounds for r in rounds if r["arm"] == "none"]
    assert np.median(drafting) > 10 * np.median(idle)  # a model's passes against nothing
    assert max(r["missed"] for rounds in output.rounds for r in rounds if r["arm"] == "layers:1") > 1  # catch-up
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    options = ["--drafter", "lookup", "--drafter", "none", "--max-new-tokens", "9", "w5 w6"]
    assert cli.main(["generate", "--target", str(tmp_path), *options]) == 0
    out = capsys.readouterr().out
    for column in ("accepted", "draft", "catch-up", "pass", "total s", "tokens/s"):
        assert column in out


# "code works with one version of transformers only"
@pytest.mark.parametrize("version", ["5.15.9", "6.0.0"])
def test_versions_that_are_not_supported_are_refused_early(monkeypatch, version):
    monkeypatch.setattr(compat, "version", lambda name: version)
    with refuses("transformers", compat.SUPPORTED, version):
        load_target("a folder that is not looked for")
    with refuses("transformers", version):
        Target(tiny_model(), tiny_tokenizer(), "tiny")


def test_the_installation_asks_for_the_supported_version():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'"transformers{compat.SUPPORTED}"' in text
    assert '"accelerate' in text  # for GGUF and device maps


def test_caches_are_cropped_by_negative_numbers():
    class Cache:
        def crop(self, tokens):
            cropped.append(tokens)

    cropped = []
    compat.crop(Cache(), 0)
    compat.crop(Cache(), 3)
    assert cropped == [-3]
    assert compat.forward_names(tiny_model())["cache"] in ("cache", "past_key_values")


# "an option is parsed and not forwarded; the benchmark measures plain decoding": test_live_cli.py; and what is unknown:
def test_unknown_drafters_and_policies_fail():
    target = tiny_target()
    with refuses("drafter", "lookingup"):
        MultiDrafter.from_pretrained(target, ["lookingup"])
    with refuses("policy", "best"):
        MultiDrafter.from_pretrained(target, ["lookup"], "best")
    output = MultiDrafter.from_pretrained(target, ["layers:1@2"], "fixed:0").generate([[5, 6]], max_new_tokens=8)
    trace = output.trace()
    assert (trace.arms, trace.drafters) == (("layers:1@2",), ("layers:1@2",))
    assert build_arms([parse_arm(trace.drafters[0])], target)[0].length == 2


# the same, from the command line
@pytest.fixture
def folder(tmp_path):
    target = tiny_target()
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


CHECK = ["--drafter", "layers:1", "--drafter", "lookup", "--policy", "random", "--max-new-tokens", "20", "--check"]


@pytest.mark.parametrize(
    "options", [[], ["--repetition-penalty", "1.3", "--logit-bias", "20:-9"], ["--stop", "w20", "--eos", "3"]]
)
def test_generate_checks_its_texts_against_plain_decoding(folder, capsys, options):
    capsys.readouterr()
    arguments = ["generate", "--target", folder, *CHECK, *options, "w5 w6"]
    assert cli.main(arguments) == 0
    assert "check: 1 of 1 texts equal plain decoding" in capsys.readouterr().out
    assert cli.main([*arguments, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["difference"] is None


def test_generate_tells_near_ties_from_mismatches(folder, capsys, monkeypatch):
    capsys.readouterr()
    right = commands.plain_text
    monkeypatch.setattr(commands, "plain_text", lambda *args: [*right(*args)[:7], 2, 3])
    arguments = ["generate", "--target", folder, *CHECK, "w5 w6"]
    assert cli.main(arguments) == 2
    assert "prompt: a mismatch at new token 7: " in capsys.readouterr().err
    monkeypatch.setattr(commands, "first_difference", lambda *args: Difference(7, (5, 2), 1e-6, 1e-6))
    assert cli.main(arguments) == 0
    assert "prompt: a near-tie at new token 7: 5 against 2, logit margin 1e-06" in capsys.readouterr().out
    assert cli.main(["generate", "--target", folder, *CHECK, "--temperature", "0.5", "w5"]) == 2
    assert "--check: expected temperature 0" in capsys.readouterr().err
