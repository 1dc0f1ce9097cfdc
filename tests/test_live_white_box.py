"""Drafters that read the target's hidden states, suffix lookup and reduced vocabularies."""

import json
import pickle
from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest
import safetensors.torch
import torch

from metasd_live import verify
from metasd_live.decode import LiveEnvironment, draft_tokens
from metasd_live.drafters import Arm, build_arms, parse_arm
from metasd_live.drafters.causal import skip_layers
from metasd_live.drafters.eagle import EagleModel
from metasd_live.drafters.head import read_vocabulary, write_vocabulary
from metasd_live.drafters.lookup import PromptLookup
from metasd_live.drafters.suffix import REFRESHED, SuffixLookup
from metasd_live.prompts import Prompt
from metasd_live.record import Recorder
from metasd_live.train.eagle import layer_config
from metasd_live.verify import RejectionText, Rule
from metasd_sim import ReplayEnvironment, make_policy, simulate, traces

from .chain_models import no_draft
from .live_cases import VOCABULARY, draft, reference_text, tiny_prompts, tiny_target
from .sim_cases import refuses
from .test_live_lossless import Branches
from .trained import eagle_drafter, medusa_drafter, small_target, white_box_arms

LIMIT = 16
PROMPTS = [*tiny_prompts(3), [7]]
KINDS = ["llama", "gpt2"]
RULES = [Rule(), Rule("rejection", 0.8), Rule("gumbel", 0.8)]


@cache
def all_arms(kind):
    target = tiny_target(kind)
    return [
        no_draft(),
        Arm("lookup", PromptLookup(), 4),
        Arm("suffix", SuffixLookup(), 5),
        *white_box_arms(target),
        Arm("reduced", skip_layers(1, "layers:1", target, frequent=range(0, VOCABULARY, 3)), 3),
        Arm("less", eagle_drafter(target, 1, frequent=range(0, VOCABULARY, 2)), 3),
    ]


# --- slow references without a cache


@torch.no_grad()
def hidden_states(target, context):
    return target.model.base_model(torch.tensor([list(context)]), use_cache=False).last_hidden_state[0]


@torch.no_grad()
def eagle_reference(drafter, context, tokens):
    """Logits that a round after `context` draws each of `tokens` from: every pair computed anew at each of them."""
    target, read = drafter.target, [*context]
    features = hidden_states(target, context)[:-1]
    head = target.model.get_output_embeddings()
    rows = []
    for token in tokens:
        embedded = target.model.get_input_embeddings()(torch.tensor([read[1:]]))
        out = drafter.model(embedded, features[None])[0]
        rows.append(head(out[-1]))
        features = torch.cat([features, out[-1:]])
        read.append(token)
    return torch.stack(rows)


@torch.no_grad()
def medusa_reference(drafter, context, tokens):
    """`W_k (h + SiLU(A_k h + a_k))` of the feature before the last token."""
    h, state = hidden_states(drafter.target, context)[-2], drafter.heads.state_dict()
    rows = []
    for k in range(len(tokens)):
        inner = state[f"{k}.0.linear.weight"] @ h + state[f"{k}.0.linear.bias"]
        rows.append(state[f"{k}.1.weight"] @ (h + inner * torch.sigmoid(inner)))
    return torch.stack(rows)


