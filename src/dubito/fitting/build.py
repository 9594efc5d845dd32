"""Build the steps of a recipe: its selection is resolved here, once for all recipes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dubito.core.errors import InputError
from dubito.fitting.inference import Inference, Problem
from dubito.fitting.subspace_posterior import build_on_subspace
from dubito.networks.subspace import Subspace

if TYPE_CHECKING:
    from dubito.fitting.recipe import Recipe


def build(recipe: Recipe, problem: Problem) -> Inference:
    """Return the steps of `recipe` for the weights that its rule selects."""
    rule = recipe.weights
    if rule is None:
        return recipe.build(problem)
    selection = rule.resolve(
        problem.model, problem.source, problem.likelihood,
        prior_precision=recipe.assumed_precision, generator=problem.generator,
    )  # fmt: skip
    if selection.num_weights == 0:
        raise InputError(f"{rule!r} selects no weight: nothing would be random.")
    if isinstance(selection, Subspace):
        return build_on_subspace(recipe, problem, selection)
    return recipe.build(dataclasses.replace(problem, selection=selection))
