"""The cost model of the arms, measured with the very code of the live rounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from scipy.optimize import nnls

from metasd_sim.costs import CostModel
from metasd_sim.errors import InputError
from metasd_sim.rounds import FloatArray, IntArray

from .decode import LiveEnvironment, LiveRound, Text, draft_tokens
from .drafters import Arm, Draft, longest_draft
from .drafters.base import LawStream, StartLawStream, open_stream
from .settings import REPETITIONS
from .target import Target
from .verify import Rule, TextRule


class _Filler:
    """Drafts as many tokens as it may, the first ones of the prompt: rounds of every width, whatever the text."""

    name = "filler"
    point_mass = True

    def open(self, prompt: Sequence[int]) -> _Filler:
        return self

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        return Draft((list(context[:limit]) * limit)[:limit])


def measure_costs(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    rule: Rule | None = None,
    repetitions: int = REPETITIONS,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> CostModel:
    """Target passes: medians over `repetitions` rounds of every drafted length, interleaved, on texts after `prompts`.

    Drafting is timed apart, on the texts written meanwhile: medians by drafted length, and for drafters with a law the
    least squares of `a + b drafted + c missed` without negative terms. `fit` compares the model with live rounds whose
    arms are drawn at random.
    """
    if repetitions < 1 or not prompts:
        raise InputError(f"calibration: expected repetitions and prompts, found {repetitions} and {len(prompts)}")
    rule = rule or Rule()
    rng = np.random.default_rng(seed)
    max_draft = longest_draft(arms)
    texts = _play_every_length(target, rule, max_draft, prompts, repetitions, rng, on_round)
    rounds = [played for text in texts for played in text.rounds]
    context, drafted = (np.array([getattr(played, name) for played in rounds]) for name in ("context", "drafted"))
    verify, whole = (np.array([getattr(played, name) for played in rounds]) for name in ("verify_seconds", "seconds"))
    # from few rounds the slope is mostly noise: the longest context takes half of the shortest pass at most
    shortest = min(float(np.median(verify[drafted == n])) for n in range(max_draft + 1))
    per_context = min(slope_within(drafted, context, verify), shortest / (2 * context.max()))
    drafting = [_draft_seconds(target, rule, arm, texts, max_draft, rng) for arm in arms]
    costs = CostModel(
        draft=np.stack([seconds for seconds, _ in drafting]),
        verify=np.array([np.median((verify - per_context * context)[drafted == n]) for n in range(max_draft + 1)]),
        catch_up=np.array([missed for _, missed in drafting]),
        overhead=median(played.commit_seconds for played in rounds),
        plain=float(np.median((whole - per_context * context)[drafted == 0])),
        per_context=per_context,
    )
    return replace(costs, fit=_fit(costs, target, rule, arms, prompts, repetitions, rng, on_round))


def slope_within(group: IntArray, x: IntArray, y: FloatArray) -> float:
    """Common slope of y on x within groups, by least squares without the slowest tenth of each; 0 or larger."""
    dx, dy = [], []
    for name in np.unique(group):
        own = group == name
        kept = own & (y <= np.quantile(y[own], 0.9))  # a hiccup of the machine is no effect of the context
        dx.append(x[kept] - x[kept].mean())
        dy.append(y[kept] - y[kept].mean())
    across, along = np.concatenate(dx), np.concatenate(dy)
    spread = float(across @ across)
    return max(float(across @ along) / spread, 0.0) if spread else 0.0


def _play_every_length(
    target: Target,
    rule: Rule,
    max_draft: int,
    prompts: Sequence[Sequence[int]],
    repetitions: int,
    rng: np.random.Generator,
    on_round: Callable[[], None],
) -> list[Text]:
    """Texts whose rounds drafted every length 0..max_draft at least `repetitions` times, the rarest one next."""
    played = np.zeros(max_draft + 1, dtype=np.int64)
    passes = math.ceil(repetitions * (max_draft + 1) / len(prompts))  # enough even if each text ends in its first round
    environment = LiveEnvironment(
        target,
        [Arm(str(length), _Filler(), length) for length in range(max_draft + 1)],
        list(prompts) * passes,
        max_new_tokens=max_draft + passes,
        rule=rule,
    )

    def rarest() -> int:
        return int(rng.choice(np.flatnonzero(played == played.min())))

    for one in _rounds(environment, rng, rarest):
        played[one.drafted] += 1
        on_round()
        if played.min() >= repetitions:
            break
    return environment.texts[0]


def _rounds(environment: LiveEnvironment, rng: np.random.Generator, choose: Callable[[], int]) -> Iterator[LiveRound]:
    """Plays one row, arm by arm as chosen."""
    environment.reset(1, rng, frozenset())
    row: IntArray = np.zeros(1, dtype=np.int64)
    while not environment.done[0]:
        environment.observe(row)
        environment.step(row, np.array([choose()]))
        yield environment.texts[0][-1].rounds[-1]


def _draft_seconds(
    target: Target, rule: Rule, arm: Arm, texts: Sequence[Text], max_draft: int, rng: np.random.Generator
) -> tuple[FloatArray, float]:
    """Seconds to draft 0..max_draft tokens, [max_draft + 1], and for each missed token."""
    samples: list[tuple[int, int, float]] = []  # drafted, missed, seconds
    has_law = False
    for text in texts:
        features = target.prefill(text.context, features=True).features if arm.white_box else None
        stream = open_stream(arm.drafter, text.context[: text.prompt_tokens], features)
        has_law = isinstance(stream, LawStream | StartLawStream)
        text_rule = rule.open(np.random.SeedSequence(0), text.position + max_draft)
        position, missed = 0, 0
        while position <= text.position:
            context = text.context[: text.prompt_tokens + position]
            limit = int(rng.integers(1, arm.length + 1)) if arm.length else 0
            start = target.clock()
            tokens = draft_tokens(stream, context, limit, text_rule, position, target.eos).tokens
            samples.append((len(tokens), missed, target.clock() - start))
            coming = text.context[len(context) :]
            stood = next((j for j, (a, b) in enumerate(zip(tokens, coming, strict=False)) if a != b), len(tokens))
            missed = int(rng.integers(0, max_draft + 1)) if rng.random() < 0.5 else 0
            position += min(stood, len(coming)) + 1 + missed
    if has_law:
        drafted, missed_tokens, seconds = np.array(samples, dtype=float).T
        (base, per_token, per_missed), _ = nnls(np.stack([np.ones_like(drafted), drafted, missed_tokens], 1), seconds)
        return base + per_token * np.arange(max_draft + 1), float(per_missed)
    by_length: dict[int, list[float]] = defaultdict(list)
    for length, _, seconds in samples:
        by_length[length].append(seconds)
    lengths = sorted(by_length)
    return np.interp(np.arange(max_draft + 1), lengths, [median(by_length[n]) for n in lengths]), 0.0


def _fit(
    costs: CostModel,
    target: Target,
    rule: Rule,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    repetitions: int,
    rng: np.random.Generator,
    on_round: Callable[[], None],
) -> dict[str, dict[str, float]]:
    """Per arm: rounds, mean measured and predicted seconds of a round, and the root mean square of the difference."""
    wanted = repetitions * len(arms)
    environment = LiveEnvironment(target, arms, prompts, max_new_tokens=max(1, wanted), rule=rule)
    played: list[LiveRound] = []
    for one in _rounds(environment, rng, lambda: int(rng.integers(len(arms)))):
        played.append(one)
        on_round()
        if len(played) >= wanted:
            break
    report = {}
    for a, arm in enumerate(arms):
        own = [one for one in played if one.arm == a]
        if own:
            drafted, missed, context, measured = (
                np.array([getattr(one, name) for one in own]) for name in ("drafted", "missed", "context", "seconds")
            )
            predicted = costs.seconds(np.full(len(own), a), drafted, missed, context)
            report[arm.name] = {
                "rounds": float(len(own)),
                "measured": float(measured.mean()),
                "predicted": float(predicted.mean()),
                "rms": float(np.sqrt(((predicted - measured) ** 2).mean())),
            }
    return report
