"""The most frequent tokens of texts, for drafters with `,vocabulary=FILE`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from metasd_sim.errors import InputError

from ..target import Target
from .sources import held_out


@dataclass(frozen=True)
class Vocabulary:
    """Token ids, the most frequent first, and the share of tokens of held-out texts that are among such ones."""

    known: list[int]
    coverage: float  # of a tenth of the texts, by as many tokens counted on the others
    tokens: int  # counted


def count_vocabulary(sequences: Sequence[Sequence[int]], target: Target, size: int, seed: int = 0) -> Vocabulary:
    """The `size` most frequent tokens, the target's ends of sequence among them; fewer if the texts have fewer.

    Of a single text the last tenth is held out.
    """
    if not 1 <= size <= target.vocab_size:
        raise InputError(f"vocabulary: expected a size of 1 to the target's {target.vocab_size}, found {size}")
    if len(sequences) == 1:
        at = max(1, 9 * len(sequences[0]) // 10)
        parts = [[sequences[0][:at]], [sequences[0][at:]]]
    else:
        parts = [[sequences[i] for i in numbers] for numbers in held_out(len(sequences), seed)]
    unseen = [token for sequence in parts[1] for token in sequence]
    if not unseen:
        raise InputError(f"vocabulary: expected texts of more than one token, found {len(sequences)}")
    known = set(_most_frequent(parts[0], target, size))
    return Vocabulary(
        known=_most_frequent(sequences, target, size),
        coverage=sum(token in known for token in unseen) / len(unseen),
        tokens=sum(map(len, sequences)),
    )


def _most_frequent(sequences: Sequence[Sequence[int]], target: Target, size: int) -> list[int]:
    """Ties go to the smaller id."""
    counts = Counter(token for sequence in sequences for token in sequence)
    ends = sorted(target.eos)[:size]
    ranked = sorted((token for token in counts if token not in ends), key=lambda token: (-counts[token], token))
    return sorted([*ends, *ranked[: size - len(ends)]], key=lambda token: (-counts[token], token))


def frequent_tokens(sequences: Sequence[Sequence[int]], target: Target, size: int) -> list[int] | None:
    """The most frequent tokens in the order of their ids, for a loss that leaves the others out; None: all tokens."""
    if not 0 < size < target.vocab_size:
        return None
    return sorted(_most_frequent(sequences, target, size))
