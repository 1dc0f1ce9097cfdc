"""Speed of the drafters and policies, against plain decoding and against transformers, on the same prompts."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from scipy import stats
from transformers import GenerationConfig

from metasd_sim.errors import InputError
from metasd_sim.policies import Policy
from metasd_sim.policies.fixed import FixedArm
from metasd_sim.rounds import FloatArray

from .blocks import compare_blocks
from .compare import first_difference
from .decode import decode
from .drafters import Arm
from .drafters.causal import CausalDrafter
from .drafters.lookup import LONGEST, PromptLookup
from .drafters.none import NoDraft
from .ending import Ending
from .engines import TorchModel
from .engines.linear import stock_copy
from .memory import drafter_memory
from .processors import WARPERS
from .target import Target
from .verify import Rule

PLAIN, STOCK, STOCK_ON_OURS = "plain", "transformers", "transformers on our layers"
PARTS = ("draft", "catch_up", "verify", "choose", "score", "policy", "commit", "rest")  # of a round's time
WARM_UP_TOKENS = 16
BLOCK_TEXTS, BLOCK_TOKENS = 2, 48  # on which blocks are compared with single steps


@dataclass(frozen=True)
class Run:
    """One prompt's text and what it cost, end to end."""

    tokens: list[int]
    seconds: float
    calls: int | None  # of the target, after the prefill or with it: those that emit
    rounds: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """What all contestants share."""

    target: Target
    max_new_tokens: int
    rule: Rule = field(default_factory=Rule)
    eos: Collection[int] | None = None
    stop_strings: Sequence[str] = ()
    carry_over: str = "none"
    seed: int = 0

    @cached_property
    def ending(self) -> Ending:
        return Ending.of(self.target, self.eos, self.stop_strings)


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    def run(self, prompt: Sequence[int], seed: int, fresh: bool, settings: Settings) -> Run: ...


@dataclass
class Ours:
    """The live decoder with a pool of arms and a policy, which may carry over from prompt to prompt."""

    name: str
    arms: Sequence[Arm]
    policy: Policy
    retired: dict[int, str] = field(default_factory=dict)

    def run(self, prompt: Sequence[int], seed: int, fresh: bool, settings: Settings) -> Run:
        (generation,) = decode(
            settings.target,
            self.arms,
            [prompt],
            self.policy,
            settings.max_new_tokens,
            settings.rule,
            settings.carry_over,
            seed,
            fresh_policy=fresh or settings.carry_over == "none",
            eos=settings.eos,
            stop_strings=settings.stop_strings,
            retired=self.retired,
        )
        rounds = generation.rounds
        return Run(
            generation.token_ids,
            generation.prefill_seconds + sum(map(_whole, rounds)),
            len(rounds),
            rounds,
        )


@dataclass
class Theirs:
    """`generate` of transformers; `options` choose how it drafts. `model` has generation settings of its own."""

    name: str
    model: Any
    options: dict[str, Any] = field(default_factory=dict)
    counts_calls: bool = True  # not where drafts too are passes of the target

    def run(self, prompt: Sequence[int], seed: int, fresh: bool, settings: Settings) -> Run:
        target, rule, ending = settings.target, settings.rule, settings.ending
        options = self.options | {"max_new_tokens": settings.max_new_tokens, "pad_token_id": 0}
        options |= {"eos_token_id": sorted(ending.eos) or None, "do_sample": rule.temperature > 0}
        if rule.temperature:
            said = dict(setting.split("=", 1) for setting in rule.settings if "=" in setting)
            options |= {"temperature": rule.temperature, "top_k": int(said.get("top_k", 0))}
            options |= {name: float(said[name]) for name in ("top_p", "min_p", *WARPERS) if name in said}
        if rule.processors:
            opened = rule.open(np.random.SeedSequence(0), settings.max_new_tokens, len(prompt))
            options["logits_processor"] = list(opened.processors)  # type: ignore[attr-defined]
        if ending.strings:
            options |= {"stop_strings": list(ending.strings), "tokenizer": target.tokenizer}
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        torch.manual_seed(seed)
        handle = self.model.register_forward_pre_hook(count)
        try:
            start = target.clock()
            ids = torch.tensor([list(prompt)], device=target.device)
            text = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            tokens = text[0, len(prompt) :].tolist()
            seconds = target.clock() - start
        finally:
            handle.remove()
        return Run(tokens, seconds, calls if self.counts_calls else None)


