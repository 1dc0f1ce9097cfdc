"""Explore on a schedule, then commit: few switches of arms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ..environments.base import Context
from ..errors import InputError
from ..rewards import Reward
from ..rounds import BoolArray, FloatArray, IntArray, Rounds
from .base import TINY, policy_spec

UNKNOWN_HORIZON = 1000  # tokens of exploration where no horizon is known


def exploration_tokens(arms: int, horizon: ArrayLike) -> FloatArray:
    """`(K log2 K)^(1/3) horizon^(2/3)` tokens, at most half the horizon; shape of `horizon`."""
    tokens = np.asarray(horizon, dtype=float)
    return np.minimum(np.cbrt(arms * np.log2(arms)) * np.cbrt(tokens) ** 2, tokens / 2)


class EliminationPolicy(ABC):
    """Plays survivors in phases of equal pulls, each survivor in one run, and drops the worst after each phase.

    An arm's estimate is sum of values / sum of weights over all its pulls, ties at random. A phase begins with the arm
    now playing, if it survived; otherwise the order is random. It ends when no eligible survivor has pulls left in it:
    one that is not eligible is skipped, judged by what is known of it, and worst if it was never played. Where no
    survivor is eligible the best eligible arm plays. `restart` with 0 < keep < 1 scales the statistics and keeps the
    schedule; its horizon counts only where the schedule starts afresh.
    """

    def __init__(self, reward: Reward, explore: float | None = None) -> None:
        if explore is not None and not (np.isfinite(explore) and explore > 0):
            raise InputError(f"explore: expected a number of tokens above 0, found {explore}")
        self.reward, self.explore, self.needs = reward, explore, reward.needs

    @property
    @abstractmethod
    def phases(self) -> int:
        """Phases until one arm is left."""

    @abstractmethod
    def survivors_of(self, survivors: IntArray) -> IntArray:
        """How many of `survivors` a phase leaves."""

    def pulls_of(self, rows: IntArray, survivors: IntArray) -> FloatArray:
        """Pulls of each survivor in a phase: its share of the exploration if every round emits gamma + 1 tokens."""
        share = self.budget[rows] / (survivors * max(self.phases, 1) * (self.max_draft + 1))
        return np.maximum(1.0, np.floor(share))

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.rng, self.arms, self.max_draft, self.horizon = rng, len(arms), max_draft, horizon
        self.pulls = np.zeros((rows, self.arms))  # [rows, arms]
        self.value = np.zeros((rows, self.arms))  # [rows, arms]
        self.weight = np.zeros((rows, self.arms))  # [rows, arms]
        self.budget = np.zeros(rows)  # [rows] tokens of exploration
        self.survives = np.ones((rows, self.arms), dtype=bool)  # [rows, arms]
        self.left = np.zeros((rows, self.arms))  # [rows, arms] pulls left in this phase
        self.current = np.full(rows, -1)  # [rows] the arm just played, -1 before the first
        self._begin(np.arange(rows), horizon)

    def _begin(self, rows: IntArray, horizon: ArrayLike | None) -> None:
        if self.explore is not None:
            self.budget[rows] = self.explore
        elif horizon is None:
            self.budget[rows] = UNKNOWN_HORIZON
        else:
            self.budget[rows] = exploration_tokens(self.arms, horizon)
        self.survives[rows] = True
        self.left[rows] = self.pulls_of(rows, np.full(len(rows), self.arms))[:, None]
        self.current[rows] = -1

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        for statistic in (self.pulls, self.value, self.weight):
            statistic[rows] *= keep
        if keep == 0:
            self._begin(rows, self.horizon if horizon is None else horizon)

    def _drop(self, rows: IntArray, estimate: FloatArray, luck: FloatArray) -> None:
        """Ends the phase of `rows`; estimate and luck [n, arms]."""
        survives = self.survives[rows]
        remain = self.survivors_of(survives.sum(axis=1))
        order = np.lexsort((luck, -estimate, ~survives))  # survivors first, the best first among them
        kept: BoolArray = np.zeros_like(survives)
        np.put_along_axis(kept, order, np.arange(self.arms) < remain[:, None], axis=1)
        self.survives[rows] = kept
        self.left[rows] = np.where(kept, self.pulls_of(rows, remain)[:, None], 0.0)

    def select(self, rows: IntArray, context: Context) -> IntArray:
        luck = self.rng.random((len(self.current), self.arms))[rows]
        eligible = np.ones(luck.shape, dtype=bool) if context.eligible is None else context.eligible
        estimate = self.value[rows] / np.maximum(self.weight[rows], TINY)
        estimate[self.pulls[rows] == 0] = -np.inf
        playable = eligible & self.survives[rows]
        due = playable & (self.left[rows] > 0)
        over = playable.any(axis=1) & ~due.any(axis=1) & (self.survives[rows].sum(axis=1) > 1)
        if over.any():
            self._drop(rows[over], estimate[over], luck[over])
            playable = eligible & self.survives[rows]
            due = playable & (self.left[rows] > 0)
        # the arm now playing goes on while it may; else a random one that has pulls left, or the survivor committed to
        n = np.arange(len(rows))
        allowed = np.where(due.any(axis=1, keepdims=True), due, playable)
        arms = np.where(allowed, luck, -1.0).argmax(axis=1)
        goes_on = (self.current[rows] >= 0) & allowed[n, self.current[rows]]
        arms = np.where(goes_on, self.current[rows], arms)
        stranded = ~playable.any(axis=1)
        if stranded.any():
            order = np.lexsort((luck, -estimate, ~eligible))
            arms = np.where(stranded, order[:, 0], arms)
        self.current[rows] = arms
        return arms

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        value, weight = self.reward(rounds)
        at = (rows, rounds.arm)
        self.pulls[at] += 1
        self.value[at] += value
        self.weight[at] += weight
        self.left[at] = np.maximum(self.left[at] - 1, 0)


class SequentialHalving(EliminationPolicy):
    """`max(1, floor(explore / (|S_r| ceil(log2 K) (gamma + 1))))` pulls each in phase r; the better half goes on.

    Karnin, Koren, Somekh (2013), as in MetaSD (arXiv 2604.05417, Algorithm 4), with estimates over all phases. Of
    |S_r| survivors `ceil(|S_r| / 2)` go on. `explore` counts tokens, which exploration never exceeds unless a phase
    has room for less than one pull each; by default `(K log2 K)^(1/3) horizon^(2/3)`, at most half the horizon, and
    1000 without one.
    """

    @property
    def phases(self) -> int:
        return int(np.ceil(np.log2(self.arms)))

    def survivors_of(self, survivors: IntArray) -> IntArray:
        return (survivors + 1) // 2

    def __str__(self) -> str:
        return policy_spec("sequential-halving", reward=self.reward.name, explore=self.explore)


class ExploreThenCommit(EliminationPolicy):
    """Each arm `pulls` times, then the best throughout.

    `pulls` is `max(1, floor(explore / (K (gamma + 1))))` unless told, with `explore` tokens as in sequential halving.
    """

    def __init__(self, reward: Reward, pulls: float | None = None, explore: float | None = None) -> None:
        super().__init__(reward, explore)
        if pulls is not None and not (np.isfinite(pulls) and pulls >= 1 and pulls == int(pulls)):
            raise InputError(f"pulls: expected a whole number of 1 or more, found {pulls}")
        if pulls is not None and explore is not None:
            raise InputError(f"pulls: expected pulls or explore, found both ({pulls} and {explore}); leave one out")
        self.each = pulls

    @property
    def phases(self) -> int:
        return 1

    def survivors_of(self, survivors: IntArray) -> IntArray:
        return np.ones_like(survivors)

    def pulls_of(self, rows: IntArray, survivors: IntArray) -> FloatArray:
        return super().pulls_of(rows, survivors) if self.each is None else np.full(len(rows), float(self.each))

    def __str__(self) -> str:
        return policy_spec("explore-then-commit", reward=self.reward.name, pulls=self.each, explore=self.explore)
