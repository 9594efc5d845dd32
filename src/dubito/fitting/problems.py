"""Prepare a fit: the `Problem` of a call, and training settings that several fits share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dubito.beliefs import likelihoods
from dubito.core import distributed, precision
from dubito.core.batches import Source
from dubito.core.constraints import check as check_argument
from dubito.core.randomness import Stream, default_generator, derive_seed, draw_seed
from dubito.fitting import run_identity
from dubito.fitting.automatic import ResolvedTraining, with_sizes
from dubito.fitting.causal import with_next_token
from dubito.fitting.checks import check
from dubito.fitting.inference import Problem
from dubito.fitting.initialization import redraw
from dubito.fitting.model_copies import shared_copy
from dubito.fitting.search_file import resolve_or_recall
from dubito.fitting.training import Training

if TYPE_CHECKING:
    from dubito.fitting.recipe import FitCall, Recipe


@distributed.together()
@torch.inference_mode(False)
@torch.enable_grad()
@precision.in_networks_only()
def resolved_training(recipe: Recipe, call: FitCall) -> ResolvedTraining:
    """Return the training settings and the likelihood of several fits of `recipe`; its generator stays as it is.

    With a checkpoint, what was found is kept beside it.
    """
    given = default_generator(call.generator)
    copied = torch.Generator(given.device)
    copied.set_state(given.get_state())
    problem = make_problem(recipe, replace(call, generator=copied))
    checkpoint = problem.training.checkpoint
    if checkpoint is not None:
        run_identity.check_place(checkpoint)
    for source in (problem.source, problem.validation):
        if source is not None:
            source.agree()
    check(problem)
    problem = replace(problem, likelihood=with_next_token(problem.likelihood, problem.model, problem.source.first))
    start, seed = copied.get_state(), draw_seed(copied)
    with Stream(derive_seed(seed, "build"), problem.source.device, libraries=True).active():
        redraw(problem.model, recipe.start, lambda: problem.source.first().inputs)
        own = {} if checkpoint is None else run_identity.identity(recipe, problem, problem.model, start)
        return resolve_or_recall(recipe, problem, call.data, derive_seed(seed, "search"), own)


def make_problem(recipe: Recipe, call: FitCall) -> Problem:
    """Return what is to be fitted: a private copy of the model, the data as batches, the settings."""
    data, num_data, validation = call.data, call.num_data, call.validation
    generator = default_generator(call.generator)
    training = recipe.default_training() if call.training is None else call.training
    check_argument("training", Training, training)
    private = shared_copy(call.model)
    weight = next(private.parameters())
    place: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    if training.is_automatic:
        training = with_sizes(training, private, Source(data, num_data=num_data).num_data)
    return Problem(
        model=private,
        likelihood=likelihoods.resolve(call.likelihood),
        source=Source(data, batch_size=training.batch_size, shuffle=training.shuffle, num_data=num_data, **place),
        validation=None if validation is None else Source(validation, batch_size=1024, must_count=False, **place),
        training=training,
        generator=generator,
        progress=call.progress,
    )
