"""A causal language model with a cache that rolls back: what target and drafters share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from metasd_sim.errors import InputError

from . import compat
from .linear import speed_up


class Features:
    """The model's hidden states that feed its head, of each token of one row's cache; what white-box drafters read."""

    def __init__(self) -> None:
        self.length = 0
        self._rows: torch.Tensor | None = None  # [capacity, d]

    def append(self, hidden: torch.Tensor) -> None:
        """hidden [n, d]."""
        end = self.length + len(hidden)
        if self._rows is None or end > len(self._rows):
            rows = hidden.new_empty((2 * end + 64, hidden.shape[1]))
            if self._rows is not None:
                rows[: self.length] = self._rows[: self.length]
            self._rows = rows
        self._rows[self.length : end] = hidden
        self.length = end

    def forget(self, tokens: int) -> None:
        self.length -= tokens

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """[n, d]; of the rows there are."""
        if self._rows is None:
            return torch.empty((0, 0))
        return self._rows[: self.length][rows]


@dataclass
class ModelState:
    """What a model remembers of one row."""

    cache: Any
    length: int = 0  # tokens cached
    features: Features | None = None  # where somebody reads them


@dataclass
class BatchState:
    """What a model remembers of several rows, in one cache.

    Rows differ in length, so places of the cache are masked where a row has padding or forgot what was rejected.
    """

    cache: Any
    valid: torch.Tensor  # [rows, slots] bool: the place holds a token of the row
    length: list[int]  # [rows] tokens cached
    features: list[Features] | None = None  # [rows]


class CausalModel:
    """One forward pass over new tokens, on one device, in one dtype."""

    def __init__(self, model: Any, name: str) -> None:
        compat.check_version()
        compat.check_rollback(model, name)
        self.model = model.eval()
        speed_up(model)
        self.name = name
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self._names = compat.forward_names(model)

    def check_length(self, prompt_tokens: int, max_new_tokens: int) -> None:
        if self.max_length is not None and prompt_tokens + max_new_tokens > self.max_length:
            raise InputError(
                f"{self.name}: expected prompt and new tokens to fit {self.max_length} positions, "
                f"found {prompt_tokens} and {max_new_tokens}; shorten the prompt or lower --max-new-tokens"
            )

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], features: bool = False) -> ModelState:
        """Caches all but the last token, which the first round reads, so that it emits the first new token."""
        state = ModelState(compat.new_cache(), features=Features() if features else None)
        if len(ids) > 1:
            self._pass(state, ids[:-1], logits_to_keep=1)
        return state

    @torch.inference_mode()
    def forward(self, state: ModelState, ids: Sequence[int], keep: int = 0) -> torch.Tensor:
        """Logits that follow each of `ids`, or the last `keep` of them; all are cached: [len(ids), vocab], float32."""
        return self._pass(state, ids, logits_to_keep=keep).float()

    @torch.inference_mode()
    def hidden(self, state: ModelState, ids: Sequence[int], keep: int) -> torch.Tensor:
        """What the head would turn into the last `keep` logits of `forward`: [keep, d]."""
        arguments = {self._names["cache"]: state.cache, "use_cache": True}
        body = self.model.base_model
        rows: torch.Tensor = body(torch.tensor([list(ids)], device=self.device), **arguments).last_hidden_state[0]
        state.length += len(ids)
        return rows[-keep:]

    def rollback(self, state: ModelState, tokens: int) -> None:
        """Forgets the last `tokens` cached tokens."""
        if not 0 <= tokens <= state.length:
            raise ValueError(f"rollback: expected 0..{state.length} tokens, found {tokens}")
        compat.crop(state.cache, tokens)
        state.length -= tokens
        if state.features is not None:
            state.features.forget(tokens)

    @torch.inference_mode()
    def prefill_rows(self, prompts: Sequence[Sequence[int]], features: bool = False) -> BatchState:
        """`prefill` of several prompts in one pass."""
        compat.check_rows(self.model, self.name)
        none = torch.zeros((len(prompts), 0), dtype=torch.bool, device=self.device)
        state = BatchState(compat.new_cache(), none, [0] * len(prompts))
        if features:
            state.features = [Features() for _ in prompts]
        if max(map(len, prompts)) > 1:
            # a row that sees nothing at all has no softmax: a prompt of one token reads it, and forgets it again
            self._pass_rows(state, [list(prompt[:-1] or prompt) for prompt in prompts], logits_to_keep=1)
            self.rollback_rows(state, [int(len(prompt) == 1) for prompt in prompts])
        return state

    @torch.inference_mode()
    def forward_rows(self, state: BatchState, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """`forward` of every row: logits [len(ids[row]), vocab], float32."""
        logits = self._pass_rows(state, ids, logits_to_keep=0)
        return [row[: len(own)].float() for row, own in zip(logits, ids, strict=True)]

    @torch.inference_mode()
    def rollback_rows(self, state: BatchState, tokens: Sequence[int]) -> None:
        """Each row forgets its last `tokens[row]` cached tokens."""
        keep = torch.tensor([n - forget for n, forget in zip(state.length, tokens, strict=True)], device=self.device)
        state.valid &= state.valid.cumsum(dim=1) <= keep[:, None]
        state.length = keep.tolist()
        for own, forget in zip(state.features or (), tokens, strict=False):
            own.forget(forget)
        longest, slots = max(state.length), state.valid.shape[1]
        if slots > 2 * longest + 64:  # more gaps than tokens: close them
            at = state.valid.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :longest]
            compat.select_slots(state.cache, at)
            state.valid = state.valid.gather(1, at)
        else:
            used = int(state.valid.any(dim=0).nonzero().max()) + 1 if longest else 0
            compat.crop(state.cache, slots - used)
            state.valid = state.valid[:, :used]

    @torch.inference_mode()
    def select_rows(self, state: BatchState, rows: Sequence[int]) -> None:
        """Keeps these rows."""
        at = torch.tensor(list(rows), device=self.device)
        if state.valid.shape[1]:
            compat.select_rows(state.cache, at)
        state.valid = state.valid[at]
        state.length = [state.length[row] for row in rows]
        if state.features is not None:
            state.features = [state.features[row] for row in rows]

    def clock(self) -> float:
        """Seconds, once the device has done all that it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def _watching(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        """Catches what the body hands to the head: [rows, n, d]."""
        caught: list[torch.Tensor] = []
        if not wanted:
            yield caught
            return
        body = self.model.base_model
        handle = body.register_forward_hook(lambda module, inputs, output: caught.append(output.last_hidden_state))
        try:
            yield caught
        finally:
            handle.remove()

    def _pass_rows(self, state: BatchState, ids: Sequence[Sequence[int]], logits_to_keep: int) -> torch.Tensor:
        width = max(map(len, ids))
        tokens = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in ids], device=self.device)
        count = torch.tensor([len(row) for row in ids], device=self.device)
        column = torch.arange(width, device=self.device)
        start = torch.tensor(state.length, device=self.device)
        state.valid = torch.cat([state.valid, column < count[:, None]], dim=1)
        arguments = {
            self._names["cache"]: state.cache,
            "use_cache": True,
            "attention_mask": state.valid.long(),
            "position_ids": start[:, None] + torch.minimum(column, count[:, None] - 1),
        }
        if "logits_to_keep" in self._names:
            arguments[self._names["logits_to_keep"]] = logits_to_keep
        with self._watching(state.features is not None) as hidden:
            logits: torch.Tensor = self.model(tokens, **arguments).logits
        for row, own in enumerate(state.features or ()):
            own.append(hidden[0][row, : len(ids[row])])
        state.length = [n + len(row) for n, row in zip(state.length, ids, strict=True)]
        return logits

    def _pass(self, state: ModelState, ids: Sequence[int], logits_to_keep: int) -> torch.Tensor:
        arguments = {self._names["cache"]: state.cache, "use_cache": True}
        if "logits_to_keep" in self._names:
            arguments[self._names["logits_to_keep"]] = logits_to_keep
        with self._watching(state.features is not None) as hidden:
            logits: torch.Tensor = self.model(torch.tensor([list(ids)], device=self.device), **arguments).logits[0]
        if state.features is not None:
            state.features.append(hidden[0][0])
        state.length += len(ids)
        return logits[-logits_to_keep:]
