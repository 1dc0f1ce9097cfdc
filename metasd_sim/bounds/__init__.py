"""Bounds on stopping-time regret under the stationary model; derivations in docs/theory.md.

An instance is the arms' acceptance rates `alphas` [arms], one draft length `gamma` for all, full drafts; bounds in
time also take the `seconds` [arms] of a round. Each bound states its conditions and refuses what breaks them.
"""

from .asymptotic import lower, lower_slope, lower_time, lower_time_slope
from .commit import explore_then_commit_upper, halving_error, halving_upper
from .common import kl
from .index import ucb_spec_upper, ucb_spec_upper_pulls, ucb_time_upper, ucb_upper, ucb_upper_pulls
from .of_policies import UPPER_BOUNDS, time_upper_of, upper_of
from .weights import (
    exp3_spec_tokens,
    exp3_spec_upper,
    hedge_regret,
    hedge_upper,
    normal_hedge_regret,
    normal_hedge_upper,
)

__all__ = [
    "UPPER_BOUNDS",
    "exp3_spec_tokens",
    "exp3_spec_upper",
    "explore_then_commit_upper",
    "halving_error",
    "halving_upper",
    "hedge_regret",
    "hedge_upper",
    "kl",
    "lower",
    "lower_slope",
    "lower_time",
    "lower_time_slope",
    "normal_hedge_regret",
    "normal_hedge_upper",
    "time_upper_of",
    "ucb_spec_upper",
    "ucb_spec_upper_pulls",
    "ucb_time_upper",
    "ucb_upper",
    "ucb_upper_pulls",
    "upper_of",
]
