"""What drafters keep in memory, beside what the target holds anyway."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import torch
from torch import nn

from .drafters import Arm
from .drafters.base import open_stream
from .target import Target
from .verify import Rule

LENGTHS = (128, 256)  # contexts whose difference gives the state of a token
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def held_bytes(root: Any, seen: set[Any]) -> tuple[int, int]:
    """Bytes of the tensors and of the Python tables that `root` holds and `seen` does not; adds them to `seen`.

    A storage counts once and whole, however many tensors look at it.
    """
    tensors = tables = 0
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = ("storage", storage.data_ptr())
            tensors += storage.nbytes() if key not in seen else 0
            seen.add(key)
        elif id(value) not in seen and not isinstance(value, _CODE):
            seen.add(id(value))
            if isinstance(value, np.ndarray):
                tensors += value.nbytes
            elif isinstance(value, nn.Module):
                stack += [*value.parameters(), *value.buffers()]
            elif hasattr(value, "native_bytes"):
                tensors += value.native_bytes
            elif isinstance(value, dict):
                tables += sys.getsizeof(value)
                stack += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple | set | frozenset):
                tables += sys.getsizeof(value)
                stack += value
            elif isinstance(value, int | float | str | bytes):
                tables += sys.getsizeof(value)
            else:
                stack += getattr(value, "__dict__", {}).values()
    return tensors, tables


def drafter_memory(target: Target, arm: Arm) -> dict[str, float]:
    """Weights of an arm's drafter that are not the target's, and what it keeps of each token of a text."""
    shared: set[Any] = {id(target), id(target.tokenizer)}
    held_bytes(target.engine, shared)
    weights, tables = held_bytes(arm.drafter, shared)
    states = []
    room = min(target.max_length or LENGTHS[1], arm.max_length or LENGTHS[1]) - arm.length - 1
    lengths = LENGTHS if room >= LENGTHS[1] else (room // 2, room)
    for length in lengths:
        context = [token % target.vocab_size for token in range(length)]
        features = target.prefill(context, features=True).features if arm.white_box else None
        stream = open_stream(arm.drafter, context, features)
        if arm.length:
            stream.draft(context, 1, Rule().open(np.random.SeedSequence(0), 1, length), 0)
        states.append(held_bytes(stream, set(shared)))
    per_token = (np.array(states[1]) - np.array(states[0])) / (lengths[1] - lengths[0])
    return {
        "weight_bytes": weights,
        "table_bytes": tables,
        "state_bytes_per_token": float(per_token[0]),
        "state_table_bytes_per_token": float(per_token[1]),
    }
