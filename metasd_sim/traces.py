"""Traces: recordings of a target's text with every drafter's acceptance on it, enough to replay any policy.

The file format is specified in traces/FORMAT.md.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from .costs import CostModel
from .errors import InputError
from .files import read_json, read_safetensors, write_atomically
from .rounds import FloatArray, IntArray

SCHEMA = 1
VERIFICATIONS = ("greedy", "rejection", "gumbel")
_HEADER = "metasd"
_KINDS = {"i": "integers", "u": "integers", "f": "floats"}
# name -> axes, kinds; T tokens, A arms, D depths, Q queries, F features
_TENSORS: dict[str, tuple[str, str]] = {
    "tokens": ("T", "i"),
    "offsets": ("Q+1", "i"),
    "accept": ("TAD", "uf"),
    "drafted": ("TA", "ui"),
    "overlap": ("TAD", "f"),
    "log_p": ("T", "f"),
    "block_tail": ("TAD", "f"),
    "features": ("QF", "f"),
    "entropy": ("TAD", "f"),
    "top_probability": ("TAD", "f"),
    "margin": ("TAD", "f"),
    "log_q": ("TAD", "f"),
}
_REQUIRED = ("tokens", "offsets", "accept", "drafted")
_PROBABILITIES = ("accept", "overlap", "block_tail", "top_probability")
_NOT_NEGATIVE = ("entropy", "margin")
_NO_NAN = ("accept", "log_p")


@dataclass(frozen=True)
class Query:
    """One recorded prompt; its text stays with its owner, the hash tells whether it is the same."""

    id: str
    category: str
    sha256: str  # of the prompt's UTF-8 text
    prompt_tokens: int


@dataclass(frozen=True)
class Trace:
    """One recording. T emitted tokens of all queries in a row, A arms, D = max_draft depths, Q queries.

    `accept[t, a, d]` is the probability that arm `a`, drafting from position `t`, has its draft token at
    depth `d` accepted, given the emitted text and an accepted prefix (0 or 1 for greedy); 0 past its draft.
    """

    arms: tuple[str, ...]  # names
    drafters: tuple[str, ...]  # what each arm is, as on the command line
    queries: tuple[Query, ...]
    verification: str  # "greedy", "rejection" or "gumbel"
    max_new_tokens: int  # the limit every query was decoded under
    tokens: NDArray[np.integer[Any]]  # [T]
    offsets: NDArray[np.integer[Any]]  # [Q + 1] query q owns tokens offsets[q]:offsets[q + 1]
    accept: NDArray[Any]  # [T, A, D]
    drafted: NDArray[np.integer[Any]]  # [T, A] tokens drafted, given an accepted prefix
    overlap: NDArray[Any] | None = None  # [T, A, D] NaN where unknown
    log_p: NDArray[Any] | None = None  # [T] of the emitted tokens
    block_tail: NDArray[Any] | None = None  # [T, A, D] mean overlap past a first rejection at this depth, or NaN
    features: NDArray[Any] | None = None  # [Q, F] of the prompts
    feature_names: tuple[str, ...] = ()  # [F]
    entropy: NDArray[Any] | None = None  # [T, A, D] of the drafter's law at this depth, in nats; NaN where it has none
    top_probability: NDArray[Any] | None = None  # [T, A, D] its largest probability
    margin: NDArray[Any] | None = None  # [T, A, D] logarithm of its largest probability over its second
    log_q: NDArray[Any] | None = None  # [T, A, D] of the emitted token there, -inf where it cannot be drafted
    costs: CostModel | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def max_draft(self) -> int:
        return self.accept.shape[2]

    def tensors(self) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name) for name in _TENSORS if getattr(self, name) is not None}

    def select(self, queries: Sequence[int]) -> Trace:
        """The trace of some of the queries, in the order given."""
        picks = [np.arange(self.offsets[q], self.offsets[q + 1]) for q in queries]
        positions = np.concatenate(picks) if picks else np.zeros(0, dtype=np.int64)
        columns = {name: value[positions] for name, value in self.tensors().items() if _TENSORS[name][0][0] == "T"}
        if self.features is not None:
            columns["features"] = self.features[np.asarray(queries, dtype=np.int64)]
        offsets = np.cumsum([0, *(len(pick) for pick in picks)])
        return replace(self, queries=tuple(self.queries[q] for q in queries), offsets=offsets, **columns)

    def check(self, name: str = "trace") -> None:
        """Raises InputError in one line if shapes, ranges or kinds are wrong."""

        def refuse(what: str, expected: str, found: object) -> None:
            raise InputError(f"{name}: expected {what} {expected}, found {found}; record it again")

        sizes = {
            "T": len(self.tokens),
            "A": len(self.arms),
            "D": self.accept.shape[2] if self.accept.ndim == 3 else 0,
            "Q": len(self.queries),
            "F": len(self.feature_names),
        }
        for key, value in self.tensors().items():
            axes, kinds = _TENSORS[key]
            shape = (sizes["Q"] + 1,) if axes == "Q+1" else tuple(sizes[axis] for axis in axes)
            if value.shape != shape:
                refuse(key, f"of shape {list(shape)}", list(value.shape))
            if value.dtype.kind not in kinds:
                refuse(key, f"of {' or '.join(sorted({_KINDS[k] for k in kinds}))}", value.dtype)
            if key in _NO_NAN and value.dtype.kind == "f" and np.isnan(value).any():
                refuse(key, "without NaN", "NaN")
            if key in _PROBABILITIES and np.any((value < 0) | (value > 1)):  # NaN is neither
                refuse(key, "in [0, 1]", f"{np.nanmin(value)}..{np.nanmax(value)}")
            if key in _NOT_NEGATIVE and np.any(value < 0):
                refuse(key, "of 0 or more", np.nanmin(value))
            if key == "log_q" and np.any(value > 0):
                refuse(key, "of 0 or less", np.nanmax(value))
        if self.features is not None and not np.isfinite(self.features).all():
            refuse("features", "of finite numbers", "NaN or infinity")
        if len(set(self.feature_names)) != len(self.feature_names) or (self.features is None and self.feature_names):
            refuse("feature_names", "to be different, one for each feature", f"{self.feature_names}")
        if self.verification not in VERIFICATIONS:
            refuse("verification", f"to be one of {', '.join(VERIFICATIONS)}", repr(self.verification))
        if len(self.drafters) != len(self.arms) or len(set(self.arms)) != len(self.arms) or not self.arms:
            refuse("arms", "to be different names, one for each drafter", f"{self.arms}")
        if not sizes["D"] >= 1:
            refuse("accept", "with at least one depth", sizes["D"])
        offsets = self.offsets
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != sizes["T"] or np.any(np.diff(offsets) < 1):
            refuse("offsets", f"to rise from 0 to {sizes['T']}, every query with a token", offsets.tolist()[:8])
        if np.any(np.diff(offsets) > self.max_new_tokens):
            refuse("queries", f"of at most max_new_tokens = {self.max_new_tokens} tokens", int(np.diff(offsets).max()))
        if np.any(self.drafted < 0) or np.any(self.drafted > sizes["D"]):
            refuse("drafted", f"in 0..{sizes['D']}", f"{self.drafted.min()}..{self.drafted.max()}")
        beyond = np.arange(sizes["D"]) >= np.minimum(self.drafted, self.remaining()[:, None])[:, :, None]
        if np.any(self.accept[beyond] != 0):
            refuse("accept", "of 0 past the draft and past the text's end", "a positive value there")
        if self.verification != "rejection" and not np.isin(self.accept, (0, 1)).all():
            refuse("accept", f"of 0 or 1 under {self.verification} verification", "other values")
        if self.costs is not None and self.costs.draft.shape != (sizes["A"], sizes["D"] + 1):
            refuse("costs.draft", f"of shape {[sizes['A'], sizes['D'] + 1]}", list(self.costs.draft.shape))

    def remaining(self) -> IntArray:
        """[T] tokens of the query from this position on, itself included."""
        lengths = np.diff(self.offsets)
        return np.repeat(self.offsets[1:], lengths) - np.arange(len(self.tokens))

    def expected_accepted(self) -> FloatArray:
        """E N of a round of each arm started at each position, given the text; [T, A]."""
        return np.cumprod(self.accept.astype(float), axis=2).sum(axis=2)


def _digest(header: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {value.dtype.str} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def write(trace: Trace, path: str | os.PathLike[str], force: bool = False) -> None:
    """One .safetensors file, written atomically, with a checksum over its content."""
    trace.check(str(path))
    tensors = {name: np.ascontiguousarray(value) for name, value in trace.tensors().items()}
    header = {
        "schema": SCHEMA,
        "arms": list(trace.arms),
        "drafters": list(trace.drafters),
        "queries": [asdict(query) for query in trace.queries],
        "verification": trace.verification,
        "max_new_tokens": trace.max_new_tokens,
        "costs": None if trace.costs is None else trace.costs.to_json(),
        "provenance": trace.provenance,
    }
    if trace.features is not None:
        header["feature_names"] = list(trace.feature_names)
    header["checksum"] = _digest(header, tensors)
    content = safetensors.numpy.save(tensors, metadata={_HEADER: json.dumps(header, sort_keys=True)})
    write_atomically(path, content, force)


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads and validates a trace; what is wrong is named in one line."""
    metadata, tensors = read_safetensors(path, "a .safetensors trace of metasd-live record")
    try:
        header = read_json(metadata[_HEADER])
        schema, checksum = header["schema"], header.pop("checksum")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"{path}: expected a MetaSD trace, found a .safetensors file without its header") from None
    if schema != SCHEMA:
        raise InputError(f"{path}: expected schema {SCHEMA}, found {schema}; use the version that wrote it")
    unknown = sorted(set(tensors) - set(_TENSORS))
    if unknown or not set(_REQUIRED) <= set(tensors):
        raise InputError(f"{path}: expected tensors {', '.join(_REQUIRED)}, found {', '.join(sorted(tensors))}")
    if _digest(header, tensors) != checksum:
        raise InputError(
            f"{path}: expected the content its checksum names, found other bytes; fetch or record it again"
        )
    try:
        trace = Trace(
            arms=tuple(header["arms"]),
            drafters=tuple(header["drafters"]),
            queries=tuple(Query(**query) for query in header["queries"]),
            verification=header["verification"],
            max_new_tokens=header["max_new_tokens"],
            costs=None if header["costs"] is None else CostModel.from_json(header["costs"]),
            provenance=header["provenance"],
            feature_names=tuple(header.get("feature_names", ())),
            **tensors,
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: expected a complete header, found one without or with a wrong {error}") from None
    trace.check(str(path))
    return trace


def merge(parts: Sequence[Trace]) -> Trace:
    """One trace of all queries; refuses parts whose settings differ or that repeat a query."""
    if not parts:
        raise InputError("parts: expected at least one trace to merge, found none")
    first = parts[0]
    for part in parts[1:]:
        for key in ("arms", "drafters", "verification", "max_new_tokens", "provenance", "feature_names"):
            if getattr(part, key) != getattr(first, key):
                raise InputError(
                    f"merge: expected one {key} in all parts, found {getattr(first, key)} and {getattr(part, key)}"
                )
        if part.tensors().keys() != first.tensors().keys():
            raise InputError("merge: expected the same tensors in all parts, found others")
    queries = tuple(query for part in parts for query in part.queries)
    if len({query.id for query in queries}) != len(queries):
        raise InputError("merge: expected different query ids, found one twice")
    columns: dict[str, Any] = {
        name: np.concatenate([part.tensors()[name] for part in parts]) for name in first.tensors() if name != "offsets"
    }
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return replace(first, queries=queries, offsets=np.concatenate([[0], np.cumsum(lengths)]), **columns)
