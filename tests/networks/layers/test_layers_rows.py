"""Rows against torch's own unfold, and what the contractions promise about memory and padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dubito.networks.layers import DenseRows, GroupedRows, IndexRows, per_sample_gradient, require_rule, summed_gradient
from dubito.networks.layers.conv import windows


def test_conv2d_rows_are_those_of_unfold() -> None:
    layer = nn.Conv2d(3, 4, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2))
    x = torch.randn(2, 3, 7, 6)
    rows = require_rule(layer).inputs_as_rows(layer, x)
    expected = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride).transpose(1, 2)
    assert isinstance(rows, DenseRows)
    assert torch.equal(rows.a, expected)


def test_grouped_rows_times_the_matrix_are_the_output() -> None:
    layer = nn.Conv1d(6, 9, 3, groups=3, padding="same", padding_mode="circular", bias=False).double()
    x, rule = torch.randn(2, 6, 5, dtype=torch.float64), require_rule(layer)
    rows = rule.inputs_as_rows(layer, x)
    assert isinstance(rows, GroupedRows)
    y = torch.einsum("btgi,goi->btgo", rows.a, rule.to_matrix(layer, layer.weight))
    torch.testing.assert_close(y, rule.grads_as_rows(layer, layer(x)[None])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"),
        nn.Conv2d(3, 4, 1, stride=2),
        nn.Conv1d(3, 4, 3, padding=1),
        nn.Conv3d(3, 4, 2, padding=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [(), (2,)], ids=["alone", "batch"])
def test_windows_give_the_same_without_their_rows(layer: nn.Module, batch: tuple[int, ...]) -> None:
    x = torch.randn(*batch, 3, *[6, 7, 5][: layer.weight.ndim - 2])  # type: ignore[union-attr,operator]
    rule = require_rule(layer)
    rows, lazy = (rule.inputs_as_rows(layer, x) for _ in range(2))
    assert isinstance(rows, DenseRows)
    assert isinstance(lazy, DenseRows)
    some, basis = torch.tensor([3, 0, 3]), torch.linalg.qr(torch.randn(rows.a.shape[-1], rows.a.shape[-1])).Q
    assert lazy.shape == rows.a.shape
    assert torch.equal(lazy.at(some), rows.a[:, some])
    assert torch.equal(rule.inputs_as_rows(layer, x).columns(), rows.a.mT)  # type: ignore[union-attr]
    product, expected = lazy.times(basis), rows.a @ basis
    is_convolved = isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)
    assert ("a" in vars(lazy), product is not None) == (False, is_convolved)
    if product is not None:
        torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)
    assert require_rule(layer).inputs_as_rows(layer, x.double()).times(basis.double()) is None  # type: ignore[union-attr]


def test_windows_are_a_view() -> None:
    x = torch.randn(2, 3, 6, 7, 5)
    view = windows(x, (2, 3, 2), (2, 1, 1), (1, 2, 3))
    assert view.shape == (2, 3, 3, 3, 2, 2, 3, 2)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(
            [self.numel, *[t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]]
        )
        return out


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(16, 16), torch.randn(64, 3, 16)),
        (nn.Conv1d(16, 16, 1), torch.randn(64, 16, 3)),
        (nn.Conv1d(32, 32, 1, groups=2), torch.randn(64, 32, 3)),
        (nn.Embedding(64, 16), torch.randint(64, (64, 3))),
    ],
    ids=["dense", "conv", "grouped", "index"],
)
def test_the_summed_gradient_builds_none_per_sample(layer: nn.Module, x: Tensor) -> None:
    rule = require_rule(layer)
    g = torch.randn(2, *layer(x).shape)
    rows, grads = rule.inputs_as_rows(layer, x), rule.grads_as_rows(layer, g)
    with LargestTensor() as largest:
        summed_gradient(rows, grads)
    assert largest.numel <= max(g.numel(), x.numel(), 2 * layer.weight.numel())
    assert largest.numel < per_sample_gradient(rows, grads).numel() / 2


def test_the_padding_row_gets_no_gradient_and_repeated_rows_add_up() -> None:
    rows = IndexRows(torch.tensor([[1, 1, 0], [2, 0, 1]]), num_embeddings=3, padding_idx=0)
    grads = torch.arange(6.0).view(1, 2, 3, 1) + 1
    assert summed_gradient(rows, grads).flatten().tolist() == [0.0, 1 + 2 + 6, 4]
    assert per_sample_gradient(rows, grads).squeeze().tolist() == [[0.0, 3.0, 0.0], [0.0, 6.0, 4.0]]


def test_the_padding_row_is_said_to_be_constant() -> None:
    layer = nn.Embedding(3, 2, padding_idx=-1)
    mask = require_rule(layer).constant_weights(layer)
    assert mask.tolist() == [[False, False], [False, False], [True, True]]
    plain = nn.Embedding(3, 2)
    assert require_rule(plain).constant_weights(plain) is None
