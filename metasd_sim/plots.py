"""Figures: regret against budget under its bounds, arm shares over rounds, policies side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import signals
from .errors import InputError
from .rewards import BlockDivergence, BlockEfficiency, Reward
from .rounds import FloatArray
from .simulate import Outcome


def _axes(ax: Axes | None, size: tuple[float, float] = (7.0, 4.5)) -> Axes:
    return plt.figure(figsize=size, layout="constrained").add_subplot() if ax is None else ax


def plot_regret(records: Sequence[Mapping[str, Any]], ax: Axes | None = None, bounds: bool = True) -> Figure:
    """Regret in rounds against the budget, a line with a 95% band per policy; records as `summarize` gives them.

    Dashed in the policy's colour: its upper bound. Dotted: the asymptotic lower bound.
    """
    if not records:
        raise InputError("records: expected at least one, found none")
    names = list(dict.fromkeys(record["policy"] for record in records))
    entries = len(names) + bounds * (len({r["policy"] for r in records if "upper_bound" in r}) + 1)
    columns = 1 + entries // 45
    ax = _axes(ax, (8.0 + 3.0 * columns, max(4.5, 1.0 + 0.17 * entries / columns)))  # high enough for the legend
    if len(names) > 10:
        ax.set_prop_cycle(color=plt.get_cmap("turbo")(np.linspace(0.05, 0.95, len(names))))
    for name in names:
        rows = [record for record in records if record["policy"] == name]
        budget = [row["budget"] for row in rows]
        mean = np.array([row["regret_mean"] for row in rows], dtype=float)
        se = np.array([row["regret_se"] if row["regret_se"] is not None else np.nan for row in rows], dtype=float)
        (line,) = ax.plot(budget, mean, marker="o" if len(budget) == 1 else None, label=_plain(name))
        ax.fill_between(budget, mean - 1.96 * se, mean + 1.96 * se, color=line.get_color(), alpha=0.2, linewidth=0)
        if bounds and "upper_bound" in rows[0]:
            upper = np.array([row["upper_bound"] for row in rows], dtype=float)  # None where it is infinite
            ax.plot(budget, upper, "--", color=line.get_color(), linewidth=1, label=f"upper bound, {_plain(name)}")
    if bounds and "lower_bound" in records[0]:
        rows = [record for record in records if record["policy"] == names[0]]
        ax.plot(
            [row["budget"] for row in rows],
            [row["lower_bound"] for row in rows],
            "k:",
            label="lower bound (asymptotic)",
        )
    ax.set(xscale="log", yscale="symlog", xlabel="budget B (tokens)", ylabel="regret (rounds)")
    ax.set_ylim(0, max(1.0, ax.get_ylim()[1]))
    size = "small" if entries < 20 else "x-small"
    ax.legend(fontsize=size, ncols=columns, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.grid(alpha=0.3)
    return _figure(ax)


def _plain(name: str) -> str:
    """The name as it stands: `$` begins no formula, and `_` does not keep it out of the legend."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def plot_arm_shares(outcome: Outcome, ax: Axes | None = None, bins: int = 60) -> Figure:
    """Share of each arm against the round's number, over the rows still running; needs a history."""
    if outcome.history is None:
        raise InputError("outcome: expected a history, found none; pass history=True to simulate")
    ax = _axes(ax)
    step, arm = outcome.history.step, outcome.history.rounds.arm
    width = max(1, -(-int(step.max() + 1) // bins))
    counts = np.zeros((int(step.max()) // width + 1, len(outcome.arms)))
    np.add.at(counts, (step // width, arm), 1)
    share: FloatArray = counts / counts.sum(axis=1, keepdims=True)
    ax.stackplot((np.arange(len(counts)) + 0.5) * width, share.T, labels=list(map(_plain, outcome.arms)))
    ax.set(xlabel="round", ylabel="share of rounds", ylim=(0, 1), title=_plain(outcome.policy))
    ax.margins(x=0)
    ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _figure(ax)


def plot_policies(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Tokens per round and, where known, speedup in seconds (95% intervals), one bar per policy."""
    timed = all("speedup_mean" in record for record in records)
    figure = plt.figure(figsize=(6.0 + 4.0 * timed, 1.2 + 0.28 * len(records)), layout="constrained")
    panels = figure.subplots(1, 1 + timed, sharey=True, squeeze=False)[0]
    place = np.arange(len(records))[::-1]
    colours = ["tab:gray" if record["policy"].startswith(("fixed", "random")) else "tab:blue" for record in records]
    panels[0].barh(place, [record["tokens_per_round"] for record in records], color=colours)
    panels[0].set(xlabel="tokens per round", yticks=place, yticklabels=[_plain(record["policy"]) for record in records])
    if timed:
        error = [1.96 * (record["speedup_se"] or 0.0) for record in records]
        panels[1].barh(place, [record["speedup_mean"] for record in records], xerr=error, color=colours)
        panels[1].axvline(1.0, color="k", linewidth=1)
        panels[1].set(xlabel="speedup over plain decoding (predicted seconds)")
    for panel in panels:
        panel.grid(axis="x", alpha=0.3)
        panel.tick_params(axis="y", labelsize="small")
    return figure


def plot_categories(
    speedups: FloatArray, categories: Sequence[str], labels: Sequence[str], ax: Axes | None = None
) -> Figure:
    """Speedup of each label (row) in each category (column); speedups [labels, categories]."""
    ax = _axes(ax, (2.5 + 1.1 * len(categories), 1.5 + 0.35 * len(labels)))
    spread = max(0.05, float(np.nanmax(np.abs(np.log(speedups)))))
    ax.imshow(np.log(speedups), cmap="RdYlGn", vmin=-spread, vmax=spread, aspect="auto")
    for (row, column), value in np.ndenumerate(speedups):
        ax.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="small")
    ax.set_xticks(range(len(categories)), list(map(_plain, categories)), rotation=20, ha="right")
    ax.set_yticks(range(len(labels)), list(map(_plain, labels)))
    ax.set_title("speedup over plain decoding (predicted seconds)", fontsize="medium")
    return _figure(ax)


def plot_signal_region(
    gamma: int,
    first: Reward | None = None,
    second: Reward | None = None,
    overlaps: str = "beta",
    concentration: float = 5.0,
    ax: Axes | None = None,
    step: float = 0.01,
) -> Figure:
    """Feedback signal of the reward `first` (bd) over that of `second` (be) for each pair of rates.

    Blue where `first` tells the arms apart more easily; the black line is where both do equally well.
    """
    first, second = first or BlockDivergence(), second or BlockEfficiency()
    ax = _axes(ax, (5.5, 4.5))
    ratio = signals.signal_grid(gamma, first, second, overlaps, concentration, step)[1]
    log = np.log10(ratio)
    spread = max(0.3, float(np.nanmax(np.abs(log))))
    image = ax.imshow(log.T, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu", vmin=-spread, vmax=spread)
    best: FloatArray = 1 - np.geomspace(1 - step, step / 100, 200)
    crossings = signals.signal_boundary(best, gamma, first, second, overlaps, concentration, points=400)
    at = np.repeat(best, [len(alphas) for alphas in crossings])
    ax.plot(np.concatenate(crossings), at, "k.", markersize=2)
    ax.figure.colorbar(image, ax=ax, label=f"log10 of the signal of {first.name} over that of {second.name}")
    ax.set(
        xlabel="rate of the other arm",
        ylabel="rate of the best arm",
        title=f"draft length {gamma}, {overlaps} overlaps",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    return _figure(ax)


def _figure(ax: Axes) -> Figure:
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    return figure
