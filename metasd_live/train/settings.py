"""What the settings of trainings share."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from metasd_sim.errors import InputError


def check_settings(kind: str, settings: Any, may_be_zero: tuple[str, ...] = ()) -> None:
    """Refuses numbers that are not above 0, or below it where they may be 0."""
    for name, value in asdict(settings).items():
        if isinstance(value, bool):
            continue
        if name in may_be_zero and not value >= 0:
            raise InputError(f"train {kind}: expected {name} of 0 or more, found {value}")
        if name not in may_be_zero and not value > 0:
            raise InputError(f"train {kind}: expected {name} above 0, found {value}")
