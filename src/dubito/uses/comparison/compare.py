"""`compare`: fit several recipes under equal conditions and evaluate each, over several seeds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import AtMost, Natural, Range, accepts, check
from dubito.core.errors import DubitoError, InputError
from dubito.core.randomness import Stream
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.map.recipe import MAP
from dubito.uses.comparison.result import Comparison, Failure, Run
from dubito.uses.reporting import evaluate
from dubito.uses.reporting.collect import Scale
from dubito.uses.reporting.examples import Decode
from dubito.uses.reporting.measure import Shifts

MOST_SEEDS = 100_000
Model = nn.Module | Callable[[int], nn.Module]
TrainingChoice = Training | Mapping[str, Any] | Callable[[Recipe], Training] | None


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


@dataclass(frozen=True, eq=False)
class Fits:
    """What all fits of a comparison share; see `dubito.compare` for the arguments."""

    model: Model
    data: Data
    likelihood: str | Likelihood = "categorical"
    validation: Data | None = None
    training: TrainingChoice = None
    base: Recipe = field(default_factory=MAP)
    progress: bool = True

    def of_seed(self, seed: int) -> FitsOfSeed:
        """Return the fits of one seed, on one initial network."""
        if isinstance(self.model, nn.Module):
            return FitsOfSeed(self, self.model, seed)
        with Stream(seed, libraries=True).active():
            model = self.model(seed)
        if not isinstance(model, nn.Module):
            raise InputError(f"The function `model` must return a network for a seed, but it returned {model!r}.")
        return FitsOfSeed(self, model, seed)

    def training_of(self, recipe: Recipe) -> Training | None:
        """Return the training settings of a recipe; None leaves them to the recipe."""
        if isinstance(self.training, Mapping):
            return recipe.default_training().replace(**self.training)
        return self.training(recipe) if callable(self.training) else self.training


class FitsOfSeed:
    """The fits of one seed. Recipes that need a trained network share one, trained by `base` on first use."""

    def __init__(self, fits: Fits, model: nn.Module, seed: int) -> None:
        self.fits, self.model, self.seed = fits, model, seed
        self._trained: tuple[Posterior, float] | None = None

    def fit(self, recipe: Recipe) -> tuple[Posterior, float]:
        """Return the posterior and the seconds of its fit, without those of the network that is shared."""
        if recipe == self.fits.base:
            return self._base()
        return self._fit(recipe, self._base()[0].model if recipe.needs_trained_model else self.model)

    def _base(self) -> tuple[Posterior, float]:
        if self._trained is None:
            self._trained = self._fit(self.fits.base, self.model)
        return self._trained

    def _fit(self, recipe: Recipe, model: nn.Module) -> tuple[Posterior, float]:
        start = time.perf_counter()
        posterior = recipe.fit(
            model,
            self.fits.data,
            likelihood=self.fits.likelihood,
            validation=self.fits.validation,
            training=self.fits.training_of(recipe),
            generator=torch.Generator().manual_seed(self.seed),
            progress=self.fits.progress,
        )
        return posterior, time.perf_counter() - start


def base_of(recipes: Mapping[str, Recipe]) -> Recipe:
    """Return the recipe that trains the shared network: the first MAP that trains, or `MAP()`."""
    return next((recipe for recipe in recipes.values() if isinstance(recipe, MAP) and recipe.train), MAP())
