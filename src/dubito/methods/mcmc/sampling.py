"""What `SGMCMC`, `HMC` and `SVGD` share: the target density, the initial positions and the final posterior."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.prediction import RegressionPrediction
from dubito.core import batches, params
from dubito.core.errors import InputError
from dubito.core.params import Params
from dubito.fitting.inference import Problem
from dubito.fitting.initialization import redraw
from dubito.fitting.output_noise import fit_hyper
from dubito.fitting.posterior import Posterior
from dubito.methods.mcmc.cached_head import RandomHead, split
from dubito.methods.mcmc.posterior import ParticlePosterior, function_values, mean_and_variance
from dubito.methods.mcmc.prior_energy import PriorDensity, from_particles, make_prior_density
from dubito.methods.mcmc.target import Target, start_of
from dubito.networks.twin import light_copy

# The largest number of traced outputs, and of the training inputs that they belong to.
TRACED = 64
PROBES = 16


class Setup:
    """A problem prepared for sampling.

    Args:
        recipe: The recipe, with `weights`, `prior` and `temperature`.
        before: In an update, the posterior whose particles are the prior and the start.
    """

    def __init__(self, recipe: Any, problem: Problem, before: ParticlePosterior | None = None) -> None:
        self.recipe, self.problem, self.before = recipe, problem, before
        self.selection = before.selection if before else problem.selection
        self.hyper = fit_hyper(problem.model, problem)
        self.start = start_of(problem, self.selection, self.hyper)
        self.density = self._density(len(self.hyper))
        self.model = light_copy(problem.model)  # positions are loaded into this copy
        self.probes = self._probe_inputs()
        self.head: RandomHead | None = split(self.model.eval(), self.selection.names, self.probes)

    def _density(self, num_hyper: int) -> PriorDensity:
        if self.before is not None:
            return from_particles(self.before.flat.to(self.start), self.recipe.temperature)
        weights = params.of(self.problem.model)
        prior = self.recipe.prior or self.recipe.default_prior(self.selection.ravel(weights))
        return make_prior_density(prior, self.selection, weights, num_hyper)

    def _probe_inputs(self) -> Any:
        return batches.take(self.problem.source.first().inputs, slice(0, PROBES))

    def target(self, head: RandomHead | None = None) -> Target:
        """Return the potential; with a head, its inputs are features."""
        return Target(self.model, self.problem.likelihood, self.selection, self.density, head)

    def starts(self, num: int) -> Tensor:
        """Return initial positions ``[K, D]``: the network, new ones, samples of a posterior, or the last samples."""
        if self.before is not None:
            last = self.before.samples[:, -1].to(self.start)
            return last[torch.arange(num) % len(last)].clone()
        if isinstance(self.recipe.start, Posterior):
            drawn = params.unstack(self.recipe.start.sample(num))
            flat = torch.stack([self.selection.ravel(each) for each in drawn]).to(self.start)
            self._check_starts(drawn, self.recipe.start)
            return torch.cat([flat, self.start[self.selection.num_weights :].expand(num, -1)], dim=1)
        others = [self._redrawn() if self.recipe.redraws else self.start for _ in range(num - 1)]
        return torch.stack([self.start, *others])

    def _check_starts(self, drawn: list[Params], start: Posterior) -> None:
        """Warn if members of an ensemble start no chain; raise if they differ in weights that are not random."""
        if len(start.members) > len(drawn):
            warnings.warn(
                f"{len(drawn)} chains start at {len(drawn)} of the {len(start.members)} members: give "
                f"chains={len(start.members)} to start one at each.",
                stacklevel=2,
            )
        for each in drawn[1:]:
            joined = self.selection.merge(drawn[0], self.selection.ravel(each))
            if any(not torch.equal(joined[name], value) for name, value in each.items()):
                raise InputError(
                    "The chains start at networks that differ in weights that are not random: make all weights random, "
                    "or start at one network."
                )

    def _redrawn(self) -> Tensor:
        other = light_copy(self.problem.model)
        redraw(other, self.recipe.start, lambda: self.problem.source.first().inputs)
        flat = self.selection.ravel(params.of(other)).to(self.start)
        return torch.cat([flat, self.start[self.selection.num_weights :]])

    def posterior(
        self, samples: Tensor, statistics: dict[str, Tensor], settings: dict[str, Tensor], buffers: Params | None = None
    ) -> ParticlePosterior:
        """Return the posterior of samples ``[K, S, D + H]``."""
        problem, recipe, size = self.problem, self.recipe, self.selection.num_weights
        flat = samples.flatten(0, 1)
        center = flat[-1] if recipe.explores_modes else mean_and_variance(flat)[0].to(flat)
        model = params.load_(light_copy(problem.model), self.selection.merge(params.of(problem.model), center[:size]))
        if buffers:
            params.load_(model, {}, {name: value[-1, -1] for name, value in buffers.items()})
        likelihood = problem.likelihood.resolved({name: center[size].double() for name in self.hyper})
        moments = self.density.moments()
        cut = None if moments is None else (moments[0][:size].clone(), moments[1][:size].clone())
        seen = problem.num_data + (self.before.num_data if self.before else 0)
        found = ParticlePosterior(
            model, likelihood, recipe, seen, self.selection, samples, cut, statistics,
            samples.new_zeros(*samples.shape[:2], 0), buffers, settings,
        )  # fmt: skip
        found.trace = self._trace(found)
        return found

    @torch.no_grad()
    def is_finite(self, outputs: Tensor, flat: Tensor) -> bool:
        """Return whether the prediction from the outputs at a position is finite.

        Checking the weights is not enough: a log-variance of 100 is finite, and so is its loss, but the variance is
        infinite in single precision.
        """
        hyper = dict.fromkeys(self.hyper, flat[-1:])
        prediction = self.problem.likelihood.predict_samples(outputs.unsqueeze(0), hyper)
        values = [function_values(self.problem.likelihood, outputs)]
        if isinstance(prediction, RegressionPrediction):
            values.append(prediction.stddev.log())  # a standard deviation of 0 fails, too
        return all(bool(value.isfinite().all()) for value in values)

    @torch.no_grad()
    def _trace(self, found: ParticlePosterior) -> Tensor:
        """Return the outputs at a few training inputs for every sample, ``[K, S, P]``."""
        model, rows = found.model, []
        likelihood = self.problem.likelihood
        for index in range(found.num_particles):
            outputs = params.functional_call(model, found.member(index), self.probes)
            rows.append(function_values(likelihood, outputs)[:TRACED])
        return torch.stack(rows).reshape(*found.samples.shape[:2], -1)
