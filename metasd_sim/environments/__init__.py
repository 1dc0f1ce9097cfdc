"""Environments: sources of rounds."""

from .base import Context, Environment, FixedArms
from .changing import AdversarialEnvironment, DomainEnvironment, DriftingEnvironment, PiecewiseEnvironment, staying
from .replay import ReplayEnvironment
from .synthetic import StationaryEnvironment
from .wrappers import LostFeedback, NoisyFeedback, SwitchingCost, Wrapper

__all__ = [
    "AdversarialEnvironment",
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
