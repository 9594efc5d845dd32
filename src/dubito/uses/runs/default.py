"""How a run is fitted: the default method, and how long training takes."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.data import DataSet
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.auto import Auto
from dubito.methods.auto.scores import FEWEST
from dubito.methods.laplace import Laplace
from dubito.methods.map import MAP

# The posterior over all weights: it can be updated, and says which weights can be dropped.
LAPLACE = Laplace(structure="kron")


def default_recipe(dataset: DataSet, *, trained: bool = False) -> Recipe:
    """Return the recipe of a run for which no other was chosen: `Auto`, or `LAPLACE` if too few rows can be held out.

    A network that is `trained` already keeps its weights, and only validation rows are new to it.
    """
    usable = [dataset.validation, None if trained else dataset.train]
    enough = any(part is not None and len(part[1]) >= FEWEST for part in usable)
    return Auto(train=not trained) if enough else LAPLACE


def fit_posterior(
    recipe: Recipe,
    network: nn.Module,
    dataset: DataSet,
    likelihood: Likelihood,
    *,
    trained: bool = False,
    training: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Posterior:
    """Fit a recipe to the training part of a data set; a network that it needs trained is trained first.

    Args:
        recipe: The recipe.
        network: The network; it is not changed.
        dataset: The data, with a validation part if there is one.
        likelihood: The likelihood.
        trained: Whether the network is trained already.
        training: Training settings in place of the recipe's own.
        checkpoint: A file from which an interrupted fit continues; it is removed in the end, with all files whose
            names begin with its name.
        seed: The seed of all randomness.
        progress: Whether to show progress bars on a terminal.
    """
    chosen = dict(training or {})

    def fit(which: Recipe, start: nn.Module, stage: str) -> Posterior:
        how = training_for(which, chosen)
        file = None if checkpoint is None else checkpoint.with_name(f"{checkpoint.name}{stage}")
        return which.fit(
            start, dataset.train, likelihood=likelihood, validation=dataset.validation,
            training=how if file is None else how.replace(checkpoint=str(file)),
            generator=torch.Generator().manual_seed(seed), progress=progress,
        )  # fmt: skip

    if recipe.needs_trained_model and not trained:
        network = fit(MAP(), network, ".training").model
    found = fit(recipe, network, "")
    if checkpoint is not None:
        for file in checkpoint.parent.glob(f"{glob.escape(checkpoint.name)}*"):  # also those of what `Auto` compared
            file.unlink(missing_ok=True)
    return found


def training_for(recipe: Recipe, chosen: Mapping[str, Any]) -> Training:
    """Return the training settings of a recipe: what was chosen, else its own."""
    return recipe.default_training().replace(**chosen)
