"""Deterministic rules against an adversary that knows them, EXP3Spec on the same rounds, and both on i.i.d. arms.

    python benchmarks/exp3_adversary.py

`fooling_sequence` fixes beforehand rounds in which whatever the rule plays accepts nothing and every other arm gamma;
the rule then emits one token a round. It has to know the rule's seed, as its ties are broken at random. That is not
needed where in the first rounds arm i accepts i tokens: from then on no two indices tie, and any seed plays the same
arms. With "all" arms alike any arm is as good as another, so that even random play suffers little; with "half" the
second half of the arms accept nothing later on. The fooled rule sees no difference, but now there is something to
learn.
"""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
from report import options, table, verdict, write

from metasd_sim import AdversarialEnvironment, StationaryEnvironment, fooling_sequence, make_policy, regret, simulate
from metasd_sim.growth import growth

ARMS, GAMMA = 4, 5
RULES = ("metasd-ucb", "ucb-spec", "kl-ucb-trials")
DRAWS = ("exp3-spec", "exp3-ix", "exp3", "random")
STATIONARY = (0.8, 0.7, 0.6, 0.5)


class FirstImpressions:
    """The policy `inner`, told that arm i accepted i tokens in the first rounds, one of each arm."""

    def __init__(self, inner):
        self.inner, self.rounds = inner, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def update(self, rows, rounds):
        if self.rounds < ARMS:
            rounds = replace(rounds, accepted=rounds.arm, emitted=rounds.arm + 1)
        self.rounds += 1
        self.inner.update(rows, rounds)


def fool_any_seed(spec: str, rounds: int) -> np.ndarray:
    sequence = fooling_sequence(FirstImpressions(make_policy(spec)), ARMS, GAMMA, rounds)
    sequence[:ARMS] = np.arange(ARMS)
    return sequence


