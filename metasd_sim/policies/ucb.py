"""Upper confidence bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import InputError
from ..rewards import Reward
from ..rounds import FloatArray, IntArray
from .base import IndexPolicy, active


class MetaSDUCB(IndexPolicy):
    """`mu_i + beta sqrt(2 ln t / n_i)`: MetaSD-UCB (MetaSD, arXiv 2604.05417, Algorithm 2), UCB1 with a free `beta`.

    `t` is the number of the round about to be played, `n_i` the pulls, or the weights of a reward that counts
    several samples a round. The paper leaves `beta` free; the default `2 sigma` of the reward is the smallest that
    its regret bound allows (1 for block efficiency and trials, 1 / sqrt gamma for block divergence).
    A reward without a sigma has its estimates divided by the row's largest, and `beta = 0.5`: no bound is claimed.
    """

    def __init__(self, reward: Reward, beta: float | None = None, objective: str = "rounds") -> None:
        super().__init__(reward, objective)
        if beta is not None and not (np.isfinite(beta) and beta >= 0):
            raise InputError(f"beta: expected a finite number, 0 or larger; found {beta}")
        self.beta = beta

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        super().start(rows, arms, max_draft, rng, horizon)
        sigma = self.reward.sigma(max_draft)
        default = 0.5 if sigma is None else 2 * sigma
        self.width = default if self.beta is None else self.beta

    def index(self, rows: IntArray | slice) -> FloatArray:
        mean, samples = self.estimates(rows)
        log_t = np.log(active(self.pulls, rows).sum(axis=1) + 1)
        width = self.width * np.sqrt(2 * log_t)  # [n]
        mean += width[:, None] / np.sqrt(samples)
        return mean

    def __str__(self) -> str:
        return self.spec("metasd-ucb", reward=self.reward.name, beta=self.beta)
