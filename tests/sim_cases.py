"""Cases and helpers that the simulator's conformance suites share.

A new policy or environment joins every conformance test by one line in `POLICY_CASES` or `ENVIRONMENT_CASES`.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from metasd_sim import traces
from metasd_sim.arms import derive
from metasd_sim.costs import CostModel
from metasd_sim.environments import (
    AdversarialEnvironment,
    CategoricalEnvironment,
    DomainEnvironment,
    DriftingEnvironment,
    LostFeedback,
    NoisyFeedback,
    PiecewiseEnvironment,
    ReplayEnvironment,
    StationaryEnvironment,
    SwitchingCost,
    staying,
)
from metasd_sim.environments.base import SIGNALS, Context
from metasd_sim.errors import InputError
from metasd_sim.policies import (
    MOSS,
    UCBV,
    ChangeUCB,
    DiscountedUCB,
    EpsilonGreedy,
    Exp3,
    Exp3IX,
    Exp3Spec,
    ExploreThenCommit,
    FixedArm,
    Hedge,
    KLUCBOverlap,
    KLUCBTrials,
    LinUCB,
    MetaSDUCB,
    NormalHedge,
    Oracle,
    RandomArm,
    RoundRobin,
    Router,
    SequentialHalving,
    SlidingWindowUCB,
    TapOut,
    ThompsonOverlap,
    ThompsonTrials,
    UCB1Tuned,
    UCBSpec,
)
from metasd_sim.rewards import (
    REWARDS,
    AcceptanceTrials,
    BlockDivergence,
    BlockEfficiency,
    TokensPerSecond,
    VerifiedDivergence,
    make_reward,
)
from metasd_sim.rounds import Rounds


@dataclass(frozen=True)
class PolicyCase:
    """How to make a policy, and which of the optional promises it gives."""

    make: Callable[[], object]
    learns: bool = True  # beats random play where one arm is far better
    each_once_first: bool = True  # plays each eligible arm once before any twice
    rows_independent: bool = True  # a row's choices do not depend on which other rows still run
    random: bool = True  # choices depend on the seed
    index_grows: bool = True  # an index policy's index of an arm that does not play grows without end


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
    "lin-ucb": PolicyCase(partial(LinUCB, BlockEfficiency()), each_once_first=False),
    "lin-ucb:trials,time": PolicyCase(partial(LinUCB, REWARDS["trials"](), 0.5, 2.0, "time"), each_once_first=False),
    "router": PolicyCase(
        partial(Router, str(Path(__file__).with_name("router.json"))), learns=False, each_once_first=False, random=False
    ),
    "oracle": PolicyCase(Oracle, each_once_first=False, random=False),
    "oracle:round,time": PolicyCase(partial(Oracle, "round", "time"), each_once_first=False, random=False),
    "exp3": PolicyCase(partial(Exp3, BlockEfficiency()), each_once_first=False),
    "exp3:trials,gamma=0.2": PolicyCase(partial(Exp3, AcceptanceTrials(), 0.2), each_once_first=False),
    "exp3-spec": PolicyCase(Exp3Spec, each_once_first=False),
    "exp3-ix": PolicyCase(partial(Exp3IX, BlockEfficiency()), each_once_first=False),
    "exp3-ix:bd": PolicyCase(partial(Exp3IX, BlockDivergence()), each_once_first=False),
    "hedge:loss=length": PolicyCase(partial(Hedge, loss="length"), each_once_first=False),
    "normal-hedge": PolicyCase(NormalHedge, each_once_first=False),
    "normal-hedge:loss=length": PolicyCase(partial(NormalHedge, "length"), each_once_first=False),
    "sequential-halving": PolicyCase(partial(SequentialHalving, BlockEfficiency()), each_once_first=False),
    "sequential-halving:tokens-per-second": PolicyCase(
        partial(SequentialHalving, TokensPerSecond(), 90.0), each_once_first=False
    ),
    "explore-then-commit": PolicyCase(partial(ExploreThenCommit, BlockEfficiency()), each_once_first=False),
    "explore-then-commit:pulls=3": PolicyCase(
        partial(ExploreThenCommit, AcceptanceTrials(), 3.0), each_once_first=False
    ),
    "sw-ucb": PolicyCase(partial(SlidingWindowUCB, BlockEfficiency())),
    "sw-ucb:window=20": PolicyCase(partial(SlidingWindowUCB, VerifiedDivergence(), 20.0, 0.3), index_grows=False),
    "sw-ucb:time": PolicyCase(partial(SlidingWindowUCB, BlockEfficiency(), 30.0, objective="time"), index_grows=False),
    "sw-ucb:tokens-per-second": PolicyCase(partial(SlidingWindowUCB, TokensPerSecond())),
    "d-ucb": PolicyCase(partial(DiscountedUCB, BlockEfficiency())),
    "d-ucb:trials": PolicyCase(partial(DiscountedUCB, AcceptanceTrials(), 0.97, 0.2)),
    "d-ucb:time": PolicyCase(partial(DiscountedUCB, BlockEfficiency(), objective="time")),
    "change-ucb": PolicyCase(partial(ChangeUCB, BlockEfficiency())),
    "change-ucb:quick": PolicyCase(partial(ChangeUCB, VerifiedDivergence(), 4.0, 0.05, 0.5, 0.1)),
    "change-ucb:time": PolicyCase(partial(ChangeUCB, BlockEfficiency(), 4.0, 0.05, 0.5, objective="time")),
    "round-robin": PolicyCase(RoundRobin, learns=False, each_once_first=False),
    "epsilon-greedy": PolicyCase(partial(EpsilonGreedy, BlockEfficiency()), index_grows=False),
    "epsilon-greedy:decay=5": PolicyCase(partial(EpsilonGreedy, TokensPerSecond(), decay=5.0), index_grows=False),
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
    "replay, features": EnvironmentCase(lambda: ReplayEnvironment(with_features(make_trace())), budget=None),
    "replay, derived arms": EnvironmentCase(
        lambda: ReplayEnvironment(derive(make_trace(), ["arm0@2", "arm1", "none", "arm2@1"])), budget=None
    ),
    "categorical": EnvironmentCase(
        lambda: CategoricalEnvironment.random({"A": 0.5, "B": 1.5}, ["A@2", "A@6?entropy=1", "ensemble(A,B)", "none"])
    ),
    "categorical, costs": EnvironmentCase(
        lambda: CategoricalEnvironment.random(
            {"A": 0.5, "B": 1.5}, ["A", "A?adaedl=0.3", "B?margin=1", "ensemble(A,B)@2"], costs=_costs([5, 5], 0.01)
        )
    ),
    "stationary, decay": EnvironmentCase(partial(StationaryEnvironment, [0.9, 0.6, 0.3], 4, decay=0.8)),
    "stationary, silent and no draft": EnvironmentCase(
        partial(StationaryEnvironment, [0.9, 0.6, 0.3], [4, 2, 0], silent=[0.3, 0, 0], costs=_costs([4, 2, 0], 0.01))
    ),
    "stationary, correlated": EnvironmentCase(
        partial(StationaryEnvironment, [0.9, 0.6, 0.3], 4, block_correlation=0.5, arm_correlation=0.5)
    ),
    "piecewise": EnvironmentCase(
        partial(PiecewiseEnvironment, [[0.9, 0.3], [0.2, 0.8], [0.5, 0.6]], [20, 3, 9], costs=_costs([5, 5], 0.01))
    ),
    "piecewise, cycle of short segments": EnvironmentCase(
        partial(PiecewiseEnvironment, [[0.9, 0.3], [0.2, 0.8]], [2, 5], cycle=True, decay=0.9, silent=0.2)
    ),
    "drifting": EnvironmentCase(partial(DriftingEnvironment, [[0.9, 0.3], [0.2, 0.8]], 40, 8)),
    "drifting, sinusoid": EnvironmentCase(partial(DriftingEnvironment.sinusoid, [0.5, 0.6], 0.4, 40, [0, 0.5], 8)),
    "domains": EnvironmentCase(
        partial(
            DomainEnvironment,
            [[0.9, 0.3], [0.2, 0.8]],
            12,
            5,
            staying(2, 0.8),
            draft_length=4,
            costs=_costs([4, 4], 0.01),
        ),
        budget=None,
    ),
    "domains, no costs": EnvironmentCase(
        partial(DomainEnvironment, [[0.9, 0.3], [0.2, 0.8], [0.5, 0.5]], 3, 20, silent=[0, 0.5]), budget=None
    ),
    "adversarial": EnvironmentCase(partial(AdversarialEnvironment, [[0, 3], [2, 0], [1, 3]], 3), random=False),
    "noisy feedback": EnvironmentCase(
        lambda: NoisyFeedback(StationaryEnvironment([0.9, 0.6, 0.3], 4, costs=_costs([4] * 3)), 0.3, 0.1)
    ),
    "noisy and lost feedback, domains, switching cost": EnvironmentCase(
        lambda: SwitchingCost(
            LostFeedback(
                NoisyFeedback(DomainEnvironment([[0.9, 0.3], [0.2, 0.8]], 12, 5, costs=_costs([5, 5], 0.01)), 0.3, 0.1),
                0.5,
            ),
            0.3,
        ),
        budget=None,
    ),
}


def with_features(trace, seed=0, names=("long", "code")):
    """The same trace with random features of its prompts."""
    features = np.random.default_rng(seed).random((len(trace.queries), len(names))).astype(np.float32)
    return replace(trace, features=features, feature_names=tuple(names))


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
