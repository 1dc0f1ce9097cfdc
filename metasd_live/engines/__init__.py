"""What runs a causal language model: torch, the reference and the way on CUDA, or OpenVINO on a CPU."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from metasd_sim.errors import InputError

from ..settings import DTYPES, ENGINES
from .base import CausalModel
from .torch_model import TorchModel

__all__ = ["CausalModel", "TorchModel", "check_choices", "load_model"]

_log = logging.getLogger(__name__)


def check_choices(dtype: str, engine: str) -> None:
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"dtype: expected one of auto, {', '.join(DTYPES)}; found {dtype!r}")
    if engine not in ENGINES:
        raise InputError(f"engine: expected one of {', '.join(ENGINES)}; found {engine!r}")


def load_model(
    folder: str,
    name: str,
    engine: str = "auto",
    dtype: str = "auto",
    device: torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    gguf: Path | None = None,
    revision: str | None = None,
) -> CausalModel:
    """A checkpoint of transformers in `folder` (or a hub id), on the engine; see `load_target`.

    `gguf`: the file that its weights are from, in few bits.
    """
    check_choices(dtype, engine)
    device = device or torch.device("cpu")
    options = {} if revision is None else {"revision": revision}
    config = AutoConfig.from_pretrained(folder, **options) if engine != "torch" else None
    chosen = _choose(engine, config, device, dtype, device_map, name) if config is not None else "torch"
    if chosen != "torch":
        model = _openvino(folder, name, config, chosen.partition(":")[2], gguf, options)
        if engine == "auto":
            _say_once(f"{name} runs on {model.engine}; engine torch is the reference")
        return model
    if dtype == "auto" and device.type == "cpu" and device_map is None:
        dtype = "float32"
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, device_map=device_map, **options)
    return TorchModel(model if device_map is not None else model.to(device), name)


def _choose(engine: str, config: Any, device: torch.device, dtype: str, device_map: Any, name: str) -> str:
    """The engine to use; refuses one that cannot run this model here."""
    installed = importlib.util.find_spec("openvino") is not None
    obstacles = [
        (not installed, "the package openvino is not installed (pip install openvino)"),
        (device.type != "cpu", f"the device is {device}"),
        (device_map is not None, "a device map is torch's"),
        (dtype != "auto", f"dtype {dtype} is torch's"),
    ]
    reason = next((text for holds, text in obstacles if holds), None)
    if reason is None:
        from .openvino_model import unsupported

        found = unsupported(config)
        if found is None:
            return "openvino" if engine == "auto" else engine
        reason = f"it does not know {found}"
        if engine == "auto":
            _say_once(f"{name} runs on torch, since openvino does not know {found}")
    if engine == "auto":
        return "torch"
    raise InputError(f"engine: expected a model and device for openvino, found {name}: {reason}; take engine torch")


@cache
def _say_once(line: str) -> None:
    _log.warning("%s", line)


def _openvino(
    folder: str, name: str, config: Any, mode: str, gguf: Path | None, options: dict[str, str]
) -> CausalModel:
    """`gguf`: the file whose few bits the weights are; else they are those of the checkpoint."""
    from . import weights
    from .openvino_model import OpenVINOModel

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)

    def read() -> weights.Weights:
        if gguf is not None:
            return weights.read_gguf(gguf, config.num_attention_heads, config.num_key_value_heads)
        return weights.of_model(AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options))

    try:
        generation_config = GenerationConfig.from_pretrained(folder, **options)
    except OSError:
        generation_config = GenerationConfig.from_model_config(config)
    kept = Path(folder) if gguf is not None else None
    return OpenVINOModel(config, generation_config, read, load, name, mode, kept)
