"""What the subcommands of `metasd-live` do, and the tables they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress, TaskID

from metasd_sim import console, traces
from metasd_sim.errors import InputError
from metasd_sim.files import check_outputs, write_atomically
from metasd_sim.policies import check_reward, make_policy
from metasd_sim.rounds import IntArray, Rounds
from metasd_sim.simulate import parse_carry_over
from metasd_sim.traces import Trace

from .bench import PLAIN, Settings, bench, round_parts
from .compare import Difference, first_difference, plain_text
from .decode import Generation, generate
from .drafters import Arm, ArmSpec, build_arms, longest_draft, parse_arm
from .drafters.head import write_vocabulary
from .drafters.ngram import train_ngram, write_ngram
from .ending import Ending
from .outputs import Output, generate_outputs, read_outputs, to_lines
from .prompts import Prompt, read_prompts
from .record import Recorder, calibrated, check_out, record
from .sampling import ModelSettings, make_rule, recorded_rule, settings_of
from .settings import CausalSettings, EagleSettings, MedusaSettings, NgramSettings
from .target import Target, load_target
from .train import (
    Evaluation,
    TrainingText,
    check_training_out,
    count_vocabulary,
    cut,
    cut_texts,
    output_sequences,
    output_texts,
    text_sequences,
    train_drafter,
)
from .verify import Rule

# of a round's time, for people
ROUND_COLUMNS = (
    ("draft", ("draft",)),
    ("catch-up", ("catch_up",)),
    ("pass", ("verify",)),
    ("choice", ("choose",)),
    ("scoring", ("score",)),
    ("policy", ("policy",)),
    ("overhead", ("commit", "rest")),
)


def _prompts(arguments: argparse.Namespace, **choice: Any) -> list[Prompt]:
    choice = {"split": arguments.split, "limit": arguments.limit} | choice
    return read_prompts(arguments.prompts, **choice)


def _target(arguments: argparse.Namespace) -> Target:
    return load_target(arguments.target, arguments.dtype, arguments.device, arguments.device_map, arguments.engine)


def _torch_target(arguments: argparse.Namespace) -> Target:
    """Training wants gradients, and texts in batches: torch unless told otherwise."""
    engine = "torch" if arguments.engine == "auto" else arguments.engine
    return load_target(arguments.target, arguments.dtype, arguments.device, arguments.device_map, engine)


def _rule(arguments: argparse.Namespace, target: Target | None = None) -> Rule:
    """The rule asked for; with the `target` also what its own settings ask for and nobody has said otherwise."""
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    own = ModelSettings() if target is None or arguments.no_model_settings else settings_of(target)
    if own.ignored and target is not None and not arguments.quiet:
        found = ", ".join(own.ignored)
        print(f"note: the settings of {target.name} ask for {found}, which is not followed", file=sys.stderr)
    return make_rule(
        arguments.temperature,
        arguments.verification,
        logit_bias=dict(arguments.logit_bias),
        **dict(own.options) | given,
        more=own.more,
        eos=() if target is None else Ending.of(target, _eos(arguments), ()).eos,
        device="cpu" if target is None else str(target.device),
    )


def _stops(arguments: argparse.Namespace, target: Target) -> list[str]:
    """Stop strings: those given, else the target's own."""
    if arguments.stop or arguments.no_model_settings:
        return list(arguments.stop)
    return list(settings_of(target).stop_strings)


def _eos(arguments: argparse.Namespace) -> list[int] | None:
    if arguments.no_eos and arguments.eos:
        raise InputError("--no-eos: expected no --eos beside it, found one; leave one out")
    return [] if arguments.no_eos else arguments.eos


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
    check_outputs(arguments.out, arguments.save_outputs, arguments.json, force=arguments.force)
    settings = NgramSettings(arguments.max_context, arguments.min_context, arguments.min_share)
    source = _check_source(arguments)
    target = _torch_target(arguments)
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
    _train(arguments, CausalSettings)


def run_train_eagle(arguments: argparse.Namespace) -> None:
    _train(arguments, EagleSettings)


def run_train_medusa(arguments: argparse.Namespace) -> None:
    _train(arguments, MedusaSettings)


