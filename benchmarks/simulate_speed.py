"""Speed and memory of `metasd_sim.simulate` beside a numba loop and SMPyBandits on the same bandits, on one core.

    python benchmarks/simulate_speed.py

Games, each played until 10,000 tokens have been emitted; accepted tokens N follow the capped geometric law:
  ucb       UCB1 on block efficiency N / gamma, draft length 5
  thompson  Thompson sampling with exact Beta draws, draft length 1: a round is one Bernoulli trial
  kl-ucb    Bernoulli KL-UCB, draft length 1
The sides of a game are processes of their own that never run at the same time and take turns. The numba loop plays one
run after the other and counts what `simulate` counts. SMPyBandits 0.9.7 imports only with numpy below 2 and scipy below
1.12: a virtual environment in the user's cache holds it (Python 3.11 or 3.12; `--interpreter` names one where this
Python has no such wheels). Its UCB is measured twice: with its own arms drawing one reward a round, and with all
rewards drawn before the clock starts, so that only `choice` and `getReward` count. The other sides draw within the
clock. Its KL-UCB runs without numba, whose `jit` it looks for where today's numba no longer has it.

Then the latency of a policy that decides for one row, as in live decoding, and the peak memory of short and long runs.

Exit code 1: the regrets of a game's sides differ, so that the speeds do not compare.
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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median, stdev

# Standard library only at the top: this file also runs in SMPyBandits' environment, which has no metasd.

ALPHAS = (0.9, 0.85, 0.8, 0.7, 0.6)
BUDGET = 10_000  # tokens
DRAFT_LENGTH = {"ucb": 5, "thompson": 1, "kl-ucb": 1}
SMPYBANDITS = "0.9.7"
REQUIREMENTS = (f"SMPyBandits=={SMPYBANDITS}", "numpy<2", "scipy<1.12")
LARGEST_Z = 4.0
MEMORY = {"arms": [0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93, 0.92], "draft length": 50, "runs": 100}
MEMORY_BUDGETS = (100_000, 10_000_000)


@dataclass(frozen=True)
class Side:
    game: str
    name: str
    runs: int  # in a repetition


SIDES = {  # the first of a game is ours
    "ucb/metasd": Side("ucb", "metasd_sim.simulate", 4_000),
    "ucb/numba": Side("ucb", "numba loop", 1_000),
    "ucb/own-arms": Side("ucb", f"SMPyBandits {SMPYBANDITS} UCB, its own arms", 40),
    "ucb/drawn-before": Side("ucb", f"SMPyBandits {SMPYBANDITS} UCB, rewards drawn before", 40),
    "thompson/metasd": Side("thompson", "metasd_sim.simulate", 2_000),
    "thompson/own-arms": Side("thompson", f"SMPyBandits {SMPYBANDITS} Thompson", 20),
    "kl-ucb/metasd": Side("kl-ucb", "metasd_sim.simulate", 1_000),
    "kl-ucb/own-arms": Side("kl-ucb", f"SMPyBandits {SMPYBANDITS} klUCB", 10),
}


def tokens_per_round(alpha: float, gamma: int) -> float:
    """g(alpha) = 1 + alpha + ... + alpha^gamma."""
    return sum(alpha**k for k in range(gamma + 1))


def regrets(pulls: list[list[int]], gamma: int) -> list[float]:
    """`sum_i (1 - g_i / g_*) n_i` of each run: regret in rounds, up to the overshoot of the last block."""
    g = [tokens_per_round(alpha, gamma) for alpha in ALPHAS]
    return [sum((1 - g_i / max(g)) * n for g_i, n in zip(g, run, strict=True)) for run in pulls]


def timed(play: Callable[[], None]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    play()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


# --- what runs in a process of its own


def play_metasd(game: str, runs: int, seed: int) -> dict[str, object]:
    import numpy as np

    from metasd_sim import StationaryEnvironment, make_policy, simulate

    spec = {"ucb": "metasd-ucb:reward=be,beta=1", "thompson": "thompson-trials", "kl-ucb": "kl-ucb-trials"}[game]

    def play(budget: int):
        return simulate(make_policy(spec), StationaryEnvironment(ALPHAS, DRAFT_LENGTH[game]), budget, runs, seed)

    outcomes = []
    play(BUDGET // 100)  # warm-up
    clock = timed(lambda: outcomes.append(play(BUDGET)))
    (outcome,) = outcomes
    return clock | {
        "pulls": outcome.pulls[:, 0].tolist(),
        "tokens": outcome.tokens[:, 0].tolist(),
        "switches": outcome.switches[:, 0].tolist(),
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}",
    }


def play_numba(runs: int, seed: int) -> dict[str, object]:
    """The bandit of the UCB game as a scalar loop, one run after the other."""
    import math

    import numba
    import numpy as np

    @numba.njit
    def play(rng, scale, gamma, budget, pulls, tokens, rounds, switches):
        arms = len(scale)
        value = np.zeros(arms)
        for run in range(len(tokens)):
            value[:] = 0.0
            n, last = pulls[run], -1
            switches[run] = -1
            while tokens[run] < budget:
                two_log_t = 2 * math.log(rounds[run] + 1.0)
                best, arm, tied = -math.inf, 0, 0
                for i in range(arms):
                    index = value[i] / n[i] + math.sqrt(two_log_t / n[i]) if n[i] else math.inf
                    if index > best:
                        best, arm, tied = index, i, 1
                    elif index == best:
                        tied += 1
                        if rng.random() * tied < 1:
                            arm = i
                accepted = min(int(rng.standard_exponential() * scale[arm]), gamma)
                value[arm] += accepted / gamma
                n[arm] += 1
                rounds[run] += 1
                tokens[run] += accepted + 1
                switches[run] += arm != last
                last = arm

    rng, scale, gamma = np.random.default_rng(seed), -1 / np.log(np.array(ALPHAS)), DRAFT_LENGTH["ucb"]

    def counts():
        return np.zeros((runs, len(ALPHAS)), dtype=np.int64), *np.zeros((3, runs), dtype=np.int64)

    play(rng, scale, gamma, 10, *counts())  # compiles
    pulls, tokens, rounds, switches = counts()
    clock = timed(lambda: play(rng, scale, gamma, BUDGET, pulls, tokens, rounds, switches))
    return clock | {
        "pulls": pulls.tolist(),
        "tokens": tokens.tolist(),
        "switches": switches.tolist(),
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}",
    }


def play_smpybandits(game: str, runs: int, seed: int, drawn_before: bool) -> dict[str, object]:
    import numpy as np
    from SMPyBandits.Arms import Bernoulli, DiscreteArm
    from SMPyBandits.Policies import UCB, Thompson, klUCB

    np.seterr(invalid="ignore")  # its first indices are 0 / 0, and set to infinity afterwards
    np.random.seed(seed)  # noqa: NPY002 - SMPyBandits draws from the global state
    # P(N = n) = alpha^n (1 - alpha) for n < gamma, alpha^gamma for n = gamma; UCB scales N by lower and amplitude
    gamma = DRAFT_LENGTH[game]
    laws = [{n: alpha**n * (1 - alpha if n < gamma else 1) for n in range(gamma + 1)} for alpha in ALPHAS]
    arms = [DiscreteArm(law) for law in laws] if gamma > 1 else [Bernoulli(alpha) for alpha in ALPHAS]
    make = {"ucb": UCB, "thompson": Thompson, "kl-ucb": klUCB}[game]
    all_pulls, all_tokens = [], []

    def play_one(budget: int) -> dict[str, float]:
        policy = make(len(arms), lower=0.0, amplitude=gamma)
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
        if game == "thompson":  # it counts pulls in its posteriors only, which start at 1, 1
            all_pulls.append([int(sum(posterior.N)) - 2 for posterior in policy.posterior])
        else:
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


def measure_latency(decisions: int = 1_000) -> dict[str, float]:
    """Microseconds of select and update together, one row and 8 arms; mean over `decisions`."""
    import numpy as np

    from metasd_sim import make_policy
    from metasd_sim.environments.base import Context
    from metasd_sim.rounds import Rounds

    latency = {}
    for spec in ("metasd-ucb:reward=be", "kl-ucb-trials", "thompson-trials"):
        policy, row, no = make_policy(spec), np.array([0]), np.array([False])
        policy.start(1, [f"arm {i}" for i in range(8)], 5, np.random.default_rng(0))
        rounds = [Rounds(row, row + 5, row + n, row + n + 1, 5) for n in range(6)]
        started = 0.0
        for step in range(decisions + 100):
            if step == 100:  # warm-up
                started = time.process_time()
            this = rounds[step % 6]
            this.arm = policy.select(row, Context(row, no))
            policy.update(row, this)
        latency[spec] = (time.process_time() - started) / decisions * 1e6
    return latency


def measure_memory(budget: int, seed: int) -> dict[str, float]:
    """Peak memory of this process, from its start, which simulates and summarises."""
    import resource

    from metasd_sim import StationaryEnvironment, make_policy, simulate, summarize

    environment, policy = StationaryEnvironment(MEMORY["arms"], MEMORY["draft length"]), make_policy("metasd-ucb")
    outcome = simulate(policy, environment, budget, MEMORY["runs"], seed)
    summarize(outcome, policy, environment)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"MB": peak / 1e6, "rounds": float(outcome.rounds.mean()), "seconds": time.process_time()}


# --- the other processes and the report


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


def run_side(python: str, side: str, seed: int) -> dict:
    print(side, file=sys.stderr)
    command = [python, __file__, "--side", side, "--seed", str(seed)]
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
    done = subprocess.run(command, env=os.environ | one_thread, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # SMPyBandits prints remarks while it is imported


def play_side(side: str, seed: int) -> dict:
    game, _, player = side.partition("/")
    if game == "latency":
        return measure_latency()
    if game == "memory":
        return measure_memory(int(player), seed)
    runs = SIDES[side].runs
    if player == "metasd":
        return play_metasd(game, runs, seed)
    if player == "numba":
        return play_numba(runs, seed)
    return play_smpybandits(game, runs, seed, player == "drawn-before")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def rate(result: dict, clock: str) -> float:
    return sum(map(sum, result["pulls"])) / result[clock]


def z_score(ours: list[float], theirs: list[float]) -> float:
    errors = [stdev(values) / len(values) ** 0.5 for values in (ours, theirs)]
    return (fmean(ours) - fmean(theirs)) / (errors[0] ** 2 + errors[1] ** 2) ** 0.5


def report_game(game: str, results: dict[str, list[dict]]) -> tuple[list[str], bool]:
    sides = [side for side in SIDES if SIDES[side].game == game]
    ours = sides[0]
    gamma = DRAFT_LENGTH[game]
    lines = [
        f"{game}, draft length {gamma}: rounds per second",
        f"   {'':44}{'runs':>6}{'CPU':>12}{'smallest':>12}{'largest':>12}{'wall':>12}{'core':>6}"
        f"{'regret':>8}{'s.e.':>6}",
    ]
    values = {}
    for side in sides:
        cpu = [rate(result, "cpu") for result in results[side]]
        share = sum(result["cpu"] for result in results[side]) / sum(result["wall"] for result in results[side])
        values[side] = regrets([run for result in results[side] for run in result["pulls"]], gamma)
        lines.append(
            f"   {SIDES[side].name:44}{SIDES[side].runs:6,}{median(cpu):12,.0f}{min(cpu):12,.0f}{max(cpu):12,.0f}"
            f"{median(rate(result, 'wall') for result in results[side]):12,.0f}{share:6.0%}"
            f"{fmean(values[side]):8.1f}{stdev(values[side]) / len(values[side]) ** 0.5:6.2f}"
        )
    same = True
    for side in sides[1:]:
        each = [rate(a, "cpu") / rate(b, "cpu") for a, b in zip(results[ours], results[side], strict=True)]
        z = {"regrets": z_score(values[ours], values[side])}
        if "switches" in results[side][0]:
            switches = [[n for result in results[s] for n in result["switches"]] for s in (ours, side)]
            z["switches"] = z_score(*switches)
        same &= all(abs(score) < LARGEST_Z for score in z.values())
        apart = " and ".join(f"{what} {score:+.1f}" for what, score in z.items())
        factor = f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
        lines.append(f"   {factor:>24} times {SIDES[side].name}; {apart} standard errors apart")
    return [*lines, ""], same


def report(results: dict[str, list[dict]], repetitions: int) -> tuple[str, bool]:
    lines = [
        f"{processor()}, {os.cpu_count()} cores, one of them used; {platform.system()}",
        f"{len(ALPHAS)} arms, alphas {', '.join(f'{a:g}' for a in ALPHAS)}, budget {BUDGET} tokens; "
        f"{repetitions} repetitions, taking turns",
        *(f"{name}: {results[side][0]['versions']}" for name, side in
          (("metasd", "ucb/metasd"), ("numba", "ucb/numba"), ("SMPyBandits", "ucb/own-arms"))),
        "",
        "CPU: by the processor time of the process, which other work on the machine disturbs less than the wall clock;",
        "medians over the repetitions. Factors: of the CPU rates within a repetition, median (smallest to largest).",
        "Core: the share of the core that the process got; far below 100% the machine was busy and wall says little.",
        "",
    ]  # fmt: skip
    same = True
    for game in DRAFT_LENGTH:
        more, good = report_game(game, results)
        lines += more
        same &= good
    lines.append("Same bandit: yes" if same else "Same bandit: NO, the speeds above do not compare")
    lines += ["", "Select and update for one row, 8 arms: microseconds of CPU, median (smallest to largest)"]
    for spec in results["latency"][0]:
        each = [result[spec] for result in results["latency"]]
        lines.append(f"   {spec:24}{median(each):7.1f} ({min(each):.1f} to {max(each):.1f})")
    lines += [
        "",
        f"Peak memory of the process, simulate and summarize: {MEMORY['runs']} runs, {len(MEMORY['arms'])} arms, "
        f"draft length {MEMORY['draft length']}, metasd-ucb",
    ]
    for budget in MEMORY_BUDGETS:
        (used,) = results[f"memory/{budget}"]
        lines.append(
            f"   budget {budget:12,} tokens, {used['rounds']:9,.0f} rounds: {used['MB']:5.0f} MB, "
            f"{used['seconds']:.0f} s of CPU"
        )
    return "\n".join(lines) + "\n", same


def main() -> int:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5, help="of each side; default 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, help="the core to use; default: the last one allowed")
    parser.add_argument("--environment", type=Path, default=cache / "metasd" / "smpybandits-venv", help="SMPyBandits'")
    parser.add_argument("--interpreter", default=sys.executable, help="Python 3.11 or 3.12 to make that environment")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".txt"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.side:
        print(json.dumps(play_side(args.side, args.seed)))
        return 0

    if find_spec("numba") is None:
        sys.exit("numba: expected it beside metasd, found none; pip install 'metasd[bench]'")
    theirs = smpybandits_python(args.environment, args.interpreter)
    if hasattr(os, "sched_setaffinity"):  # the sides inherit it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if args.core is None else args.core})
    results: dict[str, list[dict]] = {side: [] for side in (*SIDES, "latency")}
    for i in range(args.repetitions):
        for k, side in enumerate(results):
            python = theirs if side.endswith(("own-arms", "drawn-before")) else sys.executable
            results[side].append(run_side(python, side, args.seed + len(results) * i + k))
    for budget in MEMORY_BUDGETS:
        results[f"memory/{budget}"] = [run_side(sys.executable, f"memory/{budget}", args.seed)]
    text, same = report(results, args.repetitions)
    print(text, end="")
    args.out.write_text(text)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
