"""The protocol of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, in order."""

    tokens: list[int] = field(default_factory=list)


@runtime_checkable
class DraftStream(Protocol):
    """Drafts for one row and one prompt."""

    def draft(self, context: Sequence[int], limit: int) -> Draft:
        """At most `limit` tokens to follow `context`: the prompt and all tokens emitted since.

        A function of `context` alone: a stream that sat out some rounds finds in it all that it missed.
        """


@runtime_checkable
class Drafter(Protocol):
    """`name` is the drafter as on the command line; `point_mass` tells that its drafts are not sampled."""

    @property
    def name(self) -> str: ...

    @property
    def point_mass(self) -> bool: ...

    def open(self) -> DraftStream:
        """A stream for a new row or prompt."""
