"""A block against single steps: what a pass over several tokens changes in the logits of each.

Speculative decoding reads drafts in blocks, plain decoding reads token by token. In exact arithmetic both find the same
logits; how far they differ here bounds how near a tie must be for greedy texts to part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .target import Target

WIDTHS = (2, 3, 4, 5, 8, 9)
WRONG = (7, 8, 9)  # tokens that stand for rejected drafts


@dataclass
class Agreement:
    """Of rows of logits compared: how many are equal bit by bit, by how much others differ, which argmax changed."""

    rows: int = 0
    equal: int = 0
    largest: float = 0.0
    changed: int = 0

    def add(self, block: torch.Tensor, single: torch.Tensor) -> None:
        """[n, vocab] both."""
        difference = (block - single).abs().amax(dim=-1)
        self.rows += len(block)
        self.equal += int((difference == 0).sum())
        self.largest = max(self.largest, float(difference.max()))
        self.changed += int((block.argmax(-1) != single.argmax(-1)).sum())


@dataclass(frozen=True)
class Blocks:
    """Blocks of accepted tokens, and blocks behind rejected ones that the target has rolled back."""

    accepted: Agreement
    after_rejections: Agreement

    def row(self) -> list[str]:
        return [
            text
            for one in (self.accepted, self.after_rejections)
            for text in (
                *([str(one.rows)] if one is self.accepted else []),
                f"{one.equal / one.rows:.1%}",
                f"{one.largest:.2g}",
                str(one.changed),
            )
        ]


@torch.inference_mode()
def compare_blocks(target: Target, texts: Sequence[Sequence[int]], prefill: int = 8) -> Blocks:
    """On `texts` of token ids, whose first `prefill` are read before."""
    accepted, after_rejections = Agreement(), Agreement()
    for text in texts:
        ids, begin = list(text), min(prefill, len(text) - 1)
        state = target.prefill(ids[: begin + 1])
        single = torch.cat([target.forward(state, [token]).clone() for token in ids[begin:]])
        for width in WIDTHS:
            state, at = target.prefill(ids[: begin + 1]), begin
            while at + width <= len(ids):
                accepted.add(target.forward(state, ids[at : at + width]), single[at - begin : at - begin + width])
                at += width
        state, at = target.prefill(ids[: begin + 1]), begin
        while at + 2 <= len(ids):
            block = target.forward(state, [*ids[at : at + 2], *WRONG])[:2]
            after_rejections.add(block, single[at - begin : at - begin + 2])
            target.rollback(state, len(WRONG))
            at += 2
    return Blocks(accepted, after_rejections)
