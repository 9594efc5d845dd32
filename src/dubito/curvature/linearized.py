r"""The outputs of a network that is linear in its random weights around the trained ones, $f(x) + J(x)\,(w - \hat w)$.

Under a Gaussian over the weights they are Gaussian too, with covariance $J \Sigma J^\top$ (Khan et al. 2019,
https://arxiv.org/abs/1906.01930; Immer et al. 2021, https://arxiv.org/abs/2008.08400).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, limits, params
from dubito.core.errors import InputError
from dubito.core.limits import numbers, slices
from dubito.core.once import warn_once
from dubito.core.params import differentiable_twice
from dubito.curvature import matrices as linalg
from dubito.curvature import output_columns, positions
from dubito.curvature.engine import Engine, Tape
from dubito.curvature.factor import Factor
from dubito.curvature.functional import FunctionalTerms, joint_covariance
from dubito.curvature.output_columns import is_direct
from dubito.curvature.products import Workspace
from dubito.curvature.structures import jacobian_width
from dubito.networks.selection import Selection

# The most columns of one vector-Jacobian product; more outputs than this take several products.
MOST_COLUMNS = 32
# More classes than this have no columns of their own where the outputs of a last layer are independent.
WIDE = 512
# The most columns, each with a backward pass of its own for each example, before sampling is the default.
MOST_EXACT = 1024


class SampledWarning(UserWarning):
    """A quantity is estimated from samples, because computing it exactly takes too long."""


class RowsInParts:
    """An array whose rows are computed part by part.

    Parts that are kept one by one between large arrays that are freed would fragment the memory.

    Args:
        size: The number of rows of all parts.

    >>> parts = RowsInParts(3)
    >>> parts.add(torch.zeros(2))
    >>> parts.add(torch.ones(1))
    >>> parts.whole()
    tensor([0., 0., 1.])
    """

    def __init__(self, size: int) -> None:
        self.size, self.filled = size, 0
        self.array: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add a copy of the next rows."""
        if self.array is None:
            self.array = rows.new_empty(self.size, *rows.shape[1:])
        assert rows.shape[1:] == self.array.shape[1:]
        self.array[self.filled : self.filled + len(rows)] = rows
        self.filled += len(rows)

    def whole(self) -> Tensor:
        """Return the array."""
        assert self.array is not None
        return self.array[: self.filled]