def reference(drafter, context, tokens):
    return (eagle_reference if drafter.name == "eagle" else medusa_reference)(drafter, context, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_equal_slow_references_wherever_they_are_asked(kind):
    """Contexts in any order: on, back, onto another branch, of another first token."""
    target = tiny_target(kind)
    rng = np.random.default_rng(0)
    for arm in white_box_arms(target):
        context = PROMPTS[0]
        features = target.prefill(context, features=True).features
        stream = arm.drafter.open(context, features)
        for turn in range(14):
            longer = rng.integers(0, VOCABULARY, size=5).tolist()
            start = int(rng.integers(0, len(context) + 1)) if turn % 3 == 0 else len(context)
            context = [*context[:start], *longer[: rng.integers(1, 6)]]
            context = context if len(context) > 1 else [*context, 9]
            if turn % 5 == 4:
                context = [(context[0] + 1) % VOCABULARY, *context[1:]]  # another first token alone
            stream.features = target.prefill(context, features=True).features
            tokens = rng.integers(0, VOCABULARY, size=int(rng.integers(1, arm.length + 1))).tolist()
            expected = reference(arm.drafter, context, tokens)
            torch.testing.assert_close(stream.logits_along(context, tokens), expected, atol=1e-4, rtol=0)
            drafted = stream.draft(context, arm.length, Rule().open(None, 9), 0)
            expected = reference(arm.drafter, context, drafted.tokens)
            assert drafted.tokens == expected.argmax(-1).tolist()
            torch.testing.assert_close(drafted.laws, expected.softmax(-1), atol=1e-4, rtol=0)
        assert stream.draft([5], 3, Rule().open(None, 9), 0).tokens == []  # no feature before the second token
        assert len(stream.logits_along([5], [1, 2])) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("parallel", [False, True])
def test_after_any_rounds_features_and_streams_are_as_fresh(kind, rule, parallel):
    target, arms, rng = tiny_target(kind), all_arms(kind), np.random.default_rng(5)
    environment = LiveEnvironment(target, arms, PROMPTS, LIMIT, rule, seed=3, parallel=parallel)
    rows = len(PROMPTS) if parallel else 1
    environment.reset(rows, np.random.default_rng(0), frozenset())
    checked = 0
    for turn in range(8):
        running = np.flatnonzero(~environment.done)
        if not len(running):
            break
        environment.observe(running)
        environment.step(running, rng.integers(0, len(arms), size=len(running)))
        for row in np.flatnonzero(~environment.done):
            text = environment.texts[row][-1]
            if text.ended:
                continue
            features = environment._states.features(row)
            assert len(features) == len(text.context) - 1
            if len(features):
                fresh = hidden_states(target, text.context)[:-1]
                torch.testing.assert_close(features[:], fresh, atol=1e-4, rtol=0)
            if turn % 3 == 2:
                for arm, stream in zip(arms, environment._models[row].streams, strict=True):
                    if arm.name in ("eagle", "medusa"):
                        expected = reference(arm.drafter, text.context, [3, 4, 5])
                        found = stream.logits_along(text.context, [3, 4, 5])
                        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
                        checked += 1
    assert checked


def test_white_box_drafters_call_the_target_no_more_often():
    """A prefill where the prompt has two tokens or more, a pass a round; the warm-up: a prefill, each width."""
    target, arms = tiny_target(), white_box_arms(tiny_target())
    calls = []
    hook = target.model.register_forward_pre_hook(lambda module, inputs: calls.append(1))
    body = target.model.base_model.register_forward_pre_hook(lambda module, inputs: calls.append(0))
    try:
        environment = LiveEnvironment(target, arms, PROMPTS, LIMIT)
        simulate(make_policy("random"), environment)
    finally:
        hook.remove()
        body.remove()
    rounds = sum(len(text.rounds) for text in environment.texts[0])
    drafted = sum(played.drafted for text in environment.texts[0] for played in text.rounds)
    assert drafted > rounds
    assert sum(calls) == rounds + sum(len(prompt) > 1 for prompt in PROMPTS) + 1 + environment.max_draft + 1
    assert calls.count(0) == calls.count(1)  # nobody reads the body by itself


# --- losslessness


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(kind, Rule()) for kind in KINDS] + [("llama", Rule("rejection", 1e-6)), ("gpt2", Rule("gumbel", 1e-6))],
)
def test_greedy_texts_equal_plain_decoding(kind, rule):
    plain = [reference_text(tiny_target(kind), prompt, LIMIT) for prompt in PROMPTS]
    cases = [("random", False), ("random", True), ("fixed:eagle", False), ("fixed:medusa", True), ("hedge", False)]
    for policy, parallel in cases:
        environment = LiveEnvironment(tiny_target(kind), all_arms(kind), PROMPTS, LIMIT, rule, parallel=parallel)
        simulate(make_policy(policy, arms=environment.arms), environment, runs=len(PROMPTS) if parallel else 1)
        texts = [row[0] for row in environment.texts] if parallel else environment.texts[0]
        assert [text.token_ids for text in texts] == plain
        assert not environment.retired


def test_gumbel_texts_do_not_depend_on_what_is_drafted():
    texts, accepted = [], 0
    for policy in ("fixed:none", "fixed:eagle", "fixed:medusa", "random"):
        environment = LiveEnvironment(tiny_target(), all_arms("llama"), PROMPTS, 24, Rule("gumbel", 0.9), seed=1)
        simulate(make_policy(policy, arms=environment.arms), environment)
        texts.append([text.token_ids for text in environment.texts[0]])
        accepted += sum(played.accepted for text in environment.texts[0] for played in text.rounds)
    assert all(text == texts[0] for text in texts)
    assert accepted > 5


