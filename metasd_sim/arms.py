"""Arms beyond drafters: a shorter draft, a stop rule, no draft, a static ensemble; by name, from what was recorded.

    NAME          as recorded
    NAME@5        the first 5 tokens of its draft
    NAME?RULE     its draft, stopped by a rule such as adaedl=0.4; NAME@5?RULE too
    none          no draft
    ensemble(A,B) the mixture of the drafters' laws, with equal weights; ensemble(A,B)@5 too

A recorded name may hold any of these signs: of all readings the one with the longest recorded name counts. In an
ensemble a name with a comma or one parenthesis goes in quotes: ensemble("a,b",c).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .costs import CostModel
from .errors import InputError
from .quoting import split_parts, unquote
from .rounds import BoolArray, FloatArray, IntArray
from .stop_rules import StopRule, parse_stop_rule
from .traces import Trace

_SUFFIX = re.compile(r"(?:@(\d+))?(?:\?(.+))?")
_LENGTH = re.compile(r"@(\d+)$")
_LAW = ("entropy", "top_probability", "margin")
_BEYOND = {"accept": 0, "overlap": np.nan, "block_tail": np.nan, "log_q": np.nan, **dict.fromkeys(_LAW, np.nan)}


@dataclass(frozen=True)
class DerivedArm:
    """One arm: no drafter (no draft), one, or an ensemble; a draft length and a stop rule if it names them."""

    text: str
    drafters: tuple[str, ...]
    length: int | None = None
    rule: StopRule | None = None
    ensemble: bool = False


def parse_spec(text: str, names: Sequence[str]) -> DerivedArm:
    """The arm that `text` describes, given the `names` of drafters."""
    if text in names:
        return DerivedArm(text, (text,))
    if text == "none":
        return DerivedArm(text, ())
    readings = [(False, [name], text[len(name) :]) for name in names if text.startswith(name)]
    if text.startswith("ensemble("):
        ends = [i for i, letter in enumerate(text) if letter == ")"]
        readings += [
            (True, members, text[end + 1 :]) for end in ends if (members := _members(text[len("ensemble(") : end]))
        ]
    for ensemble, drafters, rest in sorted(readings, key=lambda reading: len(reading[2])):
        suffix = _SUFFIX.fullmatch(rest)
        if suffix is None or not set(drafters) <= set(names):
            continue
        if len(set(drafters)) != len(drafters):
            raise InputError(f"arm: expected different drafters in an ensemble, found {text!r}")
        length = None if suffix[1] is None else int(suffix[1])
        if length == 0:
            raise InputError(
                f"arm: expected a draft length of 1 or more after @, found {text!r}; use none for no draft"
            )
        rule = None if suffix[2] is None else parse_stop_rule(suffix[2])
        return DerivedArm(text, tuple(drafters), length, rule, ensemble)
    raise InputError(
        f"arm: expected none, ensemble(NAME,NAME,...) or NAME, with @LENGTH or ?RULE=THRESHOLD if you like, where NAME "
        f"is one of {', '.join(names)}; found {text!r}"
    )


def _members(text: str) -> list[str]:
    """Names between commas; none where the text ends within a pair of parentheses or quotes."""
    try:
        return [unquote(part) for part in split_parts(text)]
    except InputError:
        return []


def parse_specs(texts: Sequence[str], names: Sequence[str]) -> list[DerivedArm]:
    """Different arms, at least one."""
    if not texts or len(set(texts)) != len(texts):
        raise InputError(f"arm: expected different arms, at least one, found {', '.join(texts) or 'none'}")
    return [parse_spec(text, names) for text in texts]


def derive_costs(costs: CostModel, specs: Sequence[DerivedArm], names: Sequence[str], max_draft: int) -> CostModel:
    """`draft_a(d) = sum over a's drafters of draft_i(d)`, catch-up alike; arms of one drafter share what it read."""
    members = np.array([[name in spec.drafters for name in names] for spec in specs])  # [arms, drafters]
    if costs.readers is None:
        readers = np.where(members, costs.catch_up, np.nan)
    else:
        reads = members[:, :, None] & ~np.isnan(costs.readers)
        readers = np.where(reads.any(axis=1), np.where(reads, np.nan_to_num(costs.readers), 0.0).max(axis=1), np.nan)
    fit = {spec.text: costs.fit[spec.text] for spec in specs if spec.text in costs.fit} if costs.fit else None
    return replace(
        costs,
        draft=members @ costs.draft[:, : max_draft + 1],
        verify=costs.verify[: max_draft + 1],
        catch_up=np.nansum(readers, axis=1),
        fit=fit,
        readers=readers,
    )


def derive(trace: Trace, arms: Sequence[str]) -> Trace:
    """A trace of the same texts whose arms are made of recorded ones, each named by its text (see the module).

    - `NAME@k`: what a recording with draft length `k` holds, for drafters whose law does not depend on their length
      (provenance `length_dependent` names the others, which are refused).
    - `NAME?RULE`: the draft stops at the first depth whose law the rule rejects. Exact for policies that read neither
      `drafted` nor seconds: these are what the rule lets through along the text, since how long a draft goes on past a
      rejection needs recorded blocks. Rules read the law rounded as it was recorded; past an unforeseen end of the
      text, where it is unknown, drafts go on. Where the rule stops at once the arm scores an overlap of 0.
    - `ensemble(A,B)`: at every position a token of `mean_i q_i`, accepted given the text `x` with probability
      `min(1, mean_i q_i(x) / p(x))`; the draft ends where any member has nothing to propose. Each member drafts anew
      from the text so far, so its law must not depend on where a round starts. Rejection verification only: the other
      rules choose the mixture's token from all of its law, of which a trace has one probability. Its overlaps are
      unknown, so no arm of that trace has any.
    """
    specs = parse_specs(arms, trace.arms)
    lengths = [_length(trace, spec) for spec in specs]
    max_draft = max(1, *lengths)
    columns = [_columns(trace, spec, length) for spec, length in zip(specs, lengths, strict=True)]
    kept = set.intersection(*(set(column) for column in columns))
    tensors: dict[str, Any] = {name: np.stack([column[name] for column in columns], axis=1) for name in kept}
    tensors = {name: value if name == "drafted" else value[:, :, :max_draft] for name, value in tensors.items()}
    missing: dict[str, Any] = {name: None for name in ("overlap", "block_tail", "log_q", *_LAW) if name not in kept}
    derived = replace(
        trace,
        arms=tuple(spec.text for spec in specs),
        drafters=tuple(_drafter(trace, spec) for spec in specs),
        costs=None if trace.costs is None else derive_costs(trace.costs, specs, trace.arms, max_draft),
        provenance=trace.provenance | {"derived_from": dict(zip(trace.arms, trace.drafters, strict=True))},
        **tensors,
        **missing,
    )
    derived.check("derived trace")
    return derived


def _recorded_length(trace: Trace, name: str) -> int:
    """The longest draft that the arm was recorded with."""
    arm = trace.arms.index(name)
    named = _LENGTH.search(trace.drafters[arm])
    if named is None:
        return 0 if trace.drafters[arm] == "none" else trace.max_draft
    return max(min(int(named[1]), trace.max_draft), int(trace.drafted[:, arm].max()))


def _length(trace: Trace, spec: DerivedArm) -> int:
    recorded = min((_recorded_length(trace, name) for name in spec.drafters), default=0)
    if spec.length is None:
        return recorded
    dependent = set(spec.drafters) & set(trace.provenance.get("length_dependent", ()))
    if dependent:
        raise InputError(
            f"arm: expected a drafter whose law does not depend on its draft length, found {', '.join(dependent)} in "
            f"{spec.text!r}; record it with that length"
        )
    if spec.length > recorded:
        raise InputError(
            f"arm: expected a draft length of at most the recorded {recorded}, found {spec.text!r}; record a longer one"
        )
    return spec.length


def _drafter(trace: Trace, spec: DerivedArm) -> str:
    """What the arm is, with its drafters as on the command line."""
    if not spec.drafters:
        return "none"
    drafters = [trace.drafters[trace.arms.index(name)] for name in spec.drafters]
    text = f"ensemble({','.join(drafters)})" if spec.ensemble else drafters[0]
    if spec.length is not None:
        text = f"{text if spec.ensemble else _LENGTH.sub('', text)}@{spec.length}"
    return text if spec.rule is None else f"{text}?{spec.rule}"


def _columns(trace: Trace, spec: DerivedArm, length: int) -> dict[str, NDArray[Any]]:
    """The arm's part of each tensor, [T, depth] or [T]; a tensor that cannot be derived is left out."""
    if not spec.drafters:
        beyond = {name: np.full_like(trace.tensors()[name][:, 0], fill) for name, fill in _present(trace).items()}
        return beyond | {"drafted": np.zeros_like(trace.drafted[:, 0])}
    if spec.ensemble:
        return _ensemble(trace, spec, length)
    arm = trace.arms.index(spec.drafters[0])
    limit = np.full(len(trace.tokens), length)
    if spec.rule is not None:
        limit = np.minimum(limit, _stops(trace, spec, arm))
    columns = {name: trace.tensors()[name][:, arm] for name in _present(trace)}
    if np.any((trace.drafted[:, arm] > limit) & (limit > 1)):
        columns.pop("block_tail", None)  # a mean over longer drafts than these
    past = np.arange(trace.max_draft) >= limit[:, None]
    cut: dict[str, NDArray[Any]] = {
        name: np.where(past, np.array(_BEYOND[name], dtype=value.dtype), value) for name, value in columns.items()
    }
    if "block_tail" in cut:  # nothing is drafted past the last
        cut["block_tail"][np.arange(trace.max_draft) >= limit[:, None] - 1] = np.nan
    return cut | {"drafted": np.minimum(trace.drafted[:, arm], limit).astype(trace.drafted.dtype)}


