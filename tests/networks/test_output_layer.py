"""The last linear map before the outputs, in networks where the order of modules is misleading."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dubito.networks.output_layer import output_layer, registered_last
from dubito.networks.parameter_uses import find_uses


class Tokens(nn.Module):
    """Free parameters of the network itself, which returns last: a class token and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.positions = nn.Parameter(torch.zeros(1, 3, 4))
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.body(x).relu()[:, 0])


class Functional(nn.Module):
    """Matrices of the network itself, used without any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4, 5))
        self.second = nn.Parameter(torch.ones(5, 2))
        self.shift = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.exp() * ((x @ self.first).tanh() @ self.second + self.shift)


class Added(nn.Module):
    """What the last map adds to the one before; or two heads of the same features."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h + self.b(h.relu()) if self.residual else torch.cat([self.b(h.relu()), self.c(h.relu())], dim=-1)


class Attending(nn.Module):
    """Attention reads the weights of `out_proj` without calling it, with the batch as the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Pixels(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 1), nn.LogSoftmax(dim=1))


NETWORKS = {
    "free parameters": (Tokens, (2, 4), ["head.weight", "head.bias"]),
    "no layers": (Functional, (4,), ["second", "shift"]),
    "residual": (lambda: Added(True), (4,), ["b.weight", "b.bias"]),
    "two heads": (lambda: Added(False), (4,), ["b.weight", "b.bias", "c.weight", "c.bias"]),
    "attention": (Attending, (3, 4), ["attention.out_proj.weight", "attention.out_proj.bias"]),
    "pixels": (Pixels, (2, 5, 5), ["2.weight", "2.bias"]),
    "norms only": (lambda: nn.LayerNorm(4), (4,), []),
    "weight norm": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), parametrizations.weight_norm(nn.Linear(3, 2))), (4,),
        ["2.bias", "2.parametrizations.weight.original0", "2.parametrizations.weight.original1"],
    ),
    "orthogonal, no bias": (
        lambda: nn.Sequential(nn.Linear(4, 3), parametrizations.orthogonal(nn.Linear(3, 2, bias=False))), (4,),
        ["1.parametrizations.weight.original"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_the_last_linear_map(name: str, rows: int) -> None:
    make, shape, expected = NETWORKS[name]
    model = make()
    assert output_layer(model, torch.randn(rows, *shape)) == expected
    assert model.training
    assert all(value.grad is None for value in model.parameters())


def test_a_frozen_head_is_passed_over() -> None:
    model = Tokens()
    model.head.requires_grad_(False)
    assert output_layer(model, torch.randn(2, 2, 4)) == ["body.weight", "body.bias"]
    assert output_layer(model.requires_grad_(False), torch.randn(2, 2, 4)) == []


def test_tied_weights_have_one_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 5))
    model[2].weight = model[0].weight
    assert output_layer(model, torch.zeros(2, 3, dtype=torch.long)) == ["0.weight", "2.bias"]


def test_without_data_the_last_linear_layer_that_is_registered() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.BatchNorm1d(2), nn.Embedding(2, 2))
    assert registered_last(model) == ["1.weight", "1.bias"]
    assert registered_last(nn.BatchNorm1d(2)) == []


def test_a_network_whose_graph_depends_on_the_batch() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu() if len(x) % 2 else super().forward(x)

    model = Odd(2, 2)
    assert find_uses(model, ["weight"], torch.ones(2, 2)) is None
    assert output_layer(model, torch.ones(2, 2)) == []