SMALL = 4
SMALL_PROMPT = [1, 2, 1, 2, 1]


def small_arm(name):
    target = small_target(SMALL)
    return {
        "eagle": lambda: Arm(name, eagle_drafter(target), 2),
        "medusa": lambda: Arm(name, medusa_drafter(target, 2, noise=1.0), 2),
        "eagle, reduced": lambda: Arm(name, eagle_drafter(target, 1, frequent=[0]), 2),  # 0 and the prompt's 1 and 2
        "layers, reduced": lambda: Arm(name, skip_layers(1, "layers:1", target, frequent=[0]), 2),
        "suffix": lambda: Arm(name, SuffixLookup(), 2),
    }[name]()


def open_arm(arm, context):
    features = small_target(SMALL).prefill(context, features=True).features
    return arm.drafter.open(context, features) if arm.white_box else arm.drafter.open(context)


@cache
def true_law(temperature, tokens):
    """Probability of every text, by one pass over each."""
    laws = {}
    for text in product(range(SMALL), repeat=tokens):
        with torch.no_grad():
            logits = small_target(SMALL).model(torch.tensor([[*SMALL_PROMPT, *text]])).logits[0]
        p = (logits.double() / temperature).softmax(-1)[len(SMALL_PROMPT) - 1 : -1]
        laws[text] = float(p[range(tokens), text].prod())
    return laws


def round_law(arm, context, left, monkeypatch, temperature):
    """Law of what a round emits and accepts, (accepted, *emitted) -> probability, over every turn of the rule."""
    target = small_target(SMALL)
    rule = RejectionText(Rule("rejection", temperature), np.random.SeedSequence(0), left)
    branches = Branches()
    rule.accept = [branches] * left
    monkeypatch.setattr(verify, "sample", lambda law, uniform: branches.choose(law.tolist()))
    stream = open_arm(arm, context[: len(SMALL_PROMPT)])
    features = target.prefill(context, features=True).features
    if arm.white_box:
        stream.features = features

    @cache
    def target_logits(tokens):
        return target.forward(target.prefill(context), [context[-1], *tokens])

    def play():
        tried = draft_tokens(stream, context, min(arm.length, left), rule, 0, ())
        verdict = rule.verify(target_logits(tuple(tried.tokens)), tried, 0, (), left)
        return verdict.accepted, *verdict.emitted

    law = Counter()
    for outcome, probability in branches.walk(play):
        law[outcome] += probability
    return law


NAMES = ["eagle", "medusa", "eagle, reduced", "layers, reduced", "suffix"]


