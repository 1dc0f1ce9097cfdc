"""Policies: rules that choose the arm of each round. One line here makes a policy known by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature

from ..errors import InputError
from ..rewards import REWARDS, make_reward
from .base import IndexPolicy, Policy, argmax_random
from .fixed import FixedArm, RandomArm
from .full_information import Hedge
from .kl_ucb import KLUCBOverlap, KLUCBTrials
from .thompson import ThompsonOverlap, ThompsonTrials
from .ucb import MOSS, UCBV, MetaSDUCB, TapOut, UCB1Tuned, UCBSpec

POLICIES: dict[str, Callable[..., Policy]] = {
    "metasd-ucb": MetaSDUCB,
    "kl-ucb-trials": KLUCBTrials,
    "thompson-trials": ThompsonTrials,
    "hedge": Hedge,
    "random": RandomArm,
    "fixed": FixedArm,
    "ucb1-tuned": UCB1Tuned,
    "ucb-v": UCBV,
    "moss": MOSS,
    "kl-ucb-overlap": KLUCBOverlap,
    "thompson-overlap": ThompsonOverlap,
    "ucb-spec": UCBSpec,
    "tapout": TapOut,
}


def _find_arm(text: str, arms: Sequence[str], drafters: Sequence[str]) -> str | int:
    """An arm's name, else its drafter, else its index."""
    if text in arms:
        return text
    if drafters.count(text) == 1:
        return arms[drafters.index(text)]
    if text.isdecimal() and int(text) < len(arms):
        return int(text)
    raise InputError(
        f"fixed: expected one of the arms {', '.join(arms)}, or an index below {len(arms)}; found {text!r}"
    )


def make_policy(spec: str, reward: str | None = None, arms: Sequence[str] = (), drafters: Sequence[str] = ()) -> Policy:
    """A policy from `NAME` or `NAME:key=value,...`, e.g. `metasd-ucb:reward=bd,beta=0.5`; `fixed:ARM` takes an arm.

    `reward` is the default of policies that take one (`be` if None).
    """
    name, _, rest = spec.partition(":")
    if name not in POLICIES:
        raise InputError(f"policy: expected one of {', '.join(POLICIES)}; found {name!r}")
    if name == "fixed":
        return FixedArm(_find_arm(rest, arms, drafters))
    known = signature(POLICIES[name]).parameters
    options: dict[str, object] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals and part and (positional := getattr(POLICIES[name], "positional", None)):
            key, equals, value = positional, "=", part  # `oracle:query` is `oracle:scope=query`
        if key not in known or not equals:
            expected = ", ".join(f"{k}=..." for k in known) or "no parameters"
            raise InputError(f"policy: expected {expected} after {name}: and found {part!r}")
        if key in options:
            raise InputError(f"policy: expected each parameter of {name} once, found {key} twice")
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


def policy_specs(spec: str, arms: Sequence[str], gives: frozenset[str], reward: str | None = None) -> list[str]:
    """`spec` itself, or for `all` every policy that an environment with these arms and signals can feed."""
    if spec != "all":
        return [spec]
    specs = [f"fixed:{arm}" for arm in arms]
    for name in POLICIES:
        if name == "fixed" or reward in getattr(POLICIES[name], "refused_rewards", ()):
            continue
        variants = [f"{name}:reward={r}" for r in REWARDS] if name == "metasd-ucb" and reward is None else [name]
        specs += [variant for variant in variants if make_policy(variant, reward, arms).needs <= gives]
    return specs


__all__ = [
    "MOSS",
    "POLICIES",
    "UCBV",
    "FixedArm",
    "Hedge",
    "IndexPolicy",
    "KLUCBOverlap",
    "KLUCBTrials",
    "MetaSDUCB",
    "Policy",
    "RandomArm",
    "TapOut",
    "ThompsonOverlap",
    "ThompsonTrials",
    "UCB1Tuned",
    "UCBSpec",
    "argmax_random",
    "check_reward",
    "make_policy",
    "policy_specs",
]
