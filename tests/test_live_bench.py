"""The benchmark of contestants, and where the time of rounds goes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from metasd_live import cli
from metasd_live.bench import (
    PARTS,
    PLAIN,
    STOCK,
    STOCK_ON_OURS,
    Run,
    Settings,
    Theirs,
    bench,
    compare_texts,
    ratio,
    stock_contestants,
)
from metasd_live.decode import LiveEnvironment, decode
from metasd_live.drafters import Arm, Draft
from metasd_live.drafters.causal import CausalDrafter
from metasd_live.engines.linear import stock_copy
from metasd_live.engines.torch_model import TorchModel
from metasd_live.memory import drafter_memory, held_bytes
from metasd_live.sampling import make_rule
from metasd_live.timing import TimedPolicy
from metasd_sim.errors import InputError
from metasd_sim.policies import make_policy
from tests.live_cases import VOCABULARY, arms_of, oracle_arms, reference_text, tiny_model, tiny_prompts, tiny_target

TOKENS = 12


def other_model(target, name="model:other"):
    """A drafter with a model of its own and the whole vocabulary."""
    return CausalDrafter(TorchModel(tiny_model(seed=1), name), name, target.vocab_size)


def pool(target):
    return [*arms_of(target, "none", "lookup", "layers:1", draft_length=3), Arm("other", other_model(target), 3)]


@pytest.fixture(scope="module")
def records():
    target, prompts = tiny_target(), tiny_prompts(3)
    arms = pool(target)
    names = [arm.name for arm in arms]
    policies = [make_policy("metasd-ucb", "be", names), make_policy("hedge", None, names)]
    runs = []
    found = bench(Settings(target, TOKENS), arms, prompts, policies, 2, True, lambda: runs.append(1), runs.append)
    assert runs[0] == len(runs) - 1 == len(found) * (1 + 2 * len(prompts))  # the first is what was announced
    return {record["contestant"]: record for record in found}


def test_every_contestant_is_there_once_with_its_counterpart(records):
    ours = {name: record["counterpart"] for name, record in records.items() if record["ours"]}
    assert ours == {
        PLAIN: STOCK,
        "lookup": f"{STOCK}: lookup",
        "layers:1": f"{STOCK}: layers:1",
        "other": f"{STOCK}: other",
        "metasd-ucb:reward=be": STOCK,
        "hedge": STOCK,
    }
    assert set(records) - set(ours) == {
        STOCK,
        STOCK_ON_OURS,
        *(f"{STOCK}: {arm}" for arm in ("lookup", "layers:1", "other")),
    }


def test_records_add_up(records):
    for record in records.values():
        assert record["tokens"] == 3 * 2 * TOKENS == sum(run["tokens"] for run in record["runs"])
        assert record["seconds"] == pytest.approx(sum(run["seconds"] for run in record["runs"]))
        assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"])
        speedup = record["tokens_per_second"] / records[PLAIN]["tokens_per_second"]
        assert record["speedup"] == pytest.approx(speedup)
        assert record["texts"] == {"equal": 6, "near_ties": 0, "mismatches": 0, "where": []}
        if record["ours"]:
            there = records[record["counterpart"]]
            expected = record["tokens_per_second"] / there["tokens_per_second"]
            assert record["ratio_to_counterpart"] == pytest.approx(expected)
            assert list(record["shares"]) == list(PARTS)
            assert sum(record["shares"].values()) == pytest.approx(1)
            assert min(record["shares"].values()) >= 0
            assert record["tokens_per_call"] == record["tokens"] / record["rounds"]
            assert sum(record["pulls"].values()) == record["rounds"]
            assert record["rounds"] * record["round_seconds"] < record["seconds"]  # the prefill comes on top
    assert records[PLAIN]["rounds"] == records[PLAIN]["tokens"]
    assert records[PLAIN]["speedup_ci"] == [1, 1]
    assert records[PLAIN]["shares"]["draft"] < records["other"]["shares"]["draft"]
    assert records["hedge"]["shares"]["score"] > 0 == records["metasd-ucb:reward=be"]["shares"]["score"]
    assert records["metasd-ucb:reward=be"]["switches"] > 0 == records["lookup"]["switches"]
    assert records["metasd-ucb:reward=be"]["shares"]["catch_up"] > 0 == records["other"]["shares"]["catch_up"]
    assert json.loads(json.dumps(records, allow_nan=False)) == records


def test_calls_of_transformers_are_counted(records):
    assert records[STOCK]["tokens_per_call"] == 1
    assert records[f"{STOCK}: layers:1"]["tokens_per_call"] is None  # its drafts are passes of the target too
    target, prompts = tiny_target(), tiny_prompts(2)
    twin = CausalDrafter(TorchModel(stock_copy(target.model), "model:twin"), "model:twin", target.vocab_size)
    arms = [Arm("twin", twin, 3), *arms_of(target, "lookup", draft_length=3)]
    found = {
        r["contestant"]: r["tokens_per_call"] for r in bench(Settings(target, TOKENS, eos=[]), arms, prompts, (), 1)
    }
    assert found["twin"] == found[f"{STOCK}: twin"] == 4  # a perfect drafter of 3 tokens, theirs as long as ours


def test_a_contestant_that_writes_another_text_is_found(monkeypatch):
    target, prompts = tiny_target(), tiny_prompts(2)
    honest = Theirs.run

    def spoilt(self, *arguments):
        run = honest(self, *arguments)
        wrong = [*run.tokens[:4], (run.tokens[4] + 1) % VOCABULARY, *run.tokens[5:]]
        return Run(wrong, run.seconds, run.calls) if self.name == STOCK else run

    monkeypatch.setattr(Theirs, "run", spoilt)
    found = {r["contestant"]: r["texts"] for r in bench(Settings(target, TOKENS), pool(target)[:1], prompts, (), 1)}
    assert found[STOCK]["mismatches"] == 2
    assert [where["position"] for where in found[STOCK]["where"]] == [4, 4]
    assert all(where["margin"] > 0.01 for where in found[STOCK]["where"])
    assert found[STOCK_ON_OURS]["mismatches"] == 0


def test_texts_are_compared_by_hand():
    target, prompt = tiny_target(), tiny_prompts(1)[0]
    settings = Settings(target, 8)
    text = reference_text(target, prompt, 8)
    logits = target.forward(target.prefill(prompt), prompt[-1:])[-1]
    other = int(logits.argsort()[-2])

    def compare(found, rule=None):
        own = settings if rule is None else Settings(target, 8, rule)
        runs = [[[Run(tokens, 1.0, 1)]] for tokens in (text, found)]
        return compare_texts(own, [prompt], *runs)

    (where,) = compare([other, *text[1:]])["where"]
    assert (where["position"], where["near_tie"]) == (0, False)
    assert where["margin"] == pytest.approx(float(logits[text[0]] - logits[other]))
    (short,) = compare(text[:5])["where"]  # the start of the text: no tie explains an end
    assert (short["position"], short["margin"], short["near_tie"]) == (5, None, False)
    # a bias that makes the second token as good as the first, but for rounding
    rule = make_rule(logit_bias={other: where["margin"] - 1e-6})
    tie = compare([other, *text[1:]], rule)
    assert (tie["near_ties"], tie["mismatches"]) == (1, 0)


def test_the_interval_of_a_ratio():
    a, b = np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])
    assert ratio([a], [b]) == (0.5, [0.5, 0.5])  # every prompt has the same ratio
    assert ratio([a[:1]], [b[:1]]) == (0.5, None)
    # by hand: R = 2, z = (1, 3) / 2 - 1 = (-1/2, 1/2), sd(z) = 1 / sqrt(2), t_1(0.975) = 12.7062
    value, (low, high) = ratio([np.array([1.0, 3.0])], [np.array([1.0, 1.0])])
    assert (value, high / value, value / low) == pytest.approx((2, np.exp(12.7062 / 2), np.exp(12.7062 / 2)), rel=1e-4)
    # coverage: 400 samples of 20 prompts hold the true ratio 2 in 95% of cases, sd 1.1%; false alarm below 1e-4
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        common = rng.lognormal(0, 1, 20)  # what prompts do to both
        found = ratio([2 * common * rng.lognormal(0, 0.1, 20)], [common * rng.lognormal(0, 0.1, 20)])[1]
        inside += found[0] <= 2 <= found[1]
    assert 0.90 < inside / 400 < 0.99


def test_stock_copies_run_torch_layers_and_leave_ours_alone():
    target = tiny_target()
    settings = target.model.generation_config.to_dict()
    contestants, _ = stock_contestants(target, pool(target))
    theirs = {one.name: one.model for one in contestants}
    assert target.model.generation_config.to_dict() == settings
    assert any("forward" in vars(module) for module in target.model.modules())
    assert not any("forward" in vars(module) for module in theirs[STOCK].modules())
    assert theirs[STOCK_ON_OURS].get_submodule("lm_head") is target.model.lm_head
    twin = stock_copy(target.model)
    shared = {p.data_ptr() for p in target.model.parameters()} & {p.data_ptr() for p in twin.parameters()}
    assert not shared
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(twin(ids).logits, target.model(ids).logits)


class Slow:
    """A policy whose calls take a known time."""

    needs = frozenset()

    def start(self, rows, arms, max_draft, rng, horizon=None):
        self.arms = len(arms)

    def restart(self, rows, keep=0.0, horizon=None):
        time.sleep(0.004)

    def select(self, rows, context):
        time.sleep(0.002)
        return np.full(len(rows), self.arms - 1)

    def update(self, rows, rounds):
        time.sleep(0.001)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_slow_policy_and_a_slow_caller_are_told_apart(batch_size):
    target, prompts = tiny_target(), tiny_prompts(3)
    arms = oracle_arms(target, prompts, 8, length=3)[1:2]

    def on_round(rows, rounds):
        time.sleep(0.005)

    found = decode(target, arms, prompts, Slow(), 8, on_round=on_round, batch_size=batch_size)
    share = 1 / batch_size  # rounds played together share alike
    for generation in found:
        first, *others = generation.rounds
        assert first["policy_seconds"] >= share * 0.007  # with the restart
        for played in (first, *others):
            assert played["policy_seconds"] >= share * 0.003
            assert played["rest_seconds"] >= share * 0.005
            assert played["seconds"] == pytest.approx(
                sum(played[f"{name}_seconds"] for name in ("draft", "verify", "commit", "score"))
            )


def test_rounds_and_prefills_fill_the_time(monkeypatch):
    """Nothing is counted twice or left out: between the first choice and the end all is some round's or a prefill."""
    target, prompts = tiny_target(), tiny_prompts(4)
    arms = pool(target)
    prefill = LiveEnvironment._prefill

    def slow_prefill(self, rows):
        start = target.clock()
        time.sleep(0.05)
        prefill(self, rows)
        for row in rows:
            self.texts[row][-1].prefill_seconds = target.clock() - start

    monkeypatch.setattr(LiveEnvironment, "_prefill", slow_prefill)
    clock = []
    account = TimedPolicy.account
    monkeypatch.setattr(Slow, "restart", lambda *_: clock.append(time.perf_counter()))
    monkeypatch.setattr(TimedPolicy, "account", lambda *args: [account(*args), clock.append(time.perf_counter())])
    found = decode(target, arms, prompts, Slow(), 8)
    rounds = [played for generation in found for played in generation.rounds]
    counted = sum(p["seconds"] + p["policy_seconds"] + p["rest_seconds"] for p in rounds)
    counted += sum(generation.prefill_seconds for generation in found[1:])
    assert abs(clock[-1] - clock[0] - counted) < 0.04  # a prefill counted twice or not at all is 50 ms or more
    assert min(generation.prefill_seconds for generation in found) >= 0.05


