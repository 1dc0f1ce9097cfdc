"""Drafters by name.

SPEC = lookup | suffix | suffix:all | ngram:FILE | model:DIR | layers:K | eagle:DIR | medusa:DIR | none |
       chain(SPEC,SPEC,...), each with an optional draft length: lookup@5; those with a model also with a reduced
       vocabulary: layers:26,vocabulary=FILE@4
ARM  = SPEC | NAME=SPEC

A number after the last `@` is the draft length, unless a file or folder has that very name. What else may be misread
goes in quotes: model:"ckpt/step@32"@5, chain(ngram:"a,b.safetensors",lookup). model:ORG/NAME@REVISION is a hub's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metasd_sim.errors import InputError
from metasd_sim.quoting import QUOTED, split_parts, unquote

from ..settings import DRAFT_LENGTH
from .base import Draft, Drafter, DraftStream
from .causal import load_causal, skip_layers
from .chain import Chain
from .eagle import load_eagle
from .head import read_vocabulary
from .lookup import PromptLookup
from .medusa import load_medusa
from .ngram import Ngram, read_ngram
from .none import NoDraft
from .suffix import SuffixLookup

if TYPE_CHECKING:
    from ..target import Target

__all__ = [
    "Arm",
    "ArmSpec",
    "Draft",
    "DraftStream",
    "Drafter",
    "DrafterSpec",
    "build_arms",
    "longest_draft",
    "parse_arm",
]

_NAME = re.compile(r"([\w.+-]+)=(.+)", re.DOTALL)
_FILE = rf'(?:{QUOTED}|[^"].*?)'
_AT_LENGTH = r"(?:@(?P<length>\d+))?"
_SPEC = re.compile(
    rf"(?P<kind>[a-z]+)(?::(?P<argument>{_FILE}))?(?:,vocabulary=(?P<vocabulary>{_FILE}))?{_AT_LENGTH}", re.DOTALL
)
_CHAIN = re.compile(rf"chain\((?P<parts>.+)\){_AT_LENGTH}", re.DOTALL)


@dataclass(frozen=True)
class DrafterSpec:
    """One parsed drafter: `kind:argument`, or `chain(parts)`, with its draft length if it names one."""

    text: str  # without the draft length
    kind: str
    argument: str = ""
    parts: tuple[DrafterSpec, ...] = ()
    length: int | None = None
    vocabulary: str = ""  # file

    def build(self, target: Target) -> Drafter:
        return DRAFTERS[self.kind](self, target)

    def frequent(self, target: Target) -> list[int] | None:
        return read_vocabulary(self.vocabulary, target.tokenizer_hash) if self.vocabulary else None

    def files(self) -> list[str]:
        """Files that this drafter reads."""
        own = [self.argument] if self.kind == "ngram" else []
        if self.kind in ("model", "eagle", "medusa"):
            folder = Path(self.argument)
            own = [str(path) for path in sorted(folder.glob("*.safetensors"))]
            if not own and self.kind != "model":  # older checkpoints
                own = [str(path) for name in ("*.bin", "*.pt") for path in sorted(folder.glob(name))]
        own += [self.vocabulary] if self.vocabulary else []
        return own + [file for part in self.parts for file in part.files()]


@dataclass(frozen=True)
class ArmSpec:
    name: str
    drafter: DrafterSpec


@dataclass(frozen=True)
class Arm:
    """A drafter with a draft length, under a name."""

    name: str
    drafter: Drafter
    length: int  # 0: no draft
    files: tuple[str, ...] = ()  # that the drafter was read from

    @property
    def max_length(self) -> int | None:
        """Tokens that the drafter's model has room for, if it has one."""
        return getattr(self.drafter, "max_length", None)

    @property
    def white_box(self) -> bool:
        """Whether the drafter reads the target's hidden states."""
        return getattr(self.drafter, "white_box", False)

    def __str__(self) -> str:
        return f"{self.drafter.name}@{self.length}" if self.length else self.drafter.name


def longest_draft(arms: Sequence[Arm]) -> int:
    """The `max_draft` of an environment with these arms: at least 1."""
    return max(1, *(arm.length for arm in arms))


def _plain(factory: Callable[[], Drafter]) -> Callable[[DrafterSpec, Target], Drafter]:
    return lambda spec, target: factory()


def _ngram(spec: DrafterSpec, target: Target) -> Drafter:
    model = read_ngram(spec.argument)
    if model.tokenizer != target.tokenizer_hash:
        raise InputError(
            f"{spec.argument}: expected an n-gram model of the target's tokenizer {target.tokenizer_hash[:12]}, found "
            f"{model.tokenizer[:12]}; train one with metasd-live train ngram --target {target.name}"
        )
    return Ngram(model, spec.text)


def _chain(spec: DrafterSpec, target: Target) -> Drafter:
    parts = [(part.build(target), part.length) for part in spec.parts]
    sampled = [drafter.name for drafter, _ in parts if not drafter.point_mass]
    if sampled:
        raise InputError(f"drafter: expected a chain of drafters without a model, found {', '.join(sampled)} in one")
    if any(getattr(drafter, "remembers", False) for drafter, _ in parts):
        raise InputError("drafter: expected a chain of drafters that start afresh, found suffix:all in one; use suffix")
    return Chain(parts, spec.text)


