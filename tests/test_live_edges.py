"""Inputs at the edge of live decoding: text, ids, settings that travel with models, constraints, numbers, streams."""

import json
import math
import os
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    TextIteratorStreamer,
)

from metasd_live import cli, commands, engines
from metasd_live.compare import plain_text as their_text
from metasd_live.drafters import Arm, Draft, parse_arm
from metasd_live.drafters.causal import CausalDrafter
from metasd_live.drafters.head import read_vocabulary
from metasd_live.drafters.ngram import NgramSettings, read_ngram, train_ngram, write_ngram
from metasd_live.drafters.suffix import REMEMBERED, Memory, SuffixLookup
from metasd_live.ending import Ending, end_ids
from metasd_live.engines.torch_model import TorchModel
from metasd_live.files import revision_of
from metasd_live.multi import MultiDrafter
from metasd_live.outputs import generate_outputs, read_outputs, to_lines
from metasd_live.processors import answers_any_text
from metasd_live.prompts import Prompt, prompt_features, read_prompts
from metasd_live.record import Recorder
from metasd_live.sampling import make_rule, recorded_rule, settings_of
from metasd_live.target import Target
from metasd_live.train import text_sequences
from metasd_live.verify import GreedyText, LogitsError, Rule, sample
from metasd_sim import simulate
from metasd_sim.environments import ReplayEnvironment
from metasd_sim.policies import Router, RouterWeights

from .live_cases import (
    Oracle,
    arms_of,
    plain_text,
    reference_text,
    tiny_model,
    tiny_prompts,
    tiny_target,
    tiny_tokenizer,
)
from .sim_cases import refuses
from .test_live_outputs import OUTPUTS
from .test_sim_edges import ENDS_ELSEWHERE, foreign_files

LIMIT = 16
PROMPTS = tiny_prompts(3, seed=2)


def target_of(**settings):
    """A target of its own, with these generation settings."""
    model = tiny_model()
    model.generation_config = GenerationConfig(**settings)
    return Target(model, tiny_tokenizer(), "tiny")


def drafter_of(target, *specs, policy="random", **options):
    return MultiDrafter(target, arms_of(target, *(specs or ("layers:1", "lookup"))), policy, **options)


# --- text


