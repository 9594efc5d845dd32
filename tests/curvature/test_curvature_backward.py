"""The walk over autograd's graph against autograd itself, column by column, in float64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from curvature.curvature_cases import CASES, build
from dubito import models
from dubito.core import limits
from dubito.curvature import backward
from dubito.curvature.engine import Engine
from dubito.curvature.products import Workspace

TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}


class Skip(nn.Module):
    """A residual block whose shortcut takes every other position and fills up with empty channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))
        return F.relu(self.norm(self.first(x)) + shortcut)


def pulled(model: nn.Module, x: Any) -> tuple[list[Tensor | None] | None, list[Tensor | None]]:
    """What the walk finds at the outputs of all layers with a rule, and what autograd does."""
    engine = Engine(model.double(), [name for name, _ in model.named_parameters()])
    tape = engine.run(x)
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(3, *tape.outputs.shape, generator=generator, dtype=torch.float64)
    top = get_gradient_edge(tape.outputs)
    edges = [call.edge for call in tape.calls if call.edge != top]
    one_by_one = [torch.autograd.grad(tape.outputs, edges, v, retain_graph=True, allow_unused=True) for v in columns]
    truth = [None if each[0] is None else torch.stack(each) for each in zip(*one_by_one, strict=True)]
    return backward.pull(tape.outputs, edges, columns), truth


def images(channels: int, size: int) -> Tensor:
    return torch.randn(3, channels, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


WALKED = {
    "lenet5": lambda: (models.lenet5(), images(1, 28)),
    "lenet5, channels last": lambda: (models.lenet5(), images(1, 28).contiguous(memory_format=torch.channels_last)),
    "resnet20": lambda: (models.resnet20(width=2), images(3, 8)),
    "mlp": lambda: (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)),
                    torch.randn(3, 5, dtype=torch.float64)),
    "overlapping and padded pools": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(3, 2, 2),
                      nn.MaxPool2d(2, 1, dilation=2), nn.Flatten(), nn.Linear(2, 2)), images(2, 7)),
    "grouped, strided, dilated, transposed": lambda: (
        nn.Sequential(nn.Conv2d(4, 6, (3, 2), stride=2, groups=2, dilation=2, padding=3), nn.ReLU(inplace=True),
                      nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1, groups=2), nn.Tanh(), nn.Flatten(),
                      nn.LazyLinear(2)), images(4, 7)),
    "skip": lambda: (nn.Sequential(nn.Conv2d(2, 2, 1), Skip(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
                     images(2, 6)),
    "one dimension": lambda: (nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Conv1d(3, 2, 2), nn.Flatten(),
                                            nn.Linear(8, 2)),
                              torch.randn(3, 2, 7, dtype=torch.float64)),
}  # fmt: skip


@pytest.mark.parametrize("name", WALKED)
def test_all_columns_at_once_are_those_of_autograd(name: str) -> None:
    torch.manual_seed(0)
    model, x = WALKED[name]()
    model.double()(x)  # lazy layers
    model.eval()
    found, truth = pulled(model, x)
    assert found is not None
    for ours, theirs in zip(found, truth, strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


STOPS_AT = (  # steps that the walk does not know
    "mlp_without_bias", "embedding", "embedding_sparse", "embedding_called_twice", "norms", "instance_and_rms_norms",
    "in_place", "tied_embedding", "sequence", "attention", "several_inputs", "named_inputs", "regression_of_one",
    "transposed_linear",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name != "linear_alone"])  # there it has no way to go
def test_where_the_walk_can_go_it_agrees_with_autograd(name: str) -> None:
    case = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, truth = pulled(case.model, case.inputs)
    assert (found is None) == (name in STOPS_AT)
    assert len(truth) > 0
    for ours, theirs in zip(found or [], truth, strict=found is not None):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize(
    "layer", [nn.GELU(), nn.LayerNorm(3), nn.Softmax(-1), nn.Bilinear(3, 3, 3)], ids=lambda layer: type(layer).__name__
)
def test_what_has_no_rule_is_left_to_autograd(layer: nn.Module) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    outputs = layer(x, x) if isinstance(layer, nn.Bilinear) else layer(x)
    assert backward.pull(outputs, [get_gradient_edge(x)], torch.ones(1, 2, 3)) is None


