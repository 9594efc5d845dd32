"""Moments through layers, against many weight samples and against closed forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dubito.errors import UnsupportedError
from torch import Tensor, nn
from torch.nn import functional as F

from dubito.core import params
from dubito.networks.moments import propagated
from oracles import seeded


def sampled(model: nn.Module, variances: dict[str, Tensor], x: Tensor, count: int = 20_000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    means = {name: value.detach() for name, value in model.named_parameters()}
    drawn = {
        name: means[name] + variances[name].sqrt() * torch.randn(count, *means[name].shape, generator=generator).to(x)
        for name in variances
    }
    outputs = torch.vmap(lambda own: params.functional_call(model, own, x))(drawn)
    return outputs.mean(0), outputs.var(0)


@pytest.mark.slow
def test_one_layer_is_exact() -> None:
    layer = seeded(lambda: nn.Linear(3, 2)).double()
    variances = {"weight": torch.rand(2, 3).double(), "bias": torch.rand(2).double()}
    x = torch.randn(4, 3, dtype=torch.float64)
    mean, variance = propagated(layer, variances, x)(x)
    torch.testing.assert_close(mean, layer(x))
    torch.testing.assert_close(variance, x.square() @ variances["weight"].mT + variances["bias"])


@pytest.mark.parametrize(
    "activation", [F.relu, torch.tanh, F.gelu, F.leaky_relu, torch.sigmoid], ids=lambda f: f.__name__
)
def test_activations_of_one_unit(activation: Callable[[Tensor], Tensor]) -> None:
    """Of one Gaussian, where nothing is lost but by numerical integration."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([[0.7]]))

        def forward(self, x: Tensor) -> Tensor:
            return activation(F.linear(x, self.weight))

    x = torch.tensor([[-2.0], [-0.3], [0.4], [1.5]], dtype=torch.float64)
    model, spread = Unit().double(), 0.6
    grid = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    density = (-0.5 * grid.square()).exp()
    values = activation(0.7 * x + x.abs() * spread * grid)
    mean = (values * density).sum(1, keepdim=True) / density.sum()
    wanted = mean, ((values - mean).square() * density).sum(1, keepdim=True) / density.sum()
    found = propagated(model, {"weight": torch.full((1, 1), spread**2).double()}, x)(x)
    # Nine points are few for a wide Gaussian, and miss a kink between them.
    tolerance = {F.leaky_relu: 2e-2, torch.tanh: 1e-2}.get(activation, 5e-4)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_network_of_many_layers() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Dropout(0.5), nn.Flatten(),
            nn.Linear(36, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3),
        ).eval()  # fmt: skip

    model = seeded(make).double()
    x = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names = ("0.weight", "0.bias", "6.weight", "9.weight")
    variances = {name: 0.002 * torch.ones_like(model.get_parameter(name)) for name in names}
    mean, variance = propagated(model, variances, x)(x)
    wanted_mean, wanted = sampled(model, variances, x)
    assert (mean - wanted_mean).abs().max() < 0.1 * wanted.sqrt().max()
    assert (variance / wanted).log().abs().max() < 0.6  # normalization correlates units, which is neglected


def test_pooling_takes_the_variance_of_the_largest_mean() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.Unflatten(1, (1, 1)), nn.MaxPool2d((1, 2))).double()
    model[0].weight.data.fill_(1.0)
    x = torch.tensor([[[1.0, 3.0, -2.0, 0.5]]], dtype=torch.float64).repeat(2, 1, 1)
    mean, variance = propagated(model, {"0.weight": torch.full((1, 1, 1), 0.25).double()}, x)(x)
    assert mean[0].flatten().tolist() == [3.0, 0.5]
    assert variance[0].flatten().tolist() == [0.25 * 9, 0.25 * 0.25]


@pytest.mark.slow
def test_what_has_no_rule_is_refused() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) * self.one(x)

    x, variances = torch.randn(4, 3), {"one.weight": torch.ones(3, 3)}
    with pytest.raises(UnsupportedError, match="two random tensors"):
        propagated(Product(), variances, x)(x)
    model = nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1))
    with pytest.raises(UnsupportedError, match="moments of 'softmax'"):
        propagated(model, {"0.weight": torch.ones(3, 3)}, x)(x)
