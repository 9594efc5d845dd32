r"""The variance that a Gaussian over weights gives to the outputs, :math:`J \Sigma J^\top`, without forming `J`.

`FunctionalTerms` computes once what does not depend on the prior (rotations into eigenbases, gathered columns). Each
prior precision then costs only a weighted sum of squares.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dubito.core import limits
from dubito.core.errors import UnsupportedError
from dubito.core.limits import numbers, slices
from dubito.curvature import matrices as linalg
from dubito.curvature.factor import ExplicitFactor, Factor
from dubito.curvature.factors import CallsFactor, OuterFactor
from dubito.curvature.layer_factors import LayerFactor, layer_factors, paired_names, with_ones
from dubito.curvature.one_layer import OneLayer, one_layer
from dubito.curvature.products import Workspace, closed
from dubito.curvature.structures import jacobian
from dubito.networks.selection import Selection


class _Contraction(ABC):
    """Computes some entries of ``J Σ Jᵀ``, for each form of `J` and `Σ`."""

    @abstractmethod
    def weighted(self, factor: Factor, weight: Tensor) -> Tensor:
        """Return the entries for a diagonal Σ, given the variances `weight` of one factor's weights."""

    @abstractmethod
    def of_rows(self, rows: Tensor) -> Tensor:
        """Return the entries for rows ``[V, B, D]`` of ``J R``, where ``Σ = R Rᵀ``."""

    @abstractmethod
    def of_layer(self, layer: OneLayer, covariance: linalg.DenseCovariance) -> Tensor:
        """Return the entries if all random weights are one linear layer."""

    @abstractmethod
    def under(self, covariance: linalg.DenseCovariance, rows: Tensor) -> Tensor:
        """Return the entries for rows ``[V, B, D]`` of `J`."""

    @abstractmethod
    def shrunk(self, along: Tensor, shrink: Tensor) -> Tensor:
        """Return the entries for rows ``[V, B, K]`` of ``J R``, where ``Σ = R diag(variance) Rᵀ``."""


class _Variance(_Contraction):
    """The diagonal, ``[V, B]``."""

    def weighted(self, factor: Factor, weight: Tensor) -> Tensor:
        return factor.weighted_square(weight)

    def of_rows(self, rows: Tensor) -> Tensor:
        return rows.square().sum(-1)

    def of_layer(self, layer: OneLayer, covariance: linalg.DenseCovariance) -> Tensor:
        return layer.variance(covariance)

    def under(self, covariance: linalg.DenseCovariance, rows: Tensor) -> Tensor:
        return covariance.variance_along(rows)

    def shrunk(self, along: Tensor, shrink: Tensor) -> Tensor:
        return along.square() @ shrink


class _ClosedVariance(_Variance):
    """The diagonal with one more column, ``[V + 1, B]``, for a Σ that is diagonal or in blocks."""

    def weighted(self, factor: Factor, weight: Tensor) -> Tensor:
        return factor.weighted_square(weight, closing=True)

    def of_rows(self, rows: Tensor) -> Tensor:
        return super().of_rows(closed(rows, closing=True))


class _Gram(_Contraction):
    """The block of each example, ``[B, V, V]``."""

    def weighted(self, factor: Factor, weight: Tensor) -> Tensor:
        return factor.weighted_gram(weight)

    def of_rows(self, rows: Tensor) -> Tensor:
        return torch.einsum("vbd,ubd->bvu", rows, rows)

    def of_layer(self, layer: OneLayer, covariance: linalg.DenseCovariance) -> Tensor:
        return layer.gram(covariance)

    def under(self, covariance: linalg.DenseCovariance, rows: Tensor) -> Tensor:
        return self.of_rows(covariance.times_root(rows))

    def shrunk(self, along: Tensor, shrink: Tensor) -> Tensor:
        return torch.einsum("vbk,k,ubk->bvu", along, shrink, along)


