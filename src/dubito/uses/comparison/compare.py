"""`compare`: fit several recipes to the same data and evaluate each, over several seeds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import AtMost, Natural, Range, accepts, check
from dubito.core.errors import DubitoError, InputError
from dubito.fitting.recipe import Recipe
from dubito.uses.comparison.fits import Fits, Model, TrainingChoice, base_of
from dubito.uses.comparison.result import Comparison, Failure, Run
from dubito.uses.reporting import evaluate
from dubito.uses.reporting.collect import Scale
from dubito.uses.reporting.examples import Decode
from dubito.uses.reporting.measure import Shifts

MOST_SEEDS = 100_000


@checked_arguments
def compare(
    model: Model,
    data: Data,
    recipes: Mapping[str, Recipe],
    *,
    test: Data,
    seeds: int | Sequence[int] = 1,
    likelihood: str | Likelihood = "categorical",
    validation: Data | None = None,
    training: TrainingChoice = None,
    ood: Mapping[str, Data | Tensor] | None = None,
    shifts: Shifts | None = None,
    target_scale: Scale | None = None,
    groups: Mapping[str, Sequence[Any] | Tensor] | None = None,
    decode: Decode | None = None,
    class_names: Sequence[str] = (),
    base: Recipe | None = None,
    progress: bool | Callable[[Run | Failure], None] = True,
) -> Comparison:
    """Fit each recipe to the same data with the same seeds, and evaluate each on the same test data.

    Recipes that need a trained network, such as `Laplace`, share one per seed, trained by `base`. A recipe that raises
    a `DubitoError` is recorded in `failures` with a warning, and its later seeds are skipped; the others go on. If no
    recipe succeeds, the first error is raised.

    Args:
        model: A function from a seed to a network, which gives every seed its own initial weights (torch, numpy and
            random are seeded while it runs); or a network, from whose weights every seed starts, so that seeds differ
            only in the randomness of training and sampling. It is not changed.
        data: The training data: a DataLoader, a Dataset, an `(inputs, targets)` pair or a list of batches.
        recipes: The recipes by name.
        test: The data to evaluate on.
        seeds: How many seeds, counted from 0, or the seeds themselves.
        likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"``, ``"heteroscedastic"`` or an object.
        validation: Held-out data for recipes that tune something on it, and for early stopping.
        training: A `Training` for all recipes; or a dict of settings that replace those of each recipe's own
            `default_training()`; or a function from a recipe to its `Training`.
        ood: Out-of-distribution data by name, as for `evaluate`.
        shifts: Shifted versions of the test data, as for `evaluate`.
        target_scale: ``(loc, scale)`` of standardised regression targets, as for `evaluate`.
        groups: The groups of the test data, as for `evaluate`.
        decode: Turns inputs into what a person recognizes, as for `evaluate`.
        class_names: The names of the classes, as for `evaluate`.
        base: The recipe that trains the shared network; by default the first `MAP` that trains among the recipes, else
            `MAP()`. For a network that is already trained give ``MAP(train=False)``.
        progress: Whether to show progress bars on a terminal; or a function to call with every `Run` and `Failure`.

    >>> import dubito
    >>> digits = dubito.data.load("digits")
    >>> found = compare(
    ...     lambda seed: dubito.models.mlp(64, 10, hidden=30),
    ...     digits.train,
    ...     {"MAP": dubito.MAP(), "Laplace": dubito.Laplace()},
    ...     test=digits.test,
    ...     seeds=2,
    ...     training={"epochs": 5},
    ... )
    >>> [len(evaluations) for evaluations in found.evaluations.values()]
    [2, 2]
    """
    _check(model, recipes)
    numbers = _seeds(seeds)
    fits = Fits(model, data, likelihood, validation, training, base or base_of(recipes), progress is not False)
    judging: dict[str, Any] = {
        "ood": ood, "shifts": shifts, "target_scale": target_scale, "groups": groups, "decode": decode,
        "class_names": class_names,
    }  # fmt: skip
    outcomes = []
    for outcome in _outcomes(fits, recipes, numbers, lambda p, name: evaluate(p, test, name=name, **judging)):
        outcomes.append(outcome)
        if callable(progress):
            progress(outcome)
        elif isinstance(outcome, Failure):
            told = f"'{outcome.name}' failed with seed {outcome.seed} and is left out from there on: {outcome.error}"
            warnings.warn(told, stacklevel=2)
    comparison = Comparison.of(outcomes)
    if not comparison.runs:
        raise comparison.failures[0].error
    return comparison


def _outcomes(
    fits: Fits, recipes: Mapping[str, Recipe], seeds: Sequence[int], judge: Callable[..., Any]
) -> Iterator[Run | Failure]:
    """Yield one outcome per recipe and seed; all recipes of the first seed come first."""
    failed: set[str] = set()
    for seed in seeds:
        of_seed = fits.of_seed(seed)
        for name in [name for name in recipes if name not in failed]:
            try:
                posterior, fit_seconds = of_seed.fit(recipes[name])
                start = time.perf_counter()
                evaluation = judge(posterior, name)
                yield Run(name, seed, evaluation, fit_seconds, time.perf_counter() - start)
            except DubitoError as error:
                failed.add(name)
                yield Failure(name, seed, error)


def _check(model: Any, recipes: Any) -> None:
    if isinstance(model, type) or not (isinstance(model, nn.Module) or callable(model)):
        raise InputError(f"`model` must be a network or a function from a seed to a network, got {model!r}.")
    if not isinstance(recipes, Mapping) or not recipes:
        raise InputError(f"`recipes` must be a dict such as {{'MAP': MAP(), 'Laplace': Laplace()}}, got {recipes!r}.")
    for name, recipe in recipes.items():
        if not isinstance(name, str) or not isinstance(recipe, Recipe):
            raise InputError(f"`recipes` must map names to recipes such as Laplace(), but {name!r} maps to {recipe!r}.")


def _seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        check("seeds", Annotated[int, Range(1), AtMost(MOST_SEEDS)], seeds)
        return list(range(seeds))
    numbers = tuple(seeds) if isinstance(seeds, Sequence) else seeds
    if not accepts(tuple[Natural, ...], numbers) or not numbers:
        raise InputError(f"`seeds` must be a number of seeds or a list of whole numbers of at least 0, got {seeds!r}.")
    if len(set(numbers)) < len(numbers):
        raise InputError(f"`seeds` must differ from one another, got {seeds!r}.")
    return list(numbers)
