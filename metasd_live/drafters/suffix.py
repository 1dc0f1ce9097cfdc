"""Suffix-automaton lookup: what followed the longest repeated suffix of the context, however long it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Draft

if TYPE_CHECKING:
    from ..verify import TextRule

# states on the suffix path whose last occurrence is kept up to date: the longest, which drafts come from
REFRESHED = 32
REMEMBERED = 1 << 17  # tokens of earlier texts; each takes some 460 bytes


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


class Memory:
    """Earlier texts, the last `limit` tokens of them at most and half as many at least.

    An automaton cannot forget what it read first. So there are two: the older one is dropped, whole, when the newer one
    has read half of the limit. What is written across that seam is found in neither.
    """

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.older, self.newer = SuffixAutomaton(), SuffixAutomaton()

    def learn(self, text: Sequence[int]) -> None:
        for token in (*text, -1):  # -1 is in no text
            if len(self.newer.text) == self.half:
                self.older, self.newer = self.newer, SuffixAutomaton()
            self.newer.extend(token)
            self.newer.refresh()

    @property
    def automata(self) -> tuple[SuffixAutomaton, SuffixAutomaton]:
        return self.newer, self.older


class SuffixLookup:
    """Proposes what followed the longest suffix of the context that occurred before, most recently if several times.

    With `remember` also in the earlier texts of this drafter, where one holds a longer suffix: the last `limit` tokens
    of them, some 60 MB. Then its drafts depend on the order of the prompts, and it cannot be recorded.
    """

    point_mass = True

    def __init__(self, remember: bool = False, limit: int = REMEMBERED) -> None:
        self.name = "suffix:all" if remember else "suffix"
        self.remembers = remember
        self.memory = Memory(limit)
        self.written: list[SuffixStream] = []  # those with new tokens, not learnt yet

    def open(self, prompt: Sequence[int]) -> SuffixStream:
        for earlier in self.written:  # the next text has begun: what was written before is complete enough to learn
            self.memory.learn(earlier.automaton.text)
        self.written.clear()
        return SuffixStream(self if self.remembers else None)


class SuffixStream:
    def __init__(self, drafter: SuffixLookup | None) -> None:
        """With the drafter if it remembers."""
        self.automaton = SuffixAutomaton()
        self.drafter = drafter
        self.matches: list[tuple[SuffixAutomaton, int, int]] = []  # in the memory: where, state and length
        self.written = False

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        own = self.automaton
        known = len(own.text)
        if own.text != list(context[:known]):
            self.automaton = own = SuffixAutomaton()  # an earlier context, or another: start again
            self.matches, known = [], 0
        if self.drafter is not None:
            begun = {id(automaton): (state, length) for automaton, state, length in self.matches}
            self.matches = [(one, *begun.get(id(one), (0, 0))) for one in self.drafter.memory.automata]
        for token in context[known:]:
            own.refresh()
            own.extend(token)
            self.matches = [(one, *one.step(state, length, token)) for one, state, length in self.matches]
        if self.drafter is not None and position > 0 and not self.written:
            self.written = True
            self.drafter.written.append(self)
        state = own.link[own.last] if own.last else 0
        length = own.length[state]
        memory, at, longest = max(self.matches, key=lambda match: match[2], default=(own, 0, 0))
        if longest > length:  # the newer memory where both are as long
            end = memory.end[at]
            found = memory.text[end : end + limit]
            return Draft(found[: found.index(-1)] if -1 in found else found)
        if state <= 0:
            return Draft()
        end = own.end[state]
        return Draft(own.text[end : end + limit])
