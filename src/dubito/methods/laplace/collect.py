"""The steps of `Laplace`: sum the curvature and the log-likelihood over the data, batch by batch."""

from __future__ import annotations

import torch

from dubito.beliefs.likelihoods import Gaussian
from dubito.core import distributed, io
from dubito.core.batches import Batch
from dubito.core.errors import InputError
from dubito.core.params import Buffers, Params
from dubito.curvature.curvature_pass import CurvaturePass
from dubito.curvature.kronecker import reduce_factors
from dubito.curvature.sampled import SampledAccumulator
from dubito.curvature.structures import Sums
from dubito.fitting.inference import Info, Problem, State
from dubito.methods.laplace.findings import Tuning
from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.methods.laplace.recipe import Laplace
from dubito.methods.laplace.tuning import check_prior, tune
from dubito.networks.selection import Selection
from dubito.networks.twin import light_copy


class Collector:
    """The steps of `Laplace` as an `Inference`: sums over batches."""

    def __init__(self, recipe: Laplace, problem: Problem, selection: Selection) -> None:
        check_prior(recipe, selection)
        self.recipe, self.problem, self.selection = recipe, problem, selection
        self.curvature = CurvaturePass(
            recipe.structure, problem.model, selection, problem.likelihood,
            curvature=recipe.curvature, num_samples=recipe.fisher_samples,
            mode=recipe.kron_mode, rank=recipe.rank, draws=recipe.draws, steps=recipe.steps,
            tunes=isinstance(recipe.prior_precision, str) or isinstance(problem.likelihood, Gaussian),
            generator=problem.generator,
        )  # fmt: skip
        self.accumulator = self.curvature.accumulator

    def init(self, initial: Params, buffers: Buffers, generator: torch.Generator) -> State:
        """Return the state before the first batch."""
        sums = self.curvature.zeros(self.problem.source)
        state = {"sums": sums, "fit": self.curvature.no_fit(), "seen": 0, "turn": 0}
        return state if self.curvature.is_wide else {**state, "carries": []}

    def update(self, state: State, batch: Batch, generator: torch.Generator) -> tuple[State, Info]:
        """Add one batch; after the last batch of a pass, prepare the next pass."""
        local, sums = distributed.local_generator(generator), state["sums"]
        self.curvature.carries = state.get("carries", [])
        if self.accumulator.additive or not distributed.is_active():
            fit = self.curvature.add(sums, batch, local)
        else:
            fit = self._add_together(sums, batch, local)
        if state["turn"] <= self.accumulator.fit_pass:
            state["fit"] += fit
        state["seen"] += batch.size
        if state["seen"] >= self.problem.num_data and state["turn"] + 1 < self.accumulator.passes:
            self._check_count(state["seen"])
            self.end_pass(state)
            state["seen"], state["turn"] = 0, state["turn"] + 1
        if not self.curvature.is_wide:
            state["carries"] = self.curvature.carries
        shown = "squared_error" if isinstance(self.problem.likelihood, Gaussian) else "log_likelihood"
        return state, {shown: state["fit"][0] / state["fit"][1].clamp_min(1.0)}

    def _add_together(self, sums: Sums, batch: Batch, generator: torch.Generator) -> torch.Tensor:
        """Add the rows of all processes, so that the state stays the same in all of them; return the fit."""
        before = [part.clone() for part in self.accumulator.partial(sums)]
        for part in self.accumulator.partial(sums):
            part.zero_()
        fit = self.curvature.add(sums, batch, generator)
        parts = self.accumulator.partial(sums)
        distributed.sum_([*parts, fit])
        for part, old in zip(parts, before, strict=True):
            part += old
        return fit

    def end_pass(self, state: State) -> None:
        """Prepare the next pass over the data."""
        self.curvature.next_pass(state["sums"])
        if state["turn"] < self.accumulator.fit_pass:
            state["fit"].zero_()

    def restore(self, own: State, saved: State) -> State:
        """Return the state of a checkpoint; in later passes some structures have other sums than at first."""
        if saved["turn"]:
            own["sums"] = self.accumulator.later_form(own["sums"], saved["sums"])
        return io.copy_into(own, saved)

    def _check_count(self, seen: int) -> None:
        """Raise an error if the end of a pass over the data is unknown."""
        if self.accumulator.passes > 1 and seen != self.problem.num_data:
            raise InputError(
                f"num_data is {self.problem.num_data:,}, but the data has another number of examples; "
                f"structure='{self.recipe.structure}' makes several passes and needs the exact number."
            )

    def posterior(self, state: State) -> LaplacePosterior:
        """Return the posterior with its prior precision and noise."""
        self._check_count(state["seen"] if state["turn"] + 1 == self.accumulator.passes else 0)
        distributed.sum_([*io.tensors(state["sums"]), state["fit"]] if self.accumulator.additive else [])
        sums = state["sums"]
        if self.recipe.structure == "kron":
            sums = reduce_factors(sums, self.recipe.factor_rank, self.problem.model)
        return tune(self.untuned(state, self.recipe, sums).owning(), self.recipe, self.problem)

    def untuned(self, state: State, recipe: Laplace, sums: Sums) -> LaplacePosterior:
        """Return the posterior of accumulated sums at unit prior precision."""
        found = LaplacePosterior(
            light_copy(self.problem.model), self.problem.likelihood, recipe, self.problem.num_data,
            self.selection, sums, self.curvature.data_fit(state["fit"]),
        )  # fmt: skip
        found.trial = self.curvature.engine.trial
        return found


class SampledCollector(Collector):
    """The steps of ``structure="sampled"``: Kronecker factors choose prior and noise, then samples are solved for.

    The samples belong to one prior precision, so it is chosen after the first pass and not at the end.
    """

    accumulator: SampledAccumulator

    def end_pass(self, state: State) -> None:
        """Tune the Kronecker posterior after the first pass; solve on after the others."""
        if state["turn"]:
            self.curvature.next_pass(state["sums"])
            return
        self.accumulator.complete_factors(state["sums"])
        recipe = self.recipe.replace(structure="kron")
        found = tune(self.untuned(state, recipe, state["sums"]["factors"]), recipe, self.problem)
        state["tuned"] = {
            "prior_precision": found.prior_precision, "noise": float(found.noise),
            "tuning": found.tuning._asdict(), "gain": found.remaining_gain,
        }  # fmt: skip
        self.accumulator.begin(state["sums"], found.prior_precision, found.scale)

    def restore(self, own: State, saved: State) -> State:
        """Return the state of a checkpoint, with what the first pass has found."""
        return super().restore({**own, "tuned": saved["tuned"]} if saved["turn"] else own, saved)

    def posterior(self, state: State) -> LaplacePosterior:
        """Return the posterior with its samples."""
        self._check_count(state["seen"] if state["turn"] + 1 == self.accumulator.passes else 0)
        self.accumulator.next_pass(state["sums"])
        self.accumulator.finish(state["sums"])
        tuned, likelihood = state["tuned"], self.problem.likelihood
        if isinstance(likelihood, Gaussian):
            likelihood = likelihood.replace(noise=tuned["noise"])
        raw = self.untuned(state, self.recipe, state["sums"])
        found = raw.with_settings(tuned["prior_precision"], likelihood, Tuning(**tuned["tuning"]))
        found.remaining_gain = tuned["gain"]
        return found
