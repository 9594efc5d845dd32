r"""Kronecker eigenbases with eigenvalues that are measured in them (George et al. 2018, https://arxiv.org/abs/1806.03884).

A Kronecker block is :math:`Q\,\mathrm{diag}(e)\,Q^\top` with :math:`Q = Q_G \otimes Q_A` and the products of the
factors' eigenvalues as `e`. Here a second pass over the data measures :math:`e_d = (Q^\top H Q)_{dd}` instead, the
best diagonal in this basis: the block is never farther from the exact one, in the Frobenius norm. With many data the
basis comes from one sampled target for each of some examples, and from some positions of shared weights, which makes
the first pass cheap; it is then nearly the same, and the eigenvalues are exact in it. Parameters of at most
256 weights (see `core/limits`) have the exact block, in its own eigenbasis, and so have all parameters together if they
are as few: the whole matrix of a small network costs about as much as its factors.

In any basis, by the concavity of `log` and of `h / (h + λ)` (Schur 1923; `H` is the exact block, `h` its diagonal),

$$\sum_d \log(h_d + \lambda) \ge \log\det(H + \lambda), \qquad
  \sum_d \frac{h_d}{h_d + \lambda} \ge \mathrm{tr}\, H (H + \lambda)^{-1}:$$

the evidence is never above that of the full matrix, and the variances of the outputs at the training inputs, weighted
by the output Hessians, never sum to less. Neither holds for the products of the factors' eigenvalues. The divergence
:math:`\mathrm{KL}(q \,\|\, p)` of a Gaussian with precisions `d` along the basis from the full posterior is

$$\tfrac12 \Big[\sum_d \frac{h_d + \lambda}{d_d} + \log d_d\Big] + \text{const},$$

least at :math:`d_d = h_d + \lambda`. There the sum of ratios is the number of weights, so the evidence of the measured
eigenvalues is the evidence lower bound of their Gaussian, the highest one in this basis.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dubito.core import limits
from dubito.curvature import matrices as linalg
from dubito.curvature.accumulator import Sums
from dubito.curvature.engine import Engine, Tape
from dubito.curvature.factor import Factor
from dubito.curvature.functional import FunctionalTerms
from dubito.curvature.kronecker import KroneckerAccumulator
from dubito.curvature.output_columns import Kind
from dubito.curvature.products import gram
from dubito.networks.layers.rows import DenseRows, GroupedRows
from dubito.networks.selection import Selection

# The number of examples from which on the eigenbases come from sampled targets; about so many of them are used.
ENOUGH = 1000
# The number of positions of shared weights that are enough then.
POSITIONS = 16


def is_exact(size: int) -> bool:
    """Return whether the block of so many weights, of one parameter or of all, is exact."""
    return 8 * size**2 <= limits.current().exact_block


class EigenAccumulator(KroneckerAccumulator):
    """Kronecker factors in the first pass, eigenvalues in their eigenbases in the second.

    A partly selected parameter keeps its block of ``"kron"``. The diagonals of normalization layers are measured, too.
    Parameters of few weights have no factors: the second pass sums their exact blocks.
    """

    passes = 2
    additive = False

    def __init__(self, engine: Engine, selection: Selection, mode: str = "expand") -> None:
        super().__init__(engine, selection, mode)
        whole = [name for name in selection.names if selection.is_whole(name)]
        sizes = {name: span.stop - span.start for name, span in selection.slices.items()}
        self.exact = {name for name in whole if is_exact(sizes[name])}

    def _is_cheap(self, sums: Sums) -> bool:
        """Return whether this pass only has to find eigenbases, of many data."""
        whole = all(map(self.selection.is_whole, self.selection.names))
        return "blocks" not in sums and whole and self.num_data >= ENOUGH

    def first_columns(self, sums: Sums) -> Kind | None:
        """Return that many data need one sampled target each to find the eigenbases, as in the paper."""
        return "fisher-mc" if self._is_cheap(sums) else None

    def every(self, sums: Sums) -> int:
        """Return the distance of the rows that are used: all for the eigenvalues, some for the eigenbases."""
        if not self._is_cheap(sums):
            return 1
        widest = max((max(shape) for shape in self.selection.shapes.values() if len(shape) == 2), default=0)
        return max(self.num_data // max(ENOUGH, widest), 1)

    @property
    def fit_pass(self) -> int:
        """The second pass, if the first does not see all rows."""
        return int(self.every({}) > 1)

    def input_rows(self, inputs: DenseRows | GroupedRows) -> DenseRows | GroupedRows:
        """Return the rows at some positions, the same for all examples."""
        count = inputs.shape[1]
        if count <= POSITIONS or not self._is_cheap({}):
            return inputs
        chosen = torch.randperm(count, generator=torch.Generator().manual_seed(count))[:POSITIONS]
        return inputs.of(inputs.at(chosen.to(self.home)))

    def add_pulled(self, sums: Sums, factors: dict[str, Factor], first: bool) -> None:
        """Add the factors of parameters that have some."""
        super().add_pulled(sums, {name: each for name, each in factors.items() if name not in self.exact}, first)

    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add the factors; in the second pass the squared gradients in the eigenbases, and the exact blocks."""
        if "blocks" not in sums:
            super().add(sums, tape, columns, targets)
            return
        matrix = eigen_matrix(sums)
        for some in columns:
            with tape.lend() as memory:
                self._add_squares(matrix, FunctionalTerms(matrix, self.selection, tape.pull(some, memory), memory))

    def _add_squares(self, matrix: linalg.Kronecker, terms: FunctionalTerms) -> None:
        names = self.selection.names
        for each in terms.groups:
            for name, squares in each.split(each.factor.square_sum()).items():
                block = matrix.blocks[names.index(name)]
                assert not isinstance(block, linalg.Dense)
                block.values += squares.reshape(block.values.shape).double()
        exact = [name for name in names if name in self.exact]
        for name, dense in zip(exact, self._exact(matrix), strict=True):
            dense.upper += gram(terms.gathered[names.index(name)].flatten(0, 1)).double()

    def partial(self, sums: Sums) -> list[Tensor]:
        """Return the factors, or in the second pass the eigenvalues."""
        if "blocks" not in sums:
            return super().partial(sums)
        matrix = eigen_matrix(sums)
        return [*(block.upper for block in self._exact(matrix)), *(block.values for block in self._measured(matrix))]

    def _exact(self, matrix: linalg.Kronecker) -> list[linalg.Dense]:
        """Return the exact blocks, in the order of the selection."""
        named = zip(self.selection.names, matrix.blocks, strict=True)
        return [block for name, block in named if isinstance(block, linalg.Dense) and name in self.exact]

    def _measured(self, matrix: linalg.Kronecker) -> list[linalg.Block | linalg.Diagonal]:
        """Return the blocks whose values the second pass measures: those of whole parameters."""
        named = zip(self.selection.names, matrix.blocks, strict=True)
        return [block for name, block in named if not isinstance(block, linalg.Dense) and self.selection.is_whole(name)]

    def next_pass(self, sums: Sums) -> None:
        """Find the eigenbases, whose eigenvalues are to be measured, and exact blocks of zero."""
        found = super().matrix(sums)
        for place, name in enumerate(self.selection.names):
            if name in self.exact:
                size = found.blocks[place].size
                found.blocks[place] = linalg.Dense(torch.zeros(size, size, dtype=torch.float64, device=self.home))
        for block in self._measured(found):
            block.values = torch.zeros_like(block.values)
            if isinstance(block, linalg.Block):
                block.left_values = None
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
