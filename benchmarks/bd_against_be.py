"""MetaSD-UCB rewarded by block divergence (BD) against block efficiency (BE): who wins where, and why?

    python benchmarks/bd_against_be.py

Both rewards play the same instances with the same seed, over a grid of beta and at each reward's own 2 sigma, the
least that its regret bound allows. UCB1 gives an arm about beta^2 / Delta^2 rounds, whatever the reward's variance, so
two predictions follow: at equal beta the reward with the wider gaps wins, sum_i (1 - g_i/g_*) / Delta_i^2 decides; at
its own 2 sigma BD has beta^2 smaller by gamma. The feedback signal Delta^2 / Var counts only where beta is small
enough for it.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from report import options, table, verdict, write

from metasd_sim import BlockDivergence, BlockEfficiency, MetaSDUCB, StationaryEnvironment, regret, signals, simulate

INSTANCES = {"strong": (0.9, 0.85, 0.8, 0.7, 0.6), "spread": (0.8, 0.6, 0.5), "weak": (0.5, 0.4, 0.3)}
REWARDS = {"be": BlockEfficiency(), "bd": BlockDivergence()}


def price(alphas: tuple[float, ...], gamma: int, name: str) -> float:
    """sum_i (1 - g_i / g_*) / Delta_i^2: regret per beta^2 ln B of a rule that goes by gaps alone, up to a factor."""
    mean, _ = signals.reward_moments(alphas, gamma, REWARDS[name])
    g = StationaryEnvironment(alphas, gamma).tokens_per_round()
    worse = g < g.max()
    return float(((1 - g / g.max())[worse] / (mean.max() - mean[worse]) ** 2).sum())


def main() -> None:
    arguments = options(__doc__)
    quick = arguments.quick
    budget, runs = (300, 10) if quick else (10_000, 200)
    betas = (0.1, 1.0) if quick else (0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.4, 2.0)
    gammas = (5,) if quick else (2, 5, 16)

    figure, panels = plt.subplots(
        len(gammas), len(INSTANCES), figsize=(11, 3 * len(gammas)), layout="constrained", sharex=True, squeeze=False
    )
    grid, verdicts, right = [], [], {"equal": [], "own": []}
    summary = []
    signal_above = []
    for row, gamma in zip(panels, gammas, strict=True):
        for ax, (instance, alphas) in zip(row, INSTANCES.items(), strict=True):
            environment = StationaryEnvironment(alphas, gamma)

            def play(name: str, beta: float | None, environment=environment) -> tuple[float, float]:
                outcome = simulate(MetaSDUCB(REWARDS[name], beta), environment, budget, runs, arguments.seed)
                estimate = regret.stopping_time_regret(outcome, environment)
                return float(estimate.mean[0]), float(estimate.se[0])

            losses = {name: np.array([play(name, beta) for beta in betas]) for name in REWARDS}  # [betas, 2]
            own = {name: play(name, None) for name in REWARDS}
            for name, loss in losses.items():
                ax.errorbar(betas, loss[:, 0], 1.96 * loss[:, 1], marker="o", markersize=3, label=name)
                ax.plot(2 * REWARDS[name].sigma(gamma), own[name][0], "k*")
            ax.set(xscale="log", yscale="log", title=f"{instance} {' '.join(map(str, alphas))}, gamma {gamma}")
            difference = losses["be"][:, 0] - losses["bd"][:, 0]
            error = np.hypot(losses["be"][:, 1], losses["bd"][:, 1])
            for name in REWARDS:
                grid.append([instance, str(gamma), name, *losses[name][:, 0], own[name][0]])
            winner = np.where(difference > 2 * error, "bd", np.where(difference < -2 * error, "be", "="))
            won = own["be"][0] - own["bd"][0]
            own_winner = "bd" if won > 2 * np.hypot(own["be"][1], own["bd"][1]) else "be"
            grid.append([instance, str(gamma), "wins", *winner.tolist(), own_winner])

            cost = {name: price(alphas, gamma, name) for name in REWARDS}
            equal = "bd" if cost["bd"] < cost["be"] else "be"
            adapted = "bd" if cost["bd"] / gamma < cost["be"] else "be"
            at_one = str(winner[betas.index(1.0)])
            right["equal"].append(at_one == equal)
            right["own"].append(own_winner == adapted)
            ratio = signals.signal_ratio(sorted(alphas)[:-1], max(alphas), gamma, REWARDS["bd"], REWARDS["be"])
            signal_above.append(bool((ratio > 1).all()))
            (be, _), (bd, _) = (signals.reward_moments(alphas, gamma, r) for r in REWARDS.values())
            best = {name: loss[:, 0].argmin() for name, loss in losses.items()}
            summary.append(
                [
                    instance,
                    str(gamma),
                    f"{np.sort(bd)[-1] - np.sort(bd)[-2]:.3f}",
                    f"{np.sort(be)[-1] - np.sort(be)[-2]:.3f}",
                    f"{ratio[-1]:.1f}",
                    equal,
                    at_one,
                    adapted,
                    own_winner,
                    *(f"{losses[name][best[name], 0]:.0f} at {betas[best[name]]}" for name in REWARDS),
                ]
            )
    panels[0, 0].legend()
    figure.supxlabel("beta (star: the reward's own 2 sigma)")
    figure.supylabel("regret (rounds)")

    lines = ["regret in rounds; 'wins' where the difference exceeds two standard errors, '=' where it does not"]
    lines += table(["arms", "gamma", "reward", *(f"b={b}" for b in betas), "2 sigma"], grid, 0)
    lines += ["", "why: gap to the second arm in alpha (BD) and in BE, signal of BD over BE there, and who should win"]
    columns = ["arms", "gamma", "gap bd", "gap be", "signal", "b=1 predicted", "won", "2 sigma predicted", "won"]
    lines += [*table([*columns, "best be", "best bd"], summary), ""]
    at_one = [line[6] for line in summary]
    verdicts += [
        verdict(
            "the signal of BD exceeds that of BE for every arm of these instances (the paper: in most cases)",
            all(signal_above),
            f"{sum(signal_above)} of {len(signal_above)} instances",
        ),
        verdict(
            "so BD has the smaller regret at equal beta, beta = 1",
            all(won == "bd" for won in at_one),
            f"{at_one.count('bd')} of {len(at_one)} won, {at_one.count('be')} lost; UCB1 looks at gaps, not at "
            f"variance: gaps alone predict {sum(right['equal'])} of {len(at_one)}",
        ),
        verdict(
            "BD has the smaller regret when each reward explores with its own 2 sigma",
            all(line[8] == "bd" for line in summary),
            f"gaps with beta^2 / gamma predict {sum(right['own'])} of {len(at_one)}",
        ),
        verdict(
            "BD tuned in hindsight beats BE tuned in hindsight",
            all(float(line[10].split()[0]) < float(line[9].split()[0]) for line in summary),
            "last two columns; there variance counts, and BD's is smaller; nobody knows that beta beforehand",
        ),
    ]
    settings = f"MetaSD-UCB, budget {budget} tokens, {runs} runs, Beta(5 a, 5 (1 - a)) overlaps"
    write(settings, lines + verdicts, figure, arguments)


if __name__ == "__main__":
    main()
