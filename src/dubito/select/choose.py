r"""Choose a subnetwork by rules that need data; greedily, so that its weights together capture most of the variance.

With precision $P = H + \lambda I$ and the Jacobian $J$ of the outputs at the inputs that matter, a subnetwork $S$
captures $\operatorname{tr} J_S P_{SS}^{-1} J_S^\top$. Adding weight $d$ gains

$$\frac{\sum_m R_{md}^2}{r_d}, \qquad R = J - J_S P_{SS}^{-1} P_{S:}, \qquad r_d = P_{dd} - P_{dS} P_{SS}^{-1} P_{Sd}$$

where $R$ and $r$ are the residuals of a pivoted Cholesky factorization of $P$. Neither $H$ nor $J^\top J$ is formed:
only the columns of the most promising weights are computed, in blocks.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.core import distributed, limits
from dubito.core.batches import Source
from dubito.core.errors import InputError
from dubito.core.limits import numbers
from dubito.curvature import Engine, Tape, jacobian, output_columns
from dubito.networks.selection import Selection
from dubito.select.budgets import SelectionBudget
from dubito.select.directions import direction_columns
from dubito.select.local_gaussian import fit_gaussian
from dubito.select.ranking import Ranking
from dubito.select.scores import MOST_COLUMNS, Scores, context_tapes, measure, tapes

if TYPE_CHECKING:
    from dubito.select.subnetwork import subnetwork

# The number of columns of the Gram matrices that one pass over the rows computes.
BLOCK = 128


class SelectionWarning(UserWarning):
    """Some of the chosen weights cannot change an output."""


@dataclass(frozen=True)
class Chooser:
    """The choice of a subnetwork by a rule that needs data."""

    rule: subnetwork
    model: nn.Module
    source: Source
    likelihood: Likelihood
    prior: float  # the prior precision λ
    generator: torch.Generator

    def choose(self, candidates: Selection, budget: SelectionBudget) -> Ranking:
        """Choose and rank candidates within the budget."""
        rule = self.rule
        by_weights = rule.rule == "weight-variance"
        measured = measure(
            self.model, candidates.names, self.source, self.likelihood,
            derivatives=not by_weights, context=rule.context, samples=rule.num_samples, generator=self.generator,
        ).of(candidates)  # fmt: skip
        variance = self._variance(measured)
        scores = variance if by_weights else measured.squared_derivatives * variance
        influence = measured.curvature if by_weights else measured.squared_derivatives
        if not bool((influence > 0).any()):
            raise InputError(
                "No candidate can change an output on these inputs (dead units, or constant inputs): choose other "
                "candidates, or check the network."
            )
        if rule.rule == "greedy":
            order = self._greedy(measured, scores, budget)
        elif rule.rule == "sampled":
            order = budget.best(scores.log() + _gumbel(len(scores), self.generator))
        else:
            order = budget.best(scores)
        if rule.rule == "greedy":  # a weight without effect on the context's outputs may still decorrelate others
            influence = influence + measured.curvature
        _warn_of_dead(influence[order] == 0, budget)
        return Ranking(candidates, order)

    def _variance(self, measured: Scores) -> Tensor:
        """Return the variance of each candidate, by the diagonal curvature or by a posterior."""
        of: Any = self.rule.variance
        if of == "diag":
            return measured.variance(self.prior)
        if of == "kron":
            everything = Selection.all_of(self.model)
            found = fit_gaussian("kron", self.model, everything, self.source, measured.likelihood, self.prior)
            zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in everything.shapes.items()}
            return measured.weights.ravel(everything.merge(zeros, found.covariance.variance().double().cpu()))
        if not hasattr(of, "marginals"):
            if not hasattr(of, "fit"):
                raise InputError("The posterior of this rule was not saved with the rule: set `variance` again.")
            of = of.fit(
                self.model, _fit_data(self.source), likelihood=self.likelihood,
                num_data=self.source.num_data, generator=self.generator, progress=False,
            )  # fmt: skip
        return measured.weights.ravel(of.marginals()[1]).double().cpu()

    def _greedy(self, measured: Scores, scores: Tensor, budget: SelectionBudget) -> Tensor:
        """Choose greedily among the candidates with the largest scores."""
        near = budget.widened(max(budget.count, min(len(scores), self.rule.prefilter))).best(scores)
        few = Ranking(measured.weights, near).selection
        near = near.sort().values  # in the order of the selection
        engine, likelihood, context = Engine(self.model, few.names), measured.likelihood, self.rule.context
        unit, scale = likelihood, 1.0
        if isinstance(likelihood, Gaussian):
            unit, scale = Gaussian(noise=1.0), 1 / float(likelihood.noise) ** 2

        def curvature() -> Iterator[Tensor]:
            for tape, targets in tapes(engine, self.source, unit, few.num_weights):
                for columns in output_columns.columns("ggn", unit, tape.outputs.detach(), targets, most=MOST_COLUMNS):
                    with tape.lend() as memory:
                        rows = jacobian(tape.pull(columns, memory), few).flatten(0, 1)
                    yield rows

        def directions() -> Iterator[Tensor]:
            for tape, targets in self._looked_at(engine, unit, few.num_weights):
                for columns in direction_columns(unit, tape.outputs.detach(), targets, MOST_COLUMNS):
                    with tape.lend() as memory:
                        rows = jacobian(tape.pull(columns, memory), few).flatten(0, 1)
                    yield rows

        chosen = greedy(
            JacobianRows(curvature, len(near), shared=True, scale=scale),
            JacobianRows(directions, len(near), shared=context is None),
            measured.curvature[near], measured.squared_derivatives[near], self.prior, budget.of(near),
        )  # fmt: skip
        return near[chosen]

    def _looked_at(self, engine: Engine, likelihood: Likelihood, extra: int) -> Iterator[tuple[Tape, Tensor | None]]:
        """Run the network over the inputs at which the uncertainty is measured."""
        if self.rule.context is None:
            yield from tapes(engine, self.source, likelihood, extra)
        else:
            yield from ((tape, None) for tape in context_tapes(engine, self.source.place(self.rule.context), extra))


def _fit_data(source: Source) -> Any:
    """Return the data of a source in a form that another recipe can be fitted to."""
    return _Replayed(source) if source.pair is None else source.pair


class _Replayed:
    """An iterable over the batches of a source, to which another recipe can be fitted."""

    def __init__(self, source: Source) -> None:
        self.source = copy.copy(source)
        self.source.shard = False  # the inner fit divides the rows itself

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((batch.inputs, batch.targets) for batch in self.source.replay())


def _warn_of_dead(dead: Tensor, budget: SelectionBudget) -> None:
    if bool(dead.any()) and len(budget.group) > budget.count:
        warnings.warn(
            f"{int(dead.sum()):,} of the {len(dead):,} chosen weights cannot change an output (dead units, or constant "
            "inputs): their uncertainty has no effect on predictions.",
            SelectionWarning, stacklevel=5,
        )  # fmt: skip


def _gumbel(size: int, generator: torch.Generator) -> Tensor:
    """Return standard Gumbel noise; the largest sums of log-scores and noise are a sample without replacement."""
    uniform = torch.rand(size, generator=generator, dtype=torch.float64, device=generator.device).cpu()
    return -(-uniform.clamp_min(1e-300).log()).log()


class JacobianRows:
    """Rows of a Jacobian over the candidates, of whose Gram matrix single columns can be computed.

    Args:
        make: Yields the rows in parts ``[m, n]``.
        size: The number of candidates n.
        shared: Whether each process has only its own rows.
        scale: The factor of the Gram matrix.
    """

    def __init__(
        self, make: Callable[[], Iterator[Tensor]], size: int, *, shared: bool = False, scale: float = 1.0
    ) -> None:
        self.make, self.size, self.shared, self.scale = make, size, shared, scale
        self.kept: list[Tensor] | None = None

    def gram_columns(self, wanted: Tensor) -> Tensor:
        """Return the columns `wanted` of ``scale · JᵀJ``, ``[n, w]``."""
        total = torch.zeros(self.size, len(wanted), dtype=torch.float64)
        for rows in self._parts():
            total += (rows.mT @ rows[:, wanted]).cpu()
        distributed.sum_([total] if self.shared else [])
        return total * self.scale

    def _parts(self) -> Iterator[Tensor]:
        if self.kept is not None:
            yield from self.kept
            return
        kept: list[Tensor] | None = []
        most = numbers(limits.current().kept_rows)
        for rows in self.make():
            if kept is not None:
                kept.append(rows)
                kept = kept if sum(part.numel() for part in kept) <= most else None
            yield rows
        self.kept = kept


class _Columns:
    """The columns of several Gram matrices, computed in blocks of the most promising weights."""

    def __init__(self, *streams: JacobianRows) -> None:
        self.streams = streams
        self.known: dict[int, tuple[Tensor, ...]] = {}

    def take(self, index: int, gains: Tensor) -> tuple[Tensor, ...]:
        """Return one column of each matrix, and forget it."""
        if index not in self.known:
            fresh = gains.clone()
            fresh[list(self.known)] = -math.inf
            count = min(BLOCK, int(fresh.isfinite().sum()))
            wanted = torch.topk(fresh, count).indices
            blocks = [stream.gram_columns(wanted) for stream in self.streams]
            for column, weight in enumerate(wanted.tolist()):
                self.known[weight] = tuple(block[:, column] for block in blocks)
        return self.known.pop(index)


def greedy(
    curvature: JacobianRows,
    jacobian: JacobianRows,
    diagonal: Tensor,
    squares: Tensor,
    prior: float,
    budget: SelectionBudget,
) -> Tensor:
    """Return the chosen candidates in the order in which they were chosen.

    Args:
        curvature: Rows whose Gram matrix is the curvature H.
        jacobian: Rows of the Jacobian J whose variance is to be captured.
        diagonal: The diagonal of H, ``[n]``.
        squares: The diagonal of ``JᵀJ``, ``[n]``.
        prior: The prior precision λ.
        budget: How many to choose, in all and of each group.
    """
    columns = _Columns(curvature, jacobian)
    size, count = len(diagonal), budget.count
    factor, along = torch.zeros(count, size).double(), torch.zeros(count, size).double()  # L and UᵀJ, a row per step
    inner = torch.zeros(count, count).double()  # UᵀU
    left, residual, rest = diagonal.double() + prior, squares.double().clone(), list(budget.limits)
    open_ = torch.ones(size, dtype=torch.bool)
    for index, limit in enumerate(rest):
        open_ &= (budget.group != index) | (limit > 0)
    order = []
    for step in range(count):
        gains = torch.where(open_, residual / left, -math.inf)
        best = int(gains.argmax())
        column, cross = columns.take(best, gains)
        column = column.index_add(0, torch.tensor([best]), column.new_tensor([prior]))
        root, own = left[best].sqrt(), factor[:step, best]
        new = (column - own @ factor[:step]) / root
        derivative = (cross - own @ along[:step]) / root  # Jᵀu for the new unit direction u
        overlap = (along[:step, best] - inner[:step, :step] @ own) / root
        norm = residual[best] / left[best]
        residual = residual - 2 * new * (derivative - overlap @ factor[:step]) + new.square() * norm
        residual, left = residual.clamp_min(0.0), (left - new.square()).clamp_min(prior)
        factor[step], along[step] = new, derivative
        inner[step, :step] = inner[:step, step] = overlap
        inner[step, step] = norm
        order.append(best)
        open_[best] = False
        group = int(budget.group[best])
        if group >= 0:
            rest[group] -= 1
            if rest[group] == 0:
                open_ &= budget.group != group
    return torch.tensor(order)
