"""The protocol of a policy, and what index policies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ..environments.base import OBJECTIVES, SECONDS, Context
from ..errors import InputError
from ..quoting import quote
from ..rewards import Reward
from ..rounds import FloatArray, IntArray, Rounds, view_of


@runtime_checkable
class Policy(Protocol):
    """Chooses an arm for each active row and learns from its round.

    `start` is called once for `rows` streams; `restart` at the first round of each query, where `keep` in
    [0, 1] is the share of the statistics that is carried over; `horizon` counts tokens.
    """

    needs: frozenset[str]

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None: ...

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None: ...

    def select(self, rows: IntArray, context: Context) -> IntArray: ...

    def update(self, rows: IntArray, rounds: Rounds) -> None: ...


TINY = 1e-200  # stands for no pulls at all: quotients stay finite


def parameter(value: float) -> str:
    """Short where that is exact, so that a policy's name makes the same policy again."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def policy_spec(name: str, **options: float | str | None) -> str:
    """`name:key=value,...`, which `make_policy` reads; None stands for a default and is left out."""
    parts = [
        f"{key}={quote(value) if isinstance(value, str) else parameter(value)}"
        for key, value in options.items()
        if value is not None
    ]
    return f"{name}:{','.join(parts)}" if parts else name


def active(statistic: FloatArray, view: IntArray | slice) -> FloatArray:
    """`statistic[view]`, [n, arms], where the column of an arm stays contiguous: indexing with rows would undo that."""
    return statistic[view] if isinstance(view, slice) else statistic.T.take(view, axis=1).T


def argmax_random(index: FloatArray, uniform: FloatArray) -> IntArray:
    """Arm with the largest index in each row, ties broken by `uniform` in [0, 1).

    index [n, arms], uniform [n] -> arms [n].
    """
    tied = index == index.max(axis=1, keepdims=True)
    # the last of the tied arms; argmax over a short axis takes three times as long
    arm = (tied * np.arange(tied.shape[1], dtype=np.int16)).max(axis=1).astype(np.int64)
    if np.count_nonzero(tied) > len(tied):
        count = np.count_nonzero(tied, axis=1)
        rows = np.flatnonzero(count > 1)
        nth = (uniform[rows] * count[rows]).astype(np.int64)
        arm[rows] = (tied[rows].cumsum(axis=1) > nth[:, None]).argmax(axis=1)
    return arm


def draw_arms(weight: FloatArray, uniform: FloatArray) -> IntArray:
    """`P(arm i) = weight_i / sum weight` in each row, by inversion; weight [n, arms] >= 0, uniform [n] -> arms [n]."""
    up_to = weight.cumsum(axis=1)
    return (up_to > (uniform * up_to[:, -1])[:, None]).argmax(axis=1)


def check_unit_reward(policy: str, reward: Reward) -> None:
    """Refuses a reward whose value / weight is not in [0, 1]."""
    low, high = reward.range
    if low < 0 or high > 1:
        raise InputError(
            f"reward: expected one in [0, 1] for {policy}, found {reward.name}; use be, bd, bd-verified or trials"
        )


class IndexPolicy(ABC):
    """Plays the eligible arm with the largest index, each eligible arm once first, ties at random.

    Statistics per row and arm: pulls, and the sums of the reward's values and weights. With the objective "time" the
    index becomes tokens per second: the tokens per round that it stands for, over the arm's mean seconds per round.
    """

    play_each_first: bool = True

    def __init__(self, reward: Reward, objective: str = "rounds") -> None:
        if objective not in OBJECTIVES:
            raise InputError(f"objective: expected one of {', '.join(OBJECTIVES)}; found {objective!r}")
        if objective == "time" and reward.name == "tokens-per-second":
            raise InputError("objective: expected rounds for the reward tokens-per-second, a rate in time already")
        self.reward = reward
        self.objective = objective
        self.needs = reward.needs | ({SECONDS} if objective == "time" else set())

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        self.rng = rng
        self.max_draft = max_draft
        # an arm's column is contiguous: there are many rows and few arms
        self.pulls = np.zeros((rows, len(arms)), order="F")  # [rows, arms]
        self.value = np.zeros((rows, len(arms)), order="F")  # [rows, arms]
        self.weight = np.zeros((rows, len(arms)), order="F")  # [rows, arms]
        if self.objective == "time":
            self.seconds = np.zeros((rows, len(arms)), order="F")  # [rows, arms]
            self.longest = np.zeros((rows, len(arms)), order="F")  # [rows, arms] longest draft seen

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        for statistic in (self.pulls, self.value, self.weight):
            statistic[rows] *= keep
        if self.objective == "time":
            self.seconds[rows] *= keep
            self.longest[rows] *= keep > 0

    def spec(self, name: str, **options: float | str | None) -> str:
        """The policy as `make_policy` reads it, with its objective unless that is the default."""
        objective = None if self.objective == "rounds" else self.objective
        return policy_spec(name, **options, objective=objective)

    def estimates(self, view: IntArray | slice) -> tuple[FloatArray, FloatArray]:
        """New arrays: each arm's mean reward and number of samples behind it, [n, arms].

        Samples are the weights of a reward that counts several a round. A reward without a sigma (tokens per second,
        whose weights are seconds) is divided by the row's largest estimate, and its pulls are the samples.
        """
        samples = active(self.weight, view) + TINY
        mean = active(self.value, view) / samples
        if self.reward.sigma(self.max_draft) is None:
            mean /= np.maximum(mean.max(axis=1, keepdims=True), TINY)
            samples = active(self.pulls, view) + TINY
        return mean, samples

    @abstractmethod
    def index(self, rows: IntArray | slice) -> FloatArray:
        """A new array [n, arms]; entries of arms without pulls are not looked at."""

    def select(self, rows: IntArray, context: Context) -> IntArray:
        total = len(self.pulls)
        view = view_of(rows, total)
        # one draw per row of the whole batch: a row's luck does not depend on which others still run
        uniform = self.rng.random(total)[view]
        index = self.index(view)
        if self.objective == "time":
            pace = self.seconds[view] / np.maximum(self.pulls[view], TINY)
            index = self.reward.tokens(index, self.longest[view], self.max_draft) / np.maximum(pace, TINY)
        if self.play_each_first:
            index[active(self.pulls, view) == 0] = np.inf
        if context.eligible is not None:
            index[~context.eligible] = -np.inf
        return argmax_random(index, uniform)

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        value, weight = self.reward(rounds)
        at = rounds.arm * len(self.pulls) + rows  # in the columns one after the other
        np.add.at(self.pulls.T.reshape(-1), at, 1.0)  # faster than [at] += 1.0, which copies twice
        np.add.at(self.value.T.reshape(-1), at, value)
        np.add.at(self.weight.T.reshape(-1), at, weight)
        if self.objective == "time":
            assert rounds.seconds is not None
            np.add.at(self.seconds.T.reshape(-1), at, rounds.seconds)
            longest = self.longest.T.reshape(-1)
            longest[at] = np.maximum(longest[at], rounds.drafted)
