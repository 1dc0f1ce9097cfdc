"""Live decoding writes what plain decoding writes, whatever is drafted and whoever chooses."""

import json
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metasd_live.decode import LiveEnvironment, generate
from metasd_live.drafters import Arm, Draft
from metasd_live.drafters.ngram import Ngram, NgramSettings, train_ngram
from metasd_live.prompts import Prompt
from metasd_live.target import Target
from metasd_sim.environments.base import BLOCK_OVERLAP, EVERY_ARM, OVERLAP, SECONDS, TRUTH, Environment
from metasd_sim.policies import FixedArm, make_policy
from metasd_sim.simulate import simulate
from tests import test_sim_environments as conformance
from tests.live_cases import (
    Oracle,
    arms_of,
    oracle_arms,
    reference_text,
    tiny_model,
    tiny_prompts,
    tiny_target,
    tiny_tokenizer,
)
from tests.live_cases import (
    draft as draft_of,
)
from tests.sim_cases import EnvironmentCase, refuses

LIMIT = 40
PROMPTS = tiny_prompts(4)
POLICIES = ["random", "kl-ucb-trials", "thompson-trials", "metasd-ucb:reward=be", "metasd-ucb:reward=bd-verified"]
POLICIES += ["metasd-ucb:reward=tokens-per-second", *(f"fixed:{arm}" for arm in range(7))]


def ngram_arm(target):
    texts = [reference_text(target, prompt, LIMIT)[:30] for prompt in PROMPTS]
    return Arm("ngram", Ngram(train_ngram(texts, target.tokenizer_hash, NgramSettings(3, 1, 0.0))), 5)


def all_arms(target, limit=LIMIT, prompts=PROMPTS):
    return [
        *arms_of(target, "none", "lookup", "chain(lookup@2,none)@3"),
        ngram_arm(target),
        *oracle_arms(target, prompts, limit),
    ]


def eos_of(kind):
    """A token that ends some of the texts late, others never."""
    texts = [reference_text(tiny_target(kind), prompt, LIMIT) for prompt in PROMPTS]
    candidates = {token: sum(text.index(token) >= 4 for text in texts if token in text) for token in chain(*texts)}
    return max(candidates, key=lambda token: (candidates[token], token))


def play(target, arms, policy, rows=1, limit=LIMIT, prompts=PROMPTS, seed=0):
    environment = LiveEnvironment(target, arms, prompts, limit)
    made = make_policy(policy, arms=environment.arms)
    outcome = simulate(made, environment, runs=rows, seed=seed, history=True)
    return environment, outcome.history


@pytest.mark.parametrize("kind", ["llama", "gpt2", "sliding"])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_text_equals_transformers_greedy_text(kind, ends, policy):
    target = tiny_target(kind, eos=(eos_of(kind),) if ends else ())
    environment, history = play(target, all_arms(target), policy)
    written = [text.token_ids for text in environment.texts[0]]
    assert written == [reference_text(target, prompt, LIMIT) for prompt in PROMPTS]
    assert any(len(text) < LIMIT for text in written) == ends
    for query, text in enumerate(environment.texts[0]):
        rounds = history.rounds[history.query == query]
        assert rounds.emitted.sum() == len(text.token_ids)
        short = rounds.emitted == rounds.accepted
        assert np.all(rounds.emitted - rounds.accepted == ~short)
        assert not short[:-1].any()  # only a text's last round may be cut


def test_arms_of_the_test_differ():
    """The comparison above can fail: drafts are accepted in full, in part and not at all."""
    target = tiny_target()
    _, history = play(target, all_arms(target), "random", rows=6)
    accepted = {arm: history.rounds.accepted[history.rounds.arm == arm] for arm in range(7)}
    assert accepted[0].max() == 0 == accepted[6].max()
    assert set(accepted[5]) >= {0, 1, 2, 3, 5}
    assert accepted[4].min() >= 1
    assert accepted[1].max() > 0 < accepted[3].max()


