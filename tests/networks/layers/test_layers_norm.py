"""Norm layers beyond the common contract: statistics of the batch, and layers without affine parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from dubito.errors import UnsupportedError
from torch import nn

from dubito.networks.layers import require_rule


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False).eval()])
def test_batch_statistics_have_no_rows(layer: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"BatchNorm1d.*model\.eval\(\)"):
        require_rule(layer).inputs_as_rows(layer, torch.randn(4, 3))


@pytest.mark.parametrize("layer", [nn.LayerNorm(3), nn.GroupNorm(1, 3)])
def test_norms_of_single_examples_have_rows_in_training_too(layer: nn.Module) -> None:
    x, rule = torch.randn(2, 3), require_rule(layer)
    assert torch.equal(rule.inputs_as_rows(layer.train(), x).a, rule.inputs_as_rows(layer.eval(), x).a)


def test_apply_in_training_mode_is_forward_but_leaves_the_running_statistics() -> None:
    layer, x = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)
    before = copy.deepcopy(layer.state_dict())
    y = require_rule(layer).apply(layer, x, layer.weight, layer.bias)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(4, elementwise_affine=False),
        nn.GroupNorm(2, 4, affine=False),
        nn.BatchNorm1d(4, affine=False).eval(),
    ],
)
def test_without_affine_parameters(layer: nn.Module) -> None:
    x, rule = torch.randn(3, 4), require_rule(layer)
    assert torch.equal(rule.apply(layer, x, None, None), layer(x))
    assert torch.equal(rule.inputs_as_rows(layer, x).a, layer(x)[:, None])
