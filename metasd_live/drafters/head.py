"""A drafter's head, over the target's whole vocabulary or a reduced one: it dominates what a small drafter costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import safetensors.numpy
import torch

from metasd_sim.errors import InputError
from metasd_sim.files import read_safetensors, write_atomically

from ..engines.linear import product

UNSEEN = -torch.inf  # logit of tokens that a drafter cannot propose
Logits = Callable[[torch.Tensor], torch.Tensor]  # [n, d] -> [n, vocab], float32


class DraftHead:
    """`weight h + bias` of every token, or of the `frequent` ones and the prompt's; the others get `UNSEEN`."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        vocab_size: int,
        frequent: Sequence[int] | None = None,
    ) -> None:
        self.weight, self.bias, self.vocab_size = weight, bias, vocab_size
        self.frequent = None if frequent is None else np.unique(np.asarray(frequent, dtype=np.int64))

    @torch.inference_mode()
    def open(self, prompt: Sequence[int]) -> Logits:
        """The head for one prompt's text."""
        weight, bias, size, known = self.weight, self.bias, self.vocab_size, None
        if self.frequent is not None:
            tokens = np.union1d(self.frequent, np.asarray(prompt, dtype=np.int64))
            known = torch.from_numpy(tokens).to(weight.device)
            weight, bias = weight[known], None if bias is None else bias[known]

        @torch.inference_mode()
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            rows = product(hidden, weight, bias).float()
            return _widen(rows[:, :size] if known is None else rows, known, size)

        return logits


def _widen(logits: torch.Tensor, known: torch.Tensor | None, size: int) -> torch.Tensor:
    if known is None and logits.shape[1] == size:
        return logits
    wide = logits.new_full((len(logits), size), UNSEEN)
    if known is None:
        wide[:, : logits.shape[1]] = logits
    else:
        wide[:, known] = logits
    return wide


def write_vocabulary(known: Sequence[int], tokenizer_hash: str, path: str | os.PathLike[str], force: bool) -> None:
    """Token ids, the most frequent first."""
    tensors = {"known": np.asarray(known, dtype=np.int64)}
    write_atomically(path, safetensors.numpy.save(tensors, metadata={"tokenizer": tokenizer_hash}), force)


def read_vocabulary(path: str | os.PathLike[str], tokenizer_hash: str) -> list[int]:
    kind = "a vocabulary of metasd-live train vocabulary"
    metadata, tensors = read_safetensors(path, kind)
    known = tensors.get("known")
    if known is None or known.ndim != 1 or known.dtype.kind not in "iu" or not len(known) or known.min() < 0:
        raise InputError(f"{path}: expected {kind}, found a file without its token ids")
    if metadata.get("tokenizer") != tokenizer_hash:
        raise InputError(f"{path}: expected a vocabulary of the target's tokenizer, found another's; make a new one")
    return [int(token) for token in known]
