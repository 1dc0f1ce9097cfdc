"""What shapes the target's law besides its temperature: penalties, biases, custom processors, truncation.

All are `LogitsProcessor`s of transformers, called as plain decoding would call them, in its order: logit bias,
repetition and frequency penalties, the model's own settings, custom ones, then temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from metasd_sim.errors import InputError

from .processors import PROCESSORS, STATEFUL, WARPERS, FrequencyPenalty, LogitBias, answers_any_text, build, is_neutral
from .target import Target
from .verify import Rule


def make_rule(
    temperature: float = 0.0,
    verification: str | None = None,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    logits_processor: Sequence[Any] = (),
    more: Mapping[str, Any] | None = None,
    eos: Collection[int] = (),
    device: str = "cpu",
) -> Rule:
    """The rule of verification with its processors; greedy at temperature 0, else rejection unless told.

    Truncation (top-k, top-p, min-p) leaves the argmax, so greedy decoding does without it. `more` are settings of
    transformers by their names there (those of `PROCESSORS` and `WARPERS`); some act on the ids `eos` that end a text.
    """
    more = dict(more or {})
    unknown = sorted(set(more) - set(PROCESSORS) - set(WARPERS))
    if unknown:
        raise InputError(f"settings: expected {', '.join([*PROCESSORS, *WARPERS])}; found {', '.join(unknown)}")
    processors: list[Any] = []
    settings: list[str] = []

    def setting(name: str, value: float | None, neutral: float, low: float, high: float, expected: str) -> bool:
        """Whether the option changes anything; refuses a value outside (low, high]."""
        if value is None or value == neutral:
            return False
        if not low < value <= high or not math.isfinite(value):
            raise InputError(f"{name}: expected {expected}, found {value}")
        settings.append(f"{name}={value:.12g}")
        return True

    if logit_bias:
        for token, value in logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0 or not math.isfinite(value):
                raise InputError(f"logit_bias: expected token ids with finite numbers, found {token!r}: {value}")
        processors.append(LogitBias(logit_bias))
        settings.append(
            "logit_bias=" + ",".join(f"{token}:{value:.12g}" for token, value in sorted(logit_bias.items()))
        )
    if setting("repetition_penalty", repetition_penalty, 1.0, 0.0, math.inf, "a number above 0 (1: none)"):
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=float(repetition_penalty or 1)))
    counted = [
        setting("frequency_penalty", frequency_penalty, 0.0, -math.inf, math.inf, "a finite number (0: none)"),
        setting("presence_penalty", presence_penalty, 0.0, -math.inf, math.inf, "a finite number (0: none)"),
    ]
    if any(counted):
        processors.append(FrequencyPenalty(frequency_penalty or 0.0, presence_penalty or 0.0))
    for name, value in more.items():  # refuses wrong values, needed here or not
        found = build(name, value, eos, device)
        if found is not None:
            settings.append(f"{name}={json.dumps(_plain(value))}")
    for name in PROCESSORS:
        found = build(name, more.get(name), eos, device)
        if found is not None and name == "sequence_bias":
            processors.insert(0, found)
        elif found is not None:
            processors.append(found)
    for custom in logits_processor:
        name = type(custom).__name__
        if not callable(custom) or name in STATEFUL:
            raise InputError(
                f"logits_processor: expected functions of the text so far, found {name}, which keeps a state of its "
                f"own; leave it out or decode plainly"
            )
        processors.append(custom)
        settings.append(name)

    warpers: list[Any] = []
    if setting("top_k", top_k, 0, 0, math.inf, "a whole number of tokens (0: all)") and top_k is not None:
        if int(top_k) != top_k:
            raise InputError(f"top_k: expected a whole number of tokens (0: all), found {top_k}")
        if temperature:
            warpers.append(TopKLogitsWarper(top_k=int(top_k)))
    if setting("top_p", top_p, 1.0, 0.0, 1.0, "a share in (0, 1]") and temperature:
        warpers.append(TopPLogitsWarper(top_p=float(top_p or 1)))
    if setting("min_p", min_p, 0.0, 0.0, 1.0, "a share in [0, 1]") and temperature:
        warpers.append(MinPLogitsWarper(min_p=float(min_p or 0)))
    built = [build(name, more.get(name), eos, device) for name in WARPERS] if temperature else []
    warpers += [warper for warper in built if warper is not None]
    verification = verification or ("rejection" if temperature else "greedy")
    return Rule(verification, temperature, tuple(processors), tuple(warpers), tuple(settings))


def _plain(value: Any) -> Any:
    """As JSON can hold it: mappings whose keys are tuples become lists of pairs."""
    return [[list(ids), bias] for ids, bias in value.items()] if isinstance(value, Mapping) else value


def recorded_rule(
    temperature: float, verification: str, settings: Sequence[str], eos: Collection[int] = (), device: str = "cpu"
) -> Rule:
    """The rule that a trace names in words."""
    options: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"processors: expected those that metasd-live names, found {name}; record from Python")
        if name in PROCESSORS or name in WARPERS:
            more[name] = json.loads(value)
        elif name == "logit_bias":
            pairs = (pair.split(":") for pair in value.split(","))
            options[name] = {int(token): float(bias) for token, bias in pairs}
        else:
            options[name] = float(value)
    return make_rule(temperature, verification, **options, more=more, eos=eos, device=device)


@dataclass(frozen=True)
class ModelSettings:
    """What a model's own generation_config asks for, as `generate` of transformers would do unless told otherwise."""

    do_sample: bool = False
    temperature: float = 1.0  # when sampling
    options: Mapping[str, Any] = field(default_factory=dict)  # of `make_rule`
    more: Mapping[str, Any] = field(default_factory=dict)  # its `more`
    stop_strings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # what changes the text there and cannot be done here, NAME=VALUE


