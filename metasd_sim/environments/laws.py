"""The law of a synthetic round: overlaps of each arm at each depth, and the tokens that they let pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincinv

from ..errors import InputError
from ..rounds import BoolArray, FloatArray, IntArray, view_of
from .base import BLOCK_OVERLAP, EVERY_ARM, OVERLAP

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


def share(name: str, value: ArrayLike) -> FloatArray:
    """`value` as floats; refuses what is not in [0, 1]."""
    array = np.asarray(value, dtype=float)
    if not np.all((array >= 0) & (array <= 1)):
        raise InputError(f"{name}: expected numbers in [0, 1], found {value!r}")
    return array


LONGEST_DRAFT = 1024  # tables hold a number per depth


def draft_lengths(draft_length: ArrayLike, arms: int) -> IntArray:
    """Tokens that each arm drafts, [arms], of one number or one per arm; refuses what is no draft length."""
    lengths = np.asarray(draft_length)
    if lengths.shape not in ((), (arms,)):
        raise InputError(f"draft_length: expected one number or one per arm, {arms} here; found {draft_length!r}")
    known = lengths.dtype.kind in "iuf" and np.all((lengths >= 0) & (lengths <= LONGEST_DRAFT))
    if not known or np.any(lengths != np.floor(lengths)):
        raise InputError(
            f"draft_length: expected whole numbers of tokens, 0 to {LONGEST_DRAFT}; found {draft_length!r}"
        )
    if not lengths.any():
        raise InputError(f"draft_length: expected an arm that drafts 1 token or more, found {draft_length!r}")
    return np.broadcast_to(lengths, arms).astype(np.int64)


class RoundLaw:
    """P(N >= k) = (1 - silent) ((1 - rho) prod_{j<=k} m_j + rho E prod_{j<=k} beta_j(U)), m_j = alpha decay^(j-1).

    alphas [segments, arms]; what else varies, varies by arm only. overlaps: "beta" (Beta(c m, c (1 - m)) with mean m,
    c = `concentration`), "bernoulli" (0 or 1) or "constant". With probability rho = `block_correlation` one uniform U
    makes all overlaps of a block; with `arm_correlation` all arms share their uniforms in a round, which changes the
    law of no arm alone. With probability `silent` a round proposes nothing; draft length 0 is an arm that never does.
    """

    def __init__(
        self,
        alphas: FloatArray,
        draft_length: int | Sequence[int] = 5,
        overlaps: str = "beta",
        concentration: float = 5.0,
        decay: float = 1.0,
        silent: ArrayLike = 0.0,
        block_correlation: float = 0.0,
        arm_correlation: float = 0.0,
    ) -> None:
        arms = alphas.shape[1]
        self.lengths = draft_lengths(draft_length, arms)  # [arms]
        if overlaps not in OVERLAPS:
            raise InputError(f"overlaps: expected one of {', '.join(OVERLAPS)}; found {overlaps!r}")
        if not (np.isfinite(concentration) and concentration > 0):
            raise InputError(f"concentration: expected a finite number above 0, found {concentration}")
        if np.shape(silent) not in ((), (arms,)):
            raise InputError(f"silent: expected one probability or one per arm, found shape {list(np.shape(silent))}")
        self.overlaps, self.concentration = overlaps, concentration
        self.silent = np.broadcast_to(share("silent", silent), arms)  # [arms]
        self.decay = float(share("decay", decay))
        self.block_correlation = float(share("block_correlation", block_correlation))
        self.arm_correlation = float(share("arm_correlation", arm_correlation))
        self.max_draft = int(self.lengths.max())
        self.alphas = np.where(self.lengths > 0, alphas, 0.0)  # [segments, arms]
        depth = np.arange(self.max_draft + 1)
        self._means = (
            self.alphas[:, :, None] * self.decay**depth
        )  # [segments, arms, max_draft + 1], the bonus position too
        self._drafts = depth[:-1] < self.lengths[:, None]  # [arms, max_draft]
        self._atoms: FloatArray | None = None
        self.survival = self._survival()  # [segments, arms, max_draft] P(N >= k)
        self.tokens = 1.0 + self.survival.sum(axis=2)  # [segments, arms] g
        self.is_geometric = self.decay == 1 and not self.silent.any() and self.block_correlation == 0
        with np.errstate(divide="ignore"):  # at alpha = 1 so large that every draft is accepted
            self._scale = 1 / np.maximum(-np.log(self.alphas), 1e-300)

    def _survival(self) -> FloatArray:
        means = self._means[:, :, :-1]
        passed = means.cumprod(axis=2)
        if self.block_correlation:
            together = passed
            if self.overlaps == "bernoulli":
                together = means  # one uniform under the least of decreasing means
            elif self.overlaps == "beta":
                table, index = self._tables()
                together = np.stack([table[i].cumprod(axis=1).mean(axis=2) for i in index[:, :, :-1]])
            passed = (1 - self.block_correlation) * passed + self.block_correlation * together
        return np.where(self._drafts, passed * (1 - self.silent)[:, None], 0.0)

    def _tables(self) -> tuple[FloatArray, IntArray]:
        """Atoms [means, atoms] of the different means, and which one [segments, arms, max_draft + 1] uses."""
        if self._atoms is None:
            different, which = np.unique(self._means, return_inverse=True)
            self._atoms = np.stack([beta_atoms(mean, self.concentration) for mean in different])
            self._which = which.reshape(self._means.shape)
        return self._atoms, self._which

    def pmf(self) -> FloatArray:
        """P(N = n), [segments, arms, max_draft + 1]."""
        one, none = np.ones((*self.alphas.shape, 1)), np.zeros((*self.alphas.shape, 1))
        at_least = np.concatenate([one, self.survival, none], axis=2)
        return at_least[:, :, :-1] - at_least[:, :, 1:]

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self._rows, self._rng = rows, rng
        self._every_arm = EVERY_ARM in needs
        self._with_overlaps = bool(needs & {OVERLAP, BLOCK_OVERLAP, EVERY_ARM})
        if self._with_overlaps and self.overlaps == "beta":
            self._tables()

    def draw(
        self, rows: IntArray, segment: IntArray | int, arms: IntArray
    ) -> tuple[IntArray, IntArray, FloatArray | None, FloatArray | None]:
        """drafted [n], accepted [n], and if asked for overlap [n, max_draft], every_arm [n, arms, max_draft + 1].

        Overlaps are unmasked: what nobody may see of them is for the environment to hide.
        """
        # draws for the whole batch: a row's luck does not depend on which others still run
        drafted = self.lengths[arms]
        if not self._with_overlaps and self.is_geometric:
            # P(E / -ln alpha >= k) = alpha^k for a standard exponential E
            exponential = self._rng.standard_exponential(self._rows)[view_of(rows, self._rows)]
            return drafted, np.minimum(exponential * self._scale[segment, arms], drafted).astype(np.int64), None, None
        uniform = self._rng.random(self._rows)[rows, None]
        if not self._with_overlaps:
            accepted = np.count_nonzero(uniform < self.survival[segment, arms], axis=1)
            return np.where(uniform[:, 0] < 1 - self.silent[arms], drafted, 0), accepted, None, None
        every_arm = None
        if self._every_arm:
            every_arm = self._draw_overlaps(rows, segment, np.arange(len(self.lengths))[None, :], self.max_draft + 1)
            overlap = every_arm[np.arange(len(rows)), arms, : self.max_draft].copy()
        else:
            overlap = self._draw_overlaps(rows, segment, arms[:, None], self.max_draft)[:, 0]
        hidden = ~self._drafts[arms]
        if self.silent.any():
            quiet: BoolArray = self._rng.random((self._rows, len(self.silent)))[rows] < self.silent
            here = quiet[np.arange(len(rows)), arms]
            drafted = np.where(here, 0, drafted)
            hidden = hidden | here[:, None]
            if every_arm is not None:
                every_arm[quiet] = 0.0
        overlap[hidden] = 0.0
        return drafted, np.count_nonzero(uniform < np.cumprod(overlap, axis=1), axis=1), overlap, every_arm

    def _draw_overlaps(self, rows: IntArray, segment: IntArray | int, arms: IntArray, positions: int) -> FloatArray:
        """arms [n, k] (or [1, k] for all rows) -> [n, k, positions]."""
        shape = (self._rows, arms.shape[1], positions)
        depths = np.arange(positions if self.decay < 1 else 1)  # all alike without decay
        of_arm = (np.reshape(segment, (-1, 1, 1)), arms[:, :, None], depths)
        if self.overlaps == "constant":
            return np.broadcast_to(self._means[of_arm], (len(rows), *shape[1:])).copy()
        uniform = self._rng.random(shape)[rows]
        if self.block_correlation:
            one = self._rng.random((*shape[:2], 1))[rows] < self.block_correlation
            uniform = np.where(one, uniform[:, :, :1], uniform)
        if self.arm_correlation and shape[1] > 1:
            # the first arm's uniforms as they are, so that each arm's own law stays what it is
            common = self._rng.random((self._rows, 1, 1))[rows] < self.arm_correlation
            uniform = np.where(common, uniform[:, :1], uniform)
        if self.overlaps == "bernoulli":
            return (uniform < self._means[of_arm]).astype(float)
        atoms, which = self._tables()
        return atoms[which[of_arm], (uniform * _ATOMS).astype(np.int64)]
