"""Texts that the target wrote, for training: generated in batches, kept as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from metasd_sim.errors import InputError
from metasd_sim.files import read_json, read_text, split_lines

from .prompts import Prompt
from .target import Target
from .verify import LogitsError


@dataclass(frozen=True)
class Output:
    """What the target wrote after one prompt."""

    id: str
    category: str
    prompt_ids: list[int]
    token_ids: list[int]


@torch.inference_mode()
def generate_outputs(
    target: Target,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    batch_size: int = 8,
    chat_template: bool = True,
    on_output: Callable[[], None] = lambda: None,
) -> list[Output]:
    """Greedy texts of all prompts, in their order.

    Batches are padded on the left, so a text may leave the singly decoded one where two tokens nearly tie.
    """
    encoded = [target.encode(prompt.text, chat_template) for prompt in prompts]
    for ids in encoded:
        target.check_length(len(ids), max_new_tokens)
    texts: dict[int, list[int]] = {}
    by_length = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        for i, text in zip(batch, _generate([encoded[i] for i in batch], target, max_new_tokens), strict=True):
            texts[i] = text
            on_output()
    return [Output(p.id, p.category, encoded[i], texts[i]) for i, p in enumerate(prompts)]


def _generate(prompts: list[list[int]], target: Target, max_new_tokens: int) -> list[list[int]]:
    width = max(map(len, prompts))
    padding = min(target.eos, default=0)
    ids = torch.tensor([[padding] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    generated = target.model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(target.eos) or None,
        pad_token_id=padding,
        logits_processor=LogitsProcessorList([_Sound(target.name)]),
    )
    return [_cut(row, target.eos) for row in generated[:, width:].tolist()]


class _Sound(LogitsProcessor):  # type: ignore[misc]
    """Refuses logits that make no law: transformers would write on without a word."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not scores.max(dim=-1).values.isfinite().all():
            raise InputError(f"target {self.name}: {LogitsError()}")
        return scores


def _cut(ids: list[int], eos: frozenset[int]) -> list[int]:
    """Up to the first end of sequence, included."""
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in eos), ids)


def to_lines(outputs: Sequence[Output], tokenizer_hash: str) -> str:
    """JSON lines; the first one names the tokenizer."""
    return "".join(json.dumps(line) + "\n" for line in ({"tokenizer": tokenizer_hash}, *map(asdict, outputs)))


def read_outputs(path: str, tokenizer_hash: str) -> list[Output]:
    try:
        head, *lines = map(read_json, split_lines(read_text(path)))
        found = head["tokenizer"]
        outputs = [Output(**line) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: expected outputs written by --save-outputs, found {error}; generate again") from None
    if found != tokenizer_hash:
        raise InputError(
            f"{path}: expected outputs of tokenizer {tokenizer_hash[:12]}, found {found[:12]}; "
            f"use the target they came from"
        )
    return outputs
