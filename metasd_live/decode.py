"""Live decoding: the environment whose rounds are played by real models, and `generate`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from metasd_sim.environments.base import BLOCK_OVERLAP, EVERY_ARM, FEATURES, OVERLAP, SECONDS, Context, FixedArms
from metasd_sim.errors import InputError
from metasd_sim.policies.base import Policy
from metasd_sim.rounds import BoolArray, FloatArray, IntArray, Rounds
from metasd_sim.simulate import simulate

from .drafters import Arm, Draft, DraftStream, longest_draft
from .drafters.base import LawStream, StartLawStream, checked, open_stream
from .ending import Ending
from .engines.base import Features, ModelState
from .prompts import Prompt, prompt_features
from .sampling import check_processors
from .target import Target
from .timing import TimedPolicy
from .verify import LogitsError, Rule, TextRule, Verdict, clip, overlaps, verify_text


@dataclass(frozen=True)
class LiveRound:
    """One round, with the seconds of its phases; `seconds` is the whole of it but for the policy and the loop."""

    arm: int
    drafted: int
    accepted: int
    emitted: int
    missed: int  # tokens emitted since the arm was last current
    context: int  # tokens before the round, the prompt's and new ones
    seconds: float
    draft_seconds: float
    verify_seconds: float  # the target's pass and the choice of its tokens
    choose_seconds: float  # of the verifying: processors and the choice of tokens, once the pass is done
    commit_seconds: float  # rollback and bookkeeping
    catch_up_seconds: float = 0.0  # of the drafting: the pass that read missed tokens, and drafts the first new one
    score_seconds: float = 0.0  # of all arms, for policies that ask for full information
    policy_seconds: float = 0.0  # outside `seconds`, filled in by `decode`: the policy's calls
    rest_seconds: float = 0.0  # outside `seconds` too: all else between this round and the next


@dataclass
class Text:
    """What one row has written after one prompt."""

    prompt_tokens: int
    context: list[int]  # the prompt, then all emitted tokens
    prefill_seconds: float
    drafting: bool = True  # False: plain decoding was asked for
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
    """What a text's rule and drafters remember."""

    rule: TextRule
    streams: list[DraftStream | None]  # of each arm; None: it cannot draft for this text
    current: list[int]  # of each arm: the position up to which it has drafted