def _train(
    arguments: argparse.Namespace, kind: type[CausalSettings] | type[EagleSettings] | type[MedusaSettings]
) -> None:
    begun = check_training_out(arguments.out, arguments.force)
    check_outputs(arguments.json, None if begun else arguments.save_outputs, force=arguments.force)
    settings = kind(**{field.name: getattr(arguments, field.name) for field in fields(kind)})
    source = _check_source(arguments)
    evaluation = _evaluation(arguments)
    target = _torch_target(arguments)
    texts = _training_texts(arguments, target)
    with console.progress(arguments.quiet) as display:
        tasks: dict[str, TaskID] = {}

        def on_step(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = display.add_task(what)
            display.update(tasks[what], completed=done, total=of)

        record = train_drafter(
            texts, target, settings, arguments.out, arguments.seed, source, evaluation, arguments.force, on_step
        )
    console.write_json({"out": arguments.out, **record}, arguments.json, arguments.force)
    columns = ["epoch", "training loss", "held-out loss", "held-out argmax hits"]
    rows = [
        [one["epoch"], f"{one['training_loss']:.3f}", f"{one['held_out_loss']:.3f}", f"{one['held_out_top1']:.1%}"]
        for one in record["curve"]
    ]
    title = f"{arguments.out}: {record['parameters']:,} parameters learnt, {record['tokens']:,} tokens of text"
    console.table(title, columns, rows, arguments.quiet)
    found = record["evaluation"]
    if found is not None:
        depths = found["accepted_by_depth"]
        console.table(
            f"accepted tokens of a round of {len(depths)} drafts, greedy, mean over {found['tokens']} positions of "
            f"{len(found['prompts'])} texts",
            ["mean accepted", *(f"first {depth} accepted" for depth in range(1, len(depths) + 1))],
            [[f"{found['mean_accepted']:.2f}", *(f"{share:.1%}" for share in depths)]],
            arguments.quiet,
        )


def _training_texts(arguments: argparse.Namespace, target: Target) -> list[TrainingText]:
    """Training texts, whole, with the place where the target's own part begins."""
    if arguments.text:
        texts = [TrainingText(sequence) for sequence in text_sequences(arguments.text, target)]
    else:
        texts = output_texts(_outputs(arguments, target), arguments.category, None, arguments.seed)
    return cut_texts(texts, arguments.tokens)


def _evaluation(arguments: argparse.Namespace) -> Evaluation | None:
    """Prompts of the split calibrate, of --evaluate-prompts or else of --prompts."""
    if not arguments.evaluate:
        return None
    files = arguments.evaluate_prompts or arguments.prompts
    if not files:
        raise InputError("--evaluate: expected prompts to evaluate on, found none; pass --evaluate-prompts FILE")
    prompts = read_prompts(files, split="calibrate", limit=arguments.evaluate, shuffle=arguments.seed)
    template = not arguments.no_chat_template
    return Evaluation(prompts, arguments.max_new_tokens, arguments.draft_length, template)


def run_train_vocabulary(arguments: argparse.Namespace) -> None:
    check_outputs(arguments.out, arguments.save_outputs, arguments.json, force=arguments.force)
    _check_source(arguments)
    target = _torch_target(arguments)
    found = count_vocabulary(_sequences(arguments, target, 0), target, arguments.size, arguments.seed)
    write_vocabulary(found.known, target.tokenizer_hash, arguments.out, arguments.force)
    result = {
        "out": arguments.out,
        "size": len(found.known),
        "target_size": target.vocab_size,
        "tokens": found.tokens,
        "held_out_coverage": found.coverage,
    }
    console.write_json(result, arguments.json, arguments.force)
    columns = ["vocabulary", "size", "of the target's", "tokens counted", "held-out tokens covered"]
    row = [arguments.out, result["size"], target.vocab_size, found.tokens, f"{found.coverage:.2%}"]
    console.table("reduced vocabulary", columns, [row], arguments.quiet)


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
        content, path = to_lines(outputs, target.tokenizer_hash).encode(), Path(arguments.save_outputs)
        if not (path.is_file() and path.read_bytes() == content):  # as a training that resumes finds it
            write_atomically(path, content, arguments.force)
    return outputs


def run_record(arguments: argparse.Namespace) -> None:
    check_out(arguments.out, arguments.force)
    check_outputs(arguments.json, force=arguments.force)
    _rule(arguments)  # refuses wrong values before anything is loaded
    specs = [parse_arm(text) for text in arguments.drafter]
    prompts = _prompts(arguments, shuffle=arguments.shuffle)
    calibration = _calibration(arguments)
    target = _target(arguments)
    arms = build_arms(specs, target, arguments.draft_length)
    rule = _rule(arguments, target)
    recorder = Recorder(
        target,
        arms,
        arguments.max_new_tokens,
        rule,
        not arguments.no_chat_template,
        arguments.seed,
        arguments.overlap_dtype,
        arguments.blocks,
        _eos(arguments),
        _stops(arguments, target),
        arguments.signals,
    )
    with console.progress(arguments.quiet) as display:
        texts = display.add_task("prompts", total=len(prompts))
        rounds = _calibration_rounds(display, arms, arguments)
        trace = record(
            recorder,
            prompts,
            arguments.out,
            calibration,
            arguments.repetitions,
            arguments.force,
            lambda: display.advance(texts),
            lambda: display.advance(rounds),
        )
    _report_trace(trace, arguments)


def run_calibrate(arguments: argparse.Namespace) -> None:
    check_outputs(arguments.out, arguments.json, force=arguments.force)
    trace = traces.read(arguments.trace)
    calibration = _calibration(arguments)
    target = _target(arguments)
    if target.tokenizer_hash != trace.provenance.get("tokenizer"):
        raise InputError(f"{arguments.trace}: expected a trace of this target's tokenizer, found another; give its own")
    specs = [ArmSpec(name, parse_arm(text).drafter) for name, text in zip(trace.arms, trace.drafters, strict=True)]
    arms = build_arms(specs, target, trace.max_draft)
    recorder = Recorder(
        target,
        arms,
        trace.max_new_tokens,
        recorded_rule(
            trace.provenance["temperature"],
            trace.verification,
            trace.provenance.get("processors", []),
            trace.provenance.get("eos", ()),
            str(target.device),
        ),
        trace.provenance["chat_template"],
        arguments.seed,
    )
    with console.progress(arguments.quiet) as display:
        rounds = _calibration_rounds(display, arms, arguments)
        trace = calibrated(trace, recorder, calibration, arguments.repetitions, lambda: display.advance(rounds))
    traces.write(trace, arguments.out, arguments.force)
    _report_trace(trace, arguments)


def _calibration(arguments: argparse.Namespace) -> list[Prompt]:
    """Prompts to measure costs on."""
    if not arguments.calibrate:
        return []
    return _prompts(arguments, split="calibrate", limit=arguments.calibrate, shuffle=arguments.seed)


def _calibration_rounds(display: Progress, arms: Sequence[Arm], arguments: argparse.Namespace) -> TaskID:
    timed = arguments.repetitions * (longest_draft(arms) + 1 + len(arms)) if arguments.calibrate else 0
    return display.add_task("calibration rounds", total=timed)


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
    check_outputs(arguments.json, force=arguments.force)
    rule = _rule(arguments)
    if arguments.check and rule.verification != "greedy":
        raise InputError(f"--check: expected temperature 0, found {rule.temperature:g}; sampled texts differ rightly")
    parse_carry_over(arguments.carry_over)
    specs = [parse_arm(text) for text in arguments.drafter]
    if (arguments.prompt is None) == (not arguments.prompts):
        found = "both" if arguments.prompts else "none"
        raise InputError(f"generate: expected either a prompt or --prompts FILE, found {found}")
    prompts = [Prompt("prompt", arguments.prompt)] if arguments.prompt is not None else _prompts(arguments)
    names = [spec.name for spec in specs]
    policy = make_policy(arguments.policy, arguments.reward, names, [spec.drafter.text for spec in specs])
    check_reward(arguments.reward, [policy])
    target = _target(arguments)
    arms = build_arms(specs, target, arguments.draft_length)
    rule, stops = _rule(arguments, target), _stops(arguments, target)
    if arguments.stream and arguments.batch_size > 1:
        raise InputError(f"--stream: expected a batch size of 1, found {arguments.batch_size}")
    with console.progress(arguments.quiet or arguments.stream) as display:
        tokens = display.add_task("tokens", total=len(prompts) * arguments.max_new_tokens)

        def on_round(rows: IntArray, rounds: Rounds) -> None:
            display.advance(tokens, int(rounds.emitted.sum()))

        stream = _Stream(target, prompts) if arguments.stream else None

        try:
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
                batch_size=arguments.batch_size,
                drafting=not arguments.no_draft,
                draft_up_to=arguments.draft_up_to,
                eos=_eos(arguments),
                stop_strings=stops,
                on_text=stream,
            )
        finally:
            if stream is not None:
                stream.end()
    records = [generation.to_json() for generation in generations]
    checks = _checks(arguments, target, prompts, generations, rule) if arguments.check else []
    for written, difference in zip(records, checks, strict=False):
        written["difference"] = None if difference is None else difference.to_json()
    console.write_json(records, arguments.json, arguments.force)
    _show_generations(generations, arms, arguments.quiet, texts=not arguments.stream)
    _show_checks(generations, checks, arguments.quiet)


