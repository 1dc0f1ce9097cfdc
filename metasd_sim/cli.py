"""`metasd-sim`: simulate, bounds, replay, train-router."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from . import bounds, console, files, scenarios, traces
from .arms import derive
from .environments import Environment, ReplayEnvironment, StationaryEnvironment
from .environments.base import OBJECTIVES, SCOPES
from .errors import InputError
from .policies import RouterWeights, check_reward, fit_router, make_policy, policy_specs
from .policies.contextual import RIDGE, cross_validate
from .regret import comparator
from .rewards import REWARDS, make_reward
from .rounds import FloatArray, IntArray
from .simulate import Outcome, check_budget, simulate
from .summary import model_rates, summarize

CURVE_POINTS = 30
DEFAULT_BUDGET = 10_000


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers separated by commas, found {text!r}") from None


def arm_rates(text: str) -> list[str]:
    numbers(text)
    return [part.strip() for part in text.split(",")]


def integers(text: str) -> list[int]:
    values = numbers(text)
    if not all(value.is_integer() for value in values):  # infinity and NaN are none
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, found {text!r}")
    return [int(value) for value in values]


def figure_path(text: str) -> str:
    if not text.lower().endswith((".png", ".pdf", ".svg")):
        raise argparse.ArgumentTypeError(f"expected a file ending in .png, .pdf or .svg; found {text!r}")
    return text


def save_figure(figure: Any, path: str, force: bool) -> None:
    content = io.BytesIO()
    figure.savefig(content, format=path[-3:].lower(), dpi=120)
    files.write_atomically(path, content.getvalue(), force)


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuses before the work what writing would refuse after it; weights on stdout stand there alone."""
    figure, out = (getattr(arguments, name, None) for name in ("figure", "out"))
    files.check_outputs(arguments.json, figure, out, force=arguments.force)
    arguments.quiet |= out == "-"


def show(records: Sequence[dict[str, Any]], title: str, quiet: bool) -> None:
    """The table of `simulate` and `replay`."""

    def plus_minus(record: dict[str, Any], name: str, digits: int) -> str:
        if record.get(f"{name}_mean") is None:
            return ""
        se = record[f"{name}_se"]
        return f"{record[f'{name}_mean']:.{digits}f}" + ("" if se is None else f" ± {1.96 * se:.{digits}f}")

    def plain(record: dict[str, Any], name: str, digits: int) -> str:
        return "" if record.get(name) is None else f"{record[name]:.{digits}f}"

    timed = any("speedup_mean" in record for record in records)
    bounded = any("upper_bound" in record for record in records)
    several = len({record["budget"] for record in records}) > 1
    segmented = any("segment_regret_mean" in record for record in records)
    # what matters first: a narrow terminal shows the last columns in a block of their own
    columns = ["policy", *(["budget"] if several else [])]
    columns += ["speedup", "regret (s)"] if timed else []
    columns += ["regret", *(["upper bound", "lower bound"] if bounded else [])]
    columns += ["best arm", "rounds", "tokens a round", "switches"]
    columns += ["regret to best of each segment"] if segmented else []
    rows = []
    for record in records:
        row = [record["policy"], *([record["budget"]] if several else [])]
        row += [plus_minus(record, "speedup", 3), plus_minus(record, "seconds_regret", 1)] if timed else []
        row += [plus_minus(record, "regret", 1)]
        row += [plain(record, "upper_bound", 0), plain(record, "lower_bound", 1)] if bounded else []
        row += [f"{record['best_arm_ratio']:.1%}", plain(record, "rounds_mean", 0)]
        row += [plain(record, "tokens_per_round", 3), plain(record, "switches_mean", 0)]
        row += [plain(record, "segment_regret_mean", 1)] if segmented else []
        rows.append(row)
    console.table(title, columns, rows, quiet)


