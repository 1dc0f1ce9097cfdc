"""`MultiDrafter`: the interface of transformers, its log and its trace, and drafters that fail."""

import warnings

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TextStreamer

from metasd_live.drafters import Arm, Draft
from metasd_live.multi import MultiDrafter
from metasd_live.target import Target
from metasd_sim import make_policy, simulate, traces
from metasd_sim.environments import ReplayEnvironment

from .live_cases import (
    SIZES,
    VOCABULARY,
    NotTwice,
    Oracle,
    arms_of,
    check_log,
    oracle_arms,
    plain_text,
    reference_text,
    tiny_model,
    tiny_prompts,
    tiny_target,
    tiny_tokenizer,
)
from .sim_cases import refuses

LIMIT = 20
PROMPTS = tiny_prompts(4, seed=2)
TEXTS = [reference_text(tiny_target(), prompt, LIMIT) for prompt in PROMPTS]


def drafter_of(*specs, policy="random", target=None, **options):
    return MultiDrafter.from_pretrained(
        target or tiny_target(), specs or ("layers:1", "lookup", "none"), policy, draft_length=5, **options
    )


def new_tokens(output):
    return [g.token_ids for g in output.generations]


def counts(output):
    """The rounds without their seconds."""
    return [[{k: v for k, v in r.items() if "seconds" not in k} for r in rounds] for rounds in output.rounds]


def drafted(output):
    return sum(played["drafted"] for rounds in output.rounds for played in rounds)


# --- inputs and outputs


