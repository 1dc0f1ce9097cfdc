"""Signals of the drafters' laws in recordings, and the arms that replay derives from them, against live drafters."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy.special import softmax

from metasd_live.decode import LiveEnvironment
from metasd_live.drafters import Arm, Draft
from metasd_live.prompts import Prompt
from metasd_live.record import Recorder, law_signals, record
from metasd_live.verify import Rule
from metasd_sim import stop_rules, traces
from metasd_sim.arms import derive
from metasd_sim.environments import ReplayEnvironment
from metasd_sim.policies import make_policy
from metasd_sim.simulate import simulate
from metasd_sim.stop_rules import StopRule, parse_stop_rule

from .chain_models import ChainTarget, chain_logits, law_arm, no_draft, table_arm
from .live_cases import arms_of, tiny_target
from .sim_cases import refuses

VOCABULARY, LIMIT = 5, 16
PROMPTS = [Prompt(str(i), f"{i % 5} {i // 5 % 5} {i % 3}") for i in range(8)]
RULES = [Rule(), Rule("rejection", 0.8), Rule("gumbel", 0.8)]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.verification)
LAW = ("entropy", "top_probability", "margin")
LENGTHS = {"near": 4, "far": 5, "table": 3}


def target_logits():
    return chain_logits(0, VOCABULARY)


def drafter_logits():
    near = target_logits() + chain_logits(1, VOCABULARY, 0.7)
    return {"near": near, "far": chain_logits(2, VOCABULARY, 2.0, 0.3)}


def some_arms(lengths=None):
    lengths = LENGTHS if lengths is None else lengths
    laws = [law_arm(name, logits, lengths[name]) for name, logits in drafter_logits().items()]
    return [*laws, table_arm("table", 3, VOCABULARY, lengths["table"]), no_draft()]


def a_recorder(rule, **changes):
    recorder = Recorder(ChainTarget(target_logits(), (0,)), some_arms(), LIMIT, rule, seed=5, overlap_dtype="float64")
    return replace(recorder, **({"signals": True} | changes))


def recorded(rule, **changes):
    recorder = a_recorder(rule, **changes)
    return traces.merge([recorder.record(i, prompt) for i, prompt in enumerate(PROMPTS)])


def laws_after(prompt, text, logits, rule):
    """The drafter's law for each token of the text; [T, vocab]."""
    ids = [*map(int, prompt.text.split()), *text.tolist()]
    pairs = np.array([ids[i - 2 : i] for i in range(len(ids) - len(text), len(ids))])
    return softmax(logits[pairs[:, 0], pairs[:, 1]] / (rule.temperature or 1.0), axis=1)


@every_rule
def test_signals_are_those_of_the_laws_on_the_text(rule):
    trace = recorded(rule)
    trace.check()
    assert (np.diff(trace.offsets) < LIMIT).any()
    for q, prompt in enumerate(PROMPTS):
        rows = np.arange(trace.offsets[q], trace.offsets[q + 1])
        text = trace.tokens[rows]
        for a, (name, logits) in enumerate(drafter_logits().items()):
            law = laws_after(prompt, text, logits, rule)
            with np.errstate(divide="ignore"):
                chosen = np.log(law[np.arange(len(text)), text])
            expected = {signal: getattr(stop_rules, signal)(law) for signal in LAW} | {"log_q": chosen}
            for t, row in enumerate(rows):
                n = min(LENGTHS[name], len(text) - t)
                for signal, values in expected.items():
                    found = trace.tensors()[signal][row, a]
                    np.testing.assert_allclose(found[:n], values[t : t + n], rtol=1e-5, atol=1e-6)
                    assert np.isnan(found[n:]).all()
    for a in (2, 3):  # point masses have no law: certain of what they propose
        assert all(np.isnan(trace.tensors()[signal][:, a]).all() for signal in LAW)
    log_q, known = trace.log_q[:, 2], ~np.isnan(trace.overlap[:, 2])
    np.testing.assert_array_equal(~np.isnan(log_q), known)
    np.testing.assert_array_equal(np.exp(log_q[known]), trace.accept[:, 2][known])
    assert np.isnan(trace.log_q[:, 3]).all()
    assert set(log_q[known]) == {0.0, -np.inf}


@every_rule
def test_all_else_is_recorded_as_without_signals(rule):
    plain, more = recorded(rule, signals=False), recorded(rule)
    assert plain.tensors().keys() == more.tensors().keys() - {"log_q", *LAW}
    for name, value in plain.tensors().items():
        np.testing.assert_array_equal(value, more.tensors()[name])
    assert more.provenance["signals"]
    assert not plain.provenance["signals"]


def test_acceptance_follows_from_the_recorded_logarithms():
    trace = recorded(RULES[1])
    for a, name in enumerate(drafter_logits()):
        for depth in range(LENGTHS[name]):
            ratio = np.exp(trace.log_q[: -depth or None, a, depth] - np.roll(trace.log_p, -depth)[: -depth or None])
            known = ~np.isnan(ratio)
            accept = trace.accept[: -depth or None, a, depth]
            np.testing.assert_allclose(accept[known], np.minimum(1.0, ratio[known]), rtol=1e-5, atol=1e-6)
            assert np.all(accept[~known] == 0)


