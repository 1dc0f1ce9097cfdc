"""Policies that read features of the prompt: LinUCB, and a classifier that routes whole queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_softmax

from ..environments.base import FEATURES, OBJECTIVES, Context
from ..errors import InputError
from ..files import read_json, read_text
from ..rewards import Reward
from ..rounds import BoolArray, FloatArray, IntArray, Rounds
from .base import IndexPolicy, argmax_random, policy_spec

RIDGE = 0.1


def _with_constant(features: FloatArray | None) -> FloatArray:
    """[n, d] -> [n, d + 1], a 1 last."""
    if features is None:
        raise InputError("features: expected those of the prompts, found none; use a trace that has them")
    return np.column_stack([features, np.ones(len(features))])


class LinUCB(IndexPolicy):
    """`theta_i.x + alpha sqrt(x' A_i^-1 x)`, `A_i = ridge I + sum x x'`, `b_i = sum r x`, `theta_i = A_i^-1 b_i`.

    Li et al. (2010), disjoint arms; x are the features and a 1, r = value / weight of a round; no arm is forced first.
    Features are constant within a query, so it can learn from one query for another only with carry-over keep or
    discount (which scales `A_i - ridge I` and `b_i`); with none each query starts afresh and x says nothing.
    With the objective "time" an arm's pace comes from its rounds, so each arm is played once first.
    """

    play_each_first = False

    def __init__(self, reward: Reward, alpha: float = 1.0, ridge: float = 1.0, objective: str = "rounds") -> None:
        super().__init__(reward, objective)
        if not (np.isfinite(alpha) and alpha >= 0):
            raise InputError(f"alpha: expected a finite number, 0 or larger; found {alpha}")
        if not (np.isfinite(ridge) and ridge > 0):
            raise InputError(f"ridge: expected a finite number above 0, found {ridge}")
        if reward.range[1] == np.inf:  # alpha has the reward's unit, and a mean of per-round rates ranks arms wrongly
            raise InputError(
                f"reward: expected one in [0, 1], found {reward.name}; lin-ucb has objective=time for rates"
            )
        self.alpha, self.ridge = alpha, ridge
        self.needs = self.needs | {FEATURES}

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        super().start(rows, arms, max_draft, rng, horizon)
        self.x: FloatArray | None = None  # [rows, d + 1] of each row's present query

    def _open(self, size: int) -> FloatArray:
        """The statistics, once the number of features is known; returns the empty `x`."""
        shape = (*self.pulls.shape, size, size)
        self.gram = np.broadcast_to(self.ridge * np.eye(size), shape).copy()  # [rows, arms, d + 1, d + 1] A
        self.inverse = np.broadcast_to(np.eye(size) / self.ridge, shape).copy()  # of A
        self.response = np.zeros(shape[:-1])  # [rows, arms, d + 1] b
        return np.zeros((len(self.pulls), size))

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        super().restart(rows, keep)
        if self.x is None or keep == 1:
            return
        prior = self.ridge * np.eye(self.x.shape[1])
        self.gram[rows] = prior + keep * (self.gram[rows] - prior)
        self.inverse[rows] = np.linalg.inv(self.gram[rows]) if keep else np.eye(len(prior)) / self.ridge
        self.response[rows] *= keep

    def select(self, rows: IntArray, context: Context) -> IntArray:
        x = _with_constant(context.features)
        if self.x is None:
            self.x = self._open(x.shape[1])
        self.x[rows] = x
        return super().select(rows, context)

    def index(self, rows: IntArray | slice) -> FloatArray:
        assert self.x is not None
        x = self.x[rows]
        spread = np.einsum("naij,nj->nai", self.inverse[rows], x)  # A^-1 x
        mean = np.einsum("nai,nai->na", spread, self.response[rows])
        return mean + self.alpha * np.sqrt(np.maximum(np.einsum("nai,ni->na", spread, x), 0.0))

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        super().update(rows, rounds)
        assert self.x is not None
        value, weight = self.reward(rounds)
        x, at = self.x[rows], (rows, rounds.arm)
        spread = np.einsum("nij,nj->ni", self.inverse[at], x)
        self.gram[at] += x[:, :, None] * x[:, None, :]
        # (A + x x')^-1 = A^-1 - A^-1 x x' A^-1 / (1 + x' A^-1 x)
        scale = 1 + np.einsum("ni,ni->n", spread, x)
        self.inverse[at] -= spread[:, :, None] * spread[:, None, :] / scale[:, None, None]
        self.response[at] += (value / weight)[:, None] * x

    def __str__(self) -> str:
        options = {"alpha": self.alpha, "ridge": self.ridge}
        return self.spec("lin-ucb", reward=self.reward.name, **{k: v for k, v in options.items() if v != 1})


@dataclass(frozen=True)
class RouterWeights:
    """What `train-router` writes: scores of arms by name, from features and a 1."""

    arms: tuple[str, ...]
    weights: FloatArray  # [arms, d + 1]
    objective: str = "rounds"
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = all(isinstance(arm, str) for arm in self.arms)
        if not named or len(set(self.arms)) != len(self.arms):
            raise InputError(f"router: expected different names of arms, found {list(self.arms)}; train it again")
        if self.objective not in OBJECTIVES:
            raise InputError(f"router: expected an objective of {', '.join(OBJECTIVES)}; found {self.objective!r}")
        if not isinstance(self.provenance, dict):
            raise InputError(f"router: expected a mapping as provenance, found {self.provenance!r}; train it again")
        if self.weights.ndim != 2 or len(self.weights) != len(self.arms) or not np.isfinite(self.weights).all():
            raise InputError(
                f"router: expected finite weights [{len(self.arms)} arms, features + 1], "
                f"found shape {list(self.weights.shape)}; train it again"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"arms": list(self.arms), "weights": self.weights.tolist()}

    @classmethod
    def read(cls, path: str) -> RouterWeights:
        try:
            record = read_json(read_text(path))
            weights = np.asarray(record["weights"], dtype=float)
            return cls(tuple(record["arms"]), weights, record["objective"], record["provenance"])
        except OSError as error:
            raise InputError(f"{path}: expected a file of router weights, found {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: expected JSON of metasd-sim train-router, found a damaged or other file ({error})"
            ) from None


class Router:
    """`argmax_i w_i.x`, x = features and a 1: one arm for a whole query, from a classifier trained before.

    weights: a file of `train-router`, a RouterWeights, or [arms, d + 1] in the environment's order. By name a router
    may know more arms than the environment has, not fewer. Where its arm is not eligible, the best one that is.
    """

    def __init__(self, weights: str | RouterWeights | ArrayLike | None = None) -> None:
        if weights is None:
            raise InputError(
                "router: expected weights=FILE, found none; metasd-sim train-router TRACE --out FILE writes one"
            )
        self.path = weights if isinstance(weights, str) else None
        self.needs = frozenset({FEATURES})
        if isinstance(weights, str):
            weights = RouterWeights.read(weights)
        if isinstance(weights, RouterWeights):
            self.known: tuple[str, ...] | None = weights.arms
            self.all_weights = weights.weights
        else:
            self.known, self.all_weights = None, np.asarray(weights, dtype=float)  # [arms, d + 1]

    def start(
        self, rows: int, arms: Sequence[str], max_draft: int, rng: np.random.Generator, horizon: int | None = None
    ) -> None:
        known = self.known if self.known is not None else tuple(arms)
        missing = [arm for arm in arms if arm not in known]
        if missing or len(self.all_weights) != len(known):
            found = f"{', '.join(missing)} beside them" if missing else f"the {len(arms)} arms {', '.join(arms)}"
            expected = ", ".join(known) if missing else f"{len(self.all_weights)} arms"
            raise InputError(f"router: expected the arms it was trained for, {expected}; found {found}; train it anew")
        self.weights = self.all_weights[[known.index(arm) for arm in arms]]
        self.rng = rng
        self.uniform = rng.random(rows)  # [rows] breaks ties, the same way throughout a query

    def restart(self, rows: IntArray, keep: float = 0.0, horizon: IntArray | None = None) -> None:
        if keep < 1:
            self.uniform[rows] = self.rng.random(len(self.uniform))[rows]

    def select(self, rows: IntArray, context: Context) -> IntArray:
        x = _with_constant(context.features)
        if x.shape[1] != self.weights.shape[1]:
            raise InputError(
                f"router: expected {self.weights.shape[1] - 1} features, found {x.shape[1] - 1}; train it anew"
            )
        # einsum, not a matrix product: a row's sums must not depend on how many rows there are
        score = np.einsum("nd,ad->na", x, self.weights)
        if context.eligible is not None:
            score = np.where(context.eligible, score, -np.inf)
        return argmax_random(score, self.uniform[rows])

    def update(self, rows: IntArray, rounds: Rounds) -> None:
        pass

    def __str__(self) -> str:
        return policy_spec("router", weights=self.path)


def best_arms(cost: FloatArray) -> BoolArray:
    """Arms with the least rounds or seconds of each query, and those as good; [queries, arms]."""
    return cost <= cost.min(axis=1, keepdims=True) * (1 + 1e-12)


def fit_router(features: FloatArray, cost: FloatArray, ridge: float = RIDGE) -> FloatArray:
    """Multinomial logistic regression on the best arm: `min -mean_q log softmax(W x_q)[best] + ridge/2 |W|^2`.

    features [queries, d], cost [queries, arms] in rounds or seconds -> weights [arms, d + 1]. Arms that are equally
    good share a query. Features are standardised inside, the penalty spares the constant, and the weights apply to
    features as they are. Of .001 to 1 the default ridge did best on the shipped traces, out of fold and in rounds.
    """
    from scipy.optimize import minimize  # here, since few need it

    features, cost = np.asarray(features, dtype=float), np.asarray(cost, dtype=float)
    if features.ndim != 2 or cost.ndim != 2 or not 1 <= len(features) == len(cost):
        raise InputError(
            f"router: expected features [queries, d] and rounds or seconds [queries, arms] of the same queries, "
            f"found shapes {list(features.shape)} and {list(cost.shape)}"
        )
    if not (np.isfinite(ridge) and ridge > 0):
        raise InputError(f"ridge: expected a finite number above 0, found {ridge}")
    mean, scale = features.mean(axis=0), features.std(axis=0)
    scale = np.where(scale > 1e-12, scale, np.inf)  # a constant says nothing: weight 0
    x = np.column_stack([(features - mean) / scale, np.ones(len(features))])
    best = best_arms(cost)
    target = best / best.sum(axis=1, keepdims=True)  # [queries, arms]
    shape = (cost.shape[1], x.shape[1])
    penalised = np.append(np.full(features.shape[1], ridge), 1e-6)  # the constant's: only so that a minimum exists

    def loss(flat: FloatArray) -> tuple[float, FloatArray]:
        weights = flat.reshape(shape)
        log_law = log_softmax(x @ weights.T, axis=1)
        slope = (np.exp(log_law) - target).T @ x / len(x) + penalised * weights
        value = -(target * log_law).sum() / len(x) + 0.5 * (penalised * weights**2).sum()
        return float(value), slope.ravel()

    found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 2000})
    weights = found.x.reshape(shape)
    slopes = weights[:, :-1] / scale
    return np.column_stack([slopes, weights[:, -1] - slopes @ mean])


@dataclass(frozen=True)
class RouterScore:
    """A router on queries that it was not trained on, beside what it competes with; costs in rounds or seconds."""

    accuracy: float  # share of queries whose best arm, or one as good, it names
    most_frequent: float  # the same, for always naming the arm that is best most often (in the other folds)
    routed: float
    best_fixed: float  # of the arm with the least total (in the other folds)
    oracle: float  # the best arm of each query


def cross_validate(
    features: FloatArray, cost: FloatArray, folds: int, rng: np.random.Generator, ridge: float = RIDGE
) -> RouterScore:
    """`folds`-fold over queries, in random order: every query is judged by what the other folds taught."""
    queries = len(features)
    if not 2 <= folds <= queries:
        raise InputError(f"folds: expected 2 to {queries}, the number of queries; found {folds}")
    best = best_arms(cost)
    routed, frequent, fixed = (np.zeros(queries, dtype=np.int64) for _ in range(3))
    fold = rng.permutation(np.arange(queries) % folds)
    for k in range(folds):
        test, train = fold == k, fold != k
        weights = fit_router(features[train], cost[train], ridge)
        routed[test] = (_with_constant(features[test]) @ weights.T).argmax(axis=1)
        frequent[test] = best[train].sum(axis=0).argmax()
        fixed[test] = cost[train].sum(axis=0).argmin()
    at = np.arange(queries)
    return RouterScore(
        accuracy=float(best[at, routed].mean()),
        most_frequent=float(best[at, frequent].mean()),
        routed=float(cost[at, routed].sum()),
        best_fixed=float(cost[at, fixed].sum()),
        oracle=float(cost.min(axis=1).sum()),
    )
