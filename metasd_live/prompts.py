"""Prompt files: JSON lines or plain lines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import log1p, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from metasd_sim.errors import InputError
from metasd_sim.files import lone_surrogate, read_json, read_text, split_lines

CODE = frozenset("(){}[]<>=+*/\\_;|&^%$#@~`")
QUESTIONS = frozenset("?\u00bf\uff1f\u061f\u037e")  # also Spanish, full-width, Arabic and Greek ones
QUOTES = frozenset("\"'\u2018\u2019\u201c\u201d\u00ab\u00bb\u300c\u300d")


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str
    category: str = "none"
    split: str | None = None

    def __post_init__(self) -> None:
        for name in ("id", "text", "category", "split"):
            half = lone_surrogate(getattr(self, name) or "")
            if half is not None:
                raise InputError(
                    f"prompt {self.id!a}: expected {name} of whole characters, found half of one ({half}); correct it"
                )

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def prompt_features(text: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Names and values, in [0, 1], of cheap statistics of a prompt in any language; nothing of them tells the text.

    Shares are of its characters, under a square root, so that rare ones count; words are what spaces part.
    """
    words = text.split()
    shares = {
        "digits": sum(c.isdecimal() for c in text),
        "code": sum(c in CODE for c in text),
        "uppercase": sum(c.isupper() for c in text),
        "newlines": text.count("\n"),
        "non_ascii_letters": sum(c.isalpha() and not c.isascii() for c in text),
        "questions": sum(c in QUESTIONS for c in text),
        "quotes": sum(c in QUOTES for c in text),
    }
    features = {"length": min(1.0, log1p(len(text)) / 12)}  # 1 from e^12 = 163,000 characters on
    features |= {name: sqrt(count / max(len(text), 1)) for name, count in shares.items()}
    features["word_length"] = min(1.0, sum(map(len, words)) / max(len(words), 1) / 20)
    features["repeated_words"] = 1 - len(set(words)) / len(words) if words else 0.0
    return tuple(features), tuple(features.values())


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
        lines = split_lines(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a readable file of prompts in UTF-8; found {error}") from None
    prompts = [_parse(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise InputError(f"{path}: expected at least one prompt, found an empty file")
    return prompts


def _shown(name: str) -> str:
    """A file's name may hold bytes of any kind, an id may not."""
    return name.encode(errors="backslashreplace").decode()


def _parse(line: str, number: int, path: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(id=f"{_shown(Path(path).stem)}-{number}", text=line)

    def refuse(expected: str, found: object) -> InputError:
        return InputError(f"{path}, line {number}: expected {expected}, found {found}; correct the line")

    try:
        record: dict[str, Any] = read_json(line)
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
    try:
        return Prompt(str(name), text, category, split)
    except InputError as error:
        raise InputError(f"{path}, line {number}: {error}") from None
