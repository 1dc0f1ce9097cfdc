"""Full information: after each round every drafter is scored on the tokens just verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import softmax

from ..environments.base import EVERY_ARM, Context
from ..errors import InputError
from ..rounds import IntArray, Rounds
from .base import policy_spec


class Hedge:
    """`P(arm i) ~ exp(-eta sum of losses)`, loss of a round = mean of `1 - beta` over its emitted tokens, in [0, 1].

    Freund, Schapire (1997), with the losses of HedgeSpec (arXiv 2510.20064) on verified positions only. The default
    `eta_t = sqrt(8 ln K / t)` needs no horizon.
    """

    needs: frozenset[str] = frozenset({EVERY_ARM})

    def __init__(self, eta: float | None = None) -> None:
        if eta is not None and not (np.isfinite(eta) and eta > 0):
            raise InputError(f"eta: expected a finite number above 0, found {eta}")
        self.eta = eta

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.rng = rng
        self.loss = np.zeros((rows, len(arms)))  # [rows, arms]
        self.seen = np.zeros(rows)  # [rows] rounds

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        self.loss[rows] *= keep
        self.seen[rows] *= keep

    def select(self, rows: IntArray, context: Context) -> IntArray:
        uniform = self.rng.random(len(self.loss))[rows]
        arms = self.loss.shape[1]
        eta = self.eta if self.eta is not None else np.sqrt(8 * np.log(arms) / (self.seen[rows] + 1))[:, None]
        score = -eta * self.loss[rows]
        if context.eligible is not None:
            score = np.where(context.eligible, score, -np.inf)
        up_to = softmax(score, axis=1).cumsum(axis=1)
        return (up_to > (uniform * up_to[:, -1])[:, None]).argmax(axis=1)

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        if rounds.every_arm is None:
            raise InputError("every_arm: expected overlaps of all arms, found none; use an environment that gives them")
        self.loss[rows] += 1 - np.nanmean(rounds.every_arm, axis=2)
        self.seen[rows] += 1

    def __str__(self) -> str:
        return policy_spec("hedge", eta=self.eta)