def test_prompts_keep_every_character(tmp_path):
    path = tmp_path / "p.jsonl"
    raw = json.dumps({"id": "a", "prompt": ENDS_ELSEWHERE}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{raw}\r\n\r\n{ENDS_ELSEWHERE}\r\nlast".encode())
    assert [prompt.text for prompt in read_prompts([str(path)])] == [ENDS_ELSEWHERE, ENDS_ELSEWHERE, "last"]
    assert read_prompts([str(path)])[1].id == "p-3"


def test_outputs_and_training_texts_keep_every_character(tmp_path):
    path = tmp_path / "o.jsonl"
    line = json.dumps({"id": ENDS_ELSEWHERE, "category": "a", "prompt_ids": [1], "token_ids": [2]}, ensure_ascii=False)
    path.write_bytes(to_lines(OUTPUTS, "a").replace("\n", "\r\n").encode() + line.encode())
    assert [output.id for output in read_outputs(str(path), "a")] == ["1", "2", "3", ENDS_ELSEWHERE]
    path.write_bytes(b"\xef\xbb\xbfw2 w3\r\nw4")
    assert text_sequences(str(path), tiny_target()) == [[2, 3, 4]]


@pytest.mark.parametrize("key", ["id", "prompt", "category", "split"])
def test_half_a_character_is_refused_with_its_line(tmp_path, key, capsys):
    path = tmp_path / "p.jsonl"
    whole = {"id": "a", "prompt": "b", "category": "c", "split": "d"}
    path.write_text(json.dumps(whole) + "\n" + json.dumps(whole | {key: "x\ud83d"}))
    with refuses("p.jsonl, line 2", "half of one", "ud83d"):
        read_prompts([str(path)])
    with refuses("half of one", "udcff"):
        Prompt("a", "\udcff")
    target = tiny_target()
    with refuses("prompt", "half of one"):
        drafter_of(target).generate("w2 \ud83d")
    with refuses("stop strings", "half of one"):
        drafter_of(target).generate("w2", stop_strings=["\ud83d"])
    assert cli.main(["generate", "--target", "nowhere", "--drafter", "lookup", "a\udcff"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_stop_strings_of_the_command_line_name_line_feeds():
    known = {r"\n\n": "\n\n", r"a\tb": "a\tb", r"\r\n": "\r\n", r"\\n": r"\n", r"C:\dir": r"C:\dir", "a": "a"}
    parser = cli.build_parser()
    for typed, meant in known.items():
        arguments = parser.parse_args(["generate", "--target", "t", f"--stop={typed}", "p"])
        assert arguments.stop == [meant]


# --- files and specifications


def test_files_of_another_kind_are_refused_by_every_reader(tmp_path):
    for path in (*foreign_files(tmp_path), tmp_path, tmp_path / "absent"):
        with refuses(str(path), "expected"):
            read_ngram(path)
        with refuses(str(path), "vocabulary"):
            read_vocabulary(path, "a")


def test_a_number_after_at_is_a_length_unless_a_file_has_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()

    def read(text):
        spec = parse_arm(text).drafter
        return spec.argument, spec.vocabulary, spec.length

    assert read("model:ckpt/step@32") == ("ckpt/step", "", 32)
    (tmp_path / "ckpt" / "step@32").mkdir()
    assert read("model:ckpt/step@32") == ("ckpt/step@32", "", None)
    assert read("model:ckpt/step@32@5") == ("ckpt/step@32", "", 5)
    assert read('model:"ckpt/step"@32') == ("ckpt/step", "", 32)
    assert read('model:"ckpt/other@32"') == ("ckpt/other@32", "", None)
    assert read("model:org/name@v1.5") == ("org/name@v1.5", "", None)
    assert read("model:org/name@v1.5@4") == ("org/name@v1.5", "", 4)
    (tmp_path / "2@4").touch()
    assert read("layers:2@4") == ("2", "", 4)  # of a number of layers there is no file
    assert read('layers:2,vocabulary="a,b@3"@4') == ("2", "a,b@3", 4)
    assert read('eagle:"a,vocabulary=b",vocabulary=c') == ("a,vocabulary=b", "c", None)
    assert read("ngram:a,b (1.safetensors@3") == ("a,b (1.safetensors", "", 3)
    chain = parse_arm('x=chain(ngram:"a(1,b@2.safetensors"@3,lookup)@5').drafter
    assert [(part.kind, part.argument, part.length) for part in chain.parts] == [
        ("ngram", "a(1,b@2.safetensors", 3),
        ("lookup", "", None),
    ]
    assert chain.length == 5
    for text in ("chain(ngram:a(1.safetensors,lookup)", 'model:"a', 'model:"a"b', "chain(ngram:a,b.safetensors)"):
        with refuses("in quotes"):
            parse_arm(text)
    for text in ("model:a@32", 'model:"a,b"@3', "lookup@5"):  # what a trace writes is read again
        spec = parse_arm(text).drafter
        assert parse_arm(f"{spec.text}@{spec.length}").drafter == spec


def test_a_file_of_any_name_makes_a_drafter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = tiny_target()
    name = "a, (b@2"
    write_ngram(train_ngram([[2, 3, 4] * 9], target.tokenizer_hash, NgramSettings()), name)
    for spec in (f"ngram:{name}", f'ngram:"{name}"@5', f'chain(ngram:"{name}",lookup)'):
        (arm,) = arms_of(target, spec)
        assert arm.drafter.open([2]).draft([2, 3, 4, 2], 3, GreedyText(), 0).tokens == [3, 4, 2]
        assert arm.files == (name,)


def test_revisions_of_a_hub(tmp_path, monkeypatch):
    assert revision_of("org/name@v1") == ("org/name", "v1")
    assert revision_of("org/name") == ("org/name", None)
    (tmp_path / "a@b").mkdir()
    assert revision_of(str(tmp_path / "a@b")) == (str(tmp_path / "a@b"), None)
    asked = []

    class Hub:
        @staticmethod
        def from_pretrained(place, **options):
            asked.append((place, options.get("revision")))
            return tiny_model()

    monkeypatch.setattr(engines, "AutoModelForCausalLM", Hub)
    (arm,) = arms_of(tiny_target(), "model:org/name@v1@3")
    assert asked == [("org/name", "v1")]
    assert arm.length == 3


# --- earlier texts


def test_memory_of_earlier_texts_is_bounded():
    memory = Memory(100)
    texts = [[n * 10 + i for i in range(9)] for n in range(50)]  # ten tokens each with their end
    for text in texts:
        memory.learn(text)
        assert sum(len(automaton.text) for automaton in memory.automata) <= 100
    drafter = SuffixLookup(remember=True, limit=100)
    for text in texts:
        stream = drafter.open([])
        stream.draft(text[:1], 1, GreedyText(), 0)
        stream.draft(text, 1, GreedyText(), 8)
    stream = drafter.open([])
    assert stream.draft([480, 481], 3, GreedyText(), 0).tokens == [482, 483, 484]  # of the last text but one
    assert stream.draft([100, 101], 3, GreedyText(), 0).tokens == []  # forgotten
    found = sum(bool(drafter.open([]).draft(text[:2], 1, GreedyText(), 0).tokens) for text in texts)
    assert 5 <= found <= 10
    for _ in range(3):  # a text that the drafter was not asked about leaves nothing behind
        drafter.open([])
    assert drafter.written == []
    assert f"{REMEMBERED:,}" in next(a.help for a in _options("generate") if a.dest == "drafter")


def _options(command):
    commands_ = next(a for a in cli.build_parser()._actions if hasattr(a, "choices") and a.choices)
    return commands_.choices[command]._actions


# --- where a text ends


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (5, {5}),
        (np.int64(5), {5}),
        (np.array(5), {5}),
        (np.array([5, 6], dtype=np.uint8), {5, 6}),
        (torch.tensor(5), {5}),
        (torch.tensor([5, 6]), {5, 6}),
        ([torch.tensor(5), np.int32(6)], {5, 6}),
        ({5, 6}, {5, 6}),
        (-1, set()),
        (64, set()),
        ([5, -1, 128], {5}),
        ([], set()),
    ],
)
def test_ends_of_every_type(value, ids):
    assert end_ids(value, 64) == ids


@pytest.mark.parametrize("kind", [int, np.int64, lambda token: torch.tensor([token]), lambda token: np.array(token)])
def test_a_text_ends_at_its_end_of_any_type(kind):
    text = reference_text(tiny_target(), PROMPTS[0], LIMIT)
    drafter = drafter_of(tiny_target())
    (found,) = drafter.generate([PROMPTS[0]], max_new_tokens=LIMIT, eos_token_id=kind(text[4])).generations
    assert found.token_ids == text[: text.index(text[4]) + 1]
    for none in (-1, 64):
        (found,) = drafter.generate([PROMPTS[0]], max_new_tokens=LIMIT, eos_token_id=kind(none)).generations
        assert found.token_ids == text


@pytest.mark.parametrize("value", [5.0, "5", [True], [None], np.array([0.5]), torch.tensor([1.5])])
def test_ends_that_are_no_token_ids_are_refused(value):
    with refuses("eos", "whole numbers"):
        Ending.of(tiny_target(), value, ())


@pytest.mark.parametrize("value", [-1, 64, [64, -1]])
def test_targets_without_an_end(value):
    assert target_of(eos_token_id=value).eos == frozenset()
    assert target_of(eos_token_id=[7, -1]).eos == {7}


# --- padding


def left_padded(prompts, pad):
    width = max(map(len, prompts))
    return torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])


