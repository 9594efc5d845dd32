r"""The variance that a Gaussian over weights gives to the outputs, :math:`J \Sigma J^\top`, without forming `J`.

What does not depend on the prior (rotations into eigenbases, gathered columns) is done once in `FunctionalTerms`; each
prior precision that is tried costs only a weighted sum of squares after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dubito.core.errors import UnsupportedError
from dubito.curvature import matrices as linalg
from dubito.curvature.factors import Factor
from dubito.curvature.groups import Group, group, pairs, with_ones
from dubito.curvature.one_layer import OneLayer, one_layer
from dubito.curvature.products import closed
from dubito.curvature.structures import jacobian
from dubito.curvature.workspace import Workspace
from dubito.networks.selection import Selection

# From a factor and numbers per weight to their sum of squares [V, B], or of products [B, V, V].
Weighted = Callable[[Factor, Tensor], Tensor]


class FunctionalTerms:
    """The pulled-back columns of one batch, prepared for covariances of one curvature matrix.

    Args:
        matrix: The curvature.
        selection: Which weights are random.
        factors: The gradients of `V` output columns, by parameter.
        workspace: That of the tape that they are from; then all of this is gone with its next pull.
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
        self.shared: dict[tuple[int, str], tuple[Tensor, ...]] = {}  # what covariances with one basis have in common
        self.groups: list[Group] = []
        self.gathered: dict[int, Tensor] = {}  # by the position of the block: columns of a partly selected parameter
        match matrix:
            case linalg.Dense():
                self.layer = one_layer(self.factors, selection)
            case linalg.Kronecker():
                self._turn(matrix)
            case _:
                self.groups = group(self.factors, selection)

    def _turn(self, matrix: linalg.Kronecker) -> None:
        """Turn every factor into the eigenbasis of its block."""
        blocks: dict[str, linalg.Block] = {}
        for position, (name, block) in enumerate(zip(self.selection.names, matrix.blocks, strict=True)):
            if isinstance(block, linalg.Block):
                blocks[name] = block
            elif isinstance(block, linalg.Diagonal) and self.selection.is_whole(name):
                self.groups.append(Group(self.factors[name], (name,)))
            else:
                self.gathered[position] = self.factors[name].gather(self.selection.indices[name])
        for names in pairs({name: self.factors[name] for name in blocks}, self.selection):
            if len(names) == 2 and blocks[names[1]].left is blocks[names[0]].left:
                self.groups.append(Group(with_ones(self._turned(names[0], blocks[names[0]])), names))
            else:  # a bias may have a basis of its own
                self.groups += [Group(self._turned(name, blocks[name]), (name,)) for name in names]

    def _turned(self, name: str, block: linalg.Block) -> Factor:
        factor = self.factors[name]
        if factor.explicit is not None:
            explicit = block.rotate(block.to_matrix(factor.explicit.flatten(2))).flatten(2)
            return Factor(factor.shape, factor.columns, factor.size, factor.like, explicit=explicit)
        left, right = block.left, block.right
        if factor.is_embedding:  # its matrix has the dimensions of the gradient on the right
            left, right = right, None
        return factor.rotated(_without_group(left), _without_group(right), self.workspace)

    def variance(self, covariance: linalg.Covariance, *, closing: bool = False) -> Tensor:
        """The variance of each column and example, ``[V, B]``.

        With `closing`, which a covariance in blocks or a diagonal one allows, there is one more column: the one that
        makes all of them add up to zero, as centred outputs do.
        """
        if closing:
            return self._contract(covariance, _weighted_closed, _closed_square, None)
        # of a low-rank covariance it is a difference, which rounding may make negative
        return self._contract(covariance, Factor.weighted_square, _square, _minus_square).clamp_min(0.0)

    def gram(self, covariance: linalg.Covariance) -> Tensor:
        """The covariance between columns for each example, ``[B, V, V]``."""
        return self._contract(covariance, Factor.weighted_gram, _gram, _minus_gram)

    def _contract(self, covariance: linalg.Covariance, weighted: Weighted, plain: Any, minus: Any) -> Tensor:
        match covariance:
            case linalg.DenseCovariance():
                if self.layer is not None and covariance.scales is None:  # else a Jacobian serves many covariances
                    return self.layer.variance(covariance) if plain is _square else self.layer.gram(covariance)
                if covariance.scales is None and plain is _square:
                    return covariance.variance_along(self._jacobian())
                return plain(self._rows_under(covariance))
            case linalg.DiagonalCovariance():
                return self._weighted(self._by_name(covariance.values), weighted)
            case linalg.KroneckerCovariance():
                return self._kronecker(covariance, weighted, plain)
            case linalg.LowRankCovariance():
                whole, along = self._low_rank(covariance, weighted)
                return whole - minus(along, covariance.shrink.to(self.dtype))
        raise UnsupportedError(f"No functional covariance is known for {type(covariance).__name__}.")

    def _rows_under(self, covariance: linalg.DenseCovariance) -> Tensor:
        """The Jacobian times a square root of the covariance; the part that covariances share is computed once."""
        if covariance.scales is None:
            return covariance.times_root(self._jacobian())
        basis = covariance.basis
        assert isinstance(basis, Tensor)  # scales have one
        key = (id(basis), "rows")
        if key not in self.shared:
            self.shared[key] = basis, self._jacobian() @ basis.to(self.dtype)
        return self.shared[key][1] * covariance.scales.to(self.dtype)

    def _jacobian(self) -> Tensor:
        if self.rows is None:
            self.rows = jacobian(self.factors, self.selection)
        return self.rows

    def _weighted(self, values: dict[str, Tensor], weighted: Weighted) -> Tensor:
        return _total(weighted(each.factor, each.join(values)) for each in self.groups)

    def _kronecker(self, covariance: linalg.KroneckerCovariance, weighted: Weighted, plain: Any) -> Tensor:
        terms = [weighted(each.factor, self._weights(each, covariance)) for each in self.groups]
        for position, columns in self.gathered.items():
            part = covariance.parts[position]
            if isinstance(part, linalg.DenseCovariance):
                terms.append(plain(columns @ part.root.to(self.dtype)))
            else:
                assert isinstance(part, linalg.DiagonalCovariance)
                terms.append(plain(columns * part.values.sqrt().to(self.dtype)))
        return _total(terms)

    def _weights(self, each: Group, covariance: linalg.KroneckerCovariance) -> Tensor:
        """The variances of a group in its basis; the same for every batch."""
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

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Weights ``[D]`` in the shapes of the parameters, zero where a weight is not random."""
        return self.selection.fill(flat.to(self.dtype))

    def _low_rank(self, covariance: linalg.LowRankCovariance, weighted: Weighted) -> tuple[Tensor, Tensor]:
        """The squares under ``Λ⁻¹`` and the Jacobian along ``Λ^{-1/2} V``; of one λ they are known but for a factor."""
        spread, key = covariance.spread, (id(covariance.basis), weighted.__name__)
        if not covariance.is_uniform:
            whole = self._weighted(self._by_name(spread.square()), weighted)
            return whole, self._along(covariance.basis * spread[:, None])
        if key not in self.shared:
            ones = self._by_name(torch.ones_like(spread))
            self.shared[key] = covariance.basis, self._weighted(ones, weighted), self._along(covariance.basis)
        _, whole, along = self.shared[key]
        return whole * spread[0].square().to(self.dtype), along * spread[0].to(self.dtype)

    def _along(self, basis: Tensor) -> Tensor:
        directions = self.selection.fill(basis.mT.to(self.dtype).contiguous())
        return _total(factor.dot(directions[name]) for name, factor in self.factors.items())


def joint_covariance(covariance: linalg.Covariance, selection: Selection, factors: dict[str, Factor]) -> Tensor:
    """The covariance between all columns of all examples, ``[B·V, B·V]``; builds their Jacobian: for small batches."""
    rows = jacobian(factors, selection).transpose(0, 1).flatten(0, 1).double()
    return covariance.solve(rows) @ rows.mT


def _without_group(basis: Tensor | None) -> Tensor | None:
    """One group is no group axis."""
    return basis[0] if basis is not None and len(basis) == 1 else basis


def _weighted_closed(factor: Factor, weight: Tensor) -> Tensor:
    return factor.weighted_square(weight, closing=True)


def _square(rows: Tensor) -> Tensor:
    return rows.square().sum(-1)


def _closed_square(rows: Tensor) -> Tensor:
    return _square(closed(rows, closing=True))


def _gram(rows: Tensor) -> Tensor:
    return torch.einsum("vbd,ubd->bvu", rows, rows)


def _minus_square(along: Tensor, shrink: Tensor) -> Tensor:
    return along.square() @ shrink


def _minus_gram(along: Tensor, shrink: Tensor) -> Tensor:
    return torch.einsum("vbk,k,ubk->bvu", along, shrink, along)


def _total(parts: Iterable[Tensor]) -> Tensor:
    total = None
    for part in parts:
        total = part if total is None else total + part
    assert total is not None
    return total
