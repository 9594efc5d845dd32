r"""Curvature of a given structure, summed over batches: :math:`H = \sum_n J_n^\top H_n J_n`, mostly without `J`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, limits, params
from dubito.core.errors import InputError, UnsupportedError, first_line
from dubito.core.limits import numbers
from dubito.core.params import differentiable_twice
from dubito.core.randomness import default_generator
from dubito.curvature import matrices as linalg
from dubito.curvature.accumulator import Accumulator, Sums, curvature_product, most_full
from dubito.curvature.engine import Engine, Tape
from dubito.curvature.factor import Factor
from dubito.curvature.kronecker import KroneckerAccumulator, kronecker_matrix
from dubito.curvature.layer_factors import layer_factors
from dubito.curvature.linear_layers import linear_gram
from dubito.curvature.one_layer import OneLayerCurvature, one_layer
from dubito.curvature.sampled import SampledAccumulator
from dubito.curvature.subset import fewest_fit
from dubito.networks.selection import Selection

__all__ = [
    "Accumulator",
    "DiagonalAccumulator",
    "FullAccumulator",
    "HessianAccumulator",
    "KroneckerAccumulator",
    "LowRankAccumulator",
    "Sums",
    "add_gram",
    "jacobian",
    "make_accumulator",
    "matrix_from_sums",
]

# The number of rows of an exact Hessian that are computed at once.
SIDE_BY_SIDE = 32


class DiagonalAccumulator(Accumulator):
    r"""The diagonal, :math:`h_d = \sum_{nv} M_{nvd}^2`; for a linear layer ``(ΣG²)ᵀ(a²)``."""

    def zeros(self) -> Sums:
        """Return one zero per weight."""
        return {"diagonal": torch.zeros(self.selection.num_weights, dtype=torch.float64, device=self.home)}

    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add the squared gradients of a batch."""
        for some in columns:
            with tape.lend() as memory:
                for each in layer_factors(tape.pull(some, memory), self.selection):
                    chosen = self.selection.indices[each.names[0]]
                    squares = each.factor.square_sum() if chosen is None else each.factor.square_sum_at(chosen)
                    for name, values in each.split(squares).items():
                        sums["diagonal"][self.selection.slices[name]] += values.double()

    def matrix(self, sums: Sums) -> linalg.Matrix:
        """Return a diagonal matrix."""
        return matrix_from_sums("diag", sums, self.selection, self.engine.model)


class FullAccumulator(Accumulator):
    """The full matrix over few weights; the Jacobian is computed for the selected weights only."""

    waiting: list[OneLayerCurvature] | None = None  # parts that are not added yet; None outside of `gathered`

    def __init__(self, engine: Engine, selection: Selection) -> None:
        super().__init__(engine, selection)
        if selection.num_weights > most_full():
            raise InputError(
                f"structure='full' over {selection.num_weights:,} weights would need "
                f"{8 * selection.num_weights**2 / 2**30:,.0f} GB: select fewer weights (select.subnetwork(1000)), or "
                "use structure='kron', 'diag' or 'low-rank'."
            )

    @property
    def extra(self) -> int:
        """A row of the Jacobian."""
        return jacobian_width(self.engine, self.selection)

    def zeros(self) -> Sums:
        """Return one zero per pair of weights; only the upper half is used."""
        size = self.selection.num_weights
        return {"full": torch.zeros(size, size, dtype=torch.float64, device=self.home)}

    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add ``JᵀJ``."""
        for some in columns:
            with tape.lend() as memory:
                factors = tape.pull(some, memory)
                if (layer := one_layer(factors, self.selection)) is not None:
                    if self.waiting is None:
                        layer.curvature.add_to(sums["full"])
                        continue
                    self.waiting.append(layer.curvature)
                    if sum(part.size for part in self.waiting) >= numbers(limits.current().chunk):
                        self._add_waiting(sums)
                elif (whole := linear_gram(factors, self.selection)) is not None:
                    sums["full"] += whole
                else:
                    add_gram(sums["full"], jacobian(factors, self.selection).flatten(0, 1))

    @contextmanager
    def gathered(self, sums: Sums) -> Iterator[None]:
        """Add the parts of one layer's curvature together, as each addition goes through the whole matrix."""
        self.waiting = []
        try:
            yield
            self._add_waiting(sums)
        finally:
            self.waiting = None

    def _add_waiting(self, sums: Sums) -> None:
        if self.waiting:
            OneLayerCurvature.joined(self.waiting).add_to(sums["full"])
            self.waiting = []

    def matrix(self, sums: Sums) -> linalg.Matrix:
        """Return a dense matrix; negative eigenvalues of an exact Hessian are set to zero."""
        return matrix_from_sums("full", sums, self.selection, self.engine.model)


