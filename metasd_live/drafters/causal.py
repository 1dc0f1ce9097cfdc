"""Drafters with a model: another causal language model, or the first layers of the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoTokenizer

from metasd_sim.errors import InputError

from ..engines import CausalModel, load_model
from ..files import revision_of
from .base import Draft
from .head import UNSEEN, DraftHead, Logits, read_vocabulary

if TYPE_CHECKING:
    from ..target import Target
    from ..verify import TextRule

VOCABULARY = "metasd_vocabulary.safetensors"  # target ids of a reduced vocabulary's tokens, in its order


class CausalDrafter:
    """A causal model of the target's tokenizer.

    With a reduced vocabulary its token `i` is the target's `known[i]`; one more id, the last, stands for all others.
    A `padded` one has the same tokens, with rows past them in its matrices or the target's. Its head may be cut to the
    `frequent` tokens and those of the prompt.
    """

    point_mass = False

    def __init__(
        self,
        model: CausalModel,
        name: str,
        vocab_size: int,
        known: Sequence[int] | None = None,
        padded: bool = False,
        frequent: Sequence[int] | None = None,
    ) -> None:
        self.model, self.name, self.vocab_size = model, name, vocab_size
        size = vocab_size if known is None else len(known) + 1
        if model.vocab_size != size and not (padded and known is None):
            raise InputError(
                f"{name}: expected a vocabulary of {size} tokens, found {model.vocab_size}; "
                f"drafters with another vocabulary than the target's are not supported"
            )
        self.max_length = model.max_length
        self.known = self.to_own = self.head = None
        if frequent is not None:
            if known is not None:
                raise InputError(f"{name}: expected a model with the whole vocabulary, found a reduced one already")
            model.check_head()
            self.head = DraftHead(*model.head(), vocab_size, frequent)
        if known is not None:
            self.known = torch.tensor(list(known), device=model.device)
            own = np.full(vocab_size, len(known))
            own[list(known)] = np.arange(len(known))
            self.to_own = own.tolist()

    def open(self, prompt: Sequence[int]) -> CausalStream:
        stream = CausalStream(self)
        stream.prefill(prompt)
        return stream


class CausalStream:
    """Reads what it has missed of the context, after forgetting what the context contradicts."""

    def __init__(self, drafter: CausalDrafter) -> None:
        self.drafter = drafter
        self.read: list[int] = []  # tokens in the cache
        self.read_seconds = 0.0  # of the last draft's first pass, which reads what the cache lacks
        self.state = drafter.model.prefill([])
        self.logits_of: Logits | None = None

    def prefill(self, prompt: Sequence[int]) -> None:
        self.state = self.drafter.model.prefill(self._own(prompt))
        self.logits_of = None if self.drafter.head is None else self.drafter.head.open(prompt)
        self.read = list(prompt[:-1])

    def draft(self, context: Sequence[int], limit: int, rule: TextRule, position: int) -> Draft:
        if not limit:
            return Draft()
        tokens: list[int] = []
        laws = []
        clock = self.drafter.model.clock
        start = clock()
        logits = self._catch_up(context, 1)
        self.read_seconds = clock() - start
        while True:
            scores = rule.process_draft(logits[-1:], [*context, *tokens])[0]
            laws.append(rule.laws(scores))
            tokens.append(rule.draft(scores, position + len(tokens)))
            if len(tokens) == limit:
                return Draft(tokens, torch.stack(laws))
            logits = self._forward(tokens[-1:])

    def logits(self, context: Sequence[int], count: int) -> torch.Tensor:
        return self._catch_up(context[:-1], count)

    def _catch_up(self, context: Sequence[int], count: int) -> torch.Tensor:
        """Logits after each of the last `count` tokens of `context`."""
        agreed = min(len(self.read), len(context) - count)
        if self.read[:agreed] != list(context[:agreed]):
            agreed = next(i for i, (a, b) in enumerate(zip(self.read, context, strict=False)) if a != b)
        self.drafter.model.rollback(self.state, len(self.read) - agreed)
        del self.read[agreed:]
        return self._forward(context[agreed:], count)

    def _forward(self, tokens: Sequence[int], count: int = 1) -> torch.Tensor:
        self.read.extend(tokens)
        if self.logits_of is not None:
            return self.logits_of(self.drafter.model.hidden(self.state, self._own(tokens), count))
        logits = self.drafter.model.forward(self.state, self._own(tokens), keep=count)
        known, size = self.drafter.known, self.drafter.vocab_size
        if known is None and logits.shape[1] >= size:
            return logits[:, :size]
        wide = logits.new_full((len(logits), size), UNSEEN)
        if known is None:
            wide[:, : logits.shape[1]] = logits
        else:
            wide[:, known] = logits[:, :-1]
        return wide

    def _own(self, tokens: Sequence[int]) -> list[int]:
        to_own, size = self.drafter.to_own, self.drafter.model.vocab_size
        if to_own is None:  # past its padding any token does: what a drafter thinks is never wrong, only poor
            return list(tokens) if size >= self.drafter.vocab_size else [t if t < size else 0 for t in tokens]
        return [to_own[token] for token in tokens]


def load_causal(folder: str, name: str, target: Target, frequent: Sequence[int] | None = None) -> CausalDrafter:
    """`model:DIR`: a model of transformers, with a reduced vocabulary if `metasd-live train causal` wrote it."""
    try:
        place, revision = revision_of(folder)
        dtype = str(target.dtype).removeprefix("torch.") if target.settings["name"] == "torch" else "auto"
        engine = "auto" if dtype == "auto" else "torch"
        model = load_model(place, name, engine, dtype, target.device, revision=revision)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"drafter: expected a causal language model in {folder}, found none ({reason})") from error
    known, padded = None, False
    vocabulary = Path(folder) / VOCABULARY
    if vocabulary.is_file():
        try:
            known = read_vocabulary(vocabulary, target.tokenizer_hash)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    elif (Path(folder) / "tokenizer_config.json").is_file():
        _check_tokens(AutoTokenizer.from_pretrained(folder), target.tokenizer, name)
        padded = True
    return CausalDrafter(model, name, target.vocab_size, known, padded, frequent)


def _check_tokens(own: Any, target: Any, name: str) -> None:
    """Refuses a drafter whose token ids mean other tokens, naming the first."""
    ours, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (own, target))
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            raise InputError(
                f"{name}: expected the target's tokens, found {ours.get(i)!r} as token {i} where the target has "
                f"{theirs.get(i)!r}; drafters with another vocabulary are not supported"
            )


def skip_layers(layers: int, name: str, target: Target, frequent: Sequence[int] | None = None) -> CausalDrafter:
    """`layers:K`: the target's first K layers, its norm and its head, sharing the target's weights."""
    if not 1 <= layers < target.layers:
        raise InputError(f"drafter: expected layers:K with K in 1..{target.layers - 1} for this target, found {name}")
    return CausalDrafter(target.first_layers(layers, name), name, target.vocab_size, frequent=frequent)