def padded(prompts, token=0):
    width = max(map(len, prompts))
    ids = torch.tensor([[token] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


@pytest.mark.parametrize("batch_size", [1, 2, 9])
@pytest.mark.parametrize("eos", [[], [TEXTS[0][6], TEXTS[2][11]]])
def test_sequences_equal_those_of_transformers(batch_size, eos):
    target = tiny_target()
    ids, mask = padded(PROMPTS)
    settings = {"max_new_tokens": LIMIT, "do_sample": False, "pad_token_id": 3, "eos_token_id": eos or None}
    theirs = target.model.generate(ids, attention_mask=mask, **settings)
    ours = drafter_of().generate(ids, attention_mask=mask, batch_size=batch_size, **settings | {"eos_token_id": eos})
    assert ours.sequences.dtype == torch.int64
    assert torch.equal(ours.sequences, theirs)
    assert drafted(ours) > 0
    lengths = [len(text) for text in new_tokens(ours)]
    assert (min(lengths) < LIMIT) == bool(eos)
    assert ours.sequences.shape == (len(PROMPTS), ids.shape[1] + max(lengths))


def test_prompts_may_be_given_in_many_ways():
    target = tiny_target()
    drafter = drafter_of()
    prompt, text = PROMPTS[0], TEXTS[0]
    words = target.tokenizer.decode(prompt)
    encoded = target.tokenizer([words], return_tensors="pt")
    one = [
        [prompt],
        prompt,
        tuple(prompt),
        torch.tensor([prompt]),
        torch.tensor(prompt),
        np.array([prompt]),
        np.array(prompt),
        [np.array(prompt)],
        words,
        [words],
    ]
    for inputs in one:
        output = drafter.generate(inputs, max_new_tokens=LIMIT)
        assert output.sequences.tolist() == [[*prompt, *text]]
        assert output.texts == [target.decode(text)]
    for named in (
        {"input_ids": torch.tensor([prompt])},
        {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]},
        {"input_ids": [prompt], "attention_mask": [[1] * len(prompt)]},
        {"input_ids": torch.tensor(prompt), "attention_mask": torch.ones(len(prompt), dtype=torch.int64)},
        {"input_ids": [[9, 9, *prompt]], "attention_mask": [[0, 0] + [1] * len(prompt)]},
    ):
        assert new_tokens(drafter.generate(**named, max_new_tokens=LIMIT)) == [text]
    several = drafter.generate([target.tokenizer.decode(p) for p in PROMPTS], max_new_tokens=LIMIT)
    assert new_tokens(several) == TEXTS
    width = max(map(len, PROMPTS))
    expected = [[0] * (width - len(p)) + p + text for p, text in zip(PROMPTS, TEXTS, strict=True)]
    assert several.sequences.tolist() == expected
    ragged = drafter.generate(PROMPTS, max_new_tokens=LIMIT, pad_token_id=7).sequences[:, :width]
    assert ragged.tolist() == [[7] * (width - len(p)) + p for p in PROMPTS]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["inputs", "none"]),
        ({"inputs": []}, ["inputs", "neither"]),
        ({"inputs": [[]]}, ["prompt", "one at least"]),
        ({"inputs": [[5], "w5"]}, ["inputs", "neither"]),
        ({"inputs": [[5], 6]}, ["inputs", "neither"]),
        ({"inputs": [[5.5]]}, ["inputs", "neither"]),
        ({"inputs": [[64]]}, ["prompt", "below 64"]),
        ({"inputs": [[-1]]}, ["prompt", "below 64"]),
        ({"inputs": ""}, ["prompt", "empty"]),
        ({"inputs": [[5]], "input_ids": [[5]]}, ["inputs", "both"]),
        ({"inputs": "w5", "attention_mask": [[1]]}, ["attention_mask", "texts"]),
        ({"inputs": [[5, 6]], "attention_mask": [[1]]}, ["attention_mask", "shape"]),
        ({"inputs": [[5, 6]], "attention_mask": [[1, 0]]}, ["attention_mask", "left"]),
        ({"inputs": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]}, ["attention_mask", "left"]),
        ({"inputs": [[5, 6]], "attention_mask": [[0, 0]]}, ["prompt", "one at least"]),
        ({"inputs": [[5]], "max_new_tokens": 0}, ["max new tokens", "0"]),
        ({"inputs": [[5] * 250], "max_new_tokens": 7}, ["256 positions"]),
        ({"inputs": [[5]], "temperature": 0.7}, ["temperature", "do_sample=True"]),
        ({"inputs": [[5]], "do_sample": True, "temperature": -1.0}, ["temperature", "-1"]),
        ({"inputs": [[5]], "verification": "gumbel"}, ["temperature", "gumbel"]),
        ({"inputs": [[5]], "do_sample": True, "verification": "typical"}, ["verification", "typical"]),
        ({"inputs": [[5]], "eos_token_id": 5.5}, ["eos", "whole numbers"]),
        ({"inputs": [[5]], "stop_strings": [""]}, ["stop strings", "not empty"]),
        ({"inputs": [[5]], "stop_strings": [5]}, ["stop strings"]),
        ({"inputs": [[5]], "batch_size": 0}, ["batch size", "0"]),
        ({"inputs": [[5]], "draft": [True, False]}, ["drafting", "1 prompts", "2"]),
        ({"inputs": [[5], [6]], "streamer": object()}, ["streamer", "one prompt", "2"]),
        ({"inputs": [[5]], "num_beams": 4}, ["num_beams", "not supported"]),
        ({"inputs": [[5]], "assistant_model": None}, ["assistant_model", "not supported"]),
        ({"inputs": [[5]], "max_length": 9}, ["max_length", "not supported"]),
        ({"inputs": [[5]], "token_type_ids": [[0]]}, ["token_type_ids", "not supported"]),
        ({"inputs": [[5]], "seed": -1}, ["seed", "-1"]),
    ],
)
def test_arguments_that_are_refused(arguments, words):
    with refuses(*words):
        drafter_of().generate(**arguments)


def test_pools_that_are_refused():
    target = tiny_target()
    with refuses("drafters", "none"):
        MultiDrafter(target, [])
    with refuses("different names", "lookup"):
        drafter_of("lookup", "lookup")
    with refuses("carry_over", "some"):
        drafter_of(carry_over="some")
    with refuses("dtype", "int8"):
        MultiDrafter.from_pretrained("nowhere", dtype="int8")


