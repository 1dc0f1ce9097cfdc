"""EAGLE: `smooth_l1(f', f) + 0.1 H(p, p')` of estimated features f' and the target's own f, with their laws p', p
(Li et al. 2024, arXiv 2401.15077); features get uniform noise while it trains. Embedding and head are the target's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.nn import functional
from transformers import LlamaConfig

from ..drafters.eagle import EagleModel
from ..settings import EagleSettings
from ..target import Target
from .features import TextFeatures
from .loop import Learner, OnStep, Score, seeded
from .sources import TrainingText
from .vocabulary import frequent_tokens


def layer_config(target: Target) -> LlamaConfig:
    """A Llama layer of the target's own sizes."""
    own = target.model.config.get_text_config()
    heads = own.num_attention_heads
    optional: dict[str, Any] = {}
    rope = getattr(own, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope:
        optional["rope_parameters"] = dict(rope)
    if getattr(own, "head_dim", None):
        optional["head_dim"] = own.head_dim
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=getattr(own, "intermediate_size", None) or 4 * own.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(own, "num_key_value_heads", None) or heads,
        max_position_embeddings=target.max_length or 2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **optional,
    )


class EagleLearner:
    """Its hits are agreements with the target's argmax, which greedy acceptance asks for."""

    def __init__(self, data: TextFeatures, target: Target, settings: EagleSettings, known: list[int] | None, seed: int):
        self.data, self.target, self.settings = data, target, settings
        self.training, self.held_out = data.training, data.held_out
        self.embed = target.model.get_input_embeddings()
        head = target.model.get_output_embeddings()
        rows: Any = slice(None, target.vocab_size) if known is None else known
        self.weight = head.weight.detach()[rows].float()
        self.bias = None if head.bias is None else head.bias.detach()[rows].float()
        self.model, self.generator = seeded(seed, lambda: EagleModel(layer_config(target)))
        self.model.to(target.device)

    def score(self, examples: torch.Tensor, noise: torch.Generator | None = None) -> Score:
        ids, features, place = self.data.batch(examples)
        given = features[:, :-1]
        if noise is not None and self.settings.noise:
            given = given + self.settings.noise * (2 * torch.rand(given.shape, generator=noise) - 1)
        device = self.target.device
        with torch.no_grad():
            embedded = self.embed(ids[:, 1:].to(device)).float()
        estimate = self.model(embedded, given.to(device))
        # the estimate of the feature at a place gives the law of the token after it, which the target is to write
        counts = (place[:, 1:] >= (self.data.first[examples] - 1).clamp(min=0)[:, None]).to(device)
        estimate, truth = estimate[counts], features[:, 1:].to(device)[counts]
        logits = functional.linear(estimate, self.weight, self.bias)
        with torch.no_grad():
            wanted = functional.linear(truth, self.weight, self.bias)
            law = wanted.softmax(dim=-1)
        regression = functional.smooth_l1_loss(estimate, truth)
        loss = regression + self.settings.law_weight * functional.cross_entropy(logits, law)
        hits = int((logits.argmax(dim=-1) == wanted.argmax(dim=-1)).sum())
        return Score(loss, len(truth), hits)

    def save(self, folder: Path) -> None:
        """`config.json` and `model.safetensors` of EAGLE-1's public layout."""
        state = {key: value.detach().cpu().clone() for key, value in self.model.public_state().items()}
        safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
        settings = self.model.config.to_dict()
        (folder / "config.json").write_text(json.dumps(settings, indent=1, default=str) + "\n")


def train_eagle(
    texts: Sequence[TrainingText], target: Target, settings: EagleSettings, seed: int, folder: Path, on_step: OnStep
) -> Learner:
    """A learner with its first weights; `folder` is for large files."""
    known = frequent_tokens([text.ids for text in texts], target, settings.vocabulary)
    data = TextFeatures(texts, target, settings.window, seed, folder, on_step)
    return EagleLearner(data, target, settings, known, seed)