@given(limit=st.integers(1, 9), length=st.integers(1, 6), seed=st.integers(0, 5))
def test_budgets_are_met_to_the_token(limit, length, seed):
    target = tiny_target()
    arms = oracle_arms(target, PROMPTS, LIMIT, length)
    environment, history = play(target, arms, "random", limit=limit, seed=seed)
    assert [text.token_ids for text in environment.texts[0]] == [reference_text(target, p, limit) for p in PROMPTS]
    assert history.rounds.drafted.max() <= min(length, limit)


def test_a_block_cut_by_the_limit_has_no_token_of_the_target():
    target = tiny_target()
    _, history = play(target, oracle_arms(target, PROMPTS, LIMIT, 5), "fixed:0", limit=11)
    for query in range(len(PROMPTS)):
        rounds = history.rounds[history.query == query]
        assert rounds.drafted.tolist() == [5, 5] == rounds.accepted.tolist()  # clipped at the 5 left, not at 4
        assert rounds.emitted.tolist() == [6, 5]


def test_an_end_of_sequence_inside_an_accepted_block_ends_the_text():
    plain = tiny_target()
    text = reference_text(plain, PROMPTS[0], LIMIT)
    end = next(i for i, token in enumerate(text) if i >= 7 and token not in text[:i])
    target = tiny_target(eos=(text[end],))
    drafter = Oracle({tuple(PROMPTS[0]): text}, 0.0)  # knows the text without an end, and goes on past it
    for length, rounds in (
        (end + 3, [(end + 1, end + 1, end + 1)]),  # drafted, accepted, emitted: the draft is cut after the end
        (end + 1, [(end + 1, end + 1, end + 1)]),
        (end, [(end, end, end + 1)]),  # the end is the target's own token
        (end - 1, [(end - 1, end - 1, end), (1, 1, 1)]),
    ):
        environment, history = play(target, [Arm("oracle", drafter, length)], "fixed:0", prompts=PROMPTS[:1])
        assert environment.texts[0][0].token_ids == text[: end + 1]
        played = history.rounds
        assert list(zip(played.drafted, played.accepted, played.emitted, strict=True)) == rounds


def test_rows_are_independent_streams():
    target = tiny_target(eos=(eos_of("llama"),))
    environment, history = play(target, all_arms(target), "random", rows=3)
    for row in range(3):
        written = [text.token_ids for text in environment.texts[row]]
        assert written == [reference_text(target, prompt, LIMIT) for prompt in PROMPTS]
    arms = [history.of_row(row).arm.tolist() for row in range(3)]
    assert arms[0] != arms[1] != arms[2]


def test_ties_break_as_in_plain_decoding():
    model = tiny_model()
    with torch.no_grad():
        best = reference_text(tiny_target(), PROMPTS[0], LIMIT)[0]
        twin = (best + 9) % 64
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    target = Target(model, tiny_tokenizer(), "tiny")
    texts = [reference_text(target, prompt, LIMIT) for prompt in PROMPTS]
    assert min(best, twin) in texts[0]
    assert max(best, twin) not in chain(*texts)
    environment, _ = play(target, oracle_arms(target, PROMPTS, LIMIT), "random")
    assert [text.token_ids for text in environment.texts[0]] == texts


def test_overlaps_are_the_probabilities_of_the_drafted_tokens():
    target = tiny_target()
    arms = oracle_arms(target, PROMPTS, LIMIT)
    environment, history = play(target, arms, "metasd-ucb:reward=bd-verified")
    start = 0
    for query, text in enumerate(environment.texts[0]):
        rounds = history.rounds[history.query == query]
        start = text.prompt_tokens
        for i in range(len(rounds)):
            context = text.context[:start]
            draft = draft_of(arms[rounds.arm[i]].drafter, context, rounds.drafted[i])
            logits = target.model(torch.tensor([context + draft])).logits[0, len(context) - 1 :]
            p = logits.softmax(-1).detach().numpy()
            verified = min(rounds.emitted[i], rounds.drafted[i])
            expected = [p[j, draft[j]] for j in range(verified)]
            np.testing.assert_allclose(rounds.overlap[i, :verified], expected, atol=1e-5)
            assert np.isnan(rounds.overlap[i, verified:]).all()
            start += rounds.emitted[i]


