"""How many threads the engines may use."""

from __future__ import annotations

import math
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup/cpu.max")


def allowed_threads() -> int:
    """The least of torch's own count (which follows `OMP_NUM_THREADS`, the process's cores and
    `torch.set_num_threads`) and the cores' worth of time that the container grants."""
    return max(1, min(torch.get_num_threads(), _quota(CGROUP)))


def limit_threads() -> None:
    """Keeps torch from more threads than the container runs at a time: they would only wait for one another."""
    if torch.get_num_threads() > allowed_threads():
        torch.set_num_threads(allowed_threads())


def _quota(file: Path) -> int:
    """`cpu.max` holds microseconds granted and their period; "max" grants all."""
    try:
        granted, period = file.read_text().split()
        return math.ceil(int(granted) / int(period))
    except (OSError, ValueError):
        return 1 << 30
