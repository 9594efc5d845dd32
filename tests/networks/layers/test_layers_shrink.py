"""Smaller layers: what they keep of the old one, and what cannot be removed."""

from __future__ import annotations

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn

from dubito.networks.layers import require_rule


def keep(layer: nn.Module, side: str, *channels: int) -> nn.Module:
    rule = require_rule(layer)
    return (rule.keep_outputs if side == "outputs" else rule.keep_inputs)(layer, torch.tensor(channels))


class Renamed(nn.Linear):
    """A subclass with another constructor and the same forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.tag = "kept"


def test_class_settings_dtype_mode_and_gradient_flags_stay_and_nothing_is_shared() -> None:
    layer = Renamed(4).to(torch.bfloat16).eval()
    layer.weight.requires_grad_(False)
    layer.register_forward_hook(lambda *_: pytest.fail("the hook of the old layer was called"))
    small = keep(layer, "inputs", 2, 0)
    assert (type(small), small.tag, small.training, small.in_features) == (Renamed, "kept", False, 2)
    assert small.weight.dtype == torch.bfloat16
    assert (small.weight.requires_grad, small.bias.requires_grad) == (False, True)
    small(torch.zeros(1, 2, dtype=torch.bfloat16))
    small.bias.data.fill_(7.0)
    assert not (layer.bias == 7.0).any()


def test_batch_norm_keeps_its_statistics_and_counts() -> None:
    layer = nn.BatchNorm1d(3, momentum=0.3)
    layer(torch.randn(5, 3))
    small = keep(layer, "outputs", 2)
    assert (small.num_features, small.momentum, small.training) == (1, 0.3, True)
    assert torch.equal(small.running_mean, layer.running_mean[2:])
    assert small.num_batches_tracked == 1
    assert keep(nn.BatchNorm1d(3, affine=False, track_running_stats=False), "outputs", 0).weight is None


def test_a_mask_means_the_same_as_its_indices() -> None:
    layer = nn.Linear(3, 2)
    mask = torch.tensor([True, False, True])
    assert torch.equal(require_rule(layer).keep_inputs(layer, mask).weight, keep(layer, "inputs", 0, 2).weight)


def test_a_depthwise_convolution_loses_inputs_and_outputs_together() -> None:
    layer = nn.Conv2d(4, 4, 3, groups=4)
    for side in ("inputs", "outputs"):
        small = keep(layer, side, 3, 1)
        assert (small.in_channels, small.out_channels, small.groups) == (2, 2, 2)


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose1d(4, 6, 3, groups=2)])
@pytest.mark.parametrize(
    ("side", "channels"),
    [("outputs", [0, 1, 2]), ("outputs", [0, 1, 3]), ("outputs", [0, 1, 2, 3]), ("inputs", [2, 0]), ("inputs", [0])],
)
def test_uneven_groups_are_refused(layer: nn.Module, side: str, channels: list[int]) -> None:
    with pytest.raises(UnsupportedError, match="equally many of each group"):
        keep(layer, side, *channels)


def test_group_norm_loses_whole_groups_only() -> None:
    layer = nn.GroupNorm(2, 4)
    for channels in ([0], [0, 2], [0, 2, 1, 3]):
        with pytest.raises(UnsupportedError, match="whole groups of 2"):
            keep(layer, "outputs", *channels)
    assert keep(layer, "inputs", 2, 3).num_groups == 1


def test_layer_norm_says_why_it_keeps_its_width() -> None:
    with pytest.raises(UnsupportedError, match="statistics run over all of them"):
        keep(nn.LayerNorm(4), "outputs", 0)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([], dtype=torch.long), "at least one channel"),
        (torch.tensor([False, False, False]), "at least one channel"),
        (torch.tensor([True, False]), r"shape \(3,\)"),
        (torch.tensor([0, 3]), "lie in 0 to 2"),
        (torch.tensor([-1]), "lie in 0 to 2"),
        (torch.tensor([1, 1]), "distinct"),
        (torch.tensor([0.0]), "integers"),
        (torch.tensor([[0]]), "integers"),
    ],
)
def test_bad_indices(index: Tensor, message: str) -> None:
    layer = nn.Linear(3, 3)
    with pytest.raises(InputError, match=message):
        require_rule(layer).keep_outputs(layer, index)
