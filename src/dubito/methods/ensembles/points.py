"""Helpers of recipes that collect networks during one training run."""

from __future__ import annotations

import dataclasses

from torch import nn

from dubito.core import params
from dubito.core.errors import InputError
from dubito.core.params import Params
from dubito.fitting.inference import Problem
from dubito.fitting.posterior import Posterior
from dubito.fitting.training import Training
from dubito.methods.map.recipe import MAP


def check_training(name: str, training: Training) -> None:
    """Raise an error unless the training settings describe one complete run."""
    if training.epochs == 0:
        raise InputError(f"{name} collects networks during training: set Training(epochs=...) above 0.")
    if training.needs_validation or training.evidence_every is not None:
        raise InputError(f"{name} needs a complete run: leave out early_stopping, restore_best and evidence_every.")


def point(recipe: MAP, problem: Problem, model: nn.Module, hyper: Params) -> Posterior:
    """Return one trained network as a posterior, with the noise and temperature that `MAP` chooses."""
    training = problem.training.replace(evidence_every=None)
    inference = recipe.build(dataclasses.replace(problem, model=model, training=training))
    state = inference.init(params.of(model), params.buffers_of(model), problem.generator)
    return inference.posterior({**state, "hyper": hyper})
