"""Prompt files: JSON lines or plain lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metasd_sim.errors import InputError


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str
    category: str = "none"
    split: str | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_prompts(
    paths: Sequence[str],
    split: str | None = None,
    limit: int | None = None,
    categories: Sequence[str] = (),
    shuffle: int | None = None,
) -> list[Prompt]:
    """All prompts of the files in order, or shuffled by the seed `shuffle`; of one split and some categories.

    A line is JSON with `id` or `question_id`, `prompt` or `turns` (the first counts), and optionally
    `category` and `split`; or else it is the prompt itself.
    """
    if not paths:
        raise InputError("prompts: expected at least one file, found none; pass --prompts FILE")
    if limit is not None and limit < 1:
        raise InputError(f"limit: expected 1 prompt or more, found {limit}")
    prompts = [prompt for path in paths for prompt in _read_file(path)]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InputError(f"{', '.join(paths)}: expected different ids, found {prompt.id!r} twice; rename one")
        seen.add(prompt.id)
    for name, wanted, present in (
        ("split", [split] if split else [], {prompt.split or "none" for prompt in prompts}),
        ("category", categories, {prompt.category for prompt in prompts}),
    ):
        missing = ", ".join(sorted(set(wanted) - present))
        if missing:
            known = ", ".join(sorted(present))
            raise InputError(f"{', '.join(paths)}: expected {name} {missing}, found {known}; choose one of these")
    prompts = [p for p in prompts if split in (None, p.split) and (not categories or p.category in categories)]
    if shuffle is not None:
        prompts = [prompts[i] for i in np.random.default_rng(shuffle).permutation(len(prompts))]
    return prompts[:limit]


def _read_file(path: str) -> list[Prompt]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a readable file of prompts in UTF-8; found {error}") from None
    prompts = [_parse(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise InputError(f"{path}: expected at least one prompt, found an empty file")
    return prompts


def _parse(line: str, number: int, path: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(id=f"{Path(path).stem}-{number}", text=line)

    def refuse(expected: str, found: object) -> InputError:
        return InputError(f"{path}, line {number}: expected {expected}, found {found}; correct the line")

    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise refuse("one JSON object", f"broken JSON ({error})") from None
    name = record.get("id", record.get("question_id"))
    text = record.get("prompt", record.get("turns"))
    if isinstance(text, list) and text:
        text = text[0]
    if not isinstance(name, (str, int)) or isinstance(name, bool):
        raise refuse("an id or question_id", f"the keys {', '.join(record)}" if name is None else repr(name))
    if not isinstance(text, str) or not text:
        found = f"the keys {', '.join(record)}" if text is None else repr(text)
        raise refuse("a prompt, or turns with a first one", found)
    category, split = record.get("category", "none"), record.get("split")
    if not isinstance(category, str) or not isinstance(split, (str, type(None))):
        raise refuse("category and split to be text", f"{category!r} and {split!r}")
    return Prompt(str(name), text, category, split)
