"""Synthetic rounds of drafters that are categorical laws, from which stop rules and ensembles follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import softmax

from .. import acceptance, stop_rules
from ..arms import DerivedArm, derive_costs, parse_specs
from ..costs import CostModel, RoundClock
from ..errors import InputError
from ..rounds import BoolArray, FloatArray, IntArray, Rounds
from .base import (
    BLOCK_OVERLAP,
    EVERY_ARM,
    OBJECTIVES,
    OVERLAP,
    SCOPES,
    SECONDS,
    TRUTH,
    Context,
    FixedArms,
    StreamTruth,
)
from .laws import draft_lengths


class CategoricalEnvironment(StreamTruth):
    """Every position draws one of C equally likely contexts; there the target has the law `p[c]`, drafter i `q_i[c]`.

    `arms` are texts as in `metasd_sim.arms`: `A`, `A@3`, `A?adaedl=0.4`, `ensemble(A,B)?entropy=1`, `none`; by default
    each drafter. With the overlap `beta_c = sum_x min(p, q)` and `go_c` whether the arm's rule lets it draft,
    `P(N >= k) = (mean_c go_c beta_c)^k` and `P(drafted >= k) = (mean_c go_c)^k` up to the arm's length: drafts go on
    past a rejection until the rule stops them. All arms share a position's context. In full information an arm scores
    `go_c beta_c`, whatever its draft length, as in replay: products over positions are chances of acceptance.

        CategoricalEnvironment.random({"A": 0.5, "B": 1.0}, ["A@2", "A@8", "A?entropy=1", "ensemble(A,B)", "none"])

    p [C, vocabulary]; laws: name -> [C, vocabulary]; `costs` are those of the drafters, in the order of `laws`.
    """

    queries = 1
    endless = True

    def __init__(
        self,
        p: ArrayLike,
        laws: Mapping[str, ArrayLike],
        arms: Sequence[str] | None = None,
        draft_length: int = 5,
        costs: CostModel | None = None,
    ) -> None:
        target, names = _check_law("p", p), tuple(laws)
        drafters = [_check_law(name, law, target.shape) for name, law in laws.items()]
        specs = parse_specs(list(names) if arms is None else arms, names)
        if not (isinstance(draft_length, int | np.integer) and draft_length >= 1):
            raise InputError(f"draft_length: expected a whole number of 1 or more, found {draft_length}")
        draft_lengths(max([draft_length, *(spec.length or 0 for spec in specs)]), 1)
        self.arms = tuple(spec.text for spec in specs)
        self.draft_lengths = np.array([(s.length or draft_length) if s.drafters else 0 for s in specs])  # [arms]
        self.max_draft = max(1, int(self.draft_lengths.max()))
        self.beta = np.zeros((len(target), len(specs)))  # [contexts, arms] overlaps
        self.go = np.zeros(self.beta.shape, dtype=bool)  # [contexts, arms] whether the rule lets the arm draft
        for a, spec in enumerate(specs):
            if spec.drafters:
                q = np.mean([drafters[names.index(name)] for name in spec.drafters], axis=0)
                self.beta[:, a] = np.minimum(np.minimum(target, q).sum(axis=1), 1.0)
                self.go[:, a] = _goes_on(spec, q)
        self.costs = None if costs is None else _costs(costs, specs, names, self.max_draft)
        self.gives = frozenset({OVERLAP, BLOCK_OVERLAP, EVERY_ARM, TRUTH} | ({SECONDS} if costs else set()))
        self.rates = (self.go * self.beta).mean(axis=0)  # [arms] chance that a further token is drafted and accepted
        self.go_rates = self.go.mean(axis=0)  # [arms] chance that a further token is drafted

    @classmethod
    def random(
        cls,
        noise: Mapping[str, float],
        arms: Sequence[str] | None = None,
        draft_length: int = 5,
        costs: CostModel | None = None,
        contexts: int = 2048,
        vocabulary: int = 32,
        sharpness: tuple[float, float] = (1.0, 6.0),
        seed: int = 0,
    ) -> CategoricalEnvironment:
        """`p = softmax(s z)`, `q_i = softmax(s z + noise_i e_i)`: standard normal z, e_i; s uniform in `sharpness`.

        A larger sharpness makes surer targets, on which a drafter's noise does less harm: some contexts are easy.
        """
        if contexts < 1 or vocabulary < 1 or not 0 <= sharpness[0] <= sharpness[1] < np.inf:
            raise InputError(
                f"contexts, vocabulary, sharpness: expected 1 or more, 1 or more, and a range from 0 up; "
                f"found {contexts}, {vocabulary}, {sharpness}"
            )
        if not all(np.isfinite(scale) and scale >= 0 for scale in noise.values()):
            raise InputError(f"noise: expected finite scales of 0 or more, found {dict(noise)}")
        rng = np.random.default_rng(seed)
        logits = rng.uniform(*sharpness, (contexts, 1)) * rng.normal(size=(contexts, vocabulary))
        laws = {name: softmax(logits + scale * rng.normal(size=logits.shape), 1) for name, scale in noise.items()}
        return cls(softmax(logits, axis=1), laws, arms, draft_length, costs)

    def reset(self, rows: int, rng: np.random.Generator, needs: frozenset[str]) -> None:
        self.done: BoolArray = np.zeros(rows, dtype=bool)
        self._rng, self._rows, self._needs = rng, rows, needs
        self._fresh = np.ones(rows, dtype=bool)
        self._position = np.zeros(rows, dtype=np.int64)
        self._clock = None if self.costs is None else RoundClock(self.costs, rows)

    def observe(self, rows: IntArray) -> Context:
        fresh = self._fresh[rows]
        self._fresh[rows] = False
        n = len(rows)
        return Context(
            np.zeros(n, dtype=np.int64), fresh, truth=lambda scope, objective: self._truth(n, objective, scope)
        )

    def _truth(self, rows: int, objective: str, scope: str) -> FloatArray:
        """Tokens per round or per second, [rows, arms]; rounds are i.i.d.: scopes differ by a stream's budget alone."""
        if scope not in SCOPES or objective not in OBJECTIVES:
            raise InputError(
                f"truth: expected one of {', '.join(SCOPES)} and of {', '.join(OBJECTIVES)}, found {scope}, {objective}"
            )
        value = self.tokens_per_round()
        if objective == "time":
            if self.costs is None:
                raise InputError(
                    "truth: expected costs with the objective time, found none; give the environment costs"
                )
            value = value / self.seconds_per_round()
        if scope == "stream" and self.horizon is not None:
            value = self.stream_truth(objective, self.horizon)
        return np.tile(value, (rows, 1))

    def step(self, rows: IntArray, arms: IntArray) -> Rounds:
        # draws for the whole batch: a row's luck does not depend on which others still run
        draws = self._rng.random((self._rows, self.max_draft + 2))[rows]
        uniform, contexts = draws[:, 0], (draws[:, 1:] * len(self.beta)).astype(np.int64)  # [n], [n, max_draft + 1]
        depth = np.arange(self.max_draft)
        go = self.go[contexts[:, :-1], arms[:, None]] & (depth < self.draft_lengths[arms, None])
        drafted = np.cumprod(go, axis=1).sum(axis=1)
        beta = self.beta[contexts[:, :-1], arms[:, None]]  # [n, max_draft]
        accepted = np.count_nonzero(uniform[:, None] < np.cumprod(go * beta, axis=1), axis=1)
        emitted = accepted + 1
        overlap = every_arm = seconds = None
        if self._needs & {OVERLAP, BLOCK_OVERLAP}:
            last = drafted if BLOCK_OVERLAP in self._needs else np.minimum(drafted, emitted)
            overlap = np.where(depth < last[:, None], beta, np.nan)
        if EVERY_ARM in self._needs:
            scores = (self.go * self.beta)[contexts].transpose(0, 2, 1)  # [n, arms, max_draft + 1]
            every_arm = np.where(np.arange(self.max_draft + 1) < emitted[:, None, None], scores, np.nan)
        if self._clock is not None:
            position = self._position[rows]
            seconds = self._clock.seconds(rows, arms, drafted, position, emitted, every_arm is not None)
            self._position[rows] = position + emitted
        return Rounds(arms, drafted, accepted, emitted, self.max_draft, seconds, overlap, every_arm)

    def tokens_per_round(self) -> FloatArray:
        """`g_i = 1 + sum_{k=1..length} (mean_c go_c beta_c)^k`; [arms]."""
        return 1.0 + _survival(self.rates, self.draft_lengths, self.max_draft).sum(axis=1)

    def seconds_per_round(self) -> FloatArray:
        """`sum_d P(drafted = d) seconds(d)` of each arm that is current; [arms]."""
        if self.costs is None:
            raise InputError("costs: expected a cost model, found none; give the environment costs")
        at_least = _survival(self.go_rates, self.draft_lengths, self.max_draft)
        law = np.concatenate([np.ones((len(at_least), 1)), at_least], axis=1)
        law[:, :-1] -= at_least  # [arms, max_draft + 1] P(drafted = d)
        arm, drafted = np.ogrid[: len(law), : law.shape[1]]
        return np.asarray((law * self.costs.seconds(arm, drafted)).sum(axis=1))

    def fixed_arms(self, budgets: IntArray) -> FixedArms:
        """E tau(B) = 1 + sum_n P(N = n) E tau(B - n - 1), solved as a linear recurrence in B; seconds by Wald."""
        from scipy.signal import lfilter  # here, since its import takes half a second

        longest, at = int(np.max(budgets)), np.asarray(budgets) - 1
        rounds = np.empty((len(at), len(self.arms)))
        for arm, (rate, length) in enumerate(zip(self.rates, self.draft_lengths, strict=True)):
            law = acceptance.pmf(rate, int(length)) if length else np.ones(1)
            rounds[:, arm] = lfilter([1.0], np.concatenate([[1.0], -law]), np.ones(longest))[at]
        if self.costs is None:
            return FixedArms(rounds, tokens_per_round=self.tokens_per_round())
        seconds = rounds * self.seconds_per_round()
        return FixedArms(rounds, seconds, self.tokens_per_round(), plain=self.costs.plain)


