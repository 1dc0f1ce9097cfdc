"""Policies: rules that choose the arm of each round. One line here makes a policy known by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from inspect import signature

from ..environments.base import SCOPES
from ..errors import InputError
from ..quoting import split_parts, unquote
from ..rewards import REWARDS, make_reward
from .base import IndexPolicy, Policy, argmax_random
from .changing import ChangeUCB, DiscountedUCB, SlidingWindowUCB
from .contextual import LinUCB, Router, RouterWeights, fit_router
from .elimination import ExploreThenCommit, SequentialHalving
from .exponential import Exp3, Exp3IX, Exp3Spec
from .fixed import FixedArm, RandomArm, RoundRobin
from .full_information import Hedge, NormalHedge
from .greedy import EpsilonGreedy
from .kl_ucb import KLUCBOverlap, KLUCBTrials
from .oracle import Oracle
from .thompson import ThompsonOverlap, ThompsonTrials
from .ucb import MOSS, UCBV, MetaSDUCB, TapOut, UCB1Tuned, UCBSpec

POLICIES: dict[str, Callable[..., Policy]] = {
    "metasd-ucb": MetaSDUCB,
    "ucb1-tuned": UCB1Tuned,
    "ucb-v": UCBV,
    "moss": MOSS,
    "ucb-spec": UCBSpec,
    "tapout": TapOut,
    "kl-ucb-trials": KLUCBTrials,
    "kl-ucb-overlap": KLUCBOverlap,
    "thompson-trials": ThompsonTrials,
    "thompson-overlap": ThompsonOverlap,
    "epsilon-greedy": EpsilonGreedy,
    "exp3": Exp3,
    "exp3-spec": Exp3Spec,
    "exp3-ix": Exp3IX,
    "hedge": Hedge,
    "normal-hedge": NormalHedge,
    "sequential-halving": SequentialHalving,
    "explore-then-commit": ExploreThenCommit,
    "sw-ucb": SlidingWindowUCB,
    "d-ucb": DiscountedUCB,
    "change-ucb": ChangeUCB,
    "lin-ucb": LinUCB,
    "router": Router,
    "oracle": Oracle,
    "round-robin": RoundRobin,
    "random": RandomArm,
    "fixed": FixedArm,
}


def _find_arm(text: str, arms: Sequence[str], drafters: Sequence[str]) -> str | int:
    """An arm by its name, else its drafter, with or without @length, else its index, also as `#INDEX`.

    Of a bare index the arm's name, since in results the index might be taken for another arm's name.
    """
    if text in arms:
        return text
    for known in (list(drafters), [re.sub(r"@\d+$", "", drafter) for drafter in drafters]):
        if known.count(text) == 1:
            return arms[known.index(text)]
    if text.isdecimal() and int(text) < len(arms):
        return arms[int(text)]
    if text.startswith("#") and text[1:].isdecimal() and (not arms or int(text[1:]) < len(arms)):
        return int(text[1:])
    raise InputError(
        f"fixed: expected one of the arms {', '.join(arms)}, or an index below {len(arms)}; found {text!r}"
    )


def make_policy(spec: str, reward: str | None = None, arms: Sequence[str] = (), drafters: Sequence[str] = ()) -> Policy:
    """A policy from `NAME` or `NAME:key=value,...`, e.g. `metasd-ucb:reward=bd,beta=0.5`; `fixed:ARM` takes an arm.

    A value with a comma, a quote or one parenthesis goes in quotes: `router:weights="a,b.json"`.
    `reward` is the default of policies that take one (`be` if None).
    """
    name, colon, rest = spec.partition(":")
    if name not in POLICIES:
        raise InputError(f"policy: expected one of {', '.join(POLICIES)}; found {name!r}")
    if name == "fixed":
        return FixedArm(_find_arm(rest, arms, drafters))
    if colon and not rest:
        raise InputError(f"policy: expected key=value,... after {name}:, found nothing; leave the colon out")
    known = signature(POLICIES[name]).parameters
    options: dict[str, object] = {}
    for part in split_parts(rest, "policy") if rest else []:
        key, equals, value = part.partition("=")
        if not equals and part and (positional := getattr(POLICIES[name], "positional", None)):
            key, equals, value = positional, "=", part  # `oracle:query` is `oracle:scope=query`
        if key not in known or not equals:
            expected = ", ".join(f"{k}=..." for k in known) or "no parameters"
            raise InputError(
                f"policy: expected {expected} after {name}: and found {part!r}; a value with a comma goes in quotes"
            )
        if key in options:
            raise InputError(f"policy: expected each parameter of {name} once, found {key} twice")
        value = unquote(value)
        if key == "reward":
            options[key] = make_reward(value)
            continue
        if "str" in str(known[key].annotation):
            options[key] = value
            continue
        try:
            options[key] = float(value)
        except ValueError:
            raise InputError(f"policy: expected a number for {key} of {name}, found {value!r}") from None
    if "reward" in known and "reward" not in options:
        options["reward"] = make_reward(reward or "be")
    return POLICIES[name](**options)


def check_reward(reward: str | None, policies: Sequence[Policy]) -> None:
    """Refuses a default reward that none of the policies takes."""
    used = {own.name for policy in policies if (own := getattr(policy, "reward", None)) is not None}
    if reward is not None and reward not in used:
        raise InputError(f"reward: expected a policy that takes {reward}, found none; leave it out")


def policy_specs(
    spec: str,
    arms: Sequence[str],
    gives: frozenset[str],
    reward: str | None = None,
    scopes: Sequence[str] = SCOPES,
) -> list[str]:
    """`spec` itself, or for `all` every policy that an environment with these arms and signals can feed.

    `scopes`: those in which the environment's oracles differ. A router needs a file, so `all` has none.
    """
    if spec != "all":
        return [spec]
    if reward is not None:
        make_reward(reward)
    specs = [f"fixed:{arm}" for arm in arms]
    for name in POLICIES:
        if name in ("fixed", "router"):
            continue
        variants = [f"{name}:reward={r}" for r in REWARDS] if name == "metasd-ucb" and reward is None else [name]
        if name == "oracle":
            variants = [str(Oracle(scope)) for scope in scopes]
        specs += [variant for variant in variants if _can_feed(variant, reward, gives)]
    return specs


def _can_feed(spec: str, reward: str | None, gives: frozenset[str]) -> bool:
    try:
        return make_policy(spec, reward).needs <= gives
    except InputError:  # a policy that refuses this reward, tokens per second for one that wants [0, 1]
        return False


__all__ = [
    "MOSS",
    "POLICIES",
    "UCBV",
    "ChangeUCB",
    "DiscountedUCB",
    "EpsilonGreedy",
    "Exp3",
    "Exp3IX",
    "Exp3Spec",
    "ExploreThenCommit",
    "FixedArm",
    "Hedge",
    "IndexPolicy",
    "KLUCBOverlap",
    "KLUCBTrials",
    "LinUCB",
    "MetaSDUCB",
    "NormalHedge",
    "Oracle",
    "Policy",
    "RandomArm",
    "RoundRobin",
    "Router",
    "RouterWeights",
    "SequentialHalving",
    "SlidingWindowUCB",
    "TapOut",
    "ThompsonOverlap",
    "ThompsonTrials",
    "UCB1Tuned",
    "UCBSpec",
    "argmax_random",
    "check_reward",
    "fit_router",
    "make_policy",
    "policy_specs",
]
