"""Upper confidence bounds for environments that change: forget by window, by discount, or on an alarm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import InputError
from ..rewards import Reward
from ..rounds import FloatArray, IntArray, Rounds
from .base import TINY, IndexPolicy, check_unit_reward
from .greedy import ExploringPolicy


def _check_xi(xi: float) -> None:
    if not (np.isfinite(xi) and xi >= 0):
        raise InputError(f"xi: expected a finite number, 0 or larger; found {xi}")


def _range(reward: Reward, max_draft: int) -> float:
    """`B = 2 sigma`: 1 for a reward in [0, 1]; without a sigma 1/2 on estimates divided by the row's largest."""
    sigma = reward.sigma(max_draft)
    return 0.5 if sigma is None else 2 * sigma


MOST_SLOTS = 100_000_000  # 2 to 3 GB


class SlidingWindowUCB(IndexPolicy):
    """`mu_i + B sqrt(xi ln min(t, window) / n_i)` over the last `window` rounds of the row: SW-UCB.

    Garivier, Moulines (2011), who take `window ~ 2 B sqrt(T ln T / changes)`: the default 200 suits a change every
    few hundred rounds. `n_i` counts pulls, or weights of a reward that counts several samples a round, `B = 2 sigma`;
    an arm that has left the window is played at once. `restart` with 0 < keep < 1 keeps that share of the window, its
    newest rounds. Memory: rows x window.
    """

    def __init__(self, reward: Reward, window: float = 200.0, xi: float = 0.6, objective: str = "rounds") -> None:
        super().__init__(reward, objective)
        if not (np.isfinite(window) and window >= 1 and window == int(window)):
            raise InputError(f"window: expected a whole number of rounds, 1 or more; found {window}")
        _check_xi(xi)
        self.window, self.xi = int(window), xi

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        super().start(rows, arms, max_draft, rng, horizon)
        if self.window < len(arms):
            raise InputError(f"window: expected at least the number of arms, {len(arms)}; found {self.window}")
        if rows * self.window > MOST_SLOTS:
            raise InputError(
                f"window: expected rows x window of at most {MOST_SLOTS:,}, all of which are kept; found {rows:,} x "
                f"{self.window:,}; choose a smaller window or fewer runs"
            )
        self.width = _range(self.reward, max_draft)
        self.filled = np.zeros(rows, dtype=np.int64)  # [rows] rounds in the window
        self.next = np.zeros(rows, dtype=np.int64)  # [rows] slot of the next round
        self.past_arm = np.full((rows, self.window), -1, dtype=np.int32)  # [rows, window]
        self.past = np.zeros((len(self._sums()), rows, self.window))  # value, weight (and seconds) [rows, window]

    def _sums(self) -> list[FloatArray]:
        return [self.value, self.weight] + ([self.seconds] if self.objective == "time" else [])

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        if keep == 1:
            return
        kept = np.floor(self.filled[rows] * keep).astype(np.int64)
        age = (self.next[rows, None] - 1 - np.arange(self.window)) % self.window  # [n, window] 0: the newest
        self.past_arm[rows] = np.where(age < kept[:, None], self.past_arm[rows], -1)
        self.filled[rows] = kept
        for arm in range(self.pulls.shape[1]):
            within = self.past_arm[rows] == arm
            self.pulls[rows, arm] = within.sum(axis=1)
            for sums, past in zip(self._sums(), self.past, strict=True):
                sums[rows, arm] = (past[rows] * within).sum(axis=1)
        if self.objective == "time":
            self.longest[rows] *= keep > 0

    def index(self, rows: IntArray | slice) -> FloatArray:
        mean, samples = self.estimates(rows)
        log_t = np.log(np.minimum(self.filled[rows] + 1, self.window))
        return mean + self.width * np.sqrt(self.xi * log_t[:, None] / samples)

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        slot = self.next[rows]
        full = self.filled[rows] == self.window
        out_row, out_slot = rows[full], slot[full]
        out_arm = self.past_arm[out_row, out_slot]
        self.pulls[out_row, out_arm] -= 1
        gone = self.pulls[out_row, out_arm] == 0
        for sums, past in zip(self._sums(), self.past, strict=True):
            # exactly 0 with its last round: no rounding error stays behind
            sums[out_row, out_arm] = np.where(gone, 0.0, sums[out_row, out_arm] - past[out_row, out_slot])
        super().update(rows, rounds)
        value, weight = self.reward(rounds)
        self.past_arm[rows, slot] = rounds.arm
        for past, new in zip(self.past, (value, weight, rounds.seconds), strict=False):
            past[rows, slot] = new
        self.next[rows] = (slot + 1) % self.window
        self.filled[rows] = np.minimum(self.filled[rows] + 1, self.window)

    def __str__(self) -> str:
        window = None if self.window == 200 else self.window
        return self.spec("sw-ucb", reward=self.reward.name, window=window, xi=None if self.xi == 0.6 else self.xi)


