"""Training of drafters: what they learn, that a killed training resumes, and what the command line makes of it.

Children are forked, and killed by SIGKILL, as in `test_live_record_kill`.
"""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from metasd_live import cli
from metasd_live.drafters import build_arms, parse_arm
from metasd_live.drafters.head import read_vocabulary
from metasd_live.outputs import Output, to_lines
from metasd_live.prompts import Prompt
from metasd_live.train import (
    CausalSettings,
    EagleSettings,
    Evaluation,
    MedusaSettings,
    TrainingText,
    count_vocabulary,
    cut_texts,
    output_texts,
    train_drafter,
    train_eagle,
    train_medusa,
)
from metasd_live.train import features as features_module
from metasd_live.train.features import TextFeatures
from metasd_live.train.loop import training_folder
from metasd_live.train.run import RECORD
from metasd_live.train.vocabulary import frequent_tokens

from .live_cases import VOCABULARY, tiny_prompts, tiny_target
from .sim_cases import refuses
from .test_live_record_kill import dies_at, in_a_child
from .trained import EAGLE, MEDUSA, eagle_drafter, sampled_texts

KINDS = ["llama", "gpt2"]
PROMPTS = [Prompt(str(i), " ".join(f"w{token}" for token in p)) for i, p in enumerate(tiny_prompts(8, seed=3))]
EVALUATION = Evaluation(PROMPTS, max_new_tokens=30, draft_length=3, chat_template=False)
SMALL = {  # settings of trainings that take no time
    "causal": CausalSettings(vocabulary=20, layers=1, hidden=8, heads=2, epochs=3, batch=4, window=16),
    "eagle": EagleSettings(epochs=3, batch=4, window=12, vocabulary=30),
    "medusa": MedusaSettings(heads=2, epochs=3, batch=64, window=12),
}


def nothing(*step):
    pass


# --- learning


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_trained_drafters_are_accepted_well_above_chance(tmp_path, kind, name):
    """A token at random is the target's greedy one with probability 1/64. Over 240 places its share has a standard
    deviation of 0.008: the first draft must be right in more than 1/64 + 8 x 0.008 = 8 %, and more often than one of
    random weights. Untrained Medusa heads are copies of the target's own, which predicts the token before theirs."""
    target = tiny_target(kind)
    settings = EAGLE if name == "eagle" else MEDUSA
    texts = sampled_texts(target, 120, 40)
    record = train_drafter(texts, target, settings, str(tmp_path / name), evaluation=EVALUATION)
    found = record["evaluation"]
    if name == "eagle":
        untrained = EVALUATION.measure(eagle_drafter(target), target, nothing)
        assert found["accepted_by_depth"][0] > untrained["accepted_by_depth"][0] + 0.05
        assert untrained["accepted_by_depth"][0] < 0.08
    assert found["tokens"] == 240
    assert found["accepted_by_depth"][0] > 0.08
    assert found["mean_accepted"] == pytest.approx(sum(found["accepted_by_depth"]))
    curve = record["curve"]
    assert curve[-1]["training_loss"] < curve[0]["training_loss"]
    assert curve[-1]["held_out_loss"] < curve[0]["held_out_loss"]
    if kind == "gpt2":  # whose texts are the easier ones to learn
        assert curve[-1]["held_out_top1"] > 0.15
        assert found["accepted_by_depth"][0] > 0.2
    (arm,) = build_arms([parse_arm(f"{name}:{tmp_path / name}@3")], target)
    assert EVALUATION.measure(arm.drafter, target, nothing) == found  # the folder holds what was measured


