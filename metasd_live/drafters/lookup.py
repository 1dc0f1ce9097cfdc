"""Prompt lookup: what followed the last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Draft

if TYPE_CHECKING:
    from ..verify import TextRule

LONGEST = 3


class PromptLookup:
    """Finds the longest suffix of the context, of 3 down to 1 tokens, that occurred earlier, most recently if
    several times, and proposes the tokens that followed it there."""

    name = "lookup"
    point_mass = True

    def open(self, prompt: Sequence[int]) -> LookupStream:
        return LookupStream()


class LookupStream:
    """Keeps where each n-gram last ended, so that a round costs time for its new tokens only."""

    def __init__(self) -> None:
        self.indexed = 1  # n-grams that end before this position are in the index
        self.ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        if len(context) < self.indexed:
            self.indexed, self.ends = 1, {}  # an earlier context: start again
        for end in range(self.indexed, len(context)):  # the suffix itself stays out: nothing follows it yet
            for length in range(1, min(LONGEST, end) + 1):
                self.ends[tuple(context[end - length : end])] = end
        self.indexed = len(context)
        for length in range(min(LONGEST, len(context)), 0, -1):
            suffix = tuple(context[-length:])
            if suffix in self.ends:
                end = self.ends[suffix]
                return Draft(list(context[end : end + limit]))
        return Draft()
