"""Verification: which drafted tokens stand, and what the round emits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    accepted: int  # N
    emitted: list[int]  # the accepted tokens and one of the target's own, or the accepted ones where the text ended
    ended: bool  # the text is complete


def clip(draft: Sequence[int], eos: Collection[int], limit: int) -> list[int]:
    """The draft up to its first end of sequence, included, and to the `limit` tokens that the text has left."""
    tokens = list(draft[:limit])
    return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in eos), tokens)


def verify_greedy(draft: Sequence[int], argmax: Sequence[int], eos: Collection[int], limit: int) -> Verdict:
    """Accepts while `draft[j] == argmax[j]`; `argmax` has one token more than the clipped draft.

    The block ends at an end of sequence and at the `limit`: a draft that reaches either emits no further token.
    """
    accepted = 0
    while accepted < len(draft) and draft[accepted] == argmax[accepted]:
        accepted += 1
    emitted = list(argmax[: accepted + 1])
    if accepted and (accepted == limit or draft[accepted - 1] in eos):
        emitted.pop()
    return Verdict(accepted, emitted, len(emitted) == limit or emitted[-1] in eos)