def half(sequence: np.ndarray) -> np.ndarray:
    silent = sequence.copy()
    silent[ARMS:, ARMS // 2 :] = 0
    return silent


def main() -> None:
    arguments = options(__doc__)
    quick, seed = arguments.quick, arguments.seed
    last, longest, runs, seeds = (300, 600, 5, 2) if quick else (20_000, 200_000, 50, 4)
    budgets = np.unique(np.geomspace(last / 50, last, 9).astype(int))
    middle = np.abs(budgets - last / 2).argmin()

    def curve(spec: str, sequence: np.ndarray, seed: int, rows: int) -> tuple[np.ndarray, float]:
        """Regret against the best fixed arm of the sequence, [budgets], and its last standard error."""
        environment = AdversarialEnvironment(sequence, GAMMA)
        estimate = regret.stopping_time_regret(
            simulate(make_policy(spec), environment, budgets.tolist(), rows, seed), environment
        )
        return estimate.mean, float(estimate.se[-1])

    def pace(loss: np.ndarray) -> float:
        """Regret per token above the middle budget over that below: 1 if linear, .41 if a square root."""
        return float((loss[-1] - loss[middle]) / (last - budgets[middle]) * budgets[middle] / loss[middle])

    def row(*words: str, loss: np.ndarray, error: float) -> list[str | float]:
        small = loss[middle] < 5 or loss[-1] < 5  # a ratio would say nothing
        return [
            *words,
            f"{loss[-1]:.0f}",
            f"{error:.0f}",
            f"{loss[-1] / last:.4f}",
            "" if small else f"{pace(loss):.2f}",
        ]

    rows: list[list[str | float]] = []
    curves: dict[tuple[str, str, str], np.ndarray] = {}
    for fooled in RULES:
        for variant in ("all", "half"):
            sequence = fool_any_seed(fooled, last)
            for spec in (*RULES, *DRAWS):
                loss, error = curve(spec, half(sequence) if variant == "half" else sequence, seed, runs)
                curves[fooled, variant, spec] = loss
                rows.append(row(fooled, variant, spec, loss=loss, error=error))

    known = {name: [] for name in ("own seed", "other seeds")}
    same = True
    for s in range(seed, seed + seeds):
        sequences = [fooling_sequence(make_policy(spec), ARMS, GAMMA, last, s) for spec in RULES]
        same &= all(np.array_equal(sequences[0], other) for other in sequences)
        known["own seed"].append(curve("metasd-ucb", half(sequences[0]), s, 1)[0])
        known["other seeds"].append(curve("metasd-ucb", half(sequences[0]), s + 1000, runs)[0])
    for name, losses in known.items():
        error = np.std([loss[-1] for loss in losses], ddof=1) / np.sqrt(seeds)
        rows.append(row("metasd-ucb's seed", "half", f"metasd-ucb, {name}", loss=np.mean(losses, axis=0), error=error))

    environment = StationaryEnvironment(STATIONARY, GAMMA)
    times = np.unique([*np.geomspace(longest / 200, longest, 9).astype(int), last])
    short = int(times.searchsorted(last))
    still: list[list[str | float]] = []
    stationary: dict[str, np.ndarray] = {}
    for spec in (*RULES, *DRAWS):
        outcome = simulate(make_policy(spec), environment, times.tolist(), runs, seed)
        estimate = regret.stopping_time_regret(outcome, environment)
        stationary[spec] = estimate.mean
        grown = growth(outcome, environment.tokens_per_round())
        losses = [f"{estimate.mean[i]:.0f}" for i in (short, -1)]
        still.append([spec, *losses, f"{estimate.se[-1]:.0f}", grown.log_slope, grown.log_ratio, grown.linear_ratio])

    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for ax, variant in zip(panels, ("all", "half"), strict=False):
        for spec in (*RULES, *DRAWS):
            ax.plot(budgets, curves["metasd-ucb", variant, spec], marker="o", markersize=3, label=spec)
        ax.set(title=f"sequence that fools metasd-ucb, {variant} arms", xlabel="budget (tokens)")
        ax.set(xscale="log", yscale="symlog")
    for spec, loss in stationary.items():
        panels[2].plot(times, loss, marker="o", markersize=3, label=spec)
    panels[2].set(title="stationary " + " ".join(map(str, STATIONARY)), xlabel="budget (tokens)")
    panels[2].set(xscale="log", yscale="log")
    panels[0].set_ylabel("regret (rounds)")
    panels[2].legend(fontsize="small")

    own = [loss for key, loss in curves.items() if key[0] == key[2]]
    exp3 = [loss for key, loss in curves.items() if key[1:] == ("half", "exp3-spec")]
    alike = [loss for key, loss in curves.items() if key[1:] == ("all", "exp3-spec")]
    chance = [loss[-1] / last for key, loss in curves.items() if key[1:] == ("half", "random")]
    others = [loss[-1] / last for key, loss in curves.items() if key[2] in RULES and key[0] != key[2]]
    hidden = float(np.mean(known["other seeds"], axis=0)[-1] / last)

    def at(losses: dict[str, np.ndarray], budget: int) -> list[float]:
        return [float(loss[budget]) for loss in losses.values()]

    rule, draw = ({spec: stationary[spec] for spec in group} for group in (RULES, DRAWS[:3]))
    verdicts = [
        verdict(
            "a deterministic rule loses linearly to the adversary that knows its code, whatever its seed",
            all(loss[-1] / last > 0.3 and 0.9 < pace(loss) < 1.1 for loss in own),
            f"{min(loss[-1] for loss in own) / last:.2f} to {max(loss[-1] for loss in own) / last:.2f} rounds a token",
        ),
        verdict(
            "EXP3Spec's regret on the same sequences is sublinear: the upper half of the tokens costs less than .8 of "
            "the lower where there is something to learn, and under .01 a token where there is not",
            all(pace(loss) < 0.8 for loss in exp3) and all(loss[-1] / last < 0.01 for loss in alike),
            f"at most {max(loss[-1] for loss in exp3) / last:.4f} a token, ratios to {max(map(pace, exp3)):.2f}; "
            f"random play loses {min(chance):.3f} and more, so that the second variant shows EXP3Spec learning",
        ),
        verdict(
            "the sequence that fools one deterministic rule fools the others (above .1 a token)",
            min(others) > 0.1,
            f"{min(others):.4f} to {max(others):.4f} rounds a token",
        ),
        verdict(
            "ties broken at random are no protection: an adversary that goes by the seed fools other seeds as well",
            hidden > 0.1,
            f"{hidden:.4f} rounds a token; the three rules' sequences are {'the same' if same else 'different'} there: "
            "all see zeros, and play the arms in turn",
        ),
        verdict(
            f"where arms are i.i.d. each deterministic rule beats each EXP3, at {times[short]} tokens",
            max(at(rule, short)) < min(at(draw, short)),
            f"deterministic {min(at(rule, short)):.0f} to {max(at(rule, short)):.0f}, EXP3 "
            f"{min(at(draw, short)):.0f} to {max(at(draw, short)):.0f}",
        ),
        verdict(
            f"and at {times[-1]} tokens",
            max(at(rule, -1)) < min(at(draw, -1)),
            f"deterministic {min(at(rule, -1)):.0f} to {max(at(rule, -1)):.0f}, EXP3 {min(at(draw, -1)):.0f} to "
            f"{max(at(draw, -1)):.0f}; metasd-ucb's intervals know the range of its reward alone, and are the widest",
        ),
    ]
    lines = [
        f"adversary, {last} tokens: rounds of regret against the best fixed arm, s.e., regret per token, and regret"
    ]
    lines += ["per token of the upper half of the tokens over that of the lower (linear 1, square root .41)"]
    lines += table(["fools", "arms", "policy", "regret", "s.e.", "per token", "upper/lower"], rows)
    lines += ["", f"stationary {STATIONARY}: regret, its slope on ln B, and growth: near 1 if it follows ln B, or B"]
    columns = ["policy", f"at {times[short]}", f"at {times[-1]}", "s.e.", "slope", "on ln B", "on B"]
    lines += [*table(columns, still, 2), ""]
    write(
        f"{ARMS} arms, gamma {GAMMA}, {runs} runs, {seeds} seeds for the last two lines",
        lines + verdicts,
        figure,
        arguments,
    )


if __name__ == "__main__":
    main()