def compare(
    environment: Environment,
    arguments: argparse.Namespace,
    budget: list[int] | None,
    drafters: Sequence[str],
) -> list[tuple[Outcome, list[dict[str, Any]]]]:
    """Every policy asked for on one environment, with the same seed."""
    specs = [
        spec
        for wanted in arguments.policy or ["all"]
        for spec in policy_specs(
            wanted, environment.arms, environment.gives, arguments.reward, getattr(environment, "scopes", SCOPES)
        )
    ]
    policies = [make_policy(spec, arguments.reward, environment.arms, drafters) for spec in dict.fromkeys(specs)]
    check_reward(arguments.reward, policies)
    carry_over = arguments.carry_over or "none"
    results = []
    with console.progress(arguments.quiet) as display:
        for policy in display.track(policies, description="policies"):
            outcome = simulate(policy, environment, budget, arguments.runs, arguments.seed, carry_over)
            results.append((outcome, summarize(outcome, policy, environment)))
    return results


def run_simulate(arguments: argparse.Namespace) -> None:
    check_outputs(arguments)
    environment = scenarios.build(arguments)
    tokens = getattr(environment, "tokens", None)  # of a stream that ends
    wanted = arguments.budget or [tokens or DEFAULT_BUDGET]
    budgets = wanted
    if arguments.figure:
        curve = np.geomspace(min(10, wanted[0]), wanted[-1], CURVE_POINTS).astype(int)
        budgets = sorted({*wanted, *curve.tolist()})
    results = compare(environment, arguments, budgets, arguments.arms[0] if len(arguments.arms) == 1 else [])
    curves = [record for _, records in results for record in records]
    records = [record for record in curves if record["budget"] in wanted]
    lengths = ",".join(map(str, arguments.draft_length))
    show(
        records,
        f"arms {', '.join(environment.arms)}, draft length {lengths}, budget {wanted[-1]} tokens, "
        f"{arguments.runs} runs (95% intervals; regret in rounds)"
        + (" (no bounds: they need i.i.d. overlaps and one draft length)" if model_rates(environment) is None else ""),
        arguments.quiet,
    )
    if arguments.figure:
        from . import plots  # here, since matplotlib takes a third of a second

        save_figure(plots.plot_regret(curves), arguments.figure, arguments.force)
    console.write_json(records, arguments.json, arguments.force)


def run_bounds(arguments: argparse.Namespace) -> None:
    check_outputs(arguments)
    if len(arguments.arms) > 1:
        raise InputError(f"--arms: expected one list, the bounds hold for rates that stay; found {len(arguments.arms)}")
    alphas = [float(text) for text in arguments.arms[0]]
    (gamma,) = arguments.draft_length if len(arguments.draft_length) == 1 else (None,)
    if gamma is None:
        raise InputError("--draft-length: expected one number, the bounds hold for one draft length; found several")
    environment = StationaryEnvironment(alphas, gamma)
    budgets = check_budget(arguments.budget or [DEFAULT_BUDGET])
    lower = bounds.lower(alphas, gamma, budgets)
    best = environment.fixed_arms(budgets).rounds.min(axis=1)
    found: list[tuple[str, str | None, float | None, FloatArray]] = []  # policy, reward, beta, bound
    for name in [arguments.reward] if arguments.reward else [n for n in REWARDS if n != "tokens-per-second"]:
        reward = make_reward(name)
        sigma = reward.sigma(gamma)
        beta = arguments.beta if arguments.beta is not None else None if sigma is None else 2 * sigma
        if beta is not None and sigma is not None and beta < 2 * sigma * (1 - 1e-12) and not arguments.reward:
            continue  # this reward's bound does not allow that beta
        found.append(("metasd-ucb", name, beta, bounds.ucb_upper(alphas, gamma, budgets, reward, beta)))
    if not found:
        raise InputError(f"--beta: expected at least 2 sigma of a reward, found {arguments.beta}")
    if arguments.reward is None and arguments.beta is None:
        found += other_bounds(alphas, gamma, budgets)
    records = [
        {
            "policy": policy,
            "reward": name,
            "beta": beta,
            "budget": int(budget),
            "best_arm_rounds": float(best[b]),
            "upper_bound": float(upper[b]) if np.isfinite(upper[b]) else None,
            "lower_bound": float(lower[b]),
        }
        for policy, name, beta, upper in found
        for b, budget in enumerate(budgets)
    ]
    console.table(
        f"regret bounds in rounds, arms {', '.join(environment.arms)}, draft length {gamma}",
        ["policy", "reward", "beta", "budget", "best arm's rounds", "upper bound", "lower bound (asymptotic)"],
        [
            [
                record["policy"],
                record["reward"] or "",
                "" if record["beta"] is None else f"{record['beta']:.3f}",
                record["budget"],
                f"{record['best_arm_rounds']:.1f}",
                "inf" if record["upper_bound"] is None else f"{record['upper_bound']:.1f}",
                f"{record['lower_bound']:.1f}",
            ]
            for record in records
        ],
        arguments.quiet,
    )
    console.write_json(records, arguments.json, arguments.force)


