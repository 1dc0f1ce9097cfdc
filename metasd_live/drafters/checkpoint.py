"""Reading of published checkpoints: a `config.json` beside one file of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch

from metasd_sim.errors import InputError
from metasd_sim.files import read_json, read_text

T = TypeVar("T")


def read_checkpoint(
    folder: str, weights: Sequence[str], interpret: Callable[[dict[str, Any]], T], name: str, kind: str
) -> tuple[T, dict[str, torch.Tensor]]:
    """What `interpret` makes of the settings, and the tensors of the first of the files `weights` that is there."""
    try:
        settings = interpret(read_json(read_text(Path(folder) / "config.json")))
        path = next(Path(folder) / file for file in weights if (Path(folder) / file).is_file())
        if path.suffix == ".safetensors":
            return settings, safetensors.torch.load_file(path)
        return settings, torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{name}: expected {kind} checkpoint in {folder}, found none ({reason})") from None