@pytest.mark.parametrize("given", [True, False])
def test_the_mask_is_inferred_where_transformers_infers_it(given):
    target = target_of(pad_token_id=None if given else 63, eos_token_id=62)
    ids = left_padded(PROMPTS, 63)
    options = {"pad_token_id": 63} if given else {}
    theirs = target.model.generate(ids, max_new_tokens=LIMIT, do_sample=False, eos_token_id=62, pad_token_id=63)
    ours = drafter_of(target).generate(ids, max_new_tokens=LIMIT, **options)
    for row, prompt, text in zip(theirs[:, ids.shape[1] :].tolist(), PROMPTS, ours.generations, strict=True):
        expected = reference_text(target, prompt, LIMIT)
        assert text.token_ids == expected
        assert row[: len(expected)] == expected
        assert text.prompt_tokens == len(prompt)
    assert torch.equal(ours.sequences[:, : ids.shape[1]], ids)


def test_padding_that_cannot_be_told_from_text_is_refused():
    ids = left_padded([[5, 6, 7], [5]], 62)
    for settings in ({"eos_token_id": 62}, {"eos_token_id": 62, "pad_token_id": 62}):
        with refuses("attention_mask", "62", "both pads and ends"):
            drafter_of(target_of(**settings)).generate(ids)
        # every row begins with one: it may well be a first token
        output = drafter_of(target_of(**settings)).generate([[62, 5], [62, 6]], max_new_tokens=2)
        assert [g.prompt_tokens for g in output.generations] == [2, 2]
    with refuses("attention_mask", "left only"):
        drafter_of(target_of(pad_token_id=63)).generate(torch.tensor([[5, 63], [5, 6]]))
    # rows of their own lengths are no padded batch
    output = drafter_of(target_of(pad_token_id=63)).generate([[63, 5], [6]], max_new_tokens=2)
    assert [g.prompt_tokens for g in output.generations] == [2, 1]


