"""Fit recipes under equal conditions: per seed the same initial weights, the same randomness, one trained network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core.batches import Data
from dubito.core.errors import InputError
from dubito.core.randomness import Stream
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.map.recipe import MAP

Model = nn.Module | Callable[[int], nn.Module]
TrainingChoice = Training | Mapping[str, Any] | Callable[[Recipe], Training] | None


@dataclass(frozen=True, eq=False)
class Fits:
    """What all fits of a comparison share; see `dubito.compare` for the arguments."""

    model: Model
    data: Data
    likelihood: str | Likelihood = "categorical"
    validation: Data | None = None
    training: TrainingChoice = None
    base: Recipe = field(default_factory=MAP)
    progress: bool = True

    def of_seed(self, seed: int) -> FitsOfSeed:
        """Return the fits of one seed, on one initial network."""
        if isinstance(self.model, nn.Module):
            return FitsOfSeed(self, self.model, seed)
        with Stream(seed, libraries=True).active():
            model = self.model(seed)
        if not isinstance(model, nn.Module):
            raise InputError(f"The function `model` must return a network for a seed, but it returned {model!r}.")
        return FitsOfSeed(self, model, seed)

    def training_of(self, recipe: Recipe) -> Training | None:
        """Return the training settings of a recipe; None leaves them to the recipe."""
        if isinstance(self.training, Mapping):
            return recipe.default_training().replace(**self.training)
        return self.training(recipe) if callable(self.training) else self.training


class FitsOfSeed:
    """The fits of one seed. Recipes that need a trained network share one, trained by `base` on first use.

    Args:
        fits: What all fits share.
        model: The initial network.
        seed: The seed.
    """

    def __init__(self, fits: Fits, model: nn.Module, seed: int) -> None:
        self.fits, self.model, self.seed = fits, model, seed
        self._trained: tuple[Posterior, float] | None = None

    def fit(self, recipe: Recipe) -> tuple[Posterior, float]:
        """Return the posterior and the seconds of its fit, without those of the network that is shared."""
        if recipe == self.fits.base:
            return self._base()
        return self._fit(recipe, self._base()[0].model if recipe.needs_trained_model else self.model)

    def _base(self) -> tuple[Posterior, float]:
        if self._trained is None:
            self._trained = self._fit(self.fits.base, self.model)
        return self._trained

    def _fit(self, recipe: Recipe, model: nn.Module) -> tuple[Posterior, float]:
        start = time.perf_counter()
        posterior = recipe.fit(
            model,
            self.fits.data,
            likelihood=self.fits.likelihood,
            validation=self.fits.validation,
            training=self.fits.training_of(recipe),
            generator=torch.Generator().manual_seed(self.seed),
            progress=self.fits.progress,
        )
        return posterior, time.perf_counter() - start


def base_of(recipes: Mapping[str, Recipe]) -> Recipe:
    """Return the recipe that trains the shared network: the first MAP that trains, or `MAP()`."""
    return next((recipe for recipe in recipes.values() if isinstance(recipe, MAP) and recipe.train), MAP())
