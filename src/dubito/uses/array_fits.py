"""`fit_arrays`: a posterior of arrays or data frames, with the scales of inputs and targets. The estimators use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.likelihoods.kinds import RegressionLikelihood
from dubito.beliefs.prediction import Prediction, RegressionPrediction
from dubito.core.errors import InputError
from dubito.core.randomness import Stream
from dubito.data import DataSet, Pair, Standardizer, Table, TableTransform
from dubito.data.dataset import Task
from dubito.data.describe import describe_table, settled
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.networks.models import build
from dubito.networks.twin import copied
from dubito.uses.array_rows import copies, draw_parts
from dubito.uses.fixed_draws import FixedDraws, rank_for
from dubito.uses.runs.default import default_recipe, fit_posterior
from dubito.uses.runs.guard import GuardedPosterior, TrainingRange

Array = NDArray[Any]
Network = str | nn.Module | Callable[[int, int], nn.Module]
_TARGET = "the target of the estimator"


@dataclass(frozen=True)
class How:
    """How to fit.

    Attributes:
        recipe: Finds the posterior; None for the default.
        network: A network by name, a function of the numbers of inputs and outputs, or a module, which is copied.
        likelihood: The likelihood.
        training: Training settings in place of the recipe's own.
        validation: The share of the rows that chooses settings.
        held_out: The share of the rows that calibrates intervals.
        seed: The seed of all randomness.
        progress: Whether to show progress bars.
    """

    recipe: Recipe | None
    network: Network
    likelihood: Likelihood
    training: Mapping[str, Any]
    validation: float
    held_out: float
    seed: int
    progress: bool


@dataclass(frozen=True, eq=False)
class ArrayFit:
    """A posterior with the scales of its inputs and targets.

    Attributes:
        how: How it was fitted.
        posterior: The posterior.
        encoder: What turns rows of a data frame into inputs; a scale for arrays.
        target_scale: From standardised targets to original units; None for classes.
        dtype: The precision of the network.
        nonconformity: For numbers, the absolute errors of held-out rows in standard deviations ``[N, O]``, ascending.
    """

    how: How
    posterior: Posterior
    encoder: TableTransform | Standardizer
    target_scale: Standardizer | None
    dtype: torch.dtype
    nonconformity: Tensor

    def predict(self, X: Any) -> Prediction:
        """Return the prediction for rows, in original units and float64."""
        draws = FixedDraws(self.posterior, None, torch.Generator().manual_seed(self.how.seed))
        found = draws.predict(self.inputs(X)).to("cpu", torch.float64)
        if self.target_scale is None:
            return found
        assert isinstance(found, RegressionPrediction)
        return found.rescale(*self.target_scale)

    def inputs(self, X: Any) -> Tensor:
        """Return the inputs of the network for rows."""
        if isinstance(self.encoder, TableTransform):
            return self.encoder.encode(X).to(self.dtype)
        return self.encoder.encode(torch.tensor(X, dtype=torch.float64)).to(self.dtype)

    def targets(self, values: Array) -> Tensor:
        """Return targets as the likelihood takes them."""
        if self.target_scale is None:
            return torch.as_tensor(values, dtype=torch.int64)
        rows = torch.as_tensor(values, dtype=torch.float64).reshape(len(values), -1)
        return self.target_scale.encode(rows).to(self.dtype)

    def updated(self, X: Any, targets: Array, weights: Array | None) -> ArrayFit:
        """Return the fit after more rows, for which its posterior is the prior."""
        rows = torch.from_numpy(np.repeat(np.arange(len(targets)), copies(weights, len(targets), self.how.seed)))
        training = Training(**self.how.training) if self.how.training else None
        posterior = self.posterior.update(
            (self.inputs(X)[rows], self.targets(targets)[rows]), training=training, progress=self.how.progress,
            generator=torch.Generator().manual_seed(self.how.seed),
        )  # fmt: skip
        return replace(self, posterior=posterior)

    def reach(self, coverage: float) -> Tensor:
        """Return how many standard deviations an interval of this coverage reaches from the mean, for each output."""
        rank = rank_for(coverage, len(self.nonconformity), f"A coverage of {coverage:g}")
        return self.nonconformity[rank - 1]

    def calibrated(self, X: Any, targets: Array) -> ArrayFit:
        """Return the fit with intervals that are calibrated on held-out rows."""
        if not len(targets) or self.target_scale is None:
            return self
        found = self.predict(X)
        assert isinstance(found, RegressionPrediction)
        truth = torch.as_tensor(targets, dtype=torch.float64).reshape(len(targets), -1)
        errors = (truth - found.mean).abs() / found.stddev
        return replace(self, nonconformity=errors.sort(dim=0).values)


def fit_arrays(X: Any, targets: Array, weights: Array | None, how: How, num_classes: int | None) -> ArrayFit:
    """Fit a posterior to rows.

    Args:
        X: Numbers ``[N, F]``, or a data frame with columns of any kind.
        targets: The numbers of the classes ``[N]``, or numbers ``[N]`` or ``[N, O]``.
        weights: How much each row counts ``[N]``; see `copies`.
        how: How to fit.
        num_classes: The number of classes; None for numbers.
    """
    rows, encoder_of = _encoding(X)
    parts = draw_parts(rows, targets, copies(weights, len(targets), how.seed), how.validation, how.held_out, how.seed)
    encoder = encoder_of(parts.train)
    task: Task = "regression" if num_classes is None else "classification"
    is_single = isinstance(X, np.ndarray) and X.dtype == np.float32
    columns = torch.as_tensor(targets[parts.train], dtype=torch.float64).reshape(len(parts.train), -1)
    unfitted = ArrayFit(
        how, None, encoder, _target_scale(columns, how.likelihood),  # type: ignore[arg-type]
        torch.float32 if is_single else torch.float64, torch.empty(0, columns.shape[1], dtype=torch.float64),
    )  # fmt: skip
    pairs: dict[str, Pair] = {
        name: (unfitted.inputs(_take(X, part)), unfitted.targets(targets[part]))
        for name, part in (("train", parts.train), ("validation", parts.validation))
        if len(part)
    }
    outputs = columns.shape[1] if num_classes is None else num_classes
    dataset = DataSet("arrays", task, {**pairs, "test": pairs["train"]}, outputs, encoder)
    network = _network(how, pairs["train"][0].shape[1], outputs, unfitted.dtype)
    posterior = fit_posterior(
        how.recipe or default_recipe(dataset), network, dataset, how.likelihood,
        training=how.training, seed=how.seed, progress=how.progress,
    )  # fmt: skip
    if isinstance(encoder, TableTransform):
        posterior = GuardedPosterior(posterior, TrainingRange.of(encoder))
    return replace(unfitted, posterior=posterior).calibrated(_take(X, parts.held_out), targets[parts.held_out])


def is_table(X: Any) -> bool:
    """Return whether inputs are a data frame with other columns than complete numbers, to be encoded as a table."""
    if not (hasattr(X, "iloc") and hasattr(X, "dtypes") and hasattr(X, "columns")):
        return False
    kinds = [getattr(kind, "kind", "O") for kind in X.dtypes]
    return any(kind not in "biuf" for kind in kinds) or bool(X.isna().any(axis=None))


def _encoding(X: Any) -> tuple[Array, Callable[[Array], TableTransform | Standardizer]]:
    """Return all rows as numbers, and how to fit an encoder to some of them."""
    if isinstance(X, np.ndarray):
        return X, lambda rows: Standardizer.fit(torch.as_tensor(X[rows], dtype=torch.float64))
    table = Table.of(X.assign(**{_TARGET: np.arange(len(X))}))  # any target: only the inputs are encoded
    described = describe_table(table, _TARGET, task="regression")
    table = settled(table, described)

    def encoder_of(rows: Array) -> TableTransform:
        return TableTransform.fit(table.take(rows), _TARGET, description=described)

    return encoder_of(np.arange(len(X))).encode(table).numpy(), encoder_of


def _target_scale(columns: Tensor, likelihood: Likelihood) -> Standardizer | None:
    """Return how numbers are standardised; counts stay as they are, and classes have no scale."""
    if not isinstance(likelihood, RegressionLikelihood):
        return None
    if likelihood.standardizes:
        return Standardizer.fit(columns)
    return Standardizer(torch.zeros_like(columns[0]), torch.ones_like(columns[0]))


def _take(X: Any, rows: Array) -> Any:
    return X.iloc[rows] if hasattr(X, "iloc") else X[rows]


def _network(how: How, inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    network, outputs = how.network, how.likelihood.outputs_for(outputs)
    if isinstance(network, nn.Module):
        return copied(network).to(dtype)
    if not (isinstance(network, str) or callable(network)):
        raise InputError(f"`network` must be a name, a function or a torch.nn.Module, got {network!r}.")
    with Stream(how.seed, libraries=True).active():
        made = build(network, (inputs,), outputs) if isinstance(network, str) else network(inputs, outputs)
    if not isinstance(made, nn.Module):
        raise InputError(f"`network` must give a torch.nn.Module, but it gave a {type(made).__name__}.")
    return made.to(dtype)
