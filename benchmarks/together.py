"""Fit many Laplace posteriors of one network at the cost of one, by computing shared quantities once.

For a convolutional network the backward pass from every output takes most of the time of curvature and predictive
variance, and it does not depend on which weights are random. Here one pass over the data fits many recipes, and one
pass over the inputs predicts with all of them; each number is what `recipe.fit` and `posterior.predict` give on their
own (`check` asserts it).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from dubito.likelihoods import Categorical
from torch import Tensor, nn

from dubito import Laplace
from dubito.beliefs.prediction import ClassPrediction
from dubito.core.batches import Source
from dubito.curvature import Engine, links
from dubito.curvature import output_columns as seeds
from dubito.curvature.evidence import DataFit
from dubito.curvature.factors import Factor
from dubito.curvature.functional import FunctionalTerms
from dubito.curvature.structures import make_accumulator
from dubito.methods.laplace.posterior import LaplacePosterior
from dubito.methods.laplace.tuning import tune
from dubito.networks.selection import Selection

# Columns that go through one vector-Jacobian product: the networks here have ten outputs.
MOST_COLUMNS = 32
SAMPLES = 32


@dataclass(frozen=True)
class _Pulled:
    """A tape whose columns were pulled back already."""

    factors: dict[str, Factor]

    def pull(self, columns: Tensor) -> dict[str, Factor]:
        return self.factors


def fit(model: nn.Module, recipes: dict[str, Laplace], train: tuple[Tensor, Tensor]) -> dict[str, LaplacePosterior]:
    """Return a posterior of a classifier for each recipe, its prior precision still to be tuned."""
    likelihood, source = Categorical(), Source(train, batch_size=1000, dtype=torch.float32)
    engine = Engine(model, Selection.all_of(model).names)
    chosen = {key: _chosen(recipe, model, source) for key, recipe in recipes.items()}
    summers = {key: make_accumulator(recipes[key].structure, engine, chosen[key]) for key in recipes}
    sums = {key: summer.zeros() for key, summer in summers.items()}
    explained = 0.0
    for tape, targets in _tapes(engine, source, max(s.num_weights for s in chosen.values())):
        explained += float(likelihood.log_prob(tape.outputs.detach(), targets).double().sum())
        for columns in seeds.columns("ggn", likelihood, tape.outputs.detach(), targets, most=MOST_COLUMNS):
            factors = tape.pull(columns)
            for key, summer in summers.items():
                own: Any = _Pulled({name: factors[name] for name in chosen[key].names})
                summer.add(sums[key], own, [columns], targets)
    found = {}
    for key, recipe in recipes.items():
        found[key] = LaplacePosterior(
            copy.deepcopy(model), likelihood, recipe, len(train[0]), chosen[key], sums[key], DataFit(explained)
        )
        found[key].__dict__["engine"] = engine
    return found


def _chosen(recipe: Laplace, model: nn.Module, source: Source) -> Selection:
    return recipe.weights.resolve(model, source, Categorical(), 1.0, torch.Generator().manual_seed(0))


def _tapes(engine: Engine, source: Source, extra: int) -> Iterator[tuple[Any, Tensor]]:
    for batch in source.replay():
        for rows, tape in engine.chunks(batch.inputs, MOST_COLUMNS, extra):
            yield tape, batch.targets[rows]


def tuned(posterior: LaplacePosterior, by: str, validation: tuple[Tensor, Tensor]) -> LaplacePosterior:
    """Return the posterior with its precision chosen by "evidence" or "validation"."""
    return tune(posterior, posterior.recipe.replace(prior_precision=by), Source(validation, batch_size=250))


@torch.no_grad()
def predict(posteriors: dict[str, LaplacePosterior], inputs: Tensor) -> dict[str, ClassPrediction]:
    """Return the linearized prediction of each posterior, with the probit link; all are of one network."""
    first = next(iter(posteriors.values()))
    families = _families(posteriors)
    extra = max((p.selection.num_weights for p in posteriors.values() if p.recipe.structure == "full"), default=0)
    parts: dict[str, list[ClassPrediction]] = {key: [] for key in posteriors}
    noise = links.Noise(SAMPLES, torch.Generator().manual_seed(0))
    for _, tape in first.engine.chunks(inputs, MOST_COLUMNS, extra):
        outputs = tape.outputs.detach()
        (columns,) = seeds.identity(first.likelihood, outputs, MOST_COLUMNS, centred=True)
        factors = tape.pull(columns)
        for family in families:
            own = posteriors[family[0]]
            terms = FunctionalTerms(own.matrix, own.selection, factors)
            for key in family:
                variance = terms.variance(posteriors[key].covariance).mT
                parts[key].append(links.predict(first.likelihood, outputs, variance, noise))  # type: ignore[arg-type]
    return {key: ClassPrediction.cat(some) for key, some in parts.items()}


def _families(posteriors: dict[str, LaplacePosterior]) -> list[list[str]]:
    """The posteriors that share a curvature matrix, and differ in their prior precision."""
    families: dict[int, list[str]] = {}
    for key, posterior in posteriors.items():
        families.setdefault(id(posterior.matrix), []).append(key)
    return list(families.values())


def check(model: nn.Module, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]) -> None:
    """Assert on a few examples that all this is what the library does."""
    from dubito import select

    recipes = {
        "kron": Laplace(prior_precision="evidence"),
        "part": Laplace(structure="full", weights=select.subnetwork(50), prior_precision="evidence"),
    }
    train = (train[0][:200], train[1][:200])
    shared = {key: tuned(p, "evidence", validation) for key, p in fit(model, recipes, train).items()}
    found = predict(shared, validation[0][:50])
    for key, recipe in recipes.items():
        alone = recipe.fit(model, train, progress=False).predict(validation[0][:50])
        torch.testing.assert_close(found[key].probs, alone.probs, rtol=1e-3, atol=1e-5)
