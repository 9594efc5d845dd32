"""Prepare and finish a fit: the `Problem` of a call, its settings, its inference, and what is measured last."""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs import likelihoods
from dubito.core import distributed, io, precision
from dubito.core.batches import Data, Source
from dubito.core.constraints import check as check_argument
from dubito.core.errors import FileFormatError, InputError
from dubito.core.randomness import Stream, default_generator, derive_seed, draw_seed
from dubito.fitting import run_identity
from dubito.fitting.automatic import Found, ResolvedTraining, has_learned_noise, resolve_training, with_sizes
from dubito.fitting.causal import with_next_token
from dubito.fitting.checks import Template, check
from dubito.fitting.diagnosis import warn_about
from dubito.fitting.fit_record import measure
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.initialization import redraw
from dubito.fitting.output_noise import share_noise, unfitted_noise, with_known_numbers
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import FitCall, Recipe
from dubito.fitting.subspace_posterior import build_on_subspace
from dubito.fitting.training import AUTO, Training
from dubito.fitting.working_copies import shared_copy
from dubito.networks.subspace import Subspace

SUFFIX = ".search"
# The training settings that a search changes.
CHANGED = ("epochs", "schedule", "restore_best")


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
    problem, _ = checked(make_problem(recipe, replace(call, generator=copied)))
    start, seed = copied.get_state(), draw_seed(copied)
    with Stream(derive_seed(seed, "build"), problem.source.device, libraries=True).active():
        return resolve(recipe, problem, call.data, start, seed)[0]


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


def checked(problem: Problem) -> tuple[Problem, Template]:
    """Return the problem after all checks, with the likelihood that its network needs, and the shapes of a batch."""
    if problem.training.checkpoint is not None:
        run_identity.check_place(problem.training.checkpoint)
    for source in (problem.source, problem.validation):
        if source is not None:
            source.agree()
    template = check(problem)
    likelihood = with_next_token(problem.likelihood, problem.model, problem.source.first)
    return replace(problem, likelihood=likelihood), template


def resolve(
    recipe: Recipe, problem: Problem, data: Data, start: Tensor, seed: int
) -> tuple[ResolvedTraining, dict[str, str]]:
    """Draw new weights if the recipe wants them; return the training settings, and digests of the run for checkpoints.

    Args:
        recipe: The recipe.
        problem: The problem, whose network is changed.
        data: The data as the user gave them.
        start: The state of the generator before the fit.
        seed: Determines the random numbers of the search.
    """
    redraw(problem.model, recipe.start, lambda: problem.source.first().inputs)
    has_checkpoint = problem.training.checkpoint is not None
    own = run_identity.identity(recipe, problem, problem.model, start) if has_checkpoint else {}
    return resolve_or_recall(recipe, problem, data, derive_seed(seed, "search"), own), own


def build(recipe: Recipe, problem: Problem) -> Inference:
    """Return the inference of `recipe` on the weights that its selection rule chooses."""
    rule = recipe.weights
    if rule is None:
        return recipe.build(problem)
    selection = rule.resolve(
        problem.model, problem.source, with_known_numbers(problem),
        prior_precision=recipe.assumed_precision, generator=problem.generator,
    )  # fmt: skip
    if selection.num_weights == 0:
        raise InputError(f"{rule!r} selects no weight, so nothing would be random: choose another rule.")
    if isinstance(selection, Subspace):
        return build_on_subspace(recipe, problem, selection)
    return recipe.build(replace(problem, selection=selection))


def finish(
    posterior: Posterior, source: Source, validation: Source | None, resolved: ResolvedTraining, trains: bool
) -> Posterior:
    """Return the posterior with its record.

    Args:
        posterior: The posterior that the inference gave.
        source: The training data.
        validation: The validation data, or None.
        resolved: The training settings and what held-out examples said.
        trains: Whether the recipe trains for a number of epochs.
    """
    gain = posterior.remaining_gain
    with Stream(0, posterior.device).active():  # for networks that draw random numbers
        noise = resolved.noise
        learned = trains and has_learned_noise(resolved.likelihood) and resolved.training.evidence_every is None
        if learned and posterior.noise_shrinks and posterior.has_spread:  # a single network has seen to it
            own = posterior.likelihood.noise  # type: ignore[attr-defined]
            noise = unfitted_noise(posterior.model, own, source, validation)
        if noise is not None:
            posterior = share_noise(posterior, noise, source)
        posterior.remaining_gain = gain
        epochs = resolved.training.epochs if trains else None
        if not posterior.likelihood.scores_targets:
            return posterior
        posterior.fit_record = measure(posterior, source, validation, epochs=epochs, found=resolved.found)
    warn_about(posterior)
    return posterior


def resolve_or_recall(
    recipe: Recipe, problem: Problem, data: Data, seed: int, identity: dict[str, str]
) -> ResolvedTraining:
    """Return the settings of a fit; a run with a checkpoint keeps them in a file.

    Args:
        recipe: The recipe.
        problem: What is fitted.
        data: The data as the user gave them.
        seed: Determines all random numbers of the search.
        identity: Digests of the run, as in its checkpoint.
    """
    checkpoint = problem.training.checkpoint
    needed = recipe.trains and problem.training.epochs == AUTO
    if checkpoint is None or not needed:
        return resolve_training(recipe, problem, data, seed)
    path = Path(f"{checkpoint}{SUFFIX}")
    if distributed.from_first(path.is_file(), problem.source.device):
        tree = io.load(path, "search")
        with io.reading(path):
            if tree["identity"] == identity:
                return _recalled(problem, tree)
    resolved = resolve_training(recipe, problem, data, seed)
    found = None if resolved.found is None else asdict(resolved.found)
    changed = {name: getattr(resolved.training, name) for name in CHANGED}
    if distributed.rank() == 0:
        try:
            io.save(path, "search", {"identity": identity, "training": changed, "found": found})
        except FileFormatError as error:
            warnings.warn(f"{error} The run continues; an interrupted one would search again.", stacklevel=2)
    return resolved


def _recalled(problem: Problem, tree: dict[str, dict[str, object]]) -> ResolvedTraining:
    training = problem.training.replace(**tree["training"])
    if tree["found"] is None:
        return ResolvedTraining(training, problem.likelihood)
    found = Found(**tree["found"])  # type: ignore[arg-type]
    likelihood = problem.likelihood if found.noise is None else problem.likelihood.replace(noise=found.noise)
    return ResolvedTraining(training, likelihood, found)