def test_drafters_of_your_own_stand_beside_named_ones():
    oracle = Arm("mine", Oracle({tuple(p): text for p, text in zip(PROMPTS, TEXTS, strict=True)}, 0.0), 4)
    drafter = MultiDrafter.from_pretrained(tiny_target(), ["lookup@2", oracle, "plain=none"], "random")
    assert [arm.name for arm in drafter.arms] == ["lookup@2", "mine", "plain"]
    output = drafter.generate(PROMPTS, max_new_tokens=LIMIT)
    assert new_tokens(output) == TEXTS
    assert {r["accepted"] for rounds in output.rounds for r in rounds if r["arm"] == "mine"} >= {4}


# --- streaming and callbacks


class Streamer:
    def __init__(self):
        self.tokens, self.pieces, self.ended = [], 0, False

    def put(self, value):
        assert not self.ended
        self.tokens += value.flatten().tolist()
        self.pieces += 1

    def end(self):
        self.ended = True


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"stop_strings": ["w20"]}, {"batch_size": 4}])
def test_a_streamer_gets_all_tokens_as_they_come(options):
    streamer = Streamer()
    output = drafter_of().generate(PROMPTS[1:2], max_new_tokens=LIMIT, streamer=streamer, **options)
    assert streamer.tokens == output.sequences[0].tolist() == [*PROMPTS[1], *new_tokens(output)[0]]
    assert streamer.pieces == 1 + len(output.rounds[0])  # the prompt, then each round
    assert streamer.ended


def test_the_streamer_of_transformers_prints_the_text(capsys):
    target = tiny_target()
    streamer = TextStreamer(target.tokenizer, skip_prompt=True)
    output = drafter_of().generate([PROMPTS[1]], max_new_tokens=LIMIT, streamer=streamer)
    assert capsys.readouterr().out.strip() == target.tokenizer.decode(new_tokens(output)[0])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_callbacks_see_every_round(batch_size):
    seen = []
    output = drafter_of().generate(
        PROMPTS,
        max_new_tokens=LIMIT,
        batch_size=batch_size,
        on_round=lambda rows, rounds: seen.append((rows.tolist(), rounds.emitted.tolist())),
    )
    assert sum(sum(emitted) for _, emitted in seen) == sum(map(len, TEXTS))
    assert sum(len(rows) for rows, _ in seen) == sum(map(len, output.rounds))
    assert max(len(rows) for rows, _ in seen) == batch_size


def test_rows_of_a_batch_share_passes_and_leave_when_they_are_done(monkeypatch):
    target = tiny_target()
    passes = []
    forward = target.forward_rows
    monkeypatch.setattr(
        target, "forward_rows", lambda state, ids: passes.append([len(row) for row in ids]) or forward(state, ids)
    )
    eos = TEXTS[0][6]
    output = drafter_of().generate(PROMPTS, max_new_tokens=LIMIT, eos_token_id=eos, batch_size=4)
    assert len(passes) == max(map(len, output.rounds))
    assert [len(widths) for widths in passes] == sorted((len(widths) for widths in passes), reverse=True)
    assert len(passes[0]) == 4 > len(passes[-1])
    assert sum(map(sum, passes)) == drafted(output) + sum(map(len, output.rounds))  # one token more than drafted


# --- seeds and carry-over


@pytest.mark.parametrize("verification", ["rejection", "gumbel"])
def test_seeds_fix_sampled_texts(verification):
    options = {"max_new_tokens": LIMIT, "do_sample": True, "temperature": 0.8, "verification": verification}
    drafter = drafter_of()
    first = drafter.generate(PROMPTS, seed=3, **options)
    assert counts(drafter.generate(PROMPTS, seed=3, **options)) == counts(first)
    assert new_tokens(drafter.generate(PROMPTS, seed=3, **options)) == new_tokens(first)
    assert new_tokens(drafter.generate(PROMPTS, seed=4, **options)) != new_tokens(first)
    again = drafter.generate([PROMPTS[0], PROMPTS[0]], seed=3, **options)
    assert new_tokens(again)[0] == new_tokens(first)[0] != new_tokens(again)[1]  # each prompt has its own
    if verification == "gumbel":  # whatever is drafted, and in batches
        assert new_tokens(drafter_of("none").generate(PROMPTS, seed=3, **options)) == new_tokens(first)
        assert new_tokens(drafter.generate(PROMPTS, seed=3, batch_size=3, **options)) == new_tokens(first)