# settings that change what is written and that draft and verification do not know, with the values that do nothing
_IGNORED: dict[str, tuple[Any, ...]] = {
    "guidance_scale": (1, 1.0),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_eos_token_id": (),
    "watermarking_config": (),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "token_healing": (False,),
    "max_time": (),
    "top_h": (),
}


def settings_of(target: Target) -> ModelSettings:
    """The settings that travel with the target."""
    config = target.generation_config

    def value(name: str) -> Any:
        return getattr(config, name, None)

    names = ("top_k", "top_p", "min_p", "repetition_penalty")
    ignored = [f"{name}={value(name)}" for name, neutral in _IGNORED.items() if value(name) not in (None, *neutral)]
    stops = value("stop_strings") or ()
    return ModelSettings(
        do_sample=bool(value("do_sample")),
        temperature=1.0 if value("temperature") is None else value("temperature"),
        options={name: value(name) for name in names if value(name) is not None},
        more={name: value(name) for name in (*PROCESSORS, *WARPERS) if not is_neutral(name, value(name))},
        stop_strings=(stops,) if isinstance(stops, str) else tuple(stops),
        ignored=tuple(ignored),
    )


def check_processors(
    rule: Rule, vocab_size: int, prompts: Sequence[Sequence[int]] = (), device: torch.device | str = "cpu"
) -> None:
    """Refuses, by name, processors that fail on this vocabulary or are no function of the text so far.

    A processor that remembers earlier calls, or draws random numbers, answers the same question in two ways. Those
    that may not be asked about any text are asked about the `prompts`, as plain decoding would.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, vocab_size, generator=generator).to(device)
    text = torch.randint(vocab_size, (1, 8), generator=generator).to(device)
    known = [torch.tensor([list(prompt)], device=device) for prompt in prompts]
    for processor in rule.processors:
        name = type(processor).__name__
        questions = [text[:, :5], text] if answers_any_text(processor) else known
        opened = processor.for_prompt(0) if hasattr(processor, "for_prompt") else processor
        try:
            answers = [opened(question, scores.clone()) for question in (*questions, *questions[:1])]
        except Exception as error:  # whatever it raises
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"logits_processor: expected one for {vocab_size} tokens, found {name}, which fails ({reason})"
            ) from error
        if answers and (answers[0].shape != scores.shape or not torch.equal(answers[0], answers[-1])):
            raise InputError(
                f"logits_processor: expected functions of the text so far, found {name}, whose answer changes between "
                f"calls; leave it out or decode plainly"
            )