@pytest.mark.parametrize("name", NAMES)
def test_every_turn_of_the_rule_gives_the_targets_law(monkeypatch, name):
    """Texts of two tokens, and a draft of two tokens in the first round."""
    arm, temperature = small_arm(name), 0.7
    finished = Counter()
    for (accepted, *emitted), weight in round_law(arm, SMALL_PROMPT, 2, monkeypatch, temperature).items():
        if len(emitted) == 2:
            finished[tuple(emitted)] += weight
            continue
        assert accepted == 0
        for (_, *rest), more in round_law(arm, [*SMALL_PROMPT, *emitted], 1, monkeypatch, temperature).items():
            finished[(*emitted, *rest)] += weight * more
    expected = true_law(temperature, 2)
    assert max(abs(finished[text] - expected[text]) for text in expected) < 1e-5
    assert sum(finished.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_replayed_rounds_have_the_law_of_live_ones(monkeypatch, name):
    """Jointly with the text that they emit: from a recording of each text that there is, weighted by its chance.

    A replayed round accepts n drafts with probability prod_{j<n} accept_j (1 - accept_n), given the text.
    """
    arm, temperature, tokens = small_arm(name), 0.7, 3
    live = round_law(arm, SMALL_PROMPT, tokens, monkeypatch, temperature)
    monkeypatch.undo()
    recorder = Recorder(small_target(SMALL), [arm], tokens, Rule("rejection", temperature), overlap_dtype="float32")
    replayed = Counter()
    for text, weight in true_law(temperature, tokens).items():
        trace = recorder.record_text(Prompt("a", "a"), SMALL_PROMPT, text)
        accept = trace.accept[0, 0].astype(float)
        drafted = int(trace.drafted[0, 0])
        stood = np.append(1.0, np.cumprod(accept[:drafted]))
        for n in range(drafted + 1):
            chance = stood[n] * (1.0 - accept[n] if n < drafted else 1.0)
            replayed[(n, *text[: n + 1])] += weight * chance
    assert live.keys() <= replayed.keys()
    assert max(abs(live[outcome] - chance) for outcome, chance in replayed.items()) < 1e-5
    assert any(outcome[0] for outcome in live)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("llama", Rule()), ("gpt2", Rule()), ("llama", Rule("gumbel", 0.8))],
    ids=["llama", "gpt2", "gumbel"],
)
def test_greedy_and_gumbel_runs_equal_their_replay(kind, rule):
    target, arms = tiny_target(kind), all_arms(kind)
    recorder = Recorder(target, arms, LIMIT, rule, seed=5, overlap_dtype="float32", chat_template=False)
    prompts = [Prompt(str(i), " ".join(f"w{token}" for token in prompt)) for i, prompt in enumerate(PROMPTS)]
    trace = traces.merge([recorder.record(i, prompt) for i, prompt in enumerate(prompts)])
    live = LiveEnvironment(target, arms, PROMPTS, LIMIT, rule, seed=5)
    accepted = 0
    for spec in ("random", "fixed:eagle", "metasd-ucb:reward=bd-verified,beta=0.2", "hedge"):
        a, b = (
            simulate(make_policy(spec, arms=live.arms), environment, seed=1, history=True).history
            for environment in (live, ReplayEnvironment(trace))
        )
        for name in ("arm", "drafted", "accepted", "emitted"):
            np.testing.assert_array_equal(getattr(a.rounds, name), getattr(b.rounds, name), err_msg=spec)
        for name in ("overlap", "every_arm"):
            if getattr(a.rounds, name) is not None:
                np.testing.assert_allclose(getattr(a.rounds, name), getattr(b.rounds, name), atol=1e-4)
        assert [token for text in live.texts[0] for token in text.token_ids] == trace.tokens.tolist()
        accepted += a.rounds.accepted.sum()
    assert accepted > 5


# --- public layouts