def test_without_drafts_sampled_batches_equal_single_runs():
    options = {"max_new_tokens": LIMIT, "do_sample": True, "seed": 5}
    single = drafter_of("none").generate(PROMPTS, **options)
    assert new_tokens(drafter_of("none").generate(PROMPTS, batch_size=3, **options)) == new_tokens(single)
    assert new_tokens(drafter_of("lookup").generate(PROMPTS, draft=False, **options)) == new_tokens(single)


def test_a_policy_keeps_what_it_learnt_only_if_asked():
    arms = oracle_arms(tiny_target(), PROMPTS, LIMIT, 4)

    def explored(drafter, calls=2):
        """Rounds of the worst arm in each call."""
        found = []
        for _ in range(calls):
            output = drafter.generate(PROMPTS[:1], max_new_tokens=LIMIT)
            found.append(sum(r["arm"] == "oracle-1.0" for r in output.rounds[0]))
        return found

    keeping = MultiDrafter(tiny_target(), arms, "kl-ucb-trials", carry_over="keep")
    first, second = explored(keeping)
    assert first >= 1 > second  # it knows by then
    forgetting = explored(MultiDrafter(tiny_target(), arms, "kl-ucb-trials"))
    assert forgetting[0] == forgetting[1] >= 1
    with refuses("carry over", "batch size 1"):
        keeping.generate(PROMPTS, batch_size=2)
    half = MultiDrafter(tiny_target(), arms, "kl-ucb-trials", carry_over="discount:0")
    assert explored(half)[1] >= 1  # keeps nothing


def test_bandits_carry_over_between_the_prompts_of_a_call():
    """Calls with one prompt each, or one call with all, are the same stream for the bandit."""
    arms = oracle_arms(tiny_target(), PROMPTS, LIMIT, 4)
    together = MultiDrafter(tiny_target(), arms, "kl-ucb-trials", carry_over="keep")
    at_once = [r["arm"] for rounds in together.generate(PROMPTS, max_new_tokens=LIMIT).rounds for r in rounds]
    one_by_one = MultiDrafter(tiny_target(), arms, "kl-ucb-trials", carry_over="keep")
    calls = [one_by_one.generate([prompt], max_new_tokens=LIMIT) for prompt in PROMPTS]
    assert [r["arm"] for output in calls for rounds in output.rounds for r in rounds] == at_once


# --- the log and the trace


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"do_sample": True}, {"draft": [True, False] * 2}])
def test_counts_add_up_to_the_outputs(options):
    drafter = drafter_of("layers:1", "lookup@3", "none")
    output = drafter.generate(PROMPTS, max_new_tokens=LIMIT, **options)
    lengths = {"layers:1": 5, "lookup@3": 3, "none": 0}
    for generation, rounds, prompt in zip(output.generations, output.rounds, PROMPTS, strict=True):
        check_log(rounds, len(generation.token_ids), lengths)
        assert generation.prompt_tokens == len(prompt)
        total = generation.prefill_seconds + sum(played["seconds"] for played in rounds)
        assert generation.seconds == pytest.approx(total)


@pytest.mark.parametrize(("policy", "carry_over"), [("thompson-trials", "none"), ("metasd-ucb:reward=trials", "keep")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop_strings": ["w20 w4"], "eos_token_id": [TEXTS[3][5]]},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {20: -9.0}},
        {"logits_processor": [NotTwice()]},
    ],
)
def test_replaying_the_trace_gives_the_rounds_again(policy, carry_over, options):
    drafter = drafter_of(policy=policy, carry_over=carry_over)
    output = drafter.generate(PROMPTS, max_new_tokens=LIMIT, seed=6, **options)
    trace = output.trace()
    trace.check()
    assert trace.tokens.tolist() == [token for text in new_tokens(output) for token in text]
    assert [query.prompt_tokens for query in trace.queries] == [len(prompt) for prompt in PROMPTS]
    replayed = simulate(
        make_policy(policy, arms=trace.arms), ReplayEnvironment(trace), seed=6, carry_over=carry_over, history=True
    ).history
    expected = [
        (q, r["arm"], r["drafted"], r["accepted"], r["emitted"])
        for q, rounds in enumerate(counts(output))
        for r in rounds
    ]
    rounds = replayed.rounds
    arms = [trace.arms[arm] for arm in rounds.arm]
    columns = (replayed.query, arms, rounds.drafted, rounds.accepted, rounds.emitted)
    assert [tuple(row) for row in zip(*columns, strict=True)] == expected
    assert sum(row[3] for row in expected) > 0


