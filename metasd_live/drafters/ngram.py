"""A back-off n-gram model: the most frequent continuation of the longest context that training saw."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from metasd_sim.errors import InputError
from metasd_sim.files import read_json, read_safetensors, write_atomically

from ..settings import NgramSettings
from .base import Draft

if TYPE_CHECKING:
    from ..verify import TextRule

SCHEMA = 1
_HEADER = "metasd-ngram"


@dataclass(frozen=True)
class NgramModel:
    """`tables[k]`: contexts of `k` tokens and the token that each proposes."""

    settings: NgramSettings
    tables: dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]]  # k -> [n, k], [n]
    tokenizer: str  # hash of the tokenizer whose ids these are
    provenance: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, NDArray[np.int32]]:
        return {
            f"{name}_{k}": value
            for k, table in self.tables.items()
            for name, value in zip(("context", "next"), table, strict=True)
        }


def train_ngram(sequences: Sequence[Sequence[int]], tokenizer: str, settings: NgramSettings) -> NgramModel:
    """Counts every context within a sequence; of equally frequent continuations the most recent one wins."""
    tables = {}
    for k in range(settings.max_context, settings.min_context - 1, -1):
        grams = [np.lib.stride_tricks.sliding_window_view(np.asarray(s), k + 1) for s in sequences if len(s) > k]
        rows = np.concatenate(grams) if grams else np.zeros((0, k + 1), dtype=np.int64)
        tables[k] = _most_frequent(rows, settings.min_share)
    return NgramModel(settings, tables, tokenizer)


def _most_frequent(rows: NDArray[Any], min_share: float) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """rows [n, k + 1] in order of appearance -> contexts [m, k] and their most frequent last tokens [m]."""
    grams, which, count = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    last = np.zeros(len(grams), dtype=np.int64)
    np.maximum.at(last, which.ravel(), np.arange(len(rows)))
    order = np.lexsort((last, count, *grams[:, :-1].T[::-1]))
    grams, count = grams[order], count[order]
    ends = np.append((grams[1:, :-1] != grams[:-1, :-1]).any(axis=1), np.ones(min(len(grams), 1), dtype=bool))
    total = np.diff(np.cumsum(count)[ends], prepend=0)
    keep = np.flatnonzero(ends)[count[ends] / (total + 1) >= min_share]
    return grams[keep, :-1].astype(np.int32), grams[keep, -1].astype(np.int32)


class Ngram:
    """Drafts token by token, each from the longest known context; stops at an unknown one."""

    point_mass = True

    def __init__(self, model: NgramModel, name: str = "ngram") -> None:
        self.name = name
        self.next: dict[int, dict[tuple[int, ...], int]] = {
            k: dict(zip(map(tuple, contexts.tolist()), tokens.tolist(), strict=True))
            for k, (contexts, tokens) in sorted(model.tables.items(), reverse=True)
        }
        self.longest = max(self.next)

    def open(self, prompt: Sequence[int]) -> Ngram:
        return self

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        text = list(context[-self.longest :])
        tokens: list[int] = []
        while len(tokens) < limit and (token := self._propose(text)) is not None:
            tokens.append(token)
            text.append(token)
        return Draft(tokens)

    def _propose(self, text: list[int]) -> int | None:
        for k, table in self.next.items():
            context = tuple(text[-k:])
            if context in table:
                return table[context]
        return None


def _checksum(header: dict[str, Any], tensors: dict[str, NDArray[np.int32]]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].shape}".encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def write_ngram(model: NgramModel, path: str | os.PathLike[str], force: bool = False) -> None:
    header: dict[str, Any] = {
        "schema": SCHEMA,
        "settings": asdict(model.settings),
        "tokenizer": model.tokenizer,
        "provenance": model.provenance,
    }
    tensors = model.tensors()
    header["checksum"] = _checksum(header, tensors)
    content = safetensors.numpy.save(tensors, metadata={_HEADER: json.dumps(header, sort_keys=True)})
    write_atomically(path, content, force)


def read_ngram(path: str | os.PathLike[str]) -> NgramModel:
    """Reads and validates a model; what is wrong is named in one line."""
    kind = "an n-gram model of metasd-live train ngram"
    metadata, tensors = read_safetensors(path, kind)
    try:
        header = read_json(metadata[_HEADER])
        checksum, schema = header.pop("checksum"), header["schema"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path}: expected {kind}, found a damaged or other file ({error})") from None
    if schema != SCHEMA:
        raise InputError(f"{path}: expected schema {SCHEMA}, found {schema}; use the version that wrote it")
    if _checksum(header, tensors) != checksum:
        raise InputError(f"{path}: expected the content its checksum names, found other bytes; train it again")
    try:
        settings = NgramSettings(**header["settings"])
        orders = range(settings.max_context, settings.min_context - 1, -1)
        tables = {k: (tensors[f"context_{k}"], tensors[f"next_{k}"]) for k in orders}
        return NgramModel(settings, tables, header["tokenizer"], header["provenance"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: expected {kind}, found one without or with a wrong {error}") from None
