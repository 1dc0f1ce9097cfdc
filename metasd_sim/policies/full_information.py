"""Full information: after each round every drafter is scored on the tokens just verified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from scipy.special import softmax

from ..environments.base import EVERY_ARM, Context
from ..errors import InputError
from ..rounds import FloatArray, IntArray, Rounds
from .base import draw_arms, policy_spec


def overlap_loss(every_arm: FloatArray) -> FloatArray:
    """`sum_{j=1..v} (1 - beta_j) / (gamma + 1)` over the `v` scored positions of a round, in [0, 1].

    every_arm [n, arms, gamma + 1], NaN where not scored -> [n, arms]. A sum, not a mean: `v` is the round's stopping
    time, so the expected loss is `(1 - alpha) E v / (gamma + 1)` by Wald; a mean over `v` positions is biased.
    """
    return np.nansum(1 - every_arm, axis=2) / every_arm.shape[2]


def length_loss(every_arm: FloatArray) -> FloatArray:
    """`1 - AL_d / (d + 1)`, `AL_d = 1 + sum_{k=1..d} prod_{j<=k} beta_j`, `d = min(v, gamma)`; in [0, d / (d + 1)].

    `AL_d` is the expected number of tokens of a round that drafts the `d` scored positions; with `d = gamma` it is
    HedgeSpec's `sum_k k (1 - beta_k) prod_{j<k} beta_j`. every_arm [n, arms, gamma + 1] -> [n, arms].
    """
    drafts = every_arm[:, :, :-1]
    scored = ~np.isnan(drafts)
    survival = np.cumprod(np.where(scored, drafts, 0.0), axis=2)  # 0 past the scored positions, which come first
    return 1 - (1 + survival.sum(axis=2)) / (1 + np.count_nonzero(scored, axis=2))


LOSSES = {"overlap": overlap_loss, "length": length_loss}


class FullInformationPolicy(ABC):
    """Draws an eligible arm by weights that follow from the losses of all arms.

    The losses are HedgeSpec's (arXiv 2510.20064), `overlap` or `length`. A block that ends early, at a rejection or
    with the text, scores its emitted positions alone: `overlap` sums over those, so that a short block weighs less, and
    `length` takes the block as one that drafted just them. Arms that are not eligible are scored all the same.
    """

    needs: frozenset[str] = frozenset({EVERY_ARM})

    def __init__(self, loss: str = "overlap") -> None:
        if loss not in LOSSES:
            raise InputError(f"loss: expected one of {', '.join(LOSSES)}; found {loss!r}")
        self.loss = loss

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.rng = rng
        self.score = np.zeros((rows, len(arms)))  # [rows, arms]
        self.seen = np.zeros(rows)  # [rows] rounds

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        self.score[rows] *= keep
        self.seen[rows] *= keep

    @abstractmethod
    def probabilities(self, rows: IntArray, context: Context) -> FloatArray:
        """[n, arms], 0 for ineligible arms."""

    @abstractmethod
    def gain(self, rows: IntArray, losses: FloatArray) -> FloatArray:
        """What a round adds to the scores; [n, arms]."""

    def select(self, rows: IntArray, context: Context) -> IntArray:
        uniform = self.rng.random(len(self.score))[rows]
        return draw_arms(self.probabilities(rows, context), uniform)

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        if rounds.every_arm is None:
            raise InputError("every_arm: expected overlaps of all arms, found none; use an environment that gives them")
        self.score[rows] += self.gain(rows, LOSSES[self.loss](rounds.every_arm))
        self.seen[rows] += 1

    def loss_option(self) -> str | None:
        return None if self.loss == "overlap" else self.loss


class Hedge(FullInformationPolicy):
    """`P(arm i) ~ exp(-eta sum of losses)`: Hedge (Freund, Schapire 1997), losses in [0, 1].

    The default `eta_t = sqrt(8 ln K / t)` needs no horizon.
    """

    def __init__(self, eta: float | None = None, loss: str = "overlap") -> None:
        super().__init__(loss)
        if eta is not None and not (np.isfinite(eta) and eta > 0):
            raise InputError(f"eta: expected a finite number above 0, found {eta}")
        self.eta = eta

    def probabilities(self, rows: IntArray, context: Context) -> FloatArray:
        arms = self.score.shape[1]
        eta = self.eta if self.eta is not None else np.sqrt(8 * np.log(arms) / (self.seen[rows] + 1))[:, None]
        log_weight = -eta * self.score[rows]
        if context.eligible is not None:
            log_weight = np.where(context.eligible, log_weight, -np.inf)
        return softmax(log_weight, axis=1)

    def gain(self, rows: IntArray, losses: FloatArray) -> FloatArray:
        return losses

    def __str__(self) -> str:
        return policy_spec("hedge", eta=self.eta, loss=self.loss_option())


def normal_hedge_weights(regret: FloatArray) -> FloatArray:
    """`w_i = ([R_i]_+ / c) exp([R_i]_+^2 / 2c)`, where `c` solves `mean_i exp([R_i]_+^2 / 2c) = e`; [n, arms].

    Up to a factor per row; 0 everywhere in a row without a positive regret. With `x = [R]_+ / max R` and
    `u = max R^2 / 2c` the equation is `ln mean_i exp(x_i^2 u) = 1` with its root in [1, 1 + ln K]: the left side is
    convex and increasing in `u`, so Newton's iteration falls monotonically from the upper end.
    """
    largest = regret.max(axis=1, keepdims=True)
    squares = np.where(largest > 0, np.maximum(regret, 0.0) / np.where(largest > 0, largest, 1.0), 0.0) ** 2
    u = np.full(largest.shape, 1 + np.log(regret.shape[1]))
    for _ in range(12):
        power = np.exp(squares * u)
        slope = (squares * power).sum(axis=1, keepdims=True) / power.sum(axis=1, keepdims=True)
        u = np.maximum(u - (np.log(power.mean(axis=1, keepdims=True)) - 1) / np.where(slope > 0, slope, 1.0), 1.0)
    return np.sqrt(squares) * np.exp(squares * u)


class NormalHedge(FullInformationPolicy):
    """`p_i ~ ([R_i]_+ / c) exp([R_i]_+^2 / 2c)`, `mean_i exp([R_i]_+^2 / 2c) = e`: NormalHedge.

    Chaudhuri, Freund, Hsu (2009): no parameter. `R_i` sums `sum_j p_j loss_j - loss_i`, the regret against the
    expected loss; uniform over the eligible arms while none of them has a positive one. Only ratios of regrets count,
    so a discount at a restart changes no probability by itself: it makes later rounds weigh more.
    """

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        super().start(rows, arms, max_draft, rng, horizon)
        self.p = np.full((rows, len(arms)), 1.0 / len(arms))  # [rows, arms] of the last choice

    def probabilities(self, rows: IntArray, context: Context) -> FloatArray:
        weight = normal_hedge_weights(self.score[rows])
        allowed = np.ones(weight.shape) if context.eligible is None else context.eligible.astype(float)
        weight *= allowed
        weight = np.where((weight > 0).any(axis=1, keepdims=True), weight, allowed)
        self.p[rows] = weight / weight.sum(axis=1, keepdims=True)
        return self.p[rows]

    def gain(self, rows: IntArray, losses: FloatArray) -> FloatArray:
        return (self.p[rows] * losses).sum(axis=1, keepdims=True) - losses

    def __str__(self) -> str:
        return policy_spec("normal-hedge", loss=self.loss_option())
