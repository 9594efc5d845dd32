r"""Kronecker eigenbases with eigenvalues that are measured in them (George et al. 2018, https://arxiv.org/abs/1806.03884).

A Kronecker block is :math:`Q\,\mathrm{diag}(e)\,Q^\top` with :math:`Q = Q_G \otimes Q_A` and the products of the
factors' eigenvalues as `e`. Here a second pass over the data measures :math:`e_d = (Q^\top H Q)_{dd}` instead, the
best diagonal in this basis: the block is never farther from the exact one, in the Frobenius norm. With many data the
basis comes from one sampled target per example, which makes the first pass cheap; it is then nearly the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dubito.curvature import matrices as linalg
from dubito.curvature.accumulator import Sums
from dubito.curvature.engine import Tape
from dubito.curvature.functional import FunctionalTerms
from dubito.curvature.kronecker import KroneckerAccumulator
from dubito.curvature.output_columns import Kind

# The number of examples from which on the eigenbases come from sampled targets.
ENOUGH = 2000


class EigenAccumulator(KroneckerAccumulator):
    """Kronecker factors in the first pass, eigenvalues in their eigenbases in the second.

    A partly selected parameter keeps its block of ``"kron"``.
    """

    passes = 2
    additive = False

    def first_columns(self, sums: Sums, num_data: int) -> Kind | None:
        """Return that many data need one sampled target each to find the eigenbases, as in the paper."""
        return "fisher-mc" if "blocks" not in sums and num_data >= ENOUGH else None

    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add the factors, or in the second pass the squared gradients in the eigenbases."""
        if "blocks" not in sums:
            super().add(sums, tape, columns, targets)
            return
        matrix = eigen_matrix(sums)
        places = {name: place for place, name in enumerate(self.selection.names)}
        for some in columns:
            with tape.lend() as memory:
                for each in FunctionalTerms(matrix, self.selection, tape.pull(some, memory), memory).groups:
                    for name, squares in each.split(each.factor.square_sum()).items():
                        block = matrix.blocks[places[name]]
                        if isinstance(block, linalg.Block):
                            block.values += squares.reshape(block.values.shape).double()

    def partial(self, sums: Sums) -> list[Tensor]:
        """Return the factors, or in the second pass the eigenvalues."""
        if "blocks" not in sums:
            return super().partial(sums)
        return [block.values for block in eigen_matrix(sums).blocks if isinstance(block, linalg.Block)]

    def next_pass(self, sums: Sums) -> None:
        """Find the eigenbases, whose eigenvalues are to be measured."""
        found = super().matrix(sums)
        for block in found.blocks:
            if isinstance(block, linalg.Block):
                block.values, block.left_values = torch.zeros_like(block.values), None
        sums.clear()
        sums.update(found.state())

    def later_form(self, sums: Sums, saved: Sums) -> Sums:
        """Return eigenbases, of any factors."""
        self.next_pass(sums)
        return sums

    def matrix(self, sums: Sums) -> linalg.Kronecker:
        """Return one block per parameter."""
        return eigen_matrix(sums)


def eigen_matrix(sums: Sums) -> linalg.Kronecker:
    """Return the blocks with what was measured; they share memory with the sums."""
    return linalg.Kronecker.from_state({"blocks": sums["blocks"]})
