"""The base class of the samplers' recipes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.prior_energy import check_prior


@setting
class Sampler(Recipe):
    """A recipe whose posterior is a set of particles. Subclasses have fields `weights`, `prior` and `temperature`."""

    is_chain: ClassVar[bool] = True
    """Whether samples form a Markov chain, so that R-hat and effective sample sizes are defined."""

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
        """Return the steps of the sampler."""
        return self.build_after(problem, None)


def check_sampler(recipe: Any) -> None:
    """Raise an error if the sampler cannot use its prior."""
    check_prior(recipe.prior, recipe.setting_name)
    if recipe.redraws and isinstance(getattr(recipe.prior, "loc", None), str):
        raise InputError(f"start='{recipe.start}' discards weights this prior is centred on: use start='model'.")
