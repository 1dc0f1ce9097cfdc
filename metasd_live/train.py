"""Training of drafters on text, the target's own as a rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from metasd_sim.errors import InputError

from .outputs import Output
from .target import Target


def text_sequences(path: str, target: Target) -> list[list[int]]:
    """The tokens of a text file, as one sequence."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a readable text file in UTF-8; found {error}") from None
    return [target.encode(text, chat_template=False)]


def output_sequences(
    outputs: Sequence[Output], categories: Sequence[str], max_context: int, seed: int = 0
) -> list[list[int]]:
    """Outputs of some categories (all if none is named), shuffled, each after the end of its prompt."""
    known = {output.category for output in outputs}
    unknown = sorted(set(categories) - known)
    if unknown:
        raise InputError(f"category: expected {', '.join(sorted(known))}; found {', '.join(unknown)}")
    chosen = [output for output in outputs if not categories or output.category in categories]
    order = np.random.default_rng(seed).permutation(len(chosen))
    return [chosen[i].prompt_ids[-max_context:] + chosen[i].token_ids for i in order]


def cut(sequences: Sequence[Sequence[int]], tokens: int | None) -> list[list[int]]:
    """The first `tokens` tokens of the sequences; all of them if None."""
    if tokens is None:
        return [list(sequence) for sequence in sequences]
    taken: list[list[int]] = []
    for sequence in sequences:
        if tokens <= 0:
            break
        taken.append(list(sequence[:tokens]))
        tokens -= len(taken[-1])
    return taken
