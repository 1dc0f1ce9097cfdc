"""Rounds per second of `metasd_sim.simulate` and of SMPyBandits' UCB on the same bandit, side by side on one core.

    python benchmarks/simulate_speed.py

Both sides play UCB1 on block efficiency N / gamma until 10,000 tokens have been emitted; N follows the capped geometric
law. They are processes of their own that never run at the same time and take turns. SMPyBandits 0.9.7 imports only with
numpy below 2 and scipy below 1.12: a virtual environment in the user's cache holds it (Python 3.11 or 3.12;
`--interpreter` names one where this Python has no such wheels). Its speed is measured twice: with its own arms drawing
one reward a round, and with all rewards drawn before the clock starts, so that only `choice` and `getReward` count.
`simulate` draws its rounds within the clock in both comparisons.

Exit code 1: the two sides' regrets differ, so that the speeds do not compare.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev

# Standard library only at the top: this file also runs in SMPyBandits' environment, which has no metasd.

ALPHAS = (0.9, 0.85, 0.8, 0.7, 0.6)
GAMMA = 5
BUDGET = 10_000  # tokens
RUNS = 1_000
SMPYBANDITS = "0.9.7"
REQUIREMENTS = (f"SMPyBandits=={SMPYBANDITS}", "numpy<2", "scipy<1.12")
SIDES = {
    "metasd": "metasd_sim.simulate",
    "own-arms": f"SMPyBandits {SMPYBANDITS} UCB, its own arms",
    "drawn-before": f"SMPyBandits {SMPYBANDITS} UCB, rewards drawn before",
}
LARGEST_Z = 4.0


def tokens_per_round(alpha: float) -> float:
    """g(alpha) = 1 + alpha + ... + alpha^gamma."""
    return sum(alpha**k for k in range(GAMMA + 1))


def regrets(pulls: list[list[int]]) -> list[float]:
    """`sum_i (1 - g_i / g_*) n_i` of each run: regret in rounds, up to the overshoot of the last block."""
    g = [tokens_per_round(alpha) for alpha in ALPHAS]
    return [sum((1 - g_i / max(g)) * n for g_i, n in zip(g, run, strict=True)) for run in pulls]


def timed(play: Callable[[], None]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    play()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def play_metasd(runs: int, seed: int) -> dict[str, object]:
    import numpy as np

    from metasd_sim.environments.synthetic import StationaryEnvironment
    from metasd_sim.policies import MetaSDUCB
    from metasd_sim.rewards import BlockEfficiency
    from metasd_sim.simulate import simulate

    def play(budget: int):
        policy = MetaSDUCB(BlockEfficiency(), beta=1.0)
        return simulate(policy, StationaryEnvironment(ALPHAS, GAMMA), budget, runs, seed)

    outcomes = []
    play(BUDGET // 100)  # warm-up
    clock = timed(lambda: outcomes.append(play(BUDGET)))
    (outcome,) = outcomes
    return clock | {
        "pulls": outcome.pulls[:, 0].tolist(),
        "tokens": outcome.tokens[:, 0].tolist(),
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}",
    }


def play_smpybandits(runs: int, seed: int, drawn_before: bool) -> dict[str, object]:
    import numpy as np
    from SMPyBandits.Arms import DiscreteArm
    from SMPyBandits.Policies import UCB

    np.seterr(invalid="ignore")  # its first indices are 0 / 0, and set to infinity afterwards
    np.random.seed(seed)  # noqa: NPY002 - SMPyBandits draws from the global state
    # P(N = n) = alpha^n (1 - alpha) for n < gamma, alpha^gamma for n = gamma; UCB scales N by lower and amplitude
    arms = [DiscreteArm({n: alpha**n * (1 - alpha if n < GAMMA else 1) for n in range(GAMMA + 1)}) for alpha in ALPHAS]
    all_pulls, all_tokens = [], []

    def play_one(budget: int) -> dict[str, float]:
        policy = UCB(len(arms), lower=0.0, amplitude=GAMMA)
        policy.startGame()
        if drawn_before:  # never more rounds than tokens
            draws = [iter(arm.draw_nparray((budget,)).tolist()).__next__ for arm in arms]
        else:
            draws = [arm.draw for arm in arms]
        total = 0

        def play() -> None:
            nonlocal total
            choice, get_reward, tokens = policy.choice, policy.getReward, 0
            while tokens < budget:
                arm = choice()
                accepted = draws[arm]()
                get_reward(arm, accepted)
                tokens += accepted + 1
            total = tokens

        clock = timed(play)
        all_pulls.append(policy.pulls.tolist())
        all_tokens.append(int(total))
        return clock

    play_one(BUDGET // 10)  # warm-up
    all_pulls.clear()
    all_tokens.clear()
    clocks = [play_one(BUDGET) for _ in range(runs)]
    return {key: sum(clock[key] for clock in clocks) for key in ("wall", "cpu")} | {
        "pulls": all_pulls,
        "tokens": all_tokens,
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}",
    }


def smpybandits_python(folder: Path, interpreter: str) -> str:
    """The interpreter of an environment with SMPyBandits, made in `folder` if it is not there."""
    python = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    check = f"from importlib.metadata import version; assert version('SMPyBandits') == '{SMPYBANDITS}'"
    if not Path(python).exists() or subprocess.run([python, "-c", check], capture_output=True).returncode:
        print(f"installing {', '.join(REQUIREMENTS)} into an environment of its own", file=sys.stderr)
        try:
            subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True)
            install = [python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *REQUIREMENTS]
            subprocess.run(install, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{error}\nSMPyBandits {SMPYBANDITS} needs Python 3.11 or 3.12: name one with --interpreter")
    return python


def run_side(python: str, side: str, runs: int, seed: int) -> dict:
    command = [python, __file__, "--side", side, "--runs", str(runs), "--seed", str(seed)]
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
    done = subprocess.run(command, env=os.environ | one_thread, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # SMPyBandits prints remarks while it is imported


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def rate(result: dict, clock: str) -> float:
    return sum(map(sum, result["pulls"])) / result[clock]


def report(results: dict[str, list[dict]], runs: dict[str, int]) -> tuple[str, bool]:
    ours, *theirs = SIDES
    repetitions = range(len(results[ours]))
    lines = [
        f"{len(ALPHAS)} arms, alphas {', '.join(f'{a:g}' for a in ALPHAS)}, draft length {GAMMA}, "
        f"budget {BUDGET} tokens, UCB1 on N / gamma (beta 1)",
        f"{processor()}, {os.cpu_count()} cores, one of them used",
        *(f"{SIDES[side]}: {results[side][0]['versions']}; {runs[side]} runs a repetition" for side in SIDES),
        "",
        f"Rounds per second; {len(repetitions)} repetitions each, taking turns. Wall: by the clock on the wall.",
        "CPU: by the processor time of the process, which other work on the machine disturbs less.",
        "Core: the share of the core that the process got; far below 100% the machine was busy and wall says little.",
        "",
        f"{'':51}{'wall':>11}{'CPU':>11}{'core':>7}",
    ]
    for i in repetitions:
        for side, name in SIDES.items():
            one = results[side][i]
            share = one["cpu"] / one["wall"]
            lines.append(f"{i + 1}  {name:48}{rate(one, 'wall'):11,.0f}{rate(one, 'cpu'):11,.0f}{share:7.0%}")
    middle = {side: [median(rate(r, c) for r in results[side]) for c in ("wall", "cpu")] for side in SIDES}
    lines += ["", "Medians"]
    lines += [f"   {name:48}{middle[side][0]:11,.0f}{middle[side][1]:11,.0f}" for side, name in SIDES.items()]
    lines += ["", f"{SIDES[ours]} is faster by (median over median; smallest and largest within a repetition)"]
    for side in theirs:
        cells = []
        for c, clock in enumerate(("wall", "cpu")):
            each = [rate(results[ours][i], clock) / rate(results[side][i], clock) for i in repetitions]
            cells.append(f"{clock} {middle[ours][c] / middle[side][c]:.1f}x ({min(each):.1f} to {max(each):.1f})")
        lines.append(f"   {SIDES[side]:48}{'   '.join(cells)}")

    lines += ["", "Is it the same bandit?", f"{'':51}{'regret':>9}{'s.e.':>7}{'tokens/round':>14}"]
    estimate = {}
    for side, name in SIDES.items():
        pulls = [run for result in results[side] for run in result["pulls"]]
        tokens = sum(sum(result["tokens"]) for result in results[side])
        values = regrets(pulls)
        mean, se = estimate[side] = fmean(values), stdev(values) / len(values) ** 0.5
        lines.append(f"   {name:48}{mean:9.1f}{se:7.2f}{tokens / sum(map(sum, pulls)):14.3f}")
    same = True
    for side in theirs:
        difference = estimate[ours][0] - estimate[side][0]
        z = difference / (estimate[ours][1] ** 2 + estimate[side][1] ** 2) ** 0.5
        same &= abs(z) < LARGEST_Z
        lines.append(f"   difference to {SIDES[side]}: {difference:+.1f} rounds, {z:+.1f} standard errors")
    lines.append(f"   {'yes' if same else 'NO: the speeds above do not compare'}")
    return "\n".join(lines) + "\n", same


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5, help="of each side; default 5")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of metasd_sim.simulate; default {RUNS}")
    parser.add_argument("--smpybandits-runs", type=int, default=40, help="of SMPyBandits in a repetition; default 40")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, help="the core to use; default: the last one allowed")
    parser.add_argument("--environment", type=Path, default=cache / "metasd" / "smpybandits-venv", help="SMPyBandits'")
    parser.add_argument("--interpreter", default=sys.executable, help="Python 3.11 or 3.12 to make that environment")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".txt"))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.side == "metasd":
        print(json.dumps(play_metasd(args.runs, args.seed)))
        return 0
    if args.side:
        print(json.dumps(play_smpybandits(args.runs, args.seed, args.side == "drawn-before")))
        return 0

    theirs = smpybandits_python(args.environment, args.interpreter)
    if hasattr(os, "sched_setaffinity"):  # the sides inherit it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if args.core is None else args.core})
    pythons = {side: sys.executable if side == "metasd" else theirs for side in SIDES}
    runs = {side: args.runs if side == "metasd" else args.smpybandits_runs for side in SIDES}
    results: dict[str, list[dict]] = {side: [] for side in SIDES}
    for i in range(args.repetitions):
        for k, side in enumerate(SIDES):
            print(f"repetition {i + 1} of {args.repetitions}: {SIDES[side]}", file=sys.stderr)
            results[side].append(run_side(pythons[side], side, runs[side], args.seed + len(SIDES) * i + k))
    text, same = report(results, runs)
    print(text, end="")
    args.out.write_text(text)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
