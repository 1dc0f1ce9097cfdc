"""Live decoding: the environment whose rounds are played by real models, and `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from metasd_sim.environments.base import BLOCK_OVERLAP, EVERY_ARM, OVERLAP, SECONDS, Context, FixedArms
from metasd_sim.errors import InputError
from metasd_sim.policies.base import Policy
from metasd_sim.rounds import FloatArray, IntArray, Rounds
from metasd_sim.simulate import simulate

from .drafters import Arm, Draft, DraftStream, longest_draft
from .drafters.base import LawStream
from .model import ModelState
from .prompts import Prompt
from .target import Target
from .verify import Rule, TextRule, Verdict, clip, overlaps


@dataclass(frozen=True)
class LiveRound:
    """One round, with the seconds of its phases; `seconds` is the whole of it."""

    arm: int
    drafted: int
    accepted: int
    emitted: int
    missed: int  # tokens emitted since the arm was last current
    seconds: float
    draft_seconds: float
    verify_seconds: float  # the target's pass and the choice of its tokens
    commit_seconds: float  # rollback and bookkeeping


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

    @property
    def position(self) -> int:
        """New tokens so far."""
        return len(self.context) - self.prompt_tokens


@dataclass
class _Models:
    """What a text's rule, target and drafters remember; the cache holds all of the context but the last token."""

    rule: TextRule
    state: ModelState
    streams: list[DraftStream]
    current: list[int]  # of each arm: the position up to which it has drafted