def _present(trace: Trace) -> dict[str, Any]:
    """Tensors of the trace with a depth, and what they hold past a draft."""
    return {name: fill for name, fill in _BEYOND.items() if name in trace.tensors()}


def _stops(trace: Trace, spec: DerivedArm, arm: int) -> IntArray:
    """[T] tokens drafted from each position before the rule stops, along the text."""
    assert spec.rule is not None
    tensors = trace.tensors()
    if not set(_LAW) <= set(tensors):
        raise InputError(f"arm: expected a trace with the drafters' laws for {spec.text!r}; record it with --signals")
    law = [tensors[name][:, arm] for name in _LAW]
    if np.isnan(law[0]).all():
        raise InputError(
            f"arm: expected a drafter with a law under a stop rule, found {spec.text!r}; leave the rule out"
        )
    return _leading(spec.rule(*law))


def _leading(flags: BoolArray) -> IntArray:
    """How many are true before the first that is not; [T, depth] -> [T]."""
    return np.cumprod(flags, axis=1).sum(axis=1)


def _ensemble(trace: Trace, spec: DerivedArm, length: int) -> dict[str, NDArray[Any]]:
    if trace.verification != "rejection":
        raise InputError(
            f"arm: expected rejection verification for {spec.text!r}, found {trace.verification}, which chooses a "
            f"mixture's token from all of its law; a trace has the probability of one token"
        )
    if spec.rule is not None:
        raise InputError(f"arm: expected no stop rule, since a mixture's law is not recorded, found {spec.text!r}")
    if trace.log_q is None or trace.log_p is None:
        raise InputError(
            f"arm: expected a trace with log_q and log_p for {spec.text!r}, overlaps are not enough; "
            f"record it with --signals"
        )
    if not length:
        raise InputError(f"arm: expected drafters that draft in an ensemble, found {spec.text!r}")
    first = np.stack([_first_law(trace, spec, name) for name in spec.drafters])  # [members, T]
    with np.errstate(divide="ignore"):
        mixed = np.log(np.exp(first).mean(axis=0))  # [T] NaN where a member has nothing to propose
    depth = np.arange(trace.max_draft)
    at = np.minimum(np.arange(len(mixed))[:, None] + depth, len(mixed) - 1)  # [T, depth]
    in_text = depth < trace.remaining()[:, None]
    lengths = np.diff(trace.offsets)
    left = trace.max_new_tokens - (np.repeat(lengths, lengths) - trace.remaining())  # tokens until the query's limit
    drafted = np.minimum(_leading(~np.isnan(mixed)[at] | ~in_text), np.minimum(length, left))
    here = in_text & (depth < drafted[:, None])
    accept = np.exp(np.minimum(0.0, mixed - trace.log_p.astype(float)))  # [T]
    return {
        "accept": np.where(here, accept[at], 0.0).astype(np.float32),
        "drafted": drafted.astype(trace.drafted.dtype),
        "log_q": np.where(here, mixed[at], np.nan).astype(trace.log_q.dtype),
    }


def _first_law(trace: Trace, spec: DerivedArm, name: str) -> FloatArray:
    """[T] log-probability of each text token under the drafter's law for it, wherever a round started."""
    assert trace.log_q is not None
    log_q = trace.log_q[:, trace.arms.index(name)].astype(float)
    for depth in range(1, min(trace.max_draft, len(log_q))):
        known = ~np.isnan(log_q[:-depth, depth])
        if np.any(log_q[:-depth, depth][known] != log_q[depth:, 0][known]):
            raise InputError(
                f"arm: expected drafters whose law does not depend on where a round starts, found {name} in "
                f"{spec.text!r}; leave it out"
            )
    return log_q[:, 0]
