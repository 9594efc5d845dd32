"""Norm layers beyond the common contract: statistics of the batch, and layers without affine parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from dubito.errors import UnsupportedError
from torch import nn

from dubito.networks.layers import is_norm, require_rule


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False).eval()])
def test_batch_statistics_have_no_rows(layer: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"BatchNorm1d.*model\.eval\(\)"):
        require_rule(layer).inputs_as_rows(layer, torch.randn(4, 3))


@pytest.mark.parametrize("layer", [nn.LayerNorm(3), nn.RMSNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3)])
def test_norms_of_single_examples_have_rows_in_training_too(layer: nn.Module) -> None:
    x = torch.randn(2, 3, 4) if isinstance(layer, nn.InstanceNorm1d) else torch.randn(2, 3)
    rule = require_rule(layer)
    assert torch.equal(rule.inputs_as_rows(layer.train(), x).a, rule.inputs_as_rows(layer.eval(), x).a)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True)])
def test_apply_in_training_mode_is_forward_but_leaves_the_running_statistics(layer: nn.Module) -> None:
    x = torch.randn(4, 3, 2, 2)
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
        nn.RMSNorm(4, elementwise_affine=False),
    ],
)
def test_without_affine_parameters(layer: nn.Module) -> None:
    x, rule = torch.randn(3, 4), require_rule(layer)
    assert torch.equal(rule.apply(layer, x, None, None), layer(x))
    assert torch.equal(rule.inputs_as_rows(layer, x).a, layer(x)[:, None])


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(3),
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, momentum=None),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("training", [True, False])
def test_forward_with_other_tensors_is_forward_with_them(layer: nn.Module, training: bool) -> None:
    x = torch.randn(4, 3, 3)
    layer = layer.train(training)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for value in other.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) + 0.5)
    given = {name: value.clone() for name, value in other.state_dict().items()}
    if layer.state_dict().get("num_batches_tracked") is not None:
        layer.num_batches_tracked += 1  # as `forward` counts before it normalizes
    expected = other(x)
    assert torch.equal(require_rule(layer).forward_with(layer, x, given), expected)
    for name, value in other.state_dict().items():
        if name != "num_batches_tracked":
            assert torch.equal(given[name], value)


def test_a_synchronized_batch_norm_is_a_norm_without_a_rule() -> None:
    layer = nn.SyncBatchNorm(3)
    assert is_norm(layer)
    with pytest.raises(UnsupportedError, match="several processes"):
        require_rule(layer)