def _checks(
    arguments: argparse.Namespace,
    target: Target,
    prompts: Sequence[Prompt],
    generations: Sequence[Generation],
    rule: Rule,
) -> list[Difference | None]:
    """Where each text leaves the one that transformers writes alone."""
    ending = Ending.of(target, _eos(arguments), _stops(arguments, target))
    found = []
    for prompt, generation in zip(prompts, generations, strict=True):
        ids = target.encode(prompt.text, not arguments.no_chat_template)
        plain = plain_text(target, ids, arguments.max_new_tokens, rule, ending)
        found.append(first_difference(target, ids, generation.token_ids, plain, rule))
    return found


def _show_checks(generations: Sequence[Generation], checks: Sequence[Difference | None], quiet: bool) -> None:
    """Refuses mismatches; near-ties are no fault."""
    named = [(g.id, difference) for g, difference in zip(generations, checks, strict=False) if difference is not None]
    wrong = [f"{name}: {difference}" for name, difference in named if not difference.near_tie]
    if wrong:
        raise InputError(f"check: expected the texts of plain decoding, found others: {'; '.join(wrong)}")
    if checks and not quiet:
        print(f"check: {len(checks) - len(named)} of {len(checks)} texts equal plain decoding")
        for name, difference in named:
            print(f"{name}: {difference}")


