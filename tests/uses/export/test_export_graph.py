"""Recorded graphs compute the same numbers with fewer operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def scaled_twice(x: Tensor) -> Tensor:
    return (1 + 0.4 * (1.5 * torch.addmm(OFFSET, x, WEIGHT))).sqrt()


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


NEXT = torch.linspace(1, -1, 6).reshape(2, 3)


def factors_before_a_layer(x: Tensor, offset: Tensor = OFFSET) -> Tensor:
    active = torch.addcmul(offset, x @ WEIGHT, POSITIVE).relu()
    return torch.addcmul(OFFSET[:2], F.linear(active * OTHER, NEXT), OTHER[1:])


def factors_and_large_biases(x: Tensor) -> Tensor:
    return factors_before_a_layer(x, 200 * OFFSET)


def two_roots(x: Tensor) -> Tensor:
    product = torch.addmm(OFFSET, x, WEIGHT.abs())
    return product.sqrt() / (1 + 0.4 * product).sqrt()


@pytest.mark.parametrize(
    ("function", "gone", "stays"),
    [
        (scaled, {aten.mul.Tensor, aten.add.Tensor}, {aten.addmm.default}),
        (scaled_twice, {aten.mul.Tensor, aten.add.Tensor}, {aten.addmm.default}),
        (scaled_and_not, {aten.mul.Tensor}, {aten.addmm.default}),
        (stacked, {aten.stack.default}, {aten.cat.default}),
        (factors, {aten.addcmul.default}, {aten.relu.default, aten.add.Tensor}),
        (factors_before_a_layer, {aten.relu.default, aten.add.Tensor}, {aten.maximum.default, aten.addcmul.default}),
        (factors_and_large_biases, {aten.maximum.default}, {aten.relu.default}),
        (two_roots, {aten.add.Tensor}, {aten.addmm.default, aten.split_with_sizes.default}),
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


SHARED, SECOND = torch.linspace(-1, 1, 1200).reshape(40, 30), torch.linspace(1, -1, 1200).reshape(30, 40)
TABLE, KERNEL = torch.linspace(-1, 1, 1200).reshape(40, 30), torch.linspace(-1, 1, 1350).reshape(10, 15, 3, 3)
MEMBERS = [0.5 + torch.rand(160, generator=torch.Generator().manual_seed(m)) for m in range(3)]


def member_layer(x: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    rows, columns = weight.shape
    return F.linear(x, weight * v[:columns] * v[columns : columns + rows].unsqueeze(1), v[-rows:])


def two_layers(x: Tensor) -> Tensor:
    found = [member_layer(member_layer(x, SHARED, v).relu(), SECOND, v) for v in MEMBERS]
    return torch.stack(found).softmax(-1).mean(0)


def one_layer_twice(x: Tensor) -> Tensor:
    square = SHARED @ SECOND
    found = [member_layer(member_layer(x.repeat(1, 2)[:, :40], square, v).relu(), square, v) for v in MEMBERS]
    return torch.stack(found).mean(0)


def unequal_use(x: Tensor) -> Tensor:
    first, *others = [member_layer(x, SHARED, v) for v in MEMBERS]
    return first.relu() + torch.stack(others).tanh().sum(0)


def looked_up(x: Tensor) -> Tensor:
    rows = x.abs().mul(10).long()
    return torch.stack([F.embedding(rows, TABLE * v[:30]) for v in MEMBERS]).sum(0)


def convolved(x: Tensor) -> Tensor:
    images = x[:, :15, None, None].expand(-1, -1, 4, 4)
    return torch.stack([F.conv2d(images, KERNEL * v[:10, None, None, None]).relu() for v in MEMBERS]).sum(0)


@pytest.mark.parametrize(
    ("function", "layer", "count"),
    [
        (two_layers, aten.linear.default, 2),
        (one_layer_twice, aten.linear.default, 6),
        (unequal_use, aten.linear.default, 1),
        (looked_up, aten.embedding.default, 1),
        (convolved, aten.conv2d.default, 3),
    ],
)
def test_members_share_large_weights(function: Callable[[Tensor], Tensor], layer: object, count: int) -> None:
    """A weight is stored once; dense layers are one product unless one of them needs another."""
    examples = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    program = record(Program(function), (examples,), share=True)
    assert sum(node.target == layer for node in program.graph.nodes) == count
    stored = sum(value.numel() for value in program.state_dict.values())
    assert stored < {two_layers: 2400, one_layer_twice: 1600}.get(function, 1350) + 3 * 200
    for rows in (1, 7):
        x = torch.randn(rows, 30, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(program.module()(x)[0], function(x), rtol=1e-5, atol=1e-4)


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


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Images(nn.Module):
    """Convolutions with BatchNorm, pooling and a shortcut that skips pixels and adds channels."""

    def __init__(self, width: int, pool: nn.Module, groups: int = 1) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(3, width, 3, padding=1, bias=groups > 1), pool
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, 8, 3, stride=2, padding=1, groups=groups)
        for value in (self.norm.weight, self.norm.bias, self.norm.running_mean):
            value.data.copy_(_numbers(width))
        self.norm.running_var.data.copy_(0.5 + _numbers(width) ** 2)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        inner = self.second(self.pool(self.norm(self.first(*inputs)).relu()))
        return (inner + F.pad(inputs[0][:, :, ::2, ::2], (0, 0, 0, 0, 2, 3)),)


@pytest.mark.parametrize(
    ("width", "pool", "groups", "channels"),
    [
        (13, nn.MaxPool2d(3, 1, 1), 1, 16),
        (18, nn.AvgPool2d(3, 1, 1), 1, 32),
        (20, nn.Tanh(), 1, 32),
        (16, nn.Identity(), 1, 16),
        (6, nn.Identity(), 1, 6),
        (24, nn.Identity(), 2, 24),  # groups are not filled
        (18, nn.Softmax(1), 1, 18),  # which new channels would change
    ],
)
def test_convolutions_have_whole_blocks_of_channels(width: int, pool: nn.Module, groups: int, channels: int) -> None:
    torch.manual_seed(0)
    module = Images(width, pool, groups).eval()
    program = record(module, (_numbers(4, 3, 8, 6),))
    found = [node for node in program.graph.nodes if node.op == "call_function"]
    assert not {aten.batch_norm.default, aten.pad.default, aten.slice.Tensor} & {node.target for node in found}
    assert next(node for node in found if node.target == aten.conv2d.default).meta["val"].shape[1] == channels
    for rows in (1, 7):
        x = _numbers(rows, 3, 8, 6)
        torch.testing.assert_close(program.module()(x)[0], module(x)[0], rtol=1e-5, atol=1e-5)
    kept = record(module, (_numbers(4, 3, 8, 6),), keep_filters=True)
    assert any(torch.equal(value, module.first.weight) for value in kept.state_dict.values())


@pytest.mark.parametrize(
    "shortcut",
    [
        lambda x: F.pad(x[:, :, 1::2], (0, 0, 0, 0, 0, 2)),
        lambda x: F.pad(x[:, :, :4:2], (0, 0, 0, 0, 0, 2)),
        lambda x: F.pad(x, (0, 0, 0, 0, 0, 2), value=1.0),
        lambda x: F.pad(x[:, ::2], (0, 0, 0, 0, 0, 2)),
        lambda x: F.pad(x, (1, 0, 0, 0, 0, 2)),
        lambda x: F.pad(x, (0, 0, 1, 1, 0, 0), mode="reflect"),
    ],
)
def test_other_paddings_stay(shortcut: Callable[[Tensor], Tensor]) -> None:
    program = record(Program(shortcut), (_numbers(4, 3, 8, 6),))
    assert aten.conv2d.default not in {node.target for node in program.graph.nodes}
    x = _numbers(7, 3, 8, 6)
    torch.testing.assert_close(program.module()(x)[0], shortcut(x))


def test_channels_of_members_with_shared_weights_are_filled() -> None:
    first, second = 0.1 * _numbers(18, 15, 3, 3), 0.1 * _numbers(10, 18, 3, 3)
    mean, variance = _numbers(18), 0.5 + _numbers(18) ** 2

    def members(x: Tensor) -> Tensor:
        images = x[:, :15, None, None].expand(-1, -1, 6, 6)
        found = []
        for v in MEMBERS:
            inner = F.batch_norm(F.conv2d(images, first * v[:15, None, None]), mean, variance).relu()
            found.append(F.conv2d(inner, second * v[:10, None, None, None]))
        return torch.stack(found).sum(0)

    program = record(Program(members), (_numbers(5, 30),), share=True)
    convolutions = [node for node in program.graph.nodes if node.target == aten.conv2d.default]
    assert [node.meta["val"].shape[1] for node in convolutions] == 3 * [32, 10]
    assert aten.batch_norm.default not in {node.target for node in program.graph.nodes}
    assert sum(value.numel() for value in program.state_dict.values()) < first.numel() + second.numel() + 3 * 200
    torch.testing.assert_close(program.module()(_numbers(7, 30))[0], members(_numbers(7, 30)), rtol=1e-4, atol=1e-4)
