"""Live decoding: the environment whose rounds are played by real models, and `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from metasd_sim.environments.base import OVERLAP, SECONDS, Context, FixedArms
from metasd_sim.errors import InputError
from metasd_sim.policies.base import Policy
from metasd_sim.rounds import IntArray, Rounds
from metasd_sim.simulate import simulate

from .drafters import Arm, DraftStream, longest_draft
from .prompts import Prompt
from .target import Target, TargetState
from .verify import Verdict, clip, verify_greedy


@dataclass(frozen=True)
class LiveRound:
    """One round, with the seconds of its phases; `seconds` is the whole of it."""

    arm: int
    drafted: int
    accepted: int
    emitted: int
    seconds: float
    draft_seconds: float
    verify_seconds: float  # the target's pass and its argmax
    commit_seconds: float  # verdict and rollback
    overlap: tuple[float, ...] = ()  # of the verified positions, if asked for


@dataclass
class Text:
    """What one row has written after one prompt."""

    prompt_tokens: int
    context: list[int]  # the prompt, then all emitted tokens
    prefill_seconds: float
    rounds: list[LiveRound] = field(default_factory=list)
    ended: bool = False

    @property
    def token_ids(self) -> list[int]:
        return self.context[self.prompt_tokens :]


@dataclass
class _Models:
    """What target and drafters remember of a text; the cache holds all of its context but the last token."""

    state: TargetState
    streams: list[DraftStream]


class LiveEnvironment:
    """Greedy decoding of all prompts in turn, in each row; one text's rounds are one query.

    The first round of a prompt waits for its prefill, which is outside the seconds of rounds.
    """

    gives = frozenset({OVERLAP, SECONDS})

    def __init__(
        self, target: Target, arms: Sequence[Arm], prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> None:
        if max_new_tokens < 1:
            raise InputError(f"max new tokens: expected 1 or more, found {max_new_tokens}")
        if not prompts:
            raise InputError("prompts: expected at least one, found none")
        for prompt in prompts:
            target.check_length(len(prompt), max_new_tokens)
        self.target = target
        self.live_arms = tuple(arms)
        self.arms = tuple(arm.name for arm in arms)
        self.max_draft = longest_draft(arms)
        self.prompts = prompts
        self.queries = len(prompts)
        self.max_new_tokens = max_new_tokens

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self.scored = OVERLAP in needs
        self.done = np.zeros(rows, dtype=bool)
        self.texts: list[list[Text]] = [[] for _ in range(rows)]  # [rows][queries begun]
        self._models: dict[int, _Models] = {}  # of each row's current text
        self._warm_up()

    def observe(self, rows: IntArray) -> Context:
        for row in rows.tolist():
            if not self.texts[row] or self.texts[row][-1].ended:
                self._prefill(row)
        return Context(
            query=np.array([len(self.texts[row]) - 1 for row in rows]),
            new_query=np.array([not self.texts[row][-1].rounds for row in rows]),
            horizon=np.full(len(rows), self.max_new_tokens),
        )

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        played = [self._play(row, arm) for row, arm in zip(rows.tolist(), arms.tolist(), strict=True)]
        for row in rows.tolist():
            self.done[row] = len(self.texts[row]) == self.queries and self.texts[row][-1].ended
        overlap = np.full((len(played), self.max_draft), np.nan)
        for line, one in zip(overlap, played, strict=True):
            line[: len(one.overlap)] = one.overlap
        return Rounds(
            arm=arms.copy(),
            drafted=np.array([one.drafted for one in played]),
            accepted=np.array([one.accepted for one in played]),
            emitted=np.array([one.emitted for one in played]),
            max_draft=self.max_draft,
            seconds=np.array([one.seconds for one in played]),
            overlap=overlap if self.scored else None,
        )

    def fixed_arms(self, budgets: IntArray) -> FixedArms | None:
        return None  # no expectation is known

    def _warm_up(self) -> None:
        """One pass of every width, so that no round pays for what a first pass sets up."""
        state = self.target.prefill(self.prompts[0][:64])
        for width in range(1, self.max_draft + 2):
            self.target.forward(state, list(self.prompts[0][:1]) * width)
            self.target.rollback(state, width)

    def _prefill(self, row: int) -> None:
        prompt = self.prompts[len(self.texts[row])]
        start = self._clock()
        state = self.target.prefill(prompt)
        self._models[row] = _Models(state, [arm.drafter.open() for arm in self.live_arms])
        self.texts[row].append(Text(len(prompt), list(prompt), self._clock() - start))

    def _play(self, row: int, arm: int) -> LiveRound:
        text, models = self.texts[row][-1], self._models[row]
        left = self.max_new_tokens - (len(text.context) - text.prompt_tokens)
        start = self._clock()
        draft = self._draft(text, models, arm, left)
        drafted = time.perf_counter()
        argmax, overlap = self._verify(text, models, draft)
        verified = time.perf_counter()
        verdict = self._commit(text, models, draft, argmax, left)
        end = self._clock()
        played = LiveRound(
            arm=arm,
            drafted=len(draft),
            accepted=verdict.accepted,
            emitted=len(verdict.emitted),
            seconds=end - start,
            draft_seconds=drafted - start,
            verify_seconds=verified - drafted,
            commit_seconds=end - verified,
            overlap=tuple(overlap[: len(verdict.emitted)]),
        )
        text.rounds.append(played)
        return played

    def _draft(self, text: Text, models: _Models, arm: int, left: int) -> list[int]:
        limit = min(self.live_arms[arm].length, left)
        return draft_tokens(models.streams[arm], text.context, limit, self.target.eos)

    def _verify(self, text: Text, models: _Models, draft: list[int]) -> tuple[list[int], list[float]]:
        """The target's own token after the context and after each drafted one; probabilities of the drafted ones.

        Reading the tokens waits for the device, so that the clock after this phase is right.
        """
        logits = self.target.forward(models.state, [text.context[-1], *draft])
        overlap = token_probabilities(logits[:-1], draft) if self.scored else []
        return logits.argmax(dim=-1).tolist(), overlap

    def _commit(self, text: Text, models: _Models, draft: list[int], argmax: list[int], left: int) -> Verdict:
        verdict = verify_greedy(draft, argmax, self.target.eos, left)
        self.target.rollback(models.state, len(draft) + 1 - len(verdict.emitted))
        text.context.extend(verdict.emitted)
        text.ended = verdict.ended
        return verdict

    def _clock(self) -> float:
        self.target.synchronize()
        return time.perf_counter()


def draft_tokens(stream: DraftStream, context: Sequence[int], limit: int, eos: Collection[int]) -> list[int]:
    """What a round drafts after `context`, where it may draft `limit` tokens."""
    return clip(stream.draft(context, limit).tokens, eos, limit) if limit else []


@torch.inference_mode()
def token_probabilities(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """p(tokens[j]) under softmax(logits[j]) at temperature 1: the overlap of a point mass with the target."""
    if not tokens:
        return []
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    probabilities: list[float] = logits.softmax(dim=-1).gather(1, chosen)[:, 0].tolist()
    return probabilities


@dataclass(frozen=True)
class Generation:
    """The text of one prompt and how it came about."""

    id: str
    prompt_tokens: int
    token_ids: list[int]
    text: str
    seconds: float  # prefill and rounds
    prefill_seconds: float
    rounds: list[dict[str, Any]]  # arm (name), drafted, accepted, emitted, seconds and those of the phases

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def generate(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    policy: Policy,
    max_new_tokens: int,
    carry_over: str = "none",
    seed: int = 0,
    chat_template: bool = True,
    on_round: Callable[[IntArray, Rounds], None] | None = None,
) -> list[Generation]:
    """Decodes the prompts one after the other; `policy` picks the arm of each round."""
    encoded = [target.encode(prompt.text, chat_template) for prompt in prompts]
    environment = LiveEnvironment(target, arms, encoded, max_new_tokens)
    simulate(policy, environment, runs=1, seed=seed, carry_over=carry_over, on_round=on_round)
    return [
        Generation(
            id=prompt.id,
            prompt_tokens=text.prompt_tokens,
            token_ids=text.token_ids,
            text=target.decode(text.token_ids),
            seconds=text.prefill_seconds + sum(played.seconds for played in text.rounds),
            prefill_seconds=text.prefill_seconds,
            rounds=[_round_json(played, environment.arms) for played in text.rounds],
        )
        for prompt, text in zip(prompts, environment.texts[0], strict=True)
    ]


def _round_json(played: LiveRound, arms: Sequence[str]) -> dict[str, Any]:
    record = asdict(played) | {"arm": arms[played.arm]}
    del record["overlap"]
    return record
