"""Swapped classes: the module keeps its tensors and its class, copies keep the swap, and it can be undone."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dubito.networks.swapping import Swapped, calling_every_layer, fused_modules, restore_class, swap_class
from dubito.networks.watching import call_order


class Doubled(Swapped):
    prefix = "Doubled"
    factor: int

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def test_swap_copy_and_restore() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain = layer(x)
    swap_class(layer, Doubled, factor=2)
    assert isinstance(layer, nn.Linear)
    assert type(layer).__name__ == "DoubledLinear"
    assert torch.equal(layer(x), 2 * plain)
    copied = copy.deepcopy(layer)
    assert type(copied) is type(layer)
    assert torch.equal(copied(x), 2 * plain)
    restore_class(layer, ("factor",))
    assert type(layer) is nn.Linear
    assert "factor" not in vars(layer)
    assert torch.equal(layer(x), plain)


def test_the_same_class_is_made_once() -> None:
    layers = [nn.Linear(3, 2), nn.Linear(2, 2)]
    for layer in layers:
        swap_class(layer, Doubled, factor=1)
    assert type(layers[0]) is type(layers[1])


def test_the_layers_of_a_fused_module_are_called() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    x, names = torch.randn(2, 3, 4), {"linear1": model.linear1}
    with torch.no_grad():
        expected = model(x)
    assert call_order(model, names, x) == ["linear1"]  # a hook alone turns the fused path of this module off
    swap_class(model.linear1, Doubled, factor=2)
    with torch.no_grad():
        assert torch.allclose(model(x), expected)  # the fused path reads the weight
        with calling_every_layer(fused_modules(model)):
            assert not torch.allclose(model(x), expected)
        assert torch.allclose(model(x), expected)
