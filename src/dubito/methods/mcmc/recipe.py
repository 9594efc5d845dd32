"""The base class of the samplers' recipes, and the recipe of an update."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.priors import Normal, Prior
from dubito.core import params
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.settings import Absent, setting
from dubito.curvature.leave_one_out import predictive_noise
from dubito.curvature.optimality import steepest_gain
from dubito.fitting.automatic import has_learned_noise
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.output_noise import share_noise, with_known_numbers
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.prior_energy import check_prior
from dubito.networks.normalization import running_norms
from dubito.networks.subspace import whole_network

# The standard deviation of the default prior around a network, over the root mean square of its weights.
DEFAULT_SPREAD = 0.25


@setting
class Sampler(Recipe):
    """A recipe whose posterior is a set of particles. Subclasses have fields `weights`, `prior` and `temperature`."""

    trains = False  # samples are drawn, for a number of steps that the recipe has

    is_chain: ClassVar[bool] = True
    """Whether samples form a Markov chain, so that R-hat and effective sample sizes are defined."""

    def __post_init__(self) -> None:
        prior = self.fields()["prior"]
        if prior is not None:
            check_prior(prior, self.setting_name)
        if self.redraws and isinstance(getattr(prior, "loc", None), str):
            raise InputError(f"start='{self.start}' discards weights this prior is centred on: use start='model'.")

    @abstractmethod
    def build_after(self, problem: Problem, before: ParticlePosterior | None) -> Inference:
        """Return the steps; in an update, the particles of `before` are the prior and the start."""

    @property
    @abstractmethod
    def explores_modes(self) -> bool:
        """Whether samples come from several modes of the posterior."""

    @property
    def needs_trained_model(self) -> bool:
        """Whether the model must be trained already."""
        return not self.redraws

    def build(self, problem: Problem) -> Inference:
        """Return the steps of the sampler.

        From a trained network on, the learned noise of a regression is measured before: sampled with the weights, it
        would be that of the training data, to which the network was fitted.
        """
        if self.starts_fresh:
            return self.build_after(problem, None)
        if not isinstance(self.start, str):
            _load_start(self.start, problem.model)
        start, noise = problem.model, None
        if has_learned_noise(problem.likelihood):
            noise = predictive_noise(whole_network(problem.model), problem.source, problem.validation)
            known: Likelihood = problem.likelihood.replace(noise=noise)
            problem = dataclasses.replace(problem, likelihood=known)
        inference = self.build_after(problem, None)

        def posterior(state: State) -> Posterior:
            found = inference.posterior(state)
            found = found if noise is None else share_noise(found, noise, problem.source)
            found.remaining_gain = steepest_gain(start, with_known_numbers(problem), problem.source, problem.selection)
            return found

        return inference._replace(posterior=posterior)

    def default_prior(self, weights: Tensor) -> Prior:
        """Return the prior if none is given; see `prior` in the recipes."""
        if self.starts_fresh or not isinstance(self.start, str):
            return Normal()
        size = float(weights.double().square().mean().sqrt())
        if size == 0:  # new adapters, or the coordinates of a subspace: this says nothing of their scale
            return Normal()
        return Normal("model", max(DEFAULT_SPREAD * size, 1e-6))


def _load_start(start: Any, network: nn.Module) -> None:
    """Load the network of a posterior at which chains start; raise an error if it does not fit."""
    if isinstance(start, Absent):
        raise InputError("The posterior that this recipe started from was not saved with it: give it again as `start`.")
    if running_norms(network):
        raise UnsupportedError(
            "Chains cannot start from a posterior of a network with BatchNorm, whose statistics differ by member: use "
            "start='model'."
        )
    params.load_(network, params.of(start.model))


@setting
class UpdateParticles(Recipe):
    r"""Sample with new data: the moments of the particles so far are the prior, and chains continue where they ended.

    $$p(w \mid D_1, D_2) \propto p(D_2 \mid w)\, p(w \mid D_1)
      \approx p(D_2 \mid w)\, \mathcal N(w; \bar w, \Sigma)$$

    with the mean and covariance of the particles; with fewer than ten particles per random weight only the diagonal of
    the covariance is used. At temperature T the old particles are samples of $p^{1/T}$, and so are the new ones: the
    normal density is not tempered again, and $p(D_2 \mid w)$ is raised to the power $1/T$.

    Args:
        posterior: The posterior so far.
    """

    setting_name = "mcmc.Continue"
    posterior: Any

    def default_training(self) -> Training:
        """Return those of the recipe that found the particles."""
        return self.posterior.recipe.default_training()

    def build(self, problem: Problem) -> Inference:
        """Return the steps of the recipe that found the particles."""
        return self.posterior.recipe.build_after(problem, self.posterior)