class _Stream:
    """Prints the new text of each prompt as its tokens come; half a character waits for its other half, or the end."""

    def __init__(self, target: Target, prompts: Sequence[Prompt]) -> None:
        self.target, self.prompts = target, prompts
        self.prompt, self.tokens, self.text, self.printed = -1, [0], "", 0

    def __call__(self, prompt: int, tokens: list[int]) -> None:
        if prompt != self.prompt:
            self.end()
            print(f"--- {self.prompts[prompt].id}")
            self.prompt, self.tokens, self.text, self.printed = prompt, [], "", 0
        self.tokens.extend(tokens)
        self.text = self.target.decode(self.tokens)
        if not self.text.endswith("\ufffd"):
            self._print()

    def end(self) -> None:
        """No more of this prompt comes: what was held back is all there is."""
        if self.prompt >= 0:
            self._print()
            print()

    def _print(self) -> None:
        print(self.text[self.printed :], end="", flush=True)
        self.printed = len(self.text)


def _show_generations(generations: Sequence[Generation], arms: Sequence[Arm], quiet: bool, texts: bool) -> None:
    if quiet:
        return
    for generation in generations if texts else ():
        print(f"--- {generation.id}\n{generation.text}\n")
    rounds = [played for generation in generations for played in generation.rounds]
    rows = []
    for arm in arms:
        own = [played for played in rounds if played["arm"] == arm.name]
        if own:
            drafted, accepted, emitted = (
                sum(played[key] for played in own) for key in ("drafted", "accepted", "emitted")
            )
            parts = round_parts(own)
            seconds = sum(parts.values())
            rows.append(
                [
                    arm.name,
                    f"{emitted / seconds:.2f}",
                    f"{emitted / len(own):.2f}",
                    f"{accepted / drafted:.1%}" if drafted else "-",
                    *(f"{1e3 * sum(parts[name] for name in names) / len(own):.2f}" for _, names in ROUND_COLUMNS),
                    len(own),
                    f"{seconds:.2f}",
                ]
            )
    phases = [name for name, _ in ROUND_COLUMNS]
    columns = ["arm", "tokens/s", "tokens a round", "accepted", *phases, "rounds", "total s"]
    title = f"seconds of prefill: {sum(g.prefill_seconds for g in generations):.2f}; phases in milliseconds a round"
    console.table(title, columns, rows)


