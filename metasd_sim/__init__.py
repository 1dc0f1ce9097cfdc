"""Speculative decoding with several drafters as a stopping-time bandit problem.

policy --arms--> environment --Rounds--> reward --(value, weight)--> policy, driven by `simulate`.
"""

from . import acceptance, bounds, growth, regret, signals, traces
from .adversary import fooling_sequence
from .arms import derive
from .costs import CostModel
from .environments import (
    AdversarialEnvironment,
    CategoricalEnvironment,
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
from .stop_rules import StopRule
from .summary import summarize

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "REWARDS",
    "AcceptanceTrials",
    "AdversarialEnvironment",
    "BlockDivergence",
    "BlockEfficiency",
    "CategoricalEnvironment",
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
    "LinUCB",
    "LostFeedback",
    "MetaSDUCB",
    "NoisyFeedback",
    "Oracle",
    "Outcome",
    "PiecewiseEnvironment",
    "Policy",
    "RandomArm",
    "ReplayEnvironment",
    "Reward",
    "Rounds",
    "Router",
    "RouterWeights",
    "StationaryEnvironment",
    "StopRule",
    "SwitchingCost",
    "ThompsonTrials",
    "TokensPerSecond",
    "VerifiedDivergence",
    "acceptance",
    "bounds",
    "derive",
    "fit_router",
    "fooling_sequence",
    "growth",
    "make_policy",
    "make_reward",
    "regret",
    "signals",
    "simulate",
    "summarize",
    "traces",
]
