"""The protocol of a drafter."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from metasd_sim.errors import InputError

if TYPE_CHECKING:
    from ..engines.base import Features
    from ..verify import TextRule


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, in order, and the laws they were drawn from; None for point masses."""

    tokens: list[int] = field(default_factory=list)
    laws: torch.Tensor | None = None  # [tokens, vocab]


@runtime_checkable
class DraftStream(Protocol):
    """Drafts for one row and one prompt."""

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        """At most `limit` tokens to follow `context`: the prompt and `position` tokens emitted since.

        Its law is a function of `context` alone: a stream that sat out some rounds finds in it all that it missed.
        One that then reads it in a pass of its own may tell the seconds of that in an attribute `read_seconds`.
        """


@runtime_checkable
class LawStream(DraftStream, Protocol):
    """A stream of a drafter with a law, which does not depend on where a round starts."""

    def logits(self, context: Sequence[int], count: int) -> torch.Tensor:
        """What it would draw each of the last `count` tokens of `context` from; [count, vocab]."""


@runtime_checkable
class Drafter(Protocol):
    """`name` is the drafter as on the command line; a `point_mass` proposes without sampling, from no law.

    One whose model has room for so many tokens only says so in an attribute `max_length`.
    """

    @property
    def name(self) -> str: ...

    @property
    def point_mass(self) -> bool: ...

    def open(self, prompt: Sequence[int]) -> DraftStream:
        """A stream for a new row or prompt, current at the prompt's end."""


@runtime_checkable
class WhiteBoxDrafter(Protocol):
    """A drafter that reads the target's hidden states, which come with every pass at no further target call.

    When it drafts after `context` they cover all of it but the last token; its law depends on where a round starts.
    """

    white_box: bool

    @property
    def name(self) -> str: ...

    @property
    def point_mass(self) -> bool: ...

    def open(self, prompt: Sequence[int], features: Features) -> StartLawStream: ...


@runtime_checkable
class StartLawStream(DraftStream, Protocol):
    """A stream of a drafter with a law that depends on where a round starts."""

    def logits_along(self, context: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """What a round that starts after `context` would draw each of `tokens` from, if it drew the ones before."""


def open_stream(drafter: Any, prompt: Sequence[int], features: Features | None) -> DraftStream:
    """A stream of either kind of drafter."""
    stream: DraftStream = (
        drafter.open(prompt, features) if getattr(drafter, "white_box", False) else drafter.open(prompt)
    )
    return stream


def checked(draft: Draft, vocab_size: int) -> Draft:
    """The draft, its tokens as plain integers.

    Refuses what no drafter may propose: tokens that do not exist, or cannot come from the laws beside them.
    """
    tokens, laws = [operator.index(token) for token in draft.tokens], draft.laws
    if any(not 0 <= token < vocab_size for token in tokens):
        raise InputError(f"draft: expected token ids below {vocab_size}, found {tokens}")
    if laws is None or not tokens:
        return Draft(tokens)
    if laws.shape != (len(tokens), vocab_size):
        raise InputError(f"draft: expected laws of shape {[len(tokens), vocab_size]}, found {list(laws.shape)}")
    total = laws.sum(dim=-1)
    drawn = laws.gather(1, torch.tensor(tokens, device=laws.device)[:, None])
    # a NaN fails every comparison
    if not bool(((total - 1).abs() < 1e-2).all() & (laws.min() >= 0) & (drawn > 0).all()):
        raise InputError("draft: expected laws that sum to 1 and give the drafted tokens a chance, found others")
    return Draft(tokens, laws)
