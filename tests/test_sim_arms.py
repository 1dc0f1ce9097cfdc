"""Arms derived from recorded ones: prefixes, stop rules, ensembles, no draft."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from metasd_sim import traces
from metasd_sim.arms import derive, derive_costs, parse_spec, parse_specs
from metasd_sim.cli import main
from metasd_sim.costs import CostModel, RoundClock
from metasd_sim.environments import ReplayEnvironment
from metasd_sim.policies import FixedArm, make_policy
from metasd_sim.simulate import simulate
from metasd_sim.stop_rules import StopRule, entropy, margin, parse_stop_rule, top_probability
from tests.sim_cases import make_trace, refuses

LAW = ("entropy", "top_probability", "margin")
NAMES = ("lookup", "lookup@6", "chain(lookup@1,ngram:x)@4", "ngram:what?.bin", "e")


def test_readings_of_a_name():
    def reading(text):
        spec = parse_spec(text, NAMES)
        return spec.drafters, spec.length, spec.rule, spec.ensemble

    adaedl = StopRule("adaedl", 0.4)
    assert reading("lookup") == (("lookup",), None, None, False)
    assert reading("lookup@6") == (("lookup@6",), None, None, False)  # the recorded one, not a prefix
    assert reading("lookup@5") == (("lookup",), 5, None, False)
    assert reading("lookup@6@3?adaedl=0.4") == (("lookup@6",), 3, adaedl, False)
    assert reading("lookup@6?adaedl=0.4") == (("lookup@6",), None, adaedl, False)
    assert reading("ngram:what?.bin?adaedl=0.4") == (("ngram:what?.bin",), None, adaedl, False)
    assert reading("chain(lookup@1,ngram:x)@4@2") == (("chain(lookup@1,ngram:x)@4",), 2, None, False)
    assert reading("none") == ((), None, None, False)
    assert reading("ensemble(lookup,e)") == (("lookup", "e"), None, None, True)
    assert reading("ensemble(chain(lookup@1,ngram:x)@4,e)@2?adaedl=0.4") == (
        ("chain(lookup@1,ngram:x)@4", "e"),
        2,
        adaedl,
        True,
    )
    assert reading("ensemble(e)") == (("e",), None, None, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unknown", ("lookup@6", "'unknown'")),
        ("lookup@", ("'lookup@'",)),
        ("lookup@0", ("none for no draft",)),
        ("lookup?svip=1", ("stop rule", "'svip'")),
        ("ensemble(lookup,unknown)", ("'ensemble(lookup,unknown)'",)),
        ("ensemble(e,e)", ("different drafters",)),
        ("ensemble()", ("'ensemble()'",)),
    ],
)
def test_names_that_mean_nothing_are_refused(text, words):
    with refuses("arm" if "rule" not in words[0] else "", *words):
        parse_spec(text, NAMES)


def test_arms_are_different_and_some():
    for texts in ([], ["lookup", "lookup"]):
        with refuses("different arms"):
            parse_specs(texts, NAMES)


# --- a trace with laws: texts of a chain over three tokens, drafters' laws depend on the last token


P = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])  # [last token, next]
Q = {
    "A": np.array([[0.2, 0.7, 0.1], [0.9, 0.05, 0.05], [0.0, 0.5, 0.5]]),
    "B": np.array([[0.3, 0.3, 0.4], [0.1, 0.1, 0.8], [0.0, 0.9, 0.1]]),
}
POINT = (2, None, 1)  # what the point mass C proposes after each token
DEPTH = {"A": 4, "B": 3, "C": 4}


def chain_trace(texts, limit, verification="rejection", costs=True):
    """What a recording of `texts` holds, each after the token 0; token by token, by the format's definitions."""
    tokens = np.concatenate(texts)
    offsets = np.cumsum([0, *map(len, texts)])
    shape = (len(tokens), 3, 4)
    accept, drafted = np.zeros(shape, dtype=np.float32), np.zeros(shape[:2], dtype=np.uint8)
    tensors = {name: np.full(shape, np.nan) for name in ("overlap", "log_q", *LAW)}
    log_p = np.zeros(len(tokens))
    for text, offset in zip(texts, offsets, strict=False):
        before = [0, *text]
        for t, token in enumerate(text):
            log_p[offset + t] = np.log(P[before[t], token])
            for a, (name, length) in enumerate(DEPTH.items()):
                own = min(length, limit - t)
                if name in Q:
                    drafted[offset + t, a] = own
                for d in range(min(own, len(text) - t)):
                    at, last, x = (offset + t, a, d), before[t + d], text[t + d]
                    if name in Q:
                        p, q = P[last], Q[name][last]
                        accept[at] = min(1.0, q[x] / p[x])
                        tensors["overlap"][at] = np.minimum(p, q).sum()
                        with np.errstate(divide="ignore"):
                            tensors["log_q"][at] = np.log(q[x])
                        for signal, value in zip(LAW, (entropy(q), top_probability(q), margin(q)), strict=True):
                            tensors[signal][at] = value
                    elif POINT[last] is None:
                        break
                    else:
                        drafted[offset + t, a] = d + 1
                        accept[at], tensors["overlap"][at] = POINT[last] == x, P[last, POINT[last]]
                        tensors["log_q"][at] = 0.0 if POINT[last] == x else -np.inf
                        if POINT[last] != x:  # the rest of the run, of which the text says nothing
                            token = POINT[last]
                            while drafted[offset + t, a] < own and POINT[token] is not None:
                                drafted[offset + t, a] += 1
                                token = POINT[token]
                            break
    if verification != "rejection":
        accept = (accept > 0.5).astype(np.uint8)
    return traces.Trace(
        arms=tuple(DEPTH),
        drafters=("model:a@4", "model:b@3", "ngram:c@4"),
        queries=tuple(traces.Query(f"q{i}", "all", "0" * 64, 1) for i in range(len(texts))),
        verification=verification,
        max_new_tokens=limit,
        tokens=tokens.astype(np.int32),
        offsets=offsets,
        accept=accept,
        drafted=drafted,
        log_p=log_p.astype(np.float64),
        costs=CostModel.linear([0.1, 0.2, 0.01], 4, 1.0, 0.1, [0.02, 0.03, 0.0], 0.05) if costs else None,
        **tensors,
    )


