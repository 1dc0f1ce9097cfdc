"""Speculative decoding with several drafters as a stopping-time bandit problem.

policy --arms--> environment --Rounds--> reward --(value, weight)--> policy, driven by `simulate`.
"""

from . import acceptance, bounds, regret, traces
from .adversary import fooling_sequence
from .costs import CostModel
from .environments import (
    AdversarialEnvironment,
    Context,
    DomainEnvironment,
    DriftingEnvironment,
    Environment,
    FixedArms,
    LostFeedback,
    NoisyFeedback,
    PiecewiseEnvironment,
    ReplayEnvironment,
    StationaryEnvironment,
    SwitchingCost,
)
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
    "AdversarialEnvironment",
    "BlockDivergence",
    "BlockEfficiency",
    "Context",
    "CostModel",
    "DomainEnvironment",
    "DriftingEnvironment",
    "Environment",
    "FixedArm",
    "FixedArms",
    "History",
    "IndexPolicy",
    "InputError",
    "KLUCBTrials",
    "LostFeedback",
    "MetaSDUCB",
    "NoisyFeedback",
    "Outcome",
    "PiecewiseEnvironment",
    "Policy",
    "RandomArm",
    "ReplayEnvironment",
    "Reward",
    "Rounds",
    "StationaryEnvironment",
    "SwitchingCost",
    "ThompsonTrials",
    "TokensPerSecond",
    "VerifiedDivergence",
    "acceptance",
    "bounds",
    "fooling_sequence",
    "make_policy",
    "make_reward",
    "regret",
    "simulate",
    "summarize",
    "traces",
]
