"""Environments: sources of rounds."""

from .base import Context, Environment, FixedArms
from .categorical import CategoricalEnvironment
from .replay import ReplayEnvironment
from .synthetic import StationaryEnvironment

__all__ = [
    "CategoricalEnvironment",
    "Context",
    "Environment",
    "FixedArms",
    "ReplayEnvironment",
    "StationaryEnvironment",
]