def other_bounds(
    alphas: list[float], gamma: int, budgets: IntArray
) -> list[tuple[str, str | None, float | None, FloatArray]]:
    """Policies besides MetaSD-UCB, with their default parameters; those that explore on a schedule for each budget."""
    reward = make_reward("be")
    return [
        ("ucb-spec", None, None, bounds.ucb_spec_upper(alphas, gamma, budgets)),
        ("exp3-spec", None, None, bounds.exp3_spec_upper(alphas, gamma, budgets)),
        ("hedge", None, None, bounds.hedge_upper(alphas, gamma, budgets)),
        ("normal-hedge", None, None, bounds.normal_hedge_upper(alphas, gamma, budgets)),
        ("sequential-halving", "be", None, np.array([bounds.halving_upper(alphas, gamma, b, reward) for b in budgets])),
        (
            "explore-then-commit",
            "be",
            None,
            np.array([bounds.explore_then_commit_upper(alphas, gamma, b, reward) for b in budgets]),
        ),
    ]


def category_speedups(
    environment: ReplayEnvironment, outcomes: Sequence[Outcome]
) -> tuple[list[str], list[str], FloatArray] | None:
    """Speedup of every fixed arm and policy in each category: (labels, categories, [labels, categories])."""
    fixed = comparator(environment, np.array([environment.tokens]))
    if fixed.plain is None or fixed.query_seconds is None or fixed.query_tokens is None:
        return None
    of_query = np.array([query.category for query in environment.trace.queries])
    categories = sorted(set(of_query))
    learned = [outcome for outcome in outcomes if not outcome.policy.startswith("fixed:")]
    seconds = [*fixed.query_seconds.T, *(o.query_seconds.mean(axis=0) for o in learned if o.query_seconds is not None)]
    plain = fixed.plain * fixed.query_tokens if fixed.query_plain is None else fixed.query_plain
    table = np.array([[plain[of_query == c].sum() / s[of_query == c].sum() for c in categories] for s in seconds])
    return [*(f"fixed:{arm}" for arm in environment.arms), *(o.policy for o in learned)], categories, table


def order_queries(trace: traces.Trace, arguments: argparse.Namespace) -> traces.Trace:
    queries: IntArray = np.arange(len(trace.queries))
    if arguments.category:
        known = sorted({query.category for query in trace.queries})
        for category in arguments.category:
            if category not in known:
                raise InputError(f"--category: expected one of {', '.join(known)}; found {category!r}")
        queries = np.array([q for q in queries if trace.queries[q].category in arguments.category])
    if arguments.order == "shuffled":
        queries = np.random.default_rng(arguments.seed).permutation(queries)
    elif arguments.order == "category":
        queries = np.array(sorted(queries, key=lambda q: trace.queries[q].category))
    return trace if np.array_equal(queries, np.arange(len(trace.queries))) else trace.select(queries.tolist())