def test_only_what_is_needed_is_given():
    target = tiny_target()
    environment, history = play(target, arms_of(target, "lookup"), "random")
    assert isinstance(environment, Environment)
    assert environment.gives == {OVERLAP, BLOCK_OVERLAP, EVERY_ARM, SECONDS}
    assert history.rounds.overlap is None
    assert (history.rounds.seconds > 0).all()
    for text in environment.texts[0]:
        for played in text.rounds:
            phases = played.draft_seconds + played.verify_seconds + played.commit_seconds
            assert played.seconds == pytest.approx(phases)
    looks_ahead = FixedArm(0)
    looks_ahead.needs = frozenset({TRUTH})
    with refuses("truth"):
        simulate(looks_ahead, environment)


def test_the_environment_keeps_the_promises_of_its_protocol():
    target = tiny_target(eos=(eos_of("llama"),))
    case = EnvironmentCase(lambda: LiveEnvironment(target, all_arms(target, 8), PROMPTS, 8))
    conformance.test_protocol(case)
    conformance.test_rounds_keep_their_promises(case)


def test_context_of_a_query():
    target = tiny_target()
    environment = LiveEnvironment(target, arms_of(target, "none", "lookup"), PROMPTS, 2)
    assert (environment.arms, environment.max_draft, environment.queries) == (("none", "lookup"), 5, 4)
    environment.reset(2, np.random.default_rng(0), frozenset())
    rows = np.arange(2)
    for query in range(4):
        for first in (True, False):
            context = environment.observe(rows)
            assert context.query.tolist() == [query, query]
            assert context.new_query.tolist() == [first, first]
            assert context.horizon.tolist() == [2, 2]
            assert not environment.done.any()
            environment.step(rows, np.zeros(2, dtype=np.int64))
    assert environment.done.all()
    assert environment.fixed_arms(np.array([4])) is None


def test_a_drafter_cannot_write_past_its_limits():
    class TooLong:
        name = "too long"
        point_mass = True

        def open(self, prompt):
            return self

        def draft(self, context, limit, rule, position):
            return Draft([1] * (limit + 9))

    target = tiny_target()
    environment, history = play(target, [Arm("long", TooLong(), 3)], "fixed:0")
    assert history.rounds.drafted.max() == 3
    assert [text.token_ids for text in environment.texts[0]] == [reference_text(target, p, LIMIT) for p in PROMPTS]


def test_what_cannot_be_decoded():
    target = tiny_target()
    arms = arms_of(target, "none")
    with refuses("max new tokens", "0"):
        LiveEnvironment(target, arms, PROMPTS, 0)
    with refuses("prompts", "none"):
        LiveEnvironment(target, arms, [], 5)
    with refuses("256 positions"):
        LiveEnvironment(target, arms, [[5] * 250], 7)


def without_seconds(generations):
    records = [generation.to_json() for generation in generations]
    for record in records:
        record["rounds"] = [{k: v for k, v in played.items() if "seconds" not in k} for played in record["rounds"]]
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in records]


def test_generate():
    target = tiny_target()
    arms = arms_of(target, "plain=none", "lookup@3")
    prompts = [Prompt("a", "w5 w6 w5"), Prompt("b", "w7 w8")]

    def run(**options):
        return generate(target, arms, prompts, make_policy("random", arms=["plain", "lookup@3"]), 12, **options)

    first = run()
    assert [(g.id, g.prompt_tokens, len(g.token_ids)) for g in first] == [("a", 4, 12), ("b", 3, 12)]
    for generation, prompt in zip(first, prompts, strict=True):
        assert generation.token_ids == reference_text(target, target.encode(prompt.text), 12)
        assert generation.text == target.tokenizer.decode(generation.token_ids)
        assert sum(played["emitted"] for played in generation.rounds) == 12
        assert {played["arm"] for played in generation.rounds} <= {"plain", "lookup@3"}
        assert max(played["drafted"] for played in generation.rounds) <= 3
        seconds = generation.prefill_seconds + sum(played["seconds"] for played in generation.rounds)
        assert generation.seconds == pytest.approx(seconds)
    json.dumps([generation.to_json() for generation in first], allow_nan=False)
    assert without_seconds(run()) == without_seconds(first)
    assert without_seconds(run(seed=1)) != without_seconds(first)
    raw = run(chat_template=False)
    assert [g.prompt_tokens for g in raw] == [3, 2]
