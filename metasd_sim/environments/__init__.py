"""Environments: sources of rounds."""

from .base import Context, Environment, FixedArms
from .replay import ReplayEnvironment
from .synthetic import StationaryEnvironment

__all__ = ["Context", "Environment", "FixedArms", "ReplayEnvironment", "StationaryEnvironment"]
