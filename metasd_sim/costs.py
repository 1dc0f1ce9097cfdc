"""Seconds of a round: `draft_i(drafted) + verify(drafted + 1) + catch_up_i * missed + per_context * n + overhead`.

`n` is the length of the context, which the target's pass reads again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .errors import InputError
from .rounds import FloatArray, IntArray


def _check_seconds(name: str, value: FloatArray) -> None:
    """Refuses seconds above 1e100 too, whose sums would soon be infinite."""
    bad = value[~((value >= 0) & (value <= 1e100))]
    if bad.size:
        raise InputError(f"costs: expected {name} to be seconds, finite and not negative; found {bad.flat[0]}")


@dataclass(frozen=True)
class CostModel:
    """All in seconds. `missed` counts the tokens emitted since the arm was last current."""

    draft: FloatArray  # [arms, max_draft + 1] to draft 0..max_draft tokens
    verify: FloatArray  # [max_draft + 1] one target pass over the last token and 0..max_draft drafts
    catch_up: FloatArray  # [arms] per missed token
    overhead: float  # per round
    plain: float  # per token of plain decoding with the same target code, but for `per_context`
    fit: dict[str, dict[str, float]] | None = None  # of each arm: rounds, mean measured, mean predicted, rms difference
    per_context: float = 0.0  # per token of context, in each pass of the target
    readers: FloatArray | None = None  # [arms, drafters] catch-up of each drafter that the arm reads with, else NaN

    def __post_init__(self) -> None:
        for name in ("draft", "verify", "catch_up", "overhead", "plain", "per_context"):
            value = np.asarray(getattr(self, name), dtype=float)
            _check_seconds(name, value)
            if name in ("overhead", "plain", "per_context") and value.ndim:
                raise InputError(f"costs: expected one number for {name}, found {value.tolist()}")
            object.__setattr__(self, name, value if value.ndim else float(value))
        if self.draft.ndim != 2 or self.verify.shape != self.draft.shape[1:]:
            raise InputError(
                f"costs: expected draft [arms, max_draft + 1] and verify [max_draft + 1], "
                f"found {list(self.draft.shape)} and {list(self.verify.shape)}"
            )
        if self.catch_up.shape != self.draft.shape[:1]:
            raise InputError(f"costs: expected catch_up [{len(self.draft)}], found {list(self.catch_up.shape)}")
        if self.readers is not None:
            readers = np.asarray(self.readers, dtype=float)
            of_each_arm = readers.ndim == 2 and len(readers) == len(self.catch_up)
            if not of_each_arm or not np.allclose(np.nansum(readers, axis=1), self.catch_up):
                raise InputError("costs: expected readers [arms, drafters] whose rows sum to catch_up, found others")
            object.__setattr__(self, "readers", readers)
        if self.plain <= 0:
            raise InputError("costs: expected plain decoding to take time, found plain = 0")

    @classmethod
    def linear(
        cls,
        draft: Sequence[float],
        max_draft: int,
        verify: float = 1.0,
        verify_token: float = 0.0,
        catch_up: ArrayLike = 0.0,
        overhead: float = 0.0,
    ) -> CostModel:
        """`draft[i]` seconds a drafted token, `verify + verify_token * drafted` a pass; plain = `verify + overhead`."""
        drafted: FloatArray = np.arange(max_draft + 1, dtype=float)
        each = np.asarray(draft, dtype=float)
        for name, value in (("draft", each), ("verify", verify), ("verify_token", verify_token)):
            _check_seconds(name, np.asarray(value, dtype=float))  # here, since 0 tokens times infinity are no number
        return cls(
            draft=np.outer(each, drafted),
            verify=verify + verify_token * drafted,
            catch_up=np.broadcast_to(np.asarray(catch_up, dtype=float), (len(draft),)).copy(),
            overhead=overhead,
            plain=verify + overhead,
        )

    def seconds(
        self, arm: IntArray, drafted: IntArray, missed: IntArray | int = 0, context: IntArray | int = 0
    ) -> FloatArray:
        """Seconds of rounds that start after `context` tokens; arguments broadcast."""
        own = self.draft[arm, drafted] + self.catch_up[arm] * missed
        return own + self.verify[drafted] + self.per_context * context + self.overhead

    def to_json(self) -> dict[str, Any]:
        record = {
            "draft": self.draft.tolist(),
            "verify": self.verify.tolist(),
            "catch_up": self.catch_up.tolist(),
            "overhead": self.overhead,
            "plain": self.plain,
            "fit": self.fit,
        }
        if self.per_context:
            record["per_context"] = self.per_context
        if self.readers is not None:  # null stands for NaN
            record["readers"] = [[None if np.isnan(x) else x for x in row] for row in self.readers.tolist()]
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> CostModel:
        names = ("draft", "verify", "catch_up", "overhead", "plain")
        try:
            columns: dict[str, Any] = {name: np.asarray(record[name], dtype=float) for name in names}
            if record.get("readers") is not None:
                columns["readers"] = np.array(record["readers"], dtype=float)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"costs: expected numbers for {', '.join(names)}; found {record!r}") from error
        return cls(**columns, per_context=record.get("per_context", 0.0), fit=record.get("fit"))


class RoundClock:
    """Seconds of the rounds of many rows: knows up to which token each drafter has read its row's text."""

    def __init__(self, costs: CostModel, rows: int) -> None:
        self.costs = costs
        drafters = len(costs.draft) if costs.readers is None else costs.readers.shape[1]
        self.current = np.zeros((rows, drafters), dtype=np.int64)  # [rows, drafters]

    def restart(self, rows: IntArray, position: IntArray) -> None:
        """Every drafter is current at `position`, the start of a query: prefill is outside the rounds."""
        self.current[rows] = position[:, None]

    def seconds(
        self,
        rows: IntArray,
        arms: IntArray,
        drafted: IntArray,
        position: IntArray,
        emitted: IntArray,
        every_arm: bool,
        context: IntArray | int = 0,
    ) -> FloatArray:
        """Seconds of a round that starts at `position`; with `every_arm`, of scoring all arms on its tokens too."""
        end = position + emitted
        readers = self.costs.readers
        if readers is None:  # each arm has a drafter of its own
            seconds = self.costs.seconds(arms, drafted, position - self.current[rows, arms], context)
            self.current[rows, arms] = end
            catch_up = self.costs.catch_up
        else:
            missed = position[:, None] - self.current[rows]  # [n, drafters]
            seconds = self.costs.seconds(arms, drafted, 0, context) + np.nansum(missed * readers[arms], axis=1)
            self.current[rows] = np.where(np.isnan(readers[arms]), self.current[rows], end[:, None])
            catch_up = np.nan_to_num(readers).max(axis=0)
        if every_arm:  # each drafter reads what it has missed
            seconds += (end[:, None] - self.current[rows]) @ catch_up
            self.current[rows] = end[:, None]
        return seconds
