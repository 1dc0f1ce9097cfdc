"""Verification: how tokens are chosen, which drafted ones stand, and what a round emits.

Three rules, all lossless: given any history each emitted token has the target's law `p = softmax(logits / T)`
(greedy: its argmax), whatever was drafted.

- greedy: a draft stands while it is the argmax.
- rejection: `y ~ q` stands with probability `min(1, p(y) / q(y))`; the first rejected one is replaced by a token of
  `norm(max(0, p - q))`, and a block without a rejection adds a bonus token of `p` (Leviathan et al. 2023, Chen et al.
  2023). A deterministic draft is a point mass: it stands with probability `p(y)`, else a token of `p` without `y`.
- gumbel: target and drafter take the argmax of log-probability plus the same Gumbel noise, one vector per position; a
  draft stands while they agree. The text depends on the seed alone (Daliri et al. 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from metasd_sim.errors import InputError

from .drafters.base import Draft
from .processors import answers_any_text
from .settings import RULES


@dataclass(frozen=True)
class Verdict:
    accepted: int  # N
    emitted: list[int]  # the accepted tokens and one of the target's own, or the accepted ones where the text ended
    ended: bool  # the text is complete


def acceptance(p: torch.Tensor, q: torch.Tensor | None, tokens: Sequence[int]) -> torch.Tensor:
    """`min(1, p_j(y_j) / q_j(y_j))`, or `p_j(y_j)` of point masses (q None); p, q [n, vocab], tokens [n] -> [n]."""
    chosen = torch.tensor(list(tokens), dtype=torch.int64, device=p.device)[:, None]
    ours = p.gather(1, chosen)[:, 0]
    if q is None:
        return ours
    theirs = q.gather(1, chosen)[:, 0]
    return torch.where(theirs > 0, (ours / theirs).clamp(max=1.0), 0.0)


def residual(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """Law of the token that replaces the rejected `token`: `norm(max(0, p - q))`; p without it for a point mass.

    p, q [vocab]. Where nothing is left of `p - q` the laws agree to rounding, and `p` is as good.
    """
    if q is None:
        rest = p.clone()
        rest[token] = 0.0
    else:
        rest = (p - q).clamp(min=0.0)
    total = rest.sum()
    return rest / total if total > 0 else p


def overlaps(p: torch.Tensor, q: torch.Tensor | None, tokens: Sequence[int]) -> torch.Tensor:
    """`1 - d_TV(p_j, q_j) = sum_x min(p_j(x), q_j(x))`, `p_j(y_j)` of point masses; [n, vocab] -> [n]."""
    # the sum of a law may pass 1 by rounding
    return acceptance(p, None, tokens) if q is None else torch.minimum(p, q).sum(dim=-1).clamp(max=1.0)


class LogitsError(InputError):
    """Logits that make no law; whoever knows whose they are adds the name."""

    def __init__(self) -> None:
        super().__init__(
            "expected logits of which the largest is a finite number, found NaN or infinity; check the model's "
            "weights, try another dtype, or look for processors that forbid every token"
        )


def sample(law: torch.Tensor, uniform: float) -> int:
    """The token at which the cumulative law [vocab] passes `uniform` in [0, 1)."""
    cumulative = law.double().cumsum(dim=0)
    total = cumulative[-1]
    if not total > 0:  # a NaN fails every comparison
        raise LogitsError
    below_all = torch.nextafter(total, cumulative.new_zeros(()))
    return int(torch.searchsorted(cumulative, torch.minimum(uniform * total, below_all), right=True))


def clip(draft: Draft, eos: Collection[int], limit: int) -> Draft:
    """The draft up to the `limit` tokens that the text has left; a point mass also up to its first end of sequence.

    A sampled draft goes on past one, so that how much is drafted does not depend on what was drawn.
    """
    tokens = draft.tokens[:limit]
    if draft.laws is not None:
        return Draft(tokens, draft.laws[:limit])
    return Draft(next((tokens[: i + 1] for i, token in enumerate(tokens) if token in eos), tokens))


def settle(
    stands: Sequence[bool], draft: Sequence[int], own: Callable[[int], int], eos: Collection[int], limit: int
) -> Verdict:
    """Keeps the drafts before the first that does not stand, and adds the target's `own(accepted)`.

    A block that reaches the `limit` or an end of sequence with an accepted draft emits no further token.
    """
    emitted: list[int] = []
    for token, stood in zip(draft, stands, strict=True):
        if not stood:
            break
        emitted.append(token)
        if token in eos or len(emitted) == limit:
            return Verdict(len(emitted), emitted, True)
    accepted = len(emitted)
    emitted.append(own(accepted))
    return Verdict(accepted, emitted, len(emitted) == limit or emitted[-1] in eos)


class TextRule(Protocol):
    """The rule for one text; positions count its new tokens from 0. All but `process*` take processed logits."""

    @property
    def guarded(self) -> bool:
        """Whether some processor may be asked about accepted tokens only: then `verify` goes token by token."""

    def process(self, logits: torch.Tensor, context: Sequence[int], tokens: Sequence[int] = ()) -> torch.Tensor:
        """Logits after the processors, as plain decoding applies them; [n, vocab].

        `logits[j]` follows `context` and the first `j` of `tokens`.
        """

    def process_draft(self, logits: torch.Tensor, context: Sequence[int], tokens: Sequence[int] = ()) -> torch.Tensor:
        """A drafter's logits, after those processors that answer for any text."""

    def laws(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities of the same shape, for overlaps."""

    def draft(self, logits: torch.Tensor, position: int) -> int:
        """A drafter's token at `position` from its logits [vocab]."""

    def verify(self, logits: torch.Tensor, draft: Draft, position: int, eos: Collection[int], limit: int) -> Verdict:
        """logits [len(draft) + 1, vocab] of the target from `position` on."""

    def accept_given_text(
        self, p: torch.Tensor, drafter: torch.Tensor, tokens: Sequence[int], position: int = 0
    ) -> torch.Tensor:
        """P(a drafter's token is accepted | the text has `tokens[j]` there and its prefix was accepted); [n].

        p [n, vocab]: the target's laws from `position` on; drafter [n, vocab]: the drafter's logits there.
        """

    def rejected(self, p: torch.Tensor, drafter: torch.Tensor, token: int, uniform: float) -> int | None:
        """A drafter's token given that it was rejected where the text has `token`, or None; laws and logits [vocab]."""


class _Text:
    """What the three rules share."""

    def __init__(self, rule: Rule, prompt_tokens: int) -> None:
        self.temperature, self.warpers = rule.temperature, rule.warpers
        self.processors = [p.for_prompt(prompt_tokens) if hasattr(p, "for_prompt") else p for p in rule.processors]
        self.for_drafts = [p for p in self.processors if answers_any_text(p)]
        self.guarded = len(self.for_drafts) < len(self.processors)

    def process(self, logits: torch.Tensor, context: Sequence[int], tokens: Sequence[int] = ()) -> torch.Tensor:
        return _processed(self.processors, logits, context, tokens)

    def process_draft(self, logits: torch.Tensor, context: Sequence[int], tokens: Sequence[int] = ()) -> torch.Tensor:
        return _processed(self.for_drafts, logits, context, tokens)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over temperature, truncated."""
        scores = tempered(logits, self.temperature)
        for warper in self.warpers:
            scores = warper(None, scores.reshape(-1, scores.shape[-1])).reshape(scores.shape)
        return scores


class GreedyText(_Text):
    """Overlaps come from the softmax at temperature 1, acceptance from the argmax."""

    def __init__(self, rule: Rule | None = None, prompt_tokens: int = 0) -> None:
        super().__init__(rule or Rule(), prompt_tokens)

    def laws(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(dim=-1)

    def draft(self, logits: torch.Tensor, position: int) -> int:
        choice = int(logits.argmax())
        if not math.isfinite(logits[choice]):
            raise LogitsError
        return choice

    def verify(self, logits: torch.Tensor, draft: Draft, position: int, eos: Collection[int], limit: int) -> Verdict:
        return _agree(logits, logits.argmax(dim=-1), draft.tokens, eos, limit)

    def accept_given_text(
        self, p: torch.Tensor, drafter: torch.Tensor, tokens: Sequence[int], position: int = 0
    ) -> torch.Tensor:
        return _same(drafter.argmax(dim=-1), tokens)

    def rejected(self, p: torch.Tensor, drafter: torch.Tensor, token: int, uniform: float) -> int | None:
        choice = int(drafter.argmax())
        return None if choice == token else choice


class RejectionText(_Text):
    """Uniforms belong to positions, so a round without a draft uses what plain decoding would use.

    Drafts are sampled from a stream of their own: a draft beyond a rejection must not foretell a later one.
    """

    def __init__(self, rule: Rule, seed: np.random.SeedSequence, tokens: int, prompt_tokens: int = 0) -> None:
        super().__init__(rule, prompt_tokens)
        ours, drafters = (np.random.default_rng(child) for child in seed.spawn(2))
        self.accept, self.emit = ours.random((2, tokens)).tolist()
        self.drafts = drafters

    def laws(self, logits: torch.Tensor) -> torch.Tensor:
        return self.scaled(logits).softmax(dim=-1)

    def draft(self, logits: torch.Tensor, position: int) -> int:
        return sample(self.laws(logits), self.drafts.random())

    def verify(self, logits: torch.Tensor, draft: Draft, position: int, eos: Collection[int], limit: int) -> Verdict:
        p = self.laws(logits)
        chances = acceptance(p[:-1], draft.laws, draft.tokens).tolist()
        stands = [self.accept[position + j] < chance for j, chance in enumerate(chances)]

        def own(accepted: int) -> int:
            law = p[accepted]
            if accepted < len(draft.tokens):
                q = None if draft.laws is None else draft.laws[accepted]
                law = residual(law, q, draft.tokens[accepted])
            return sample(law, self.emit[position + accepted])

        return settle(stands, draft.tokens, own, eos, limit)

    def accept_given_text(
        self, p: torch.Tensor, drafter: torch.Tensor, tokens: Sequence[int], position: int = 0
    ) -> torch.Tensor:
        # drafted, accepted and emitted has probability min(p, q); emitted has p
        return acceptance(self.laws(drafter), p, tokens)

    def rejected(self, p: torch.Tensor, drafter: torch.Tensor, token: int, uniform: float) -> int | None:
        rest = (self.laws(drafter) - p).clamp(min=0.0)  # rejected and y has probability max(0, q(y) - p(y))
        return sample(rest, uniform) if rest.sum() > 0 else None


class GumbelText(_Text):
    """The noise of a position is the same for target and drafters, and for every run with this seed."""

    def __init__(self, rule: Rule, seed: np.random.SeedSequence, prompt_tokens: int = 0) -> None:
        super().__init__(rule, prompt_tokens)
        self.key = seed.generate_state(1, np.uint64)[0]

    def noise(self, position: int, vocabulary: int) -> torch.Tensor:
        """[vocab] standard Gumbel noise."""
        rng = np.random.Generator(np.random.Philox(key=np.array([self.key, position], dtype=np.uint64)))
        return torch.from_numpy(rng.gumbel(size=vocabulary))

    def laws(self, logits: torch.Tensor) -> torch.Tensor:
        return self.scaled(logits).softmax(dim=-1)

    def draft(self, logits: torch.Tensor, position: int) -> int:
        scores = self._perturbed(logits[None], position)[0]
        choice = int(scores.argmax())
        if not math.isfinite(scores[choice]):
            raise LogitsError
        return choice

    def _perturbed(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        noise = torch.stack([self.noise(position + j, logits.shape[-1]) for j in range(len(logits))])
        return self.scaled(logits) + noise.to(logits.device)

    def _choices(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        return self._perturbed(logits, position).argmax(dim=-1)

    def verify(self, logits: torch.Tensor, draft: Draft, position: int, eos: Collection[int], limit: int) -> Verdict:
        scores = self._perturbed(logits, position)
        return _agree(scores, scores.argmax(dim=-1), draft.tokens, eos, limit)

    def accept_given_text(
        self, p: torch.Tensor, drafter: torch.Tensor, tokens: Sequence[int], position: int = 0
    ) -> torch.Tensor:
        return _same(self._choices(drafter, position), tokens)

    def rejected(self, p: torch.Tensor, drafter: torch.Tensor, token: int, uniform: float) -> int | None:
        raise InputError("blocks: expected greedy or rejection verification, found gumbel; record without --blocks")


@dataclass(frozen=True)
class Rule:
    """`verification` is greedy (at temperature 0), rejection or gumbel."""

    verification: str = "greedy"
    temperature: float = 0.0
    processors: tuple[Any, ...] = ()  # before the temperature; `make_rule` of sampling.py makes them
    warpers: tuple[Any, ...] = ()  # after it
    settings: tuple[str, ...] = ()  # what they are, in words

    def __post_init__(self) -> None:
        if self.verification not in RULES:
            raise InputError(f"verification: expected one of {', '.join(RULES)}; found {self.verification!r}")
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature: expected a finite number, 0 or larger; found {self.temperature}")
        if (self.verification == "greedy") != (self.temperature == 0):
            raise InputError(
                f"temperature: expected 0 with greedy verification and more with the others, "
                f"found {self.temperature} with {self.verification}"
            )

    @property
    def guarded(self) -> bool:
        """Whether some processor may be asked about accepted tokens only."""
        return not all(map(answers_any_text, self.processors))

    def open(self, seed: np.random.SeedSequence, tokens: int, prompt_tokens: int = 0) -> TextRule:
        """The rule for a text of up to `tokens` new tokens after those of a prompt."""
        if self.verification == "greedy":
            return GreedyText(self, prompt_tokens)
        if self.verification == "rejection":
            return RejectionText(self, seed, tokens, prompt_tokens)
        return GumbelText(self, seed, prompt_tokens)


def tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits over temperature, shifted so that the largest is 0: no overflow however small the temperature is."""
    kind = torch.finfo(logits.dtype)
    if temperature < kind.tiny:  # too small a divisor for this type: the limit itself, all on the first argmax
        best = logits.argmax(dim=-1, keepdim=True)
        # times 0 is 0, or NaN where there is no finite largest
        return torch.full_like(logits, -torch.inf).scatter(-1, best, logits.gather(-1, best) * 0)
    # larger ones are as good as infinite, and a divisor whose inverse is 0 would make NaN of tokens that are forbidden
    return (logits - logits.max(dim=-1, keepdim=True).values) / min(temperature, kind.max / 16)


@torch.inference_mode()
def _processed(
    processors: Sequence[Any], logits: torch.Tensor, context: Sequence[int], tokens: Sequence[int]
) -> torch.Tensor:
    if not processors:
        return logits
    text = torch.tensor([[*context, *tokens]], device=logits.device)
    rows = []
    for j in range(len(logits)):
        scores = logits[j : j + 1].clone()  # some processors write into it
        for processor in processors:
            scores = processor(text[:, : len(context) + j], scores)
        rows.append(scores)
    return torch.cat(rows)


def verify_text(
    rule: TextRule,
    logits: torch.Tensor,
    context: Sequence[int],
    draft: Draft,
    position: int,
    eos: Collection[int],
    limit: int,
    cut: Callable[[Sequence[int], Verdict], Verdict] | None = None,
) -> tuple[Verdict, torch.Tensor]:
    """What stands of a draft after `context`, of which the last `position` tokens are new, and the processed logits.

    `logits` [len(draft) + 1, vocab] are the target's own. `cut(new tokens, verdict)` ends a text at a stop string.
    Where the rule is `guarded`, processors are asked token by token, up to the one that is emitted last: a token that
    they forbid is a rejection like any other. Then there are logits of the emitted tokens only.
    """
    new = [] if cut is None else list(context[len(context) - position :])
    if not rule.guarded:
        processed = rule.process(logits, context, draft.tokens)
        verdict = rule.verify(processed, draft, position, eos, limit)
        return verdict if cut is None else cut(new, verdict), processed
    emitted: list[int] = []
    rows: list[torch.Tensor] = []
    accepted = 0
    for j in range(len(draft.tokens) + 1):
        rows.append(rule.process(logits[j : j + 1], [*context, *emitted]))
        laws = None if draft.laws is None else draft.laws[j : j + 1]
        one = Draft(draft.tokens[j : j + 1], laws) if j < len(draft.tokens) else Draft()
        # with a limit of one token the rule settles this place alone
        step = rule.verify(rows[-1].expand(len(one.tokens) + 1, -1), one, position + j, eos, 1)
        step = Verdict(step.accepted, step.emitted, step.emitted[0] in eos or len(emitted) + 1 == limit)
        step = step if cut is None else cut([*new, *emitted], step)
        emitted += step.emitted
        accepted += step.accepted
        if step.ended or not step.accepted:
            break
    return Verdict(accepted, emitted, step.ended), torch.cat(rows)


def _agree(
    scores: torch.Tensor, choices: torch.Tensor, draft: Sequence[int], eos: Collection[int], limit: int
) -> Verdict:
    """Drafts stand while they are the target's choices, the places of its largest `scores` [n, vocab]."""
    own: list[int] = choices.tolist()
    sound = scores.gather(1, choices[:, None])[:, 0].isfinite().tolist()
    stands = [token == choice for token, choice in zip(draft, own, strict=False)]
    verdict = settle(stands, draft, lambda accepted: own[accepted], eos, limit)
    if not all(sound[: len(verdict.emitted)]):  # of what lies past a rejection nobody asks
        raise LogitsError
    return verdict


def _same(choices: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    return (choices == torch.tensor(list(tokens), device=choices.device)).float()
