"""A chain of drafters: the first that proposes anything wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Draft, Drafter, DraftStream

if TYPE_CHECKING:
    from ..verify import TextRule


class Chain:
    """Each part is a drafter with its own longest draft, or None."""

    def __init__(self, parts: Sequence[tuple[Drafter, int | None]], name: str) -> None:
        self.parts = tuple(parts)
        self.name = name

    @property
    def point_mass(self) -> bool:
        return all(drafter.point_mass for drafter, _ in self.parts)

    def open(self, prompt: Sequence[int]) -> ChainStream:
        return ChainStream([(drafter.open(prompt), length) for drafter, length in self.parts])


class ChainStream:
    def __init__(self, parts: Sequence[tuple[DraftStream, int | None]]) -> None:
        self.parts = parts

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        for stream, length in self.parts:
            draft = stream.draft(context, limit if length is None else min(limit, length), rule, position)
            if draft.tokens:
                return draft
        return Draft()