def run_replay(arguments: argparse.Namespace) -> None:
    check_outputs(arguments)
    trace = order_queries(traces.read(arguments.trace), arguments)
    if arguments.arm:
        trace = derive(trace, arguments.arm)
    environment = ReplayEnvironment(trace)
    results = compare(environment, arguments, arguments.budget, trace.drafters)
    records = [record for _, group in results for record in group]
    name = trace.provenance.get("target", "target")
    tokens = records[-1]["budget"]
    show(
        records,
        f"{Path(arguments.trace).name}: {name}, {trace.verification}, {len(trace.queries)} prompts, {tokens} tokens, "
        f"{arguments.runs} runs, carry-over {arguments.carry_over} (95% intervals over prompts)",
        arguments.quiet,
    )
    fixed = comparator(environment, np.array([environment.tokens]))
    if fixed.query_rounds is not None and arguments.budget is None and not arguments.quiet:
        ideal = f"{fixed.query_rounds.min(axis=1).sum():.0f} rounds"
        if fixed.query_seconds is not None and fixed.plain is not None:
            fastest = fixed.query_seconds.min(axis=1).sum()
            ideal += f"; in seconds, speedup {fixed.plain * environment.tokens / fastest:.3f}"
        print(f"best fixed arm of each prompt, known only afterwards: {ideal}\n")
    by_category = category_speedups(environment, [outcome for outcome, _ in results]) if arguments.by_category else None
    if by_category is not None:
        labels, categories, speedups = by_category
        console.table(
            "predicted speedup over plain decoding, by category",
            ["arm or policy", *categories],
            [[label, *(f"{value:.2f}" for value in row)] for label, row in zip(labels, speedups, strict=True)],
            arguments.quiet,
        )
    elif arguments.by_category:
        raise InputError("--by-category: expected a trace with a cost model, found none; record it with --calibrate")
    if arguments.figure:
        from . import plots

        if by_category is not None:
            figure = plots.plot_categories(by_category[2], by_category[1], by_category[0])
        else:
            figure = plots.plot_policies(records)
        save_figure(figure, arguments.figure, arguments.force)
    console.write_json(records, arguments.json, arguments.force)


def run_train_router(arguments: argparse.Namespace) -> None:
    check_outputs(arguments)
    trace = traces.read(arguments.trace)
    if trace.features is None:
        raise InputError(
            f"{arguments.trace}: expected a trace with features of its prompts, found none; record it again"
        )
    environment = ReplayEnvironment(trace)
    fixed = comparator(environment, np.array([environment.tokens]))
    cost = fixed.query_rounds if arguments.objective == "rounds" else fixed.query_seconds
    if cost is None:
        raise InputError("--objective time: expected a trace with a cost model, found none; record it with --calibrate")
    features = trace.features.astype(float)
    rng = np.random.default_rng(arguments.seed)
    score = cross_validate(features, cost, arguments.folds, rng, arguments.ridge)
    provenance = {
        "trace": Path(arguments.trace).name,
        "target": trace.provenance.get("target"),
        "queries": [query.id for query in trace.queries],
        "features": list(trace.feature_names),
        "ridge": arguments.ridge,
        "folds": arguments.folds,
        "seed": arguments.seed,
        "out_of_fold": asdict(score),
    }
    weights = RouterWeights(trace.arms, fit_router(features, cost, arguments.ridge), arguments.objective, provenance)
    console.write_json(weights.to_json(), arguments.out, arguments.force)
    unit = "rounds" if arguments.objective == "rounds" else "seconds"
    console.table(
        f"router of {len(trace.queries)} prompts to {len(trace.arms)} arms, out of fold ({arguments.folds} folds)",
        ["choice for each prompt", "names its best arm", unit],
        [
            ["router", f"{score.accuracy:.1%}", f"{score.routed:.1f}"],
            ["arm that is best most often", f"{score.most_frequent:.1%}", ""],
            ["best fixed arm", "", f"{score.best_fixed:.1f}"],
            ["oracle, known only afterwards", "100.0%", f"{score.oracle:.1f}"],
        ],
        arguments.quiet,
    )
    console.write_json(
        {"out": arguments.out, "objective": arguments.objective, **asdict(score)}, arguments.json, arguments.force
    )