def random_texts(count=6, limit=8, seed=0):
    rng = np.random.default_rng(seed)
    texts = []
    for number in range(count):
        text = [0]
        while len(text) <= (limit if number % 2 else limit - 3):  # every other one ends before its limit
            text.append(int(rng.choice(3, p=P[text[-1]])))
        texts.append(np.array(text[1:]))
    return texts


def same(a, b, but=()):
    assert a.tensors().keys() == b.tensors().keys()
    for name, value in a.tensors().items():
        if name not in but:
            np.testing.assert_array_equal(b.tensors()[name], value, err_msg=name)
    assert (a.arms, a.drafters, a.queries, a.max_new_tokens) == (b.arms, b.drafters, b.queries, b.max_new_tokens)
    return True


def test_the_hand_made_trace_is_valid_and_survives_its_file(tmp_path):
    trace = chain_trace(random_texts(), 8)
    traces.write(trace, tmp_path / "t.safetensors")
    assert same(trace, traces.read(tmp_path / "t.safetensors"))
    assert same(trace, traces.merge([trace.select([0, 1]), trace.select([2, 3, 4, 5])]))
    derived = derive(trace, ["A@2?entropy=1", "none", "ensemble(A,B)"])
    traces.write(derived, tmp_path / "d.safetensors")
    again = traces.read(tmp_path / "d.safetensors")
    assert same(derived, again)
    np.testing.assert_array_equal(derived.costs.readers, again.costs.readers)
    assert np.isnan(again.costs.readers[1]).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("entropy", -0.1, "entropy of 0 or more"),
        ("margin", -1.0, "margin of 0 or more"),
        ("top_probability", 1.5, "top_probability in"),
        ("log_q", 0.5, "log_q of 0 or less"),
    ],
)
def test_signals_out_of_range_are_refused(name, value, message):
    trace = chain_trace(random_texts(), 8)
    with refuses("file", message):
        replace(trace, **{name: np.full_like(trace.entropy, value)}).check("file")
    with refuses("file", f"{name} of shape"):
        replace(trace, **{name: trace.entropy[:, :2]}).check("file")


