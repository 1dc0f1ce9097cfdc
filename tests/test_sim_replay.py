"""Traces and their replay: the law given the text, exact expectations, and every refusal."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from metasd_sim import traces
from metasd_sim.costs import CostModel
from metasd_sim.environments import ReplayEnvironment
from metasd_sim.errors import InputError
from metasd_sim.policies import FixedArm, RandomArm, make_policy
from metasd_sim.regret import best_arm_ratio, speedup, stopping_time, stopping_time_regret, time_regret
from metasd_sim.simulate import simulate
from tests.sim_cases import make_trace


def expected_by_recursion(trace: traces.Trace, arm: int, end: int) -> tuple[float, float]:
    """E rounds and E seconds of one arm until `end` tokens, by brute-force recursion over the stream."""
    remaining = trace.remaining()
    rounds, seconds = np.zeros(len(trace.tokens) + 1), np.zeros(len(trace.tokens) + 1)
    for position in range(end - 1, -1, -1):
        rounds[position] = 1.0
        seconds[position] = trace.costs.seconds(np.array(arm), trace.drafted[position, arm].astype(int))
        reach = 1.0
        for n in range(trace.max_draft + 1):
            stop = reach * (1 - float(trace.accept[position, arm, n])) if n < trace.max_draft else reach
            reach -= stop
            to = position + min(n + 1, remaining[position])
            if to < end:
                rounds[position] += stop * rounds[to]
                seconds[position] += stop * seconds[to]
    return rounds[0], seconds[0]


def test_fixed_arm_on_a_hand_made_text():
    # one query of 5 tokens, depth 2; the arm's drafts from 0: both right; from 3: right, cut by the text's end
    accept = np.zeros((5, 1, 2), dtype=np.uint8)
    accept[0, 0] = [1, 1]
    accept[3, 0] = [1, 1]
    trace = replace(
        make_trace((5,), arms=1, depth=2, verification="greedy", costs=False),
        accept=accept,
        drafted=np.full((5, 1), 2, dtype=np.uint8),
    )
    trace.check()
    outcome = simulate(FixedArm(0), ReplayEnvironment(trace), history=True)
    rounds = outcome.history.rounds
    # round 1: 2 accepted, 3 emitted -> position 3; round 2: 2 accepted are the last tokens -> 2 emitted
    assert rounds.accepted.tolist() == [2, 2]
    assert rounds.emitted.tolist() == [3, 2]
    assert rounds.trials.tolist() == [2, 2]
    assert outcome.rounds.tolist() == [[2]]
    assert outcome.tokens.tolist() == [[5]]
    assert outcome.seconds is None


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    depth=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_exact_expectations_equal_a_recursion(lengths, depth, seed, data):
    trace = make_trace(tuple(lengths), arms=2, depth=depth, seed=seed)
    environment = ReplayEnvironment(trace)
    end = data.draw(st.integers(1, sum(lengths)))
    fixed = environment.fixed_arms(np.array([end]))
    for arm in range(2):
        rounds, seconds = expected_by_recursion(trace, arm, end)
        assert fixed.rounds[0, arm] == pytest.approx(rounds, rel=1e-12)
        assert fixed.seconds[0, arm] == pytest.approx(seconds, rel=1e-12)
    whole = environment.fixed_arms(np.array([sum(lengths)]))
    np.testing.assert_allclose(whole.query_rounds.sum(axis=0), whole.rounds[0])
    np.testing.assert_allclose(whole.query_seconds.sum(axis=0), whole.seconds[0])
    for q in range(len(lengths)):
        alone = ReplayEnvironment(trace.select([q])).fixed_arms(np.array([lengths[q]]))
        np.testing.assert_allclose(whole.query_rounds[q], alone.rounds[0])


def test_replayed_rounds_follow_the_recorded_probabilities():
    # chi-square of N at each visited position; family-wise false alarm 1e-3 over at most 40 cells
    trace = make_trace((6,), arms=2, depth=3, seed=3)
    outcome = simulate(RandomArm(), ReplayEnvironment(trace), runs=4000, seed=5, history=True)
    history = outcome.history
    start = np.zeros(len(history.step), dtype=int)
    position = np.zeros(4000, dtype=int)
    for i, row in enumerate(history.row):
        start[i] = position[row]
        position[row] += history.rounds.emitted[i]
    assert np.all(position == 6)
    cells = 0
    for at in range(6):
        for arm in range(2):
            n = history.rounds.accepted[(start == at) & (history.rounds.arm == arm)]
            survival = np.concatenate([[1], np.cumprod(trace.accept[at, arm].astype(float)), [0]])
            expected = -np.diff(survival) * len(n)
            seen = np.bincount(n, minlength=4)
            assert np.all(seen[expected == 0] == 0)
            live = expected > 5
            if live.sum() > 1:
                cells += 1
                scale = seen[live].sum() / expected[live].sum()
                assert chisquare(seen[live], expected[live] * scale).pvalue > 1e-3 / 40
    assert cells >= 6


def test_mean_of_replays_is_the_exact_expectation():
    # two-sided z-tests at 4.4 standard errors: false alarm about 1e-5 each
    trace = make_trace((9, 9, 9), arms=2, depth=4, seed=8)
    environment = ReplayEnvironment(trace)
    for arm in range(2):
        outcome = simulate(FixedArm(arm), environment, runs=4000, seed=arm)
        fixed = environment.fixed_arms(outcome.budgets)
        for values, exact in ((outcome.rounds, fixed.rounds), (outcome.seconds, fixed.seconds)):
            error = values.std(ddof=1) / np.sqrt(4000)
            assert abs(values.mean() - exact[0, arm]) < 4.4 * max(error, 1e-9)


def test_catch_up_counts_the_tokens_an_arm_missed_in_its_query():
    trace = make_trace((6, 4), arms=2, depth=1, seed=1, verification="greedy")
    trace = replace(
        trace,
        accept=np.zeros_like(trace.accept),
        drafted=np.zeros_like(trace.drafted),
        costs=CostModel.linear([0.0, 0.0], 1, verify=1.0, catch_up=0.25),
    )
    environment = ReplayEnvironment(trace)
    environment.reset(1, np.random.default_rng(0), frozenset())
    rows, seconds = np.array([0]), []
    for arm in (0, 0, 1, 0, 1, 1, 0, 1, 1, 0):
        environment.observe(rows)
        seconds.append(float(environment.step(rows, np.array([arm])).seconds[0]))
    # query 1: arm 1 first plays at position 2 having missed 2, arm 0 then missed 1, arm 1 missed 1, then none;
    # query 2 starts afresh: arm 0 missed 0, arm 1 missed 1, 0, arm 0 missed 2
    assert seconds == [1, 1, 1.5, 1.25, 1.25, 1, 1, 1.25, 1, 1.5]
    assert environment.done.tolist() == [True]


def test_overlaps_are_shown_at_verified_positions_only():
    trace = make_trace((30,), arms=2, depth=4, seed=4)
    outcome = simulate(make_policy("metasd-ucb:reward=bd-verified"), ReplayEnvironment(trace), runs=50, history=True)
    rounds = outcome.history.rounds
    verified = np.arange(4) < np.minimum(rounds.emitted, rounds.drafted)[:, None]
    assert np.array_equal(np.isfinite(rounds.overlap), verified)
    with pytest.raises(InputError, match="block_overlap"):
        simulate(make_policy("metasd-ucb:reward=bd"), ReplayEnvironment(trace))


def test_replay_regret_and_speedup_on_known_numbers():
    trace = make_trace((9, 5, 8, 7), arms=3, depth=3, seed=2, verification="greedy")
    environment = ReplayEnvironment(trace)
    fixed = environment.fixed_arms(np.array([29]))
    best = int(fixed.rounds[0].argmin())
    outcome = simulate(FixedArm(best), environment, runs=3)
    assert stopping_time_regret(outcome, environment).mean == pytest.approx([0])
    assert stopping_time_regret(outcome, environment).se == pytest.approx([0])
    assert best_arm_ratio(outcome, environment) == pytest.approx([1])
    other = (best + 1) % 3
    outcome = simulate(FixedArm(other), environment, runs=3)
    gap = fixed.query_rounds[:, other] - fixed.query_rounds[:, best]
    estimate = stopping_time_regret(outcome, environment)
    assert estimate.mean == pytest.approx([gap.sum()])
    assert estimate.se == pytest.approx([np.sqrt(4 * gap.var(ddof=1))])  # over queries, though all runs are equal
    assert stopping_time(outcome, environment).se[0] > 0
    expected = 29 * environment.costs.plain / fixed.seconds[0, other]
    assert speedup(outcome, environment).mean == pytest.approx([expected])
    fastest = fixed.seconds[0].min()
    assert time_regret(outcome, environment).mean == pytest.approx([fixed.seconds[0, other] - fastest])


def test_budget_within_the_stream_and_beyond():
    trace = make_trace((9, 5, 8), seed=6)
    environment = ReplayEnvironment(trace)
    outcome = simulate(RandomArm(), environment, budget=[3, 10, 22], runs=20)
    assert np.all(outcome.tokens >= [3, 10, 22])
    assert np.all(outcome.tokens[:, 2] == 22)
    estimate = stopping_time_regret(outcome, environment)
    assert np.isnan(estimate.se[0])  # no whole query yet
    assert np.isfinite(estimate.se[2])
    with pytest.raises(InputError, match="at most the 22 tokens"):
        simulate(RandomArm(), environment, budget=23)


def test_write_read_round_trip(tmp_path):
    trace = make_trace(seed=9)
    traces.write(trace, tmp_path / "t.safetensors")
    again = traces.read(tmp_path / "t.safetensors")
    for name, value in trace.tensors().items():
        np.testing.assert_array_equal(value, again.tensors()[name])
    for name in ("arms", "drafters", "queries", "verification", "max_new_tokens", "provenance"):
        assert getattr(trace, name) == getattr(again, name)
    np.testing.assert_array_equal(trace.costs.draft, again.costs.draft)
    with pytest.raises(InputError, match="--force"):
        traces.write(trace, tmp_path / "t.safetensors")
    traces.write(trace, tmp_path / "t.safetensors", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_merge_of_selected_parts_is_the_whole():
    trace = make_trace(seed=10)
    whole = traces.merge([trace.select([q]) for q in range(3)])
    for name, value in trace.tensors().items():
        np.testing.assert_array_equal(value, whole.tensors()[name])
    assert whole.queries == trace.queries
    with pytest.raises(InputError, match="different query ids"):
        traces.merge([trace, trace])
    with pytest.raises(InputError, match="max_new_tokens"):
        traces.merge([trace.select([0]), replace(trace.select([1]), max_new_tokens=99)])


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]


@pytest.mark.parametrize("where", ["header", "middle", "end", "length"])
def test_a_flipped_byte_is_refused(tmp_path, where):
    path = tmp_path / "t.safetensors"
    traces.write(make_trace(), path)
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    at = {"header": 8 + length // 2, "middle": 8 + length + 40, "end": len(content) - 1, "length": 5}[where]
    path.write_bytes(flip(content, at))
    with pytest.raises(InputError):
        traces.read(path)


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_a_cut_file_is_refused(tmp_path, keep):
    path = tmp_path / "t.safetensors"
    traces.write(make_trace(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="expected"):
        traces.read(path)


def test_a_hostile_header_size_is_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(InputError):
        traces.read(path)


def test_other_files_and_versions_are_refused(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(InputError, match="no such file"):
        traces.read(tmp_path / "none.safetensors")
    save_file({"tokens": np.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="without its header"):
        traces.read(tmp_path / "other.safetensors")
    header = {"schema": traces.SCHEMA + 1, "checksum": ""}
    save_file({"tokens": np.zeros(3)}, tmp_path / "newer.safetensors", {"metasd": json.dumps(header)})
    with pytest.raises(InputError, match="schema"):
        traces.read(tmp_path / "newer.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"accept": t.accept[:, :2]}, "accept of shape"),
        (lambda t: {"drafted": t.drafted[1:]}, "drafted of shape"),
        (lambda t: {"accept": np.where(t.accept > 0.5, np.nan, t.accept)}, "accept without NaN"),
        (lambda t: {"accept": np.where(t.accept > 0.5, 1.5, t.accept)}, "accept in"),
        (lambda t: {"accept": np.full_like(t.accept, 0.5)}, "past the draft"),
        (lambda t: {"offsets": t.offsets[::-1].copy()}, "offsets to rise"),
        (lambda t: {"offsets": np.array([0, 7, 7, 21])}, "offsets to rise"),
        (lambda t: {"max_new_tokens": 5}, "max_new_tokens"),
        (lambda t: {"arms": ("a", "a", "b")}, "different names"),
        (lambda t: {"verification": "typical"}, "verification"),
        (lambda t: {"verification": "greedy"}, "0 or 1"),
        (lambda t: {"tokens": t.tokens.astype(float)}, "tokens of integers"),
        (lambda t: {"log_p": np.full(len(t.tokens), np.nan)}, "log_p without NaN"),
        (lambda t: {"drafted": np.full_like(t.drafted, 9)}, "drafted in"),
        (lambda t: {"costs": CostModel.linear([0.0], 4)}, "costs.draft"),
    ],
)
def test_check_names_what_is_wrong(change, message):
    trace = make_trace()
    with pytest.raises(InputError, match=message) as error:
        replace(trace, **change(trace)).check("file")
    assert "\n" not in str(error.value)


def test_seconds_of_a_longer_context():
    """Greedy rounds by hand: each pays for the prompt and the text before it; plain decoding for every position."""
    trace = make_trace(lengths=(7, 3), arms=2, verification="greedy")
    costs = replace(trace.costs, per_context=0.25)
    trace = replace(
        trace,
        costs=costs,
        queries=tuple(replace(q, prompt_tokens=n) for q, n in zip(trace.queries, (4, 9), strict=True)),
    )
    environment = ReplayEnvironment(trace)
    fixed = environment.fixed_arms(np.array([10]))
    for arm in range(2):
        outcome = simulate(FixedArm(arm), environment, history=True)
        rounds = outcome.history.rounds
        start = np.cumsum(rounds.emitted) - rounds.emitted
        context = np.where(start < 7, 4 + start, 9 + start - 7)
        expected = costs.seconds(rounds.arm, rounds.drafted) + 0.25 * context
        np.testing.assert_allclose(rounds.seconds, expected)
        assert fixed.seconds[0, arm] == pytest.approx(expected.sum())
    by_query = [7 * costs.plain + 0.25 * sum(range(4, 11)), 3 * costs.plain + 0.25 * sum(range(9, 12))]
    np.testing.assert_allclose(fixed.query_plain, by_query)
    assert fixed.plain == pytest.approx(sum(by_query) / 10)
    gain = speedup(outcome, environment)
    assert gain.mean[0] == pytest.approx(sum(by_query) / outcome.seconds[0, 0])