def run_bench(arguments: argparse.Namespace) -> None:
    check_outputs(arguments.json, force=arguments.force)
    _rule(arguments)  # refuses wrong values before anything is loaded
    parse_carry_over(arguments.carry_over)
    specs = [parse_arm(text) for text in arguments.drafter]
    prompts = _prompts(arguments)
    names, drafters = [spec.name for spec in specs], [spec.drafter.text for spec in specs]
    policies = [make_policy(text, arguments.reward, names, drafters) for text in arguments.policy]
    check_reward(arguments.reward, policies)
    target = _target(arguments)
    arms = build_arms(specs, target, arguments.draft_length)
    settings = Settings(
        target,
        arguments.max_new_tokens,
        _rule(arguments, target),
        _eos(arguments),
        tuple(_stops(arguments, target)),
        arguments.carry_over,
        arguments.seed,
    )
    encoded = [target.encode(prompt.text, not arguments.no_chat_template) for prompt in prompts]
    with console.progress(arguments.quiet) as display:
        runs = display.add_task("runs", total=None)
        records = bench(
            settings,
            arms,
            encoded,
            policies,
            arguments.repetitions,
            not arguments.no_transformers,
            lambda: display.advance(runs),
            lambda total: display.update(runs, total=total),
        )
    for one in records:
        one["settings"] |= {"prompt_files": arguments.prompts, "split": arguments.split}
        for place in (*one["runs"], *one.get("texts", {}).get("where", ())):
            place["prompt"] = prompts[place["prompt"]].id
    console.write_json(records, arguments.json, arguments.force)
    _show_bench(records, arguments.quiet)


def _show_bench(records: Sequence[dict[str, Any]], quiet: bool) -> None:
    settings, device = records[0]["settings"], records[0]["device"]
    title = (
        f"{settings['target']} by {settings['engine']['name']} in {settings['dtype']} on {device['name']}, "
        f"{device['threads']} threads: "
        f"{settings['prompts']} prompts, {settings['repetitions']} times, {settings['max_new_tokens']} tokens at most; "
        f"prefill included, 95% intervals over prompts; theirs: transformers with that drafter, or else plain"
    )
    columns = ["contestant", "tokens/s", f"over {PLAIN}", "over theirs", "tokens/call", "rounds", "switches"]
    rows = []
    for one in records:
        texts = one.get("texts")
        rows.append(
            [
                one["contestant"],
                _interval(one, "tokens_per_second", 1),
                _interval(one, "speedup", 3),
                _interval(one, "ratio_to_counterpart", 3),
                *(
                    _number(one[key], digits)
                    for key, digits in (("tokens_per_call", 2), ("rounds", 0), ("switches", 0))
                ),
                *([_texts(texts)] if texts else []),
            ]
        )
    console.table(title, [*columns, *(["texts"] if "texts" in records[0] else [])], rows, quiet)

    timed = [one for one in records if one["shares"]]
    rows = [
        [
            one["contestant"],
            f"{1e3 * one['round_seconds']:.2f}",
            *(f"{sum(one['shares'][name] for name in names):.2%}" for _, names in ROUND_COLUMNS),
        ]
        for one in timed
    ]
    columns = ["shares of a round", "ms/round", *(name for name, _ in ROUND_COLUMNS)]
    console.table("overhead: rollback, bookkeeping and the loop", columns, rows, quiet)

    peaks = device["type"] == "cuda"
    rows = []
    for one in records:
        memory = one["memory"] or {}
        keys = ("weight_bytes", "table_bytes", "state_bytes_per_token", "state_table_bytes_per_token")
        if memory or peaks:
            peak = [_number(one["cuda_peak_bytes"], 0)] if peaks else []
            rows.append([one["contestant"], *(_number(memory.get(key), 0) for key in keys), *peak])
    columns = [
        "bytes of",
        "weights",
        "tables",
        "state/token",
        "its tables/token",
        *(["peak in a run"] if peaks else []),
    ]
    note = "" if peaks else "; the peak of a run is not measured on this device"
    console.table(f"memory that is not the target's, weights and state exact{note}", columns, rows, quiet)
    rows = [
        [kind.replace("_", " "), found["rows"], found["equal"], f"{found['largest']:.2g}", found["changed"]]
        for kind, found in records[0]["blocks"].items()
    ]
    columns = ["blocks", "rows of logits", "equal", "largest difference", "greedy tokens changed"]
    console.table("a pass over several tokens against single steps", columns, rows, quiet)
    for one in records:
        if one["retired"]:
            print(f"{one['contestant']}: its drafter failed and was retired: {one['retired']}")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _interval(record: dict[str, Any], key: str, digits: int) -> str:
    value, interval = record.get(key), record.get(f"{key}_ci")
    if value is None or interval is None:
        return _number(value, digits)
    return f"{value:.{digits}f} ({interval[0]:.{digits}f}-{interval[1]:.{digits}f})"


def _texts(texts: dict[str, Any]) -> str:
    other = [
        f"{texts[key]} {name}" for key, name in (("near_ties", "near-ties"), ("mismatches", "DIFFER")) if texts[key]
    ]
    return ", ".join([f"{texts['equal']} same", *other])
