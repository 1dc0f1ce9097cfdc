"""Synthetic rounds from a stated law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincinv

from .. import acceptance
from ..costs import CostModel, RoundClock
from ..errors import InputError
from ..rounds import BoolArray, FloatArray, IntArray, Rounds, view_of
from .base import BLOCK_OVERLAP, EVERY_ARM, OVERLAP, SECONDS, Context, FixedArms

OVERLAPS = ("beta", "bernoulli", "constant")
_ATOMS = 1024


def beta_atoms(mean: float, concentration: float, atoms: int = _ATOMS) -> FloatArray:
    """`atoms` equally likely values whose mean is exactly `mean`: the conditional means of
    Beta(c mean, c (1 - mean)) between its quantiles. Its variance is short by that within a cell only.

    One table look-up draws an overlap: fast, and one uniform a draw, so that rows do not disturb each other.
    """
    if mean in (0.0, 1.0):
        return np.full(atoms, mean)
    a, b = concentration * mean, concentration * (1 - mean)
    level = np.linspace(0, 1, atoms + 1)
    edge, from_one = betaincinv(a, b, level), betaincinv(b, a, 1 - level)  # x and 1 - x: each keeps its digits near 0
    # E[X; X <= x] = mean I_x(a + 1, b); above 1/2 from E[1 - X; X > x] = (1 - mean) I_{1-x}(b + 1, a)
    above = mean - (1 - level) + (1 - mean) * betainc(b + 1, a, from_one)
    return np.clip(np.diff(np.where(edge < 0.5, mean * betainc(a + 1, b, edge), above)) * atoms, 0.0, 1.0)


def expected_rounds(law: FloatArray, budgets: IntArray) -> FloatArray:
    """`E tau(B) = 1 + sum_n P(N = n) E tau(B - n - 1)`, and 0 for B <= 0; law [gamma + 1], budgets [b] -> [b].

    One step of the recurrence is a matrix without negative entries: its powers lose no digits to cancellation,
    and a long budget takes neither time nor memory.
    """
    depth = len(law)
    step = np.eye(depth + 1, k=-1)  # acts on (E tau(B), ..., E tau(B - gamma), 1)
    step[0], step[-1] = [*law, 1.0], [*np.zeros(depth), 1.0]
    state, reached = np.eye(depth + 1)[-1], 0
    rounds = np.empty(len(budgets))
    for b in np.argsort(budgets):
        state = np.linalg.matrix_power(step, int(budgets[b]) - reached) @ state
        rounds[b], reached = state[0], int(budgets[b])
    return rounds


class StationaryEnvironment:
    """Arms whose overlaps are i.i.d. with mean `alpha`; given the overlaps, acceptances are independent Bernoulli.

    overlaps: "beta" (Beta(c alpha, c (1 - alpha)), c = `concentration`), "bernoulli" (0 or 1) or "constant".
    `draft_length` is one for all arms or one each. With `costs` it gives seconds.
    """

    queries = 1
    endless = True

    def __init__(
        self,
        alphas: ArrayLike,
        draft_length: int | Sequence[int] = 5,
        overlaps: str = "beta",
        concentration: float = 5.0,
        costs: CostModel | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.alphas = np.atleast_1d(acceptance.check(alphas, 1))  # [arms]
        if self.alphas.ndim != 1 or not self.alphas.size:
            raise InputError(f"alphas: expected one acceptance rate per arm, found shape {list(self.alphas.shape)}")
        lengths = np.asarray(draft_length)
        if lengths.shape not in ((), self.alphas.shape) or not np.all(np.isfinite(lengths) & (lengths >= 1)):
            lengths = np.zeros(1)  # refused below
        self.draft_lengths = np.broadcast_to(lengths, self.alphas.shape).astype(np.int64)  # [arms]
        if np.any(self.draft_lengths < 1) or np.any(self.draft_lengths != lengths):
            raise InputError(
                f"draft_length: expected 1 or more tokens, one number or one per arm; found {draft_length}"
            )
        if overlaps not in OVERLAPS:
            raise InputError(f"overlaps: expected one of {', '.join(OVERLAPS)}; found {overlaps!r}")
        if not (np.isfinite(concentration) and concentration > 0):
            raise InputError(f"concentration: expected a finite number above 0, found {concentration}")
        self.arms = tuple(names) if names is not None else _names([f"{alpha:g}" for alpha in self.alphas])
        if len(self.arms) != len(self.alphas) or len(set(self.arms)) != len(self.arms):
            raise InputError(f"names: expected {len(self.alphas)} different names, found {', '.join(self.arms)}")
        self.max_draft = int(self.draft_lengths.max())
        if costs is not None and costs.draft.shape != (len(self.arms), self.max_draft + 1):
            shape = [len(self.arms), self.max_draft + 1]
            raise InputError(f"costs: expected draft of shape {shape}, found {list(costs.draft.shape)}")
        self.overlaps, self.concentration, self.costs = overlaps, concentration, costs
        self.gives = frozenset({OVERLAP, BLOCK_OVERLAP, EVERY_ARM} | ({SECONDS} if costs else set()))
        drafted = np.arange(1, self.max_draft + 1) <= self.draft_lengths[:, None]  # [arms, max_draft]
        self._drafted = drafted
        with np.errstate(divide="ignore"):
            self._scale = 1 / np.maximum(
                -np.log(self.alphas), 1e-300
            )  # at alpha = 1 so large that every draft is accepted
        self._survival = np.where(drafted, self.alphas[:, None] ** np.arange(1, self.max_draft + 1), 0.0)

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self.done: BoolArray = np.zeros(rows, dtype=bool)
        self._rng, self._rows = rng, rows
        self._needs = needs
        self._with_overlaps = bool(needs & {OVERLAP, BLOCK_OVERLAP, EVERY_ARM})
        self._fresh = np.ones(rows, dtype=bool)
        self._position = np.zeros(rows, dtype=np.int64)
        self._clock = None if self.costs is None else RoundClock(self.costs, rows)
        if self._with_overlaps and self.overlaps == "beta":
            self._atoms = np.stack([beta_atoms(alpha, self.concentration) for alpha in self.alphas])

    def observe(self, rows: IntArray) -> Context:
        view = view_of(rows, self._rows)
        context = Context(query=np.zeros(len(rows), dtype=np.int64), new_query=self._fresh[view].copy())
        self._fresh[view] = False
        return context

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        # draws for the whole batch: a row's luck does not depend on which others still run
        drafted = self.draft_lengths[arms]
        overlap = every_arm = None
        if self._with_overlaps:
            uniform = self._rng.random(self._rows)[rows, None]
            if EVERY_ARM in self._needs:
                every_arm = self._draw_overlaps(rows, np.arange(len(self.arms))[None, :], self.max_draft + 1)
                overlap = every_arm[np.arange(len(rows)), arms, : self.max_draft].copy()
            else:
                overlap = self._draw_overlaps(rows, arms[:, None], self.max_draft)[:, 0]
            hidden = ~self._drafted[arms]
            overlap[hidden] = 0.0
            accepted = np.count_nonzero(uniform < np.cumprod(overlap, axis=1), axis=1)
            if BLOCK_OVERLAP not in self._needs:
                hidden |= np.arange(self.max_draft) > accepted[:, None]
            overlap[hidden] = np.nan
            if every_arm is not None:
                every_arm[np.arange(self.max_draft + 1) > np.broadcast_to(accepted[:, None, None], every_arm.shape)] = (
                    np.nan
                )
        else:
            # P(E / -ln alpha >= k) = alpha^k for a standard exponential E
            exponential = self._rng.standard_exponential(self._rows)[view_of(rows, self._rows)]
            accepted = np.minimum(exponential * self._scale[arms], drafted).astype(np.int64)
        emitted = accepted + 1
        seconds = None
        if self._clock is not None:
            position = self._position[rows]
            seconds = self._clock.seconds(rows, arms, drafted, position, emitted, every_arm is not None)
            self._position[rows] = position + emitted
        if not self._needs & {OVERLAP, BLOCK_OVERLAP}:
            overlap = None
        return Rounds(arms, drafted, accepted, emitted, self.max_draft, seconds, overlap, every_arm)

    def _draw_overlaps(self, rows: IntArray, arms: IntArray, positions: int) -> FloatArray:
        """arms [n, k] (or [1, k] for all rows) -> [n, k, positions]."""
        shape = (self._rows, arms.shape[1], positions)
        alpha = np.broadcast_to(self.alphas[arms][:, :, None], (len(rows), *shape[1:]))
        if self.overlaps == "constant":
            return alpha.copy()
        uniform = self._rng.random(shape)[rows]
        if self.overlaps == "bernoulli":
            return (uniform < alpha).astype(float)
        return self._atoms[arms[:, :, None], (uniform * _ATOMS).astype(np.int64)]

    def tokens_per_round(self) -> FloatArray:
        """g_i of each arm; [arms]."""
        return 1.0 + self._survival.sum(axis=1)

    def fixed_arms(self, budgets: IntArray) -> FixedArms:
        laws = [acceptance.pmf(alpha, int(gamma)) for alpha, gamma in zip(self.alphas, self.draft_lengths, strict=True)]
        rounds = np.stack([expected_rounds(law, budgets) for law in laws], axis=1)
        seconds = plain = None
        if self.costs is not None:
            arms = np.arange(len(self.arms))
            seconds = rounds * self.costs.seconds(arms, self.draft_lengths)  # Wald
            plain = self.costs.plain
        return FixedArms(rounds, seconds, self.tokens_per_round(), plain=plain)


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    """Different names: repeated texts are numbered, `0.5#1`, `0.5#2`."""
    seen: dict[str, int] = {}
    names = []
    for text in texts:
        seen[text] = seen.get(text, 0) + 1
        names.append(f"{text}#{seen[text]}" if texts.count(text) > 1 else text)
    return tuple(names)