def test_sums_that_broadcast_or_scale_are_left_to_autograd() -> None:
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    columns = torch.ones(1, 2, 3)
    assert backward.pull(x + y, [get_gradient_edge(y)], columns) is None
    assert backward.pull(torch.add(x, x, alpha=2), [get_gradient_edge(x)], columns) is None
    assert backward.pull(torch.addmm(y, x, torch.eye(3), alpha=2), [get_gradient_edge(x)], columns) is None


def test_a_tensor_that_is_used_twice_gets_both_gradients() -> None:
    x = torch.tensor([[-1.0, 2.0]], requires_grad=True)
    found = backward.pull(x.relu() + x.tanh(), [get_gradient_edge(x)], torch.ones(1, 1, 2))
    assert found is not None
    assert found[0] is not None
    torch.testing.assert_close(found[0][0], (x > 0) + 1 - x.tanh().square())


def test_a_hook_that_changes_gradients_is_obeyed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[1].register_forward_hook(lambda layer, args, output: output.register_hook(lambda g: 2 * g) and None)
    x = torch.randn(5, 3, dtype=torch.float64)
    engine = Engine(model, ["0.weight"])
    ours = engine.run(x).pull(torch.ones(1, 5, 2, dtype=torch.float64))["0.weight"].summed()[0]
    model(x).sum().backward()
    torch.testing.assert_close(ours, model[0].weight.grad, **TOLERANCE)
    assert not engine.walks


def test_parts_of_a_batch_share_memory_without_mixing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2), nn.MaxPool2d(2),
                          nn.Flatten(), nn.Linear(2, 2)).double()  # fmt: skip
    x = images(2, 8).repeat(3, 1, 1, 1)[:8]
    engine = Engine(model, ["0.weight"])
    whole = engine.run(x).pull(torch.ones(1, 8, 2, dtype=torch.float64))["0.weight"].per_sample()
    with limits.using(gradients=3 * 2 * engine._size_of_one * 8):
        found = []
        for _, tape in engine.chunks(x, 1):
            for _ in range(3):  # as with many outputs: memory is that of one pull
                with tape.lend() as memory:
                    factors = tape.pull(torch.ones(1, len(tape.outputs), 2, dtype=torch.float64), memory)
                    each = factors["0.weight"].per_sample()
            found.append(each)
            assert factors["0.weight"].per_sample().isnan().all()  # the block is over
        assert [each.shape[1] for each in found] == [3, 3, 2]
    assert len(engine.workspace.kept) == 3  # one for each pool and for the linear layer
    torch.testing.assert_close(torch.cat(found, dim=1), whole, **TOLERANCE)


def test_a_workspace_gives_the_same_memory_again() -> None:
    workspace, like = Workspace(), torch.empty(0)
    with workspace.lend() as memory:
        first, second = memory.empty(like, 2, 3).zero_(), memory.empty(like, 4)
        with memory.lend():  # a block inside another takes nothing from it
            inner = memory.empty(like, 5).zero_()
        assert len({each.data_ptr() for each in (first, second, inner)}) == 3
        assert inner.isnan().all()
        assert not first.any()
    assert first.isnan().all()  # used after its block
    with workspace.lend():
        assert workspace.empty(like, 3).data_ptr() == first.data_ptr()
    assert workspace.empty(like.double(), 5).dtype == torch.float64
    rows, matrix = torch.randn(2, 3, 4), torch.randn(4, 5)
    torch.testing.assert_close(workspace.times(rows, matrix), rows @ matrix)
    torch.testing.assert_close(workspace.times(rows.mT, matrix[:3]), rows.mT @ matrix[:3])
