"""When the best drafter changes within a stream: do rules that forget pay off, and when do they not?

    python benchmarks/changing.py

Regret in rounds against two comparators, both exact: the best fixed arm of the whole stream, and the oracle that plays
the best arm of each segment. Then the memory that sw-ucb and d-ucb want, with rounds (be) or bits (trials) as samples.
Two phases that alternate flatter a long memory: the two arms' long means are alike, so little tips the balance.
"drawn" has no such symmetry: four arms get new rates, uniform in [.3, .9], every 500 tokens.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from report import options, table, verdict, write

from metasd_sim import PiecewiseEnvironment, make_policy, regret, simulate

DRAWN = [tuple(rates) for rates in np.random.default_rng(0).uniform(0.3, 0.9, (40, 4)).round(2).tolist()]
# alphas of each segment, tokens of a segment, whether it starts again
ENVIRONMENTS = {
    "few switches": ([(0.8, 0.5, 0.6), (0.5, 0.8, 0.6)], 5000, True),
    "many switches": ([(0.8, 0.5, 0.6), (0.5, 0.8, 0.6)], 500, True),
    "too fast": ([(0.8, 0.5, 0.6), (0.5, 0.8, 0.6)], 10, True),
    "drawn": (DRAWN, 500, False),
    "fading": ([(0.9, 0.6, 0.5), (0.5, 0.6, 0.5)], 10_000, False),
    "rising": ([(0.6, 0.4, 0.4), (0.6, 0.9, 0.4)], 10_000, False),
    "same best": ([(0.8, 0.6, 0.5), (0.6, 0.4, 0.3)], 2000, True),
    "stationary": ([(0.8, 0.6, 0.5)], 20_000, False),
}
STEADY = ("metasd-ucb", "kl-ucb-trials")
FORGET = ("sw-ucb", "d-ucb", "change-ucb")
POLICIES = (*FORGET, "metasd-ucb", "kl-ucb-trials", "exp3", "random", "oracle:segment")
TUNED = ("few switches", "many switches", "drawn", "fading", "stationary")


def main() -> None:
    arguments = options(__doc__)
    quick = arguments.quick
    budget, runs = (600, 5) if quick else (20_000, 100)
    memories = (25, 400) if quick else (25, 100, 200, 400, 800, 3200)

    def play(spec: str, environment: PiecewiseEnvironment) -> tuple[float, float, float]:
        """Regret against the best fixed arm, against the oracle of segments, and the standard error of both."""
        outcome = simulate(make_policy(spec), environment, budget, runs, arguments.seed)
        fixed = environment.fixed_arms(outcome.budgets)
        time = regret.stopping_time(outcome, environment)
        assert fixed.segment_rounds is not None
        mean = float(time.mean[0])
        return mean - float(fixed.rounds.min()), mean - float(fixed.segment_rounds[0]), float(time.se[0])

    environments = {name: PiecewiseEnvironment(*setting) for name, setting in ENVIRONMENTS.items()}
    losses = {name: {spec: play(spec, env) for spec in POLICIES} for name, env in environments.items()}

    sweeps: dict[tuple[str, str], list[float]] = {}
    for rule, reward in (("sw-ucb", "be"), ("sw-ucb", "trials"), ("d-ucb", "be")):
        for name in TUNED:
            memory = [f"window={m}" if rule == "sw-ucb" else f"discount={1 - 1 / m:.6g}" for m in memories]
            sweeps[f"{rule}:{reward}", name] = [
                play(f"{rule}:reward={reward},{option}", environments[name])[1] for option in memory
            ]

    figure, panels = plt.subplots(1, 2, figsize=(13, 4.5), layout="constrained", width_ratios=(3, 2))
    place, width = np.arange(len(environments)), 0.1
    for i, spec in enumerate(POLICIES[:-1]):
        panels[0].bar(place + (i - 3) * width, [of[spec][1] for of in losses.values()], width, label=spec)
    panels[0].set_xticks(place, [name.replace(" ", "\n") for name in environments], fontsize="small")
    panels[0].set(ylabel="regret against the oracle of segments (rounds)", yscale="log")
    panels[0].legend(fontsize="small", ncols=2)
    for (rule, name), regrets in sweeps.items():
        if rule != "d-ucb:be":
            style = "-" if rule == "sw-ucb:be" else "--"
            panels[1].plot(memories, regrets, style, color=f"C{TUNED.index(name)}", label=f"{name}, {rule}")
    panels[1].set(xscale="log", yscale="log", xlabel="window (rounds)")
    panels[1].legend(fontsize="small")

    lines = ["alphas and tokens of the segments:"]
    for name, (alphas, length, again) in ENVIRONMENTS.items():
        what = "40 segments" if name == "drawn" else alphas
        lines.append(f"  {name}: {what} x {length}{', repeated' if again else ''}")
    for column, against in enumerate(("the best fixed arm", "the oracle of segments")):
        rows = [[name, *(of[spec][column] for spec in POLICIES)] for name, of in losses.items()]
        lines += ["", f"regret in rounds against {against}", *table(["environment", *POLICIES], rows, 0)]
    errors = [loss[2] for of in losses.values() for loss in of.values()]
    lines += [f"standard errors: {max(errors):.0f} at most, {np.median(errors):.0f} in the median"]
    lines += ["", "memory in rounds (window, or 1 / (1 - discount)): regret against the oracle of segments"]
    rows = [[rule, name, *regrets] for (rule, name), regrets in sweeps.items()]
    lines += [*table(["rule", "environment", *map(str, memories)], rows, 0), ""]

    def best(name: str, specs: tuple[str, ...]) -> tuple[float, str]:
        return min((losses[name][spec][1], spec) for spec in specs)

    def forgetting_pays(name: str) -> bool:
        """Beyond two standard errors."""
        (loss, spec), (other, steady) = best(name, FORGET), best(name, STEADY)
        return loss + 2 * float(np.hypot(losses[name][spec][2], losses[name][steady][2])) < other

    def tuned(name: str) -> float:
        return min(sweeps["sw-ucb:be", name] + sweeps["sw-ucb:trials", name])

    def both(name: str) -> str:
        (loss, spec), (other, steady) = best(name, FORGET), best(name, STEADY)
        return f"{name}: {spec} {loss:.0f}, {steady} {other:.0f}"

    changing = [name for name in environments if name not in ("same best", "stationary", "too fast")]
    shorter = {name: memories[int(np.argmin(sweeps["sw-ucb:trials", name]))] for name in TUNED}
    fast = losses["too fast"]
    ahead = [a > b for n in TUNED for a, b in zip(sweeps["sw-ucb:be", n], sweeps["sw-ucb:trials", n], strict=True)]
    verdict_lines = [
        verdict(
            "with default memories the best rule that forgets beats both that do not, wherever the best arm changes",
            all(forgetting_pays(name) for name in changing),
            "; ".join(both(name) for name in changing),
        ),
        verdict(
            "where the best arm stays it loses to them",
            not any(forgetting_pays(name) for name in ("same best", "stationary")),
            "; ".join(both(name) for name in ("same best", "stationary")),
        ),
        verdict(
            "once an arm that was long the best fades, change-ucb and sw-ucb beat both rules that do not forget",
            max(losses["fading"][spec][1] for spec in ("change-ucb", "sw-ucb"))
            < min(losses["fading"][spec][1] for spec in STEADY),
            ", ".join(f"{spec} {losses['fading'][spec][1]:.0f}" for spec in POLICIES[:6]),
        ),
        verdict(
            "switches every 10 tokens are faster than a rule can see: none gains on the best fixed arm",
            all(fast[spec][0] + 2 * fast[spec][2] > 0 for spec in POLICIES[:6]),
            ", ".join(f"{spec} {fast[spec][0]:.0f}" for spec in POLICIES[:7])
            + "; a mix of arms averages tokens per round, a fixed arm rounds per token, a harmonic mean: so even "
            "random play gains",
        ),
        verdict(
            "every rule that forgets beats the best fixed arm where switches are few",
            all(losses["few switches"][spec][0] < 0 for spec in FORGET),
            ", ".join(f"{spec} {losses['few switches'][spec][0]:.0f}" for spec in (*FORGET, "metasd-ucb", "exp3")),
        ),
        verdict(
            "more switches want a shorter window (sw-ucb on trials)",
            shorter["many switches"] < shorter["few switches"] <= shorter["stationary"],
            ", ".join(f"{name} {window}" for name, window in shorter.items())
            + "; two phases that alternate keep the long means of both arms level, drawn rates do not",
        ),
        verdict(
            "counting bits (trials) rather than rounds (be) helps sw-ucb at every memory",
            all(ahead),
            f"{sum(ahead)} of {len(ahead)} cells",
        ),
        verdict(
            "a tuned window makes sw-ucb better than the better of metasd-ucb and kl-ucb-trials, where arms change",
            all(tuned(name) < best(name, STEADY)[0] for name in TUNED[:-1]),
            "; ".join(f"{name}: {tuned(name):.0f} against {best(name, STEADY)[0]:.0f}" for name in TUNED[:-1]),
        ),
        verdict(
            "EXP3, whose guarantee is against a fixed arm, is worse than every UCB rule that forgets, after changes",
            all(losses[name]["exp3"][1] > max(losses[name][spec][1] for spec in FORGET) for name in changing),
            "; ".join(
                f"{name} {losses[name]['exp3'][1]:.0f}, {worst} {losses[name][worst][1]:.0f}"
                for name in changing
                for worst in [max(FORGET, key=lambda spec: losses[name][spec][1])]
            ),
        ),
    ]
    settings = f"gamma 5, budget {budget} tokens, {runs} runs, reward be, default window 200, discount .99"
    write(settings, lines + verdict_lines, figure, arguments)


if __name__ == "__main__":
    main()