def test_a_trace_is_a_file_with_the_settings(tmp_path):
    output = drafter_of().generate(
        PROMPTS,
        max_new_tokens=LIMIT,
        do_sample=True,
        temperature=0.5,
        top_k=9,
        eos_token_id=[5],
        stop_strings="w9",
        seed=2,
    )
    trace = output.trace()
    traces.write(trace, tmp_path / "t.safetensors")
    found = traces.read(tmp_path / "t.safetensors")
    assert found.verification == "rejection"
    settings = {key: found.provenance[key] for key in ("temperature", "processors", "eos", "stop_strings", "seed")}
    assert settings == {
        "temperature": 0.5,
        "processors": ["top_k=9"],
        "eos": [5],
        "stop_strings": ["w9"],
        "seed": 2,
    }
    np.testing.assert_array_equal(found.tokens, [token for text in new_tokens(output) for token in text])
    with refuses("trace", "gumbel"):
        drafter_of().generate(PROMPTS, max_new_tokens=4, do_sample=True, verification="gumbel").trace()


# --- vocabularies, devices, dtypes


def saved_drafter(folder, rows):
    """A drafter's directory with the target's tokenizer, and as many rows in its matrices."""
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": rows, "num_hidden_layers": 1})).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return f"d=model:{folder}"


