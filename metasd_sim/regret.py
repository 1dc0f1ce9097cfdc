"""Stopping-time regret in rounds and in seconds, the share of the best arm, and speedup, with standard errors.

Reg(pi, B) = E tau(pi, B) - min_i E tau(arm i throughout, B). Synthetic rows are independent; replayed rows
share one text, so their standard errors are clustered over queries, as if the queries were a random sample
(a query that a budget cuts is left out of the error, not of the mean).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .environments.base import Environment, FixedArms
from .errors import InputError
from .rounds import FloatArray, IntArray
from .simulate import Outcome


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error at each budget; NaN where one run or one query says nothing of the error."""

    mean: FloatArray  # [budgets]
    se: FloatArray  # [budgets]

    def interval(self, z: float = 1.96) -> tuple[FloatArray, FloatArray]:
        """mean - z se, mean + z se: 95% by default."""
        return self.mean - z * self.se, self.mean + z * self.se


def comparator(environment: Environment, budgets: IntArray) -> FixedArms:
    fixed = environment.fixed_arms(budgets)
    if fixed is None:
        raise InputError(
            "regret: expected an environment whose fixed arms have known expectations, found live models; "
            "record a trace and replay it"
        )
    return fixed


def decomposition_residual(outcome: Outcome, tokens_per_round: FloatArray) -> FloatArray:
    """`tau - S / g_* - sum_i (1 - g_i / g_*) n_i` per run, [runs, budgets]; mean zero by Wald's identity.

    Equal to `(sum_i g_i n_i - S) / g_*`, the rounds' expected tokens less the emitted ones.
    """
    return (outcome.pulls @ tokens_per_round - outcome.tokens) / tokens_per_round.max()


def _of_runs(values: FloatArray) -> Estimate:
    """values [runs, budgets], independent runs."""
    runs = len(values)
    se = values.std(axis=0, ddof=1) / np.sqrt(runs) if runs > 1 else np.full(values.shape[1], np.nan)
    return Estimate(values.mean(axis=0), se)


def _clustered_se(per_query: FloatArray, complete: IntArray) -> FloatArray:
    """Standard error of the sum over the first `complete[b]` queries; per_query [queries] -> [budgets]."""
    return np.array([np.sqrt(n * per_query[:n].var(ddof=1)) if n > 1 else np.nan for n in complete])


def _complete(fixed: FixedArms, budgets: IntArray) -> IntArray:
    """Queries that end within each budget."""
    assert fixed.query_tokens is not None
    return np.searchsorted(np.cumsum(fixed.query_tokens), budgets, side="right")


def stopping_time(outcome: Outcome, environment: Environment) -> Estimate:
    """E tau. Where rounds are identically distributed the mean-zero `decomposition_residual` is taken off each run."""
    fixed = environment.fixed_arms(outcome.budgets)
    if fixed is None:
        return _of_runs(outcome.rounds.astype(float))
    if fixed.tokens_per_round is not None:
        return _of_runs(outcome.rounds - decomposition_residual(outcome, fixed.tokens_per_round))
    if fixed.query_tokens is None:
        return _of_runs(outcome.rounds.astype(float))
    se = _clustered_se(outcome.query_rounds.mean(axis=0), _complete(fixed, outcome.budgets))
    return Estimate(outcome.rounds.mean(axis=0), se)


def stopping_time_regret(outcome: Outcome, environment: Environment) -> Estimate:
    """E tau less that of the best fixed arm."""
    fixed = comparator(environment, outcome.budgets)
    estimate = stopping_time(outcome, environment)
    se = estimate.se
    if fixed.query_rounds is not None:
        difference = outcome.query_rounds.mean(axis=0) - fixed.query_rounds[:, fixed.rounds[-1].argmin()]
        se = _clustered_se(difference, _complete(fixed, outcome.budgets))
    return Estimate(estimate.mean - fixed.rounds.min(axis=1), se)


def time_regret(outcome: Outcome, environment: Environment) -> Estimate | None:
    """Regret in seconds of rounds against the arm that is fastest throughout; None without seconds."""
    fixed = comparator(environment, outcome.budgets)
    if outcome.seconds is None or fixed.seconds is None:
        return None
    seconds, best = outcome.seconds, fixed.seconds.min(axis=1)
    if fixed.tokens_per_round is not None:  # the same mean-zero term, at the best arm's seconds per token
        per_token = (fixed.seconds[0] / fixed.rounds[0] / fixed.tokens_per_round).min()
        residual = decomposition_residual(outcome, fixed.tokens_per_round) * fixed.tokens_per_round.max()
        return _of_runs(seconds - per_token * residual - best)
    if fixed.query_seconds is None:
        return _of_runs(seconds - best)
    assert outcome.query_seconds is not None
    difference = outcome.query_seconds.mean(axis=0) - fixed.query_seconds[:, fixed.seconds[-1].argmin()]
    return Estimate(seconds.mean(axis=0) - best, _clustered_se(difference, _complete(fixed, outcome.budgets)))


def best_arm_ratio(outcome: Outcome, environment: Environment) -> FloatArray:
    """Share of rounds that went to the arm which is best in rounds at that budget, or to one as good; [budgets]."""
    rounds = comparator(environment, outcome.budgets).rounds  # [budgets, arms]
    best = rounds <= rounds.min(axis=1, keepdims=True) * (1 + 1e-12)
    return (outcome.pulls * best).sum(axis=(0, 2)) / outcome.rounds.sum(axis=0)


def speedup(outcome: Outcome, environment: Environment) -> Estimate | None:
    """(seconds of plain decoding for the same tokens) / (seconds of the rounds); None without seconds.

    A ratio of sums over runs and queries, its error by the delta method.
    """
    fixed = comparator(environment, outcome.budgets)
    if outcome.seconds is None or fixed.plain is None:
        return None
    plain = fixed.plain * outcome.tokens  # [runs, budgets]
    ratio = plain.sum(axis=0) / outcome.seconds.sum(axis=0)
    if fixed.query_tokens is None or outcome.query_seconds is None:
        error = _of_runs(plain - ratio * outcome.seconds).se / outcome.seconds.mean(axis=0)
        return Estimate(ratio, error)
    seconds = outcome.query_seconds.mean(axis=0)
    of_query = fixed.plain * fixed.query_tokens if fixed.query_plain is None else fixed.query_plain
    complete = _complete(fixed, outcome.budgets)
    error = np.array(
        [
            _clustered_se(of_query - r * seconds, np.array([n]))[0] / max(seconds[:n].sum(), 1e-300)
            for r, n in zip(ratio, complete, strict=True)
        ]
    )
    return Estimate(ratio, error)
