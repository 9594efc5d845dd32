"""Resolve the selection of a recipe and build its inference, in the same way for all recipes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dubito.core.errors import InputError
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.output_noise import with_known_numbers
from dubito.fitting.subspace_posterior import build_on_subspace
from dubito.networks.subspace import Subspace

if TYPE_CHECKING:
    from dubito.fitting.recipe import Recipe


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
    return recipe.build(dataclasses.replace(problem, selection=selection))
