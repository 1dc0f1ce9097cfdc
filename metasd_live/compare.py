"""Two greedy texts compared: equal, parted at a near-tie by rounding, or truly different."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from metasd_sim.errors import InputError

from .ending import Ending
from .target import Target
from .verify import GreedyText, Rule

ROUNDINGS = 4  # a margin of so many rounding errors may close


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts part: `position` counts new tokens, a text that has ended has no token there.

    `margin` is the best logit less the lower one of the two tokens, `rounding` how much the logits of one context
    differ between one pass over it and one pass for each of its new tokens.
    """

    position: int
    tokens: tuple[int | None, int | None]
    margin: float  # infinite where a text has ended
    rounding: float

    @property
    def near_tie(self) -> bool:
        """Rounding alone may explain it; else one text is wrong."""
        return self.margin <= ROUNDINGS * self.rounding

    def to_json(self) -> dict[str, Any]:
        margin = self.margin if math.isfinite(self.margin) else None
        return asdict(self) | {"margin": margin, "near_tie": self.near_tie}

    def __str__(self) -> str:
        kind = "a near-tie" if self.near_tie else "a mismatch"
        a, b = ("its end" if token is None else token for token in self.tokens)
        return (
            f"{kind} at new token {self.position}: {a} against {b}, logit margin {self.margin:.3g} "
            f"where rounding is {self.rounding:.3g}"
        )


def first_difference(
    target: Target, prompt: Sequence[int], a: Sequence[int], b: Sequence[int], rule: Rule | None = None
) -> Difference | None:
    """Where the new tokens `a` and `b` after `prompt` first differ, under greedy decoding with the processors of
    `rule`; None if nowhere."""
    rule = rule or Rule()
    if rule.verification != "greedy":
        raise InputError(f"difference: expected greedy texts, found verification {rule.verification}")
    longest = max(len(a), len(b))
    position = next((i for i in range(longest) if a[i : i + 1] != b[i : i + 1]), None)
    if position is None:
        return None
    context = [*prompt, *a[:position]]
    text = GreedyText(rule, len(prompt))
    at_once = text.process(_in_one_pass(target, context), context)[0]
    plain = text.process(_stepwise(target, context, len(prompt)), context)[0]
    finite = torch.isfinite(plain)
    rounding = float((at_once - plain)[finite].abs().max())
    # both ways may agree by luck, but never to more than the last digits of the dtype
    rounding = max(rounding, torch.finfo(target.dtype).eps * float(plain[finite].abs().max()))
    first, second = (written[position] if position < len(written) else None for written in (a, b))
    margin = max(math.inf if token is None else float(plain.max() - plain[token]) for token in (first, second))
    return Difference(position, (first, second), margin, rounding)


def _in_one_pass(target: Target, context: Sequence[int]) -> torch.Tensor:
    """Logits after `context`; [1, vocab]."""
    return target.forward(target.prefill([]), context, keep=1).clone()


def _stepwise(target: Target, context: Sequence[int], prompt_tokens: int) -> torch.Tensor:
    """The same as plain decoding finds them; [1, vocab]."""
    state = target.prefill([])
    logits = target.forward(state, context[:prompt_tokens], keep=1)
    for token in context[prompt_tokens:]:
        logits = target.forward(state, [token])
    return logits


class _Stop(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, ending: Ending, prompt_tokens: int) -> None:
        self.ending, self.prompt_tokens = ending, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        done = self.ending.completed(input_ids[0, self.prompt_tokens :].tolist())
        return torch.tensor([done], device=input_ids.device)


def plain_text(
    target: Target, prompt: Sequence[int], max_new_tokens: int, rule: Rule | None = None, ending: Ending | None = None
) -> list[int]:
    """The new tokens of the greedy text that the target writes alone, with the processors of `rule`: by transformers'
    `generate` where torch runs it, else token by token."""
    ending = ending or Ending.of(target, None, ())
    if target.settings["name"] == "openvino":
        return _token_by_token(target, prompt, max_new_tokens, rule or Rule(), ending)
    ids = torch.tensor([list(prompt)], device=target.device)
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,  # what the model's own settings may ask for is no part of the rule
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ending.eos) or None,
        pad_token_id=min(ending.eos, default=0),
    )
    own, target.model.generation_config = target.model.generation_config, GenerationConfig()
    try:
        written = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList(GreedyText(rule or Rule(), len(prompt)).processors),
            stopping_criteria=StoppingCriteriaList([_Stop(ending, len(prompt))] if ending.strings else []),
        )
    finally:
        target.model.generation_config = own
    return [int(token) for token in written[0, len(prompt) :]]


def _token_by_token(
    target: Target, prompt: Sequence[int], max_new_tokens: int, rule: Rule, ending: Ending
) -> list[int]:
    text = GreedyText(rule, len(prompt))
    state, context = target.prefill(prompt), list(prompt)
    done = False
    while not done:
        logits = text.process(target.forward(state, context[-1:]), context)
        context.append(int(logits[0].argmax()))
        new = context[len(prompt) :]
        done = len(new) == max_new_tokens or new[-1] in ending.eos or bool(ending.strings and ending.completed(new))
    return context[len(prompt) :]
