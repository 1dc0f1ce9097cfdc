"""Cases and helpers that the simulator's conformance suites share.

A new policy or environment joins every conformance test by one line in `POLICY_CASES` or `ENVIRONMENT_CASES`.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from scipy.stats import norm

from metasd_sim import traces
from metasd_sim.costs import CostModel
from metasd_sim.environments import ReplayEnvironment, StationaryEnvironment
from metasd_sim.environments.base import SIGNALS, Context
from metasd_sim.errors import InputError
from metasd_sim.policies import (
    MOSS,
    UCBV,
    FixedArm,
    Hedge,
    KLUCBOverlap,
    KLUCBTrials,
    MetaSDUCB,
    RandomArm,
    TapOut,
    ThompsonOverlap,
    ThompsonTrials,
    UCB1Tuned,
    UCBSpec,
)
from metasd_sim.rewards import REWARDS, BlockEfficiency, make_reward
from metasd_sim.rounds import Rounds


@dataclass(frozen=True)
class PolicyCase:
    """How to make a policy, and which of the optional promises it gives."""

    make: Callable[[], object]
    learns: bool = True  # beats random play where one arm is far better
    each_once_first: bool = True  # plays each eligible arm once before any twice
    rows_independent: bool = True  # a row's choices do not depend on which other rows still run


@dataclass(frozen=True)
class EnvironmentCase:
    make: Callable[[], object]
    budget: int | None = 60  # tokens of a test run, all of which every stream has; None: the whole stream
    random: bool = True  # rounds depend on the seed; False where arms and text fix them (greedy decoding)


POLICY_CASES = {
    **{f"metasd-ucb:{name}": PolicyCase(partial(MetaSDUCB, reward())) for name, reward in REWARDS.items()},
    "metasd-ucb:be,beta=0.3": PolicyCase(partial(MetaSDUCB, BlockEfficiency(), 0.3)),
    "metasd-ucb:be,time": PolicyCase(partial(MetaSDUCB, BlockEfficiency(), objective="time")),
    "kl-ucb-trials": PolicyCase(KLUCBTrials),
    "kl-ucb-trials:c=3": PolicyCase(partial(KLUCBTrials, 3.0)),
    "kl-ucb-trials:time": PolicyCase(partial(KLUCBTrials, objective="time")),
    "thompson-trials:time": PolicyCase(partial(ThompsonTrials, objective="time"), each_once_first=False),
    "thompson-trials": PolicyCase(ThompsonTrials, each_once_first=False),
    "hedge": PolicyCase(Hedge, each_once_first=False),
    "hedge:eta=0.7": PolicyCase(partial(Hedge, 0.7), each_once_first=False),
    "random": PolicyCase(RandomArm, learns=False, each_once_first=False),
    "fixed:0": PolicyCase(partial(FixedArm, 0), learns=False, each_once_first=False),
    "fixed:2": PolicyCase(partial(FixedArm, 2), learns=False, each_once_first=False),
    **{
        f"{name}:{reward}": PolicyCase(partial(make, make_reward(reward)))
        for name, make in (("ucb1-tuned", UCB1Tuned), ("ucb-v", UCBV), ("moss", MOSS))
        for reward in REWARDS
        if reward not in getattr(make, "refused_rewards", ())
    },
    "ucb1-tuned:be,time": PolicyCase(partial(UCB1Tuned, BlockEfficiency(), "time")),
    "ucb-v:be,zeta=0.3,c=0.1": PolicyCase(partial(UCBV, BlockEfficiency(), 0.3, 0.1)),
    "ucb-v:trials,time": PolicyCase(partial(UCBV, make_reward("trials"), objective="time")),
    "moss:be,alpha=1": PolicyCase(partial(MOSS, BlockEfficiency(), 1.0)),
    "moss:bd,time": PolicyCase(partial(MOSS, make_reward("bd"), objective="time")),
    "kl-ucb-overlap": PolicyCase(KLUCBOverlap),
    "kl-ucb-overlap:c=3": PolicyCase(partial(KLUCBOverlap, 3.0)),
    "kl-ucb-overlap:time": PolicyCase(partial(KLUCBOverlap, objective="time")),
    "thompson-overlap": PolicyCase(ThompsonOverlap, each_once_first=False),
    "thompson-overlap:time": PolicyCase(partial(ThompsonOverlap, objective="time"), each_once_first=False),
    "ucb-spec": PolicyCase(UCBSpec),
    "ucb-spec:delta=0.1": PolicyCase(partial(UCBSpec, 0.1)),
    "ucb-spec:time": PolicyCase(partial(UCBSpec, objective="time")),
    "tapout": PolicyCase(TapOut),
    "tapout:blend=0.9": PolicyCase(partial(TapOut, 0.9)),
}


def _costs(lengths, catch_up=0.0):
    return CostModel.linear([0.05 * (i + 1) for i in range(len(lengths))], max(lengths), 1.0, 0.01, catch_up, 0.02)


def make_trace(lengths=(7, 3, 11), arms=3, depth=4, seed=0, verification="rejection", costs=True) -> traces.Trace:
    """Random acceptance probabilities with everything that the format asks for."""
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths])
    tokens = int(offsets[-1])
    remaining = np.repeat(offsets[1:], lengths) - np.arange(tokens)
    drafted = rng.integers(0, depth + 1, (tokens, arms)).astype(np.uint8)
    real = np.arange(depth) < np.minimum(drafted, remaining[:, None])[:, :, None]
    accept = np.where(real, rng.random((tokens, arms, depth)), 0.0)
    if verification != "rejection":
        accept = (accept > 0.4).astype(np.uint8)
    drawn = np.arange(depth) < drafted[:, :, None]
    return traces.Trace(
        arms=tuple(f"arm{i}" for i in range(arms)),
        drafters=tuple(f"model:{i}" for i in range(arms)),
        queries=tuple(traces.Query(f"q{i}", "ab"[i % 2], "0" * 64, 5) for i in range(len(lengths))),
        verification=verification,
        max_new_tokens=max(lengths),
        tokens=rng.integers(0, 50, tokens).astype(np.int32),
        offsets=offsets,
        accept=accept if verification != "rejection" else accept.astype(np.float32),
        drafted=drafted,
        overlap=np.where(drawn, rng.random(drawn.shape), np.nan).astype(np.float16),
        log_p=np.log(rng.random(tokens)).astype(np.float32),
        costs=CostModel.linear([0.1 * i for i in range(arms)], depth, 1.0, 0.1, 0.02, 0.05) if costs else None,
        provenance={"target": "tiny"},
    )


ENVIRONMENT_CASES = {
    "stationary, beta overlaps": EnvironmentCase(partial(StationaryEnvironment, [0.9, 0.6, 0.3], 4)),
    "stationary, bernoulli overlaps": EnvironmentCase(
        partial(StationaryEnvironment, [0.9, 0.6, 0.3], 4, "bernoulli"),
    ),
    "stationary, constant overlaps": EnvironmentCase(partial(StationaryEnvironment, [0.9, 0.6, 0.3], 4, "constant")),
    "stationary, extreme rates": EnvironmentCase(partial(StationaryEnvironment, [1.0, 0.99, 0.01, 0.0], 3)),
    "stationary, one arm": EnvironmentCase(partial(StationaryEnvironment, [0.7], 1)),
    "stationary, a length per arm": EnvironmentCase(partial(StationaryEnvironment, [0.9, 0.66, 0.5], [2, 6, 1])),
    "stationary, costs": EnvironmentCase(
        partial(StationaryEnvironment, [0.9, 0.66], [2, 6], costs=_costs([2, 6], catch_up=0.01))
    ),
    "replay, rejection": EnvironmentCase(lambda: ReplayEnvironment(make_trace()), budget=None),
    "replay, greedy": EnvironmentCase(
        lambda: ReplayEnvironment(make_trace(verification="greedy")), budget=None, random=False
    ),
    "replay, no costs": EnvironmentCase(lambda: ReplayEnvironment(make_trace(costs=False)), budget=None),
}


@contextmanager
def refuses(*words):
    """The block raises InputError, in one line that contains every one of `words`."""
    with pytest.raises(InputError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def z_limit(tests, family=1e-3):
    """Two-sided limit for `tests` normal statistics, with a chance of `family` that any exceeds it (Bonferroni)."""
    return float(norm.isf(family / (2 * tests)))


def make_rounds(
    arm, accepted, max_draft, drafted=None, emitted=None, overlap=None, seconds=None, every_arm=None, n_arms=3
):
    """A Rounds of plain lists, with everything that a policy may read; full drafts unless told."""
    arm, accepted = np.asarray(arm, dtype=np.int64), np.asarray(accepted, dtype=np.int64)
    n = len(arm)
    if overlap is None:
        overlap = np.where(np.arange(max_draft) < accepted[:, None], 0.8, 0.3)
    if every_arm is None:
        every_arm = np.full((n, n_arms, max_draft + 1), 0.5)
    emitted = accepted + 1 if emitted is None else np.asarray(emitted, dtype=np.int64)
    return Rounds(
        arm,
        np.full(n, max_draft) if drafted is None else np.asarray(drafted, dtype=np.int64),
        accepted,
        emitted,
        max_draft,
        np.full(n, 0.5) if seconds is None else np.asarray(seconds, dtype=float),
        np.asarray(overlap, dtype=float),
        np.where((np.arange(max_draft + 1) < emitted[:, None])[:, None], every_arm, np.nan),
    )


def make_context(n, n_arms, eligible=None, new_query=False):
    """A Context with every signal that a policy may need."""
    return Context(
        query=np.zeros(n, dtype=np.int64),
        new_query=np.full(n, new_query),
        eligible=eligible,
        horizon=np.full(n, 100),
        features=np.full((n, 4), 0.25),
        truth=lambda scope, objective: np.tile(np.linspace(0.2, 0.8, n_arms), (n, 1)),
    )


class Feedback:
    """Common random numbers: what row r would see at its step t from arm a, fixed beforehand."""

    def __init__(self, seed, rows, steps, alphas, max_draft):
        rng = np.random.default_rng(seed)
        alphas = np.asarray(alphas)
        shape = (rows, steps, len(alphas))
        bits = rng.random((*shape, max_draft)) < alphas[:, None]
        self.accepted = np.cumprod(bits, axis=3).sum(axis=3)  # [rows, steps, arms]
        self.overlap = np.clip(alphas[:, None] + rng.uniform(-0.3, 0.3, (*shape, max_draft)), 0, 1)
        self.seconds = rng.uniform(0.5, 1.5, shape)
        self.every_arm = np.clip(alphas[:, None] + rng.uniform(-0.3, 0.3, (*shape, max_draft + 1)), 0, 1)
        self.n_arms, self.max_draft = len(alphas), max_draft

    def __call__(self, rows, steps, arms):
        """Rounds of `rows`, each at its own step."""
        at = (rows, steps, arms)
        return make_rounds(
            arms,
            self.accepted[at],
            self.max_draft,
            overlap=self.overlap[at],
            seconds=self.seconds[at],
            every_arm=self.every_arm[rows, steps],
            n_arms=self.n_arms,
        )


def arm_names(n):
    return tuple(f"arm {i}" for i in range(n))


class GivesEverything:
    """An environment of one constant round that gives all signals but those named."""

    max_draft, queries, endless = 2, 1, True

    def __init__(self, n_arms=3, without=()):
        self.arms = arm_names(n_arms)
        self.gives = SIGNALS - set(without)

    def reset(self, rows, rng, needs):
        self.done = np.zeros(rows, dtype=bool)

    def observe(self, rows):
        return make_context(len(rows), len(self.arms))

    def step(self, rows, arms):
        return make_rounds(arms, np.ones(len(rows)), self.max_draft, n_arms=len(self.arms))

    def fixed_arms(self, budgets):
        return None
