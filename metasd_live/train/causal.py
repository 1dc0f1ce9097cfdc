"""A small causal model with a reduced vocabulary, for `model:DIR`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from metasd_sim.errors import InputError

from ..drafters.causal import VOCABULARY
from ..settings import CausalSettings
from ..target import Target
from .loop import Learner, OnStep, Score, seeded
from .sources import TrainingText, held_out


class CausalLearner:
    """Next-token cross entropy (nats); unknown tokens cost nothing."""

    def __init__(self, texts: Sequence[TrainingText], target: Target, settings: CausalSettings, seed: int) -> None:
        sequences = [text.ids for text in texts]
        counts = Counter(token for sequence in sequences for token in sequence)
        # target ids of its tokens, in order
        self.known = sorted({token for token, _ in counts.most_common(settings.vocabulary)} | target.eos)
        self.device, self.tokenizer = target.device, target.tokenizer_hash
        own = torch.full((target.vocab_size,), len(self.known))
        own[self.known] = torch.arange(len(self.known))
        parts = [
            _windows([sequences[i] for i in numbers], own, settings.window)
            for numbers in held_out(len(sequences), seed)
        ]
        if not all(map(len, parts)):
            raise InputError(f"train causal: expected at least two texts longer than one token, found {len(sequences)}")
        self.windows = torch.cat(parts)
        self.training = torch.arange(len(parts[0]))
        self.held_out = torch.arange(len(parts[0]), len(self.windows))
        config = LlamaConfig(
            vocab_size=len(self.known) + 1,
            hidden_size=settings.hidden,
            intermediate_size=3 * settings.hidden,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            max_position_embeddings=target.max_length or 2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        self.model, self.generator = seeded(seed, lambda: LlamaForCausalLM(config))
        self.model.to(target.device)

    def score(self, examples: torch.Tensor, noise: torch.Generator | None = None) -> Score:
        batch = self.windows[examples].to(self.device)
        labels = batch[:, 1:].masked_fill(batch[:, 1:] == len(self.known), -1)
        logits = self.model(batch[:, :-1].clamp(min=0)).logits[..., : len(self.known)]
        seen = labels >= 0
        loss = torch.nn.functional.cross_entropy(logits[seen], labels[seen], reduction="sum") / max(1, int(seen.sum()))
        return Score(loss, int(seen.sum()), int((logits.argmax(dim=-1) == labels)[seen].sum()))

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        known = {"known": np.array(self.known, dtype=np.int32)}
        safetensors.numpy.save_file(known, folder / VOCABULARY, {"tokenizer": self.tokenizer})


def _windows(sequences: Sequence[Sequence[int]], own: torch.Tensor, window: int) -> torch.Tensor:
    """The sequences in pieces of `window` tokens, padded with -1; [n, window]."""
    pieces = [
        own[list(sequence[start : start + window])]
        for sequence in sequences
        for start in range(0, max(1, len(sequence) - 1), window)
    ]
    padded = [torch.nn.functional.pad(p, (0, window - len(p)), value=-1) for p in pieces if len(p) > 1]
    return torch.stack(padded) if padded else torch.empty((0, window), dtype=torch.int64)


def train_causal(
    texts: Sequence[TrainingText], target: Target, settings: CausalSettings, seed: int, folder: Path, on_step: OnStep
) -> Learner:
    """A learner with its first weights; `folder` is for large files."""
    return CausalLearner(texts, target, settings, seed)
