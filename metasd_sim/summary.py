"""One record per policy and budget: what `metasd-sim simulate` and `replay` print and write as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import bounds, regret
from .environments import Environment, StationaryEnvironment
from .errors import InputError
from .policies import Policy
from .rounds import FloatArray
from .simulate import Outcome


def model_rates(environment: Environment) -> FloatArray | None:
    """Acceptance rates where the bounds hold: i.i.d. overlaps, one full draft length, true feedback. Else None."""
    return getattr(environment, "alphas", None) if getattr(environment, "is_stationary_model", False) else None


def upper_bound(policy: Policy, environment: Environment, budgets: Any) -> Any:
    """The policy's proven bound on its regret in rounds, [budgets], or None where none is known for this instance."""
    alphas = model_rates(environment)
    if alphas is None:
        return None
    try:
        return bounds.upper_of(policy, alphas, environment.max_draft, budgets)
    except InputError:
        return None


def lower_bound(environment: Environment, budgets: Any) -> Any:
    """The asymptotic lower bound, [budgets], or None outside the stationary model with one draft length."""
    alphas = model_rates(environment)
    return None if alphas is None else bounds.lower(alphas, environment.max_draft, budgets)


def time_bounds(policy: Policy, environment: Environment, budgets: Any) -> tuple[Any, Any]:
    """Upper bound of the policy and asymptotic lower bound in seconds, each [budgets] or None.

    None too where an idle drafter has to catch up: its rounds do not take the same time each.
    """
    if not isinstance(environment, StationaryEnvironment) or model_rates(environment) is None:
        return None, None
    costs = environment.costs
    if costs is None or costs.catch_up.any():
        return None, None
    seconds = costs.seconds(np.arange(len(environment.arms)), environment.draft_lengths)
    instance = environment.alphas, environment.max_draft, budgets, seconds
    try:
        return bounds.time_upper_of(policy, *instance), bounds.lower_time(*instance)
    except InputError:
        return None, bounds.lower_time(*instance)


def summarize(outcome: Outcome, policy: Policy, environment: Environment) -> list[dict[str, Any]]:
    """One record per budget. Missing numbers (an error from one run, say) are None."""
    fixed = regret.comparator(environment, outcome.budgets)
    rounds = regret.stopping_time(outcome, environment)
    loss = regret.stopping_time_regret(outcome, environment)
    time_loss = regret.time_regret(outcome, environment)
    faster = regret.speedup(outcome, environment)
    ratio = regret.best_arm_ratio(outcome, environment)
    upper = upper_bound(policy, environment, outcome.budgets)
    lower = lower_bound(environment, outcome.budgets)
    time_upper, time_lower = time_bounds(policy, environment, outcome.budgets)
    reward = getattr(policy, "reward", None)

    records = []
    for b, budget in enumerate(outcome.budgets):
        record: dict[str, Any] = {
            "policy": outcome.policy,
            "reward": None if reward is None else reward.name,
            "carry_over": outcome.carry_over,
            "budget": int(budget),
            "runs": outcome.runs,
            "seed": outcome.seed,
            "rounds_mean": _number(rounds.mean[b]),
            "rounds_se": _number(rounds.se[b]),
            "regret_mean": _number(loss.mean[b]),
            "regret_se": _number(loss.se[b]),
            "best_arm": outcome.arms[fixed.rounds[b].argmin()],
            "best_arm_ratio": _number(ratio[b]),
            "arms": list(outcome.arms),
            "pulls": outcome.pulls[:, b].mean(axis=0).tolist(),
            "tokens_per_round": _number(outcome.tokens[:, b].sum() / outcome.rounds[:, b].sum()),
            "switches_mean": _number(outcome.switches[:, b].mean()),
        }
        if fixed.segment_rounds is not None:  # above the arm that is best in each segment, or each query of a replay
            record["segment_regret_mean"] = _number(rounds.mean[b] - fixed.segment_rounds[b])
        if fixed.segment_seconds is not None and outcome.seconds is not None:
            record["segment_seconds_regret_mean"] = _number(outcome.seconds[:, b].mean() - fixed.segment_seconds[b])
        if upper is not None:
            record["upper_bound"] = _number(upper[b])
        if lower is not None:
            record["lower_bound"] = _number(lower[b])
        if outcome.seconds is not None and faster is not None and time_loss is not None and fixed.seconds is not None:
            record |= {
                "seconds_mean": _number(outcome.seconds[:, b].mean()),
                "seconds_regret_mean": _number(time_loss.mean[b]),
                "seconds_regret_se": _number(time_loss.se[b]),
                "fastest_arm": outcome.arms[fixed.seconds[b].argmin()],
                "speedup_mean": _number(faster.mean[b]),
                "speedup_se": _number(faster.se[b]),
            }
            if time_upper is not None:
                record["seconds_upper_bound"] = _number(time_upper[b])
            if time_lower is not None:
                record["seconds_lower_bound"] = _number(time_lower[b])
        records.append(record)
    return records


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
