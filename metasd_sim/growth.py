"""How regret grows with the budget: its slope on ln B and on B, and whether increments keep pace with either."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .errors import InputError
from .rounds import FloatArray
from .simulate import Outcome


@dataclass(frozen=True)
class Growth:
    """Slopes over runs, with standard errors. Logarithmic regret: log_ratio near 1, linear_ratio near 0; linear
    regret: linear_ratio near 1, log_ratio large. Both compare increments above the middle budget with those below.
    """

    log_slope: float  # of regret on ln B
    log_se: float
    linear_slope: float  # of regret on B
    linear_se: float
    log_ratio: float  # increment per ln B in the upper half over that in the lower half
    log_ratio_se: float
    linear_ratio: float  # the same per token
    linear_ratio_se: float


def pseudo_regret(outcome: Outcome, tokens_per_round: ArrayLike) -> FloatArray:
    """sum_i (1 - g_i / g_*) n_i per run, [runs, budgets]; within gamma / g_* of the regret in the mean."""
    g = np.asarray(tokens_per_round, dtype=float)
    if g.shape != outcome.pulls.shape[2:]:
        raise InputError(
            f"tokens_per_round: expected {outcome.pulls.shape[2]} numbers, one per arm; found shape {list(g.shape)}"
        )
    return outcome.pulls @ (1 - g / g.max())


def _slope(regret: FloatArray, x: FloatArray) -> tuple[float, float]:
    """Least squares in each run, then their mean with its standard error: budgets of one run are not independent."""
    centred = x - x.mean()
    slopes = regret @ centred / (centred @ centred)
    return float(slopes.mean()), float(slopes.std(ddof=1) / np.sqrt(len(slopes)))


def _ratio(above: FloatArray, below: FloatArray, scale: float) -> tuple[float, float]:
    """scale * mean(above) / mean(below), its standard error by the delta method; NaN where nothing was lost below."""
    if below.mean() == 0:
        return np.nan, np.nan
    ratio = above.mean() / below.mean()
    error = (above - ratio * below).std(ddof=1) / np.sqrt(len(above)) / below.mean()
    return float(scale * ratio), float(scale * error)


def growth(outcome: Outcome, tokens_per_round: ArrayLike) -> Growth:
    """Growth of `pseudo_regret` over the outcome's budgets; the middle is nearest to the first and last one's
    geometric mean. Runs must be independent (synthetic rows are; replays of one text are not).
    """
    regret = pseudo_regret(outcome, tokens_per_round)
    budgets = outcome.budgets.astype(float)
    if len(budgets) < 3 or outcome.runs < 2:
        raise InputError(
            f"growth: expected 3 or more budgets and 2 or more runs, found {len(budgets)} and {outcome.runs}"
        )
    if not outcome.reached.all():
        raise InputError("growth: expected every run to reach every budget, found streams that ended first")
    log = np.log(budgets)
    middle = 1 + int(np.abs(log[1:-1] - (log[0] + log[-1]) / 2).argmin())
    below, above = regret[:, middle] - regret[:, 0], regret[:, -1] - regret[:, middle]
    ratios = [_ratio(above, below, float((x[middle] - x[0]) / (x[-1] - x[middle]))) for x in (log, budgets)]
    return Growth(*_slope(regret, log), *_slope(regret, budgets), *ratios[0], *ratios[1])
