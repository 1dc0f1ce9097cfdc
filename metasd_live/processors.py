"""Logits processors: our own, those of transformers that a model's settings ask for, and which may be asked what.

Plain decoding asks a processor about texts that it has written. A processor that answers for any text at all, as those
of transformers do, may also be asked about drafts. Another one, a grammar for instance, may fail on a text that it has
forbidden: it is asked about accepted tokens alone, and drafters do without it. A class with `any_text = True` says
that it is of the first kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TypicalLogitsWarper,
)

from metasd_sim.errors import InputError

# They keep a model, a cache or a history of calls beside the text, which rejected drafts would spoil.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
_ANY_TEXT = frozenset(
    {
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        InfNanRemoveLogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
    }
)


def answers_any_text(processor: Any) -> bool:
    """Whether it may be asked about drafted tokens; a subclass has to say so itself."""
    return bool(getattr(processor, "any_text", type(processor) in _ANY_TEXT))


class FrequencyPenalty(LogitsProcessor):  # type: ignore[misc]
    """`logit(x) - frequency n(x) - presence 1{n(x) > 0}`, `n(x)` the count of x among the new tokens."""

    any_text = True

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

    any_text = True

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.tokens = torch.tensor(list(bias), dtype=torch.int64)
        self.values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(
            1, self.tokens.to(scores.device), self.values.to(scores).expand(len(scores), -1).contiguous()
        )


class _AfterPrompt(LogitsProcessor):  # type: ignore[misc]
    """A processor that depends on the prompt's length: `build(prompt_tokens)` makes it."""

    any_text = True

    def __init__(self, build: Callable[[int], Any]) -> None:
        self.for_prompt = build
        self.general = build(0)  # refuses wrong values

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a rule opens it for its prompt")


Build = Callable[[Any, list[int], str], Any]  # value, end-of-sequence ids, device -> processor

# settings of a model's generation_config -> their processors, in the order in which `generate` applies them
PROCESSORS: dict[str, Build] = {
    "sequence_bias": lambda value, eos, device: SequenceBiasLogitsProcessor(_biases(value)),
    "no_repeat_ngram_size": lambda value, eos, device: NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": lambda value, eos, device: NoBadWordsLogitsProcessor(value, eos or None),
    "min_length": lambda value, eos, device: MinLengthLogitsProcessor(value, eos, device=device),
    "min_new_tokens": lambda value, eos, device: _AfterPrompt(
        lambda n: MinNewTokensLengthLogitsProcessor(n, value, eos, device=device)
    ),
    "forced_bos_token_id": lambda value, eos, device: ForcedBOSTokenLogitsProcessor(value),
    "remove_invalid_values": lambda value, eos, device: InfNanRemoveLogitsProcessor(),
    "exponential_decay_length_penalty": lambda value, eos, device: _AfterPrompt(
        lambda n: ExponentialDecayLengthPenalty(tuple(value), eos, n)
    ),
    "suppress_tokens": lambda value, eos, device: SuppressTokensLogitsProcessor(value, device=device),
    "begin_suppress_tokens": lambda value, eos, device: _AfterPrompt(
        lambda n: SuppressTokensAtBeginLogitsProcessor(value, n, device=device)
    ),
}
# these when sampling, after the temperature and top-k, top-p, min-p
WARPERS: dict[str, Build] = {
    "typical_p": lambda value, eos, device: TypicalLogitsWarper(value),
    "epsilon_cutoff": lambda value, eos, device: EpsilonLogitsWarper(value),
    "eta_cutoff": lambda value, eos, device: EtaLogitsWarper(value, device=device),
}
_NEED_EOS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")  # they act on its logit alone
# values at which a setting does nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "remove_invalid_values": (False,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}


def is_neutral(name: str, value: Any) -> bool:
    return value is None or value in _NEUTRAL.get(name, ())


def build(name: str, value: Any, eos: Collection[int], device: str) -> Any | None:
    """The processor or warper of a setting, or None where it does nothing; refuses wrong values."""
    if is_neutral(name, value) or (name in _NEED_EOS and not eos):
        return None
    try:
        return (PROCESSORS | WARPERS)[name](value, sorted(eos), device)
    except (ValueError, TypeError, IndexError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{name}: expected a value that transformers takes, found {value!r} ({reason})") from None


def _biases(value: Any) -> dict[tuple[int, ...], float]:
    """`{(ids): bias}`, also from the list of pairs that JSON holds."""
    return {tuple(ids): float(bias) for ids, bias in (value.items() if isinstance(value, Mapping) else value)}
