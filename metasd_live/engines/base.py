"""What a causal language model does for target and drafters, whichever engine runs it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metasd_sim.errors import InputError


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
    """What a model remembers of several rows, in one cache."""

    cache: Any
    length: list[int]  # [rows] tokens cached
    features: list[Features] | None = None  # [rows]


class CausalModel(ABC):
    """One pass over new tokens at a time, after a cache that forgets what was rejected.

    Logits and hidden states are float32 or of the model's own type, and valid until the next pass with the same state.
    """

    name: str
    device: torch.device
    dtype: torch.dtype  # of its hidden states
    vocab_size: int
    size: int  # d, numbers in a hidden state
    layers: int
    max_length: int | None
    config: Any  # of transformers, of the text model
    generation_config: Any
    settings: dict[str, Any]  # the engine, and what of it shapes numbers: every trace keeps them

    @property
    def engine(self) -> str:
        """The engine in words."""
        return ", ".join(f"{key} {value}" if key != "name" else str(value) for key, value in self.settings.items())

    @property
    @abstractmethod
    def model(self) -> Any:
        """The model of transformers, in memory."""

    @abstractmethod
    def embedding(self) -> torch.Tensor:
        """The table of the tokens; [vocab, d]."""

    @abstractmethod
    def head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [vocab, d] and bias [vocab] of the product that ends the model."""

    @abstractmethod
    def check_head(self) -> None:
        """Refuses a model that does more than that product between its last hidden state and the logits."""

    @abstractmethod
    def first_layers(self, layers: int, name: str) -> CausalModel:
        """The first layers, then the model's norm and head."""

    @abstractmethod
    def prefill(self, ids: Sequence[int], features: bool = False) -> ModelState:
        """Caches all but the last token, which the first round reads, so that it emits the first new token."""

    @abstractmethod
    def forward(self, state: ModelState, ids: Sequence[int], keep: int = 0) -> torch.Tensor:
        """Logits that follow each of `ids`, or the last `keep` of them; all are cached: [len(ids), vocab], float32."""

    @abstractmethod
    def hidden(self, state: ModelState, ids: Sequence[int], keep: int) -> torch.Tensor:
        """What the head would turn into the last `keep` logits of `forward`: [keep, d]."""

    @abstractmethod
    def rollback(self, state: ModelState, tokens: int) -> None:
        """Forgets the last `tokens` cached tokens."""

    @abstractmethod
    def check_rows(self) -> None:
        """Refuses a model that cannot read rows of unequal lengths in one pass."""

    @abstractmethod
    def prefill_rows(self, prompts: Sequence[Sequence[int]], features: bool = False) -> BatchState:
        """`prefill` of several prompts in one pass."""

    @abstractmethod
    def forward_rows(self, state: BatchState, ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """`forward` of every row: logits [len(ids[row]), vocab], float32."""

    @abstractmethod
    def rollback_rows(self, state: BatchState, tokens: Sequence[int]) -> None:
        """Each row forgets its last `tokens[row]` cached tokens."""

    @abstractmethod
    def select_rows(self, state: BatchState, rows: Sequence[int]) -> None:
        """Keeps these rows."""

    def clock(self) -> float:
        """Seconds, once the device has done all that it was told to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def check_length(self, prompt_tokens: int, max_new_tokens: int) -> None:
        if self.max_length is not None and prompt_tokens + max_new_tokens > self.max_length:
            raise InputError(
                f"{self.name}: expected prompt and new tokens to fit {self.max_length} positions, "
                f"found {prompt_tokens} and {max_new_tokens}; shorten the prompt or lower --max-new-tokens"
            )


def check_rollback(length: int, tokens: int) -> None:
    if not 0 <= tokens <= length:
        raise ValueError(f"rollback: expected 0..{length} tokens, found {tokens}")
