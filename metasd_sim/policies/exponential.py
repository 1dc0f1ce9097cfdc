"""Exponential weights on the arm played: no assumption on how rewards arise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from scipy.special import softmax

from ..environments.base import Context
from ..errors import InputError
from ..rewards import Reward
from ..rounds import FloatArray, IntArray, Rounds
from .base import TINY, check_unit_reward, draw_arms, policy_spec


def _reward(reward: Reward, rounds: Rounds) -> FloatArray:
    """The round's reward in [0, 1]: value / weight, each round on its own."""
    value, weight = reward(rounds)
    return value / np.maximum(weight, TINY)


class ExponentialPolicy(ABC):
    """Draws an arm from `p`, and adds to that arm's score what the round was worth over its probability.

    Ineligible arms have probability 0. Feedback that comes late is divided by the probability with which its arm was
    played last.
    """

    needs: frozenset[str] = frozenset()

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.rng = rng
        self.score = np.zeros((rows, len(arms)))  # [rows, arms] sums of estimates
        self.seen = np.zeros(rows)  # [rows] rounds
        self.played = np.full((rows, len(arms)), 1.0 / len(arms))  # [rows, arms] p when the arm was last played

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        self.score[rows] *= keep
        self.seen[rows] *= keep

    def rate(self, rows: IntArray) -> FloatArray:
        """`sqrt(ln K / (t K))` of the round t about to be played, [n, 1]."""
        arms = self.score.shape[1]
        return np.sqrt(np.log(arms) / ((self.seen[rows, None] + 1) * arms))

    def probabilities(self, rows: IntArray, context: Context) -> FloatArray:
        """`p ~ exp(-eta_t score)` over the eligible arms, [n, arms]; the softmax works in the log domain."""
        return softmax(_masked(-self.rate(rows) * self.score[rows], context), axis=1)

    @abstractmethod
    def gain(self, rows: IntArray, rounds: Rounds, p: FloatArray) -> FloatArray:
        """What a round adds to the score of its arm, which was played with probability `p`; [n]."""

    def select(self, rows: IntArray, context: Context) -> IntArray:
        uniform = self.rng.random(len(self.score))[rows]
        p = self.probabilities(rows, context)
        arms = draw_arms(p, uniform)
        self.played[rows, arms] = p[np.arange(len(rows)), arms]
        return arms

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        self.score[rows, rounds.arm] += self.gain(rows, rounds, self.played[rows, rounds.arm])
        self.seen[rows] += 1


def _masked(log_weight: FloatArray, context: Context) -> FloatArray:
    return log_weight if context.eligible is None else np.where(context.eligible, log_weight, -np.inf)


class Exp3(ExponentialPolicy):
    """`p_i = (1 - gamma) exp(gamma S_i / K) / sum_j exp(gamma S_j / K) + gamma / K`, `S_i = sum 1{I = i} r / p_i`.

    Auer, Cesa-Bianchi, Freund, Schapire (2002). Without a constant `gamma`, that of their Corollary 3.2 with the round
    t in place of the horizon: `min(1, sqrt(K ln K / ((e - 1) t)))`. `r` in [0, 1]; K counts the eligible arms in the
    uniform part.
    """

    def __init__(self, reward: Reward, gamma: float | None = None) -> None:
        check_unit_reward("exp3", reward)
        if gamma is not None and not 0 < gamma <= 1:
            raise InputError(f"gamma: expected a number above 0 and at most 1, found {gamma}")
        self.reward, self.gamma, self.needs = reward, gamma, reward.needs

    def probabilities(self, rows: IntArray, context: Context) -> FloatArray:
        arms = self.score.shape[1]
        gamma = np.minimum(1.0, self.rate(rows) * arms / np.sqrt(np.e - 1)) if self.gamma is None else self.gamma
        weighted = softmax(_masked(gamma * self.score[rows] / arms, context), axis=1)
        allowed = np.ones(weighted.shape) if context.eligible is None else context.eligible
        return (1 - gamma) * weighted + gamma * allowed / allowed.sum(axis=1, keepdims=True)

    def gain(self, rows: IntArray, rounds: Rounds, p: FloatArray) -> FloatArray:
        return _reward(self.reward, rounds) / p

    def __str__(self) -> str:
        return policy_spec("exp3", reward=self.reward.name, gamma=self.gamma)


class Exp3Spec(ExponentialPolicy):
    """`p ~ exp(-eta_t sum loss)`, loss `1{I = i} (L + 1 - Y) / (L p_i)`, `eta_t = sqrt(ln K / (t K))`: EXP3Spec.

    BanditSpec (arXiv 2505.15141). `Y = N + 1`, `L = gamma`, so a round's loss is `1 - N / gamma` in [0, 1].
    """

    def gain(self, rows: IntArray, rounds: Rounds, p: FloatArray) -> FloatArray:
        return (rounds.max_draft - rounds.accepted) / (rounds.max_draft * p)

    def __str__(self) -> str:
        return "exp3-spec"


class Exp3IX(ExponentialPolicy):
    """`p ~ exp(-eta_t sum loss)`, loss `1{I = i} (1 - r) / (p_i + eta_t / 2)`, `eta_t = sqrt(ln K / (t K))`.

    Implicit exploration, Neu (2015): biased low, of a variance that small probabilities do not blow up. `r` in [0, 1].
    """

    def __init__(self, reward: Reward) -> None:
        check_unit_reward("exp3-ix", reward)
        self.reward, self.needs = reward, reward.needs

    def gain(self, rows: IntArray, rounds: Rounds, p: FloatArray) -> FloatArray:
        return (1 - _reward(self.reward, rounds)) / (p + self.rate(rows)[:, 0] / 2)

    def __str__(self) -> str:
        return policy_spec("exp3-ix", reward=self.reward.name)