class LiveEnvironment:
    """All prompts in turn, in each row; one text's rounds are one query.

    The first round of a prompt waits for its prefill, which is outside the seconds of rounds. Where a policy asks for
    full information, the scoring of all arms is part of them. `seed` fixes the texts' randomness, as in a recording
    with that seed: all rows then share it.
    """

    def __init__(
        self,
        target: Target,
        arms: Sequence[Arm],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rule: Rule | None = None,
        seed: int | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise InputError(f"max new tokens: expected 1 or more, found {max_new_tokens}")
        if not prompts:
            raise InputError("prompts: expected at least one, found none")
        for prompt in prompts:
            target.check_length(len(prompt), max_new_tokens)
        self.target = target
        self.rule = rule or Rule()
        self.seed = seed
        self.live_arms = tuple(arms)
        self.arms = tuple(arm.name for arm in arms)
        self.max_draft = longest_draft(arms)
        self.prompts = prompts
        self.queries = len(prompts)
        self.max_new_tokens = max_new_tokens
        # under the Gumbel rule what a rejected branch shows would tell of noise that is still to come
        whole_block = set() if self.rule.verification == "gumbel" else {BLOCK_OVERLAP}
        self.gives = frozenset({OVERLAP, SECONDS, EVERY_ARM} | whole_block)

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self.needs = needs
        self.done = np.zeros(rows, dtype=bool)
        self.texts: list[list[Text]] = [[] for _ in range(rows)]  # [rows][queries begun]
        self._models: dict[int, _Models] = {}  # of each row's current text
        self._entropy = int(rng.integers(2**63))
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
        n = len(rows)
        overlap = np.full((n, self.max_draft), np.nan) if {OVERLAP, BLOCK_OVERLAP} & self.needs else None
        every_arm = np.full((n, len(self.arms), self.max_draft + 1), np.nan) if EVERY_ARM in self.needs else None
        seconds = np.zeros(n)
        played = []
        for i, (row, arm) in enumerate(zip(rows.tolist(), arms.tolist(), strict=True)):
            one, laws, draft = self._play(row, arm)
            played.append(one)
            if overlap is not None:
                rejected = one.emitted > one.accepted  # else the text ended, and nothing past it is shown
                shown = len(draft.tokens) if rejected and BLOCK_OVERLAP in self.needs else one.emitted
                shown = min(shown, len(draft.tokens))
                values = overlaps(laws[:shown], _first(draft.laws, shown), draft.tokens[:shown])
                overlap[i, :shown] = values.cpu().numpy()
            if every_arm is not None:
                start = self.target.clock()
                every_arm[i, :, : one.emitted] = self._score_arms(row, laws[: one.emitted])
                seconds[i] += self.target.clock() - start
            seconds[i] += one.seconds
            self.done[row] = len(self.texts[row]) == self.queries and self.texts[row][-1].ended
        return Rounds(
            arm=arms.copy(),
            drafted=np.array([one.drafted for one in played]),
            accepted=np.array([one.accepted for one in played]),
            emitted=np.array([one.emitted for one in played]),
            max_draft=self.max_draft,
            seconds=seconds,
            overlap=overlap,
            every_arm=every_arm,
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
        query = len(self.texts[row])
        prompt = self.prompts[query]
        seed = np.random.SeedSequence((self._entropy, row, query) if self.seed is None else (self.seed, query))
        start = self.target.clock()
        self._models[row] = _Models(
            self.rule.open(seed, self.max_new_tokens),
            self.target.prefill(prompt),
            [arm.drafter.open(prompt) for arm in self.live_arms],
            [0] * len(self.arms),
        )
        self.texts[row].append(Text(len(prompt), list(prompt), self.target.clock() - start))

    def _play(self, row: int, arm: int) -> tuple[LiveRound, torch.Tensor, Draft]:
        """The round, the target's laws (empty where nobody needs them) and the draft."""
        text, models = self.texts[row][-1], self._models[row]
        left = self.max_new_tokens - text.position
        missed = text.position - models.current[arm]
        start = self.target.clock()
        draft = self._draft(text, models, arm, left)
        drafted = self.target.clock()
        verdict, logits = self._verify(text, models, draft, left)
        verified = time.perf_counter()
        self._commit(text, models, draft, verdict)
        end = self.target.clock()
        models.current[arm] = text.position
        played = LiveRound(
            arm=arm,
            drafted=len(draft.tokens),
            accepted=verdict.accepted,
            emitted=len(verdict.emitted),
            missed=missed,
            seconds=end - start,
            draft_seconds=drafted - start,
            verify_seconds=verified - drafted,
            commit_seconds=end - verified,
        )
        text.rounds.append(played)
        laws = models.rule.laws(logits) if self.needs & {OVERLAP, BLOCK_OVERLAP, EVERY_ARM} else logits[:0]
        return played, laws, draft

    def _draft(self, text: Text, models: _Models, arm: int, left: int) -> Draft:
        limit = min(self.live_arms[arm].length, left)
        return draft_tokens(models.streams[arm], text.context, limit, models.rule, text.position, self.target.eos)

    def _verify(self, text: Text, models: _Models, draft: Draft, left: int) -> tuple[Verdict, torch.Tensor]:
        """One pass of the target over the last token and the draft, and what stands of it.

        Reading the tokens waits for the device, so that the clock after this phase is right.
        """
        logits = self.target.forward(models.state, [text.context[-1], *draft.tokens])
        return models.rule.verify(logits, draft, text.position, self.target.eos, left), logits

    def _commit(self, text: Text, models: _Models, draft: Draft, verdict: Verdict) -> None:
        self.target.rollback(models.state, len(draft.tokens) + 1 - len(verdict.emitted))
        text.context.extend(verdict.emitted)
        text.ended = verdict.ended

    def _score_arms(self, row: int, laws: torch.Tensor) -> FloatArray:
        """Overlap of every arm's own first token with `laws` at the tokens just emitted; [arms, emitted].

        An arm that proposes nothing there scores 0.
        """
        text, models = self.texts[row][-1], self._models[row]
        scores = np.zeros((len(self.arms), len(laws)))
        for a, (arm, stream) in enumerate(zip(self.live_arms, models.streams, strict=True)):
            if arm.length:
                scores[a] = first_overlaps(stream, text.context, laws, models.rule, text.position)
        models.current = [text.position] * len(self.arms)  # scoring brings every drafter up to date
        return scores


def draft_tokens(
    stream: DraftStream, context: Sequence[int], limit: int, rule: TextRule, position: int, eos: Collection[int]
) -> Draft:
    """What a round drafts after `context`, where it may draft `limit` tokens."""
    return clip(stream.draft(context, limit, rule, position), eos, limit) if limit else Draft()


def first_overlaps(
    stream: DraftStream, context: Sequence[int], laws: torch.Tensor, rule: TextRule, position: int
) -> FloatArray:
    """Overlap of a drafter's first token with the target's `laws` of the last `n` tokens of `context`; [n].

    `position` counts the context's new tokens. 0 where a drafter without a law proposes nothing.
    """
    n = len(laws)
    if isinstance(stream, LawStream):
        own = rule.laws(stream.logits(context, n))
        return overlaps(laws, own, []).double().cpu().numpy()
    scores = np.zeros(n)
    for j in range(n):
        tokens = stream.draft(context[: len(context) - n + j], 1, rule, position - n + j).tokens
        if tokens:
            scores[j] = float(laws[j, tokens[0]])
    return scores


def _first(laws: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if laws is None else laws[:count]


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
    rule: Rule | None = None,
    carry_over: str = "none",
    seed: int = 0,
    chat_template: bool = True,
    on_round: Callable[[IntArray, Rounds], None] | None = None,
) -> list[Generation]:
    """Decodes the prompts one after the other; `policy` picks the arm of each round."""
    encoded = [target.encode(prompt.text, chat_template) for prompt in prompts]
    environment = LiveEnvironment(target, arms, encoded, max_new_tokens, rule)
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
    return asdict(played) | {"arm": arms[played.arm]}