@pytest.mark.parametrize(("target_rows", "rows"), [(64, 80), (80, 64), (72, 80), (80, 72), (64, 64)])
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"do_sample": True}])
def test_padded_vocabularies_in_both_directions(tmp_path, target_rows, rows, options):
    torch.manual_seed(0)
    target = Target(LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": target_rows})), tiny_tokenizer(), "padded")
    spec = saved_drafter(tmp_path, rows)
    output = drafter_of(spec, "none", target=target, policy="random").generate(PROMPTS, max_new_tokens=LIMIT, **options)
    assert not output.retired
    assert drafted(output) > 0
    if "do_sample" not in options:
        assert new_tokens(output) == [plain_text(target, prompt, LIMIT) for prompt in PROMPTS]
    longer = drafter_of(spec, target=target, policy="fixed:d").generate(
        PROMPTS, max_new_tokens=LIMIT, logit_bias={target_rows - 1: 30.0}
    )  # the target writes its last row alone
    assert new_tokens(longer) == [[target_rows - 1] * LIMIT] * len(PROMPTS)


def test_a_vocabulary_of_another_size_without_a_tokenizer_is_refused(tmp_path):
    saved_drafter(tmp_path, 80)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with refuses("vocabulary of 64", "80"):
        drafter_of(f"model:{tmp_path}")


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_directories_in_any_dtype_and_a_device_map(tmp_path, dtype, device_map):
    tiny_model().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    spec = saved_drafter(tmp_path / "drafter", VOCABULARY)
    drafter = MultiDrafter.from_pretrained(
        str(tmp_path / "target"), [spec, "layers:1", "none"], "random", dtype=dtype, device_map=device_map, device="cpu"
    )
    expected = "float32" if dtype == "auto" else dtype
    assert str(drafter.target.dtype) == str(drafter.arms[0].drafter.model.dtype) == f"torch.{expected}"
    for options in ({}, {"do_sample": True}, {"batch_size": 4}):
        output = drafter.generate(PROMPTS, max_new_tokens=LIMIT, **options)
        assert [len(text) for text in new_tokens(output)] == [LIMIT] * len(PROMPTS)
        assert not output.retired
        if expected == "float32" and not options.get("do_sample"):
            assert new_tokens(output) == TEXTS


# --- drafters that fail


class Bad:
    """Works as `draft(context, limit, rule, position)` says, from its second round on."""

    name, point_mass = "bad", True

    def __init__(self, misbehave, at_open=False):
        self.misbehave, self.at_open, self.opened, self.rounds = misbehave, at_open, 0, 0

    def open(self, prompt):
        self.opened += 1
        if self.at_open:
            raise self.misbehave
        return self

    def draft(self, context, limit, rule, position):
        self.rounds += 1
        return Draft([1][:limit]) if self.rounds == 1 else self.misbehave(limit)


def fails(error):
    def misbehave(limit):
        raise error

    return misbehave


def law(value=None, rows=None, width=VOCABULARY, token=1):
    """A draft of `limit` tokens with uniform laws, or others."""

    def misbehave(limit):
        laws = torch.full((limit if rows is None else rows, width), 1 / VOCABULARY if value is None else value)
        return Draft([token] * limit, laws)

    return misbehave


def no_chance(limit):
    laws = torch.zeros(limit, VOCABULARY)
    laws[:, 2] = 1.0
    return Draft([1] * limit, laws)


def negative(limit):
    laws = torch.zeros(limit, VOCABULARY)
    laws[:, 1], laws[:, 2], laws[:, 3] = 1.0, 0.5, -0.5
    return Draft([1] * limit, laws)


FAILURES = {
    "raises": fails(RuntimeError("broken\nin many lines")),
    "raises an assertion": fails(AssertionError()),
    "runs out of memory": fails(torch.OutOfMemoryError("no memory")),
    "divides by zero": lambda limit: 1 / 0,
    "token past the vocabulary": lambda limit: Draft([VOCABULARY] * limit),
    "negative token": lambda limit: Draft([-1] * limit),
    "fractional token": lambda limit: Draft([1.5] * limit),
    "text": lambda limit: Draft(["w1"] * limit),
    "nothing": lambda limit: None,
    "a list": lambda limit: [1] * limit,
    "no list": lambda limit: Draft(7),
    "laws too few": law(rows=0),
    "laws too narrow": law(1 / (VOCABULARY - 1), width=VOCABULARY - 1),
    "laws of NaN": law(float("nan")),
    "laws that sum to 2": law(2 / VOCABULARY),
    "laws of zero": law(0.0),
    "law without the token": no_chance,
    "law below zero": negative,
    "laws that are no tensor": lambda limit: Draft([1] * limit, [[1.0]] * limit),
}


OPTIONS = [{"batch_size": 3}, {"do_sample": True, "verification": "gumbel"}, {"do_sample": True}]
SOME = ("raises", "negative token", "nothing", "laws of NaN", "law without the token")


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in FAILURES), *((name, how) for name in SOME for how in OPTIONS)]
)
def test_a_drafter_that_fails_is_retired_and_the_output_stays(name, options):
    bad = Bad(FAILURES[name])
    drafter = MultiDrafter(tiny_target(), [Arm("bad", bad, 3), *arms_of(tiny_target(), "none")], "random")
    with pytest.warns(RuntimeWarning, match="drafter bad is retired") as caught:
        output = drafter.generate(PROMPTS, max_new_tokens=LIMIT, seed=1, **options)
    assert len(caught) == 1
    assert list(output.retired) == ["bad"]
    assert "\n" not in output.retired["bad"]
    assert bad.rounds == 2  # the one that failed was its last
    arms = [r["arm"] for r in output.rounds[-1]]
    assert arms == ["none"] * len(arms) or options.get("batch_size")  # none of the later prompts tries it
    if options.get("verification") == "gumbel":
        plain = drafter_of("none").generate(PROMPTS, max_new_tokens=LIMIT, seed=1, **options)
        assert new_tokens(output) == new_tokens(plain)
    if "do_sample" not in options:
        assert new_tokens(output) == TEXTS
    for generation, rounds in zip(output.generations, output.rounds, strict=True):
        check_log(rounds, len(generation.token_ids), {"bad": 3, "none": 0})
    with refuses("trace", "bad", "retired"):
        output.trace()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_drafter_that_does_not_open_is_retired(batch_size):
    bad = Bad(OSError("no such file"), at_open=True)
    drafter = MultiDrafter(tiny_target(), [Arm("bad", bad, 3), *arms_of(tiny_target(), "lookup")], "fixed:bad")
    with pytest.warns(RuntimeWarning, match="retired: OSError: no such file") as caught:
        output = drafter.generate(PROMPTS, max_new_tokens=LIMIT, batch_size=batch_size)
    assert (len(caught), bad.opened) == (1, 1)
    assert output.retired == {"bad": "OSError: no such file"}
    assert new_tokens(output) == TEXTS
    assert {r["arm"] for rounds in output.rounds for r in rounds} == {"lookup"}