class FunctionalTerms:
    """The pulled-back columns of one batch, prepared for covariances of one curvature matrix.

    Args:
        matrix: The curvature.
        selection: Which weights are random.
        factors: The gradients of `V` output columns, by parameter.
        workspace: Memory lent by `Tape.lend`, valid until its block ends; by default new memory is allocated.
    """

    def __init__(
        self,
        matrix: linalg.Matrix,
        selection: Selection,
        factors: dict[str, Factor],
        workspace: Workspace | None = None,
    ) -> None:
        self.selection, self.workspace = selection, workspace
        self.factors = {name: factors[name] for name in selection.names}
        self.dtype = next(iter(self.factors.values())).like.dtype
        self.layer: OneLayer | None = None
        self.rows: Tensor | None = None
        self.shared: dict[tuple[int, str], tuple[Tensor, ...]] = {}  # the Jacobian in a basis that covariances share
        self.groups: list[LayerFactor] = []
        self.gathered: dict[int, Tensor] = {}  # by the position of the block: columns of a partly selected parameter
        match matrix:
            case linalg.Dense():
                self.layer = one_layer(self.factors, selection)
            case linalg.Kronecker():
                self._rotate(matrix)
            case linalg.Sampled():
                pass
            case _:
                self.groups = layer_factors(self.factors, selection)

    def _rotate(self, matrix: linalg.Kronecker) -> None:
        """Rotate every factor into the eigenbasis of its block."""
        blocks: dict[str, linalg.Block] = {}
        for position, (name, block) in enumerate(zip(self.selection.names, matrix.blocks, strict=True)):
            if isinstance(block, linalg.Block):
                blocks[name] = block
            elif isinstance(block, linalg.Diagonal) and self.selection.is_whole(name):
                self.groups.append(LayerFactor(self.factors[name], (name,)))
            else:
                self.gathered[position] = self.factors[name].gather(self.selection.indices[name])
        for names in paired_names({name: self.factors[name] for name in blocks}, self.selection):
            if len(names) == 2 and blocks[names[1]].left is blocks[names[0]].left:
                self.groups.append(LayerFactor(with_ones(self._rotated(names[0], blocks[names[0]])), names))
            else:  # a bias may have a basis of its own
                self.groups += [LayerFactor(self._rotated(name, blocks[name]), (name,)) for name in names]

    def _rotated(self, name: str, block: linalg.Block) -> Factor:
        factor = self.factors[name]
        if isinstance(factor, CallsFactor) and all(call.kind is not None for call in factor.calls):
            return factor.rotated(_without_group(block.left), _without_group(block.right), self.workspace)
        gradient = block.rotate(block.to_matrix(factor.per_sample().flatten(2))).flatten(2)
        return ExplicitFactor(factor.shape, factor.columns, factor.size, factor.like, gradient)

    def variance(self, covariance: linalg.Covariance, *, closing: bool = False) -> Tensor:
        """The variance of each column and example, ``[V, B]``.

        With `closing` (for diagonal and block-diagonal covariances) there is one more column: minus the sum of the
        others, so that all columns sum to zero, as centred outputs do.
        """
        if closing:
            return self._contract(covariance, _ClosedVariance())
        # for a low-rank covariance it is a difference, which rounding can make negative
        return self._contract(covariance, _Variance()).clamp_min(0.0)

    def variances(self, covariances: Sequence[linalg.Covariance], *, closing: bool = False) -> list[Tensor]:
        """`variance` for several covariances; for a grid of λ each layer's gradients are formed once."""
        if isinstance(covariances, linalg.DenseCovariances):
            return list(_along_eigenvectors(self._jacobian(), covariances))
        whole = all(map(self.selection.is_whole, self.selection.names))
        if not isinstance(covariances, linalg.Covariances) or not whole:
            return [self.variance(covariance, closing=closing) for covariance in covariances]
        first, count = next(iter(self.factors.values())), len(covariances)
        found = first.like.new_zeros(count, first.columns + closing, first.size)
        for each in self.groups:
            size = math.prod(each.factor.shape)
            for some in slices(count, numbers(limits.current().kept_weights) // size):
                found[some] += each.factor.weighted_squares(self._grid(each, covariances, some), closing=closing)
        for place, columns in self.gathered.items():
            assert isinstance(covariances, linalg.KroneckerCovariances)
            found += _along_eigenvectors(closed(columns, closing), covariances.dense[place])
        return list(found)

    def _grid(self, each: LayerFactor, covariances: linalg.Covariances, some: slice) -> Tensor:
        """Return the variances ``[g, ...]`` of a factor's weights, for some of the λ."""
        matrix, key = covariances.matrix, (self.dtype, *each.names, some.start)
        keeps = 4 * matrix.size * len(covariances) <= limits.current().kept_weights
        if key in covariances.memory:
            return covariances.memory[key]
        made = []
        for prior in covariances.priors[some]:
            values = {}
            for name in each.names:
                own = self._eigenvalues(matrix, name)
                values[name] = (1 / (covariances.scale * own + prior)).to(self.dtype)
            made.append(each.join(values))
        if keeps:
            covariances.memory[key] = torch.stack(made)
        return covariances.memory[key] if keeps else torch.stack(made)

    def _eigenvalues(self, matrix: linalg.Matrix, name: str) -> Tensor:
        """Return what the λ is added to for each weight of a parameter, in the basis of its factor."""
        if isinstance(matrix, linalg.Kronecker):
            block = matrix.blocks[self.selection.names.index(name)]
            if isinstance(block, linalg.Block):
                return block.values.squeeze(0)
            assert isinstance(block, linalg.Diagonal)
            return block.values.reshape(self.factors[name].shape)
        assert isinstance(matrix, linalg.Diagonal)
        return matrix.values[self.selection.slices[name]].reshape(self.factors[name].shape)

    def per_output(self, covariance: linalg.Covariance) -> Tensor:
        """The variance ``[B, O]`` of each output of a linear layer whose outputs are independent given its input."""
        terms = []
        for each in self.groups:
            if isinstance(covariance, linalg.KroneckerCovariance):
                weight = self._weights(each, covariance)
            else:
                assert isinstance(covariance, linalg.DiagonalCovariance)
                weight = each.join(self._by_name(covariance.values))
            if isinstance(each.factor, OuterFactor):
                terms.append(each.factor.per_output(weight))
            else:
                terms.append(weight.flatten())  # a bias alone
        return _total(terms)

    def gram(self, covariance: linalg.Covariance) -> Tensor:
        """The covariance between columns for each example, ``[B, V, V]``."""
        return self._contract(covariance, _Gram())

    def _contract(self, covariance: linalg.Covariance, product: _Contraction) -> Tensor:
        match covariance:
            case linalg.DenseCovariance():
                if covariance.scales is not None:  # one rotated Jacobian serves many covariances
                    return product.of_rows(self._in_basis(covariance, self._jacobian()))
                if self.layer is not None:
                    return product.of_layer(self.layer, covariance)
                return product.under(covariance, self._jacobian())
            case linalg.DiagonalCovariance():
                return _total(product.weighted(each.factor, self._diagonal(each, covariance)) for each in self.groups)
            case linalg.KroneckerCovariance():
                return self._kronecker(covariance, product)
            case linalg.LowRankCovariance():
                whole, along = self._low_rank(covariance, product)
                return whole - product.shrunk(along, covariance.shrink.to(self.dtype))
            case linalg.SampledCovariance():
                return product.of_rows(self._along(covariance.root))
        raise UnsupportedError(f"No functional covariance is known for {type(covariance).__name__}.")

    def _in_basis(self, covariance: linalg.DenseCovariance, rows: Tensor) -> Tensor:
        """Return rows of `J` times the root of a covariance; they are rotated once for all that share its basis."""
        basis, scales = covariance.basis, covariance.scales
        assert isinstance(basis, Tensor)
        assert scales is not None
        key = (id(basis), "rows")
        if key not in self.shared:
            self.shared[key] = basis, rows @ basis.to(self.dtype)
        return self.shared[key][1] * scales.to(self.dtype)

    def _jacobian(self) -> Tensor:
        if self.rows is None:
            self.rows = jacobian(self.factors, self.selection)
        return self.rows

    def _weighted(self, values: dict[str, Tensor], product: _Contraction) -> Tensor:
        return _total(product.weighted(each.factor, each.join(values)) for each in self.groups)

    def _kronecker(self, covariance: linalg.KroneckerCovariance, product: _Contraction) -> Tensor:
        terms = [product.weighted(each.factor, self._weights(each, covariance)) for each in self.groups]
        for position, columns in self.gathered.items():
            part = covariance.parts[position]
            if isinstance(part, linalg.DenseCovariance):
                shares = part.scales is not None
                rows = self._in_basis(part, columns) if shares else columns @ part.root.to(self.dtype)
                terms.append(product.of_rows(rows))
            else:
                assert isinstance(part, linalg.DiagonalCovariance)
                terms.append(product.of_rows(columns * part.values.sqrt().to(self.dtype)))
        return _total(terms)

    def _weights(self, each: LayerFactor, covariance: linalg.KroneckerCovariance) -> Tensor:
        """Return the variances of a factor's weights in its basis; they are the same for every batch."""
        key = (self.dtype, *each.names)
        if key not in covariance.memory:
            values = {}
            for name in each.names:
                part = covariance.parts[self.selection.names.index(name)]
                if isinstance(part, linalg.DiagonalCovariance):
                    values[name] = part.values.to(self.dtype).reshape(self.factors[name].shape)
                else:
                    assert not isinstance(part, linalg.Covariance)
                    values[name] = part[1].to(self.dtype).squeeze(0)
            covariance.memory[key] = each.join(values)
        return covariance.memory[key]

    def _diagonal(self, each: LayerFactor, covariance: linalg.DiagonalCovariance) -> Tensor:
        """Return the variances of a factor's weights; they are the same for every batch."""
        key = (self.dtype, *each.names)
        if key not in covariance.memory:
            values = self._by_name(covariance.values)
            covariance.memory |= {(self.dtype, *other.names): other.join(values) for other in self.groups}
        return covariance.memory[key]

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Return weights ``[D]`` in the shapes of the parameters, zero for weights that are not random."""
        return self.selection.fill(flat.to(self.dtype))

    def _low_rank(self, covariance: linalg.LowRankCovariance, product: _Contraction) -> tuple[Tensor, Tensor]:
        """Return the squares under ``Λ⁻¹`` and the Jacobian along ``Λ^{-1/2} V``, cached if all λ are equal."""
        spread, key = covariance.spread, (id(covariance.basis), type(product).__name__)
        if not covariance.is_uniform:
            whole = self._weighted(self._by_name(spread.square()), product)
            return whole, self._along(covariance.basis * spread[:, None])
        if key not in self.shared:
            ones = self._by_name(torch.ones_like(spread))
            self.shared[key] = covariance.basis, self._weighted(ones, product), self._along(covariance.basis)
        _, whole, along = self.shared[key]
        return whole * spread[0].square().to(self.dtype), along * spread[0].to(self.dtype)

    def _along(self, basis: Tensor) -> Tensor:
        directions = self.selection.fill(basis.mT.to(self.dtype).contiguous())
        return _total(factor.dot(directions[name]) for name, factor in self.factors.items())


def joint_covariance(covariance: linalg.Covariance, selection: Selection, factors: dict[str, Factor]) -> Tensor:
    """Return the covariance between all columns of all examples, ``[B·V, B·V]``; it builds the Jacobian, so use few."""
    rows = jacobian(factors, selection).transpose(0, 1).flatten(0, 1).double()
    return covariance.solve(rows) @ rows.mT


def _along_eigenvectors(rows: Tensor, covariances: linalg.DenseCovariances) -> Tensor:
    """Return the variances ``[G, V, B]`` of rows ``[V, B, D]`` of `J`, which are rotated once for all λ."""
    _, vectors = covariances.matrix.eigen
    return ((rows @ vectors.to(rows)).square_() @ covariances.variances.mT.to(rows)).movedim(-1, 0)


def _without_group(basis: Tensor | None) -> Tensor | None:
    """Remove a group axis of length one."""
    return basis[0] if basis is not None and len(basis) == 1 else basis


def _total(parts: Iterable[Tensor]) -> Tensor:
    total = None
    for part in parts:
        total = part if total is None else total + part
    assert total is not None
    return total