def _add_policies(command: argparse.ArgumentParser, default_runs: int) -> None:
    command.add_argument(
        "--policy", action="append", metavar="SPEC", help="NAME[:key=value,...], fixed:ARM or all; repeatable"
    )
    command.add_argument("--reward", choices=list(REWARDS), help="default reward of the policies that take one")
    command.add_argument("--runs", type=int, default=default_runs, help="independent rows (default: %(default)s)")
    command.add_argument("--figure", type=figure_path, metavar="FILE", help="save a figure (.png, .pdf or .svg)")


def _add_instance(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--arms",
        type=arm_rates,
        action="append",
        required=True,
        metavar="A,B,...",
        help="acceptance rates, one per arm; in simulate repeatable, one list per segment, knot or task",
    )
    command.add_argument("--draft-length", type=integers, default=[5], metavar="N[,N...]", help="one, or one per arm")
    command.add_argument(
        "--budget", type=integers, metavar="N[,N...]", help="tokens to emit (default: the stream, or 10000)"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = console.parser("metasd-sim", "Speculative decoding with several drafters as a stopping-time bandit.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = console.add_command(
        commands,
        "simulate",
        "simulate policies on synthetic drafters",
        "metasd-sim simulate --arms 0.9,0.8,0.6 --draft-length 5 --budget 10000 --runs 500 "
        "--policy metasd-ucb:reward=bd --policy kl-ucb-trials",
        run_simulate,
    )
    _add_instance(command)
    _add_policies(command, default_runs=200)
    scenarios.add_options(command, numbers, integers)

    command = console.add_command(
        commands,
        "bounds",
        "bounds on stopping-time regret",
        "metasd-sim bounds --arms 0.9,0.8,0.6 --draft-length 5 --budget 10000",
        run_bounds,
    )
    _add_instance(command)
    command.add_argument("--reward", choices=list(REWARDS), help="one reward (default: all with a known sigma)")
    command.add_argument("--beta", type=float, help="exploration (default: 2 sigma of the reward)")

    command = console.add_command(
        commands,
        "replay",
        "replay policies on a recorded trace",
        "metasd-sim replay traces/smollm2-greedy.safetensors --policy all --runs 200",
        run_replay,
    )
    command.add_argument("trace", metavar="TRACE", help="a .safetensors trace")
    command.add_argument(
        "--arm",
        action="append",
        metavar="SPEC",
        help="NAME, NAME@LENGTH, NAME?RULE=THRESHOLD (max-confidence, entropy, adaedl, margin), none or "
        "ensemble(NAME,NAME,...); repeatable (default: every recorded arm)",
    )
    _add_policies(command, default_runs=50)
    command.add_argument("--budget", type=integers, metavar="N[,N...]", help="tokens (default: the whole stream)")
    command.add_argument(
        "--carry-over", default="none", help="none, keep or discount:SHARE at each new prompt (default: %(default)s)"
    )
    command.add_argument("--category", action="append", help="only prompts of this category; repeatable")
    command.add_argument(
        "--order", choices=("recorded", "shuffled", "category"), default="recorded", help="order of the prompts"
    )
    command.add_argument("--by-category", action="store_true", help="also the speedup in each category")

    command = console.add_command(
        commands,
        "train-router",
        "train a classifier that picks one arm for each prompt from its features",
        "metasd-sim train-router traces/smollm2-greedy.safetensors --out router.json",
        run_train_router,
    )
    command.add_argument("trace", metavar="TRACE", help="a .safetensors trace with features")
    command.add_argument(
        "--out", required=True, metavar="FILE", help="weights, for --policy router:weights=FILE; - is stdout"
    )
    command.add_argument("--objective", choices=OBJECTIVES, default="rounds", help="what the best arm has least of")
    command.add_argument("--folds", type=int, default=5, help="of the cross-validation (default: %(default)s)")
    command.add_argument("--ridge", type=float, default=RIDGE, help="penalty on the weights (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return console.run(build_parser, argv)


if __name__ == "__main__":
    raise SystemExit(main())
