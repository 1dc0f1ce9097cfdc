"""Speculative decoding with several drafters as a stopping-time bandit problem.

policy --arms--> environment --Rounds--> reward --(value, weight)--> policy, driven by `simulate`.
"""

from . import acceptance, bounds, regret, traces
from .costs import CostModel
from .environments import Context, Environment, FixedArms, ReplayEnvironment, StationaryEnvironment
from .errors import InputError
from .policies import (
    POLICIES,
    FixedArm,
    IndexPolicy,
    KLUCBTrials,
    LinUCB,
    MetaSDUCB,
    Oracle,
    Policy,
    RandomArm,
    Router,
    RouterWeights,
    ThompsonTrials,
    fit_router,
    make_policy,
)
from .rewards import (
    REWARDS,
    AcceptanceTrials,
    BlockDivergence,
    BlockEfficiency,
    Reward,
    TokensPerSecond,
    VerifiedDivergence,
    make_reward,
)
from .rounds import Rounds
from .simulate import History, Outcome, simulate
from .summary import summarize

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "REWARDS",
    "AcceptanceTrials",
    "BlockDivergence",
    "BlockEfficiency",
    "Context",
    "CostModel",
    "Environment",
    "FixedArm",
    "FixedArms",
    "History",
    "IndexPolicy",
    "InputError",
    "KLUCBTrials",
    "LinUCB",
    "MetaSDUCB",
    "Oracle",
    "Outcome",
    "Policy",
    "RandomArm",
    "ReplayEnvironment",
    "Reward",
    "Rounds",
    "Router",
    "RouterWeights",
    "StationaryEnvironment",
    "ThompsonTrials",
    "TokensPerSecond",
    "VerifiedDivergence",
    "acceptance",
    "bounds",
    "fit_router",
    "make_policy",
    "make_reward",
    "regret",
    "simulate",
    "summarize",
    "traces",
]