def test_recorded_arms_stay_as_they_are():
    for trace in (chain_trace(random_texts(), 8), make_trace()):
        derived = derive(trace, trace.arms)
        assert same(trace, derived)
        np.testing.assert_array_equal(derived.costs.draft, trace.costs.draft)
        assert derived.provenance["derived_from"] == dict(zip(trace.arms, trace.drafters, strict=True))
    other = derive(trace, [trace.arms[2], trace.arms[0]])
    np.testing.assert_array_equal(other.accept, trace.accept[:, [2, 0]])


def test_a_prefix_is_cut_at_its_length():
    trace = chain_trace(random_texts(), 8)
    derived = derive(trace, ["A@2", "B", "C@1"])
    assert derived.max_draft == 3  # the longest, B's
    assert derived.drafters == ("model:a@2", "model:b@3", "ngram:c@1")
    np.testing.assert_array_equal(derived.drafted[:, 0], np.minimum(trace.drafted[:, 0], 2))
    np.testing.assert_array_equal(derived.drafted[:, 2], np.minimum(trace.drafted[:, 2], 1))
    for name in ("accept", "overlap", "log_q", *LAW):
        old, new = trace.tensors()[name], derived.tensors()[name]
        np.testing.assert_array_equal(new[:, 0, :2], old[:, 0, :2])
        np.testing.assert_array_equal(new[:, 1], old[:, 1, :3])
        np.testing.assert_array_equal(new[:, 0, 2:], 0 if name == "accept" else np.nan)
    np.testing.assert_array_equal(derived.costs.draft, trace.costs.draft[:, :4])


def test_no_draft_is_plain_decoding():
    trace = chain_trace(random_texts(), 8)
    environment = ReplayEnvironment(derive(trace, ["none"]))
    assert environment.max_draft == 1
    outcome = simulate(FixedArm("none"), environment, runs=2)
    assert outcome.rounds.tolist() == [[len(trace.tokens)]] * 2
    plain = trace.costs.verify[0] + trace.costs.overhead
    np.testing.assert_allclose(outcome.seconds, plain * len(trace.tokens))


@pytest.mark.parametrize("rule", ["entropy=0.85", "adaedl=0.6", "max-confidence=0.65", "margin=1.2"])
def test_a_stop_rule_is_walked_along_the_text(rule):
    texts, limit = random_texts(seed=3), 8
    trace = chain_trace(texts, limit)
    derived = derive(trace, [f"A?{rule}", f"A@3?{rule}"])
    q = Q["A"]
    goes_on = parse_stop_rule(rule)(entropy(q), top_probability(q), margin(q))
    assert 0 < goes_on.sum() < 3
    for a, length in enumerate((4, 3)):
        row = 0
        for text in texts:
            for t in range(len(text)):
                drafted = 0
                while drafted < min(length, limit - t):
                    at = t + drafted
                    if at < len(text) and not goes_on[text[at - 1] if at else 0]:
                        break
                    drafted += 1
                assert derived.drafted[row, a] == drafted
                for d in range(4):
                    expected = trace.accept[row, 0, d] if d < drafted else 0.0
                    assert derived.accept[row, a, d] == expected
                    assert np.isnan(derived.overlap[row, a, d]) == (d >= min(drafted, len(text) - t))
                row += 1
    assert (derived.drafted[:, 0] == 0).any()
    assert (derived.drafted[:, 0] > 1).any()


def test_a_rule_that_never_stops_changes_nothing():
    trace = chain_trace(random_texts(), 8)
    derived = derive(trace, ["A?entropy=9"])
    assert same(derive(trace, ["A"]), replace(derived, arms=("A",), drafters=("model:a@4",)))
    assert derived.drafters == ("model:a@4?entropy=9",)
    with_prefix = derive(derived, ["A?entropy=9@2"])  # of what was derived
    np.testing.assert_array_equal(with_prefix.accept, derive(trace, ["A@2"]).accept)