def _layers(spec: DrafterSpec, target: Target) -> Drafter:
    if not spec.argument.isdecimal():
        raise InputError(f"drafter: expected layers:K with a number of layers, found {spec.text!r}")
    return skip_layers(int(spec.argument), spec.text, target, spec.frequent(target))


def _suffix(spec: DrafterSpec, target: Target) -> Drafter:
    if spec.argument not in ("", "all"):
        raise InputError(f"drafter: expected suffix, or suffix:all for earlier texts too; found {spec.text!r}")
    return SuffixLookup(remember=spec.argument == "all")


DRAFTERS: dict[str, Callable[[DrafterSpec, Target], Drafter]] = {
    "lookup": _plain(PromptLookup),
    "ngram": _ngram,
    "model": lambda spec, target: load_causal(spec.argument, spec.text, target, spec.frequent(target)),
    "eagle": lambda spec, target: load_eagle(spec.argument, spec.text, target, spec.frequent(target)),  # type: ignore
    "medusa": lambda spec, target: load_medusa(spec.argument, spec.text, target, spec.frequent(target)),  # type: ignore
    "suffix": _suffix,
    "layers": _layers,
    "none": _plain(NoDraft),
    "chain": _chain,
}
# whether :ARGUMENT follows; None: it may
_ARGUMENT = {"lookup": False, "suffix": None, "ngram": True, "model": True, "layers": True, "none": False}
_ARGUMENT |= {"eagle": True, "medusa": True}
_NEURAL = ("model", "layers", "eagle", "medusa")
_OF_FILES = ("ngram", "model", "eagle", "medusa")
_KNOWN = "lookup, suffix, ngram:FILE, model:DIR, layers:K, eagle:DIR, medusa:DIR, none, chain(SPEC,SPEC,...)"


def parse_arm(text: str) -> ArmSpec:
    """`NAME=SPEC`, or `SPEC`, which is then the name."""
    named = _NAME.fullmatch(text)
    return ArmSpec(named[1], _parse(named[2])) if named else ArmSpec(text, _parse(text))


def _parse(text: str) -> DrafterSpec:
    chain = _CHAIN.fullmatch(text)
    found = chain or _SPEC.fullmatch(text)
    if found is None:
        raise _unknown(text)
    body, length = text, None
    if found["length"] is not None and (chain or not _names_a_place(found)):
        body, length = text[: found.start("length") - 1], int(found["length"])
        if not 1 <= length <= 64:
            raise InputError(
                f"drafter: expected a draft length of 1 to 64 after @, found {text!r}; use none for no draft, "
                f"and quotes around a name with @"
            )
    if chain:
        parts = tuple(_parse(part) for part in split_parts(chain["parts"], "drafter"))
        return DrafterSpec(body, "chain", parts=parts, length=length)
    # what follows @ belongs to the last name where it is no length
    end = len(body)
    vocabulary = body[found.start("vocabulary") : end] if found["vocabulary"] else ""
    argument = found["argument"] if vocabulary else body[found.start("argument") : end] if found["argument"] else ""
    kind, wanted = found["kind"], _ARGUMENT.get(found["kind"])
    if kind not in _ARGUMENT or (wanted is not None and bool(argument) != wanted):
        raise _unknown(text)
    if vocabulary and kind not in _NEURAL:
        raise InputError(f"drafter: expected a drafter with a model before ,vocabulary=FILE; found {text!r}")
    return DrafterSpec(body, kind, unquote(argument), length=length, vocabulary=unquote(vocabulary))


def _names_a_place(found: re.Match[str]) -> bool:
    """Whether a file or folder bears the last name with its `@` and number, which are then no draft length."""
    name = found["vocabulary"] or (found["argument"] if found["kind"] in _OF_FILES else "")
    return bool(name) and not name.endswith('"') and Path(f"{name}@{found['length']}").exists()


def _unknown(text: str) -> InputError:
    return InputError(
        f"drafter: expected {_KNOWN}, each with @LENGTH if you like, and names with , @ or parentheses in quotes "
        f"where they are misread; found {text!r}"
    )


def build_arms(specs: Sequence[ArmSpec], target: Target, draft_length: int = DRAFT_LENGTH, least: int = 1) -> list[Arm]:
    """Arms with distinct names; `draft_length` is for those that name none."""
    if len(specs) < least:
        raise InputError("drafter: expected at least one, found none; pass --drafter, for instance --drafter lookup")
    if not 1 <= draft_length <= 64:
        raise InputError(f"draft length: expected 1 to 64, found {draft_length}")
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise InputError(f"drafter: expected arms of different names, found {', '.join(names)}; use NAME=SPEC")
    for file in {file for spec in specs for file in spec.drafter.files()}:
        if not Path(file).is_file():
            raise InputError(f"drafter: expected the file {file}, found none; make one with metasd-live train ngram")
    return [_build_arm(spec.name, spec.drafter, target, draft_length) for spec in specs]


def _build_arm(name: str, spec: DrafterSpec, target: Target, draft_length: int) -> Arm:
    drafter = spec.build(target)
    length = 0 if spec.kind == "none" else spec.length or draft_length
    longest = getattr(drafter, "longest_draft", length)
    if spec.length and spec.length > longest:
        raise InputError(f"{spec.text}: expected a draft length of at most {longest}, its heads; found {spec.length}")
    return Arm(name, drafter, min(length, longest), tuple(spec.files()))