def _survival(rates: FloatArray, lengths: IntArray, max_draft: int) -> FloatArray:
    """`rate^k` for k = 1..length, 0 beyond; [arms, max_draft]."""
    depth = np.arange(1, max_draft + 1)
    return np.where(depth <= lengths[:, None], rates[:, None] ** depth, 0.0)


def _goes_on(spec: DerivedArm, q: FloatArray) -> BoolArray:
    if spec.rule is None:
        return np.ones(len(q), dtype=bool)
    return spec.rule(stop_rules.entropy(q), stop_rules.top_probability(q), stop_rules.margin(q))


def _costs(costs: CostModel, specs: Sequence[DerivedArm], names: Sequence[str], max_draft: int) -> CostModel:
    if len(costs.draft) != len(names) or costs.draft.shape[1] <= max_draft:
        raise InputError(
            f"costs: expected draft of shape [{len(names)}, {max_draft + 1}] or wider, a row for each drafter; "
            f"found {list(costs.draft.shape)}"
        )
    return derive_costs(costs, specs, names, max_draft)


def _check_law(name: str, law: ArrayLike, shape: tuple[int, ...] | None = None) -> FloatArray:
    q = np.asarray(law, dtype=float)
    if q.ndim != 2 or not q.size or (shape is not None and q.shape != shape):
        wanted = "[contexts, vocabulary]" if shape is None else list(shape)
        raise InputError(f"{name}: expected probabilities of shape {wanted}, found {list(q.shape)}")
    if not (np.all(q >= 0) and np.allclose(q.sum(axis=1), 1.0, atol=1e-9)):
        raise InputError(f"{name}: expected each context's probabilities to sum to 1, found {q.sum(axis=1).min():g}")
    return q