def our_contestants(arms: Sequence[Arm], policies: Sequence[Policy]) -> list[Ours]:
    """Plain decoding, each drafter alone, and each policy with all of them."""
    alone = [Ours(arm.name, [arm], FixedArm(0)) for arm in arms if arm.length]
    return [
        Ours(PLAIN, [Arm("none", NoDraft(), 0)], FixedArm(0)),
        *alone,
        *(Ours(str(policy), list(arms), policy) for policy in policies),
    ]


def stock_contestants(target: Target, arms: Sequence[Arm]) -> tuple[list[Theirs], dict[str, str]]:
    """transformers' own: plain, and with those drafters that it knows, on copies whose layers torch runs.

    Beside them which of our arms each of these matches. Drafts have the arm's length; lookup and ours match suffixes
    of the same lengths, its early exit is `layers:K`. Drafters with a reduced vocabulary have no match.
    """
    stock = stock_copy(target.model)
    stock.generation_config = GenerationConfig()
    contestants = [Theirs(STOCK, stock)]
    if isinstance(target.engine, TorchModel):
        contestants.append(Theirs(STOCK_ON_OURS, _with_settings(target.model)))
    matches = {}
    for arm in arms:
        drafter, fixed = arm.drafter, _fixed_length(arm.length)
        name = f"{STOCK}: {arm.name}"
        if isinstance(drafter, PromptLookup):
            options = {"prompt_lookup_num_tokens": arm.length, "max_matching_ngram_size": LONGEST}
            found = Theirs(name, stock, options)
        elif isinstance(drafter, CausalDrafter) and drafter.name.startswith("layers:"):
            layers = drafter.model.layers
            found = Theirs(name, _with_settings(stock, **fixed), {"assistant_early_exit": layers}, counts_calls=False)
        elif isinstance(drafter, CausalDrafter) and drafter.known is None:
            assistant = stock_copy(drafter.model.model)
            assistant.generation_config = GenerationConfig(**fixed)
            found = Theirs(name, stock, {"assistant_model": assistant})
        else:
            continue
        contestants.append(found)
        matches[arm.name] = name
    return contestants, matches


