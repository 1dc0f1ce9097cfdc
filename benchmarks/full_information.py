"""Full information (hedge, normal-hedge) against bandit feedback as arms grow, in rounds and with its price in seconds.

    python benchmarks/full_information.py

Full information scores every drafter on the tokens just verified. In rounds that should cost ln K where a bandit pays
K. In seconds each drafter has to read what was emitted: K times the catch-up, every round, for ever; a bandit pays it
only when it comes back to an arm. None of these policies looks at seconds, so one run gives the whole line in the
price: it is played at 1 second a token read, and what it read is the seconds beyond its rounds. A pass of the target
takes 1 s. The price is linear in tokens; reading many at once is cheaper, which favours the bandit. Full information
sees overlaps, as of the bandits kl-ucb-overlap alone does: the difference to kl-ucb-trials is what the finer signal is
worth.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from report import options, table, verdict, write

from metasd_sim import CostModel, StationaryEnvironment, make_policy, regret, simulate

FULL = ("hedge", "hedge:loss=length", "normal-hedge", "normal-hedge:loss=length")
BANDITS = ("metasd-ucb", "kl-ucb-trials", "kl-ucb-overlap", "exp3-spec")
GAMMA, DRAFT = 5, 0.05  # seconds to draft a token, where a pass of the target takes 1
PRICES = (0.0, 0.001, 0.01, 0.06)  # seconds a token read; .06: the target's own first 26 layers, traces/smollm2-t07
INSTANCES = {"one good": (0.8, 0.5), "close": (0.8, 0.75)}  # the best arm, and all the others


def main() -> None:
    arguments = options(__doc__)
    quick = arguments.quick
    budget, runs = (200, 5) if quick else (10_000, 40)
    counts = (2, 4) if quick else (2, 4, 8, 16, 32, 64)

    in_rounds: dict[tuple[str, str], list[float]] = {}
    read: dict[tuple[str, str], list[float]] = {}  # tokens that drafters other than the playing one had to read
    errors = []
    for instance, (best, others) in INSTANCES.items():
        for arms in counts:
            costs = CostModel.linear([DRAFT] * arms, GAMMA, catch_up=1.0)
            environment = StationaryEnvironment([best] + [others] * (arms - 1), GAMMA, costs=costs)
            price = environment.seconds_per_round()
            assert price is not None
            for spec in (*FULL, *BANDITS):
                outcome = simulate(make_policy(spec), environment, budget, runs, arguments.seed)
                estimate = regret.stopping_time_regret(outcome, environment)
                assert outcome.seconds is not None
                in_rounds.setdefault((instance, spec), []).append(float(estimate.mean[0]))
                beyond = outcome.seconds[:, 0] - outcome.rounds[:, 0] * price[0]
                read.setdefault((instance, spec), []).append(float(beyond.mean()))
                errors.append(float(estimate.se[0]))
    a_round = 1 + GAMMA * DRAFT

    figure, panels = plt.subplots(1, 4, figsize=(17, 4), layout="constrained")
    for column, instance in enumerate(INSTANCES):
        for i, spec in enumerate((*FULL, *BANDITS)):
            own = np.array(in_rounds[instance, spec])
            seconds = own * a_round + PRICES[2] * np.array(read[instance, spec])
            style = {"color": f"C{i}", "linestyle": "-" if spec in FULL else "--", "marker": "o", "markersize": 3}
            panels[2 * column].plot(counts, own, label=spec, **style)
            panels[2 * column + 1].plot(counts, seconds, label=spec, **style)
        for ax, what in zip(panels[2 * column :], ("rounds", f"seconds, {PRICES[2]} s a token read"), strict=False):
            ax.set(title=f"{instance}: regret in {what}", xscale="log", yscale="symlog", xlabel="arms")
            ax.set_ylim(bottom=0)
            ax.minorticks_off()
            ax.set_xticks(counts, list(map(str, counts)))
    panels[0].legend(fontsize="small")

    lines = ["regret in rounds"]
    rows = [[instance, spec, *of] for (instance, spec), of in in_rounds.items()]
    lines += table(["arms", "policy", *map(str, counts)], rows, 0)
    lines += [
        f"standard errors: {max(errors):.0f} at most",
        "",
        "tokens read by drafters that did not draft them, thousands",
    ]
    lines += table(["arms", "policy", *map(str, counts)], [[*key, *np.array(of) / 1000] for key, of in read.items()], 1)
    for price in PRICES[1:]:
        rows = [[i, s, *(np.array(of) * a_round + price * np.array(read[i, s]))] for (i, s), of in in_rounds.items()]
        lines += ["", f"regret in seconds at {price:g} s a token read; a round takes {a_round:g} s"]
        lines += table(["arms", "policy", *map(str, counts)], rows, 0)

    even = []
    for instance in INSTANCES:
        for k in range(len(counts)):
            full = min(FULL, key=lambda spec: in_rounds[instance, spec][k])
            gain = {s: (in_rounds[instance, s][k] - in_rounds[instance, full][k]) * a_round for s in BANDITS}
            more = {s: read[instance, full][k] - read[instance, s][k] for s in BANDITS}
            price, bandit = min((gain[s] / more[s], s) for s in BANDITS if more[s] > 0)
            even.append([instance, str(counts[k]), full, bandit, gain[bandit], f"{price:.4f}"])
    lines += [
        "",
        "where the two meet: the best full information in rounds, the bandit that it loses to first, its lead in",
    ]
    lines += [
        "seconds at no price, and the price in seconds a token read (a pass of the target is 1) at which that is gone"
    ]
    lines += [*table(["arms", "K", "full information", "bandit", "gain", "price"], even, 0), ""]

    def grows(instance: str, spec: str) -> float:
        return in_rounds[instance, spec][-1] - in_rounds[instance, spec][0]

    best_full = {i: [min(in_rounds[i, s][k] for s in FULL) for k in range(len(counts))] for i in INSTANCES}
    best_bandit = {i: [min(in_rounds[i, s][k] for s in BANDITS) for k in range(len(counts))] for i in INSTANCES}
    seconds = {
        (i, kind): [min(in_rounds[i, s][-1] * a_round + p * read[i, s][-1] for s in group) for p in PRICES]
        for i in INSTANCES
        for kind, group in (("full", FULL), ("bandit", BANDITS))
    }
    verdicts = [
        verdict(
            "in rounds full information wins at any number of arms (best of each kind)",
            all(a < b for i in INSTANCES for a, b in zip(best_full[i], best_bandit[i], strict=True)),
            "; ".join(
                f"{i}: {best_full[i][0]:.0f} against {best_bandit[i][0]:.0f} at {counts[0]} arms, "
                f"{best_full[i][-1]:.0f} against {best_bandit[i][-1]:.0f} at {counts[-1]}"
                for i in INSTANCES
            ),
        ),
        verdict(
            "each full-information rule grows more slowly with the arms than each bandit",
            all(max(grows(i, s) for s in FULL) < min(grows(i, s) for s in BANDITS) for i in INSTANCES),
            "; ".join(
                f"{i}: by <= {max(grows(i, s) for s in FULL):.0f}, at least {min(grows(i, s) for s in BANDITS):.0f}"
                for i in INSTANCES
            ),
        ),
        verdict(
            "hedge with the anytime rate is as good as normal-hedge",
            all(in_rounds[i, "hedge"][-1] < 1.1 * in_rounds[i, "normal-hedge"][-1] for i in INSTANCES),
            f"at {counts[-1]} arms "
            + "; ".join(
                f"{i}: {in_rounds[i, 'hedge'][-1]:.0f}, normal-hedge {in_rounds[i, 'normal-hedge'][-1]:.0f}"
                for i in INSTANCES
            ),
        ),
        verdict(
            "the loss in tokens (length) beats the overlap loss for hedge",
            all(
                a > b
                for i in INSTANCES
                for a, b in zip(in_rounds[i, "hedge"], in_rounds[i, "hedge:loss=length"], strict=True)
            ),
            "its losses are farther apart; its steps, scaled for losses in [0, 1], are the same",
        ),
        *(
            verdict(
                f"at {price:g} s a token read full information still wins in seconds with {counts[-1]} arms",
                all(seconds[i, "full"][p] < seconds[i, "bandit"][p] for i in INSTANCES),
                "; ".join(
                    f"{i}: {seconds[i, 'full'][p]:.0f} against {seconds[i, 'bandit'][p]:.0f} s" for i in INSTANCES
                ),
            )
            for p, price in enumerate(PRICES)
        ),
    ]
    settings = f"gamma {GAMMA}, budget {budget} tokens, {runs} runs; " + ", ".join(
        f"{name}: one arm {best}, the others {others}" for name, (best, others) in INSTANCES.items()
    )
    write(settings, lines + verdicts, figure, arguments)


if __name__ == "__main__":
    main()