@torch.no_grad()
def test_the_loss_of_eagle_token_by_token(tmp_path):
    """Two texts of which the prompt's tokens are not learnt; the pairs one by one, without padding or noise."""
    target = tiny_target()
    texts = [TrainingText([5, 6, 7, 8, 9, 10], 4), TrainingText([9, 8, 7], 0), TrainingText([3, 4, 5, 6, 7], 0)]
    settings = EagleSettings(vocabulary=6, law_weight=0.3)
    known = frequent_tokens([text.ids for text in texts], target, 6)
    assert known == [3, 5, 6, 7, 8, 9]  # 4 and 10 occur once, as 3 does
    learner = train_eagle(texts, target, settings, 0, tmp_path, nothing)
    assert (len(learner.training), len(learner.held_out)) == (2, 1)
    order = np.random.default_rng(0).permutation(3)
    chosen = [texts[i] for i in order[1:]]
    losses, hits = [], 0
    head = target.model.get_output_embeddings().weight[known]
    for text in chosen:
        f = target.model.base_model(torch.tensor([text.ids]), use_cache=False).last_hidden_state[0]
        for t in range(len(text.ids) - 1):  # f_t with x_{t+1} -> f_{t+1}, which gives the law of x_{t+2}
            if t + 2 < text.start:
                continue
            embedded = target.model.get_input_embeddings()(torch.tensor([text.ids[1 : t + 2]]))
            estimate = learner.model(embedded, f[None, : t + 1])[0, -1]
            difference = (estimate - f[t + 1]).abs()
            regression = torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean()
            p, q = (head @ f[t + 1]).softmax(-1), (head @ estimate).softmax(-1)
            losses.append(regression - 0.3 * (p * q.log()).sum())
            hits += int(p.argmax() == q.argmax())
    score = learner.score(learner.training)
    assert (score.tokens, score.hits) == (len(losses), hits)
    torch.testing.assert_close(score.loss, torch.stack(losses).mean(), atol=1e-5, rtol=1e-5)
    noisy = [float(learner.score(learner.training, torch.Generator().manual_seed(seed)).loss) for seed in (0, 0, 1)]
    assert noisy[0] == noisy[1] != noisy[2]
    assert abs(noisy[0] - float(score.loss)) > 1e-6


@torch.no_grad()
def test_the_loss_of_medusa_by_hand(tmp_path):
    """A text x_0 ... x_5 of which x_3, x_4, x_5 are learnt. Head 0 predicts x_{t+2} at t = 1, 2, 3, head 1 x_{t+3} at
    t = 0, 1, 2. At first both are the target's head. Frozen products keep the same loss."""
    target = tiny_target()
    ids = [5, 6, 7, 8, 9, 10]
    texts = [TrainingText(ids, 3), TrainingText(ids, 3)]
    f = target.model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    log_p = target.model.get_output_embeddings()(f).log_softmax(-1)
    first = -(log_p[1, 8] + log_p[2, 9] + log_p[3, 10]) / 3
    second = -(log_p[0, 8] + log_p[1, 9] + log_p[2, 10]) / 3
    for products in (True, False):
        settings = MedusaSettings(heads=2, products=products)
        learner = train_medusa(texts, target, settings, 0, tmp_path, nothing)
        score = learner.score(learner.training)
        assert (len(learner.training), score.tokens) == (4, 6)
        torch.testing.assert_close(score.loss, first + 0.8 * second, atol=1e-5, rtol=1e-5)
        learnt = [name for name, weight in learner.model.named_parameters() if weight.requires_grad]
        assert any(name.endswith("1.weight") for name in learnt) == products
    known = frequent_tokens([ids], target, 5)  # 10, the last of those that are equally frequent, is left out
    learner = train_medusa(texts, target, MedusaSettings(heads=2, vocabulary=5), 0, tmp_path, nothing)
    log_q = target.model.get_output_embeddings()(f)[:, known].log_softmax(-1)
    first = -(log_q[1, 3] + log_q[2, 4]) / 2
    second = -(log_q[0, 3] + log_q[1, 4]) / 2
    torch.testing.assert_close(learner.score(learner.training).loss, first + 0.8 * second, atol=1e-5, rtol=1e-5)


def test_features_are_the_targets_hidden_states(tmp_path, monkeypatch):
    target, steps = tiny_target(), []
    texts = [TrainingText(text.ids, 3) for text in sampled_texts(target, 12, 20)] + [TrainingText([5, 6], 0)]
    data = TextFeatures(texts, target, 10, 0, tmp_path, lambda *step: steps.append(step))
    monkeypatch.setattr(features_module, "IN_MEMORY", 0)
    on_disk = TextFeatures(texts, target, 10, 0, tmp_path)
    assert (tmp_path / "features.bin").stat().st_size == data.hidden.numel() * 4
    assert torch.equal(data.hidden, on_disk.hidden)
    pieces = torch.cat([data.training, data.held_out])
    assert steps[-1] == ("features", len(pieces), len(pieces))
    ids, hidden, place = data.batch(pieces)
    found = Counted(texts, 10)
    for row in range(len(pieces)):
        real = place[row] >= 0
        tokens = ids[row][real].tolist()
        assert place[row][real].tolist() == list(range(len(tokens)))
        found.take(tokens)
        with torch.no_grad():
            fresh = target.model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(hidden[row][real], fresh, atol=1e-4, rtol=0)
    assert not found.left
    with refuses("two texts", "found 1"):
        TextFeatures(texts[:1], target, 10, 0, tmp_path)


