"""The target's hidden states on the training texts, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from metasd_sim.errors import InputError

from ..target import Target
from .loop import OnStep
from .sources import TrainingText, held_out

IN_MEMORY = 2**31  # bytes; more of them go to a file


class TextFeatures:
    """Pieces of texts with the hidden state of each token that feeds the target's head."""

    def __init__(
        self,
        texts: Sequence[TrainingText],
        target: Target,
        window: int,
        seed: int,
        folder: Path,
        on_step: OnStep = lambda what, done, of: None,
    ) -> None:
        """Each piece is read by itself: one that starts within a text knows nothing of what came before it."""
        window = min(window, target.max_length or window)
        parts = [_pieces([texts[i] for i in numbers], window) for numbers in held_out(len(texts), seed)]
        if not all(parts):
            raise InputError(f"train: expected at least two texts of three tokens or more, found {len(texts)}")
        pieces = parts[0] + parts[1]
        self.training = torch.arange(len(parts[0]))
        self.held_out = torch.arange(len(parts[0]), len(pieces))
        self.length = torch.tensor([len(piece.ids) for piece in pieces])
        self.first = torch.tensor([piece.start for piece in pieces])
        self.start = self.length.cumsum(0) - self.length
        self.ids = torch.tensor([token for piece in pieces for token in piece.ids])
        size = target.model.config.get_text_config().hidden_size
        self.hidden = _room(len(self.ids), size, target.dtype, folder)  # [tokens, d], on the CPU
        for number, (piece, start) in enumerate(zip(pieces, self.start.tolist(), strict=True)):
            state = target.prefill([])
            rows = target.hidden(state, piece.ids, len(piece.ids))
            self.hidden[start : start + len(rows)] = rows.cpu()
            on_step("features", number + 1, len(pieces))

    def batch(self, pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids [n, width], hidden [n, width, d] in float32, place [n, width] of each token in its piece, -1 past it."""
        length = self.length[pieces][:, None]
        place = torch.arange(int(length.max())).expand(len(pieces), -1)
        at = self.start[pieces][:, None] + torch.minimum(place, length - 1)
        return self.ids[at], self.hidden[at].float(), torch.where(place < length, place, -1)


def _pieces(texts: Sequence[TrainingText], window: int) -> list[TrainingText]:
    """Windows of three tokens or more with something to learn: a feature, a token to read, one to predict."""
    found = []
    for text in texts:
        for at in range(0, len(text.ids), window):
            piece = TrainingText(text.ids[at : at + window], max(0, text.start - at))
            if len(piece.ids) > 2 and piece.start < len(piece.ids):
                found.append(piece)
    return found


def _room(tokens: int, size: int, dtype: torch.dtype, folder: Path) -> torch.Tensor:
    if tokens * size * dtype.itemsize <= IN_MEMORY:
        return torch.empty((tokens, size), dtype=dtype)
    path = folder / "features.bin"
    path.unlink(missing_ok=True)
    return torch.from_file(str(path), shared=True, size=tokens * size, dtype=dtype).reshape(tokens, size)