# --- settings that travel with the model

END = reference_text(tiny_target(), PROMPTS[0], LIMIT)[3]
SETTINGS = {
    "repetition penalty": {"repetition_penalty": 1.5},
    "no n-gram twice": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[token] for token in range(0, 64, 3)] + [[20, 4]]},
    "suppressed": {"suppress_tokens": list(range(0, 64, 2))},
    "suppressed at first": {"begin_suppress_tokens": list(range(0, 64, 2))},
    "least new tokens": {"min_new_tokens": 12, "eos_token_id": END},
    "least length": {"min_length": 20, "eos_token_id": END},
    "biases": {"sequence_bias": {(20,): -9.0, (47,): 4.0, (5, 6): 3.0}},
    "decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": END},
    "many": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [4, 20], "min_new_tokens": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("spec", ["layers:1", "lookup", "none"])
def test_the_model_s_own_settings_count_as_in_generate(name, spec):
    target = target_of(**SETTINGS[name])
    changed = False
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        theirs = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False, pad_token_id=0
        )[0, len(prompt) :].tolist()
        drafter = drafter_of(target, spec)
        (ours,) = drafter.generate(ids, max_new_tokens=LIMIT).generations
        assert ours.token_ids == theirs
        (without,) = drafter.generate(ids, max_new_tokens=LIMIT, model_settings=False).generations
        changed |= without.token_ids != theirs
    assert changed
    # a trace names them so that the rule can be made again
    output = drafter_of(target, "lookup").generate([PROMPTS[0]], max_new_tokens=LIMIT)
    provenance = output.trace().provenance
    again = recorded_rule(0.0, "greedy", provenance["processors"], provenance["eos"])
    assert list(again.settings) == provenance["processors"]
    assert their_text(target, PROMPTS[0], LIMIT, again) == output.generations[0].token_ids


def test_arguments_win_over_the_model_s_settings():
    target = target_of(repetition_penalty=1.5, top_k=1, do_sample=True, temperature=0.9)
    drafter = drafter_of(target, "lookup")
    (greedy,) = drafter.generate(
        [PROMPTS[0]], max_new_tokens=LIMIT, do_sample=False, repetition_penalty=1.0
    ).generations
    assert greedy.token_ids == reference_text(tiny_target(), PROMPTS[0], LIMIT)
    own = settings_of(target)
    assert (own.do_sample, own.temperature, dict(own.options)) == (
        True,
        0.9,
        {"top_k": 1, "repetition_penalty": 1.5},
    )
    output = drafter.generate([PROMPTS[0]], max_new_tokens=LIMIT)  # samples, from one token
    assert output.trace().verification == "rejection"
    assert output.generations[0].token_ids == plain_text(
        target_of(), PROMPTS[0], LIMIT, make_rule(repetition_penalty=1.5).processors
    )


