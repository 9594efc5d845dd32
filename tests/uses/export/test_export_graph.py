"""Recorded graphs compute the same numbers with fewer operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dubito.core.tracing import record_with_gradients
from dubito.uses.export.graph import record

aten = torch.ops.aten
WEIGHT, OFFSET = torch.linspace(-1, 1, 12).reshape(4, 3), torch.linspace(0, 1, 3)
POSITIVE, OTHER = torch.tensor([0.5, 2.0, 0.7]), torch.tensor([1.0, -3.0, 0.2])


class Program(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.function(*inputs),)


def scaled(x: Tensor) -> Tensor:
    return (1 + 0.4 * torch.addmm(OFFSET, x, WEIGHT)).sqrt()


def scaled_and_not(x: Tensor) -> Tensor:
    product = torch.addmm(OFFSET, x, WEIGHT)
    return (1 + 0.4 * product).sqrt() + product


def stacked(x: Tensor) -> Tensor:
    return torch.stack([x.sin(), x.cos(), x]).exp().sum(0)


def factors(x: Tensor) -> Tensor:
    return torch.addcmul(OFFSET, x @ WEIGHT, POSITIVE).relu() * OTHER


def negative_factors(x: Tensor) -> Tensor:
    return torch.addcmul(OFFSET, x @ WEIGHT, OTHER).relu() * POSITIVE


def still_used(x: Tensor) -> Tensor:
    active = torch.addcmul(OFFSET, x @ WEIGHT, POSITIVE).relu()
    return active * OTHER + active


@pytest.mark.parametrize(
    ("function", "gone", "stays"),
    [
        (scaled, {aten.mul.Tensor, aten.add.Tensor}, {aten.addmm.default}),
        (scaled_and_not, {aten.mul.Tensor}, {aten.addmm.default}),
        (stacked, {aten.stack.default}, {aten.cat.default}),
        (factors, {aten.addcmul.default}, {aten.relu.default, aten.add.Tensor}),
        (negative_factors, set(), {aten.addcmul.default}),
        (still_used, set(), {aten.addcmul.default}),
    ],
)
def test_fewer_operations_give_the_same_numbers(
    function: Callable[[Tensor], Tensor], gone: set[object], stays: set[object]
) -> None:
    program = record(Program(function), (torch.rand(5, 4, generator=torch.Generator().manual_seed(0)),))
    found = {node.target for node in program.graph.nodes}
    assert not gone & found
    assert stays <= found
    for rows in (1, 7):
        x = torch.rand(rows, 4, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(program.module()(x)[0], function(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "pool",
    [nn.AvgPool2d(2), nn.AvgPool2d(3, 2), nn.AvgPool2d((2, 3), 2, (1, 0)), nn.AvgPool2d(2, divisor_override=3)],
)
def test_gradients_of_means_are_convolutions(pool: nn.Module) -> None:
    def gradient(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad((pool(x) ** 2).sum(), x)[0]

    x = torch.randn(5, 2, 8, 7, generator=torch.Generator().manual_seed(0))
    graph = record_with_gradients(gradient, (x,))
    assert aten.avg_pool2d_backward.default not in {node.target for node in graph.graph.nodes}
    torch.testing.assert_close(graph(x[:3]), gradient(x[:3]))
