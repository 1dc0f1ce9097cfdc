"""No draft: each round is one step of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Draft

if TYPE_CHECKING:
    from ..verify import TextRule


class NoDraft:
    name = "none"
    point_mass = True

    def open(self, prompt: Sequence[int]) -> NoDraft:
        return self

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        return Draft()