@every_rule
def test_a_prefix_equals_a_recording_with_that_draft_length(rule):
    lengths = {"near": 3, "far": 2, "table": 2}
    short = recorded(rule, arms=some_arms(lengths))
    derived = derive(recorded(rule), ["near@3", "far@2", "table@2", "none"])
    assert derived.drafters == short.drafters
    assert derived.tensors().keys() == short.tensors().keys()
    for name, value in short.tensors().items():
        np.testing.assert_array_equal(derived.tensors()[name], value, err_msg=name)


def test_an_ensemble_of_recorded_laws():
    trace = recorded(RULES[1])
    derived = derive(trace, ["ensemble(near,far)"])
    logits = drafter_logits()
    for q, prompt in enumerate(PROMPTS):
        rows = np.arange(trace.offsets[q], trace.offsets[q + 1])
        text = trace.tokens[rows]
        p, near, far = (
            laws_after(prompt, text, table, RULES[1])[np.arange(len(text)), text]
            for table in (target_logits(), logits["near"], logits["far"])
        )
        accept = np.minimum(1.0, (near + far) / 2 / p)
        for t, row in enumerate(rows):
            n = min(4, len(text) - t)
            np.testing.assert_allclose(derived.accept[row, 0, :n], accept[t : t + n], rtol=1e-5, atol=1e-6)
            assert np.all(derived.accept[row, 0, n:] == 0)
            assert derived.drafted[row, 0] == min(4, LIMIT - t)


@dataclass
class Stopped:
    """Drafts until a rule rejects the law of the next token, before that token is drawn."""

    drafter: object
    rule: StopRule
    name: str = "stopped"
    point_mass: bool = False

    def open(self, prompt):
        return StoppedStream(self.drafter.open(prompt), self.rule)


@dataclass
class StoppedStream:
    stream: object
    stops: StopRule

    def draft(self, context, limit, rule, position):
        draft = self.stream.draft(context, limit, rule, position)  # token by token: a shorter one is its prefix
        if not draft.tokens:
            return draft
        signals = {name: values.numpy() for name, values in law_signals(draft.laws).items()}
        length = int(np.cumprod(self.stops(**signals)).sum())
        return Draft(draft.tokens[:length], draft.laws[:length]) if length else Draft()


@pytest.mark.parametrize("rule", [RULES[0], RULES[2]], ids=lambda rule: rule.verification)
@pytest.mark.parametrize("text", ["entropy=0.9", "adaedl=0.6", "max-confidence=0.6", "margin=0.8"])
def test_live_stop_rules_equal_their_replay(rule, text):
    stop = parse_stop_rule(text)
    trace = derive(recorded(rule), [f"near?{text}", f"far@3?{text}", "table"])
    near, far, table, _ = some_arms()
    stopped = [Arm("near", Stopped(near.drafter, stop), 4), Arm("far", Stopped(far.drafter, stop), 3), table]
    prompts = [[*map(int, prompt.text.split())] for prompt in PROMPTS]
    live = LiveEnvironment(ChainTarget(target_logits(), (0,)), stopped, prompts, LIMIT, rule, seed=5)
    for seed in range(3):
        histories = [
            simulate(make_policy("random"), environment, seed=seed, history=True).history
            for environment in (live, ReplayEnvironment(trace))
        ]
        a, b = histories
        for name in ("arm", "accepted", "emitted"):
            np.testing.assert_array_equal(getattr(a.rounds, name), getattr(b.rounds, name), err_msg=name)
        # what is drafted follows the text until the first rejection
        kept = (a.rounds.accepted == a.rounds.drafted) & (a.rounds.emitted > a.rounds.accepted)
        np.testing.assert_array_equal(a.rounds.drafted[kept], b.rounds.drafted[kept])
        assert kept.any()
        stops = a.rounds.drafted < np.array([4, 3, 0])[a.rounds.arm]
        assert stops.any()


def test_recordings_with_signals_resume_and_do_not_mix(tmp_path):
    out = tmp_path / "t.safetensors"
    shards = tmp_path / "t.safetensors.shards"
    shards.mkdir()
    recorder = a_recorder(RULES[1])
    traces.write(recorder.record(0, PROMPTS[0]), shards / "00000.safetensors")
    with refuses("00000.safetensors", "signals", "--force"):
        record(replace(recorder, signals=False), PROMPTS, out)
    whole, again = recorded(RULES[1]), record(recorder, PROMPTS, out)
    for name, value in whole.tensors().items():
        np.testing.assert_array_equal(again.tensors()[name], value)
    shards = tmp_path / "other.safetensors.shards"
    shards.mkdir()
    traces.write(replace(recorder, signals=False).record(0, PROMPTS[0]), shards / "00000.safetensors")
    with refuses("00000.safetensors", "signals"):
        record(recorder, PROMPTS, tmp_path / "other.safetensors")


def test_signals_of_a_transformer_fit_their_type(tmp_path):
    target = tiny_target()
    arms = arms_of(target, "layers:1@3", "lookup@2")
    for rule in (Rule(), Rule("rejection", 0.02)):  # laws so sharp that margins pass the range of float16
        recorder = Recorder(target, arms, 6, rule, signals=True)
        out = tmp_path / f"{rule.verification}.safetensors"
        trace = record(recorder, [Prompt("a", "w5 w6 w5 w6"), Prompt("b", "w3 w9 w3")], out)
        assert trace.entropy.dtype == trace.margin.dtype == np.float16
        assert trace.log_q.dtype == np.float32
        assert derive(traces.read(out), ["layers:1@3@2?adaedl=0.3"]).arms == ("layers:1@3@2?adaedl=0.3",)
    assert torch.get_num_threads() == 1
