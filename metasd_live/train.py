"""Training of drafters on text, the target's own as a rule."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from metasd_sim.errors import InputError
from metasd_sim.files import check_folder_free

from .drafters.causal import VOCABULARY
from .outputs import Output
from .target import Target


def text_sequences(path: str, target: Target) -> list[list[int]]:
    """The tokens of a text file, as one sequence."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a readable text file in UTF-8; found {error}") from None
    return [target.encode(text, chat_template=False)]


def output_sequences(
    outputs: Sequence[Output], categories: Sequence[str], prompt_tokens: int | None, seed: int = 0
) -> list[list[int]]:
    """Outputs of some categories (all if none is named), shuffled, each after the last tokens of its prompt: all
    of them if `prompt_tokens` is None."""
    known = {output.category for output in outputs}
    unknown = sorted(set(categories) - known)
    if unknown:
        raise InputError(f"category: expected {', '.join(sorted(known))}; found {', '.join(unknown)}")
    chosen = [output for output in outputs if not categories or output.category in categories]
    order = np.random.default_rng(seed).permutation(len(chosen))
    first = None if prompt_tokens is None else -prompt_tokens
    return [chosen[i].prompt_ids[first:] + chosen[i].token_ids for i in order]


def cut(sequences: Sequence[Sequence[int]], tokens: int | None) -> list[list[int]]:
    """The first `tokens` tokens of the sequences; all of them if None."""
    if tokens is None:
        return [list(sequence) for sequence in sequences]
    taken: list[list[int]] = []
    for sequence in sequences:
        if tokens <= 0:
            break
        taken.append(list(sequence[:tokens]))
        tokens -= len(taken[-1])
    return taken


@dataclass(frozen=True)
class CausalSettings:
    """A small Llama over the most frequent tokens, and how it is trained."""

    vocabulary: int = 4096
    layers: int = 2
    hidden: int = 256
    heads: int = 4
    epochs: int = 12
    batch: int = 16
    window: int = 128
    learning_rate: float = 2e-3

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise InputError(f"train causal: expected {name} above 0, found {value}")
        if self.hidden % self.heads:
            raise InputError(
                f"train causal: expected hidden to be a multiple of heads, found {self.hidden}, {self.heads}"
            )


@dataclass(frozen=True)
class CausalTraining:
    """A trained drafter and its learning curve: epoch, training loss, held-out loss and share of argmax hits."""

    model: Any
    known: list[int]  # target ids of its tokens, in order
    curve: list[tuple[int, float, float, float]]


def train_causal(
    sequences: Sequence[Sequence[int]],
    target: Target,
    settings: CausalSettings,
    seed: int = 0,
    on_epoch: Callable[[], None] = lambda: None,
) -> CausalTraining:
    """Next-token cross entropy (nats) on the sequences, a tenth of them held out; unknown tokens cost nothing."""
    counts = Counter(token for sequence in sequences for token in sequence)
    known = sorted({token for token, _ in counts.most_common(settings.vocabulary)} | target.eos)
    own = torch.full((target.vocab_size,), len(known))
    own[known] = torch.arange(len(known))
    shuffled = [list(sequences[i]) for i in np.random.default_rng(seed).permutation(len(sequences))]
    held = max(1, len(shuffled) // 10)
    windows = [_windows(part, own, settings.window) for part in (shuffled[held:], shuffled[:held])]
    if not all(map(len, windows)):
        raise InputError(f"train causal: expected at least two texts longer than one token, found {len(sequences)}")
    training, held_out = windows

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(known) + 1,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=target.max_length or 2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).to(target.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.05)
    steps = settings.epochs * -(-len(training) // settings.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=steps)
    curve = []
    for epoch in range(1, settings.epochs + 1):
        model.train()
        losses = []
        for batch in torch.split(training[torch.randperm(len(training))], settings.batch):
            loss, _ = _loss(model, batch.to(target.device), len(known))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        model.eval()
        with torch.inference_mode():
            loss, hits = _loss(model, held_out.to(target.device), len(known))
        curve.append((epoch, float(np.mean(losses)), float(loss), hits))
        on_epoch()
    return CausalTraining(model, known, curve)


def _windows(sequences: Sequence[Sequence[int]], own: torch.Tensor, window: int) -> torch.Tensor:
    """The sequences in pieces of `window` tokens, padded with -1; [n, window]."""
    pieces = [
        own[list(sequence[start : start + window])]
        for sequence in sequences
        for start in range(0, max(1, len(sequence) - 1), window)
    ]
    return torch.stack([torch.nn.functional.pad(p, (0, window - len(p)), value=-1) for p in pieces if len(p) > 1])


def _loss(model: Any, batch: torch.Tensor, unknown: int) -> tuple[torch.Tensor, float]:
    """Mean cross entropy over known next tokens, and the share of them that are the argmax."""
    labels = batch[:, 1:].masked_fill(batch[:, 1:] == unknown, -1)
    logits = model(batch[:, :-1].clamp(min=0)).logits[..., :unknown]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
    seen = labels >= 0
    return loss, float((logits.argmax(dim=-1) == labels)[seen].float().mean())


def write_causal(training: CausalTraining, tokenizer: str, folder: str, force: bool = False) -> None:
    """A directory for `model:DIR`, put in place whole."""
    place = Path(folder)
    check_folder_free(place, force)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as temporary:
        built = Path(temporary) / place.name
        training.model.save_pretrained(built)
        known = {"known": np.array(training.known, dtype=np.int32)}
        safetensors.numpy.save_file(known, built / VOCABULARY, {"tokenizer": tokenizer})
        if place.exists():
            place.rename(Path(temporary) / "replaced")
        built.rename(place)
