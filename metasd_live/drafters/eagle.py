"""EAGLE: a decoder layer that continues the target's hidden states (Li et al. 2024, arXiv 2401.15077), in chains.

Step `t` reads the feature `f_t` (the hidden state at position t that feeds the target's head) with the next token
`x_{t+1}`, `fc([embed(x_{t+1}); f_t])`, through one layer to an estimate of `f_{t+1}`, and the target's own head turns
that into the law of `x_{t+2}`. Features of the text come from the target's passes; past the text the estimates take
their place, so the law of a draft depends on where its round started.

Reads the public layout of EAGLE-1: `config.json` of the layer, weights `fc.*` and `layers.0.*`; the layer has no norm
before its attention unless the file has one, and there is none after it. Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from metasd_sim.errors import InputError

from .. import compat
from ..engines.base import Features
from ..engines.linear import speed_up
from .base import Draft
from .checkpoint import read_checkpoint
from .head import DraftHead

if TYPE_CHECKING:
    from ..target import Target
    from ..verify import TextRule

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class EagleModel(nn.Module):
    """`fc` and one decoder layer; [rows, n, d] features and embeddings -> [rows, n, d] features of the next tokens."""

    def __init__(self, config: LlamaConfig, bias: bool = True, input_norm: bool = False) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.body = LlamaModel(config)
        self.body.embed_tokens = None  # the target's is used
        if not input_norm:
            self.body.layers[0].input_layernorm = nn.Identity()
        self.body.norm = nn.Identity()
        self._names = compat.forward_names(self.body)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, cache: Any = None) -> torch.Tensor:
        x = self.fc(torch.cat([embedded, features], dim=-1))
        out = self.body(inputs_embeds=x, use_cache=cache is not None, **{self._names["cache"]: cache})
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def public_state(self) -> dict[str, torch.Tensor]:
        """Weights under the names of the public layout."""
        state = {key.removeprefix("body."): value for key, value in self.state_dict().items()}
        return {key: value.contiguous() for key, value in state.items()}


class EagleDrafter:
    point_mass = False
    white_box = True

    def __init__(self, model: EagleModel, name: str, target: Target, frequent: Sequence[int] | None = None) -> None:
        self.model, self.name, self.target = model.eval(), name, target
        speed_up(model)
        self.embedding = target.embedding()
        self.max_length: int | None = model.config.max_position_embeddings
        self.head = DraftHead(*target.head(), target.vocab_size, frequent)

    def open(self, prompt: Sequence[int], features: Features) -> EagleStream:
        return EagleStream(self, prompt, features)


class EagleStream:
    """Keeps the layer's cache over the text's pairs (f_t, x_{t+1}); pair `t` depends on the context up to t + 1."""

    def __init__(self, drafter: EagleDrafter, prompt: Sequence[int], features: Features) -> None:
        self.drafter, self.features = drafter, features
        self.logits_of = drafter.head.open(prompt)
        self.cache = compat.new_cache()
        self.read: list[int] = []  # tokens x_1, x_2, ... whose pairs are cached; x_0 is in no pair
        self.first: int | None = None  # x_0
        if len(prompt) > 1:
            self._catch_up(prompt)

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        if not limit or len(context) < 2:  # no feature before the second token
            return Draft()
        tokens: list[int] = []
        laws = []
        hidden = self._catch_up(context)
        while True:
            scores = rule.process_draft(self.logits_of(hidden), [*context, *tokens])[0]
            laws.append(rule.laws(scores))
            tokens.append(rule.draft(scores, position + len(tokens)))
            if len(tokens) == limit:
                compat.crop(self.cache, len(tokens) - 1)  # estimates of features: the text's own will come
                return Draft(tokens, torch.stack(laws))
            hidden = self._pairs([tokens[-1]], hidden)

    def logits_along(self, context: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        if not tokens or len(context) < 2:
            return torch.empty((0, self.drafter.target.vocab_size), device=self.drafter.target.device)
        hidden = [self._catch_up(context)]
        for token in tokens[:-1]:
            hidden.append(self._pairs([token], hidden[-1]))
        compat.crop(self.cache, len(tokens) - 1)
        return self.logits_of(torch.cat(hidden))

    def _catch_up(self, context: Sequence[int]) -> torch.Tensor:
        """Estimate of the feature of the context's last token; [1, d]."""
        pairs = list(context[1:])
        agreed = 0
        if self.first == context[0]:
            agreed = min(len(self.read), len(pairs) - 1)  # the last pair is computed again: its output is wanted
            if self.read[:agreed] != pairs[:agreed]:
                agreed = next(i for i, (a, b) in enumerate(zip(self.read, pairs, strict=False)) if a != b)
        compat.crop(self.cache, len(self.read) - agreed)
        self.first, self.read = context[0], pairs
        return self._pairs(pairs[agreed:], self.features[agreed : len(pairs)])[-1:]

    @torch.inference_mode()
    def _pairs(self, tokens: Sequence[int], features: torch.Tensor) -> torch.Tensor:
        """[n, d] features before each of the tokens -> [n, d] estimates of theirs."""
        drafter = self.drafter
        ids = torch.tensor([list(tokens)], device=drafter.target.device)
        embedded = nn.functional.embedding(ids, drafter.embedding)
        hidden: torch.Tensor = drafter.model(embedded, features[None].to(drafter.target.dtype), self.cache)
        return hidden[0]


def load_eagle(folder: str, name: str, target: Target, frequent: Sequence[int] | None = None) -> EagleDrafter:
    """`eagle:DIR`: a checkpoint in the public layout of EAGLE-1, for this target."""
    config, state = read_checkpoint(
        folder, WEIGHTS, lambda record: LlamaConfig(**{**record, "num_hidden_layers": 1}), name, "an EAGLE-1"
    )
    size = target.size
    if config.hidden_size != size:
        raise InputError(
            f"{name}: expected hidden states of {size} numbers as the target's, found {config.hidden_size}"
        )
    model = EagleModel(config, "fc.bias" in state, "layers.0.input_layernorm.weight" in state)
    weights = {
        key if key.startswith("fc.") else f"body.{key}": v for key, v in state.items() if "embed_tokens" not in key
    }
    missing = sorted(model.state_dict().keys() - weights.keys())
    unknown = sorted(weights.keys() - model.state_dict().keys())
    if missing or unknown:
        fault = f"{missing[0]} missing" if missing else f"{unknown[0]} beside it"
        raise InputError(f"{name}: expected fc and one decoder layer, found {fault.replace('body.', '')}; EAGLE-1 only")
    for key, value in model.state_dict().items():
        if value.shape != weights[key].shape:
            raise InputError(
                f"{name}: expected {key.removeprefix('body.')} of shape {tuple(value.shape)} by its config.json, "
                f"found {tuple(weights[key].shape)}"
            )
    model.load_state_dict(weights)
    return EagleDrafter(model.to(target.device, target.dtype), name, target, frequent)
