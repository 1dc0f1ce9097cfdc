"""The OpenVINO graph of a Llama, Mistral, Qwen2 or Qwen3: weights as they are, keys and values kept inside.

Inputs, for `rows` texts, `n` new tokens of each and `slots` places in the cache, the new ones included:

    tokens     int64   [rows, n]
    positions  int64   [rows, n]
    mask       float32 [rows, 1, n, slots]  0 where a token may look, the least number where it may not
    beam_idx   int32   [rows]  which row of the cache each row goes on from
    keep       int64   [1]     of how many of the last tokens logits are wanted

Outputs: `logits` [rows, keep, vocab], `hidden` [rows, n, d] that feeds the head, both float32; on request `layer.K`,
what the first K layers return.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op

from .weights import Groups, Weight, Weights

MASKED = float(np.finfo(np.float32).min)
INPUTS = ("tokens", "positions", "mask", "beam_idx", "keep")
VERSION = 1  # of the graphs that are kept in files; another one where `build` makes another graph


@dataclass(frozen=True)
class Shape:
    """What the graph needs to know of a model."""

    layers: int
    heads: int
    key_heads: int
    head_size: int
    eps: float
    inv_freq: np.ndarray  # [head_size / 2]
    rotation_scale: float
    vocab_size: int
    window: int | None  # tokens that a token sees, itself included


def _packed(values: np.ndarray, shape: Collection[int], kind: Any) -> Any:
    """A constant of a type that numpy lacks, from its bytes; it owns them."""
    tensor = ov.Tensor(kind, ov.Shape(list(shape)))
    tensor.data.view(values.dtype).reshape(-1)[:] = values.reshape(-1)
    return op.constant(tensor)


def _constant(value: torch.Tensor) -> Any:
    """In the type that it has."""
    if value.dtype == torch.bfloat16:
        return _packed(value.contiguous().view(torch.uint16).numpy(), value.shape, ov.Type.bf16)
    return op.constant(value.contiguous().numpy())


def _float32(value: torch.Tensor) -> Any:
    constant = _constant(value)
    return constant if value.dtype == torch.float32 else op.convert(constant, np.float32)


def _integers(weight: Groups) -> Any:
    """The numbers before scaling, [n, groups, 32]."""
    if weight.q.dtype == np.int8:
        return op.constant(np.ascontiguousarray(weight.q))
    flat = weight.q.reshape(-1)
    return _packed(flat[0::2] | flat[1::2] << 4, weight.q.shape, ov.Type.u4)


def _matrix(weight: Weight, shared: dict[int, Any]) -> Any:
    """[n, d] float32, in the form whose product the CPU plug-in fuses with the reading of few bits."""
    if isinstance(weight, torch.Tensor):
        return _float32(weight)
    integers = shared.setdefault(id(weight), _integers(weight))
    value = op.convert(integers, np.float32)
    if weight.zero is not None:
        value = op.subtract(value, op.constant(weight.zero))
    value = op.multiply(value, op.convert(op.constant(weight.scale), np.float32))
    return op.reshape(value, _sizes(weight.q.shape[0], -1), False)


def _embed(weight: Weight, tokens: Any, shared: dict[int, Any]) -> Any:
    """Rows of a table, [rows, n, d]."""
    axis = op.constant(np.int32(0))
    if isinstance(weight, torch.Tensor):
        return op.gather(_float32(weight), tokens, axis)
    integers = shared.setdefault(id(weight), _integers(weight))
    value = op.convert(op.gather(integers, tokens, axis), np.float32)
    if weight.zero is not None:
        value = op.subtract(value, op.gather(op.constant(weight.zero), tokens, axis))
    value = op.multiply(value, op.convert(op.gather(op.constant(weight.scale), tokens, axis), np.float32))
    return op.reshape(value, op.constant(np.array([0, 0, -1], dtype=np.int64)), True)


def _norm(x: Any, weight: Weight, eps: float) -> Any:
    """`x / sqrt(mean x^2 + eps) * weight`."""
    mean = op.reduce_mean(op.power(x, _number(2.0)), op.constant(np.array([-1])), True)
    scaled = op.multiply(x, op.divide(_number(1.0), op.sqrt(op.add(mean, _number(eps)))))
    return op.multiply(scaled, _float32(weight))  # type: ignore[arg-type]


def _number(value: float) -> Any:
    return op.constant(np.float32(value))


def _sizes(*sizes: int) -> Any:
    return op.constant(np.array(sizes, dtype=np.int64))


class _Builder:
    def __init__(self, shape: Shape, weights: Weights) -> None:
        self.shape, self.weights = shape, weights
        self.sinks: list[Any] = []
        self.shared: dict[int, Any] = {}  # of weights that the graph reads twice
        kinds = (np.int64, np.int64, np.float32, np.int32, np.int64)
        sizes = ([-1, -1], [-1, -1], [-1, 1, -1, -1], [-1], [1])
        self.parameters = [_named(op.parameter(*one), name) for *one, name in zip(sizes, kinds, INPUTS, strict=True)]
        self.tokens, self.positions, self.mask, self.beam_idx, self.keep = self.parameters
        shape = op.shape_of(self.tokens)
        self.rows = op.gather(shape, _sizes(0), op.constant(np.int64(0)))
        self.cos, self.sin = self._rotation()

    def _rotation(self) -> tuple[Any, Any]:
        """Cosines and sines, [rows, 1, n, head_size]."""
        at = op.convert(op.unsqueeze(self.positions, op.constant(np.array([-1]))), np.float32)
        angle = op.multiply(at, op.constant(self.shape.inv_freq.astype(np.float32)[None, None]))
        angle = op.unsqueeze(op.concat([angle, angle], -1), op.constant(np.array([1])))
        scale = self.shape.rotation_scale
        both = [op.cos(angle), op.sin(angle)]
        cos, sin = both if scale == 1 else [op.multiply(x, _number(scale)) for x in both]
        return cos, sin

    def linear(self, x: Any, name: str) -> Any:
        y = op.matmul(x, _matrix(self.weights[f"{name}.weight"], self.shared), False, True)
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else op.add(y, _float32(bias))  # type: ignore[arg-type]

    def heads(self, x: Any, heads: int, norm: str) -> Any:
        """[rows, n, heads d] -> [rows, heads, n, d]."""
        x = op.reshape(x, _sizes(0, 0, heads, self.shape.head_size), True)
        if norm in self.weights:
            x = _norm(x, self.weights[norm], self.shape.eps)
        return op.transpose(x, op.constant(np.array([0, 2, 1, 3])))

    def rotate(self, x: Any) -> Any:
        half = self.shape.head_size // 2
        low, high = op.variadic_split(x, op.constant(np.int64(3)), _sizes(half, half)).outputs()
        turned = op.concat([op.multiply(high, _number(-1.0)), low], -1)
        return op.add(op.multiply(x, self.cos), op.multiply(turned, self.sin))

    def remember(self, x: Any, name: str) -> Any:
        """All keys or values so far; [rows, key_heads, slots, d]."""
        sizes = op.concat([self.rows, _sizes(self.shape.key_heads, 0, self.shape.head_size)], 0)
        empty = op.broadcast(_number(0.0), sizes)
        kind = ov.op.util.VariableInfo()
        kind.data_shape = ov.PartialShape([-1, self.shape.key_heads, -1, self.shape.head_size])
        kind.data_type = ov.Type.f32
        kind.variable_id = name
        variable = ov.op.util.Variable(kind)
        past = op.gather(op.read_value(empty, variable), self.beam_idx, op.constant(np.int64(0)))
        whole = op.concat([past, x], 2)
        self.sinks.append(op.assign(whole, variable))
        return whole

    def repeat(self, x: Any) -> Any:
        """Each key head for all heads that read it."""
        s = self.shape
        times = s.heads // s.key_heads
        if times == 1:
            return x
        x = op.unsqueeze(x, op.constant(np.array([2])))
        # times one: the plug-in knows this form, and reads each key head from the cache once
        x = op.multiply(x, op.constant(np.ones((1, 1, times, 1, 1), dtype=np.float32)))
        return op.reshape(x, _sizes(0, s.heads, -1, s.head_size), True)

    def attention(self, x: Any, layer: str, number: int) -> Any:
        s, name = self.shape, f"{layer}.self_attn"
        q = self.rotate(self.heads(self.linear(x, f"{name}.q_proj"), s.heads, f"{name}.q_norm.weight"))
        k = self.rotate(self.heads(self.linear(x, f"{name}.k_proj"), s.key_heads, f"{name}.k_norm.weight"))
        v = self.heads(self.linear(x, f"{name}.v_proj"), s.key_heads, "")
        k, v = self.remember(k, f"keys.{number}"), self.remember(v, f"values.{number}")
        y = op.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), self.mask, causal=False)
        y = op.reshape(op.transpose(y, op.constant(np.array([0, 2, 1, 3]))), _sizes(0, 0, s.heads * s.head_size), True)
        return self.linear(y, f"{name}.o_proj")

    def layer(self, x: Any, number: int) -> Any:
        layer = f"model.layers.{number}"
        normed = _norm(x, self.weights[f"{layer}.input_layernorm.weight"], self.shape.eps)
        x = op.add(x, self.attention(normed, layer, number))
        normed = _norm(x, self.weights[f"{layer}.post_attention_layernorm.weight"], self.shape.eps)
        gate, up = (self.linear(normed, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return op.add(x, self.linear(op.multiply(op.swish(gate), up), f"{layer}.mlp.down_proj"))


def build(shape: Shape, weights: Weights, layers: Collection[int] = ()) -> ov.Model:
    """The graph; `layers` are those whose output is wanted too."""
    graph = _Builder(shape, weights)
    embedding = weights["model.embed_tokens.weight"]
    x = _embed(embedding, graph.tokens, graph.shared)
    outputs = []
    for number in range(shape.layers):
        x = graph.layer(x, number)
        if number + 1 in layers:
            outputs.append(_named(op.result(x), f"layer.{number + 1}"))
    hidden = _norm(x, weights["model.norm.weight"], shape.eps)
    last = op.slice(hidden, op.negative(graph.keep), _sizes(2**31 - 1), _sizes(1), _sizes(1))
    head = weights.get("lm_head.weight", embedding)
    logits = op.matmul(last, _matrix(head, graph.shared), False, True)
    results = [_named(op.result(logits), "logits"), _named(op.result(hidden), "hidden"), *outputs]
    return ov.Model(results, graph.sinks, graph.parameters, "metasd")


def _named(node: Any, name: str) -> Any:
    node.output(0).set_names({name})
    return node
