"""No draft: each round is one step of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Draft


class NoDraft:
    name = "none"
    point_mass = True

    def open(self) -> NoDraft:
        return self

    def draft(self, context: Sequence[int], limit: int) -> Draft:
        return Draft()
