"""Products of few rows with large matrices: what the passes of speculative decoding consist of.

On a CPU in float32 torch takes up to three times as long for `x W^T` of 2 to 9 rows as for `(W x^T)^T`, and 1.7 times
as long for one row as for two (benchmarks/target_speed.py). The products agree up to the order of summation.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn

MOST_ROWS = 32


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x W^T + b`; x [..., d], weight [out, d] -> [..., out]."""
    rows = x.shape[:-1].numel()
    if not 0 < rows <= MOST_ROWS or x.dtype != torch.float32 or x.device.type != "cpu" or torch.is_grad_enabled():
        return nn.functional.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    if rows == 1:
        flat = flat.repeat(2, 1)
    y = (weight @ flat.T).T[:rows].contiguous()
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], -1)


def _forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return product(x, self.weight, self.bias)


def speed_up(model: Any) -> None:
    """Gives the model's plain linear layers the faster product, in place, where they are in float32 on a CPU."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def stock_copy(model: Any) -> Any:
    """A second model with the same weights, its linear layers as torch runs them."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is _forward:
            del module.forward
    return twin
