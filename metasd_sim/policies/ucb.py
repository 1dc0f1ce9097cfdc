"""Upper confidence bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import InputError
from ..rewards import BlendedAcceptance, Reward, TokensPerRound
from ..rounds import FloatArray, IntArray, Rounds
from .base import TINY, IndexPolicy, active


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
        with np.errstate(over="ignore"):  # past the largest number all arms are explored alike
            width = self.width * np.sqrt(2 * log_t)  # [n]
            mean += width[:, None] / np.sqrt(samples)
        return mean

    def __str__(self) -> str:
        return self.spec("metasd-ucb", reward=self.reward.name, beta=self.beta)


class VarianceUCB(IndexPolicy):
    """What the rules that estimate a variance share: the sum of the samples' squares beside the sums of the reward.

    `V_i = (sum of squares) / n_i - mu_i^2`, with `n_i` the pulls, or the weights of a reward that counts several
    samples a round: bits for trials, overlaps for verified block divergence.
    """

    name: str
    refused_rewards: tuple[str, ...] = ("tokens-per-second",)  # its weights are seconds, not samples with a variance

    def __init__(self, reward: Reward, objective: str = "rounds") -> None:
        super().__init__(reward, objective)
        if reward.name in self.refused_rewards:
            raise InputError(
                f"reward: expected one with samples in [0, 1] for {self.name}, found {reward.name}; "
                "objective=time with another reward counts seconds"
            )

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        super().start(rows, arms, max_draft, rng, horizon)
        self.squares = np.zeros((rows, len(arms)), order="F")  # [rows, arms]

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        super().restart(rows, keep, horizon)
        self.squares[rows] *= keep

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        super().update(rows, rounds)
        if self.reward.name == "trials":  # bits are their own squares
            squares = rounds.accepted.astype(float)
        elif self.reward.name == "bd-verified":
            assert rounds.overlap is not None
            squares, _ = self.reward(replace(rounds, overlap=rounds.overlap**2))
        else:  # one sample a round
            squares = self.reward(rounds)[0] ** 2
        self.squares.T.reshape(-1)[rounds.arm * len(self.pulls) + rows] += squares

    def variance(self, view: IntArray | slice, mean: FloatArray, samples: FloatArray) -> FloatArray:
        """V_i; [n, arms]."""
        return np.maximum(self.squares[view] / samples - mean**2, 0.0)

    def __str__(self) -> str:
        return self.spec(self.name, reward=self.reward.name)


class UCB1Tuned(VarianceUCB):
    """`mu_i + sqrt((ln t / n_i) min(1/4, V_i + sqrt(2 ln t / n_i)))`: UCB1-Tuned (Auer, Cesa-Bianchi, Fischer 2002).

    1/4 is the largest variance of a sample in [0, 1], `sigma^2`; that of block divergence is 1 / (4 gamma).
    """

    name = "ucb1-tuned"

    def index(self, rows: IntArray | slice) -> FloatArray:
        mean, samples = self.estimates(rows)
        log_t = np.log(self.pulls[rows].sum(axis=1) + 1)[:, None]
        largest = (self.reward.sigma(self.max_draft) or 0.5) ** 2
        spread = self.variance(rows, mean, samples) + np.sqrt(2 * log_t / samples)
        return mean + np.sqrt(log_t / samples * np.minimum(largest, spread))


class UCBV(VarianceUCB):
    """`mu_i + sqrt(2 zeta V_i ln t / n_i) + 3 c zeta ln t / n_i`: UCB-V (Audibert, Munos, Szepesvari 2009), range 1.

    Its proof wants zeta > 1 with c = 1; the paper's corollary takes 1.2 and 1, the defaults.
    """

    name = "ucb-v"

    def __init__(self, reward: Reward, zeta: float = 1.2, c: float = 1.0, objective: str = "rounds") -> None:
        super().__init__(reward, objective)
        for name, value in (("zeta", zeta), ("c", c)):
            if not (np.isfinite(value) and value >= 0):
                raise InputError(f"{name}: expected a finite number, 0 or larger; found {value}")
        self.zeta, self.c = zeta, c

    def index(self, rows: IntArray | slice) -> FloatArray:
        mean, samples = self.estimates(rows)
        share = self.zeta * np.log(self.pulls[rows].sum(axis=1) + 1)[:, None] / samples
        return mean + np.sqrt(2 * self.variance(rows, mean, samples) * share) + 3 * self.c * share

    def __str__(self) -> str:
        zeta, c = None if self.zeta == 1.2 else self.zeta, None if self.c == 1 else self.c
        return self.spec(self.name, reward=self.reward.name, zeta=zeta, c=c)


class MOSS(IndexPolicy):
    """`mu_i + 2 sigma sqrt(max(0, ln(T / (K n_i))) / n_i)`: MOSS (Audibert, Bubeck 2009), there with sigma = 1/2.

    `T` bounds the samples: a round, and each trial or verified overlap, emits at least one token, so the horizon in
    tokens does. Where it is unknown, or `alpha` is given, MOSS-anytime (Degenne, Perchet 2016) has `T = t`, the samples
    so far and one, and `(1 + alpha) / 2` times the logarithm, alpha 1.35 by default. A reward without a sigma has its
    estimates divided by the row's largest, and 2 sigma = 0.5: no bound is claimed.
    """

    def __init__(self, reward: Reward, alpha: float | None = None, objective: str = "rounds") -> None:
        super().__init__(reward, objective)
        if alpha is not None and not (np.isfinite(alpha) and alpha >= 0):
            raise InputError(f"alpha: expected a finite number, 0 or larger; found {alpha}")
        self.alpha = alpha

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        super().start(rows, arms, max_draft, rng, horizon)
        sigma = self.reward.sigma(max_draft)
        self.width = 0.5 if sigma is None else 2 * sigma
        self.stream = np.inf if horizon is None or self.alpha is not None else float(horizon)
        self.horizon = np.full(rows, self.stream)  # [rows] T, infinite where unknown

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        super().restart(rows, keep, horizon)
        self.horizon[rows] = self.stream
        if horizon is not None and self.alpha is None:  # beside the samples that are kept
            kept = (self.pulls if self.reward.sigma(self.max_draft) is None else self.weight)[rows].sum(axis=1)
            self.horizon[rows] = np.minimum(self.stream, kept + horizon)

    def index(self, rows: IntArray | slice) -> FloatArray:
        mean, samples = self.estimates(rows)
        horizon = self.horizon[rows]
        known = np.isfinite(horizon)
        horizon = np.where(known, horizon, samples.sum(axis=1) + 1)
        factor = np.where(known, 1.0, 0.5 + 0.5 * (1.35 if self.alpha is None else self.alpha))
        surplus = np.maximum(0.0, np.log((horizon / samples.shape[1])[:, None] / samples))
        return mean + self.width * np.sqrt(factor[:, None] * surplus / samples)

    def __str__(self) -> str:
        return self.spec("moss", reward=self.reward.name, alpha=self.alpha)


class UCBSpec(IndexPolicy):
    """`mean Y_i + (L/2) sqrt(((1 + n_i) / n_i^2) (1 + 2 ln(K t^2 sqrt(1 + n_i) / delta)))`: UCBSpec.

    BanditSpec (arXiv 2505.15141): `Y = N + 1` of a round, `L` the environment's longest draft, `n_i` pulls, `t` the
    round about to be played, delta at most 1. Its bound asks for stationary conditional means only.
    """

    def __init__(self, delta: float = 1.0, objective: str = "rounds") -> None:
        super().__init__(TokensPerRound(), objective)
        if not 0 < delta <= 1:
            raise InputError(f"delta: expected a number above 0, at most 1; found {delta}")
        self.delta = delta

    def index(self, rows: IntArray | slice) -> FloatArray:
        n = np.maximum(self.pulls[rows], 1e-100)  # n^2 must not vanish
        t = self.pulls[rows].sum(axis=1)[:, None] + 1
        log = np.log(n.shape[1] * t**2 * np.sqrt(1 + n) / self.delta)
        return self.value[rows] / n + 0.5 * self.max_draft * np.sqrt((1 + n) * (1 + 2 * log)) / n

    def __str__(self) -> str:
        return self.spec("ucb-spec", delta=None if self.delta == 1 else self.delta)


class TapOut(IndexPolicy):
    """`mean r_i + sqrt(2 ln t / n_i)`, UCB1 on `r = blend N / gamma + (1 - blend) N / drafted`: TapOut.

    TapOut (arXiv 2511.02017) chooses among stop rules of one drafter; here any arms, drafters x stop rules among them.
    An objective in time is not offered: the blend does not tell tokens per round where draft lengths vary.
    """

    def __init__(self, blend: float = 0.5) -> None:
        super().__init__(BlendedAcceptance(blend))
        self.blend = blend

    def index(self, rows: IntArray | slice) -> FloatArray:
        mean, pulls = self.estimates(rows)
        log_t = np.log(self.pulls[rows].sum(axis=1) + 1)
        return mean + np.sqrt(2 * log_t[:, None] / np.maximum(pulls, TINY))

    def __str__(self) -> str:
        return self.spec("tapout", blend=None if self.blend == 0.5 else self.blend)
