"""What one round of speculative decoding reported, for a batch of rows.

A row is one decoding stream with its own clock, bandit and arm; `n` is the number of rows active now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def view_of(rows: IntArray, total: int) -> IntArray | slice:
    """`rows`, increasing, as an index: a slice while all `total` of them run, which gives a view instead of a copy."""
    return slice(None) if len(rows) == total else rows


@dataclass(slots=True)
class Rounds:
    """One round of each active row.

    A round emits its `N` accepted tokens and one of the target's own, unless the text ended inside the
    block: then `emitted == accepted`, and nothing after the end counts as a trial.
    """

    arm: IntArray  # [n]
    drafted: IntArray  # [n] tokens proposed, 0..max_draft
    accepted: IntArray  # [n] N, 0..drafted
    emitted: IntArray  # [n] N + 1, or N where the text ended the block
    max_draft: int  # the environment's longest draft; shorter ones compare against it
    seconds: FloatArray | None = None  # [n]
    overlap: FloatArray | None = None  # [n, max_draft] 1 - d_TV(p_j, q_j), NaN where unknown
    every_arm: FloatArray | None = None  # [n, arms, max_draft + 1] overlaps of all arms, NaN past the emitted tokens
    feedback: Rounds | None = None  # shown to the policy instead of the round itself (noise)
    seen: BoolArray | None = None  # [n] rows whose feedback arrived; None: all

    @property
    def trials(self) -> IntArray:
        """`m = min(N + 1, max_draft)`, or `N` where the text ended the block.

        A block that ends short of `max_draft` without a rejection counts its missing token as one failure.
        """
        return np.minimum(self.emitted, self.max_draft)

    def __len__(self) -> int:
        return len(self.arm)

    def __getitem__(self, rows: IntArray | BoolArray | slice) -> Rounds:
        """The same round of some of the rows."""
        columns: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            columns[field.name] = value if field.name == "max_draft" or value is None else value[rows]
        return Rounds(**columns)

    @staticmethod
    def concatenate(parts: Sequence[Rounds]) -> Rounds:
        """All rows of `parts`, in order; a column that is None in one is None in all."""
        if not parts:
            raise ValueError("parts: expected at least one Rounds, found none")
        columns: dict[str, Any] = {}
        for field in fields(Rounds):
            if field.name != "max_draft":
                values = [getattr(part, field.name) for part in parts]
                if any(value is None for value in values):
                    columns[field.name] = None
                else:
                    columns[field.name] = (
                        Rounds.concatenate(values) if field.name == "feedback" else np.concatenate(values)
                    )
        return Rounds(max_draft=parts[0].max_draft, **columns)