def eagle_state(target, bias=True, norm=False):
    """Random weights under the names of EAGLE-1's checkpoints."""
    config, rng = layer_config(target), torch.Generator().manual_seed(0)
    d, m = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * (d // config.num_attention_heads)
    shapes = {
        "embed_tokens.weight": (target.vocab_size, d),
        "fc.weight": (d, 2 * d),
        "layers.0.self_attn.q_proj.weight": (d, d),
        "layers.0.self_attn.k_proj.weight": (kv, d),
        "layers.0.self_attn.v_proj.weight": (kv, d),
        "layers.0.self_attn.o_proj.weight": (d, d),
        "layers.0.mlp.gate_proj.weight": (m, d),
        "layers.0.mlp.up_proj.weight": (m, d),
        "layers.0.mlp.down_proj.weight": (d, m),
        "layers.0.post_attention_layernorm.weight": (d,),
    }
    shapes |= {"fc.bias": (d,)} if bias else {}
    shapes |= {"layers.0.input_layernorm.weight": (d,)} if norm else {}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def write_eagle(folder, target, state, pickled=False, **changes):
    config = layer_config(target)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    names += ("max_position_embeddings", "rms_norm_eps", "vocab_size")
    settings = {name: getattr(config, name) for name in names} | {"architectures": ["LlamaForCausalLM"]} | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        safetensors.torch.save_file(state, folder / "model.safetensors")
    return folder


def medusa_state(target, heads=3):
    d, rng = target.model.config.hidden_size, torch.Generator().manual_seed(0)
    shapes = {}
    for k in range(heads):
        shapes |= {f"{k}.0.linear.weight": (d, d), f"{k}.0.linear.bias": (d,), f"{k}.1.weight": (target.vocab_size, d)}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def write_medusa(folder, state, pickled=False, heads=3):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": 1}))
    if pickled:
        torch.save(state, folder / "medusa_lm_head.pt")
    else:
        safetensors.torch.save_file(state, folder / "medusa_lm_head.safetensors")
    return folder


def build(spec, target=None):
    (arm,) = build_arms([parse_arm(spec)], target or tiny_target())
    return arm


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, False), (True, True)])
def test_public_eagle_checkpoints(tmp_path, pickled, bias, norm):
    target = tiny_target()
    state = eagle_state(target, bias, norm)
    arm = build(f"eagle:{write_eagle(tmp_path / 'e', target, state, pickled)}@4")
    assert (arm.length, arm.white_box, len(arm.files)) == (4, True, 1)
    own = arm.drafter.model.public_state()
    assert own.keys() == state.keys() - {"embed_tokens.weight"}
    for name, value in own.items():
        torch.testing.assert_close(value, state[name])
    context = PROMPTS[0]
    stream = arm.drafter.open(context, target.prefill(context, features=True).features)
    expected = eagle_reference(arm.drafter, context, [3, 4])
    torch.testing.assert_close(stream.logits_along(context, [3, 4]), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("pickled", [False, True])
def test_public_medusa_checkpoints(tmp_path, pickled):
    target, state = tiny_target(), medusa_state(tiny_target())
    arm = build(f"medusa:{write_medusa(tmp_path / 'm', state, pickled)}")
    assert (arm.length, arm.drafter.longest_draft, len(arm.files)) == (3, 3, 1)
    assert {name: tuple(v.shape) for name, v in arm.drafter.heads.state_dict().items()} == {
        name: tuple(v.shape) for name, v in state.items()
    }
    context = PROMPTS[0]
    stream = arm.drafter.open(context, target.prefill(context, features=True).features)
    expected = medusa_reference(arm.drafter, context, [0, 0, 0])
    torch.testing.assert_close(stream.logits_along(context, [0, 0, 0]), expected, atol=1e-3, rtol=1e-4)
    fewer = build(f"medusa:{write_medusa(tmp_path / 'f', state, pickled, heads=2)}")  # files may hold more
    assert fewer.length == 2
    with refuses("medusa:", "at most 3", "found 4"):
        build(f"medusa:{tmp_path / 'm'}@4")


class Malicious:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_checkpoints_that_do_not_fit_are_refused_by_name(tmp_path):
    target = tiny_target()

    def eagle(state, **changes):
        return build(f"eagle:{write_eagle(tmp_path / 'e', target, state, **changes)}")

    whole = eagle_state(target)
    for missing in ("fc.weight", "layers.0.mlp.up_proj.weight"):
        with refuses("eagle:", missing, "missing"):
            eagle({name: value for name, value in whole.items() if name != missing})
    with refuses("eagle:", "layers.1.mlp.up_proj.weight", "EAGLE-1"):
        eagle(whole | {"layers.1.mlp.up_proj.weight": torch.zeros(2)})
    for name in ("fc.weight", "fc.bias", "layers.0.self_attn.k_proj.weight"):
        with refuses("eagle:", name, "(3,)"):
            eagle(whole | {name: torch.zeros(3)})
    with refuses("eagle:", "hidden states of 32", "64"):
        eagle(whole, hidden_size=64)
    with refuses("eagle:", "nowhere"):
        build(f"eagle:{tmp_path / 'nowhere'}")

    def medusa(state, **changes):
        return build(f"medusa:{write_medusa(tmp_path / 'm', state, **changes)}")

    heads = medusa_state(target)
    with refuses("medusa:", "1.1.weight", "None"):
        medusa({name: value for name, value in heads.items() if name != "1.1.weight"})
    with refuses("medusa:", "2.1.weight", f"({VOCABULARY}, 32)", f"({VOCABULARY + 1}, 32)"):
        medusa(heads | {"2.1.weight": torch.zeros((VOCABULARY + 1, 32))})
    with refuses("medusa:", "0.0.linear.bias", "None"):
        medusa({f"medusa_head.{name}": value for name, value in heads.items()})
    with refuses("medusa:", "3.0.linear.bias", "None"):
        medusa(heads, heads=4)
    for kind, file in (("eagle", "pytorch_model.bin"), ("medusa", "medusa_lm_head.pt")):
        folder = tmp_path / f"bad-{kind}"
        if kind == "eagle":
            write_eagle(folder, target, {}, pickled=True)
        else:
            write_medusa(folder, {}, pickled=True)
        (folder / file).write_bytes(pickle.dumps({"fc.weight": Malicious()}, protocol=2))
        with refuses(f"{kind}:", "checkpoint", str(folder)):
            build(f"{kind}:{folder}")
        torch.save({"fc.weight": Malicious()}, folder / file)
        with refuses(f"{kind}:", "checkpoint", str(folder)):
            build(f"{kind}:{folder}")


def test_white_box_drafters_are_refused_where_they_have_no_place(tmp_path):
    target = tiny_target()
    write_eagle(tmp_path / "e", target, eagle_state(target))
    with refuses("chain", "without a model", "eagle:"):
        build(f"chain(lookup,eagle:{tmp_path / 'e'})")
    with refuses("blocks", "eagle"):
        Recorder(target, white_box_arms(target), 4, blocks=True)


def test_a_layer_without_a_head_of_its_own_has_no_other_weights():
    names = set(EagleModel(layer_config(tiny_target())).public_state())
    assert names == eagle_state(tiny_target()).keys() - {"embed_tokens.weight"}


# --- reduced vocabularies


@pytest.mark.parametrize("kind", KINDS)
def test_only_known_tokens_and_the_prompts_are_drafted(kind):
    target, known = tiny_target(kind), list(range(0, VOCABULARY, 4))
    prompt = [3, 5, 6, 5]
    allowed = sorted({*known, *prompt})
    others = [token for token in range(VOCABULARY) if token not in allowed]
    arms = [*white_box_arms(target, known), Arm("layers", skip_layers(1, "layers:1", target, frequent=known), 4)]
    whole = [*white_box_arms(target), Arm("layers", skip_layers(1, "layers:1", target), 4)]
    context = [*prompt, 9, 10, 11]  # none of these is known: the target may write them, the drafter not
    for arm, full in zip(arms, whole, strict=True):
        features = target.prefill(context, features=True).features
        open_it = [
            one.drafter.open(prompt, features) if one.white_box else one.drafter.open(prompt) for one in (arm, full)
        ]
        for rule in RULES:
            drafted = open_it[0].draft(context, arm.length, rule.open(np.random.SeedSequence(0), 9), 0)
            assert set(drafted.tokens) <= set(allowed)
            assert torch.all(drafted.laws[:, others] == 0)
            assert torch.all(drafted.laws[:, allowed] > 0)
        if arm.white_box:
            cut, all_of_them = (stream.logits_along(context, [3]) for stream in open_it)
        else:
            cut, all_of_them = (stream.logits([*context, 0], 1) for stream in open_it)
        torch.testing.assert_close(cut[:, allowed], all_of_them[:, allowed], atol=1e-4, rtol=0)


def test_vocabularies_are_files_of_the_tokenizer(tmp_path):
    target, path = tiny_target(), tmp_path / "v.safetensors"
    write_vocabulary([9, 3, 7], target.tokenizer_hash, path, False)
    assert read_vocabulary(path, target.tokenizer_hash) == [9, 3, 7]
    arm = build(f"layers:1,vocabulary={path}@4")
    assert (arm.length, arm.files) == (4, (str(path),))
    stream = arm.drafter.open([5])
    assert torch.isfinite(stream.logits([5, 6, 0], 1)[0]).nonzero()[:, 0].tolist() == [3, 5, 7, 9]
    with refuses("v.safetensors", "--force"):
        write_vocabulary([1], target.tokenizer_hash, path, False)
    with refuses("v.safetensors", "another's"):
        read_vocabulary(path, "other")
    with refuses("absent", "train vocabulary"):
        read_vocabulary(tmp_path / "absent", target.tokenizer_hash)
    (tmp_path / "w").write_text("no vocabulary")
    with refuses("w", "other file"):
        read_vocabulary(tmp_path / "w", target.tokenizer_hash)
    with refuses("a drafter with a model", "lookup"):
        parse_arm(f"lookup,vocabulary={path}")


# --- suffixes


def continuation(text, limit):
    """By brute force: what followed the longest suffix that occurred before, the last time that it did."""
    for length in range(len(text) - 1, 0, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                return text[start + length : start + length + limit]
    return []


@pytest.mark.parametrize("alphabet", [2, 3, 6])
def test_suffixes_equal_brute_force(alphabet):
    rng = np.random.default_rng(alphabet)
    for _ in range(12):
        unit = rng.integers(0, alphabet, size=rng.integers(1, 7)).tolist()
        text = [*rng.integers(0, alphabet, size=20).tolist(), *(unit * 3), *rng.integers(0, alphabet, size=20).tolist()]
        stream, at = SuffixLookup().open([]), 0
        while at < len(text):
            at += int(rng.integers(1, 5))
            context = text[:at]
            assert stream.draft(context, 5, None, 0).tokens == continuation(context, 5), context


def test_suffixes_after_an_earlier_context_or_another_one():
    stream = SuffixLookup().open([])
    for context in ([1, 2, 3, 1, 2], [1, 2, 3, 1], [1, 2, 3, 1, 2], [4, 5, 4], [1, 2, 1]):
        assert stream.draft(context, 4, None, 0).tokens == continuation(context, 4)
    assert draft(SuffixLookup(), [1, 2, 3], 4) == []
    assert draft(SuffixLookup(), [1], 4) == draft(SuffixLookup(), [1, 2, 3], 4)


def test_short_suffixes_of_long_repeats_may_name_an_earlier_place():
    """Where more suffixes than are kept up to date end at one place, the longest of them still is."""
    text = [1] * (2 * REFRESHED)
    assert draft(SuffixLookup(), text, 2) == [1]  # one token before the end, the most recent place
    assert draft(SuffixLookup(), [*text, 2, 1], 2) in ([1, 1], [2, 1])


def test_suffixes_of_earlier_texts():
    drafter = SuffixLookup(remember=True)
    rule = Rule().open(None, 9)
    first = drafter.open([1, 2, 3])
    assert first.draft([1, 2, 3], 3, rule, 0).tokens == []
    assert first.draft([1, 2, 3, 4, 5, 6, 7], 3, rule, 4).tokens == []
    second = drafter.open([9, 2, 3, 4])
    assert second.draft([9, 2, 3, 4], 3, rule, 0).tokens == [5, 6, 7]  # 2, 3, 4 is in the first text
    assert second.draft([9, 2, 3, 4, 8, 9, 2], 2, rule, 3).tokens == [3, 4]  # its own suffix is the longer one
    assert second.draft([9, 2, 3, 4, 8, 9, 2, 3, 4], 2, rule, 5).tokens == [8, 9]
    third = drafter.open([8, 9])
    assert third.draft([8, 9], 5, rule, 0).tokens == [2, 3, 4]  # up to the second text's end
    assert third.draft([8, 9, 7], 5, rule, 1).tokens == []  # where the first text ends: no text goes on into the next
    assert SuffixLookup().open([4]).draft([2, 3, 4], 3, rule, 0).tokens == []


def remembered(memory, context, limit):
    """By brute force: what followed the longest suffix that occurs in earlier texts, the last time; its length."""
    for length in range(len(context), 0, -1):
        for end in range(len(memory), length - 1, -1):
            if memory[end - length : end] == context[-length:]:
                found = memory[end : end + limit]
                return length, found[: found.index(-1)] if -1 in found else found
    return 0, []


def test_suffixes_of_earlier_texts_equal_brute_force():
    rng = np.random.default_rng(0)
    drafter, rule, memory, from_memory = SuffixLookup(remember=True), Rule().open(None, 9), [], 0
    for _ in range(12):
        text = rng.integers(0, 3, size=24).tolist()
        stream = drafter.open(text[:4])
        for at in range(4, len(text) + 1):
            context = text[:at]
            own = max(n for n in range(at) if any(context[s : s + n] == context[at - n :] for s in range(at - n)))
            length, found = remembered(memory, context, 4)
            expected = found if length > own else continuation(context, 4)
            from_memory += length > own
            assert stream.draft(context, 4, rule, at - 4).tokens == expected
        memory += [*text, -1]
    assert from_memory > 50


def test_what_remembers_is_not_recorded():
    target = tiny_target()
    with refuses("remembers", "suffix:all", "use suffix"):
        Recorder(target, [build("suffix:all")], 4)
    with refuses("chain", "suffix:all", "use suffix"):
        build("chain(suffix:all,lookup)")
    with refuses("suffix:all", "suffix:some"):
        build("suffix:some")
    environment = LiveEnvironment(target, [build("suffix:all@5")], [PROMPTS[0]] * 2, LIMIT)
    simulate(make_policy("round-robin"), environment)
    first, second = environment.texts[0]
    assert first.token_ids == second.token_ids == reference_text(target, PROMPTS[0], LIMIT)
    assert len(second.rounds) <= len(first.rounds) - 3  # it knows the text by now
