"""The reference engine, on any device: transformers' own forward pass, with a cache that rolls back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from metasd_sim.errors import InputError

from .. import compat
from .base import BatchState, CausalModel, Features, ModelState, check_rollback
from .linear import speed_up
from .threads import limit_threads


@dataclass
class MaskedRows(BatchState):
    """Rows differ in length, so places of the cache are masked where a row has padding or forgot what was rejected."""

    valid: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # [rows, slots] bool: it holds a token


class TorchModel(CausalModel):
    """A model of transformers, on one device (or spread over some), in one dtype."""

    def __init__(self, model: Any, name: str) -> None:
        compat.check_version()
        compat.check_rollback(model, name)
        limit_threads()
        self._model = model.eval()
        speed_up(model)
        self.name = name
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.config = config = model.config.get_text_config()
        self.generation_config = model.generation_config
        self.vocab_size: int = config.vocab_size
        self.size, self.layers = config.hidden_size, config.num_hidden_layers
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.settings = {"name": "torch"}
        self._names = compat.forward_names(model)

    @property
    def model(self) -> Any:
        return self._model

    def embedding(self) -> torch.Tensor:
        return self.model.get_input_embeddings().weight

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        head = self.model.get_output_embeddings()
        return head.weight, head.bias

    def check_head(self) -> None:
        compat.check_plain_head(self.model, self.name)

    def first_layers(self, layers: int, name: str) -> TorchModel:
        body_name, layers_name = _layer_list(self.model, self.name)
        model, body = _shallow_copy(self.model), _shallow_copy(getattr(self.model, body_name))
        setattr(body, layers_name, nn.ModuleList(list(getattr(body, layers_name))[:layers]))
        setattr(model, body_name, body)
        model.config = body.config = copy.deepcopy(self.model.config.get_text_config())
        model.config.num_hidden_layers = layers
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:layers]
        return TorchModel(model, name)

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], features: bool = False) -> ModelState:
        state = ModelState(compat.new_cache(), features=Features() if features else None)
        if len(ids) > 1:
            self._pass(state, ids[:-1], logits_to_keep=1)
        return state

    @torch.inference_mode()
    def forward(self, state: ModelState, ids: Sequence[int], keep: int = 0) -> torch.Tensor:
        return self._pass(state, ids, logits_to_keep=keep).float()

    @torch.inference_mode()
    def hidden(self, state: ModelState, ids: Sequence[int], keep: int) -> torch.Tensor:
        arguments = {self._names["cache"]: state.cache, "use_cache": True}
        body = self.model.base_model
        rows: torch.Tensor = body(torch.tensor([list(ids)], device=self.device), **arguments).last_hidden_state[0]
        state.length += len(ids)
        return rows[-keep:]

    def rollback(self, state: ModelState, tokens: int) -> None:
        check_rollback(state.length, tokens)
        compat.crop(state.cache, tokens)
        state.length -= tokens
        if state.features is not None:
            state.features.forget(tokens)

    def check_rows(self) -> None:
        compat.check_rows(self.model, self.name)

    @torch.inference_mode()
    def prefill_rows(self, prompts: Sequence[Sequence[int]], features: bool = False) -> BatchState:
        self.check_rows()
        none = torch.zeros((len(prompts), 0), dtype=torch.bool, device=self.device)
        state = MaskedRows(compat.new_cache(), [0] * len(prompts), valid=none)
        if features:
            state.features = [Features() for _ in prompts]
        if max(map(len, prompts)) > 1:
            # a row that sees nothing at all has no softmax: a prompt of one token reads it, and forgets it again
            self._pass_rows(state, [list(prompt[:-1] or prompt) for prompt in prompts], logits_to_keep=1)
            self.rollback_rows(state, [int(len(prompt) == 1) for prompt in prompts])
        return state

    @torch.inference_mode()
    def forward_rows(self, state: BatchState, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        logits = self._pass_rows(state, ids, logits_to_keep=0)
        return [row[: len(own)].float() for row, own in zip(logits, ids, strict=True)]

    @torch.inference_mode()
    def rollback_rows(self, state: BatchState, tokens: Sequence[int]) -> None:
        assert isinstance(state, MaskedRows)
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
        assert isinstance(state, MaskedRows)
        at = torch.tensor(list(rows), device=self.device)
        if state.valid.shape[1]:
            compat.select_rows(state.cache, at)
        state.valid = state.valid[at]
        state.length = [state.length[row] for row in rows]
        if state.features is not None:
            state.features = [state.features[row] for row in rows]

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
        assert isinstance(state, MaskedRows)
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


def _shallow_copy(module: Any) -> Any:
    """A module that shares everything with the original, but whose children may be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _layer_list(model: Any, name: str) -> tuple[str, str]:
    """Where a model of transformers keeps its layers: attribute of the body, attribute of the list within it."""
    for body_name in ("model", "transformer", "gpt_neox"):
        for layers_name in ("layers", "h"):
            if isinstance(getattr(getattr(model, body_name, None), layers_name, None), nn.ModuleList):
                return body_name, layers_name
    raise InputError(f"drafter: expected a target whose layers can be skipped, found {name}; leave layers:K out")
