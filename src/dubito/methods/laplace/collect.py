"""The steps of `Laplace`: sum the curvature and the log-likelihood over the data, batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dubito.beliefs.likelihoods import Gaussian
from dubito.core import distributed, io
from dubito.core.batches import Batch
from dubito.core.errors import InputError
from dubito.core.params import Buffers, Params
from dubito.curvature.curvature_pass import CurvaturePass
from dubito.curvature.structures import LowRankAccumulator
from dubito.fitting.inference import Info, Problem, State
from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.methods.laplace.tuning import check_prior, tune
from dubito.networks.selection import Selection
from dubito.networks.twin import light_copy

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
        self.curvature = CurvaturePass(
            recipe.structure, problem.model, selection, problem.likelihood,
            curvature=recipe.curvature, num_samples=recipe.fisher_samples,
            mode=recipe.kron_mode, rank=recipe.rank, generator=problem.generator,
        )  # fmt: skip
        self.accumulator = self.curvature.accumulator
        # a low-rank pass uses the same directions in every process, so its products are summed batch by batch
        self.additive = not isinstance(self.accumulator, LowRankAccumulator)

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        """Nothing seen yet."""
        sums = self.curvature.zeros(self.problem.source)
        return {"sums": sums, "fit": self.curvature.no_fit(), "seen": 0, "turn": 0}

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Add one batch; after the last batch of a pass, prepare the next pass."""
        local, sums = distributed.local_generator(generator), state["sums"]
        if self.additive or not distributed.is_active():
            fit = self.curvature.add(sums, batch, local)
        else:
            own = {"basis": sums["basis"], "product": torch.zeros_like(sums["product"])}
            fit = self.curvature.add(own, batch, local)
            distributed.sum_([own["product"], fit])
            sums["product"] += own["product"]
        if state["turn"] == 0:
            state["fit"] += fit
        state["seen"] += batch.size
        if state["seen"] >= self.problem.num_data and state["turn"] + 1 < self.accumulator.passes:
            self._check_count(state["seen"])
            self.accumulator.next_pass(sums)
            state["seen"], state["turn"] = 0, state["turn"] + 1
        shown = "squared_error" if isinstance(self.problem.likelihood, Gaussian) else "log_likelihood"
        return state, {shown: state["fit"][0] / state["fit"][1].clamp_min(1.0)}

    def _check_count(self, seen: int) -> None:
        """Raise an error if the end of a pass over the data is unknown."""
        if self.accumulator.passes > 1 and seen != self.problem.num_data:
            raise InputError(
                f"num_data is {self.problem.num_data:,}, but the data has another number of examples; "
                f"structure='{self.recipe.structure}' makes several passes and needs the exact number."
            )

    def posterior(self, state: State) -> LaplacePosterior:
        """Return the posterior with its prior precision and noise."""
        problem = self.problem
        self._check_count(state["seen"] if state["turn"] + 1 == self.accumulator.passes else 0)
        distributed.sum_(list(io.tensors(state)) if self.additive else [])
        raw = LaplacePosterior(
            light_copy(problem.model), problem.likelihood, self.recipe, problem.num_data,
            self.selection, state["sums"], self.curvature.data_fit(state["fit"]),
        )  # fmt: skip
        return tune(raw.owning(), self.recipe, problem)
