"""Speculative decoding with several drafters as a stopping-time bandit problem.

policy --arms--> environment --Rounds--> reward --(value, weight)--> policy, driven by `simulate`.
"""

from . import acceptance, bounds, growth, regret, signals, traces
from .costs import CostModel
from .environments import Context, Environment, FixedArms, ReplayEnvironment, StationaryEnvironment
from .errors import InputError
from .policies import (
    POLICIES,
    FixedArm,
    IndexPolicy,
    KLUCBTrials,
    MetaSDUCB,
    Policy,
    RandomArm,
    ThompsonTrials,
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
    "MetaSDUCB",
    "Outcome",
    "Policy",
    "RandomArm",
    "ReplayEnvironment",
    "Reward",
    "Rounds",
    "StationaryEnvironment",
    "ThompsonTrials",
    "TokensPerSecond",
    "VerifiedDivergence",
    "acceptance",
    "bounds",
    "growth",
    "make_policy",
    "make_reward",
    "regret",
    "signals",
    "simulate",
    "summarize",
    "traces",
]
