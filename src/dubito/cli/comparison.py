"""Several methods on one data set: the same network, the same data, the same seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dubito.beliefs.likelihoods import Bernoulli, HeteroscedasticGaussian, Likelihood
from dubito.core.errors import DubitoError
from dubito.core.randomness import Stream
from dubito.data import DataSet, Vocabulary
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.map.recipe import MAP
from dubito.networks.models import build
from dubito.uses.reporting import Evaluation, evaluate

MIN_STEPS = 2000  # a few epochs of a small data set would leave every method untrained


@dataclass(frozen=True)
class Run:
    """One method, fitted and evaluated with one seed."""

    method: str
    seed: int
    evaluation: Evaluation
    fit_seconds: float
    judge_seconds: float


@dataclass(frozen=True)
class Failure:
    """One method that could not be fitted or evaluated; its other seeds are left out."""

    method: str
    seed: int
    error: DubitoError


@dataclass(frozen=True, eq=False)
class Comparison:
    """What to compare, and on what.

    Attributes:
        dataset: The data; methods are fitted on its training part and judged on its test part.
        model: The network, as `dubito.models.build` reads it.
        recipes: The methods.
        likelihood: How outputs explain targets.
        training: The settings of training that were chosen; the others are each recipe's own.
        num_seeds: How often everything is repeated, with other initial weights and other randomness.
        ood: Data unlike that of training, by name.
        shifts: Shifted versions of the test part, as `dubito.data.shifts` makes them.
    """

    dataset: DataSet
    model: str
    recipes: tuple[Recipe, ...]
    likelihood: Likelihood
    training: Mapping[str, Any] = field(default_factory=dict)
    num_seeds: int = 1
    ood: Mapping[str, Any] = field(default_factory=dict)
    shifts: Mapping[str, Any] = field(default_factory=dict)

    def runs(self) -> Iterator[Run | Failure]:
        """Fit and judge one method after the other; all methods with the first seed come first.

        Methods that start from a trained network share one per seed.
        """
        failed: set[Recipe] = set()
        for seed in range(self.num_seeds):
            network = self.network(seed)
            trained: Posterior | None = None
            for recipe in (recipe for recipe in self.recipes if recipe not in failed):
                try:
                    if needs_trained_model(recipe) and trained is None:
                        trained = self.fit(self.base_recipe(), network, seed)
                    start = trained.model if trained is not None and needs_trained_model(recipe) else network
                    began = time.perf_counter()
                    posterior = self.fit(recipe, start, seed)
                    fitted = time.perf_counter()
                    if recipe == self.base_recipe():
                        trained = posterior
                    evaluation = self.judge(posterior, repr(recipe))
                    yield Run(repr(recipe), seed, evaluation, fitted - began, time.perf_counter() - fitted)
                except DubitoError as error:
                    failed.add(recipe)
                    yield Failure(repr(recipe), seed, error)

    def check(self) -> None:
        """Raise, before any work is done, if data, network and likelihood do not fit together."""
        inputs, targets = self.dataset.train
        with torch.no_grad():
            outputs = self.network(seed=0).eval()(inputs[:2])
        self.likelihood.check(outputs, targets[:2])

    def network(self, seed: int) -> nn.Module:
        """Return the network with the initial weights of one seed."""
        encoder, outputs = self.dataset.encoder, self.dataset.num_outputs
        vocabulary = len(encoder) if isinstance(encoder, Vocabulary) else None
        if isinstance(self.likelihood, HeteroscedasticGaussian):
            outputs = 2 * outputs
        elif isinstance(self.likelihood, Bernoulli) and outputs == 2:
            outputs = 1
        with Stream(seed).active():
            return build(self.model, self.dataset.input_shape, outputs, vocabulary=vocabulary)

    def base_recipe(self) -> MAP:
        """Return how the network is trained that is shared: the first MAP among the recipes that trains."""
        return next((recipe for recipe in self.recipes if isinstance(recipe, MAP) and recipe.train), MAP())

    def fit(self, recipe: Recipe, network: nn.Module, seed: int) -> Posterior:
        """Fit one method."""
        return recipe.fit(
            network,
            self.dataset.train,
            likelihood=self.likelihood,
            validation=self.dataset.validation,
            training=self.training_of(recipe),
            generator=torch.Generator().manual_seed(seed),
        )

    def training_of(self, recipe: Recipe) -> Training:
        """Return the training settings of a recipe: what was chosen, else its own, but at least `MIN_STEPS` steps."""
        training = recipe.default_training().replace(**self.training)
        if "epochs" in self.training or training.epochs == 0:
            return training
        steps_per_epoch = math.ceil(len(self.dataset.train[1]) / training.batch_size)
        return training.replace(epochs=max(training.epochs, math.ceil(MIN_STEPS / steps_per_epoch)))

    def judge(self, posterior: Posterior, name: str) -> Evaluation:
        """Evaluate a posterior on the test part and on everything that is unlike it."""
        scale = self.dataset.target_scale
        return evaluate(posterior, self.dataset.test, ood=self.ood, shifts=self.shifts, target_scale=scale, name=name)


def needs_trained_model(recipe: Recipe) -> bool:
    """Whether a recipe works on a network that is trained already: it says so, or it is a MAP that does not train."""
    return bool(getattr(recipe, "needs_trained_model", isinstance(recipe, MAP) and not recipe.train))