class HessianAccumulator(FullAccumulator):
    """The exact Hessian of the negative log-likelihood over few weights, by differentiating twice.

    Unlike the Gauss-Newton matrix it can have negative eigenvalues away from a minimum. A precision cannot, so `matrix`
    is the nearest positive semi-definite matrix.
    """

    def __init__(self, engine: Engine, selection: Selection, likelihood: Likelihood) -> None:
        super().__init__(engine, selection)
        self.likelihood = likelihood

    def zeros(self) -> Sums:
        """Return one zero per pair of weights."""
        return {"hessian": super().zeros()["full"]}

    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add the Hessian of the batch."""
        assert targets is not None
        model, selection = self.engine.model, self.selection
        base = {name: value.detach() for name, value in model.named_parameters()}
        center = selection.ravel(base).requires_grad_()
        with torch.enable_grad(), differentiable_twice():
            inputs = batches.map_leaves(torch.clone, tape.inputs)
            outputs = params.functional_call(model, selection.merge(base, center), inputs)
            loss = -self.likelihood.log_prob(outputs, targets).sum()
            (gradient,) = torch.autograd.grad(loss, center, create_graph=True)
        if not gradient.requires_grad:  # the loss is linear in the weights
            return
        identity = torch.eye(len(center), dtype=gradient.dtype, device=gradient.device)
        for start in range(0, len(center), SIDE_BY_SIDE):
            rows = slice(start, start + SIDE_BY_SIDE)
            try:
                (found,) = self.engine.vector_jacobian(gradient, [center], identity[rows])
            except RuntimeError as error:
                if "not implemented" not in str(error):
                    raise
                raise UnsupportedError(
                    f"The Hessian of this network cannot be computed, because torch cannot differentiate a layer twice "
                    f"({first_line(error)}): choose curvature='ggn'."
                ) from error
            if found is not None:
                sums["hessian"][rows] += found.double()


class LowRankAccumulator(Accumulator):
    r"""The leading eigenpairs by randomized subspace iteration (Halko et al. 2011, https://arxiv.org/abs/0909.4061).

    Each pass over the data computes :math:`Y = H Q = \sum_n J_n^\top (J_n Q)` for a few directions and orthonormalizes;
    the last one diagonalizes :math:`Q^\top H Q`. Neither `H` nor `J` is formed.
    """

    passes = 4
    additive = False

    def __init__(self, engine: Engine, selection: Selection, rank: int, generator: torch.Generator) -> None:
        super().__init__(engine, selection)
        self.rank, self.generator = rank, generator
        self.width = min(selection.num_weights, rank + max(5, rank // 4))  # more directions than `rank`, for accuracy

    def zeros(self) -> Sums:
        """Return random orthonormal directions."""
        size = self.selection.num_weights
        random = torch.randn(
            size, self.width, generator=self.generator, dtype=torch.float64, device=self.generator.device
        )
        basis = torch.linalg.qr(random.to(self.home)).Q
        return {"basis": basis, "product": torch.zeros_like(basis)}

    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add ``Jᵀ(J Q)``."""
        selection = self.selection
        directions = selection.fill(sums["basis"].mT.to(tape.outputs).contiguous())
        for some in columns:
            with tape.lend() as memory:
                factors = tape.pull(some, memory)
                sums["product"] += curvature_product(factors, selection, directions).mT.double()

    def partial(self, sums: Sums) -> list[Tensor]:
        """Return the products; the directions are the same in all processes."""
        return [sums["product"]]

    def next_pass(self, sums: Sums) -> None:
        """Orthonormalize the products to get the new directions."""
        sums["basis"].copy_(torch.linalg.qr(sums["product"]).Q)
        sums["product"].zero_()

    def matrix(self, sums: Sums) -> linalg.Matrix:
        """Return the Rayleigh-Ritz pairs in the last subspace."""
        return matrix_from_sums("low-rank", sums, self.selection, self.engine.model, self.rank)


def make_accumulator(
    structure: str,
    engine: Engine,
    selection: Selection,
    *,
    mode: str = "expand",
    rank: int = 50,
    draws: int = 16,
    steps: int = 20,
    tunes: bool = True,
    generator: torch.Generator | None = None,
    hessian_of: Likelihood | None = None,
) -> Accumulator:
    """Return the accumulator of a structure by its name; see `Laplace`.

    `rank` eigenpairs are those of ``"low-rank"``; `draws` samples, in at most `steps` solver steps, of ``"sampled"``,
    whose Kronecker factors are exact if prior or noise are chosen by them (`tunes`).
    """
    if hessian_of is not None:
        return HessianAccumulator(engine, selection, hessian_of)
    match structure:
        case "diag":
            return DiagonalAccumulator(engine, selection)
        case "full":
            return FullAccumulator(engine, selection)
        case "kron":
            return KroneckerAccumulator(engine, selection, mode)
        case "ekfac":
            from dubito.curvature.ekfac import EigenAccumulator, is_exact  # which needs this file

            if is_exact(selection.num_weights):
                return FullAccumulator(engine, selection)
            return EigenAccumulator(engine, selection, mode)
        case "low-rank":
            return LowRankAccumulator(engine, selection, rank, default_generator(generator))
        case "sampled":
            thin = not tunes and fewest_fit(selection)
            return SampledAccumulator(engine, selection, mode, draws, steps, default_generator(generator), thin)
    raise unknown_structure(structure)


def matrix_from_sums(
    structure: str, sums: Sums, selection: Selection, model: nn.Module, rank: int = 50
) -> linalg.Matrix:
    """Return the curvature matrix of accumulated sums; it may share memory with them.

    The model is used only for Kronecker factors: it shows to which layer each parameter belongs.
    """
    match structure:
        case "diag":
            return linalg.Diagonal(sums["diagonal"])
        case "full":
            return linalg.Dense(sums["full"] if "full" in sums else _positive_part(sums["hessian"]))
        case "kron":
            return kronecker_matrix(sums, selection, model)
        case "ekfac":  # of few weights the whole matrix
            return linalg.Dense(sums["full"]) if "full" in sums else linalg.Kronecker.from_state(sums)
        case "low-rank":
            return _leading_pairs(sums, rank)
        case "sampled":
            return linalg.Sampled(sums["draws"])
    raise unknown_structure(structure)


def unknown_structure(structure: str) -> InputError:
    """Return the error for the name of a structure that does not exist."""
    return InputError(
        f"There is no structure '{structure}'; choose 'diag', 'full', 'kron', 'ekfac', 'low-rank' or 'sampled'."
    )


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add ``rowsᵀ rows`` to the upper half of `total`, in place, some columns at a time.

    This is 1.3 to 2 times as fast as one product of the whole matrix.
    """
    for block in linalg.base.column_blocks(rows.shape[1]):
        total[block, block.start :] += rows[:, block].mT @ rows[:, block.start :]


def jacobian_width(engine: Engine, selection: Selection) -> int:
    """Return the row length of the Jacobian that will be built: 0 if all random weights are one whole linear layer."""
    names = set(selection.names)
    one = any(isinstance(layer, nn.Linear) and names == set(roles.values()) for layer, roles in engine.roles.items())
    return 0 if one and all(map(selection.is_whole, names)) else selection.num_weights


def jacobian(factors: dict[str, Factor], selection: Selection) -> Tensor:
    """Return the Jacobian of the selected weights, ``[V, B, D]``."""
    return torch.cat([factors[name].gather(selection.indices[name]) for name in selection.names], dim=-1)


def _leading_pairs(sums: Sums, rank: int) -> linalg.LowRank:
    """Return the Rayleigh-Ritz pairs in the last subspace, the largest first."""
    inner = sums["basis"].mT @ sums["product"]
    values, vectors = linalg.base.eigh((inner + inner.mT) / 2)
    keep = torch.argsort(values, descending=True)[:rank]
    return linalg.LowRank(sums["basis"] @ vectors[:, keep], values[keep])


def _positive_part(matrix: Tensor) -> Tensor:
    values, vectors = linalg.base.eigh((matrix + matrix.mT) / 2)  # which sets negative eigenvalues to zero
    return (vectors * values) @ vectors.mT
