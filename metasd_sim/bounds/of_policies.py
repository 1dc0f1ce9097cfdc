"""Which proven bound holds for a policy, by its registered name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import ArrayLike

from ..errors import InputError
from ..rounds import FloatArray
from .commit import explore_then_commit_upper, halving_upper
from .index import ucb_spec_upper, ucb_time_upper, ucb_upper
from .weights import exp3_spec_upper, hedge_upper, normal_hedge_upper

Bound = Callable[[Any, ArrayLike, int, ArrayLike], FloatArray]


def _ucb(policy: Any, alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    return ucb_upper(alphas, gamma, budgets, policy.reward, policy.beta)


def _ucb_spec(policy: Any, alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    return ucb_spec_upper(alphas, gamma, budgets, policy.delta)


def _exp3_spec(policy: Any, alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    return exp3_spec_upper(alphas, gamma, budgets)


def _check_loss(policy: Any) -> None:
    loss = getattr(policy, "loss", None)
    if not isinstance(loss, str) or loss != "overlap":
        raise InputError(f"bound: expected the loss overlap, found {policy}")


def _hedge(policy: Any, alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    _check_loss(policy)
    return hedge_upper(alphas, gamma, budgets, policy.eta)


def _normal_hedge(policy: Any, alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    _check_loss(policy)
    return normal_hedge_upper(alphas, gamma, budgets)


def _halving(policy: Any, alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    return halving_upper(alphas, gamma, budgets, policy.reward, policy.explore)


def _explore_then_commit(policy: Any, alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    return explore_then_commit_upper(alphas, gamma, budgets, policy.reward, policy.each, policy.explore)


# policy, alphas, gamma, budgets -> bound on its regret in rounds; a line here gives a policy its bound
UPPER_BOUNDS: dict[str, Bound] = {
    "metasd-ucb": _ucb,
    "ucb-spec": _ucb_spec,
    "exp3-spec": _exp3_spec,
    "hedge": _hedge,
    "normal-hedge": _normal_hedge,
    "sequential-halving": _halving,
    "explore-then-commit": _explore_then_commit,
}


def _name(policy: Any) -> str:
    return str(policy).partition(":")[0]


def upper_of(policy: Any, alphas: ArrayLike, gamma: int, budgets: ArrayLike) -> FloatArray:
    """The policy's bound on regret in rounds, shape of `budgets`; refuses where none is proven."""
    name = _name(policy)
    if name not in UPPER_BOUNDS or getattr(policy, "objective", "rounds") != "rounds":
        raise InputError(f"bound: expected a policy with a bound in rounds ({', '.join(UPPER_BOUNDS)}); found {policy}")
    return UPPER_BOUNDS[name](policy, alphas, gamma, budgets)


def time_upper_of(policy: Any, alphas: ArrayLike, gamma: int, budgets: ArrayLike, seconds: ArrayLike) -> FloatArray:
    """The policy's bound on regret in seconds, shape of `budgets`; refuses where none is proven."""
    if _name(policy) != "metasd-ucb" or policy.objective != "time":
        raise InputError(f"bound: expected metasd-ucb with the objective time, found {policy}")
    return ucb_time_upper(alphas, gamma, budgets, seconds, policy.reward, policy.beta)
