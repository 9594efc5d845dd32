"""What the recipes of samplers have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from dubito.core.errors import InputError
from dubito.core.settings import is_number, is_whole, setting
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.recipe import Recipe
from dubito.methods.mcmc.posterior import ParticlePosterior
from dubito.methods.mcmc.prior_energy import check_prior
from dubito.select.rule import SelectionRule


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


def check_fields(recipe: Any, choices: Mapping[str, tuple[str, ...]], at_least_one: tuple[str, ...]) -> None:
    """Check what the recipes of samplers have in common."""
    owner = recipe.setting_name
    check_prior(recipe.prior, owner)
    if not isinstance(recipe.weights, SelectionRule):
        raise InputError(f"{owner}(weights={recipe.weights!r}) must be one of dubito.select.")
    for name, allowed in choices.items():
        if getattr(recipe, name) not in allowed:
            raise InputError(f"{owner}({name}={getattr(recipe, name)!r}) is not one of {', '.join(allowed)}.")
    for name in at_least_one:
        if not is_whole(getattr(recipe, name), 1):
            raise InputError(f"{owner}({name}={getattr(recipe, name)!r}) must be a whole number, 1 or more.")
    for name in ("temperature", "memory"):
        if not is_positive(getattr(recipe, name, 1.0)):
            raise InputError(f"{owner}({name}={getattr(recipe, name)!r}) must be a positive number.")
    if recipe.starts_fresh and isinstance(getattr(recipe.prior, "loc", None), str):
        raise InputError("A prior around the model's weights needs start='model': fresh weights are no knowledge.")


def is_positive(value: Any) -> bool:
    """Whether a setting is a positive finite number."""
    return is_number(value) and 0 < value < math.inf
