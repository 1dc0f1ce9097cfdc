"""Alignment feedback: what a round is worth, as `(value, weight)` per row.

The estimate of an arm is the sum of its values over the sum of its weights.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from .environments.base import BLOCK_OVERLAP, OVERLAP, SECONDS
from .errors import InputError
from .rounds import FloatArray, Rounds


@runtime_checkable
class Reward(Protocol):
    """`needs` names the signals it reads, `range` bounds value / weight."""

    name: str
    needs: frozenset[str]
    range: tuple[float, float]

    def __call__(self, rounds: Rounds) -> tuple[FloatArray, FloatArray]: ...

    def sigma(self, max_draft: int) -> float | None:
        """Sub-Gaussian constant per unit of weight, or None where none is known."""

    def tokens(self, estimate: FloatArray, longest: FloatArray, max_draft: int) -> FloatArray:
        """Tokens per round of an arm whose reward is `estimate` and whose longest draft so far is `longest`.

        Under the stationary model; arguments [n, arms]. Increasing in `estimate`, so bounds map to bounds.
        """


def _tokens_of_rate(alpha: FloatArray, length: FloatArray) -> FloatArray:
    """g(alpha) = (1 - alpha^(L+1)) / (1 - alpha) with real lengths, L + 1 at alpha = 1."""
    miss = np.clip(1.0 - alpha, 1e-12, 1.0 - 1e-12)
    return -np.expm1((length + 1.0) * np.log1p(-miss)) / miss


def _tokens_of_trials(estimate: FloatArray, longest: FloatArray, max_draft: int) -> FloatArray:
    """A full draft has alpha as its estimate; a shorter one counts one failure a round: E N / (E N + 1)."""
    short = np.minimum(1.0 / np.maximum(1.0 - np.clip(estimate, 0.0, 1.0), 1e-12), longest + 1.0)
    return np.where(longest < max_draft, short, _tokens_of_rate(estimate, longest))


def _overlap(rounds: Rounds) -> FloatArray:
    if rounds.overlap is None:
        raise InputError("overlap: expected the round's overlaps, found none; use an environment that gives them")
    return np.nan_to_num(rounds.overlap, nan=0.0)


class BlockEfficiency:
    """BE = N / gamma, with gamma the environment's longest draft. In [0, 1], so sigma = 1/2 (Hoeffding)."""

    name = "be"
    needs: frozenset[str] = frozenset()
    range = (0.0, 1.0)

    def __call__(self, rounds: Rounds) -> tuple[FloatArray, FloatArray]:
        return rounds.accepted / rounds.max_draft, np.ones(len(rounds))

    def sigma(self, max_draft: int) -> float:
        return 0.5

    def tokens(self, estimate: FloatArray, longest: FloatArray, max_draft: int) -> FloatArray:
        return 1.0 + max_draft * np.clip(estimate, 0.0, 1.0)


class BlockDivergence:
    """BD = (1/gamma) sum_{j=1..gamma} beta_j over all drafted positions, after a rejection too.

    beta_j = 1 - d_TV(p_j, q_j) is an overlap: higher is better. Positions not drafted count 0.
    sigma = 1 / (2 sqrt gamma), which needs overlaps that are independent within the block.
    """

    name = "bd"
    needs: frozenset[str] = frozenset({BLOCK_OVERLAP})
    range = (0.0, 1.0)

    def __call__(self, rounds: Rounds) -> tuple[FloatArray, FloatArray]:
        return _overlap(rounds).sum(axis=1) / rounds.max_draft, np.ones(len(rounds))

    def sigma(self, max_draft: int) -> float:
        return 0.5 / np.sqrt(max_draft)

    def tokens(self, estimate: FloatArray, longest: FloatArray, max_draft: int) -> FloatArray:
        return _tokens_of_rate(estimate * max_draft / np.maximum(longest, 1.0), longest)


class VerifiedDivergence:
    """`sum_{j=1..m} beta_j` with weight `m`: block divergence over the verified positions only.

    A draft that ends short without a rejection counts its missing token as overlap 0.
    The ratio of sums is biased low for few rounds (THEORY: -.03 after one, alpha .7, gamma 5).
    """

    name = "bd-verified"
    needs: frozenset[str] = frozenset({OVERLAP})
    range = (0.0, 1.0)

    def __call__(self, rounds: Rounds) -> tuple[FloatArray, FloatArray]:
        trials = rounds.trials
        verified = np.arange(rounds.max_draft) < trials[:, None]  # [n, max_draft]
        return (_overlap(rounds) * verified).sum(axis=1), trials.astype(float)

    def sigma(self, max_draft: int) -> float:
        return 0.5

    def tokens(self, estimate: FloatArray, longest: FloatArray, max_draft: int) -> FloatArray:
        return _tokens_of_trials(estimate, longest, max_draft)


