r"""Kronecker factors of every layer, summed over batches.

`reduce_factors` keeps the leading eigenpairs of wide factors and the diagonal of the rest, $F \approx R R^\top + D$,
so that the file of a posterior is as small as the adapters: one side of their blocks is as wide as the network (Yang et
al. 2024, https://arxiv.org/abs/2308.13111, keep the eigenpairs alone). A factor of a smaller rank stays exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor, nn

from dubito.core import limits
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.once import warn_once
from dubito.core.precision import at_least_single, widened
from dubito.core.widest import carried
from dubito.curvature import matrices as linalg
from dubito.curvature.accumulator import Accumulator, Sums, most_full
from dubito.curvature.call_gradients import CallGradient
from dubito.curvature.engine import Engine, Tape
from dubito.curvature.factor import Factor
from dubito.curvature.factors import CallsFactor
from dubito.curvature.matrices.base import eigh
from dubito.curvature.matrices.kronecker import kronecker_block
from dubito.curvature.products import gram
from dubito.curvature.roles import find_roles, matrix_order, shared_biases
from dubito.networks.adapters import adapter_names
from dubito.networks.layers.rows import DenseRows, ElementwiseRows, GroupedRows, IndexRows
from dubito.networks.selection import Selection

AnyBlock = linalg.Block | linalg.Dense | linalg.Diagonal

# Factors at least this wide are decomposed in several threads.
PARALLEL = 512

FactorRank = int | Literal["auto"] | None
# By default the factors of adapters are reduced from this width on: smaller ones take little memory anyway.
WIDE = 64


class WideFactorWarning(UserWarning):
    """A Kronecker factor is too large for memory."""


class KroneckerAccumulator(Accumulator):
    r"""Kronecker factors per parameter (Martens & Grosse 2015, https://arxiv.org/abs/1503.05671).

    The block of a weight is :math:`(\sum g g^\top) \otimes (\sum a a^\top) / n` over the rows of gradients and inputs,
    that of a bias :math:`\sum g g^\top`. Normalization layers, parameters without a layer rule, and parameters that
    layers of different kinds share have a diagonal block. A partly selected parameter keeps the factors of the whole
    and takes their principal submatrix.

    Weights that are shared over positions (Eschenhagen et al. 2023, https://arxiv.org/abs/2311.00636): `mode="expand"`
    treats positions as further examples, `mode="reduce"` first averages inputs and sums gradients over them (embeddings
    have no inputs to average and are always expanded).

    A side that is too wide for a matrix (a vocabulary; see `core/limits`) keeps only the diagonal of its factor.
    """

    def __init__(self, engine: Engine, selection: Selection, mode: str = "expand") -> None:
        super().__init__(engine, selection)
        if mode not in ("expand", "reduce"):
            raise InputError(f"The Kronecker mode must be 'expand' or 'reduce', got '{mode}'.")
        self.mode = mode

    def zeros(self) -> Sums:
        """Return no factors: they are created with the first batch, which shows the kind of each layer's rows."""
        return {name: {} for name in self.selection.names}

    def add(self, sums: Sums, tape: Tape, columns: Iterable[Tensor], targets: Tensor | None = None) -> None:
        """Add ``aᵀa`` once and ``GᵀG`` for every column."""
        for turn, some in enumerate(columns):
            with tape.lend() as memory:
                self.add_pulled(sums, tape.pull(some, memory), first=turn == 0)

    def add_pulled(self, sums: Sums, factors: dict[str, Factor], first: bool) -> None:
        """Add the gradients of some columns, and the inputs with the first columns of a batch."""
        shared = shared_biases(self.engine.roles)
        for name, factor in factors.items():
            if name not in shared:
                self._add_factor(name, sums[name], factor, first)

    def _add_factor(self, name: str, sums: Sums, factor: Factor, first: bool) -> None:
        calls = factor.calls if isinstance(factor, CallsFactor) else None
        kinds = {call.kind for call in calls or ()}
        factored = len(kinds) == 1 and None not in kinds
        if not factored and "left" in sums:
            raise UnsupportedError(
                f"'{name}' is used by different kinds of layers in different batches, so it has no Kronecker "
                "factors: use structure='diag', or leave it out of the selection."
            )
        if factored:
            for call in calls or ():
                self._add_call(sums, call, first)
        elif calls is None or calls:
            _accumulate(sums, "diagonal", factor.square_sum())

    def _add_call(self, sums: Sums, call: CallGradient, first: bool) -> None:
        reduce = self.mode == "reduce"
        inputs = call.rows
        if inputs is None:
            rows = call.bias_grads() if reduce else call.bias_rows()
            _accumulate(sums, "left", _factor(rows.flatten(0, -2)))
            return
        grads = call.grads_as_rows()
        assert not isinstance(inputs, ElementwiseRows)
        if isinstance(inputs, IndexRows):
            real = torch.ones_like(inputs.ids, dtype=torch.bool)
            if inputs.padding_idx is not None:
                real = inputs.ids != inputs.padding_idx  # padding is not data
                grads = grads[:, real][:, :, None]
            count = int(real.sum())
        elif reduce:
            grads, inputs = grads.sum(2, keepdim=True), inputs.of(inputs.a.mean(1, keepdim=True))
            count = grads.shape[1]
        else:
            count = grads.shape[1] * grads.shape[2]
        _accumulate(sums, "left", _grouped_gram(grads, isinstance(inputs, GroupedRows)))
        if first:
            used = inputs if isinstance(inputs, IndexRows) else self.input_rows(inputs)
            _accumulate(sums, "right", _input_factor(used))
            _accumulate(sums, "count", torch.tensor(float(count), device=self.home))

    def input_rows(self, inputs: DenseRows | GroupedRows) -> DenseRows | GroupedRows:
        """Return the rows of a layer's inputs that are summed up."""
        return inputs

    def matrix(self, sums: Sums) -> linalg.Kronecker:
        """Return one block per parameter."""
        return kronecker_matrix(sums, self.selection, self.engine.model)


def kronecker_matrix(sums: Sums, selection: Selection, model: nn.Module) -> linalg.Kronecker:
    """Return the blocks of all parameters; a bias without sums shares its weight's output factor and eigenvectors."""
    roles, _ = find_roles(model, selection.names)
    shared = {bias: weight for bias, weight in shared_biases(roles).items() if not sums[bias]}
    like = widened(next(model.parameters()).detach())

    def block(name: str, own: Sums) -> AnyBlock:
        return _block(whole_factors(own), selection, name, matrix_order(roles, name), like)

    blocks = _in_threads(block, {name: sums[name] for name in selection.names if name not in shared})
    for name in selection.names:
        if (weight := shared.get(name)) is None:
            continue
        known = blocks.get(weight)
        if isinstance(known, linalg.Block) and known.left_values is not None and selection.is_whole(name):
            blocks[name] = linalg.Block(known.left_values[..., None], known.left, None)
        else:
            blocks[name] = block(name, {key: value for key, value in sums[weight].items() if key.startswith("left")})
    return linalg.Kronecker([blocks[name] for name in selection.names])


def _in_threads(make: Callable[[str, Sums], AnyBlock], parts: dict[str, Sums]) -> dict[str, AnyBlock]:
    """Call a function for each part, the largest first: decompositions of large factors run side by side."""

    def width(name: str) -> int:
        return max((max(factor.shape[1:]) for factor in parts[name].values() if factor.ndim > 2), default=0)

    names, workers = sorted(parts, key=width, reverse=True), torch.get_num_threads()
    if workers < 2 or len(names) < 2 or width(names[0]) < PARALLEL:
        return {name: make(name, parts[name]) for name in names}
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(names, pool.map(carried(make), names, [parts[name] for name in names]), strict=True))


def _block(sums: Sums, selection: Selection, name: str, order: Tensor | None, like: Tensor) -> AnyBlock:
    chosen, size = selection.indices[name], torch.Size(selection.shapes[name]).numel()
    if "left" not in sums:
        values = sums["diagonal"] if "diagonal" in sums else like.new_zeros(size, dtype=torch.float64)
        return linalg.Diagonal(values if chosen is None else values[chosen])
    if chosen is not None:
        return linalg.Dense(_submatrix(sums, chosen, order))
    block = kronecker_block(sums["left"], sums.get("right"), sums.get("count", torch.ones(())), order)
    block.left, block.right = (None if v is None else v.to(like) for v in (block.left, block.right))
    return block


def _accumulate(sums: Sums, key: str, value: Tensor) -> None:
    value = value.detach()
    is_large = value.ndim > 2 and 8 * value.shape[-1] ** 2 > limits.current().float64_factor
    value = value if is_large else value.double()
    if key in sums:
        sums[key] += value
    else:
        sums[key] = value


def _grouped_gram(grads: Tensor, grouped: bool) -> Tensor:
    rows = grads.flatten(0, 2)
    return gram(rows.transpose(0, 1)) if grouped else _factor(rows)


def is_wide(width: int) -> bool:
    """Return whether a Kronecker factor of this width becomes diagonal, and warn of it once."""
    if 8 * width**2 <= limits.current().kronecker_factor:
        return False
    warn_once(
        f"A Kronecker factor over {width:,} numbers would need {8 * width**2 / 2**30:,.1f} GB: only its diagonal is "
        "used. Leave that layer out of the selection to avoid the approximation.",
        WideFactorWarning,
    )
    return True


def _factor(rows: Tensor) -> Tensor:
    """Return ``Σ r rᵀ`` of rows ``[N, W]`` as ``[1, W, W]``, or its diagonal ``[1, W]`` if it is too wide."""
    if is_wide(rows.shape[-1]):
        return torch.einsum("nw,nw->w", rows, rows)[None]
    return gram(rows)[None]


def _input_factor(inputs: DenseRows | GroupedRows | IndexRows) -> Tensor:
    """Return ``[Gr, I, I]``, or the diagonal ``[I]`` for an embedding, whose one-hot rows are orthogonal."""
    if isinstance(inputs, IndexRows):
        counts = torch.bincount(inputs.ids.flatten(), minlength=inputs.num_embeddings).double()
        if inputs.padding_idx is not None:
            counts[inputs.padding_idx] = 0.0
        return counts
    rows = inputs.a.flatten(0, 1)
    return gram(rows.transpose(0, 1)) if isinstance(inputs, GroupedRows) else _factor(rows)


def _submatrix(sums: Sums, chosen: Tensor, order: Tensor | None) -> Tensor:
    """Return the principal submatrix of a Kronecker block over some of its weights."""
    if len(chosen) > most_full():
        raise InputError(f"structure='kron' over {len(chosen):,} single weights of one layer is too large: use 'diag'.")
    where = chosen if order is None else order.argsort()[chosen]
    left, right = sums["left"], sums.get("right")
    if right is None:
        return left[0][where].diag() if left.ndim == 2 else left[0][where][:, where]
    if right.ndim == 1:  # an embedding: tokens × dimensions, tokens uncorrelated
        width = left.shape[-1]
        token, dim = where // width, where % width
        same = (token[:, None] == token[None]) * right[token][:, None]
        return left[0][dim][:, dim] * same / sums["count"]
    outputs, inputs = left.shape[-1], right.shape[-1]
    group, o, i = where // (outputs * inputs), where // inputs % outputs, where % inputs
    same_group = group[:, None] == group[None]
    entries = _entries(left, group, o) * _entries(right, group, i)
    return torch.where(same_group, entries, 0.0) / sums["count"]


def _entries(factor: Tensor, group: Tensor, at: Tensor) -> Tensor:
    """Return the entries ``[K, K]`` of factors ``[Gr, W, W]``, or of diagonals ``[Gr, W]``, between some places."""
    if factor.ndim == 2:
        return torch.where(at[:, None] == at, factor[group, at], 0.0)
    return factor[group[:, None], at[:, None], at]


def reduce_factors(sums: Sums, rank: FactorRank, model: nn.Module) -> Sums:
    """Return the sums of all parameters with wide factors reduced.

    Args:
        sums: Factors by parameter.
        rank: The number of eigenpairs that stay; ``"auto"`` reduces the wide side of adapters to as many as the narrow
            side has entries; None reduces nothing.
        model: The network, which shows what is an adapter.
    """
    if rank is None:
        return sums
    own = set(adapter_names(model)) if rank == "auto" else set(sums)
    dtypes = {name: at_least_single(model.get_parameter(name).dtype) for name in own & set(sums)}
    return {name: _reduced(part, rank, dtypes[name]) if name in own else part for name, part in sums.items()}


def whole_factors(sums: Sums) -> Sums:
    """Return the sums of one parameter with reduced factors written out."""
    found = {key: value for key, value in sums.items() if not key.endswith(("_root", "_rest"))}
    for key in ("left", "right"):
        if f"{key}_root" in sums:
            root, rest = (sums[f"{key}_{part}"].double() for part in ("root", "rest"))
            found[key] = root @ root.mT + torch.diag_embed(rest)
    return found


def _reduced(sums: Sums, rank: FactorRank, dtype: torch.dtype) -> Sums:
    factors = {key: sums[key] for key in ("left", "right") if key in sums and sums[key].ndim == 3}
    if rank == "auto":
        narrow = min((len(each[0]) for each in factors.values()), default=0)
        factors = {key: each for key, each in factors.items() if len(factors) == 2 and len(each[0]) >= WIDE}
        rank = narrow
    assert isinstance(rank, int)
    found = dict(sums)
    for key, factor in factors.items():
        if 2 * rank < factor.shape[-1]:
            root, rest = _leading(found.pop(key), rank, dtype)
            found |= {f"{key}_root": root, f"{key}_rest": rest}
    return found


def _leading(factor: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the root ``[Gr, W, rank]`` of the leading part, and the diagonal ``[Gr, W]`` of what is left."""
    values, vectors = eigh(factor)
    root = (vectors[..., -rank:] * values[..., None, -rank:].sqrt()).to(dtype)
    rest = factor.diagonal(dim1=-2, dim2=-1).double() - root.double().square().sum(-1)
    return root, rest.clamp_min(0.0).to(dtype)
