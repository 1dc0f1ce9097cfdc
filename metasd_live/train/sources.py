"""Training texts: a file, or what the target wrote after prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from metasd_sim.errors import InputError
from metasd_sim.files import read_text

from ..outputs import Output
from ..target import Target


@dataclass(frozen=True)
class TrainingText:
    """Token ids, of which those from `start` on are to be learnt: the target wrote them after the others."""

    ids: list[int]
    start: int = 0


def text_sequences(path: str, target: Target) -> list[list[int]]:
    """The tokens of a text file, as one sequence."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a readable text file in UTF-8; found {error}") from None
    return [target.encode(text, chat_template=False)]


def output_texts(
    outputs: Sequence[Output], categories: Sequence[str], prompt_tokens: int | None = None, seed: int = 0
) -> list[TrainingText]:
    """Outputs of some categories (all if none is named), shuffled, each after the last tokens of its prompt: all
    of them if `prompt_tokens` is None."""
    known = {output.category for output in outputs}
    unknown = sorted(set(categories) - known)
    if unknown:
        raise InputError(f"category: expected {', '.join(sorted(known))}; found {', '.join(unknown)}")
    chosen = [output for output in outputs if not categories or output.category in categories]
    texts = []
    for i in np.random.default_rng(seed).permutation(len(chosen)):
        prompt = chosen[i].prompt_ids
        first = 0 if prompt_tokens is None else max(0, len(prompt) - prompt_tokens)
        texts.append(TrainingText(prompt[first:] + chosen[i].token_ids, len(prompt) - first))
    return texts


def output_sequences(
    outputs: Sequence[Output], categories: Sequence[str], prompt_tokens: int | None, seed: int = 0
) -> list[list[int]]:
    """The same as plain sequences of tokens."""
    return [text.ids for text in output_texts(outputs, categories, prompt_tokens, seed)]


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


def cut_texts(texts: Sequence[TrainingText], tokens: int | None) -> list[TrainingText]:
    """The same for texts of which some tokens are not to be learnt."""
    pieces = cut([text.ids for text in texts], tokens)
    return [TrainingText(ids, text.start) for ids, text in zip(pieces, texts, strict=False)]


def held_out(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the texts to train on, and of the tenth that is held out."""
    shuffled: list[int] = np.random.default_rng(seed).permutation(count).tolist()
    held = max(1, count // 10)
    return shuffled[held:], shuffled[:held]
