"""What the scripts that ask a question share: their options, the head of their table, and where both outputs go."""

from __future__ import annotations

import argparse
import platform
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure


def options(doc: str | None) -> argparse.Namespace:
    """`--seed`, `--quick` and `--out`, the outputs' path without its ending (default: beside the script)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny setting, to see that the script runs")
    parser.add_argument("--out", default=str(Path(sys.argv[0]).with_suffix("")))
    return parser.parse_args()


def verdict(claim: str, holds: bool, measured: str) -> str:
    text = f"{'held:        ' if holds else 'did not hold:'} {claim} ({measured})"
    return textwrap.fill(text, 118, subsequent_indent=" " * 14)


def table(columns: Sequence[str], rows: Sequence[Sequence[str | float]], digits: int = 1) -> list[str]:
    """A line per row; words to the left, numbers to the right."""
    cells = [[cell if isinstance(cell, str) else f"{cell:.{digits}f}" for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    words = [all(isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    return [
        "  ".join(c.ljust(w) if word else c.rjust(w) for c, w, word in zip(line, widths, words, strict=True)).rstrip()
        for line in [list(columns), *cells]
    ]


def write(settings: str, lines: Sequence[str], figure: Figure, arguments: argparse.Namespace) -> None:
    """Prints and writes `OUT.txt`, and `OUT.png`."""
    info = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    head = [
        settings + f"; seed {arguments.seed}" + (" (quick: a tiny setting)" if arguments.quick else ""),
        f"{next(names, platform.machine())}, one core; Python {platform.python_version()}, numpy {np.__version__}; "
        f"{time.process_time():.0f} s of processor time",
    ]
    text = "\n".join([*head, "", *lines]) + "\n"
    print(text, end="")
    Path(arguments.out + ".txt").write_text(text)
    figure.savefig(arguments.out + ".png", dpi=110)
    plt.close(figure)