class Counted:
    """Pieces of texts that are still to come: windows of three tokens or more."""

    def __init__(self, texts, window):
        parts = [text.ids[at : at + window] for text in texts for at in range(0, len(text.ids), window)]
        self.left = sorted(part for part in parts if len(part) > 2)

    def take(self, tokens):
        self.left.remove(tokens)


# --- a killed training


def work(kind, out, settings=None, **options):
    texts = sampled_texts(tiny_target(), 12, 20)
    options = {"evaluation": replace(EVALUATION, prompts=PROMPTS[:2], max_new_tokens=6)} | options
    return train_drafter(texts, tiny_target(), settings or SMALL[kind], str(out), **options)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# the second file that is put in place is the first epoch's state, after the settings
MOMENTS = [(os, "replace", 2, True), (os, "replace", 3, False), (os, "replace", 4, True), (os, "fsync", 3, False)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", SMALL)
def test_a_killed_training_ends_as_if_nothing_had_happened(tmp_path, kind):
    whole = work(kind, tmp_path / "whole")
    assert [epoch["epoch"] for epoch in whole["curve"]] == [1, 2, 3]
    moments = MOMENTS if kind == "eagle" else MOMENTS[:1]
    for number, moment in enumerate(moments):
        out = tmp_path / f"killed-{number}"

        def dying(moment=moment, out=out):
            dies_at(*moment)
            work(kind, out)

        assert in_a_child(dying)
        assert (out.exists(), training_folder(out).is_dir()) == (False, True)
        steps = []
        resumed = work(kind, out, on_step=lambda what, done, of, steps=steps: steps.append((what, done, of)))
        if moment[:3] == (os, "replace", 2):
            total = next(of for what, _, of in steps if what == "steps")
            assert ("steps", total // 3, total) in steps  # it goes on after the first epoch
            assert ("steps", 1, total) not in steps
        assert resumed == whole
        assert content(out) == content(tmp_path / "whole")
        assert not training_folder(out).exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_on_its_last_step(tmp_path):
    out = tmp_path / "out"

    def dying():
        dies_at(shutil, "rmtree", 1, False)
        work("eagle", out)

    assert in_a_child(dying)
    assert out.is_dir()
    assert training_folder(out).is_dir()
    with refuses("out.training", "seed 1", "found 0", "--force"):
        work("eagle", out, seed=1)
    resumed = work("eagle", out)
    assert resumed == json.loads((out / RECORD).read_text())
    assert not training_folder(out).exists()
    with refuses("out", "--force"):
        work("eagle", out)
    again = work("eagle", out, force=True)
    assert again == resumed


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_other_settings_are_refused_by_name(tmp_path):
    out = tmp_path / "out"

    def dying():
        dies_at(os, "replace", 3, True)
        work("eagle", out)

    assert in_a_child(dying)
    for name, change in {
        "epochs": {"settings": replace(SMALL["eagle"], epochs=4)},
        "learning_rate": {"settings": replace(SMALL["eagle"], learning_rate=1e-4)},
        "noise": {"settings": replace(SMALL["eagle"], noise=0.2)},
        "seed": {"seed": 1},
        "kind": {"settings": SMALL["medusa"]},
        "evaluation": {"evaluation": None},
    }.items():
        with refuses("out.training", f"with {name} ", "--force"):
            work("eagle", out, **change)
    with refuses("out.training", "texts"):
        train_drafter(
            sampled_texts(tiny_target(), 13, 20),
            tiny_target(),
            SMALL["eagle"],
            str(out),
            evaluation=replace(EVALUATION, prompts=PROMPTS[:2], max_new_tokens=6),
        )
    state = training_folder(out) / "state.pt"
    kept = state.read_bytes()
    state.write_bytes(kept[: len(kept) // 2])
    with refuses("state.pt", "remove the folder"):
        work("eagle", out)
    state.write_bytes(kept)
    forced = work("eagle", out, seed=1, force=True)
    assert forced == work("eagle", tmp_path / "fresh", seed=1)
    assert content(out) == content(tmp_path / "fresh")


def test_a_seed_gives_the_same_drafter_and_another_one_another(tmp_path):
    torch.manual_seed(99)  # the global generator has no say
    work("eagle", tmp_path / "a")
    torch.manual_seed(7)
    work("eagle", tmp_path / "b")
    work("eagle", tmp_path / "c", seed=1)
    weights = [safetensors.torch.load_file(tmp_path / name / "model.safetensors")["fc.weight"] for name in "abc"]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_settings_and_texts_that_cannot_be(tmp_path):
    for settings, words in (
        (partial(EagleSettings, epochs=0), ["eagle", "epochs", "0"]),
        (partial(EagleSettings, noise=-0.1), ["eagle", "noise", "-0.1"]),
        (partial(EagleSettings, window=2), ["eagle", "window", "2"]),
        (partial(MedusaSettings, heads=0), ["medusa", "heads", "0"]),
        (partial(CausalSettings, hidden=30, heads=4), ["causal", "multiple of heads", "30"]),
    ):
        with refuses("train", *words):
            settings()
    with refuses("causal", "two texts"):
        train_drafter([TrainingText([1])] * 3, tiny_target(), SMALL["causal"], str(tmp_path / "x"))
    with refuses("finite loss", "--learning-rate"):
        work("eagle", tmp_path / "y", replace(SMALL["eagle"], learning_rate=1e30))


# --- texts and vocabularies


def test_texts_know_where_the_targets_part_begins():
    outputs = [Output("1", "a", [1, 2, 3], [4, 5]), Output("2", "b", [], [7, 8, 9])]
    found = {tuple(text.ids): text.start for text in output_texts(outputs, [])}
    assert found == {(1, 2, 3, 4, 5): 3, (7, 8, 9): 0}
    found = {tuple(text.ids): text.start for text in output_texts(outputs, [], prompt_tokens=0)}
    assert found == {(4, 5): 0, (7, 8, 9): 0}
    assert cut_texts([TrainingText([1, 2, 3], 1), TrainingText([4, 5], 1)], 4) == [
        TrainingText([1, 2, 3], 1),
        TrainingText([4], 1),
    ]


def test_vocabularies_by_hand():
    target = tiny_target()
    text = [5] * 4 + [6] * 3 + [7, 8, 7] + [5, 6, 9, 9, 9, 9, 9, 9, 9, 5]  # 9 is the most frequent one: 7 times
    found = count_vocabulary([text], target, 3)
    assert found.known == [9, 5, 6]
    assert found.tokens == 20
    assert found.coverage == 1.0  # of the last two tokens, 9 and 5
    assert count_vocabulary([text], target, 2).coverage == 1.0  # of the first 18: six of 9, five of 5
    assert count_vocabulary([text], target, 1).coverage == 0.5
    ending = tiny_target(eos=(3,))
    assert count_vocabulary([text], ending, 2).known == [9, 3]  # room for the end, which never occurred
    assert count_vocabulary([text], ending, 60).known == [9, 5, 6, 7, 8, 3]
    texts = [[5, 5, 6]] * 9 + [[7, 5, 7]]
    held = {count_vocabulary(texts, target, 1, seed).coverage for seed in range(9)}
    assert held <= {2 / 3, 1 / 3}
    assert 2 / 3 in held
    for size in (0, VOCABULARY + 1):
        with refuses("vocabulary", "size", str(size)):
            count_vocabulary(texts, target, size)
    with refuses("more than one token"):
        count_vocabulary([[5]], target, 1)


# --- the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, outputs of it, prompts to evaluate on."""
    path, target = tmp_path_factory.mktemp("train"), tiny_target()
    target.model.save_pretrained(path / "model")
    target.tokenizer.save_pretrained(path / "model")
    texts = sampled_texts(target, 16, 20)
    outputs = [Output(str(i), "a", text.ids[:3], text.ids[3:]) for i, text in enumerate(texts)]
    (path / "outputs.jsonl").write_text(to_lines(outputs, target.tokenizer_hash))
    records = [
        {"id": f"{split}-{i}", "split": split, "prompt": f"w{i + 2} w{i + 3} w{i + 2}"}
        for split in ("train", "calibrate")
        for i in range(4)
    ]
    (path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def call(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = cli.main([str(argument).replace("FOLDER", str(folder)) for argument in arguments])
        return code, *capsys.readouterr()

    return run


TARGET = ("--target", "FOLDER/model", "--device", "cpu")
OUTPUTS = ("--outputs", "FOLDER/outputs.jsonl")
QUICK = {
    "causal": ("--vocabulary", 20, "--layers", 1, "--hidden", 8, "--heads", 2, "--epochs", 2, "--window", 16),
    "eagle": ("--epochs", 2, "--batch", 4, "--noise", 0.05),
    "medusa": ("--epochs", 2, "--heads", 2, "--no-products"),
}


@pytest.mark.parametrize("kind", QUICK)
def test_train_then_generate(call, kind):
    train = ("train", kind, *TARGET, *OUTPUTS, *QUICK[kind], "--evaluate", 3, "--max-new-tokens", 8)
    train += ("--evaluate-prompts", "FOLDER/prompts.jsonl", "--draft-length", 2)
    code, out, _ = call(*train, "--out", "d")
    assert code == 0
    assert "held-out argmax hits" in out
    assert "mean accepted" in out
    code, out, err = call(*train, "--out", "d")
    assert (code, out) == (2, "")
    assert "--force" in err
    code, out, _ = call(*train, "--out", "d", "--force", "--json", "-", "--seed", 1)
    found = json.loads(out)
    assert code == 0
    assert {"out", "settings", "curve", "evaluation", "tokens", "parameters"} <= found.keys()
    assert [epoch["epoch"] for epoch in found["curve"]] == [1, 2]
    assert found["evaluation"]["tokens"] == 3 * 8
    assert len(found["evaluation"]["accepted_by_depth"]) == 2
    assert json.loads(Path("d", RECORD).read_text()) == {key: value for key, value in found.items() if key != "out"}
    assert found["settings"]["seed"] == 1
    assert sorted(os.listdir(".")) == ["d"]
    drafter = {"causal": "model"}.get(kind, kind)
    code, out, err = call(
        "generate", *TARGET, "--drafter", f"own={drafter}:d@2", "--policy", "fixed:own", "--json", "-", "w5 w6 w5"
    )
    assert code == 0, err
    rounds = json.loads(out)[0]["rounds"]
    assert max(played["drafted"] for played in rounds) == 2


def test_train_on_texts_that_the_target_writes_first(call):
    prompts = ("--prompts", "FOLDER/prompts.jsonl", "--split", "train", "--max-new-tokens", 12)
    train = ("train", "eagle", *TARGET, *prompts, "--epochs", 1, "--evaluate", 2, "--save-outputs", "o.jsonl")
    code, out, err = call(*train, "--out", "e", "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert (found["source"], found["texts"], len(found["evaluation"]["prompts"])) == ("prompts", 4, 2)
    assert all(name.startswith("calibrate") for name in found["evaluation"]["prompts"])
    assert Path("o.jsonl").read_text().count("\n") == 5


def test_train_a_vocabulary(call, folder):
    train = ("train", "vocabulary", *TARGET, *OUTPUTS, "--size", 12)
    code, out, _ = call(*train, "--out", "v.safetensors")
    assert code == 0
    assert "held-out tokens covered" in out
    code, out, err = call(*train, "--out", "v.safetensors")
    assert (code, "--force" in err) == (2, True)
    code, out, _ = call(*train, "--out", "w.safetensors", "--json", "-")
    found = json.loads(out)
    assert (found["size"], found["target_size"], found["tokens"]) == (12, VOCABULARY, 16 * 20)
    assert 0 < found["held_out_coverage"] < 1
    known = read_vocabulary("w.safetensors", tiny_target().tokenizer_hash)
    assert len(set(known)) == 12
    code, out, err = call(
        "generate",
        *TARGET,
        "--drafter",
        "own=layers:1,vocabulary=w.safetensors@2",
        "--policy",
        "fixed:own",
        "--quiet",
        "w5",
    )
    assert code == 0, err


@pytest.mark.parametrize("kind", ["eagle", "medusa", "vocabulary"])
def test_help_has_an_example(capsys, kind):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", kind, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  metasd-live train {kind} --target" in capsys.readouterr().out


def test_evaluation_without_prompts_is_refused(call):
    code, out, err = call("train", "eagle", *TARGET, *OUTPUTS, "--evaluate", 3, "--out", "e")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--evaluate-prompts" in err
    assert not os.listdir(".")
