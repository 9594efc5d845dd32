"""Keep what a search for training settings found beside a run's checkpoint, so that it is not made twice."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from dubito.core import distributed, io
from dubito.core.batches import Data
from dubito.core.errors import FileFormatError
from dubito.fitting.automatic import Found, ResolvedTraining, resolve_training
from dubito.fitting.inference import Problem
from dubito.fitting.training import AUTO

if TYPE_CHECKING:
    from dubito.fitting.recipe import Recipe

SUFFIX = ".search"
# The training settings that a search changes.
CHANGED = ("epochs", "schedule", "restore_best")


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
    found = None if resolved.found is None else dataclasses.asdict(resolved.found)
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