class DiscountedUCB(IndexPolicy):
    """`mu_i + 2 B sqrt(xi ln sum_j n_j / n_i)`, each round's statistics discounted by `discount` a round: D-UCB.

    Garivier, Moulines (2011), who take `discount = 1 - sqrt(changes / T) / (4 B)`: the default 0.99 remembers about
    100 rounds. `n_i` are discounted pulls, or weights of a reward that counts several samples a round, `B = 2 sigma`.
    """

    def __init__(self, reward: Reward, discount: float = 0.99, xi: float = 0.6, objective: str = "rounds") -> None:
        super().__init__(reward, objective)
        if not 0 < discount <= 1:
            raise InputError(f"discount: expected a number above 0 and at most 1, found {discount}")
        _check_xi(xi)
        self.discount, self.xi = discount, xi

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        super().start(rows, arms, max_draft, rng, horizon)
        self.width = 2 * _range(self.reward, max_draft)

    def index(self, rows: IntArray | slice) -> FloatArray:
        mean, samples = self.estimates(rows)
        log_n = np.log(np.maximum(self.pulls[rows].sum(axis=1), 1.0))
        return mean + self.width * np.sqrt(self.xi * log_n[:, None] / samples)

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        for statistic in (self.pulls, self.value, self.weight) + ((self.seconds,) if self.objective == "time" else ()):
            statistic[rows] *= self.discount
        super().update(rows, rounds)

    def __str__(self) -> str:
        discount = None if self.discount == 0.99 else self.discount
        return self.spec("d-ucb", reward=self.reward.name, discount=discount, xi=None if self.xi == 0.6 else self.xi)


class ChangeUCB(ExploringPolicy):
    """UCB, with probability `epsilon` any eligible arm, and an arm whose CUSUM reaches `threshold` starts anew.

    CUSUM-UCB (Liu, Lee, Shroff 2018). The mean `u` of an arm's first `warm` samples since its start is the baseline;
    later ones `y` move `g+ = max(0, g+ + y - u - drift)` and `g- = max(0, g- + u - y - drift)`. Alarm at
    `max(g+, g-) >= threshold`: the arm forgets everything, this sample too, and is played again at once. A sample is
    value / weight of one round, so the reward must lie in [0, 1]. Index `mu_i + B sqrt(xi ln sum_j n_j / n_i)` with
    `B = 2 sigma`, pulls since the arms' starts under the logarithm. `restart` scales the detector with the rest.
    Simulated with block efficiency and gamma 5, the defaults see alpha fall from .8 to .4 within 32 rounds of the arm
    (median) and raise a false alarm within 2,000 in one of five runs.
    """

    def __init__(
        self,
        reward: Reward,
        warm: float = 50.0,
        drift: float = 0.1,
        threshold: float = 10.0,
        epsilon: float = 0.05,
        xi: float = 0.6,
        objective: str = "rounds",
    ) -> None:
        super().__init__(reward, objective)
        check_unit_reward("change-ucb", reward)
        if not (np.isfinite(warm) and warm >= 1 and warm == int(warm)):
            raise InputError(f"warm: expected a whole number of samples, 1 or more; found {warm}")
        if not 0 <= drift < 1:
            raise InputError(f"drift: expected a number in [0, 1), found {drift}")
        if not threshold > 0:  # infinity: never an alarm
            raise InputError(f"threshold: expected a number above 0, found {threshold}")
        if not 0 <= epsilon <= 1:
            raise InputError(f"epsilon: expected a probability, found {epsilon}")
        _check_xi(xi)
        self.warm, self.drift, self.threshold, self.epsilon, self.xi = warm, drift, threshold, epsilon, xi

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        super().start(rows, arms, max_draft, rng, horizon)
        self.width = _range(self.reward, max_draft)
        self.count = np.zeros((rows, len(arms)))  # [rows, arms] samples in the baseline, at most `warm`
        self.total = np.zeros((rows, len(arms)))  # [rows, arms] their sum
        self.above = np.zeros((rows, len(arms)))  # [rows, arms] g+
        self.below = np.zeros((rows, len(arms)))  # [rows, arms] g-

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        super().restart(rows, keep, horizon)
        for statistic in (self.count, self.total, self.above, self.below):
            statistic[rows] *= keep

    def exploration(self, rows: IntArray) -> float:
        return self.epsilon

    def index(self, rows: IntArray | slice) -> FloatArray:
        mean, samples = self.estimates(rows)
        log_n = np.log(np.maximum(self.pulls[rows].sum(axis=1), 1.0))
        return mean + self.width * np.sqrt(self.xi * log_n[:, None] / samples)

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        super().update(rows, rounds)
        value, weight = self.reward(rounds)
        sample = value / np.maximum(weight, TINY)
        at = (rows, rounds.arm)
        ready = self.count[at] >= self.warm
        gap = np.where(ready, sample - self.total[at] / np.maximum(self.count[at], TINY), 0.0)
        self.above[at] = np.where(ready, np.maximum(self.above[at] + gap - self.drift, 0.0), self.above[at])
        self.below[at] = np.where(ready, np.maximum(self.below[at] - gap - self.drift, 0.0), self.below[at])
        self.count[at] += ~ready
        self.total[at] += np.where(ready, 0.0, sample)
        alarm = ready & (np.maximum(self.above[at], self.below[at]) >= self.threshold)
        if alarm.any():
            forgotten = (rows[alarm], rounds.arm[alarm])
            statistics = [self.pulls, self.value, self.weight, self.count, self.total, self.above, self.below]
            for statistic in statistics + ([self.seconds, self.longest] if self.objective == "time" else []):
                statistic[forgotten] = 0.0

    def __str__(self) -> str:
        defaults = {"warm": 50.0, "drift": 0.1, "threshold": 10.0, "epsilon": 0.05, "xi": 0.6}
        changed = {name: getattr(self, name) for name, default in defaults.items() if getattr(self, name) != default}
        return self.spec("change-ucb", reward=self.reward.name, **changed)