@pytest.mark.parametrize("seed", range(5, 9))
def test_an_ensemble_is_accepted_by_its_mixture(seed):
    texts, limit = random_texts(count=10, seed=seed), 8
    trace = chain_trace(texts, limit)
    specs = ["ensemble(A,B)", "ensemble(A,B,C)", "ensemble(A,B)@2", "ensemble(A)"]
    derived = derive(trace, specs)
    assert derived.overlap is None
    assert derived.entropy is None
    assert derived.drafters[1] == "ensemble(model:a@4,model:b@3,ngram:c@4)"
    point = np.array([[0, 0, 1], [0, 0, 0], [0, 1, 0]])
    mixtures = [(Q["A"] + Q["B"]) / 2, (Q["A"] + Q["B"] + point) / 3, (Q["A"] + Q["B"]) / 2, Q["A"]]
    lengths, silent = (3, 3, 2, 4), (set(), {1}, set(), set())  # C has nothing to propose after a 1
    row = 0
    for text in texts:
        before = [0, *text]
        for t in range(len(text)):
            for a, q in enumerate(mixtures):
                drafted = 0
                while drafted < min(lengths[a], limit - t):
                    if t + drafted < len(text) and before[t + drafted] in silent[a]:
                        break
                    drafted += 1
                assert derived.drafted[row, a] == drafted
                for d in range(derived.max_draft):
                    expected = 0.0
                    if d < drafted and t + d < len(text):
                        last, x = before[t + d], text[t + d]
                        expected = min(1.0, q[last, x] / P[last, x])
                    assert derived.accept[row, a, d] == pytest.approx(expected, abs=1e-6)
            row += 1
    np.testing.assert_allclose(derived.accept[:, 3], trace.accept[:, 0], atol=1e-6)  # of one: the drafter itself
    # cost of a member each; C recorded 4 tokens, of which the ensembles draft 3
    np.testing.assert_allclose(derived.costs.draft[0], 0.3 * np.arange(5))
    np.testing.assert_allclose(derived.costs.draft[1], 0.31 * np.arange(5))
    np.testing.assert_allclose(derived.costs.catch_up, [0.05, 0.05, 0.05, 0.02])


def test_replay_of_an_ensemble_has_the_law_of_live_rounds():
    """P(N >= k) over all texts of three tokens, against rejection sampling from the mixture; exact, by enumeration."""
    texts = [np.array(text) for text in itertools.product(range(3), repeat=3)]
    trace = derive(chain_trace(texts, 3), ["ensemble(A,B)", "A?entropy=0.85", "A"])
    weight = np.array([P[0, a] * P[a, b] * P[b, c] for a, b, c in texts])
    first = trace.offsets[:-1]
    reached = np.cumprod(trace.accept[first].astype(float), axis=2)  # [texts, arms, depth]
    replayed = np.tensordot(weight, reached, 1)
    goes_on = np.sqrt(entropy(Q["A"])) <= 0.85
    kept = [(Q["A"] + Q["B"]) / 2, Q["A"] * goes_on[:, None], Q["A"]]  # a stopped drafter accepts nothing
    for a, q in enumerate(kept):
        step = np.minimum(P, q)  # chance that this token is drafted and accepted
        live = [vector.sum() for vector in itertools.accumulate([step] * 2, np.matmul, initial=step[0])]
        np.testing.assert_allclose(replayed[a, :3], live, atol=1e-7)


def test_block_tails_stay_where_they_hold():
    trace = chain_trace(random_texts(), 8)
    rng = np.random.default_rng(0)
    more = np.arange(4) < trace.drafted[:, :, None].astype(int) - 1
    trace = replace(trace, block_tail=np.where(more, rng.random(more.shape), np.nan))
    kept = derive(trace, ["B", "none", "A@4", "C@1"])  # C@1 has nothing past a rejection
    np.testing.assert_array_equal(kept.block_tail[:, 0], trace.block_tail[:, 1])
    np.testing.assert_array_equal(kept.block_tail[:, 2], trace.block_tail[:, 0])
    assert np.isnan(kept.block_tail[:, [1, 3]]).all()
    for spec in ("A@2", "ensemble(A,B)", "A?margin=1"):
        assert derive(trace, ["B", spec]).block_tail is None
    with refuses("block_overlap"):
        simulate(make_policy("metasd-ucb:reward=bd"), ReplayEnvironment(derive(trace, ["A@2"])))


