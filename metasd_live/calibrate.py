"""The cost model of the arms, measured with the very code of the live rounds."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from metasd_sim.costs import CostModel
from metasd_sim.errors import InputError
from metasd_sim.rounds import FloatArray

from .decode import LiveEnvironment, Text, draft_tokens
from .drafters import Arm, Draft, longest_draft
from .target import Target

REPETITIONS = 20  # rounds of each drafted length


class _Filler:
    """Drafts as many tokens as it may, the first ones of the prompt: rounds of every width, whatever the text."""

    name = "filler"
    point_mass = True

    def open(self) -> _Filler:
        return self

    def draft(self, context: Sequence[int], limit: int) -> Draft:
        return Draft((list(context[:limit]) * limit)[:limit])


def measure_costs(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    repetitions: int = REPETITIONS,
    seed: int = 0,
    on_round: Callable[[], None] = lambda: None,
) -> CostModel:
    """Medians over `repetitions` rounds of every drafted length, interleaved, on texts that follow `prompts`.

    Drafting is timed apart, on the texts written meanwhile. Catch-up is 0: these drafters read the context alone.
    """
    if repetitions < 1 or not prompts:
        raise InputError(f"calibration: expected repetitions and prompts, found {repetitions} and {len(prompts)}")
    max_draft = longest_draft(arms)
    texts = _play_every_length(target, max_draft, prompts, repetitions, np.random.default_rng(seed), on_round)
    rounds = [played for text in texts for played in text.rounds]

    by_length = [[played for played in rounds if played.drafted == length] for length in range(max_draft + 1)]
    return CostModel(
        draft=np.stack([_draft_seconds(target, arm, texts, max_draft) for arm in arms]),
        verify=np.array([median(played.verify_seconds for played in group) for group in by_length]),
        catch_up=np.zeros(len(arms)),
        overhead=median(played.commit_seconds for played in rounds),
        plain=median(played.seconds for played in by_length[0]),
    )


def _play_every_length(
    target: Target,
    max_draft: int,
    prompts: Sequence[Sequence[int]],
    repetitions: int,
    rng: np.random.Generator,
    on_round: Callable[[], None],
) -> list[Text]:
    """Texts whose rounds drafted every length 0..max_draft at least `repetitions` times, the rarest one next."""
    wanted = repetitions * (max_draft + 1)
    passes = math.ceil(wanted / len(prompts))  # enough even if every text ends after its first round
    environment = LiveEnvironment(
        target,
        [Arm(str(length), _Filler(), length) for length in range(max_draft + 1)],
        list(prompts) * passes,
        max_new_tokens=max_draft + passes,
    )
    environment.reset(1, rng, frozenset())
    row = np.zeros(1, dtype=np.int64)
    played = np.zeros(max_draft + 1, dtype=np.int64)
    while played.min() < repetitions:
        environment.observe(row)
        arm = np.array([rng.choice(np.flatnonzero(played == played.min()))])
        played[environment.step(row, arm).drafted] += 1
        on_round()
    return environment.texts[0]


def _draft_seconds(target: Target, arm: Arm, texts: Sequence[Text], max_draft: int) -> FloatArray:
    """[max_draft + 1] seconds to draft each length; those that did not occur are interpolated."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for text in texts:
        stream = arm.drafter.open()
        for end in range(text.prompt_tokens, len(text.context) + 1):
            context = text.context[:end]
            limit = end % arm.length + 1 if arm.length else 0
            start = time.perf_counter()
            tokens = draft_tokens(stream, context, limit, target.eos)
            seconds[len(tokens)].append(time.perf_counter() - start)
    lengths = sorted(seconds)
    return np.interp(np.arange(max_draft + 1), lengths, [median(seconds[n]) for n in lengths])
