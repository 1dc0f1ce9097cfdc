"""Weights as a checkpoint holds them: floating point, or the groups of a GGUF file, under transformers' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from metasd_sim.errors import InputError

GROUP = 32  # numbers that share a scale in the GGUF types below
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Groups:
    """`scale (q - zero)`, a scale and a zero for each group of numbers of a row.

    The zero is a fraction: GGUF's Q4_1 keeps a minimum `m` instead, and `zero = -m / scale`.
    """

    q: NDArray[Any]  # [n, groups, numbers] uint8 of 4 bits, or int8
    scale: NDArray[np.float16]  # [n, groups, 1]
    zero: NDArray[np.float32] | None  # [n, groups, 1]; None: 0

    def rows(self, order: NDArray[np.int64]) -> Groups:
        return Groups(self.q[order], self.scale[order], None if self.zero is None else self.zero[order])

    def dense(self) -> NDArray[np.float32]:
        """[n, d]"""
        q = self.q.astype(np.float32)
        values = (q if self.zero is None else q - self.zero) * self.scale.astype(np.float32)
        return values.reshape(len(q), -1)


Weight = torch.Tensor | Groups
Weights = Mapping[str, Weight]


def dense(weight: Weight) -> torch.Tensor:
    """[n, d] float32."""
    return torch.from_numpy(weight.dense()) if isinstance(weight, Groups) else weight.float()


def to_int8(weights: Weights) -> dict[str, Weight]:
    """Matrices as 8-bit integers, a scale for each row."""
    return {name: _rows_of_int8(weight) if name.endswith("weight") else weight for name, weight in weights.items()}


def _rows_of_int8(weight: Weight) -> Weight:
    values = dense(weight).numpy()
    if values.ndim < 2:
        return weight
    scale = (np.abs(values).max(axis=1, keepdims=True) / 127).astype(np.float16)
    scale[scale == 0] = 1
    q = np.clip(np.rint(values / scale.astype(np.float32)), -127, 127).astype(np.int8)
    return Groups(q[:, None, :], scale[:, None, :], None)


def of_model(model: Any) -> dict[str, Weight]:
    """The parameters of a causal model of transformers, in its own type; tied ones once."""
    weights: dict[str, Weight] = {
        name.replace(model.base_model_prefix + ".", "model.", 1): parameter.detach()
        for name, parameter in model.named_parameters()
    }
    return weights


def read_gguf(path: Path, heads: int, key_heads: int) -> dict[str, Weight]:
    """The tensors of a Llama in GGUF, whose rows of q and k are in another order than transformers'."""
    import gguf

    weights: dict[str, Weight] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        kind = tensor.tensor_type.name
        if kind not in _READERS:
            raise InputError(f"{path.name}: expected tensors of {', '.join(_READERS)}; found {kind} in {tensor.name}")
        value = _READERS[kind](np.asarray(tensor.data))
        parts = tensor.name.split(".")
        if parts[0] in _TOP:
            name = _TOP[parts[0]]
        elif parts[0] == "blk" and parts[2] in _NAMES:
            name = f"model.layers.{parts[1]}.{_NAMES[parts[2]]}"
            if parts[2] in ("attn_q", "attn_k"):
                order = _row_order(tensor.data.shape[0], heads if parts[2] == "attn_q" else key_heads)
                value = value.rows(order) if isinstance(value, Groups) else value[order]
        else:
            raise InputError(f"{path.name}: expected the tensors of a Llama, found {tensor.name}")
        weights[f"{name}.{parts[-1]}"] = value
    return weights


def _row_order(rows: int, heads: int) -> NDArray[np.int64]:
    """GGUF alternates the two halves of a head that the rotation pairs; transformers keeps them apart."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _q8_0(data: NDArray[np.uint8]) -> Groups:
    block = data.reshape(len(data), -1, 2 + GROUP)  # scale, then 32 signed bytes
    return Groups(block[..., 2:].view(np.int8), block[..., :2].copy().view(np.float16), None)


def _nibbles(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """16 bytes: the lower halves are the first 16 numbers."""
    return np.concatenate([block & 15, block >> 4], axis=-1)


def _q4_0(data: NDArray[np.uint8]) -> Groups:
    block = data.reshape(len(data), -1, 2 + GROUP // 2)
    scale = block[..., :2].copy().view(np.float16)
    return Groups(_nibbles(block[..., 2:]), scale, np.full(scale.shape, 8, dtype=np.float32))


def _q4_1(data: NDArray[np.uint8]) -> Groups:
    block = data.reshape(len(data), -1, 4 + GROUP // 2)  # scale, minimum, then 32 halves of bytes
    scale, least = (block[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    zero = np.divide(-least, scale, out=np.zeros_like(scale), where=scale != 0)
    constant = (scale == 0) & (least != 0)  # all 32 numbers are the minimum
    q = np.where(constant, 0, _nibbles(block[..., 4:]))
    scale, zero = np.where(constant, least, scale), np.where(constant, -1, zero)
    return Groups(q.astype(np.uint8), scale.astype(np.float16), zero.astype(np.float32))


_READERS: dict[str, Callable[[NDArray[Any]], Weight]] = {
    "F32": lambda data: torch.from_numpy(data.astype(np.float32)),
    "F16": lambda data: torch.from_numpy(data.astype(np.float16)),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
