"""A causal language model with a cache that rolls back: what target and drafters share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metasd_sim.errors import InputError

from . import compat


@dataclass
class ModelState:
    """What a model remembers of one row."""

    cache: Any
    length: int = 0  # tokens cached


class CausalModel:
    """One forward pass over new tokens, on one device, in one dtype."""

    def __init__(self, model: Any, name: str) -> None:
        compat.check_version()
        compat.check_rollback(model, name)
        self.model = model.eval()
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
    def prefill(self, ids: Sequence[int]) -> ModelState:
        """Caches all but the last token, which the first round reads, so that it emits the first new token."""
        state = ModelState(compat.new_cache())
        if len(ids) > 1:
            self._pass(state, ids[:-1], logits_to_keep=1)
        return state

    @torch.inference_mode()
    def forward(self, state: ModelState, ids: Sequence[int], keep: int = 0) -> torch.Tensor:
        """Logits that follow each of `ids`, or the last `keep` of them; all are cached: [len(ids), vocab], float32."""
        return self._pass(state, ids, logits_to_keep=keep).float()

    def rollback(self, state: ModelState, tokens: int) -> None:
        """Forgets the last `tokens` cached tokens."""
        if not 0 <= tokens <= state.length:
            raise ValueError(f"rollback: expected 0..{state.length} tokens, found {tokens}")
        compat.crop(state.cache, tokens)
        state.length -= tokens

    def clock(self) -> float:
        """Seconds, once the device has done all that it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _pass(self, state: ModelState, ids: Sequence[int], logits_to_keep: int) -> torch.Tensor:
        arguments = {self._names["cache"]: state.cache, "use_cache": True}
        if "logits_to_keep" in self._names:
            arguments[self._names["logits_to_keep"]] = logits_to_keep
        logits: torch.Tensor = self.model(torch.tensor([list(ids)], device=self.device), **arguments).logits[0]
        state.length += len(ids)
        return logits[-logits_to_keep:]
