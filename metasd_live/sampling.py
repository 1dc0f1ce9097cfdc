"""What shapes the target's law besides its temperature: penalties, biases, custom processors, truncation.

All are `LogitsProcessor`s of transformers, called as plain decoding would call them, in its order: logit bias,
repetition and frequency penalties, custom ones, then temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from metasd_sim.errors import InputError

from .verify import Rule

# They keep a model, a cache or a history of calls beside the text, which rejected drafts would spoil.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


class FrequencyPenalty(LogitsProcessor):  # type: ignore[misc]
    """`logit(x) - frequency n(x) - presence 1{n(x) > 0}`, `n(x)` the count of x among the new tokens."""

    def __init__(self, frequency: float = 0.0, presence: float = 0.0, prompt_tokens: int = 0) -> None:
        self.frequency, self.presence, self.prompt_tokens = frequency, presence, prompt_tokens

    def for_prompt(self, prompt_tokens: int) -> FrequencyPenalty:
        """The penalty for a text after that many tokens of a prompt."""
        return FrequencyPenalty(self.frequency, self.presence, prompt_tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = input_ids[:, self.prompt_tokens :]
        count = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self.frequency * count - self.presence * (count > 0)


class LogitBias(LogitsProcessor):  # type: ignore[misc]
    """`logit(x) + bias(x)`."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.tokens = torch.tensor(list(bias), dtype=torch.int64)
        self.values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(
            1, self.tokens.to(scores.device), self.values.to(scores).expand(len(scores), -1).contiguous()
        )


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
) -> Rule:
    """The rule of verification with its processors; greedy at temperature 0, else rejection unless told.

    Truncation (top-k, top-p, min-p) leaves the argmax, so greedy decoding does without it.
    """
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
    verification = verification or ("rejection" if temperature else "greedy")
    return Rule(verification, temperature, tuple(processors), tuple(warpers), tuple(settings))


def recorded_rule(temperature: float, verification: str, settings: Sequence[str]) -> Rule:
    """The rule that a trace names in words."""
    options: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"processors: expected those that metasd-live names, found {name}; record from Python")
        if name == "logit_bias":
            pairs = (pair.split(":") for pair in value.split(","))
            options[name] = {int(token): float(bias) for token, bias in pairs}
        else:
            options[name] = float(value)
    return make_rule(temperature, verification, **options)


def check_processors(rule: Rule, vocab_size: int) -> None:
    """Refuses, by name, processors that fail on this vocabulary or are no function of the text so far.

    A processor that remembers earlier calls, or draws random numbers, answers the same question in two ways.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, vocab_size, generator=generator)
    text = torch.randint(vocab_size, (1, 8), generator=generator)
    for processor in rule.processors:
        name = type(processor).__name__
        try:
            first, _, again = (processor(text[:, :n], scores.clone()) for n in (5, 8, 5))
        except Exception as error:  # whatever it raises
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"logits_processor: expected one for {vocab_size} tokens, found {name}, which fails ({reason})"
            ) from error
        if first.shape != scores.shape or not torch.equal(first, again):
            raise InputError(
                f"logits_processor: expected functions of the text so far, found {name}, whose answer changes between "
                f"calls; leave it out or decode plainly"
            )
