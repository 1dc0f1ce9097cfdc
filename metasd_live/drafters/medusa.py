"""Medusa: heads on the target's last hidden state, one for each further token (Cai et al. 2024), in chains.

Where `f` is the feature before the context's last token, the target's own head predicted that token, and head `k`
predicts the one `k + 1` places further on: `softmax(W_k h)`, `h` after its blocks `h + SiLU(A h + a)`, the first from
`f`. The laws of a draft are all known when the round starts, and depend on where it starts.

Reads the public layout of Medusa-1: `config.json` with `medusa_num_heads` and `medusa_num_layers`; weights
`K.L.linear.weight`, `K.L.linear.bias` of block L and `K.L.weight` of the last product, of each head K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from metasd_sim.errors import InputError

from ..engines.base import Features
from ..engines.linear import speed_up
from .base import Draft
from .checkpoint import read_checkpoint
from .head import DraftHead

if TYPE_CHECKING:
    from ..target import Target
    from ..verify import TextRule

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class ResBlock(nn.Module):
    """`h + SiLU(A h + a)`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Of each head its blocks and its last product."""

    def __init__(self, heads: int, blocks: int, size: int, vocab_size: int) -> None:
        last = [nn.Linear(size, vocab_size, bias=False) for _ in range(heads)]
        super().__init__(nn.Sequential(*(ResBlock(size) for _ in range(blocks)), product) for product in last)

    def parts(self) -> list[tuple[nn.Sequential, nn.Linear]]:
        """Of each head: its blocks, its last product."""
        heads = cast(list[nn.Sequential], list(self))
        return [(cast(nn.Sequential, head[:-1]), cast(nn.Linear, head[-1])) for head in heads]


class MedusaDrafter:
    point_mass = False
    white_box = True
    max_length: int | None = None

    def __init__(self, heads: MedusaHeads, name: str, target: Target, frequent: Sequence[int] | None = None) -> None:
        self.heads, self.name, self.target = heads.eval(), name, target
        speed_up(heads)
        self.longest_draft = len(heads)
        self.parts = heads.parts()
        self.products = [DraftHead(last.weight, None, target.vocab_size, frequent) for _, last in self.parts]

    def open(self, prompt: Sequence[int], features: Features) -> MedusaStream:
        return MedusaStream(self, prompt, features)


class MedusaStream:
    """Keeps nothing: a draft is a function of one feature."""

    def __init__(self, drafter: MedusaDrafter, prompt: Sequence[int], features: Features) -> None:
        self.drafter, self.features = drafter, features
        self.logits_of = [product.open(prompt) for product in drafter.products]

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        tokens: list[int] = []
        laws = []
        for logits in self._logits(context, limit):
            scores = rule.process_draft(logits[None], [*context, *tokens])[0]
            laws.append(rule.laws(scores))
            tokens.append(rule.draft(scores, position + len(tokens)))
        return Draft(tokens, torch.stack(laws)) if tokens else Draft()

    def logits_along(self, context: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        return self._logits(context, len(tokens))

    @torch.inference_mode()
    def _logits(self, context: Sequence[int], count: int) -> torch.Tensor:
        """Of the first `count` heads; [heads, vocab]."""
        if len(context) < 2 or not count:  # no feature before the second token
            return torch.empty((0, self.drafter.target.vocab_size), device=self.drafter.target.device)
        feature = self.features[len(context) - 2 : len(context) - 1]
        rows = [
            logits_of(blocks(feature))
            for (blocks, _), logits_of in zip(self.drafter.parts[:count], self.logits_of, strict=False)
        ]
        return torch.cat(rows)


def load_medusa(folder: str, name: str, target: Target, frequent: Sequence[int] | None = None) -> MedusaDrafter:
    """`medusa:DIR`: a checkpoint in the public layout of Medusa-1, for this target."""
    (heads, blocks), state = read_checkpoint(
        folder,
        WEIGHTS,
        lambda record: (int(record["medusa_num_heads"]), int(record["medusa_num_layers"])),
        name,
        "a Medusa",
    )
    size = target.size
    model = MedusaHeads(heads, blocks, size, target.vocab_size)
    # files may hold more heads than the configuration asks for
    numbers = {key: key.partition(".")[0] for key in state}
    state = {key: state[key] for key, number in numbers.items() if not number.isdecimal() or int(number) < heads}
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in state.items()}
    if expected != found:
        key = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))[0]
        raise InputError(
            f"{name}: expected {key} of shape {expected.get(key)} for this target, found {found.get(key)}; "
            f"give heads that were trained for it"
        )
    model.load_state_dict(state)
    return MedusaDrafter(model.to(target.device, target.dtype), name, target, frequent)
