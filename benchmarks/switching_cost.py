"""When changing the drafter costs time: how dear must a switch be for rules that commit to beat UCB rules?

    python benchmarks/switching_cost.py

A pass of the target takes 1 second, a round of any arm 1.25, and a switch s seconds more. No rule here sees seconds,
so its rounds do not depend on s: one run at s = 1 gives regret(s) = regret(0) + s switches, a line for each rule.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from report import options, table, verdict, write

from metasd_sim import CostModel, StationaryEnvironment, SwitchingCost, make_policy, regret, simulate

INSTANCES = {"strong": (0.9, 0.85, 0.8, 0.7, 0.6), "spread": (0.8, 0.6, 0.5), "weak": (0.5, 0.4, 0.3)}
COMMIT = ("sequential-halving", "explore-then-commit")
UCB = ("metasd-ucb:reward=be", "metasd-ucb:reward=bd", "ucb-spec", "moss", "kl-ucb-trials")
POLICIES = (*COMMIT, *UCB, "thompson-trials")
PRICES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def crossing(halving: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The s from which on halving's line is below the other; 0 where it always is, infinity where never."""
    ahead, fewer = halving[0] - other[0], other[2] - halving[2]
    if fewer <= 0:
        return 0.0 if ahead <= 0 else np.inf
    return max(0.0, ahead / fewer)


def main() -> None:
    arguments = options(__doc__)
    quick = arguments.quick
    budgets, runs = ((200, 400), 10) if quick else ((1_000, 10_000), 300)

    lines: list[str] = [f"regret in seconds, its standard error at s = 0, and switches; 'from': the s above which "
                        f"{COMMIT[0]} is better"]  # fmt: skip
    figure, panels = plt.subplots(
        len(budgets), len(INSTANCES), figsize=(13, 3.2 * len(budgets)), layout="constrained", sharex=True
    )
    of: dict[tuple[int, str], dict[str, tuple[float, float, float]]] = {}  # regret at s = 0, its error, switches
    for row, budget in zip(panels, budgets, strict=True):
        for ax, (instance, alphas) in zip(row, INSTANCES.items(), strict=True):
            free = StationaryEnvironment(alphas, 5, costs=CostModel.linear([0.05] * len(alphas), 5))
            environment = SwitchingCost(free, 1.0)
            lost: dict[str, tuple[float, float, float]] = {}
            for spec in POLICIES:
                outcome = simulate(make_policy(spec), environment, budget, runs, arguments.seed)
                paid = regret.time_regret(outcome, environment)
                rounds = regret.stopping_time_regret(outcome, environment)
                assert paid is not None
                switches = float(outcome.switches[:, 0].mean())
                lost[spec] = float(paid.mean[0]) - switches, 1.25 * float(rounds.se[0]), switches
            of[budget, instance] = lost
            rows = [
                [spec, *(a + s * n for s in PRICES), error, n, f"{crossing(lost[COMMIT[0]], lost[spec]):.2f}"]
                for spec, (a, error, n) in lost.items()
            ]
            lines += ["", f"{instance} {alphas}, {budget} tokens"]
            lines += table(["policy", *(f"s={s:g}" for s in PRICES), "s.e.", "switches", "from"], rows, 1)
            at = np.geomspace(0.01, 10, 60)
            for spec, (a, _, n) in lost.items():
                ax.plot(at, a + at * n, "-" if spec in COMMIT else "--", label=spec)
            ax.set(xscale="log", yscale="log", title=f"{instance}, {budget} tokens")
    panels[0, 0].legend(fontsize="x-small")
    figure.supxlabel("seconds a switch (a pass of the target takes 1)")
    figure.supylabel("regret (seconds)")

    crossings = {spec: [crossing(lost[COMMIT[0]], lost[spec]) for lost in of.values()] for spec in POLICIES[2:]}
    worst = {
        name: max(lost[COMMIT[0]][2] / len(INSTANCES[name]) for (_, i), lost in of.items() if i == name)
        for name in INSTANCES
    }

    def ranks(s: float) -> list[str]:
        return [min(lost, key=lambda spec: lost[spec][0] + s * lost[spec][2]) for lost in of.values()]

    def pair(s: float, low: str, high: str) -> list[bool]:
        return [lost[low][0] + s * lost[low][2] < lost[high][0] + s * lost[high][2] for lost in of.values()]

    free_better = {spec: sum(pair(0.0, spec, COMMIT[0])) for spec in POLICIES[2:]}
    verdicts = [
        verdict(
            "free switches: every UCB rule beats sequential halving on every instance",
            all(free_better[spec] == len(of) for spec in UCB),
            f"of {len(of)}: " + ", ".join(f"{spec} {n}" for spec, n in free_better.items()),
        ),
        verdict(
            "sequential halving changes arms at most twice per arm",
            max(worst.values()) <= 2,
            ", ".join(f"{name} {n:.1f}" for name, n in worst.items()) + " switches an arm",
        ),
        verdict(
            "from a switch of one target pass on, sequential halving beats every UCB rule on every instance",
            all(max(crossings[spec]) <= 1 for spec in UCB),
            "crossings over the instances: "
            + "; ".join(f"{spec} {min(x):.2f} to {max(x):.2f}" for spec, x in crossings.items()),
        ),
        verdict(
            f"at s = {PRICES[-1]:g} a rule that commits is the best of all",
            all(spec in COMMIT for spec in ranks(PRICES[-1])),
            ", ".join(f"{spec} {ranks(PRICES[-1]).count(spec)}" for spec in dict.fromkeys(ranks(PRICES[-1]))),
        ),
        verdict(
            "halving, which drops bad arms early, beats explore-then-commit of the same exploration, free switches",
            all(pair(0.0, *COMMIT)),
            f"{sum(pair(0.0, *COMMIT))} of {len(of)}",
        ),
        verdict(
            f"and at s = {PRICES[-1]:g}",
            all(pair(PRICES[-1], *COMMIT)),
            f"{sum(pair(PRICES[-1], *COMMIT))} of {len(of)}; explore-then-commit has one phase, so fewer switches",
        ),
    ]
    write(f"gamma 5, {runs} runs, default exploration", [*lines, "", *verdicts], figure, arguments)


if __name__ == "__main__":
    main()