class AcceptanceTrials:
    """N successes in m trials: each accept or reject bit is a Bernoulli sample."""

    name = "trials"
    needs: frozenset[str] = frozenset()
    range = (0.0, 1.0)

    def __call__(self, rounds: Rounds) -> tuple[FloatArray, FloatArray]:
        return rounds.accepted.astype(float), rounds.trials.astype(float)

    def sigma(self, max_draft: int) -> float:
        return 0.5

    def tokens(self, estimate: FloatArray, longest: FloatArray, max_draft: int) -> FloatArray:
        return _tokens_of_trials(estimate, longest, max_draft)


class VerifiedFractions(VerifiedDivergence):
    """Verified block divergence where overlaps count as fractions of a success: refuses any outside [0, 1]."""

    def __init__(self, policy: str) -> None:
        self.policy = policy

    def __call__(self, rounds: Rounds) -> tuple[FloatArray, FloatArray]:
        farthest = np.abs(_overlap(rounds) - 0.5).max(initial=0.0)
        if farthest > 0.5 + 1e-6:  # more than a record's rounding
            raise InputError(
                f"overlap: expected numbers in [0, 1] for {self.policy}, found one {farthest - 0.5:g} outside; clip it"
            )
        return super().__call__(rounds)


class TokensPerRound:
    """Y = N + 1. In [1, gamma + 1], so sigma = gamma / 2."""

    name = "tokens"
    needs: frozenset[str] = frozenset()
    range = (1.0, np.inf)

    def __call__(self, rounds: Rounds) -> tuple[FloatArray, FloatArray]:
        return rounds.accepted.astype(float) + 1.0, np.ones(len(rounds))

    def sigma(self, max_draft: int) -> float:
        return max_draft / 2

    def tokens(self, estimate: FloatArray, longest: FloatArray, max_draft: int) -> FloatArray:
        return estimate


class BlendedAcceptance:
    """`blend N / gamma + (1 - blend) N / drafted`, 0 where nothing was drafted: TapOut (arXiv 2511.02017). In [0, 1]"""

    name = "blend"
    needs: frozenset[str] = frozenset()
    range = (0.0, 1.0)

    def __init__(self, blend: float = 0.5) -> None:
        if not 0 <= blend <= 1:
            raise InputError(f"blend: expected a number in [0, 1], found {blend}")
        self.blend = blend

    def __call__(self, rounds: Rounds) -> tuple[FloatArray, FloatArray]:
        rate = rounds.accepted / np.maximum(rounds.drafted, 1)
        return self.blend * rounds.accepted / rounds.max_draft + (1 - self.blend) * rate, np.ones(len(rounds))

    def sigma(self, max_draft: int) -> float:
        return 0.5

    def tokens(self, estimate: FloatArray, longest: FloatArray, max_draft: int) -> FloatArray:
        raise InputError("objective: expected rounds for a blend with the acceptance rate, which is no count of tokens")


class TokensPerSecond:
    """Emitted tokens with the round's seconds as weight, so that the estimate is a rate, not a mean of rates."""

    name = "tokens-per-second"
    needs: frozenset[str] = frozenset({SECONDS})
    range = (0.0, np.inf)

    def __call__(self, rounds: Rounds) -> tuple[FloatArray, FloatArray]:
        if rounds.seconds is None:
            raise InputError("seconds: expected the round's seconds, found none; use an environment with costs")
        return rounds.emitted.astype(float), rounds.seconds

    def sigma(self, max_draft: int) -> None:
        return None

    def tokens(self, estimate: FloatArray, longest: FloatArray, max_draft: int) -> FloatArray:
        raise InputError("objective: expected rounds for the reward tokens-per-second, a rate in time already")


REWARDS: dict[str, type[Reward]] = {
    reward.name: reward
    for reward in (BlockEfficiency, BlockDivergence, VerifiedDivergence, AcceptanceTrials, TokensPerSecond)
}


def make_reward(name: str) -> Reward:
    if name not in REWARDS:
        raise InputError(f"reward: expected one of {', '.join(REWARDS)}; found {name!r}")
    return REWARDS[name]()
