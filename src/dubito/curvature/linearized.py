r"""The outputs of a network that is linear in its random weights around the trained ones, $f(x) + J(x)\,(w - \hat w)$.

Under a Gaussian over the weights they are Gaussian too, with covariance $J \Sigma J^\top$ (Khan et al. 2019,
https://arxiv.org/abs/1906.01930; Immer et al. 2021, https://arxiv.org/abs/2008.08400).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Likelihood
from dubito.core import batches, params
from dubito.curvature import matrices as linalg
from dubito.curvature import output_columns
from dubito.curvature.engine import Engine, Tape
from dubito.curvature.factors import Factor
from dubito.curvature.functional import FunctionalTerms, joint_covariance
from dubito.curvature.output_layer import is_direct
from dubito.curvature.structures import jacobian_width
from dubito.curvature.workspace import Workspace
from dubito.networks.selection import Selection

# The most columns of one vector-Jacobian product; more outputs than this take several products.
MOST_COLUMNS = 32


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
        self, inputs: Any, covariances: list[linalg.Covariance], *, centred: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return outputs in the model's layout and, for each covariance, the variance of every canonical output.

        The Jacobian is contracted once for all of them.
        """
        outputs: list[Tensor] = []
        found: list[list[Tensor]] = [[] for _ in covariances]
        first = self._first(inputs)
        direct = is_direct(first)  # all examples share the columns, which are never copied
        closing = centred and not direct and self._closes(first.outputs)
        for tape in self._tapes(inputs, 1 if direct else MOST_COLUMNS):
            layout = self.likelihood.canonical(tape.outputs).shape
            columns: list[list[Tensor]] = [[] for _ in covariances]
            at_once = tape.outputs[0].numel() if direct else MOST_COLUMNS
            for some in output_columns.identity(self.likelihood, tape.outputs, at_once, centred=centred):
                with tape.lend() as memory:
                    terms = self._terms(tape.pull(some[:-1] if closing else some, memory), memory)
                    for each, covariance in zip(columns, covariances, strict=True):
                        each.append(terms.variance(covariance, closing=closing))
            for variances, each in zip(found, columns, strict=True):
                variances.append(torch.cat(each).mT.reshape(layout))
            outputs.append(tape.outputs.detach())
        return torch.cat(outputs), [torch.cat(variances) for variances in found]

    def _closes(self, outputs: Tensor) -> bool:
        """Return whether the last centred column can be omitted, because it is minus the sum of the others."""
        *positions, width = self.likelihood.canonical(outputs).shape[1:]
        in_blocks = isinstance(self.matrix, linalg.Kronecker | linalg.Diagonal | linalg.Sampled)
        return in_blocks and not positions and 1 < width <= MOST_COLUMNS

    def covariance(self, inputs: Any, covariance: linalg.Covariance) -> tuple[Tensor, Tensor]:
        """Return outputs in the model's layout and the covariance ``[B, *positions, C, C]`` at each position."""
        outputs, found = [], []
        for tape in self._tapes(inputs, self.likelihood.num_outputs(self._first(inputs).outputs)):
            layout = self.likelihood.canonical(tape.outputs).shape
            blocks = []
            for columns in output_columns.identity(self.likelihood, tape.outputs, layout[-1]):
                with tape.lend() as memory:
                    blocks.append(self._terms(tape.pull(columns, memory), memory).gram(covariance))
            outputs.append(tape.outputs.detach())
            found.append(torch.stack(blocks, dim=1).reshape(*layout, layout[-1]))
        return torch.cat(outputs), torch.cat(found)

    def whole_covariance(self, inputs: Any, covariance: linalg.Covariance, joint: bool) -> tuple[Tensor, Tensor]:
        """Return all outputs of each example, ``[B, O]`` in canonical order, and their covariance.

        It is ``[B, O, O]``, or ``[B·O, B·O]`` between all examples if `joint`.
        """
        outputs, found = [], []
        for tape in [self.engine.run(inputs)] if joint else self._tapes(inputs, self._first(inputs).outputs.numel()):
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
        extra = jacobian_width(self.engine, self.selection) if isinstance(self.matrix, linalg.Dense) else 0
        yield from (tape for _, tape in self.engine.chunks(inputs, num_columns, extra))

    def _terms(self, factors: dict[str, Factor], memory: Workspace | None = None) -> FunctionalTerms:
        return FunctionalTerms(self.matrix, self.selection, factors, memory)

    def _first(self, inputs: Any) -> Tape:
        return self.engine.run(batches.take(inputs, slice(0, 1)))
