"""The protocol of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
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
        """


@runtime_checkable
class LawStream(DraftStream, Protocol):
    """A stream of a drafter with a law, which does not depend on where a round starts."""

    def logits(self, context: Sequence[int], count: int) -> torch.Tensor:
        """What it would draw each of the last `count` tokens of `context` from; [count, vocab]."""


@runtime_checkable
class Drafter(Protocol):
    """`name` is the drafter as on the command line; a `point_mass` proposes without sampling, from no law."""

    @property
    def name(self) -> str: ...

    @property
    def point_mass(self) -> bool: ...

    def open(self, prompt: Sequence[int]) -> DraftStream:
        """A stream for a new row or prompt, current at the prompt's end."""