def test_what_cannot_be_derived_is_refused():
    trace = chain_trace(random_texts(), 8)
    with refuses("recorded 4", "'A@5'"):
        derive(trace, ["A@5"])
    with refuses("recorded 3", "'ensemble(A,B)@4'"):
        derive(trace, ["ensemble(A,B)@4"])
    with refuses("draft length", "A", "'A@2'"):
        derive(replace(trace, provenance={"length_dependent": ["A"]}), ["B@2", "A@2"])
    with refuses("--signals", "'A?entropy=1'"):
        derive(replace(trace, entropy=None), ["A?entropy=1"])
    with refuses("with a law", "'C?entropy=1'"):
        derive(trace, ["C?entropy=1"])
    with refuses("log_q", "overlaps are not enough"):
        derive(replace(trace, log_q=None), ["ensemble(A,B)"])
    with refuses("log_q"):
        derive(replace(trace, log_p=None), ["ensemble(A,B)"])
    with refuses("stop rule", "mixture"):
        derive(trace, ["ensemble(A,B)?entropy=1"])
    for verification in ("greedy", "gumbel"):
        with refuses("rejection", verification, "all of its law"):
            derive(chain_trace(random_texts(), 8, verification), ["ensemble(A,B)"])
    shifted = trace.log_q.copy()
    shifted[2, 1, 1] = -0.5  # B's law for token 3 depends on where its round started
    with refuses("where a round starts", "found B"):
        derive(replace(trace, log_q=shifted), ["ensemble(A,B)"])


def test_an_ensemble_gives_no_overlaps():
    trace = chain_trace(random_texts(), 8)
    environment = ReplayEnvironment(derive(trace, ["A", "ensemble(A,B)"]))
    for spec, signal in (("metasd-ucb:reward=bd-verified", "overlap"), ("hedge", "every_arm")):
        with refuses(signal):
            simulate(make_policy(spec), environment)
    assert simulate(make_policy("metasd-ucb"), environment).reached.all()


def test_arms_of_one_drafter_keep_it_current_together():
    costs = CostModel.linear([0.0, 0.0], 2, verify=1.0, catch_up=[0.25, 0.5])
    specs = parse_specs(["A@1", "A", "B", "ensemble(A,B)", "none"], ["A", "B"])
    clock = RoundClock(derive_costs(costs, specs, ["A", "B"], 2), 1)
    row, seconds = np.array([0]), []
    for position, arm in enumerate((0, 1, 2, 3, 4, 1, 2)):
        at = np.array([position])
        seconds.append(float(clock.seconds(row, np.array([arm]), 0 * at, at, 0 * at + 1, every_arm=False)[0]))
    # B has missed 2 tokens at its first round; A then 1; after the plain token each has missed 1, and B one more
    assert seconds == [1.0, 1.0, 2.0, 1.25, 1.0, 1.25, 2.0]
    at = np.array([7])  # A has missed 1 token and reads 1 more, B reads 1: each once, whatever the number of its arms
    assert clock.seconds(row, np.array([4]), 0 * at, at, 0 * at + 1, every_arm=True)[0] == 1 + 2 * 0.25 + 0.5


def test_readers_that_do_not_sum_to_the_catch_up_are_refused():
    costs = CostModel.linear([0.0, 0.0], 2, catch_up=[0.25, 0.5])
    with refuses("readers"):
        replace(costs, readers=np.array([[0.25, np.nan], [np.nan, 0.4]]))


def test_replay_of_derived_arms_on_the_command_line(tmp_path, capsys):
    traces.write(chain_trace(random_texts(), 8), tmp_path / "t.safetensors")
    arms = ["A", "A@2", "A?adaedl=0.5", "none", "ensemble(A,B,C)"]
    options = [word for arm in arms for word in ("--arm", arm)]
    command = ["replay", str(tmp_path / "t.safetensors"), "--policy", "fixed:A@2", "--runs", "3", "--json", "-"]
    assert main([*command, *options]) == 0
    records = json.loads(capsys.readouterr().out)
    assert records[0]["arms"] == arms
    assert main([*command, "--arm", "A@9"]) == 2
    assert "recorded 4" in capsys.readouterr().err
