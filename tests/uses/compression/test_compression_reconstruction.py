"""Layers of a smaller network are fitted to the outputs of the large one: against least squares in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dubito.uses.compression.reconstruction import RIDGES, reconstruct_


def without_unit(model: nn.Sequential, unit: int) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """Return a copy whose first layer has lost a unit and whose other layers have not adapted, and what stays."""
    small = copy.deepcopy(model)
    stays = torch.ones(len(model[0].weight), dtype=torch.bool)  # type: ignore[arg-type]
    stays[unit] = False
    first, second = small[0], small[2]
    first.weight, first.bias = nn.Parameter(first.weight[stays]), nn.Parameter(first.bias[stays])  # type: ignore[index]
    second.weight = nn.Parameter(second.weight[:, stays])  # type: ignore[index]
    for layer in (first, second):
        if isinstance(layer, nn.Conv2d):
            layer.out_channels, layer.in_channels = layer.weight.shape[:2]
    return small, {"0": stays}


def test_a_shifted_copy_of_a_channel_is_read_from_the_window() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Identity(), nn.Conv2d(2, 3, 3, padding=1)).double()
    first, second = (value.detach() for value in (model[0].weight, model[2].weight))  # type: ignore[operator]
    first.zero_()
    model[0].bias.detach().zero_()  # type: ignore[operator]
    first[0, 0, 1, 1] = first[1, 0, 1, 2] = 1.0
    centre = second[:, 1, 1, 1].clone()
    second[:, 1] = 0.0
    second[:, 1, 1, 1] = centre
    small, units = without_unit(model, 1)
    rows = torch.randn(40, 1, 8, 8).double().split(10)
    reconstruct_(small, model, units, rows)
    x = torch.randn(5, 1, 8, 8).double()
    torch.testing.assert_close(small(x), model(x), rtol=1e-3, atol=1e-3)  # up to the ridge
    found = small[2].weight.detach()[:, 0, 1, 2]  # type: ignore[operator]
    torch.testing.assert_close(found, second[:, 0, 1, 2] + centre, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_every_layer_is_the_ridge_regression_on_its_present_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    small, units = without_unit(model, 2)
    before = copy.deepcopy(small)
    rows = torch.randn(400, 5).double()
    reconstruct_(small, model, units, rows.split(50))
    for place in (2, 4):  # the second has lost no input, but its inputs have changed
        x = torch.cat([small[:place](rows), torch.ones(400, 1).double()], 1)
        own = torch.cat([before[place].weight, before[place].bias[:, None]], 1)  # type: ignore[index, list-item]
        missed = model[: place + 1](rows) - x @ own.mT
        moments = x.mT @ x
        steps = [
            torch.linalg.solve(moments + ridge * moments.diagonal().mean() * torch.eye(len(moments)), x.mT @ missed).mT
            for ridge in RIDGES
        ]
        found = torch.cat([small[place].weight, small[place].bias[:, None]], 1) - own  # type: ignore[index, list-item]
        assert min(float((found - step).abs().max()) for step in steps) < 1e-7
    assert torch.equal(small[0].weight, before[0].weight)  # type: ignore[arg-type]
    new = torch.randn(200, 5).double()
    errors = [float((each(new) - model(new)).square().mean()) for each in (small, before)]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("how", ["frozen", "tied", "one batch", "whole"])
def test_what_stays_as_it_is(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    small, units = without_unit(model, 2)
    if how == "frozen":
        small[2].requires_grad_(False)
    if how == "tied":
        small.append(nn.Linear(5, 5)).double()
        small[5].weight = small[4].weight
    if how == "whole":
        small, units = copy.deepcopy(model), {}
    place = 4 if how == "tied" else 2
    before = small[place].weight.clone()  # type: ignore[operator]
    reconstruct_(small, model, units, torch.randn(80, 5).double().split(80 if how == "one batch" else 20))
    assert torch.equal(small[place].weight, before)  # type: ignore[arg-type]