def test_catch_up_is_the_pass_that_reads_missed_tokens():
    target, prompt = tiny_target(), tiny_prompts(1)[0]
    arms = [arms_of(target, "none")[0], Arm("other", other_model(target), 3)]
    names = [arm.name for arm in arms]
    (found,) = decode(target, arms, [prompt], make_policy("random", None, names), 40)
    assert any(not played["missed"] and played["drafted"] for played in found.rounds)
    missed = [played for played in found.rounds if played["missed"] and played["drafted"]]
    assert missed
    for played in found.rounds:
        assert 0 <= played["catch_up_seconds"] <= played["draft_seconds"]
        assert (played["catch_up_seconds"] > 0) == bool(played["missed"] and played["drafted"])


def test_memory_by_hand():
    target = tiny_target()
    none, lookup, layers, other = (drafter_memory(target, arm) for arm in pool(target))
    assert none["weight_bytes"] == none["state_bytes_per_token"] == lookup["weight_bytes"] == 0
    assert layers["weight_bytes"] == 0  # all of them are the target's
    assert other["weight_bytes"] == sum(x.nbytes for m in [tiny_model()] for x in (*m.parameters(), *m.buffers()))
    # keys and values x layers x 2 heads of 8 numbers x 4 bytes
    assert layers["state_bytes_per_token"] == 2 * 1 * 2 * 8 * 4
    assert other["state_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert lookup["state_table_bytes_per_token"] > 0
    whole = torch.zeros(10)
    assert held_bytes([whole, whole[:5], {"again": whole[3:]}], set())[0] == 40  # a storage counts once
    assert held_bytes(whole[2:], {("storage", whole.data_ptr())})[0] == 0


class Failing:
    name, point_mass = "failing", True

    def open(self, prompt):
        return self

    def draft(self, context, limit, rule, position):
        if position > 2:
            raise ValueError("out of ideas")
        return Draft([1])


@pytest.mark.filterwarnings("ignore:drafter failing")
def test_a_drafter_that_fails_is_named():
    target = tiny_target()
    found = bench(Settings(target, TOKENS), [Arm("failing", Failing(), 2)], tiny_prompts(1), (), 1, False)
    assert [record["contestant"] for record in found] == [PLAIN, "failing"]
    assert [record["retired"] for record in found] == [None, "ValueError: out of ideas"]
    assert found[1]["speedup_ci"] is None  # one prompt
    assert found[1]["texts"]["equal"] == 1


@pytest.mark.parametrize("verification", ["rejection", "gumbel"])
def test_sampling_with_processors(verification):
    target, prompts = tiny_target(), tiny_prompts(2)
    rule = make_rule(0.8, verification, top_k=7, repetition_penalty=1.2, frequency_penalty=0.3)
    found = bench(Settings(target, TOKENS, rule), pool(target), prompts, (), 1)
    assert all(record["tokens"] == 2 * TOKENS and "texts" not in record for record in found)


def test_transformers_gets_the_penalties_and_the_endings():
    target, prompts = tiny_target(), tiny_prompts(3)
    rule = make_rule(repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={5: 2.0})
    eos = [reference_text(target, prompts[0], TOKENS)[3]]
    for settings in (
        Settings(target, TOKENS, rule),
        Settings(target, TOKENS, eos=eos),
        Settings(target, TOKENS, eos=[]),
    ):
        for record in bench(settings, pool(target), prompts, (), 1):
            assert record["texts"]["equal"] == 3, record["contestant"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench")
    target = tiny_target()
    target.model.save_pretrained(path / "model")
    target.tokenizer.save_pretrained(path / "model")
    lines = [{"id": f"p{i}", "split": "evaluate", "prompt": f"w{i + 2} w{i + 3} w{i + 2}"} for i in range(3)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(folder, *options):
    where = ("--target", folder / "model", "--device", "cpu", "--prompts", folder / "prompts.jsonl")
    return cli.main([str(part) for part in ("bench", *where, *options)])


def test_command_line(folder, capsys):
    options = (
        "--drafter",
        "lookup",
        "--drafter",
        f"model:{folder / 'model'}",
        "--policy",
        "metasd-ucb",
        "--reward",
        "be",
    )
    options += ("--draft-length", 2, "--max-new-tokens", 9, "--repetitions", 1, "--limit", 2, "--carry-over", "keep")
    assert command(folder, *options, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert [record["contestant"] for record in found if record["ours"]][-1] == "metasd-ucb:reward=be"
    assert {run["prompt"] for run in found[0]["runs"]} == {"p0", "p1"}
    assert found[0]["settings"]["arms"]["lookup"] == "lookup@2"
    assert found[0]["settings"]["carry_over"] == "keep"
    assert command(folder, *options, "--no-transformers") == 0
    out = capsys.readouterr().out
    for word in (PLAIN, "lookup", "metasd-ucb", "catch-up", "overhead", "2 same"):
        assert word in out
    assert STOCK + ":" not in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ["--drafter"]),
        (("--drafter", "plain=lookup"), ["different names", "plain"]),
        (("--drafter", "lookup", "--policy", "fixed:none"), ["none"]),
        (("--drafter", "lookup", "--repetitions", "0"), ["--repetitions", "1 or more"]),
        (("--drafter", "lookup", "--carry-over", "some"), ["carry_over"]),
        (("--drafter", "lookup", "--max-new-tokens", "400"), ["256 positions"]),
        (("--drafter", "lookup", "--json", "no/such/folder"), ["folder"]),
    ],
)
def test_refusals(folder, capsys, options, words):
    assert command(folder, *options) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for word in words:
        assert word in err


def test_bench_refuses_nothing_to_do():
    with pytest.raises(InputError, match="repetitions and prompts"):
        bench(Settings(tiny_target(), 4), [], [])


GPU = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"


def test_the_gpu_script_refuses_a_machine_without_one():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    found = subprocess.run(["bash", str(GPU)], env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("gpu.sh: error: expected a CUDA device")
    assert found.stderr.count("\n") == 1


def test_the_gpu_script_calls_what_it_says(folder, tmp_path):
    """A python that claims a device and writes down what it is asked for; the last words are valid commands."""
    stub = tmp_path / "python"
    stub.write_text(
        f"#!/bin/sh\ncase $2 in *get_device_name*) echo 'NVIDIA H200';; *) shift; echo \"$*\" >>{tmp_path}/log;; esac\n"
    )
    stub.chmod(0o755)
    environment = os.environ | {"PYTHON": str(stub), "OUT": str(tmp_path / "out"), "TARGET": str(folder / "model")}
    environment |= {
        "DRAFTERS": "none lookup@2",
        "PROMPTS": str(folder / "prompts.jsonl"),
        "TOKENS": "5",
        "CALIBRATE": "0",
    }
    subprocess.run(["bash", str(GPU)], env=environment, check=True, capture_output=True)
    calls = [line.partition("main()) ")[2].split() for line in (tmp_path / "log").read_text().splitlines()]
    calls = [["cpu" if word == "cuda" else word for word in call] for call in calls if call]
    assert [call[0] for call in calls] == ["bench", "record"]
    for call in calls:
        assert cli.main([*call, "--quiet"]) == 0
    assert {"bench.json", "trace.safetensors", "machine.txt", "tests.txt"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }
    (plain, *_) = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert plain["settings"]["dtype"] == "bfloat16"
