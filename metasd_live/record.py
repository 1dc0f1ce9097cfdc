"""Recording: the target's greedy texts with every drafter's acceptance on them."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metasd_sim import traces
from metasd_sim.errors import InputError
from metasd_sim.files import check_free
from metasd_sim.traces import Query, Trace

from .calibrate import REPETITIONS, measure_costs
from .decode import draft_tokens
from .drafters import Arm, longest_draft
from .files import file_hash
from .prompts import Prompt
from .target import Target


@dataclass(frozen=True)
class Recorder:
    """Records prompts with one target and one set of arms; `overlap_dtype` is how overlaps are kept."""

    target: Target
    arms: Sequence[Arm]
    max_new_tokens: int
    chat_template: bool = True
    seed: int = 0
    overlap_dtype: str = "float16"

    @property
    def max_draft(self) -> int:
        return longest_draft(self.arms)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        target = self.target
        return {
            "target": target.name,
            "weights": target.weights,
            "drafter_files": {file: file_hash(Path(file)) for arm in self.arms for file in arm.files},
            "tokenizer": target.tokenizer_hash,
            "chat_template": self.chat_template,
            "temperature": 0.0,
            "processors": [],
            "seed": self.seed,
            "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.machine(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("metasd", "torch", "transformers")},
        }

    def encode(self, prompt: Prompt) -> list[int]:
        ids = self.target.encode(prompt.text, self.chat_template)
        self.target.check_length(len(ids), self.max_new_tokens)
        return ids

    def record(self, prompt: Prompt) -> Trace:
        """The trace of one prompt."""
        ids = self.encode(prompt)
        return Trace(
            arms=tuple(arm.name for arm in self.arms),
            drafters=tuple(map(str, self.arms)),
            queries=(Query(prompt.id, prompt.category, prompt.sha256, len(ids)),),
            verification="greedy",
            max_new_tokens=self.max_new_tokens,
            provenance=self.provenance,
            **self._decode(ids),
        )

    def _decode(self, prompt: list[int]) -> dict[str, Any]:
        """Plain decoding; at every position each arm drafts, and its draft is followed while the text agrees."""
        shape = (self.max_new_tokens, len(self.arms), self.max_draft)
        accept = np.zeros(shape, dtype=np.uint8)
        overlap = np.full(shape, np.nan, dtype=np.float32)
        drafted = np.zeros(shape[:2], dtype=np.uint8)
        log_p = np.zeros(self.max_new_tokens, dtype=np.float32)
        state = self.target.prefill(prompt)
        streams = [arm.drafter.open() for arm in self.arms]
        context = list(prompt)
        open_drafts: list[tuple[int, int, list[int]]] = []  # start, arm, tokens: accepted so far
        for t in range(self.max_new_tokens):
            for a, (arm, stream) in enumerate(zip(self.arms, streams, strict=True)):
                limit = min(arm.length, self.max_new_tokens - t)
                tokens = draft_tokens(stream, context, limit, self.target.eos)
                drafted[t, a] = len(tokens)
                if tokens:
                    open_drafts.append((t, a, tokens))
            logits = self.target.forward(state, context[-1:])
            token = int(logits[-1].argmax())
            proposed = [tokens[t - start] for start, _, tokens in open_drafts]
            p, *overlaps = logits[-1].softmax(dim=-1)[[token, *proposed]].tolist()
            log_p[t] = np.log(p)
            for (start, a, tokens), value in zip(open_drafts, overlaps, strict=True):
                overlap[start, a, t - start] = value
                accept[start, a, t - start] = tokens[t - start] == token
            open_drafts = [
                (start, a, tokens)
                for start, a, tokens in open_drafts
                if tokens[t - start] == token and t - start + 1 < len(tokens)
            ]
            context.append(token)
            if token in self.target.eos:
                break
        length = len(context) - len(prompt)
        return {
            "tokens": np.array(context[len(prompt) :], dtype=np.int32),
            "offsets": np.array([0, length], dtype=np.int64),
            "accept": accept[:length],
            "drafted": drafted[:length],
            "overlap": overlap[:length].astype(self.overlap_dtype),
            "log_p": log_p[:length],
        }


def record(
    recorder: Recorder,
    prompts: Sequence[Prompt],
    out: str | Path,
    calibration: Sequence[Prompt] = (),
    repetitions: int = REPETITIONS,
    force: bool = False,
    on_text: Callable[[], None] = lambda: None,
    on_calibration: Callable[[], None] = lambda: None,
) -> Trace:
    """Records all prompts into `out`, through one shard each, so that an interrupted recording resumes.

    The cost model of the trace is measured on the prompts of `calibration`, if there are any.
    """
    out = Path(out)
    check_free(out, force)
    if not prompts:
        raise InputError("prompts: expected at least one, found none")
    encoded = [recorder.encode(prompt) for prompt in (*prompts, *calibration)]  # refuses what does not fit, first
    shards = out.with_name(out.name + ".shards")
    shards.mkdir(exist_ok=True)
    parts = []
    for number, prompt in enumerate(prompts):
        parts.append(_shard(recorder, prompt, shards / f"{number:05d}.safetensors", force))
        on_text()
    trace = traces.merge(parts)
    if calibration:
        seed, contexts = recorder.seed, encoded[len(prompts) :]
        costs = measure_costs(recorder.target, recorder.arms, contexts, repetitions, seed, on_calibration)
        settings = {"prompts": [prompt.id for prompt in calibration], "repetitions": repetitions}
        trace = replace(trace, costs=costs, provenance=trace.provenance | {"calibration": settings})
    traces.write(trace, out, force)
    shutil.rmtree(shards)
    return trace


def _shard(recorder: Recorder, prompt: Prompt, path: Path, force: bool) -> Trace:
    """The prompt's trace: from its shard if there is one, which `force` discards where the settings differ."""
    if path.exists():
        try:
            return _resume(recorder, prompt, path)
        except InputError:
            if not force:
                raise
    trace = recorder.record(prompt)
    traces.write(trace, path, force)
    return trace


def _resume(recorder: Recorder, prompt: Prompt, path: Path) -> Trace:
    found = traces.read(path)
    query = found.queries[0]
    for name, expected, value in (
        ("arms", tuple(arm.name for arm in recorder.arms), found.arms),
        ("drafters", tuple(map(str, recorder.arms)), found.drafters),
        ("max_new_tokens", recorder.max_new_tokens, found.max_new_tokens),
        ("overlap_dtype", recorder.overlap_dtype, None if found.overlap is None else str(found.overlap.dtype)),
        ("provenance", recorder.provenance, found.provenance),
        ("prompt", (prompt.id, prompt.category, prompt.sha256), (query.id, query.category, query.sha256)),
    ):
        if value != expected:
            raise InputError(
                f"{path}: expected to resume with {name} {expected}, found {value}; "
                f"repeat the command it began with, or pass --force to start again"
            )
    return found
