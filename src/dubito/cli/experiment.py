"""The experiment that a command line describes: a data set, a network by name, recipes, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.data import DataSet
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.uses.comparison import Failure, Run, compare
from dubito.uses.comparison.compare import Fits
from dubito.uses.runs.default import training_for
from dubito.uses.runs.networks import NetworkSource
from dubito.uses.runs.table_fit import check_network


@dataclass(frozen=True, eq=False)
class Experiment:
    """What to compare, and on what.

    Attributes:
        dataset: The data; methods are fitted on its training part and evaluated on its test part.
        model: The network, as `dubito.models.build` reads it.
        recipes: The methods.
        likelihood: The likelihood.
        training: The training settings that were chosen; the others are each recipe's own.
        num_seeds: How often everything is repeated, with other initial weights and other randomness.
        ood: Out-of-distribution data by name.
        shifts: Shifted versions of the test part, as `dubito.data.shifts` makes them.
        seeds: The seeds, if they are not the first `num_seeds`.
        names: Readable names of the methods; by default they are named as they are typed.
    """

    dataset: DataSet
    model: str
    recipes: tuple[Recipe, ...]
    likelihood: Likelihood
    training: Mapping[str, Any] = field(default_factory=dict)
    num_seeds: int = 1
    ood: Mapping[str, Any] = field(default_factory=dict)
    shifts: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None

    def run(self, progress: Callable[[Run | Failure], None]) -> None:
        """Compare the methods; `progress` is called with every outcome."""
        data, names = self.dataset, self.names or tuple(repr(recipe) for recipe in self.recipes)
        compare(
            self.network, data.train, dict(zip(names, self.recipes, strict=True)), test=data.test,
            seeds=self.seeds or self.num_seeds, likelihood=self.likelihood, validation=data.validation,
            training=self.training_of, ood=self.ood, shifts=self.shifts, target_scale=data.target_scale,
            decode=self.decode, class_names=data.class_names, progress=progress,
        )  # fmt: skip

    def posterior(self, recipe: Recipe, seed: int) -> Posterior:
        """Fit one method; a network that it needs trained is trained first."""
        data = self.dataset
        fits = Fits(self.network, data.train, self.likelihood, data.validation, self.training_of)
        return fits.of_seed(seed).fit(recipe)[0]

    def check(self) -> None:
        """Raise, before any work is done, if data, network and likelihood do not fit together."""
        check_network(self.network(seed=0), self.dataset, self.likelihood)

    def decode(self, inputs: Tensor) -> Any:
        """Return inputs as a person recognizes them: pictures, texts, or columns in their own units."""
        found = self.dataset.encoder.decode(inputs)
        names = self.dataset.feature_names
        if isinstance(found, Tensor) and found.ndim == 2 and len(names) == found.shape[1]:
            return dict(zip(names, found.double().round(decimals=6).T.tolist(), strict=True))
        return found

    def facts(self) -> dict[str, str]:
        """Return what was run, for a report."""
        parts = ", ".join(f"{len(targets):,} {part}" for part, (_, targets) in self.dataset.parts.items())
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.training.items())
        return {
            "Data": f"{self.dataset.name}: {parts}",
            "Network": self.model,
            "Likelihood": repr(self.likelihood),
            "Training": chosen or "the defaults of each method",
            "Seeds": ", ".join(map(str, self.seeds)) if self.seeds else f"0 to {self.num_seeds - 1}",
        }

    def network(self, seed: int) -> nn.Module:
        """Return the network with new initial weights; the caller seeds the global generators."""
        return NetworkSource.of(self.model, self.dataset, self.likelihood).build()

    def training_of(self, recipe: Recipe) -> Training:
        """Return the training settings of a recipe: what was chosen, else its own."""
        return training_for(recipe, self.training)
