"""Gradients through calls of layers, in factored form: each class has the contractions that are cheap for its form."""

# ruff: noqa: D102 - an override returns what `Factor` says

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dubito.core import limits
from dubito.core.limits import numbers, slices
from dubito.core.tracing import is_tracing
from dubito.curvature.call_gradients import CallGradient
from dubito.curvature.factor import Factor, QuadraticForms
from dubito.curvature.products import Workspace, closed, explicit_products, rotated_square_sum, weighted_outer
from dubito.networks.layers.rows import ArrayRows, DenseRows, IndexRows


@dataclass
class CallsFactor(Factor):
    """Gradients through any number of calls of layers, including none."""

    calls: Sequence[CallGradient]
    keeps = False  # whether explicit gradients are formed once, for several products with directions

    @property
    def is_embedding(self) -> bool:
        """Whether all calls are of embeddings."""
        return bool(self.calls) and all(isinstance(call.rows, IndexRows) for call in self.calls)

    @property
    def num_positions(self) -> int:
        """The number of outer products, of all calls."""
        return sum(call.rows.shape[1] if isinstance(call.rows, ArrayRows) else 1 for call in self.calls)

    def per_sample(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return the explicit gradients of all calls, added up."""
        if not self.calls:
            if is_tracing():  # the number of examples has no value then
                return self.like.new_zeros(self.columns, self.size, *self.shape)
            count = len(range(self.columns)[columns]), len(range(self.size)[rows])
            return self.like.new_zeros(*count, *self.shape)
        total = self.calls[0].take(rows, columns).per_sample(self.shape)
        for call in self.calls[1:]:
            total = total + call.take(rows, columns).per_sample(self.shape)
        return total

    def summed(self) -> Tensor:
        """Return the sum over calls and examples; no per-example gradients are formed."""
        if not self.calls:
            return self.like.new_zeros(self.columns, *self.shape)
        total = self.calls[0].summed(self.shape)
        for call in self.calls[1:]:
            total = total + call.summed(self.shape)
        return total

    @cached_property
    def _kept(self) -> Tensor:
        """The explicit gradients, ``[B·V, size]``."""
        return self.per_sample().transpose(0, 1).reshape(self.size * self.columns, -1)

    def dot(self, directions: Tensor) -> Tensor:
        if not self.keeps:
            return super().dot(directions)
        flat = directions.reshape(len(directions), -1)
        return (self._kept @ flat.mT).unflatten(0, (self.size, self.columns)).transpose(0, 1)

    def backward_dot(self, weights: Tensor) -> Tensor:
        if not self.keeps:
            return super().backward_dot(weights)
        return weights.transpose(0, 1).flatten(0, 1).mT @ self._kept

    def mixed(self, weights: Tensor, rows: slice) -> Tensor:
        if not self.keeps:
            return super().mixed(weights, rows)
        return weights[rows].mT @ self._kept.unflatten(0, (self.size, self.columns))[rows]

    def rotated(self, left: Tensor | None, right: Tensor | None, workspace: Workspace | None = None) -> CallsFactor:
        """Return the factor of ``leftᵀ M right``: rows and gradients in other bases.

        `left` is ``[O, O]`` and `right` ``[I, I]``, with a leading group axis for grouped convolutions. The matrix of
        an embedding, ``[tokens, dimensions]``, is rotated on the right only.
        """
        if self.is_embedding:  # whose gradients have the dimensions of the right side
            left, right = right, None
        calls = [call.rotated(left, right, workspace) for call in self.calls]
        return make_factor(self.shape, self.columns, self.size, self.like, calls)


class ContractedFactor(CallsFactor):
    """Gradients whose weighted squares need no explicit gradients; subclasses have their own `weighted_square`."""

    def weighted_squares(self, weights: Tensor, *, closing: bool = False) -> Tensor:
        return torch.stack([self.weighted_square(weight, closing=closing) for weight in weights])


class BiasFactor(ContractedFactor):
    """The gradients of a bias of a layer called once."""

    @cached_property
    def grads(self) -> Tensor:
        """The gradients, ``[V, B, O]``."""
        return self.calls[0].bias_grads()

    def square_sum(self) -> Tensor:
        return self.grads.square().sum((0, 1)).flatten()

    def form_sum(self, forms: QuadraticForms) -> Tensor:
        return forms(self.grads.transpose(0, 1)).sum(0)

    def weighted_square(self, weight: Tensor, *, closing: bool = False) -> Tensor:
        return closed(self.grads, closing).square() @ weight.flatten()


class OuterFactor(ContractedFactor):
    """Gradients that are one outer product per example, as in an MLP."""

    @cached_property
    def grads(self) -> Tensor:
        """The output gradients, ``[V, B, O]``."""
        return self.calls[0].grads_as_rows()[:, :, 0]

    @cached_property
    def inputs(self) -> Tensor:
        """The inputs, ``[B, I]``."""
        rows = self.calls[0].rows
        assert isinstance(rows, DenseRows)
        return rows.a[:, 0]

    def square_sum(self) -> Tensor:
        return (self.grads.square().sum(0).mT @ self.inputs.square()).flatten()

    def square_sum_at(self, positions: Tensor) -> Tensor:
        return self.square_sum()[positions]

    def _gather(self, positions: Tensor) -> Tensor:
        return self.grads[..., positions // self.shape[-1]] * self.inputs[:, positions % self.shape[-1]]

    def weighted_square(self, weight: Tensor, *, closing: bool = False) -> Tensor:
        return weighted_outer(self.grads, self.inputs, weight.reshape(self.grads.shape[-1], -1), closing)

    def weighted_gram(self, weight: Tensor) -> Tensor:
        return torch.einsum("vbo,bo,ubo->bvu", self.grads, self.per_output(weight), self.grads)

    def per_output(self, weight: Tensor) -> Tensor:
        """Return the sums of squared inputs, weighted for each output, ``[B, O]``."""
        return self.inputs.square() @ weight.reshape(self.grads.shape[-1], -1).mT

    def dot(self, directions: Tensor) -> Tensor:
        matrices = directions.reshape(-1, *self.shape)
        return torch.einsum("vbo,kbo->vbk", self.grads, torch.einsum("bi,koi->kbo", self.inputs, matrices))

    def mixed(self, weights: Tensor, rows: slice) -> Tensor:
        grads = torch.einsum("bvp,vbo->bpo", weights[rows], self.grads[:, rows])
        return (grads[..., None] * self.inputs[rows, None, None]).flatten(2)

    def backward_dot(self, weights: Tensor) -> Tensor:
        mixed = torch.einsum("vbk,vbo->kbo", weights, self.grads)
        return torch.einsum("kbo,bi->koi", mixed, self.inputs).flatten(1)


class ConvolutionFactor(CallsFactor):
    """The gradients of a layer with dense rows at many positions, called once."""

    @property
    def inputs(self) -> Tensor:
        """The inputs, ``[B, T, I]``."""
        rows = self.calls[0].rows
        assert isinstance(rows, DenseRows)
        return rows.a

    def products(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield explicit gradients in the order of the matrix; see `explicit_products`."""
        return explicit_products(self.calls[0].grads_as_rows(), self.inputs, self.calls[0].later)

    @cached_property
    def _kept(self) -> Tensor:
        """The explicit gradients, by one product per example for all columns."""
        call, grads = self.calls[0], self.calls[0].grads_as_rows().permute(1, 0, 3, 2)
        left = grads.reshape(self.size, -1, grads.shape[3])
        assert isinstance(call.rows, DenseRows)
        product = torch.bmm(left, call.rows.columns().mT).unflatten(1, grads.shape[1:3])
        return call.rule.from_matrix(call.layer, product).reshape(self.size * self.columns, -1)

    def square_sum(self) -> Tensor:
        call = self.calls[0]
        if call.later is not None:
            return call.from_matrix(rotated_square_sum(call.grads_as_rows(), self.inputs, call.later))
        total = self.like.new_zeros(math.prod(self.shape))
        for _, entries, grads in self.products():
            squares = grads.square_().flatten(0, 1)
            total[entries] += squares.new_ones(len(squares)) @ squares
        return self.calls[0].from_matrix(total)

    def form_sum(self, forms: QuadraticForms) -> Tensor:
        total = self.like.new_zeros(2, math.prod(self.shape))
        for examples, entries, grads in self.products():
            total[:, entries] += forms.added_up(grads, examples)
        return torch.stack([self.calls[0].from_matrix(values) for values in total])

    def _gather(self, positions: Tensor) -> Tensor:
        """Gather before the sum over positions (about the cost of 16 products) where that is cheaper than `M`."""
        if 16 * len(positions) >= math.prod(self.shape):
            return super()._gather(positions)
        inputs, grads, where = self.inputs, self.calls[0].grads_as_rows(), self.calls[0].in_matrix(positions)
        step = numbers(limits.current().chunk) // max(self.columns * grads.shape[2] * len(positions), 1)
        width, gathered = inputs.shape[-1], []
        for rows in slices(self.size, step):
            left, right = grads[:, rows][..., where // width], inputs[rows][..., where % width]
            gathered.append(torch.einsum("vbts,bts->vbs", left, right))
        return torch.cat(gathered, dim=1)

    def weighted_square(self, weight: Tensor, *, closing: bool = False) -> Tensor:
        return self.weighted_squares(weight[None], closing=closing)[0]

    def weighted_squares(self, weights: Tensor, *, closing: bool = False) -> Tensor:
        flat = self.calls[0].matrices(weights)
        found = self.like.new_zeros(self.size, self.columns + closing, len(weights))
        for examples, entries, grads in self.products():
            some = flat[:, entries].mT
            if closing:
                found[examples, -1] += grads.sum(1).square_() @ some
            found[examples, : self.columns] += grads.square_() @ some
        return found.permute(2, 1, 0)


class EmbeddingFactor(ContractedFactor):
    """The gradients of an embedding called once, as sparse rows: repeats of a token in one example are added up."""

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """The example ``[K]``, the token ``[K]`` and the gradients ``[V, K, D]`` of each row."""
        rows = self.calls[0].rows
        assert isinstance(rows, IndexRows)
        offset = rows.num_embeddings * torch.arange(rows.ids.shape[0], device=rows.ids.device)
        keys, inverse = torch.unique((rows.ids + offset[:, None]).flatten(), return_inverse=True)
        grads = self.calls[0].grads_as_rows().flatten(1, 2)
        merged = grads.new_zeros(len(grads), len(keys), grads.shape[-1]).index_add(1, inverse, grads)
        token = keys % rows.num_embeddings
        if rows.padding_idx is not None:
            merged[:, token == rows.padding_idx] = 0.0
        return keys // rows.num_embeddings, token, merged

    def square_sum(self) -> Tensor:
        _, token, grads = self._rows
        return self.like.new_zeros(self.shape).index_add(0, token, grads.square().sum(0)).flatten()

    def form_sum(self, forms: QuadraticForms) -> Tensor:
        example, token, grads = self._rows
        each = forms(grads.transpose(0, 1), example).transpose(0, 1)
        return self.like.new_zeros(2, *self.shape).index_add(1, token, each).flatten(1)

    def _gather(self, positions: Tensor) -> Tensor:
        """Look the tokens up; the gradient is zero where a token does not occur."""
        example, token, grads = self._rows
        count, width = self.shape[0], grads.shape[-1]
        keys = example * count + token
        wanted = torch.arange(self.size, device=keys.device)[:, None] * count + positions // width
        found = torch.searchsorted(keys, wanted).clamp_max(len(keys) - 1)
        return grads[:, found, positions % width] * (keys[found] == wanted)

    def weighted_square(self, weight: Tensor, *, closing: bool = False) -> Tensor:
        example, token, grads = self._rows
        each = torch.einsum("vkd,kd->vk", closed(grads, closing).square(), weight.reshape(self.shape)[token])
        return self.like.new_zeros(len(each), self.size).index_add(1, example, each)

    def weighted_gram(self, weight: Tensor) -> Tensor:
        example, token, grads = self._rows
        each = torch.einsum("vkd,kd,ukd->kvu", grads, weight.reshape(self.shape)[token], grads)
        return self.like.new_zeros(self.size, self.columns, self.columns).index_add(0, example, each)

    def dot(self, directions: Tensor) -> Tensor:
        example, token, grads = self._rows
        each = torch.einsum("vkd,ukd->vku", grads, directions.reshape(-1, *self.shape)[:, token])
        return self.like.new_zeros(self.columns, self.size, len(directions)).index_add(1, example, each)

    def backward_dot(self, weights: Tensor) -> Tensor:
        example, token, grads = self._rows
        each = torch.einsum("vku,vkd->ukd", weights[:, example], grads)
        return self.like.new_zeros(weights.shape[-1], *self.shape).index_add(1, token, each).flatten(1)


def keep_gradients(factors: Iterable[Factor]) -> None:
    """Let layers at many positions form their explicit gradients once, as far as memory allows."""
    left = numbers(limits.current().kept_gradients)
    for factor in factors:
        size = factor.size * factor.columns * math.prod(factor.shape)
        has_none = isinstance(factor, CallsFactor) and type(factor).dot is CallsFactor.dot  # of its own
        if isinstance(factor, CallsFactor) and has_none and size <= left and not is_tracing():
            factor.keeps, left = True, left - size


def make_factor(
    shape: tuple[int, ...], columns: int, size: int, like: Tensor, calls: Sequence[CallGradient]
) -> CallsFactor:
    """Return the factor of some calls, of the class that contracts them fastest."""
    return _kind(shape, calls)(shape, columns, size, like, calls)


def _kind(shape: tuple[int, ...], calls: Sequence[CallGradient]) -> type[CallsFactor]:
    if len(calls) != 1 or not calls[0].fills:
        return CallsFactor
    match calls[0].rows:
        case None:
            return BiasFactor
        case DenseRows() as rows if rows.shape[1] == 1 and calls[0].is_its_matrix(shape):
            return OuterFactor
        case _ if is_tracing():  # the other two look at values, or work example by example
            return CallsFactor
        case DenseRows():
            return ConvolutionFactor
        case IndexRows():
            return EmbeddingFactor
    return CallsFactor
