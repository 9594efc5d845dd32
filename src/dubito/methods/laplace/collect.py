"""Sum the curvature and the log-likelihood over the data, batch by batch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Gaussian, Likelihood
from dubito.core import batches, distributed, io
from dubito.core.batches import Batch
from dubito.core.errors import InputError, NonFiniteError
from dubito.core.params import Buffers, Params
from dubito.curvature import output_columns
from dubito.curvature.engine import Engine
from dubito.curvature.linearized import MOST_COLUMNS
from dubito.curvature.output_layer import few_columns, is_one_linear
from dubito.curvature.structures import KroneckerAccumulator, LowRankAccumulator, Sums, make_accumulator
from dubito.fitting.inference import Info, Problem, State
from dubito.methods.laplace.evidence import DataFit
from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.methods.laplace.tuning import check_prior, tune
from dubito.networks.selection import Selection

if TYPE_CHECKING:
    from dubito.methods.laplace.recipe import Laplace


class Collector:
    """The steps of `Laplace` as an `Inference`: sums over batches.

    Args:
        recipe: The recipe.
        problem: Model, data and likelihood.
        selection: Which weights are random.
    """

    def __init__(self, recipe: Laplace, problem: Problem, selection: Selection) -> None:
        check_prior(recipe, selection)
        self.recipe, self.problem, self.selection = recipe, problem, selection
        self.likelihood = unit_noise(problem.likelihood)
        self.engine = Engine(problem.model, selection.names)
        self.accumulator = make_accumulator(
            recipe.structure, self.engine, selection,
            mode=recipe.kron_mode, rank=recipe.rank, generator=problem.generator,
            hessian_of=self.likelihood if recipe.curvature == "hessian" else None,
        )  # fmt: skip
        # a low-rank pass uses the same directions in every process, so its products are summed batch by batch
        self.additive = not isinstance(self.accumulator, LowRankAccumulator)

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        """Nothing seen yet."""
        sums = self.accumulator.zeros()
        if isinstance(self.accumulator, KroneckerAccumulator):  # one example shows which factors exist
            first = self.problem.source.first()
            one = Batch(batches.take(first.inputs, slice(0, 1)), first.targets[:1], 1)
            self._add(sums, torch.zeros(2, dtype=torch.float64), one, torch.Generator().manual_seed(0))
            for tensor in io.tensors(sums):
                tensor.zero_()
        return {"sums": sums, "fit": torch.zeros(2, dtype=torch.float64), "seen": 0, "turn": 0}

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Add one batch; after the last batch of a pass, prepare the next pass."""
        local = distributed.local_generator(generator)
        sums, fit = state["sums"], torch.zeros(2, dtype=torch.float64)
        if self.additive or not distributed.is_active():
            self._add(sums, fit, batch, local)
        else:
            own = {"basis": sums["basis"], "product": torch.zeros_like(sums["product"])}
            self._add(own, fit, batch, local)
            distributed.sum_([own["product"], fit])
            sums["product"] += own["product"]
        if state["turn"] == 0:
            state["fit"] += fit
        state["seen"] += batch.size
        if state["seen"] >= self.problem.num_data and state["turn"] + 1 < self.accumulator.passes:
            self._check_count(state["seen"])
            self.accumulator.next_pass(sums)
            state["seen"], state["turn"] = 0, state["turn"] + 1
        shown = "squared_error" if isinstance(self.likelihood, Gaussian) else "log_likelihood"
        return state, {shown: state["fit"][0] / state["fit"][1].clamp_min(1.0)}

    def _add(self, sums: Sums, fit: Tensor, batch: Batch, generator: torch.Generator) -> None:
        recipe, likelihood = self.recipe, self.likelihood
        if not batch.num_rows:
            return
        few = self._needs_few_columns(batch)
        for rows, tape in self.engine.chunks(batch.inputs, 1 if few else self._num_columns, self.accumulator.extra):
            targets, outputs = batch.targets[rows], tape.outputs.detach()
            fit += self._explained(outputs, targets)
            columns = output_columns.columns(
                recipe.curvature, likelihood, outputs, targets,
                num_samples=recipe.fisher_samples, most=MOST_COLUMNS, generator=generator,
            )  # fmt: skip
            merged = [few_columns(recipe.structure, likelihood, outputs, targets)] if few else columns
            self.accumulator.add(sums, tape, merged, targets)

    def _needs_few_columns(self, batch: Batch) -> bool:
        """Return whether only a last layer with many outputs is random, whose curvature needs few columns."""
        few_outputs = 0 < self.engine.num_outputs <= MOST_COLUMNS
        if few_outputs or self.recipe.curvature != "ggn" or self.recipe.structure not in ("diag", "kron"):
            return False
        first = self.engine.run(batches.take(batch.inputs, slice(0, 2)))
        return first.outputs[0].numel() > MOST_COLUMNS and is_one_linear(first)

    def _explained(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-likelihood and the number of examples; for a Gaussian the squared error and the residuals."""
        if isinstance(self.likelihood, Gaussian):
            residuals = self.likelihood.gradient(outputs, targets)  # the noise is 1 here
            total, count = residuals.double().square().sum(), residuals.numel()
        else:
            total, count = self.likelihood.log_prob(outputs, targets).double().sum(), len(outputs)
        if not torch.isfinite(total):
            raise NonFiniteError(
                "The likelihood of some of the data is NaN or 0: check for extreme inputs, and for outputs that "
                "are not finite."
            )
        return torch.tensor([float(total), float(count)], dtype=torch.float64)

    def _check_count(self, seen: int) -> None:
        """Raise an error if the end of a pass over the data is unknown."""
        if self.accumulator.passes > 1 and seen != self.problem.num_data:
            raise InputError(
                f"num_data is {self.problem.num_data:,}, but the data has another number of examples; "
                f"structure='{self.recipe.structure}' makes several passes and needs the exact number."
            )

    @property
    def _num_columns(self) -> int:
        """Return the number of columns in one vector-Jacobian product."""
        sampled = {"fisher-mc": self.recipe.fisher_samples, "fisher-empirical": 1}
        return min(sampled.get(self.recipe.curvature, MOST_COLUMNS), MOST_COLUMNS)

    def posterior(self, state: State) -> LaplacePosterior:
        """Return the posterior with its prior precision and noise."""
        problem = self.problem
        self._check_count(state["seen"] if state["turn"] + 1 == self.accumulator.passes else 0)
        distributed.sum_(list(io.tensors(state)) if self.additive else [])
        total, count = state["fit"].tolist()
        gaussian = isinstance(problem.likelihood, Gaussian)
        fit = DataFit(squared_error=total, num_residuals=int(count)) if gaussian else DataFit(log_likelihood=total)
        raw = LaplacePosterior(
            copy.deepcopy(problem.model), problem.likelihood, self.recipe, problem.num_data,
            self.selection, state["sums"], fit,
        )  # fmt: skip
        return tune(raw.owning(), self.recipe, problem.validation)


def unit_noise(likelihood: Likelihood) -> Likelihood:
    """Return a Gaussian likelihood with noise 1, as the noise only scales the curvature; others unchanged."""
    return Gaussian(noise=1.0) if isinstance(likelihood, Gaussian) else likelihood
