r"""A layer's input as rows that its weight multiplies, and the contractions of rows into gradients.

A layer that is linear in its weight has the per-sample gradient $\nabla_W = \sum_t G_t a_t^\top$: a sum over positions
of outer products between a row of output gradients and a row of inputs. Layers differ only in what a row is, so every
quantity made of gradients needs one contraction per kind of row and none per layer type.

Shape letters: V columns of a batched vector-Jacobian product, B batch, T positions, I inputs and O outputs of the
weight as a matrix, Gr groups, C channels.
"""

from __future__ import annotations

from typing import NamedTuple, Self, assert_never

import torch
from torch import Tensor


class ArrayRows:
    """Rows that are an array `a`, with the batch as its first axis and the positions as its second."""

    __match_args__ = ("a",)

    def __init__(self, a: Tensor) -> None:
        self._array = a

    @property
    def a(self) -> Tensor:
        """The array."""
        return self._array

    @property
    def shape(self) -> torch.Size:
        """The shape of the array."""
        return self.a.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the array."""
        return self.a.dtype

    def of(self, a: Tensor) -> Self:
        """Return rows of the same kind with another array."""
        return type(self)(a)

    def at(self, positions: Tensor) -> Tensor:
        """Return the array at some positions."""
        return self.a[:, positions]

    def columns(self) -> Tensor:
        """Return the array with its last two axes exchanged."""
        return self.a.mT

    def times(self, basis: Tensor) -> Tensor | None:
        """Return ``a @ basis`` where that is faster without the array; otherwise None."""
        return None


class DenseRows(ArrayRows):
    """Rows `a [B, T, I]` that meet a weight `[O, I]`; their gradients are `[V, B, T, O]`."""


class GroupedRows(ArrayRows):
    """Rows `a [B, T, Gr, I]` that meet a weight `[Gr, O, I]` by groups; their gradients are `[V, B, T, Gr, O]`."""


class IndexRows(NamedTuple):
    """One-hot rows, kept as `ids [B, T]` into a weight `[num_embeddings, D]`; their gradients are `[V, B, T, D]`.

    Rows equal to `padding_idx` count as zero: that row of the weight never gets a gradient.
    """

    ids: Tensor
    num_embeddings: int
    padding_idx: int | None


class ElementwiseRows(ArrayRows):
    """Rows `a [B, T, C]` that meet a weight `[C]` channel by channel; their gradients are `[V, B, T, C]`."""


Rows = DenseRows | GroupedRows | IndexRows | ElementwiseRows


def rows_as(rows: Rows, like: Tensor) -> Rows:
    """Return rows in the dtype of a tensor: networks in half or mixed precision have others than their gradients."""
    return rows if isinstance(rows, IndexRows) or rows.dtype == like.dtype else rows.of(rows.a.to(like.dtype))


def per_sample_gradient(rows: Rows, grads: Tensor) -> Tensor:
    r"""The gradient of each column and each example, $\sum_t G_{vbt} a_{bt}^\top$: `[V, B, *matrix]`.

    `LayerRule.from_matrix` gives the result the shape of the weight.

    >>> rows, grads = DenseRows(torch.tensor([[[1.0, 2.0]]])), torch.tensor([[[[3.0]]]])
    >>> per_sample_gradient(rows, grads).tolist()
    [[[[3.0, 6.0]]]]
    """
    match rows:
        case DenseRows(a):
            return torch.einsum("bti,vbto->vboi", a, grads)
        case GroupedRows(a):
            return torch.einsum("btgi,vbtgo->vbgoi", a, grads)
        case ElementwiseRows(a):
            return torch.einsum("btc,vbtc->vbc", a, grads)
        case IndexRows(ids, num_embeddings, padding_idx):
            batch = ids.shape[0]
            offset = num_embeddings * torch.arange(batch, device=ids.device)
            total = _add_at(ids + offset[:, None], grads, batch * num_embeddings)
            return _clear_padding(total.unflatten(1, (batch, num_embeddings)), padding_idx)
    assert_never(rows)


def summed_gradient(rows: Rows, grads: Tensor) -> Tensor:
    """The gradient of each column, summed over the batch: `[V, *matrix]`. No per-sample gradient is ever built."""
    match rows:
        case DenseRows(a):
            return torch.einsum("bti,vbto->voi", a, grads)
        case GroupedRows(a):
            return torch.einsum("btgi,vbtgo->vgoi", a, grads)
        case ElementwiseRows(a):
            return torch.einsum("btc,vbtc->vc", a, grads)
        case IndexRows(ids, num_embeddings, padding_idx):
            return _clear_padding(_add_at(ids, grads, num_embeddings), padding_idx)
    assert_never(rows)


def _add_at(ids: Tensor, grads: Tensor, size: int) -> Tensor:
    """`grads [V, B, T, D]` added up at the rows that `ids [B, T]` names: `[V, size, D]`."""
    zeros = grads.new_zeros(grads.shape[0], size, grads.shape[-1])
    return zeros.index_add(1, ids.flatten(), grads.flatten(1, 2))


def _clear_padding(gradient: Tensor, padding_idx: int | None) -> Tensor:
    if padding_idx is None:
        return gradient
    return gradient.index_fill(-2, torch.tensor(padding_idx, device=gradient.device), 0.0)