class LiveEnvironment:
    """All prompts in turn, in each row; one text's rounds are one query. Or, `parallel`, one prompt in each row, all
    verified in one pass of the target.

    The first round of a prompt waits for its prefill, which is outside the seconds of rounds. Where a policy asks for
    full information, the scoring of all arms is part of them. `seed` fixes the texts' randomness, as in a recording
    with that seed: all rows then share it. In parallel each row's rounds take their own drafting and an equal share of
    the pass.

    An arm is not eligible where the context outgrows its model, or where its drafter failed: a drafter that raises or
    returns rubbish is retired with a warning. Where no arm can draft, or `drafting` is off (for all prompts, or each;
    or past `draft_up_to` prompt tokens), rounds decode plainly and policies do not learn from them.
    """

    def __init__(
        self,
        target: Target,
        arms: Sequence[Arm],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rule: Rule | None = None,
        seed: int | None = None,
        *,
        eos: Collection[int] | None = None,
        stop_strings: Sequence[str] = (),
        drafting: bool | Sequence[bool] = True,
        draft_up_to: int | None = None,
        parallel: bool = False,
        first_prompt: int = 0,
        features: FloatArray | None = None,
        on_text: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise InputError(f"max new tokens: expected 1 or more, found {max_new_tokens}")
        if not prompts:
            raise InputError("prompts: expected at least one, found none")
        for prompt in prompts:
            check_prompt(prompt, target.vocab_size)
            target.check_length(len(prompt), max_new_tokens)
        wanted = _choices(drafting, len(prompts))
        if parallel:
            target.check_rows()
        self.target = target
        self.rule = rule or Rule()
        check_processors(self.rule, target.vocab_size, prompts, target.device)
        self.seed = seed
        self.live_arms = tuple(arms)
        self.arms = tuple(arm.name for arm in arms)
        self.max_draft = longest_draft(arms)
        self.prompts = prompts
        self.parallel = parallel
        self.queries = 1 if parallel else len(prompts)
        self.max_new_tokens = max_new_tokens
        self.ending = Ending.of(target, eos, stop_strings)
        self.drafting = [
            yes and (draft_up_to is None or len(prompt) <= draft_up_to)
            for yes, prompt in zip(wanted, prompts, strict=True)
        ]
        if features is not None and len(features) != len(prompts):
            raise InputError(f"features: expected a row for each of {len(prompts)} prompts, found {len(features)}")
        self.features = features  # [prompts, d], for policies that read them
        self.first_prompt = first_prompt  # number of the first prompt among all, which gives each its randomness
        self.on_text = on_text
        self.retired: dict[int, str] = {}  # arm -> what its drafter did
        # under the Gumbel rule what a rejected branch shows would tell of noise that is still to come, and processors
        # with constraints are not asked about it
        whole_block = set() if self.rule.verification == "gumbel" or self.rule.guarded else {BLOCK_OVERLAP}
        told = set() if features is None else {FEATURES}
        self.gives = frozenset({OVERLAP, SECONDS, EVERY_ARM} | whole_block | told)

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        if self.parallel and rows != len(self.prompts):
            raise InputError(f"runs: expected one for each of {len(self.prompts)} parallel prompts, found {rows}")
        self.needs = needs
        self.done = np.zeros(rows, dtype=bool)
        self.texts: list[list[Text]] = [[] for _ in range(rows)]  # [rows][queries begun]
        self._models: dict[int, _Models] = {}  # of each row's current text
        wanted = any(arm.white_box for arm in self.live_arms)
        self._states: _States = _Batch(self.target, rows, wanted) if self.parallel else _Singles(self.target, wanted)
        self._entropy = int(rng.integers(2**63))
        self._warm_up()

    def observe(self, rows: IntArray) -> Context:
        fresh = [row for row in rows.tolist() if not self.texts[row] or self.texts[row][-1].ended]
        if fresh:
            self._prefill(fresh)
        able = np.array([self._able(row) for row in rows.tolist()])
        self._idle: BoolArray = ~np.array(able.any(axis=1))  # these rounds draft nothing, whatever arm is named
        able[self._idle] = True
        query = np.array([len(self.texts[row]) - 1 for row in rows])
        return Context(
            query=query,
            new_query=np.array([not self.texts[row][-1].rounds for row in rows]),
            eligible=None if able.all() else able,
            horizon=np.full(len(rows), self.max_new_tokens),
            features=None if self.features is None else self.features[rows if self.parallel else query],
        )

    @torch.inference_mode()
    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        n = len(rows)
        overlap = np.full((n, self.max_draft), np.nan) if {OVERLAP, BLOCK_OVERLAP} & self.needs else None
        every_arm = np.full((n, len(self.arms), self.max_draft + 1), np.nan) if EVERY_ARM in self.needs else None
        seconds = np.zeros(n)
        together = [list(range(n))] if self.parallel else [[i] for i in range(n)]
        results = [played for group in together for played in self._play(group, rows, arms)]
        for i, (row, (one, laws, draft)) in enumerate(zip(rows.tolist(), results, strict=True)):
            if overlap is not None:
                rejected = one.emitted > one.accepted  # else the text ended, and nothing past it is shown
                shown = len(draft.tokens) if rejected and BLOCK_OVERLAP in self.needs else one.emitted
                shown = min(shown, len(draft.tokens))
                values = overlaps(laws[:shown], _first(draft.laws, shown), draft.tokens[:shown])
                overlap[i, :shown] = values.cpu().numpy()
            if every_arm is not None:
                start = self.target.clock()
                every_arm[i, :, : one.emitted] = self._score_arms(row, laws[: one.emitted])
                scoring = self.target.clock() - start
                one = replace(one, seconds=one.seconds + scoring, score_seconds=scoring)
                self.texts[row][-1].rounds[-1] = one
            seconds[i] += one.seconds
            self.done[row] = len(self.texts[row]) == self.queries and self.texts[row][-1].ended
        self._states.keep([row for row in rows.tolist() if not self.done[row]])
        played = [one for one, _, _ in results]
        return Rounds(
            arm=arms.copy(),
            drafted=np.array([one.drafted for one in played]),
            accepted=np.array([one.accepted for one in played]),
            emitted=np.array([one.emitted for one in played]),
            max_draft=self.max_draft,
            seconds=seconds,
            overlap=overlap,
            every_arm=every_arm,
            seen=~self._idle if self._idle.any() else None,
        )

    def fixed_arms(self, budgets: IntArray) -> FixedArms | None:
        return None  # no expectation is known

    def _warm_up(self) -> None:
        """One pass of every width, so that no round pays for what a first pass sets up."""
        state = self.target.prefill(self.prompts[0][:64])
        for width in range(1, min(self.max_draft, self.max_new_tokens) + 2):
            self.target.forward(state, list(self.prompts[0][:1]) * width)
            self.target.rollback(state, width)

    def _prefill(self, rows: Sequence[int]) -> None:
        numbers = [row if self.parallel else len(self.texts[row]) for row in rows]
        start = self.target.clock()
        self._states.prefill(rows, [self.prompts[number] for number in numbers])
        share = (self.target.clock() - start) / len(rows)
        for row, number in zip(rows, numbers, strict=True):
            start = self.target.clock()
            prompt, query = self.prompts[number], self.first_prompt + number
            random_row = 0 if self.parallel else row  # a prompt in parallel is written as the first row alone would
            entropy = (self._entropy, random_row, query) if self.seed is None else (self.seed, query)
            self.texts[row].append(Text(len(prompt), list(prompt), 0.0, self.drafting[number]))
            self._models[row] = _Models(
                self.rule.open(np.random.SeedSequence(entropy), self.max_new_tokens, len(prompt)),
                [self._open(row, arm, prompt) if self._may(row, arm) else None for arm in range(len(self.arms))],
                [0] * len(self.arms),
            )
            self.texts[row][-1].prefill_seconds = share + self.target.clock() - start

    def _may(self, row: int, arm: int) -> bool:
        """Whether the arm may take this row's next round: it drafts nothing, or can draft all that it wants to."""
        text, drafter = self.texts[row][-1], self.live_arms[arm]
        if not drafter.length:
            return True
        room = drafter.max_length
        fits = room is None or len(text.context) + drafter.length <= room
        return text.drafting and fits and arm not in self.retired

    def _able(self, row: int) -> list[bool]:
        streams = self._models[row].streams
        return [self._may(row, arm) and streams[arm] is not None for arm in range(len(self.arms))]

    def _open(self, row: int, arm: int, prompt: Sequence[int]) -> DraftStream | None:
        try:
            return open_stream(self.live_arms[arm].drafter, list(prompt), self._states.features(row))
        except Exception as error:  # whatever a drafter raises
            self._retire(arm, error)
            return None

    def _retire(self, arm: int, error: Exception) -> None:
        """The arm drafts no more; the output stays the target's."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self.retired[arm] = reason
        warnings.warn(f"drafter {self.arms[arm]} is retired: {reason}", RuntimeWarning, stacklevel=2)

    def _play(
        self, group: Sequence[int], rows: IntArray, arms: IntArray
    ) -> list[tuple[LiveRound, torch.Tensor, Draft]]:
        """Rounds of `rows[group]`, verified in one pass: each one's round, the target's laws (empty where nobody needs
        them) and the draft."""
        played_rows = rows[group].tolist()
        texts = [self.texts[row][-1] for row in played_rows]
        models = [self._models[row] for row in played_rows]
        chosen = arms[group].tolist()
        clock = [self.target.clock()]
        drafts = []
        for row, arm, i in zip(played_rows, chosen, group, strict=True):
            drafts.append(self._draft(row, arm, bool(self._idle[i])))
            clock.append(self.target.clock())
        # Reading the tokens waits for the device, so that the clock after this phase is right.
        blocks = [[text.context[-1], *draft.tokens] for text, draft in zip(texts, drafts, strict=True)]
        raw = self._states.forward(played_rows, blocks)
        passed = self.target.clock()
        logits, verdicts = [], []
        for text, own, draft, block in zip(texts, models, drafts, raw, strict=True):
            verdict, processed = self._verify(text, own.rule, block, draft)
            verdicts.append(verdict)
            logits.append(processed)
        verified = time.perf_counter()
        missed = [text.position - own.current[arm] for text, own, arm in zip(texts, models, chosen, strict=True)]
        forget = [len(block) - len(verdict.emitted) for block, verdict in zip(blocks, verdicts, strict=True)]
        self._states.rollback(played_rows, forget)
        for text, own, arm, verdict in zip(texts, models, chosen, verdicts, strict=True):
            text.context.extend(verdict.emitted)
            text.ended = verdict.ended
            own.current[arm] = text.position
        committed = self.target.clock()
        results = []
        for g, (text, draft, verdict) in enumerate(zip(texts, drafts, verdicts, strict=True)):
            phases = [clock[g + 1] - clock[g], (verified - clock[-1]) / len(group), (committed - verified) / len(group)]
            one = LiveRound(
                arm=chosen[g],
                drafted=len(draft.tokens),
                accepted=verdict.accepted,
                emitted=len(verdict.emitted),
                missed=missed[g],
                context=len(text.context) - len(verdict.emitted),
                seconds=sum(phases),
                draft_seconds=phases[0],
                verify_seconds=phases[1],
                choose_seconds=(verified - passed) / len(group),
                commit_seconds=phases[2],
                catch_up_seconds=_read_seconds(models[g].streams[chosen[g]]) if missed[g] and draft.tokens else 0.0,
            )
            text.rounds.append(one)
            shown = {OVERLAP, BLOCK_OVERLAP, EVERY_ARM} & self.needs
            results.append((one, models[g].rule.laws(logits[g]) if shown else logits[g][:0], draft))
            if self.on_text is not None:
                number = played_rows[g] if self.parallel else len(self.texts[played_rows[g]]) - 1
                self.on_text(self.first_prompt + number, verdict.emitted)
        return results

    def _draft(self, row: int, arm: int, idle: bool) -> Draft:
        text, models = self.texts[row][-1], self._models[row]
        stream = models.streams[arm]
        limit = min(self.live_arms[arm].length, self.max_new_tokens - text.position)
        if idle or stream is None or not self._may(row, arm):
            return Draft()
        try:
            context = list(text.context)  # a drafter may do with it what it likes
            draft = draft_tokens(stream, context, limit, models.rule, text.position, self.ending.eos)
            return checked(draft, self.target.vocab_size)
        except Exception as error:  # whatever a drafter raises
            self._retire(arm, error)
            return Draft()

    def _verify(self, text: Text, rule: TextRule, logits: torch.Tensor, draft: Draft) -> tuple[Verdict, torch.Tensor]:
        """What stands of the draft, up to where the text ends, and the logits after the processors."""
        left = self.max_new_tokens - text.position
        cut = self.ending.cut if self.ending.strings else None
        try:
            return verify_text(rule, logits, text.context, draft, text.position, self.ending.eos, left, cut)
        except LogitsError as error:
            raise InputError(f"target {self.target.name}: {error}") from None

    def _score_arms(self, row: int, laws: torch.Tensor) -> FloatArray:
        """Overlap of every arm's own first token with `laws` at the tokens just emitted; [arms, emitted].

        An arm that proposes nothing there scores 0.
        """
        text, models = self.texts[row][-1], self._models[row]
        scores = np.zeros((len(self.arms), len(laws)))
        for arm, stream in enumerate(models.streams):
            if self.live_arms[arm].length and stream is not None and self._may(row, arm):
                try:
                    scores[arm] = first_overlaps(stream, list(text.context), laws, models.rule, text.position)
                except Exception as error:  # whatever a drafter raises
                    self._retire(arm, error)
        models.current = [text.position] * len(self.arms)  # scoring brings every drafter up to date
        return scores


class _States(Protocol):
    """The target's caches: each holds all of its row's context but the last token."""

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None: ...

    def features(self, row: int) -> Features | None: ...

    def forward(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[torch.Tensor]: ...

    def rollback(self, rows: Sequence[int], tokens: Sequence[int]) -> None: ...

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows will go on."""


class _Singles:
    """A cache for each row, a pass for each."""

    def __init__(self, target: Target, features: bool) -> None:
        self.target, self.wanted = target, features
        self.states: dict[int, ModelState] = {}

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in zip(rows, prompts, strict=True):
            self.states[row] = self.target.prefill(prompt, self.wanted) if self.wanted else self.target.prefill(prompt)

    def features(self, row: int) -> Features | None:
        return self.states[row].features

    def forward(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [self.target.forward(self.states[row], own) for row, own in zip(rows, ids, strict=True)]

    def rollback(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        for row, forget in zip(rows, tokens, strict=True):
            self.target.rollback(self.states[row], forget)

    def keep(self, rows: Sequence[int]) -> None:
        pass


class _Batch:
    """One cache and one pass for all rows; finished ones are dropped."""

    def __init__(self, target: Target, rows: int, features: bool) -> None:
        self.target, self.wanted = target, features
        self.rows = list(range(rows))

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        self.state = self.target.prefill_rows(prompts, self.wanted)

    def features(self, row: int) -> Features | None:
        return None if self.state.features is None else self.state.features[self.rows.index(row)]

    def forward(self, rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return self.target.forward_rows(self.state, ids)

    def rollback(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        self.target.rollback_rows(self.state, tokens)

    def keep(self, rows: Sequence[int]) -> None:
        if rows and len(rows) < len(self.rows):
            self.target.select_rows(self.state, [self.rows.index(row) for row in rows])
            self.rows = list(rows)


def check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    if not len(prompt) or not all(0 <= token < vocab_size for token in prompt):
        raise InputError(f"prompt: expected token ids below {vocab_size}, one at least; found {list(prompt)}")


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
        own = rule.laws(rule.process_draft(stream.logits(context, n), context[: len(context) - n], context[-n:]))
        scores = overlaps(laws, own, []).double().cpu().numpy()
        if not (scores >= 0).all():  # a NaN fails every comparison
            raise InputError("draft: expected logits that make a law, found others")
        return scores
    scores = np.zeros(n)
    if isinstance(stream, StartLawStream):
        for j in range(n):
            before = context[: len(context) - n + j]
            own = rule.process_draft(stream.logits_along(before, context[len(before) : len(before) + 1]), before)
            if len(own):
                scores[j] = float(overlaps(laws[j : j + 1], rule.laws(own), []))
        return scores
    for j in range(n):
        tokens = stream.draft(context[: len(context) - n + j], 1, rule, position - n + j).tokens
        if tokens:
            scores[j] = float(laws[j, tokens[0]])
    return scores


def _choices(drafting: bool | Sequence[bool], prompts: int) -> list[bool]:
    """Whether each prompt's text may be drafted."""
    wanted = [drafting] * prompts if isinstance(drafting, bool) else list(drafting)
    if len(wanted) != prompts:
        raise InputError(f"drafting: expected a choice for each of {prompts} prompts, found {len(wanted)}")
    return wanted


def _read_seconds(stream: DraftStream | None) -> float:
    """What the first pass of the last draft took."""
    return getattr(stream, "read_seconds", 0.0)


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
    **options: Any,
) -> list[Generation]:
    """Decodes the prompts; `policy` picks the arm of each round. `options` are those of `decode`."""
    encoded = [target.encode(prompt.text, chat_template) for prompt in prompts]
    options |= {"ids": [prompt.id for prompt in prompts], "features": features_of([prompt.text for prompt in prompts])}
    return decode(target, arms, encoded, policy, max_new_tokens, rule, carry_over, seed, on_round, **options)


def features_of(texts: Iterable[str]) -> FloatArray:
    """`prompt_features` of each; [texts, d]."""
    return np.array([prompt_features(text)[1] for text in texts])


def decode(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Sequence[int]],
    policy: Policy,
    max_new_tokens: int,
    rule: Rule | None = None,
    carry_over: str = "none",
    seed: int = 0,
    on_round: Callable[[IntArray, Rounds], None] | None = None,
    *,
    ids: Sequence[str] | None = None,
    batch_size: int = 1,
    fresh_policy: bool = True,
    drafting: bool | Sequence[bool] = True,
    retired: dict[int, str] | None = None,
    features: FloatArray | None = None,
    **options: Any,
) -> list[Generation]:
    """Decodes prompts given as token ids, `batch_size` of them at once, each with a bandit of its own.

    One after the other, the bandit may carry over from prompt to prompt, and from an earlier call where `fresh_policy`
    is False. Arms whose drafter failed are added to `retired`. `options` are those of `LiveEnvironment`.
    """
    if batch_size < 1:
        raise InputError(f"batch size: expected 1 or more, found {batch_size}")
    if batch_size > 1 and carry_over != "none":
        raise InputError(f"carry over: expected none with several prompts at once, found {carry_over}; batch size 1")
    parallel = batch_size > 1 and len(prompts) > 1
    wanted = _choices(drafting, len(prompts))
    texts: list[Text] = []
    step = batch_size if parallel else len(prompts)
    retired = {} if retired is None else retired
    for first in range(0, len(prompts), max(step, 1)):
        chunk = prompts[first : first + step]
        environment = LiveEnvironment(
            target,
            arms,
            chunk,
            max_new_tokens,
            rule,
            parallel=parallel,
            first_prompt=first,
            drafting=wanted[first : first + step],
            features=None if features is None else features[first : first + step],
            **options,
        )
        environment.retired = retired  # for good: the next prompts do without them too
        timed = TimedPolicy(policy)
        simulate(
            timed,
            environment,
            runs=len(chunk) if parallel else 1,
            seed=seed,
            carry_over=carry_over,
            on_round=on_round,
            fresh_policy=fresh_policy,
        )
        timed.account(environment.texts)
        texts += [row[0] for row in environment.texts] if parallel else environment.texts[0]
    names = [arm.name for arm in arms]
    return [
        Generation(
            id=ids[i] if ids is not None else str(i),
            prompt_tokens=text.prompt_tokens,
            token_ids=text.token_ids,
            text=target.decode(text.token_ids),
            seconds=text.prefill_seconds + sum(played.seconds for played in text.rounds),
            prefill_seconds=text.prefill_seconds,
            rounds=[_round_json(played, names) for played in text.rounds],
        )
        for i, text in enumerate(texts)
    ]


def _round_json(played: LiveRound, arms: Sequence[str]) -> dict[str, Any]:
    return asdict(played) | {"arm": arms[played.arm]}
