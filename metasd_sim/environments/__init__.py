"""Environments: sources of rounds."""

from .base import Context, Environment, FixedArms
from .categorical import CategoricalEnvironment
from .changing import AdversarialEnvironment, DomainEnvironment, DriftingEnvironment, PiecewiseEnvironment, staying
from .replay import ReplayEnvironment
from .synthetic import StationaryEnvironment
from .wrappers import LostFeedback, NoisyFeedback, SwitchingCost, Wrapper

__all__ = [
    "AdversarialEnvironment",
    "CategoricalEnvironment",
    "Context",
    "DomainEnvironment",
    "DriftingEnvironment",
    "Environment",
    "FixedArms",
    "LostFeedback",
    "NoisyFeedback",
    "PiecewiseEnvironment",
    "ReplayEnvironment",
    "StationaryEnvironment",
    "SwitchingCost",
    "Wrapper",
    "staying",
]
