"""Prompt files."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metasd_live.prompts import Prompt, prompt_features, read_prompts
from metasd_sim import traces
from tests.sim_cases import refuses

LINES = [
    {"id": "a", "category": "code", "split": "train", "prompt": "one"},
    {"question_id": 7, "category": "qa", "turns": ["two", "later"], "split": "evaluate"},
    {"id": "c", "prompt": "three"},
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return str(file)


def test_json_lines(path):
    assert read_prompts([path]) == [
        Prompt("a", "one", "code", "train"),
        Prompt("7", "two", "qa", "evaluate"),
        Prompt("c", "three"),
    ]
    assert [p.id for p in read_prompts([path], split="evaluate")] == ["7"]
    assert [p.id for p in read_prompts([path], categories=["code", "none"])] == ["a", "c"]
    assert [p.id for p in read_prompts([path], limit=2)] == ["a", "7"]


def test_plain_lines(tmp_path):
    (tmp_path / "lines.txt").write_text("Why is the sky blue?\n\n  And the sea?\n")
    found = read_prompts([str(tmp_path / "lines.txt")])
    assert [(p.id, p.text) for p in found] == [("lines-1", "Why is the sky blue?"), ("lines-3", "  And the sea?")]


def test_several_files_and_shuffling(path, tmp_path):
    (tmp_path / "more.txt").write_text("\n".join(f"line {i}" for i in range(20)))
    paths = [path, str(tmp_path / "more.txt")]
    plain = read_prompts(paths)
    shuffled = read_prompts(paths, shuffle=1)
    assert [p.id for p in plain[:4]] == ["a", "7", "c", "more-1"]
    assert shuffled == read_prompts(paths, shuffle=1) != read_prompts(paths, shuffle=2)
    assert shuffled != plain
    assert sorted(p.id for p in shuffled) == sorted(p.id for p in plain)
    assert read_prompts(paths, limit=3, shuffle=1) == shuffled[:3]  # shuffled first, or the first ones would stay


def test_hash_is_of_the_text():
    # sha256 of the three letters "abc", as published with the algorithm
    assert Prompt("x", "abc").sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", ["line 2", "JSON"]),
        ('{"prompt": "x"}', ["line 2", "id or question_id", "prompt"]),
        ('{"id": true, "prompt": "x"}', ["line 2", "id or question_id", "True"]),
        ('{"id": "x"}', ["line 2", "a prompt"]),
        ('{"id": "x", "turns": []}', ["line 2", "a prompt"]),
        ('{"id": "x", "prompt": ""}', ["line 2", "a prompt"]),
        ('{"id": "x", "prompt": "y", "category": 3}', ["line 2", "category"]),
        ('{"id": "x", "prompt": "y", "split": []}', ["line 2", "split"]),
    ],
)
def test_bad_lines_are_named(tmp_path, line, words):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"id": "fine", "prompt": "x"}\n' + line + "\n")
    with refuses("bad.jsonl", *words):
        read_prompts([str(file)])


def test_bad_choices(path, tmp_path):
    with refuses("split evaluation", "evaluate, none, train"):
        read_prompts([path], split="evaluation")
    with refuses("category math", "code, none, qa"):
        read_prompts([path], categories=["code", "math"])
    with refuses("'a' twice"):
        read_prompts([path, path])
    with refuses("absent.jsonl"):
        read_prompts([str(tmp_path / "absent.jsonl")])
    (tmp_path / "empty.txt").write_text("\n")
    with refuses("empty.txt", "empty"):
        read_prompts([str(tmp_path / "empty.txt")])


def test_features_by_hand():
    names, values = prompt_features("Is x = 42?\nIs é 'é'?")
    found = dict(zip(names, values, strict=True))
    n = 20  # characters; words: Is x = 42? Is é 'é'?
    assert len("Is x = 42?\nIs é 'é'?") == n
    assert found == pytest.approx(
        {
            "length": math.log(21) / 12,
            "digits": math.sqrt(2 / n),
            "code": math.sqrt(1 / n),  # =
            "uppercase": math.sqrt(2 / n),
            "newlines": math.sqrt(1 / n),
            "non_ascii_letters": math.sqrt(2 / n),
            "questions": math.sqrt(2 / n),
            "quotes": math.sqrt(2 / n),
            "word_length": (2 + 1 + 1 + 3 + 2 + 1 + 4) / 7 / 20,
            "repeated_words": 1 / 7,  # Is
        }
    )


@given(st.text(max_size=60))
def test_features_are_bounded_for_any_text(text):
    names, values = prompt_features(text)
    assert names == prompt_features("")[0]
    assert len(set(names)) == len(values)
    assert all(0 <= value <= 1 for value in values)


def test_features_of_a_long_text_are_bounded():
    assert dict(zip(*prompt_features("a" * 10**6), strict=True)) == pytest.approx(
        dict.fromkeys(prompt_features("")[0], 0.0) | {"length": 1.0, "word_length": 1.0}
    )


@pytest.mark.parametrize("name", ["greedy", "models", "t07"])
def test_shipped_traces_have_the_features_of_their_prompts(name):
    folder = Path(__file__).parents[1] / "traces"
    known = {prompt.sha256: prompt for prompt in read_prompts([str(folder / "prompts.jsonl")])}
    trace = traces.read(folder / f"smollm2-{name}.safetensors")
    assert trace.features.dtype == np.float32
    of = [known.get(query.sha256) for query in trace.queries]
    assert sum(prompt is None for prompt in of) == (40 if name == "greedy" else 0)  # Spec-Bench's texts are not ours
    for prompt, row in zip(of, trace.features, strict=True):
        if prompt is not None:
            names, values = prompt_features(prompt.text)
            assert trace.feature_names == names
            np.testing.assert_array_equal(row, np.float32(values))
