"""Helpers of recipes that collect networks during one training run."""

from __future__ import annotations

import dataclasses

from torch import nn

from dubito.core import params
from dubito.core.errors import InputError
from dubito.core.params import Params
from dubito.fitting.gradient_training import GradientDescent, negative_log_likelihood
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


def prior_decay(training: Training, prior_precision: float, num_data: int) -> float:
    """Return the L2 coefficient in the mean loss that corresponds to a normal prior."""
    if prior_precision and training.optimizer == "adamw":
        raise InputError("prior_precision needs optimizer 'adam' or 'sgd': the decay of 'adamw' is not a prior.")
    return prior_precision / num_data


def plain_descent(problem: Problem, training: Training, prior_precision: float) -> GradientDescent:
    """Return gradient descent on the negative log posterior, at the learning rates of `training`."""
    decay = training.weight_decay + prior_decay(training, prior_precision, problem.num_data)
    return GradientDescent(
        dataclasses.replace(problem, training=training),
        problem.model,
        negative_log_likelihood(problem),
        hyper=problem.likelihood.hyper(),
        weight_decay={name: decay for name, _ in problem.model.named_parameters()},
    )


def point(recipe: MAP, problem: Problem, model: nn.Module, hyper: Params) -> Posterior:
    """Return one trained network as a posterior, with the noise and temperature that `MAP` chooses."""
    training = problem.training.replace(evidence_every=None)
    inference = recipe.build(dataclasses.replace(problem, model=model, training=training))
    state = inference.init(params.of(model), params.buffers_of(model), problem.generator)
    return inference.posterior({**state, "hyper": hyper})
