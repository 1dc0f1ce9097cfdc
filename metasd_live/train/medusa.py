"""Medusa-1: `sum_k 0.8^k H(x_{t+2+k}, p_k)` of heads k = 0, 1, ... on the feature at t, which gives the target's own
x_{t+1} (Cai et al. 2024, arXiv 2401.10774). The weights and biases of blocks start at zero and the products as the
target's head, so that each head starts as a copy of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from metasd_sim.errors import InputError

from ..drafters.medusa import MedusaHeads
from ..settings import MedusaSettings
from ..target import Target
from .features import TextFeatures
from .loop import Learner, OnStep, Score, seeded
from .sources import TrainingText
from .vocabulary import frequent_tokens

DECAY = 0.8  # weight of a head against the one before it


class MedusaLearner:
    """An example is a feature; its hits count the tokens of all heads."""

    def __init__(
        self, data: TextFeatures, target: Target, settings: MedusaSettings, known: list[int] | None, seed: int
    ) -> None:
        self.data, self.target, self.settings, self.name = data, target, settings, target.name
        self.known = None if known is None else torch.tensor(known, device=target.device)
        own = torch.arange(target.vocab_size)
        if known is not None:
            own = torch.full((target.vocab_size,), -1)
            own[known] = torch.arange(len(known))
        self.at, self.labels, piece = _examples(data, own, settings.heads)
        held = piece >= len(data.training)
        self.training, self.held_out = (~held).nonzero()[:, 0], held.nonzero()[:, 0]
        if not len(self.training) or not len(self.held_out):
            raise InputError("train medusa: expected texts of known tokens to train on and to hold out, found too few")
        size = target.model.config.get_text_config().hidden_size
        head = target.model.get_output_embeddings().weight.detach()[: target.vocab_size].float()
        model, self.generator = seeded(
            seed, lambda: MedusaHeads(settings.heads, settings.blocks, size, target.vocab_size)
        )
        frozen = nn.Parameter(head, requires_grad=False)
        for blocks, last in model.parts():
            for parameter in blocks.parameters():
                nn.init.zeros_(parameter)
            last.weight = nn.Parameter(head.clone()) if settings.products else frozen
        self.model = model.to(target.device)

    def score(self, examples: torch.Tensor, noise: torch.Generator | None = None) -> Score:
        device = self.target.device
        features = self.data.hidden[self.at[examples]].float().to(device)
        labels = self.labels[examples].to(device)
        loss, tokens, hits = features.new_zeros(()), 0, 0
        for k, (blocks, last) in enumerate(self.model.parts()):
            seen = labels[:, k] >= 0
            wanted = labels[seen, k]
            weight = last.weight if self.known is None else last.weight[self.known]
            logits = functional.linear(blocks(features[seen]), weight)
            mean = functional.cross_entropy(logits, wanted, reduction="sum") / max(1, len(wanted))
            loss = loss + DECAY**k * mean
            tokens, hits = tokens + len(wanted), hits + int((logits.argmax(dim=-1) == wanted).sum())
        return Score(loss, tokens, hits)

    def save(self, folder: Path) -> None:
        """`config.json` and `medusa_lm_head.safetensors` of the public layout."""
        state = {key: value.detach().cpu().clone() for key, value in self.model.state_dict().items()}
        safetensors.torch.save_file(state, folder / "medusa_lm_head.safetensors", {"format": "pt"})
        settings = {
            "medusa_num_heads": self.settings.heads,
            "medusa_num_layers": self.settings.blocks,
            "base_model_name_or_path": self.name,
        }
        (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _examples(data: TextFeatures, own: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places of features [n], labels of the heads there [n, heads], -1 where there is none, and their pieces [n]."""
    piece = torch.repeat_interleave(torch.arange(len(data.length)), data.length)
    at = torch.arange(len(data.ids))
    place = at - data.start[piece]
    ahead = 2 + torch.arange(heads)
    wanted = place[:, None] + ahead
    counts = (wanted < data.length[piece][:, None]) & (wanted >= data.first[piece][:, None])
    labels = own[data.ids[(at[:, None] + ahead).clamp(max=len(at) - 1)]].masked_fill(~counts, -1)
    useful = (labels >= 0).any(dim=1)
    return at[useful], labels[useful], piece[useful]


def train_medusa(
    texts: Sequence[TrainingText], target: Target, settings: MedusaSettings, seed: int, folder: Path, on_step: OnStep
) -> Learner:
    """A learner with its first weights; `folder` is for large files."""
    known = frequent_tokens([text.ids for text in texts], target, settings.vocabulary)
    data = TextFeatures(texts, target, settings.window, seed, folder, on_step)
    return MedusaLearner(data, target, settings, known, seed)