def test_when_every_drafter_has_failed_decoding_is_plain():
    drafter = MultiDrafter(tiny_target(), [Arm(str(i), Bad(fails(ValueError("no"))), 3) for i in range(2)], "random")
    with pytest.warns(RuntimeWarning, match="retired"):
        output = drafter.generate(PROMPTS, max_new_tokens=LIMIT)
    assert set(output.retired) == {"0", "1"}
    assert new_tokens(output) == TEXTS
    assert all(r["drafted"] == 0 for r in output.rounds[-1])


class BadLaw(Bad):
    """Has a law, which full information asks for."""

    def __init__(self, logits):
        super().__init__(lambda limit: Draft())
        self.answer = logits

    def logits(self, context, count):
        return self.answer(count)


@pytest.mark.parametrize(
    "logits",
    [
        lambda count: torch.full((count, VOCABULARY), float("nan")),
        lambda count: torch.full((count, VOCABULARY), -torch.inf),
        lambda count: torch.zeros(count, 3),
        lambda count: 1 / 0,
    ],
)
def test_a_drafter_that_fails_where_all_are_scored_is_retired(logits):
    """Policies with full information ask every drafter, not only the one that plays."""
    arms = [Arm("bad", BadLaw(logits), 3), *arms_of(tiny_target(), "lookup", "layers:1")]
    with pytest.warns(RuntimeWarning, match="retired"):
        output = MultiDrafter(tiny_target(), arms, "hedge").generate(PROMPTS, max_new_tokens=LIMIT)
    assert list(output.retired) == ["bad"]
    assert new_tokens(output) == TEXTS


@pytest.mark.parametrize("policy", ["fixed:0", "hedge"])
def test_a_drafter_cannot_write_into_the_text(policy):
    class Scribbler(Bad):
        def open(self, prompt):
            prompt.clear()
            return self

        def draft(self, context, limit, rule, position):
            context += [9, 9]
            return Draft([1] * limit)

        def logits(self, context, count):
            context.pop()
            return torch.zeros(count, VOCABULARY)

    prompts = [list(prompt) for prompt in PROMPTS]
    output = MultiDrafter(tiny_target(), [Arm("scribbler", Scribbler(None), 3)], policy).generate(
        prompts, max_new_tokens=LIMIT
    )
    assert new_tokens(output) == TEXTS
    assert prompts == PROMPTS
    assert not output.retired


def test_a_good_drafter_is_not_retired():
    """What the failures above have in common is the fault, not the shape: tensors and numpy numbers are fine."""
    for good in (
        lambda limit: Draft([np.int64(1)] * limit),
        lambda limit: Draft(list(torch.ones(limit, dtype=torch.int64))),
        lambda limit: Draft([]),
        lambda limit: Draft([], torch.zeros(0, VOCABULARY)),
        law(),
    ):
        arms = [Arm("good", Bad(good), 3), *arms_of(tiny_target(), "none")]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output = MultiDrafter(tiny_target(), arms, "random").generate(PROMPTS, max_new_tokens=LIMIT)
        assert not output.retired
        assert new_tokens(output) == TEXTS