def _fixed_length(length: int) -> dict[str, Any]:
    return {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def _with_settings(model: Any, **settings: Any) -> Any:
    """The same model under generation settings of its own."""
    twin = copy.copy(model)
    twin.generation_config = GenerationConfig(**settings)
    return twin


def bench(
    settings: Settings,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    policies: Sequence[Policy] = (),
    repetitions: int = 3,
    against_transformers: bool = True,
    on_run: Callable[[], None] = lambda: None,
    on_start: Callable[[int], None] = lambda runs: None,
) -> list[dict[str, Any]]:
    """A record of each contestant. On each prompt all take turns, in an order drawn anew; the first runs warm up.

    `on_start` is told how many runs there will be.
    """
    if repetitions < 1 or not prompts:
        raise InputError(f"bench: expected repetitions and prompts, found {repetitions} and {len(prompts)}")
    target = settings.target
    for prompt in prompts:
        target.check_length(len(prompt), settings.max_new_tokens)
    ours = our_contestants(arms, policies)
    theirs, matches = stock_contestants(target, arms) if against_transformers else ([], {})
    contestants: list[Ours | Theirs] = [*ours, *theirs]
    names = [one.name for one in contestants]
    if len(set(names)) != len(names):
        raise InputError(f"bench: expected different names, found {', '.join(names)}; use NAME=SPEC for drafters")

    on_start(len(contestants) * (1 + repetitions * len(prompts)))
    warm_up = replace(settings, max_new_tokens=min(settings.max_new_tokens, WARM_UP_TOKENS))
    for one in contestants:
        one.run(prompts[0], settings.seed, True, warm_up)
        on_run()
    rng = np.random.default_rng(settings.seed)
    runs: list[list[list[Run]]] = [[[] for _ in prompts] for _ in contestants]  # [contestants][prompts][repetitions]
    peaks = [0] * len(contestants)
    for _ in range(repetitions):
        for i, prompt in enumerate(prompts):
            seed = int(rng.integers(2**31))
            for c in rng.permutation(len(contestants)):
                before = _reset_peak(target)
                runs[c][i].append(contestants[c].run(prompt, seed, i == 0, settings))
                peaks[c] = max(peaks[c], _peak(target) - before)
                on_run()

    by_name = dict(zip(names, runs, strict=True))
    texts = [[*prompt, *own[0].tokens][-BLOCK_TOKENS:] for prompt, own in zip(prompts, by_name[PLAIN], strict=True)]
    blocks = asdict(compare_blocks(target, texts[:BLOCK_TEXTS]))
    memory = {arm.name: drafter_memory(target, arm) for arm in arms if arm.length}
    records = []
    for c, one in enumerate(contestants):
        counterpart = matches.get(one.name, STOCK) if isinstance(one, Ours) and theirs else None
        record = {"contestant": one.name, "ours": isinstance(one, Ours), **_speed(runs[c], by_name[PLAIN], "speedup")}
        record["counterpart"] = counterpart
        if counterpart is not None:
            against = _speed(runs[c], by_name[counterpart], "ratio_to_counterpart")
            record |= {key: value for key, value in against.items() if key.startswith("ratio")}
        record |= _counts(runs[c]) | {"retired": next(iter(getattr(one, "retired", {}).values()), None)}
        record |= {"memory": memory.get(one.name), "cuda_peak_bytes": peaks[c] if _on_cuda(target) else None}
        if settings.rule.verification == "greedy":
            record["texts"] = compare_texts(settings, prompts, by_name[PLAIN], runs[c])
        record["runs"] = [
            {"prompt": i, "repetition": r, "tokens": len(run.tokens), "seconds": run.seconds}
            for i, own in enumerate(runs[c])
            for r, run in enumerate(own)
        ]
        record["settings"] = _describe(settings, arms, len(prompts), repetitions)
        record["blocks"] = blocks
        records.append(record | machine(target))
    return records


def _speed(runs: Sequence[Sequence[Run]], base: Sequence[Sequence[Run]], name: str) -> dict[str, Any]:
    """Tokens a second, and their ratio to those of `base`, each with its 95% interval over prompts."""
    tokens, seconds = _totals(runs)
    their_tokens, their_seconds = _totals(base)
    speed, speed_interval = ratio([tokens], [seconds])
    value, interval = ratio([tokens, their_seconds], [seconds, their_tokens])
    return {"tokens_per_second": speed, "tokens_per_second_ci": speed_interval, name: value, f"{name}_ci": interval}


def _totals(runs: Sequence[Sequence[Run]]) -> tuple[FloatArray, FloatArray]:
    """Tokens and seconds of each prompt, all repetitions together."""
    tokens = np.array([sum(len(run.tokens) for run in own) for own in runs], dtype=float)
    return tokens, np.array([sum(run.seconds for run in own) for own in runs])


def ratio(numerators: Sequence[FloatArray], denominators: Sequence[FloatArray]) -> tuple[float, list[float] | None]:
    """`R = prod_k sum_i a_ki / prod_k sum_i b_ki` over prompts `i`, and its 95% interval (None for one prompt).

    `log R` has the influence `z_i = sum_k a_ki / mean a_k - sum_k b_ki / mean b_k`; the interval is
    `R exp(+- t sd(z) / sqrt(n))` with Student's quantile. What a prompt does to all contestants alike cancels in z.
    """
    value = float(np.prod([a.sum() for a in numerators]) / np.prod([b.sum() for b in denominators]))
    n = len(numerators[0])
    if n == 1:
        return value, None
    z = sum(a / a.mean() for a in numerators) - sum(b / b.mean() for b in denominators)
    half = float(stats.t.ppf(0.975, n - 1) * np.std(z, ddof=1) / np.sqrt(n))
    return value, [value * float(np.exp(-half)), value * float(np.exp(half))]


def _whole(played: dict[str, Any]) -> float:
    return float(played["seconds"] + played["policy_seconds"] + played["rest_seconds"])


def round_parts(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of the rounds by what they went to; the parts sum to the whole."""
    parts = {name: float(sum(played[f"{name}_seconds"] for played in rounds)) for name in PARTS}
    parts["draft"] -= parts["catch_up"]
    parts["verify"] -= parts["choose"]
    return parts


def _counts(runs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    flat = [run for own in runs for run in own]
    tokens, calls = sum(len(run.tokens) for run in flat), [run.calls for run in flat if run.calls is not None]
    rounds = [played for run in flat for played in run.rounds]
    counts: dict[str, Any] = {"tokens": tokens, "seconds": sum(run.seconds for run in flat)}
    counts["tokens_per_call"] = tokens / sum(calls) if calls else None
    if not rounds:
        return counts | {"rounds": None, "switches": None, "pulls": None, "shares": None, "round_seconds": None}
    parts = round_parts(rounds)
    whole = sum(parts.values())
    arms = [[played["arm"] for played in run.rounds] for run in flat]
    return counts | {
        "rounds": len(rounds),
        "switches": sum(a != b for own in arms for a, b in pairwise(own)),
        "pulls": {name: sum(own.count(name) for own in arms) for name in sorted({arm for own in arms for arm in own})},
        "shares": {name: seconds / whole for name, seconds in parts.items()},
        "round_seconds": whole / len(rounds),
    }


def compare_texts(
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Sequence[Run]],
    runs: Sequence[Sequence[Run]],
) -> dict[str, Any]:
    """How many greedy texts are plain decoding's, and where the others leave it."""
    equal, differences = 0, []
    for i, prompt in enumerate(prompts):
        expected = reference[i][0].tokens
        for r, run in enumerate(runs[i]):
            if run.tokens == expected:
                equal += 1
            else:
                found = first_difference(settings.target, prompt, expected, run.tokens, settings.rule)
                assert found is not None
                differences.append({"prompt": i, "repetition": r, **found.to_json()})
    mismatches = sum(not difference["near_tie"] for difference in differences)
    return {"equal": equal, "near_ties": len(differences) - mismatches, "mismatches": mismatches, "where": differences}


def _on_cuda(target: Target) -> bool:
    return target.device.type == "cuda"


def _reset_peak(target: Target) -> int:
    if not _on_cuda(target):
        return 0
    torch.cuda.reset_peak_memory_stats(target.device)
    return int(torch.cuda.memory_allocated(target.device))


def _peak(target: Target) -> int:
    return int(torch.cuda.max_memory_allocated(target.device)) if _on_cuda(target) else 0


def processor() -> str:
    """Name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine(target: Target) -> dict[str, Any]:
    device = torch.cuda.get_device_name(target.device) if _on_cuda(target) else processor()
    return {
        "device": {"type": target.device.type, "name": device, "threads": torch.get_num_threads()},
        "versions": {name: version(name) for name in ("metasd", "torch", "transformers")},
    }


def _describe(settings: Settings, arms: Sequence[Arm], prompts: int, repetitions: int) -> dict[str, Any]:
    target, rule = settings.target, settings.rule
    return {
        "target": target.name,
        "weights": target.weights,
        "engine": target.settings,
        "dtype": str(target.dtype).removeprefix("torch."),
        "arms": {arm.name: str(arm) for arm in arms},
        "prompts": prompts,
        "repetitions": repetitions,
        "max_new_tokens": settings.max_new_tokens,
        "verification": rule.verification,
        "temperature": rule.temperature,
        "processors": list(rule.settings),
        "eos": sorted(settings.ending.eos),
        "stop_strings": list(settings.ending.strings),
        "carry_over": settings.carry_over,
        "seed": settings.seed,
    }