def test_settings_that_cannot_be_followed_are_named():
    target = target_of(guidance_scale=1.5, num_beams=4, max_time=3.0, encoder_repetition_penalty=1.0)
    assert settings_of(target).ignored == ("guidance_scale=1.5", "num_beams=4", "max_time=3.0")
    with pytest.warns(UserWarning, match=r"guidance_scale=1.5.*num_beams=4"):
        drafter_of(target, "lookup").generate([[5]], max_new_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter_of(target, "lookup").generate([[5]], max_new_tokens=1, model_settings=False)
        drafter_of(target_of(num_beams=1), "lookup").generate([[5]], max_new_tokens=1)


def test_the_command_line_follows_and_names_them(tmp_path, capsys):
    target = target_of(suppress_tokens=list(range(0, 64, 2)), stop_strings=["w9 w9 w9"], num_beams=3)
    target.model.save_pretrained(tmp_path / "m")
    target.tokenizer.save_pretrained(tmp_path / "m")
    common = ["generate", "--target", str(tmp_path / "m"), "--device", "cpu", "--drafter", "lookup", "w5 w6 w5"]
    common += ["--max-new-tokens", "9", "--no-chat-template", "--json", str(tmp_path / "o.json"), "--force", "--check"]
    assert cli.main(common) == 0
    out, err = capsys.readouterr()
    assert "num_beams=3" in err
    assert "1 of 1 texts equal plain decoding" in out
    (found,) = json.loads((tmp_path / "o.json").read_text())
    assert all(token % 2 for token in found["token_ids"])
    assert cli.main([*common, "--no-model-settings"]) == 0
    assert capsys.readouterr().err == ""
    (found,) = json.loads((tmp_path / "o.json").read_text())
    assert not all(token % 2 for token in found["token_ids"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and prompts with an id that is no markup."""
    path = tmp_path_factory.mktemp("edges")
    target = tiny_target()
    target.model.save_pretrained(path / "m")
    target.tokenizer.save_pretrained(path / "m")
    records = [{"id": f"{i}[/b]", "split": "calibrate", "prompt": "w5 w6 w5 w6", "category": "[/INST]"} for i in "ab"]
    (path / "p.jsonl").write_text("\n".join(map(json.dumps, records)))
    return path


LONG = ["--drafter", "chain(lookup,suffix,lookup,suffix,lookup,suffix,lookup,suffix,lookup,suffix)@3"]
LONG += ["--drafter", "a-name-that-says-more-than-anybody-wants-to-read-in-a-table=layers:1@2", "--drafter", "none"]


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", *LONG],
        ["record", *LONG, "--calibrate", "2", "--repetitions", "2", "--out", "t.safetensors"],
        ["bench", *LONG, "--policy", "random", "--repetitions", "1"],
        ["train", "ngram", "--out", "n.safetensors"],
        ["train", "vocabulary", "--size", "16", "--out", "v.safetensors"],
    ],
    ids=lambda argv: argv[0] + argv[1].strip("-"),
)
def test_tables_of_commands_fit_a_hundred_columns(argv, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    common = ["--target", str(folder / "m"), "--device", "cpu", "--prompts", str(folder / "p.jsonl")]
    assert cli.main([*argv, *common, "--max-new-tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    for name in {"generate": ["a[/b]"], "record": ["[/INST]"]}.get(argv[0], []):
        assert name in out


# --- constraints


class Watching:
    """A constraint that only allows sums of a token and the one before to be even, and keeps what it is asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, batch, text):
        text = text.tolist()
        self.asked.append(text)
        if any((a + b) % 2 for a, b in zip(text[self.prompt :], text[self.prompt - 1 :], strict=False)):
            raise RuntimeError("this text was forbidden")
        return [token for token in range(64) if (token + text[-1]) % 2 == 0]


@pytest.mark.parametrize("spec", ["layers:1", "lookup", "oracle", "none"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 2.0}])
@pytest.mark.parametrize("ends", [{}, {"stop_strings": "w9"}])
def test_constraints_are_asked_about_accepted_tokens_only(spec, options, ends):
    target, prompt = tiny_target(), PROMPTS[0]
    wrong = Oracle({tuple(prompt): reference_text(target, prompt, LIMIT)}, 0.5)  # what plain decoding would write
    arms = [Arm("oracle", wrong, 5)] if spec == "oracle" else arms_of(target, spec)
    watch = Watching()
    watch.prompt = len(prompt)
    drafter = MultiDrafter(target, arms, "random")
    constraint = PrefixConstrainedLogitsProcessor(watch, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = drafter.generate([prompt], max_new_tokens=LIMIT, logits_processor=[constraint], **options, **ends)
    text = output.generations[0].token_ids
    assert not output.retired
    questions = [[*prompt, *text[:n]] for n in range(len(text))]
    assert watch.asked == [list(prompt)] * 2 + questions  # twice to see that it answers alike, then each once
    assert all((a + b) % 2 == 0 for a, b in zip([prompt[-1], *text], text, strict=False))
    if not options:
        assert text == plain_text(target, prompt, LIMIT, [constraint], (), [ends["stop_strings"]] if ends else ())


def test_constraints_leave_the_law_of_plain_decoding():
    """Sampled texts of two tokens, with a drafter that the constraint contradicts, against exact probabilities."""
    target, prompt = tiny_target(), [5, 6]
    allowed = {6: [7, 8, 9, 20], 7: [7, 9], 8: [20], 9: [8, 9], 20: [7, 8, 9, 20]}

    def logits(text):
        return target.forward(target.prefill([]), text, keep=1)[0].double() / 4.0

    def law(text):
        scores = torch.full((64,), -torch.inf, dtype=torch.float64)
        scores[allowed[text[-1]]] = logits(text)[allowed[text[-1]]]
        return scores.softmax(dim=0)

    exact = {}
    first = law(prompt)
    for a in allowed[6]:
        second = law([*prompt, a])
        exact |= {(a, b): float(first[a] * second[b]) for b in allowed[a]}
    draws = 1500
    drafter = drafter_of(target, "layers:1@3")
    found = dict.fromkeys(exact, 0)
    constraint = PrefixConstrainedLogitsProcessor(lambda batch, text: allowed[int(text[-1])], 1)
    output = drafter.generate(
        [prompt] * draws,
        max_new_tokens=2,
        do_sample=True,
        temperature=4.0,
        logits_processor=[constraint],
        seed=4,
    )
    for generation in output.generations:
        found[tuple(generation.token_ids)] += 1
    deviations = [(found[t] - draws * p) / math.sqrt(draws * p * (1 - p)) for t, p in exact.items() if draws * p > 5]
    assert max(map(abs, deviations)) < 4.5  # of some twelve normal ones
    assert len(deviations) >= 5


def test_a_grammar_that_never_goes_back_works():
    class Following(LogitsProcessor):
        """Bans what has been written, which it remembers token by token."""

        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            text = input_ids[0].tolist()
            assert text[: len(self.seen)] == self.seen
            self.seen = text
            return scores.index_fill(1, torch.tensor(text), -torch.inf)

    target = tiny_target()
    for spec in ("lookup", "layers:1"):
        drafter = drafter_of(target, spec)
        (found,) = drafter.generate([PROMPTS[0]], max_new_tokens=LIMIT, logits_processor=[Following()]).generations
        assert found.token_ids == plain_text(target, PROMPTS[0], LIMIT, [Following()])


def test_which_processors_may_be_asked_about_drafts():
    assert answers_any_text(NoRepeatNGramLogitsProcessor(2))
    assert not answers_any_text(PrefixConstrainedLogitsProcessor(lambda batch, text: [1], 1))

    class Stricter(NoRepeatNGramLogitsProcessor):
        pass

    assert not answers_any_text(Stricter(2))
    Stricter.any_text = True
    assert answers_any_text(Stricter(2))
    with refuses("blocks", "accepted tokens only"):
        rule = make_rule(logits_processor=[PrefixConstrainedLogitsProcessor(lambda batch, text: [1], 1)])
        Recorder(tiny_target(), arms_of(tiny_target(), "lookup"), 4, rule, blocks=True)


# --- numbers


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-46, 1e-45, 1e-40, 1e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"verification": "gumbel"}])
def test_temperatures_near_0_act_greedily(temperature, options):
    target = tiny_target()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = drafter_of(target).generate(
            PROMPTS[:2], max_new_tokens=LIMIT, do_sample=True, temperature=temperature, **options
        )
    assert not output.retired
    assert [g.token_ids for g in output.generations] == [reference_text(target, p, LIMIT) for p in PROMPTS[:2]]


