"""Suffix-automaton lookup: what followed the longest repeated suffix of the context, however long it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Draft

if TYPE_CHECKING:
    from ..verify import TextRule

REFRESHED = (
    32  # states on the suffix path whose last occurrence is kept up to date: the longest, which drafts come from
)


class SuffixAutomaton:
    """All substrings of a growing text, with a place where each ended (Blumer et al. 1985); amortised O(1) a token.

    State 0 is the empty string. The longest suffix of the text that occurred before is the link of the `last` state.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [0]  # position after an occurrence: the last one, unless it was found further down the path
        self.last = 0

    def extend(self, token: int) -> None:
        state = self._state({}, self.length[self.last] + 1, 0, len(self.text) + 1)
        self.text.append(token)
        at = self.last
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = state
            at = self.link[at]
        if at >= 0:
            self.link[state] = self._suffix(at, token)
        self.last = state

    def _suffix(self, at: int, token: int) -> int:
        """The state of the longest string of `at`, and `token`; split off a longer one if need be."""
        child = self.next[at][token]
        if self.length[child] == self.length[at] + 1:
            return child
        short = self._state(dict(self.next[child]), self.length[at] + 1, self.link[child], self.end[child])
        self.link[child] = short
        while at >= 0 and self.next[at].get(token) == child:
            self.next[at][token] = short
            at = self.link[at]
        return short

    def _state(self, following: dict[int, int], length: int, link: int, end: int) -> int:
        self.next.append(following)
        self.length.append(length)
        self.link.append(link)
        self.end.append(end)
        return len(self.next) - 1

    def refresh(self) -> None:
        """The suffixes of the text end here too: to be called before the next token, after the look-up."""
        state = self.link[self.last] if self.last else 0
        for _ in range(REFRESHED):
            if state <= 0:
                break
            self.end[state] = len(self.text)
            state = self.link[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of another text that occurs here, one token on: its state and length."""
        while state and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        following = self.next[state].get(token)
        return (following, length + 1) if following is not None else (0, 0)


class SuffixLookup:
    """Proposes what followed the longest suffix of the context that occurred before, most recently if several times.

    With `remember` also in the earlier texts of this drafter, where one holds a longer suffix. Then its drafts depend
    on the order of the prompts, and it cannot be recorded.
    """

    point_mass = True

    def __init__(self, remember: bool = False) -> None:
        self.name = "suffix:all" if remember else "suffix"
        self.remembers = remember
        self.memory = SuffixAutomaton()
        self.open_streams: list[SuffixStream] = []

    def open(self, prompt: Sequence[int]) -> SuffixStream:
        stream = SuffixStream(self.memory if self.remembers else None)
        if self.remembers:
            for earlier in self.open_streams:
                if earlier.written:  # the next text has begun: what was written before is complete enough to learn
                    for token in (*earlier.automaton.text, -1):  # -1 is in no text
                        self.memory.extend(token)
                        self.memory.refresh()
            self.open_streams = [other for other in self.open_streams if not other.written]
            self.open_streams.append(stream)
        return stream


class SuffixStream:
    def __init__(self, memory: SuffixAutomaton | None) -> None:
        self.automaton = SuffixAutomaton()
        self.memory = memory
        self.match = (0, 0)  # state and length in the memory
        self.written = False

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        own = self.automaton
        known = len(own.text)
        if own.text != list(context[:known]):
            self.automaton = own = SuffixAutomaton()  # an earlier context, or another: start again
            self.match, known = (0, 0), 0
        for token in context[known:]:
            own.refresh()
            own.extend(token)
            if self.memory is not None:
                self.match = self.memory.step(*self.match, token)
        self.written = position > 0
        state = own.link[own.last] if own.last else 0
        length = own.length[state]
        if self.memory is not None and self.match[1] > length:
            end = self.memory.end[self.match[0]]
            found = self.memory.text[end : end + limit]
            return Draft(found[: found.index(-1)] if -1 in found else found)
        if state <= 0:
            return Draft()
        end = own.end[state]
        return Draft(own.text[end : end + limit])
