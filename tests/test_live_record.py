"""Recording: what a trace says is what live rounds do, and an interrupted recording resumes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from metasd_live.calibrate import measure_costs, slope_within
from metasd_live.decode import LiveEnvironment
from metasd_live.drafters import Arm
from metasd_live.prompts import Prompt, prompt_features
from metasd_live.record import Recorder, record
from metasd_sim import traces
from metasd_sim.environments import ReplayEnvironment
from metasd_sim.policies import make_policy
from metasd_sim.simulate import simulate
from tests.live_cases import arms_of, oracle_arms, reference_text, tiny_target
from tests.live_cases import draft as draft_of
from tests.sim_cases import refuses

LIMIT = 30
WORDS = ["w5 w6 w7 w5 w6", "w9 w2 w9", "w4", "w3 w8 w3 w8 w3", "w11 w2 w11 w2"]
PROMPTS = [Prompt(f"p{i}", text, "odd" if i % 2 else "even") for i, text in enumerate(WORDS)]
POLICIES = ["random", "kl-ucb-trials", "thompson-trials", "metasd-ucb", "metasd-ucb:reward=bd-verified,beta=0.3"]
POLICIES += ["metasd-ucb:reward=trials", *(f"fixed:{arm}" for arm in range(6))]


def a_target(ends):
    """With an end of sequence that some texts reach."""
    target = tiny_target()
    text = reference_text(target, target.encode(WORDS[0]), LIMIT)
    return tiny_target(eos=(text[17],)) if ends else target


def a_recorder(target, **changes):
    prompts = [target.encode(prompt.text) for prompt in PROMPTS]
    arms = [*arms_of(target, "none", "lookup@6", "both=chain(lookup@1,none)@4"), *oracle_arms(target, prompts, LIMIT)]
    return replace(Recorder(target, arms, LIMIT, overlap_dtype="float32"), **changes)


def same_trace(a, b):
    assert (a.arms, a.drafters, a.queries, a.provenance, a.costs) == (
        b.arms,
        b.drafters,
        b.queries,
        b.provenance,
        b.costs,
    )
    assert a.tensors().keys() == b.tensors().keys()
    for name, value in a.tensors().items():
        np.testing.assert_array_equal(b.tensors()[name], value)
    return True


@pytest.mark.parametrize("ends", [False, True])
def test_live_rounds_equal_their_replay(tmp_path, ends):
    target = a_target(ends)
    recorder = a_recorder(target)
    trace = record(recorder, PROMPTS, tmp_path / "trace.safetensors")
    assert (np.diff(trace.offsets) < LIMIT).any() == ends
    live = LiveEnvironment(target, recorder.arms, [target.encode(prompt.text) for prompt in PROMPTS], LIMIT)
    replay = ReplayEnvironment(traces.read(tmp_path / "trace.safetensors"))
    for spec in POLICIES:
        for seed in range(2):
            played = [
                simulate(make_policy(spec, arms=live.arms), environment, seed=seed, history=True, carry_over="keep")
                for environment in (live, replay)
            ]
            for name in ("arm", "drafted", "accepted", "emitted"):
                a, b = (getattr(outcome.history.rounds, name) for outcome in played)
                np.testing.assert_array_equal(a, b, err_msg=f"{name} of {spec}")
            np.testing.assert_array_equal(played[0].history.query, played[1].history.query)
            if "bd-verified" in spec:
                a, b = (outcome.history.rounds.overlap for outcome in played)
                np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_trace_holds_the_plain_text_and_its_probabilities(tmp_path):
    target = a_target(True)
    recorder = a_recorder(target)
    trace = record(recorder, PROMPTS, tmp_path / "trace.safetensors")
    assert trace.tokens.tolist() == [
        token for prompt in PROMPTS for token in reference_text(target, target.encode(prompt.text), LIMIT)
    ]
    for query, prompt in enumerate(PROMPTS):
        ids = target.encode(prompt.text)
        assert trace.queries[query] == traces.Query(prompt.id, prompt.category, prompt.sha256, len(ids))
        start, end = trace.offsets[query : query + 2]
        text = trace.tokens[start:end].tolist()
        with torch.no_grad():
            p = target.model(torch.tensor([ids + text])).logits[0].softmax(-1).numpy()[len(ids) - 1 :]
        np.testing.assert_allclose(trace.log_p[start:end], np.log(p[np.arange(len(text)), text]), atol=1e-5)
        for t in range(len(text)):
            for a, arm in enumerate(recorder.arms):
                limit = min(arm.length, LIMIT - t)
                draft = draft_of(arm.drafter, ids + text[:t], limit)[:limit] if limit else []
                draft = draft[: next((i + 1 for i, token in enumerate(draft) if token in target.eos), len(draft))]
                assert trace.drafted[start + t, a] == len(draft)
                rest = text[t:]
                matches = [i < len(rest) and token == rest[i] for i, token in enumerate(draft)]
                accepted = next((i for i, match in enumerate(matches) if not match), len(matches))
                assert trace.accept[start + t, a].tolist() == [1] * accepted + [0] * (trace.max_draft - accepted)
                verified = min(accepted + 1, len(draft), len(rest))
                expected = [p[t + i, draft[i]] for i in range(verified)]
                np.testing.assert_allclose(trace.overlap[start + t, a, :verified], expected, atol=1e-5)
                assert np.isnan(trace.overlap[start + t, a, verified:]).all()


def test_provenance_and_formats(tmp_path):
    target = tiny_target()
    arms = arms_of(target, "none", "lookup")
    trace = record(Recorder(target, arms, 5, seed=3), PROMPTS[:2], tmp_path / "trace.safetensors")
    assert trace.verification == "greedy"
    assert trace.drafters == ("none", "lookup@5")
    assert [trace.tensors()[name].dtype for name in ("tokens", "accept", "drafted", "overlap")] == [
        np.int32,
        np.uint8,
        np.uint8,
        np.float16,
    ]
    expected = {"target": "tiny-llama", "temperature": 0.0, "processors": [], "seed": 3, "dtype": "float32"}
    expected |= {"chat_template": True, "tokenizer": target.tokenizer_hash}
    assert {key: trace.provenance[key] for key in expected} == expected
    assert set(trace.provenance["versions"]) == {"metasd", "torch", "transformers"}


def test_a_trace_has_the_features_of_its_prompts(tmp_path):
    target = tiny_target()
    out = tmp_path / "trace.safetensors"
    recorder = Recorder(target, arms_of(target, "none", "lookup"), 5)
    record(recorder, PROMPTS, out)
    trace = traces.read(out)
    for prompt, row in zip(PROMPTS, trace.features, strict=True):
        names, values = prompt_features(prompt.text)
        assert trace.feature_names == names
        np.testing.assert_array_equal(row, np.float32(values))
    assert len(np.unique(trace.features, axis=0)) == len(PROMPTS)
    environment = ReplayEnvironment(trace)
    outcome = simulate(make_policy("lin-ucb"), environment, runs=2, carry_over="keep")
    assert outcome.tokens.tolist() == [[len(trace.tokens)]] * 2


def test_a_shard_without_features_is_not_resumed(tmp_path):
    target = tiny_target()
    out = tmp_path / "trace.safetensors"
    with pytest.raises(Interrupted):
        record(a_recorder(target), PROMPTS, out, on_text=interrupt_after(2))
    shard = tmp_path / "trace.safetensors.shards" / "00001.safetensors"
    traces.write(replace(traces.read(shard), features=None, feature_names=()), shard, force=True)
    with refuses("00001.safetensors", "features", "--force"):
        record(a_recorder(target), PROMPTS, out)
    assert len(record(a_recorder(target), PROMPTS, out, force=True).features) == len(PROMPTS)


class Interrupted(Exception):
    pass


def interrupt_after(texts):
    left = [texts]

    def on_text():
        left[0] -= 1
        if left[0] == 0:
            raise Interrupted

    return on_text


def test_an_interrupted_recording_resumes(tmp_path, monkeypatch):
    target = tiny_target()
    whole = record(a_recorder(target), PROMPTS, tmp_path / "whole.safetensors")
    out = tmp_path / "resumed.safetensors"
    with pytest.raises(Interrupted):
        record(a_recorder(target), PROMPTS, out, on_text=interrupt_after(3))
    assert not out.exists()
    recorded = []
    plain = Recorder.record
    monkeypatch.setattr(
        Recorder, "record", lambda self, n, prompt: recorded.append(prompt.id) or plain(self, n, prompt)
    )
    assert same_trace(record(a_recorder(target), PROMPTS, out), whole)
    assert recorded == ["p3", "p4"]
    assert same_trace(traces.read(out), whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed.safetensors", "whole.safetensors"]


def test_resuming_with_other_settings_is_refused(tmp_path):
    target = tiny_target()
    out = tmp_path / "trace.safetensors"
    recorder = a_recorder(target)
    with pytest.raises(Interrupted):
        record(recorder, PROMPTS, out, on_text=interrupt_after(2))
    for other, word in (
        (a_recorder(target, max_new_tokens=LIMIT - 1), "max_new_tokens"),
        (a_recorder(target, seed=1), "provenance"),
        (a_recorder(target, overlap_dtype="float16"), "overlap_dtype"),
        (a_recorder(target, signals=True), "signals"),
        (a_recorder(target, arms=recorder.arms[:-1]), "arms"),
        (a_recorder(target, arms=[*recorder.arms[:-1], replace(recorder.arms[-1], length=1)]), "drafters"),
    ):
        with refuses("00000.safetensors", word, "--force"):
            record(other, PROMPTS, out)
    with refuses("00000.safetensors", "prompt", "p1"):
        record(recorder, PROMPTS[1:], out)
    (tmp_path / "trace.safetensors.shards" / "00001.safetensors").write_bytes(b"damaged")
    with refuses("00001.safetensors"):
        record(recorder, PROMPTS, out)
    other = a_recorder(target, max_new_tokens=LIMIT - 1)
    forced = record(other, PROMPTS, out, force=True)
    assert forced.max_new_tokens == LIMIT - 1
    with refuses("trace.safetensors", "--force"):
        record(recorder, PROMPTS, out)
    assert record(recorder, PROMPTS, out, force=True).max_new_tokens == LIMIT
    with refuses("prompts"):
        record(recorder, [], tmp_path / "empty.safetensors")


def test_costs_are_measured_for_every_length():
    target = a_target(True)
    arms = [*arms_of(target, "none", "lookup@3", "lookup@6"), Arm("slow", Slow(), 2)]
    counted = []
    prompts = [target.encode(text) for text in WORDS]
    costs = measure_costs(target, arms, prompts, repetitions=4, on_round=lambda: counted.append(1))
    assert costs.draft.shape == (4, 7)
    assert len(counted) >= 4 * 7
    assert (costs.verify > 0).all()
    assert costs.plain == pytest.approx(costs.verify[0] + costs.overhead, rel=0.5)
    assert costs.catch_up.tolist() == [0.0] * 4
    assert costs.draft[3, 1:3].min() > 2e-3 > costs.draft[:3].max()
    assert costs.draft[0].max() < 1e-4


class Slow:
    """Drafts the token 2, as often as it may, two milliseconds a draft."""

    name = "slow"
    point_mass = True

    def open(self, prompt):
        return self

    def draft(self, context, limit, rule, position):
        import time

        from metasd_live.drafters import Draft

        time.sleep(2.5e-3)
        return Draft([2] * limit)


def test_costs_go_into_the_trace(tmp_path):
    target = tiny_target()
    recorder = a_recorder(target)
    counted = []
    out = tmp_path / "trace.safetensors"
    trace = record(recorder, PROMPTS, out, PROMPTS[:2], 2, on_calibration=lambda: counted.append(1))
    assert traces.read(out).costs.to_json() == trace.costs.to_json()
    assert trace.costs.draft.shape == (6, trace.max_draft + 1)
    assert len(counted) >= 2 * (trace.max_draft + 1)
    assert trace.provenance["calibration"]["prompts"] == ["p0", "p1"]
    assert trace.provenance["calibration"]["repetitions"] == 2
    assert set(trace.costs.fit) <= set(trace.arms)


def test_a_prompt_that_does_not_fit_is_refused_before_the_recording(tmp_path):
    recorder = a_recorder(tiny_target(), max_new_tokens=250)
    with refuses("256 positions"):
        record(recorder, [*PROMPTS, Prompt("long", "w2 " * 9)], tmp_path / "trace.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_effect_of_the_context_is_told_from_hiccups():
    """y = group + .5 x but for one value in twenty, which took 1,000 times as long."""
    rng = np.random.default_rng(0)
    group, x = rng.integers(0, 3, 600), rng.integers(10, 200, 600)
    y = 10.0 * group + 0.5 * x
    y[rng.random(600) < 0.05] *= 1000
    assert slope_within(group, x, y) == pytest.approx(0.5, abs=0.03)
    assert slope_within(group, x, 10.0 * group - 0.5 * x) == 0  # no pass is faster after a longer context
    assert slope_within(group, np.full(600, 7), y) == 0
