"""Thompson sampling."""

from __future__ import annotations

import numpy as np
from scipy.special import betaincinv, gammaincinv

from ..errors import InputError
from ..rewards import AcceptanceTrials, Reward, VerifiedFractions
from ..rounds import FloatArray, IntArray
from .base import TINY, IndexPolicy, active


def gamma_draws(shape: FloatArray, normal: FloatArray, uniform: FloatArray) -> FloatArray:
    """Gamma(shape, 1), shape >= 1: `d v` with `v = (1 + x / sqrt(9 d))^3`, `d = shape - 1/3`, from one normal `x`.

    Marsaglia, Tsang (2000) accept it with probability `A = exp(x^2 / 2 + d (1 - v + ln v))`, at least .95 on average,
    else try again. Here the uniform u of the test, which given a rejection is uniform on (A, 1), gives an exact draw by
    the inverse of the law instead: no draw needs another, and an entry depends on its own numbers alone.
    Arrays of one shape.
    """
    d = shape - 1.0 / 3.0
    root = np.sqrt(9.0 * d)
    np.divide(normal, root, out=root)
    root += 1.0
    draw = root * root
    draw *= root  # v
    # u < 1 - .0331 x^4 < A spares most of the logarithms (v > 0 there)
    fourth = normal * normal
    fourth *= fourth
    fourth *= 0.0331
    fourth += uniform
    doubt = np.flatnonzero(fourth >= 1.0)
    x, u, scale, v = (array.reshape(-1)[doubt] for array in (normal, uniform, d, draw))
    draw *= d
    accept = np.where(v > 0, np.exp(0.5 * x * x + scale * (1.0 - v + np.log(np.maximum(v, TINY)))), 0.0)
    again = np.flatnonzero(u >= accept)
    if again.size:
        level = (u[again] - accept[again]) / (1.0 - accept[again])
        draw.reshape(-1)[doubt[again]] = gammaincinv(shape.reshape(-1)[doubt[again]], level)
    return draw


class Thompson(IndexPolicy):
    """A draw of each arm's Beta(prior_a + successes, prior_b + failures); the largest plays. Thompson (1933).

    With a uniform prior by default, which stands in for the first pulls: no arm is forced.
    """

    name: str
    play_each_first = False

    def __init__(self, reward: Reward, prior_a: float, prior_b: float, objective: str) -> None:
        super().__init__(reward, objective)
        for name, value in (("prior_a", prior_a), ("prior_b", prior_b)):
            if not (np.isfinite(value) and value > 0):
                raise InputError(f"{name}: expected a finite number above 0, found {value}")
        self.prior = (prior_a, prior_b)

    def index(self, rows: IntArray | slice) -> FloatArray:
        total, arms = self.pulls.shape
        # draws of the whole batch: a row's luck does not depend on which others still run
        normal, uniform = self.rng.standard_normal((2, arms, total)), self.rng.random((2, arms, total))
        if not isinstance(rows, slice):
            normal, uniform = normal[:, :, rows], uniform[:, :, rows]
        value, weight = active(self.value, rows).T, active(self.weight, rows).T
        shape = np.empty(normal.shape)  # [2, arms, n]
        np.add(value, self.prior[0], out=shape[0])
        # recorded overlaps may be rounded up to a little more than 1
        np.add(np.maximum(weight - value, 0.0), self.prior[1], out=shape[1])
        below = min(self.prior) < 1
        draws = gamma_draws(np.maximum(shape, 1.0) if below else shape, normal, uniform)
        theta = draws[0] / (draws[0] + draws[1])
        if below:
            small = (shape < 1).any(axis=0)
            theta[small] = betaincinv(shape[0][small], shape[1][small], uniform[0][small])
        return theta.T

    def __str__(self) -> str:
        a, b = self.prior
        uniform = a == b == 1
        return self.spec(self.name, prior_a=None if uniform else a, prior_b=None if uniform else b)


class ThompsonTrials(Thompson):
    """Thompson sampling on acceptance trials: each accept or reject bit is a Bernoulli sample."""

    name = "thompson-trials"

    def __init__(self, prior_a: float = 1.0, prior_b: float = 1.0, objective: str = "rounds") -> None:
        super().__init__(AcceptanceTrials(), prior_a, prior_b, objective)


class ThompsonOverlap(Thompson):
    """A draw of Beta(prior_a + sum beta_j, prior_b + sum (1 - beta_j)), over verified positions; the largest plays.

    An overlap counts as a fraction of a success, not as the toss of a coin (Agrawal, Goyal 2012), whose noise would
    only be added: the posterior has the width of tosses, wider than that of overlaps, whose variance is smaller.
    """

    name = "thompson-overlap"

    def __init__(self, prior_a: float = 1.0, prior_b: float = 1.0, objective: str = "rounds") -> None:
        super().__init__(VerifiedFractions(self.name), prior_a, prior_b, objective)
