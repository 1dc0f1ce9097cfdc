"""Seconds per prompt: predicted by replaying a trace against measured in live decoding of the same prompts.

    python benchmarks/predicted_seconds.py traces/smollm2-greedy.safetensors --prompts 10

Every arm alone, UCB and Thompson sampling decode evaluation prompts of the trace, in turns on each prompt, so that a
slow spell of the machine hits all alike. Greedy runs are replayed round by round, so what differs is the seconds alone:
the prediction is the trace's cost model on the rounds that were played. Writes a table and a figure beside this script.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from metasd_live.decode import LiveEnvironment
from metasd_live.drafters import ArmSpec, build_arms, parse_arm
from metasd_live.prompts import read_prompts
from metasd_live.target import load_target
from metasd_live.verify import Rule
from metasd_sim import ReplayEnvironment, make_policy, simulate, traces

HERE = Path(__file__).parent


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--file", default=str(HERE.parent / "traces" / "prompts.jsonl"), help="prompts by id")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(HERE / "predicted_seconds"))
    arguments = parser.parse_args()

    trace = traces.read(arguments.trace)
    assert trace.costs is not None
    texts = {prompt.id: prompt for prompt in read_prompts([arguments.file], split="evaluate")}
    categories = sorted({prompt.category for prompt in texts.values()})
    chosen: list[int] = []  # the same number of prompts of each category, in the trace's order
    for i in range(-(-arguments.prompts // len(categories))):
        for category in categories:
            own = [q for q, query in enumerate(trace.queries) if query.category == category and query.id in texts]
            chosen += own[i : i + 1]
    chosen = chosen[: arguments.prompts]

    target = load_target(trace.provenance["target"])
    specs = [ArmSpec(name, parse_arm(text).drafter) for name, text in zip(trace.arms, trace.drafters, strict=True)]
    arms = build_arms(specs, target, trace.max_draft)
    rule = Rule(trace.verification, trace.provenance["temperature"])
    policies = [f"fixed:{name}" for name in trace.arms] + ["metasd-ucb:reward=be", "thompson-trials"]
    measured, predicted = np.zeros((2, len(policies), len(chosen)))
    same = 0
    started = time.perf_counter()
    for column, q in enumerate(chosen):
        prompt = target.encode(texts[trace.queries[q].id].text, trace.provenance["chat_template"])
        live = LiveEnvironment(target, arms, [prompt], trace.max_new_tokens, rule, seed=arguments.seed)
        replay = ReplayEnvironment(trace.select([q]))
        order = np.random.default_rng((arguments.seed, q)).permutation(len(policies))
        for row in order:
            outcomes = [
                simulate(make_policy(policies[row], arms=trace.arms), environment, seed=q, history=True)
                for environment in (live, replay)
            ]
            played, replayed = (o.history.rounds.accepted.tolist() for o in outcomes if o.history is not None)
            same += played == replayed
            measured[row, column], predicted[row, column] = (float(o.query_seconds.sum()) for o in outcomes)

    lines = [
        f"{Path(arguments.trace).name}: {trace.provenance['target']}, {trace.verification}, {len(chosen)} prompts",
        f"{processor()}, {trace.provenance['threads']} threads; {time.perf_counter() - started:.0f} s of decoding",
        f"rounds equal to the replayed ones: {same} of {measured.size} runs",
        "",
        "seconds per prompt        measured  predicted   ratio   (95% over prompts)   rms of a prompt's relative error",
    ]
    for row, name in enumerate(policies):
        ratio = predicted[row].sum() / measured[row].sum()
        residual = predicted[row] - ratio * measured[row]
        error = 1.96 * np.sqrt(len(chosen) * residual.var(ddof=1)) / measured[row].sum()
        rms = np.sqrt(((predicted[row] / measured[row] - 1) ** 2).mean())
        lines.append(
            f"{name:24s} {measured[row].mean():9.2f}  {predicted[row].mean():9.2f}   {ratio:.3f}   "
            f"({ratio - error:.3f} to {ratio + error:.3f})     {rms:.1%}"
        )
    plain = measured[policies.index("fixed:none")].sum() if "fixed:none" in policies else np.nan
    replay_plain = predicted[policies.index("fixed:none")].sum() if "fixed:none" in policies else np.nan
    lines += ["", "speedup over fixed:none   measured  predicted"]
    for row, name in enumerate(policies):
        lines.append(f"{name:24s} {plain / measured[row].sum():9.3f}  {replay_plain / predicted[row].sum():9.3f}")
    text = "\n".join(lines) + "\n"
    print(text)
    Path(arguments.out + ".txt").write_text(text)

    figure, ax = plt.subplots(figsize=(6, 5.5), layout="constrained")
    for row, name in enumerate(policies):
        ax.plot(measured[row], predicted[row], "o", markersize=4, label=name)
    limit = 1.05 * max(measured.max(), predicted.max())
    ax.plot([0, limit], [0, limit], "k-", linewidth=0.8)
    ax.set(xlabel="measured seconds of a prompt's rounds", ylabel="predicted", xlim=(0, limit), ylim=(0, limit))
    ax.legend(fontsize="small")
    figure.savefig(arguments.out + ".png", dpi=110)


if __name__ == "__main__":
    main()
