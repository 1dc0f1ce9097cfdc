"""Where a text ends besides its limit: end-of-sequence ids and stop strings."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metasd_sim.errors import InputError
from metasd_sim.files import lone_surrogate

from .verify import Verdict

if TYPE_CHECKING:
    from .target import Target


def end_ids(value: Any, vocab_size: int) -> frozenset[int]:
    """Token ids from a number or several, of Python, numpy or torch.

    Ids that no token has, -1 or one past the vocabulary, are how checkpoints write "none".
    """
    listed = value.tolist() if hasattr(value, "tolist") else value
    several = isinstance(listed, Collection) and not isinstance(listed, str)
    try:
        ids = [_whole(token) for token in (listed if several else [listed])]
    except TypeError:
        raise InputError(f"eos: expected token ids, whole numbers, found {value!r}") from None
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def _whole(token: Any) -> int:
    if isinstance(token, bool):
        raise TypeError
    return operator.index(token)


@dataclass(frozen=True)
class Ending:
    """A text ends with a token of `eos`, or with the token that completes one of `strings` among the new tokens."""

    eos: frozenset[int]
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] = lambda ids: ""

    @classmethod
    def of(cls, target: Target, eos: Any, strings: Sequence[str]) -> Ending:
        """`eos`: whatever `end_ids` reads; None: the target's own ids; empty: none."""
        ids = target.eos if eos is None else end_ids(eos, target.vocab_size)
        if isinstance(strings, str) or not all(isinstance(text, str) and text for text in strings):
            raise InputError(f"stop strings: expected a list of texts that are not empty, found {strings!r}")
        for text in strings:
            if (half := lone_surrogate(text)) is not None:
                raise InputError(f"stop strings: expected whole characters, found half of one ({half}); correct it")
        if not strings:
            return cls(ids)
        tokenizer = target.tokenizer

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

        return cls(ids, tuple(strings), decode)

    def completed(self, text: Sequence[int]) -> bool:
        """Whether the new tokens `text` contain a stop string; called at every token, so it ends with the last one."""
        # a character takes four tokens of one byte at most; some more, so that a cut character at the left does no harm
        window = 4 * max(map(len, self.strings), default=0) + 16
        tail = self.decode(text[-window:])
        return any(string in tail for string in self.strings)

    def cut(self, text: Sequence[int], verdict: Verdict) -> Verdict:
        """The verdict on the block after the new tokens `text`, up to the token that completes a stop string."""
        so_far = list(text)
        for n, token in enumerate(verdict.emitted, start=1):
            so_far.append(token)
            if self.completed(so_far):
                return Verdict(min(verdict.accepted, n), verdict.emitted[:n], True)
        return verdict