class Linearized:
    """Moments of the linearized outputs.

    Args:
        engine: Computes the gradients of the outputs.
        matrix: The curvature; its structure decides how covariances are contracted.
        selection: Which weights are random.
        likelihood: Defines the layout of the outputs.
    """

    def __init__(self, engine: Engine, matrix: linalg.Matrix, selection: Selection, likelihood: Likelihood) -> None:
        self.engine, self.matrix, self.selection, self.likelihood = engine, matrix, selection, likelihood

    def variances(
        self, inputs: Any, covariances: Sequence[linalg.Covariance], *, centred: bool, first: Tape | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return outputs in the model's layout and, for each covariance, the variance of every canonical output.

        The Jacobian is contracted once for all of them. `first` is what `start` returned, if it was called already.
        """
        first, size = first or self.start(inputs), batches.num_rows(inputs)
        direct = is_direct(first)  # all examples share the columns, which are never copied
        closing = centred and not direct and self._closes(first.outputs)
        is_all = len(first.outputs) == size
        outputs, found = RowsInParts(size), [RowsInParts(size) for _ in range(len(covariances))]
        for tape in [first] if is_all else self._tapes(inputs, 1 if direct else MOST_COLUMNS):
            layout = self.likelihood.canonical(tape.outputs).shape
            if direct and (flat := self._by_position(tape)) is not None:
                each = self._flat_variances(flat, covariances, centred)
            else:
                at_once = tape.outputs[0].numel() if direct else self.engine.columns_at_once(MOST_COLUMNS)
                columns = output_columns.identity(self.likelihood, tape.outputs, at_once, centred=centred)
                each = self._variances(tape, columns, covariances, closing)
            for variances, values in zip(found, each, strict=True):
                variances.add(values.reshape(layout))
            outputs.add(tape.outputs.detach())
        return outputs.whole(), [variances.whole() for variances in found]

    def variances_at(
        self, inputs: Any, covariances: Sequence[linalg.Covariance], where: Tensor, *, centred: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return outputs ``[B · P, C]`` and their variances at chosen positions ``[B, P]`` of each example."""
        outputs, found = RowsInParts(where.numel()), [RowsInParts(where.numel()) for _ in range(len(covariances))]
        start = 0
        for tape in self._tapes(inputs, MOST_COLUMNS):
            own = where[start : start + len(tape.outputs)]
            start += len(own)
            canonical = self.likelihood.canonical(tape.outputs.detach())
            if (flat := positions.by_position(tape, self.likelihood)) is not None:
                offset = flat.outputs.shape[0] // len(own) * torch.arange(len(own), device=own.device)
                chosen = flat.take((own + offset[:, None]).flatten())
                each, picked = self._flat_variances(chosen, covariances, centred), chosen.outputs.detach()
            else:
                parts = slices(own.shape[1] * canonical.shape[-1], self.engine.columns_at_once(MOST_COLUMNS))
                units = (positions.units_at(own, canonical, part, centred) for part in parts)
                columns = (self.likelihood.restore(some, tape.outputs) for some in units)
                each = self._variances(tape, columns, covariances, closing=False)
                picked = positions.at(canonical.flatten(1, -2), own).flatten(0, 1)
            for variances, values in zip(found, each, strict=True):
                variances.add(values.reshape(picked.shape))
            outputs.add(picked)
        return outputs.whole(), [variances.whole() for variances in found]

    def _variances(
        self, tape: Tape, columns: Iterable[Tensor], covariances: Sequence[linalg.Covariance], closing: bool
    ) -> list[Tensor]:
        """Return the variances ``[B, V]`` of all columns for each covariance."""
        found: list[list[Tensor]] = [[] for _ in range(len(covariances))]
        for some in columns:
            with tape.lend() as memory:
                terms = self._terms(tape.pull(some[:-1] if closing else some, memory), memory)
                for each, values in zip(found, terms.variances(covariances, closing=closing), strict=True):
                    each.append(values)
        return [torch.cat(each).mT for each in found]

    def _by_position(self, tape: Tape) -> positions.PositionTape | None:
        """Return the tape with positions as examples where there are some, or where there are many classes."""
        if tape.outputs.ndim < 3 and tape.outputs[0].numel() <= WIDE:
            return None
        return positions.by_position(tape, self.likelihood)

    def _flat_variances(
        self, tape: positions.PositionTape, covariances: Sequence[linalg.Covariance], centred: bool
    ) -> list[Tensor]:
        """Return the variances ``[N, C]`` of positions that are examples, some of them at a time."""
        size, width = tape.outputs.shape
        in_blocks = isinstance(self.matrix, linalg.Kronecker | linalg.Diagonal)
        most = numbers(limits.current().chunk)
        found: list[list[Tensor]] = [[] for _ in range(len(covariances))]
        for rows in slices(size, most // (width + tape.rows.shape[1] if in_blocks else width * tape.rows.shape[1])):
            part = tape.take(rows)
            if width > WIDE and self._outputs_are_independent():
                each = self._independent_variances(part, covariances, centred)
            else:
                likelihood, at_once = tape.likelihood(self.likelihood), max(1, most // width)
                columns = output_columns.identity(likelihood, part.outputs, at_once, centred=centred)
                each = self._variances(part, columns, covariances, closing=False)
            for variances, values in zip(found, each, strict=True):
                variances.append(values)
        return [torch.cat(variances) for variances in found]

    def _outputs_are_independent(self) -> bool:
        """Return whether the covariance of a last layer has no entries between weights of different outputs."""
        if isinstance(self.matrix, linalg.Kronecker):
            blocks = zip(self.selection.names, self.matrix.blocks, strict=True)
            return all(
                self.selection.is_whole(name)
                and (isinstance(block, linalg.Diagonal) or (isinstance(block, linalg.Block) and block.left is None))
                for name, block in blocks
            )
        return isinstance(self.matrix, linalg.Diagonal)

    def _independent_variances(
        self, tape: Tape, covariances: Sequence[linalg.Covariance], centred: bool
    ) -> list[Tensor]:
        r"""Return the variances ``[N, C]`` of independent outputs without a column for each of them.

        Centred, they are $(1 - 2/C) v_c + \sum_k v_k / C^2$.
        """
        column = torch.zeros_like(tape.outputs.detach())[None]
        terms, width = self._terms(tape.pull(column)), tape.outputs.shape[-1]
        found = [terms.per_output(covariance).expand_as(tape.outputs) for covariance in covariances]
        if not centred:
            return found
        return [(1 - 2 / width) * each + each.sum(-1, keepdim=True) / width**2 for each in found]

    def _closes(self, outputs: Tensor) -> bool:
        """Return whether the last centred column can be omitted, because it is minus the sum of the others."""
        *positions, width = self.likelihood.canonical(outputs).shape[1:]
        in_blocks = isinstance(self.matrix, linalg.Kronecker | linalg.Diagonal | linalg.Sampled)
        return in_blocks and not positions and 1 < width <= MOST_COLUMNS

    def covariance(self, inputs: Any, covariance: linalg.Covariance) -> tuple[Tensor, Tensor]:
        """Return outputs in the model's layout and the covariance ``[B, *positions, C, C]`` at each position."""
        first = self.first(inputs).outputs
        width = self.likelihood.canonical(first).shape[-1]
        if 8 * width**2 > limits.current().kronecker_factor:
            raise InputError(f"The covariance of {width:,} logits does not fit into memory: use link='probit'.")
        outputs, found = (RowsInParts(batches.num_rows(inputs)) for _ in range(2))
        for tape in self._tapes(inputs, self.likelihood.num_outputs(first)):
            layout = self.likelihood.canonical(tape.outputs).shape
            flat = positions.by_position(tape, self.likelihood) if tape.outputs.ndim > 2 else None
            likelihood = self.likelihood if flat is None else flat.likelihood(self.likelihood)
            own, blocks = tape if flat is None else flat, []
            for columns in output_columns.identity(likelihood, own.outputs, width):
                with own.lend() as memory:
                    blocks.append(self._terms(own.pull(columns, memory), memory).gram(covariance))
            outputs.add(tape.outputs.detach())
            found.add(torch.stack(blocks, dim=1).reshape(*layout, layout[-1]))
        return outputs.whole(), found.whole()

    def whole_covariance(self, inputs: Any, covariance: linalg.Covariance, joint: bool) -> tuple[Tensor, Tensor]:
        """Return all outputs of each example, ``[B, O]`` in canonical order, and their covariance.

        It is ``[B, O, O]``, or ``[B·O, B·O]`` between all examples if `joint`.
        """
        outputs, found = [], []
        for tape in [self.engine.run(inputs)] if joint else self._tapes(inputs, self.first(inputs).outputs.numel()):
            outputs.append(self.likelihood.canonical(tape.outputs.detach()).flatten(1))
            factors = tape.pull(next(output_columns.identity(self.likelihood, tape.outputs, outputs[-1].shape[1])))
            if joint:
                found.append(joint_covariance(covariance, self.selection, factors).to(outputs[-1].dtype))
            else:
                found.append(self._terms(factors).gram(covariance))
        return torch.cat(outputs), torch.cat(found)

    def differentiable(self, inputs: Any, covariance: linalg.Covariance, *, centred: bool) -> tuple[Tensor, Tensor]:
        """Return what `variances` does for one covariance, with gradients in the inputs.

        It builds the Jacobian of one example at a time: correct for every model, but slow, so use few inputs.
        """
        with torch.enable_grad():
            outputs, variances = [], []
            for row in range(batches.num_rows(inputs)):
                output, jacobian = self._jacobian(batches.take(inputs, slice(row, row + 1)))
                if centred:
                    jacobian = jacobian - jacobian.mean(-2, keepdim=True)
                outputs.append(output)
                variances.append((jacobian * covariance.solve(jacobian).to(jacobian)).sum(-1))
            return torch.cat(outputs), torch.cat(variances)

    def _jacobian(self, example: Any) -> tuple[Tensor, Tensor]:
        """Return the outputs of a batch of one, and their Jacobian ``[1, *positions, C, D]``."""
        weights = self.engine.parameters
        with differentiable_twice():
            output = params.call(self.engine.model, example)
        canonical = self.likelihood.canonical(output)
        rows = []
        for entry in canonical.flatten():
            gradients = torch.autograd.grad(
                entry, list(weights.values()), create_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(self.selection.ravel(dict(zip(weights, gradients, strict=True))))
        return output, torch.stack(rows).reshape(*canonical.shape, -1)

    def _tapes(self, inputs: Any, num_columns: int) -> Iterator[Tape]:
        """Run the model on parts of the inputs that are small enough for so many columns (or all outputs) at a time."""
        yield from (tape for _, tape in self.engine.chunks(inputs, num_columns, self._extra))

    @property
    def _extra(self) -> int:
        """The number of entries per example and column that are built besides gradients."""
        return jacobian_width(self.engine, self.selection) if isinstance(self.matrix, linalg.Dense) else 0

    def _terms(self, factors: dict[str, Factor], memory: Workspace | None = None) -> FunctionalTerms:
        return FunctionalTerms(self.matrix, self.selection, factors, memory)

    def is_slow(self, first: Tape) -> bool:
        """Return whether exact variances take too many backward passes, and warn of it once."""
        count = first.outputs[0].numel()
        if count <= MOST_EXACT or is_direct(first):
            return False
        warn_once(
            f"Exact variances of {count:,} outputs per example take a backward pass for each, so they are estimated "
            "from 32 weight samples. Use predict(..., exact=True) for exact ones, or weights=select.last_layer(), "
            "where they are fast.",
            SampledWarning,
        )
        return True

    def outputs_of_one(self, inputs: Any) -> Tensor:
        """Return the outputs of the first example, ``[1, ...]``."""
        return self.first(inputs).outputs.detach()

    def start(self, inputs: Any) -> Tape:
        """Run the network on all inputs if they are small enough to be one part, else on the first example alone."""
        is_one = len(self.engine.parts(inputs, MOST_COLUMNS, self._extra)) == 1
        return self.engine.run(inputs) if is_one else self.first(inputs)

    def first(self, inputs: Any) -> Tape:
        """Run the network on the first example alone, which shows the layout of the outputs."""
        self.engine.try_out(inputs)  # on several examples: after one alone, it would be tried again
        return self.engine.run(batches.take(inputs, slice(0, 1)))
