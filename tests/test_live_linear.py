"""The faster product is the product."""

import pytest
import torch
from torch import nn

from metasd_live.engines.linear import MOST_ROWS, product, speed_up


@pytest.mark.parametrize("rows", [0, 1, 2, 7, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_torch(rows, bias, dtype):
    torch.manual_seed(0)
    layer, twin = (nn.Linear(5, 3, bias=bias, dtype=dtype) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    speed_up(twin)
    x = torch.randn(1, rows, 5, dtype=dtype)
    with torch.inference_mode():
        found = twin(x)
        torch.testing.assert_close(found, layer(x), rtol=1e-5, atol=1e-6)
    assert found.is_contiguous()
    assert found.shape == (1, rows, 3)


def test_by_hand():
    weight, bias = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([0.5, 0.0])
    with torch.inference_mode():
        assert product(torch.tensor([3.0, 4.0]), weight, bias).tolist() == [11.5, -4.0]
        assert product(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), weight).tolist() == [[11.0, -4.0], [1.0, 0.0]]


def test_gradients_still_flow():
    layer = nn.Linear(4, 2)
    speed_up(layer)
    layer(torch.ones(3, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((2, 4), 3.0))


def test_only_plain_layers_change():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Own(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    speed_up(model)
    assert ["forward" in vars(layer) for layer in model] == [True, False, False]