@pytest.mark.parametrize("temperature", [1e-46, 1e-38, 1e37, 1e300, 1.7e308])
def test_extreme_temperatures_make_laws(temperature):
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf]])
    (law,) = Rule("rejection", temperature).open(np.random.SeedSequence(0), 1).laws(logits).tolist()
    # the first argmax, as greedy decoding breaks ties, or all that are allowed alike
    if temperature == 1e-46:
        assert law == [0.0, 1.0, 0.0, 0.0]
    elif temperature == 1e-38:
        assert law[0] == law[3] == 0.0
        assert sum(law) == 1.0
    else:
        assert law == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])


class Broken(TorchModel):
    """A model whose logits turn bad after some tokens."""

    def forward(self, state, ids, keep=0):
        logits = super().forward(state, ids, keep)
        return logits if state.length < self.good else torch.full_like(logits, self.value)


def broken_target(value, good):
    model = Broken(tiny_model(), "broken-model")
    model.value, model.good = value, good
    return Target(model, tiny_tokenizer(), "broken-model")


RULES = [{}, {"do_sample": True}, {"do_sample": True, "verification": "gumbel"}, {"do_sample": True, "top_p": 0.9}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", RULES)
@pytest.mark.parametrize("spec", ["none", "lookup"])
def test_logits_that_make_no_law_name_the_target(value, options, spec):
    target = broken_target(value, len(PROMPTS[0]) + 5)
    with refuses("target broken-model", "NaN or infinity"):
        drafter_of(target, spec).generate([PROMPTS[0]], max_new_tokens=LIMIT, **options)
    with refuses("target broken-model", "NaN or infinity"):
        rule = make_rule(1.0 if options else 0.0, options.get("verification"))
        Recorder(target, arms_of(target, "lookup"), LIMIT, rule, False).record(0, Prompt("a", "w5 w6"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_texts_for_training_are_not_written_from_such_logits(value):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[5] = value
    with refuses("target broken-model", "NaN or infinity"):
        generate_outputs(Target(model, tiny_tokenizer(), "broken-model"), [Prompt("a", "w5 w6")], 4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", RULES)
def test_logits_that_make_no_law_name_the_drafter(value, options):
    target = tiny_target()
    model = Broken(tiny_model(), "small")
    model.value, model.good = value, 0
    arms = [Arm("small", CausalDrafter(model, "small", 64), 3)]
    with pytest.warns(RuntimeWarning, match="drafter small is retired.*NaN or infinity"):
        output = MultiDrafter(target, arms, "random").generate([PROMPTS[0]], max_new_tokens=LIMIT, **options)
    if not options:
        assert output.generations[0].token_ids == reference_text(target, PROMPTS[0], LIMIT)
    with refuses("drafter small", "NaN or infinity"):
        rule = make_rule(1.0 if options else 0.0, None)
        Recorder(target, arms, LIMIT, rule, False).record(0, Prompt("a", "w5 w6"))


def test_bad_logits_past_a_rejection_are_nobody_s_business():
    good = [0.0, 1.0, 0.0]
    logits = torch.tensor([good, [math.nan] * 3, [math.nan] * 3])
    for rule in (Rule(), Rule("rejection", 1e-6), Rule("gumbel", 1e-6)):
        text = rule.open(np.random.SeedSequence(0), 9)
        draft = Draft([2, 2])
        assert text.verify(logits, draft, 0, (), 9).emitted == [1]
        with pytest.raises(LogitsError):
            text.verify(logits, Draft([1, 2]), 0, (), 9)
    with pytest.raises(LogitsError):
        sample(torch.tensor([math.nan, 1.0]), 0.5)


# --- streams


class Pieces:
    """A tokenizer of bytes, whose characters may take several."""

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")


def test_the_last_undecodable_bytes_are_printed(capsys):
    target = type("T", (), {"decode": lambda self, ids: Pieces().decode(ids)})()
    stream = commands._Stream(target, [Prompt("a", "x"), Prompt("b", "y")])
    whole = "caf\xe9".encode()
    stream(0, list(whole[:4]))
    assert capsys.readouterr().out == "--- a\n"  # half of the last character: all waits for it
    stream(0, list(whole[4:]))
    assert capsys.readouterr().out == "caf\xe9"
    stream(0, [0xE9])
    stream(1, [0x78])
    stream(1, [0xF0, 0x9F])
    stream.end()
    assert capsys.readouterr().out == "\ufffd\n--- b\nx\ufffd\n"


@pytest.mark.parametrize(
    ("good", "arguments", "error"),
    [
        (10**9, {"max_new_tokens": 0}, "max new tokens"),
        (10**9, {"temperature": -1.0, "do_sample": True}, "temperature"),
        (10**9, {"no_such": 1}, "no_such"),
        (len(PROMPTS[0]) + 5, {}, "NaN"),
    ],
)
def test_whoever_reads_a_stream_learns_of_its_end(good, arguments, error):
    target = broken_target(math.nan, good)
    streamer = TextIteratorStreamer(target.tokenizer, skip_prompt=True, timeout=20)
    failures = []

    def run():
        try:
            drafter_of(target, "lookup").generate(
                [PROMPTS[0]], **{"max_new_tokens": LIMIT} | arguments, streamer=streamer
            )
        except ValueError as found:
            failures.append(str(found))

    thread = threading.Thread(target=run)
    thread.start()
    text = "".join(streamer)  # ends; a queue.Empty after the timeout otherwise
    thread.join()
    assert len(failures) == 1
    assert error in failures[0]
    assert bool(text) == ("NaN" in error)


def test_a_streamer_that_fails_does_not_hide_the_error():
    class Deaf:
        def put(self, value):
            raise RuntimeError("no ears")

        def end(self):
            raise RuntimeError("no end")

    with pytest.raises(RuntimeError, match="no ears"):
        drafter_of(tiny_target()).generate([[5]], max_new_tokens=2, streamer=Deaf())


def test_streamed_text_ends_where_the_command_fails(monkeypatch, capsys, tmp_path):
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "m")
    target.tokenizer.save_pretrained(tmp_path / "m")
    monkeypatch.setattr(commands, "load_target", lambda *_: broken_target(math.nan, 9))
    argv = ["generate", "--target", "m", "--drafter", "none", "--stream", "--no-chat-template", "w5 w6"]
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out.startswith("--- prompt\nw")
    assert out.endswith("\n")
    assert "target broken-model" in err


# --- traces


@pytest.mark.parametrize("texts", [True, False])
def test_a_trace_s_features_are_those_of_the_prompts_texts(texts):
    """A router replays the choices that it made: it reads the text, live and in replay."""
    target = tiny_target()
    prompts = ["w5 w6 w7 w5 w6", "w11 w11 w11 w11 w11 w11 w11 w11", "w9"]
    inputs = prompts if texts else [target.encode(prompt, chat_template=False) for prompt in prompts]
    names = prompt_features("")[0]
    repeats = names.index("repeated_words")
    weights = np.zeros((2, len(names) + 1))
    weights[1, repeats], weights[1, -1] = 10.0, -5.0  # the second arm where more than half of the words are repeats
    router = RouterWeights(("lookup", "none"), weights)
    drafter = MultiDrafter(target, arms_of(target, "lookup", "none"), Router(router))
    output = drafter.generate(inputs, max_new_tokens=6)
    live = [{played["arm"] for played in rounds} for rounds in output.rounds]
    assert live == [{"lookup"}, {"none"}, {"lookup"}]
    trace = output.trace()
    for query, text, row in zip(trace.queries, prompts, trace.features, strict=True):
        assert query.sha256 == Prompt("x", text).sha256
        np.testing.assert_allclose(row, prompt_features(text)[1], atol=1e-6)
    history = simulate(Router(router), ReplayEnvironment(trace), seed=0, history=True).history
    replayed = [{trace.arms[arm] for arm in history.rounds.arm[history.query == q]} for q in range(len(prompts))]
    assert replayed == live


# --- starting up

WITHOUT = "import sys; sys.modules['{}'] = None\nfrom metasd_live.cli import main\nsys.exit(main({!r}))"


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_torch_one_line_says_what_to_install(package):
    argv = ["generate", "--target", "t", "--drafter", "lookup", "p"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(package, argv)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"expected the package {package}" in done.stderr
    assert "pip install 'metasd[live]'" in done.stderr


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["train", "eagle", "--help"], ["record"]])
def test_help_does_not_wait_for_torch(argv):
    code = WITHOUT.format("torch", argv)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "100"}
    )
    assert time.perf_counter() - start < 5  # a busy machine; half a second on an idle one
    assert done.returncode == (2 if argv == ["record"] else 0)
    assert ("usage: metasd-live" in done.stdout) == (argv != ["record"])
