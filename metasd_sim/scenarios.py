"""The environments of `metasd-sim simulate`: its options, and the one that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .costs import CostModel
from .environments import (
    DomainEnvironment,
    DriftingEnvironment,
    Environment,
    LostFeedback,
    NoisyFeedback,
    PiecewiseEnvironment,
    StationaryEnvironment,
    SwitchingCost,
    staying,
)
from .environments.laws import OVERLAPS, draft_lengths
from .errors import InputError

ENVIRONMENTS = ("stationary", "piecewise", "drift", "domains")
# options that only some environments take; None means that the option was not given
_APPLIES = {
    "segment_tokens": ("piecewise", "drift"),
    "cycle": ("piecewise", "drift"),
    "every": ("drift",),
    "queries": ("domains",),
    "query_tokens": ("domains",),
    "stay": ("domains",),
    "feature_noise": ("domains",),
    "carry_over": ("domains",),
}


def add_options(
    command: argparse.ArgumentParser,
    numbers: Callable[[str], list[float]],
    integers: Callable[[str], list[int]],
) -> None:
    add = command.add_argument
    add("--environment", choices=ENVIRONMENTS, help="(default: stationary for one --arms, else piecewise)")
    add("--overlaps", choices=OVERLAPS, default="beta", help="law of the overlaps")
    add("--concentration", type=float, help="c of Beta(c a, c (1 - a)) overlaps (default: 5)")
    add("--decay", type=float, help="factor on an arm's rate at each further depth of a block")
    add("--silent", type=numbers, metavar="P[,P...]", help="chance that a round proposes nothing, one or one per arm")
    add("--block-correlation", type=float, metavar="P", help="chance that a block's overlaps are one draw")
    add("--arm-correlation", type=float, metavar="P", help="chance that all arms' overlaps come from common draws")
    add("--draft-cost", type=numbers, metavar="A,B,...", help="seconds per drafted token, one per arm: adds time")
    add("--verify-cost", type=float, help="seconds of a target pass (default: 1)")
    add("--verify-token-cost", type=float, help="seconds more per drafted token (default: 0)")
    add("--catch-up-cost", type=float, help="seconds per token missed by an idle drafter (default: 0)")
    add("--segment-tokens", type=integers, metavar="N[,N...]", help="tokens per segment, or between knots of a drift "
        "(default: 1000); the last segment goes on for ever")  # fmt: skip
    add("--cycle", action="store_true", default=None, help="the first segment follows the last")
    add("--every", type=int, metavar="N", help="tokens between two changes of a drift (default: 16)")
    add("--queries", type=int, metavar="N", help="domains: prompts per stream (default: 50)")
    add("--query-tokens", type=int, metavar="N", help="domains: tokens per prompt (default: 200)")
    add(
        "--stay", type=float, metavar="P", help="domains: chance that the next prompt has the same task (default: even)"
    )
    add("--feature-noise", type=float, metavar="SD", help="domains: noise on the task in the features (default: 0.5)")
    add("--carry-over", help="domains: none, keep or discount:SHARE at each new prompt (default: none)")
    add(
        "--noise",
        type=float,
        metavar="P",
        help="chance that the policy is shown a random accepted count; not so "
        "where it reads the overlaps of verified positions (bd-verified), which tell the count",
    )
    add("--overlap-noise", type=float, metavar="SD", help="Gaussian noise on the overlaps that the policy is shown")
    add("--lost", type=float, metavar="P", help="chance that the policy learns nothing of a round")
    add("--switch-cost", type=float, metavar="S", help="seconds for each change of the arm; needs --draft-cost")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _costs(options: argparse.Namespace, arms: int) -> CostModel | None:
    rates = _given(verify=options.verify_cost, verify_token=options.verify_token_cost, catch_up=options.catch_up_cost)
    draft = options.draft_cost
    if draft is None:
        if rates:
            raise InputError(
                "--draft-cost: expected it beside the other costs, found none; give 0 for each free drafter"
            )
        if options.switch_cost is not None:
            raise InputError("--switch-cost: expected --draft-cost beside it, found none; give 0 for each free drafter")
        return None
    if len(draft) != arms:
        raise InputError(f"--draft-cost: expected {arms} numbers, one per arm; found {len(draft)}")
    return CostModel.linear(draft, max(options.draft_length), **rates)


def build(options: argparse.Namespace) -> Environment:
    """The environment that the options describe; refuses those that it would not look at."""
    rates = [[float(text) for text in texts] for texts in options.arms]
    kind = options.environment or ("stationary" if len(rates) == 1 else "piecewise")
    for name, kinds in _APPLIES.items():
        if getattr(options, name) is not None and kind not in kinds:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option}: expected --environment {' or '.join(kinds)}, found {kind}; leave it out")
    if options.concentration is not None and options.overlaps != "beta":
        raise InputError(f"--concentration: expected --overlaps beta beside it, found {options.overlaps}; leave it out")
    for row in rates[1:]:
        if len(row) != len(rates[0]):
            raise InputError(f"--arms: expected {len(rates[0])} rates in each list, found {len(row)}")
    if kind == "stationary" and len(rates) > 1:
        raise InputError(f"--arms: expected one list for --environment stationary, found {len(rates)}")
    lengths = options.draft_length
    draft_lengths(lengths[0] if len(lengths) == 1 else lengths, len(rates[0]))  # before costs are made of them
    common: dict[str, Any] = {
        "draft_length": lengths[0] if len(lengths) == 1 else lengths,
        "overlaps": options.overlaps,
        "costs": _costs(options, len(rates[0])),
        **_given(
            concentration=options.concentration,
            decay=options.decay,
            silent=options.silent[0] if options.silent and len(options.silent) == 1 else options.silent,
            block_correlation=options.block_correlation,
            arm_correlation=options.arm_correlation,
        ),
    }
    segments = options.segment_tokens
    tokens = segments[0] if segments and len(segments) == 1 else segments
    environment: Environment
    if kind == "stationary":
        environment = StationaryEnvironment(rates[0], **common)
    elif kind == "piecewise":
        environment = PiecewiseEnvironment(rates, **_given(tokens=tokens, cycle=options.cycle), **common)
    elif kind == "drift":
        if isinstance(tokens, list):
            raise InputError(f"--segment-tokens: expected one number for --environment drift, found {len(tokens)}")
        chosen = _given(tokens=tokens, every=options.every, cycle=options.cycle)
        environment = DriftingEnvironment(rates, **chosen, **common)
    else:
        chosen = _given(
            query_tokens=options.query_tokens,
            queries=options.queries,
            transition=None if options.stay is None else staying(len(rates), options.stay),
            feature_noise=options.feature_noise,
        )
        environment = DomainEnvironment(rates, **chosen, **common)
    if options.noise is not None or options.overlap_noise is not None:
        environment = NoisyFeedback(environment, options.noise or 0.0, options.overlap_noise or 0.0)
    if options.lost is not None:
        environment = LostFeedback(environment, options.lost)
    if options.switch_cost is not None:
        environment = SwitchingCost(environment, options.switch_cost)
    return environment
