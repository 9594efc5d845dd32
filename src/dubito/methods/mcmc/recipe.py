"""What the recipes of samplers have in common."""

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
    """A recipe whose posterior is a set of particles. It has `weights`, `prior` and `temperature` among its fields."""

    is_chain: ClassVar[bool] = True
    """Whether samples follow each other, so that R-hat and effective sizes mean something."""

    @abstractmethod
    def build_after(self, problem: Problem, before: ParticlePosterior | None) -> Inference:
        """Return the steps; after an earlier posterior its particles are prior and start."""

    @property
    @abstractmethod
    def explores_modes(self) -> bool:
        """Whether samples come from several modes."""

    @property
    def needs_trained_model(self) -> bool:
        """Whether it starts where training ended."""
        return not self.starts_fresh

    def build(self, problem: Problem) -> Inference:
        """Return the steps."""
        return self.build_after(problem, None)


def check_sampler(recipe: Any) -> None:
    """Raise where the prior of a sampler does not fit."""
    check_prior(recipe.prior, recipe.setting_name)
    if recipe.starts_fresh and isinstance(getattr(recipe.prior, "loc", None), str):
        raise InputError("A prior around the model's weights needs start='model': fresh weights are no knowledge.")
