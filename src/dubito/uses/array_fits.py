"""`fit_arrays`: a posterior of arrays or data frames, with the scales of inputs and targets. The estimators use it.

Weights of rows become numbers of copies, and parts are drawn by content, not by position. So a weight of 3 gives
exactly what three equal rows give, and a weight of 0 what leaving the row out gives. The order of the rows does not
matter, and equal rows are always in one part: no copy of a row that is trained on is held out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from dubito.uses.fixed_draws import FixedDraws, rank_for
from dubito.uses.runs.default import default_recipe, fit_posterior
from dubito.uses.runs.guard import GuardedPosterior, TrainingRange

Array = NDArray[Any]
Network = str | nn.Module | Callable[[int, int], nn.Module]
_TARGET = "the target of the estimator"
# Fewer rows are not held out: an interval of 90 % cannot be calibrated with less than nine.
FEWEST_HELD_OUT = 10
# No part takes more than this share of the rows.
MOST = 1 / 3


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


class Parts(NamedTuple):
    """The rows of each part, with a row as often as it has copies.

    Attributes:
        train: The rows to train on.
        validation: The rows that choose settings; may be empty.
        held_out: The rows that calibrate intervals; may be empty.
    """

    train: Array
    validation: Array
    held_out: Array


def copies(weights: Array | None, num_rows: int, seed: int) -> Array:
    """Return how often each row counts ``[N]``.

    Whole numbers are taken as they are. Other weights are scaled to a mean of 1 and rounded up or down at random such
    that each is right on average.

    >>> copies(np.array([2.0, 0.0, 1.0]), 3, seed=0).tolist()
    [2, 0, 1]
    """
    if weights is None:
        return np.ones(num_rows, dtype=np.int64)
    if (weights < 0).any():
        raise InputError(f"A sample weight must not be negative, got {weights.min():g}.")
    if not weights.any():
        raise InputError("All sample weights are zero: at least one row must have a positive weight.")
    if (weights == np.round(weights)).all() and weights.max() < 2**31:
        return weights.astype(np.int64)
    ends = np.cumsum(weights / weights.sum() * num_rows)
    drawn = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).item()
    ends[-1] = num_rows  # not a little less by rounding
    return np.diff(np.floor(ends + drawn), prepend=np.floor(drawn)).astype(np.int64)


def draw_parts(inputs: Array, targets: Array, counts: Array, validation: float, held_out: float, seed: int) -> Parts:
    """Draw the parts of a fit.

    Args:
        inputs: One row per example ``[N, F]``.
        targets: Their targets ``[N]`` or ``[N, O]``.
        counts: How often each row counts ``[N]``.
        validation: The share of the rows for validation; no row if there are too few.
        held_out: The share of the rows to hold out; at least ten rows, or none if there are fewer than thirty.
        seed: Draws the rows.
    """
    for name, share in (("validation", validation), ("held_out", held_out)):
        if not 0 <= share <= MOST:
            raise InputError(f"`{name}` must be a share of the rows from 0 to 1/3, got {share}.")
    present = counts.nonzero()[0]
    digests = _digests(inputs[present], targets[present])
    present = present[digests.argsort(kind="stable")]
    groups = np.unique(np.sort(digests), return_inverse=True)[1]  # equal rows are one group
    num = int(groups[-1]) + 1
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).numpy()
    num_held_out = max(round(held_out * num), FEWEST_HELD_OUT) if held_out else 0
    num_held_out *= num_held_out <= MOST * num
    num_validation = round(validation * num) if num >= 3 * FEWEST_HELD_OUT else 0
    place = np.zeros(num, dtype=np.int8)
    place[order[:num_held_out]] = 2
    place[order[num_held_out : num_held_out + num_validation]] = 1
    found = (present[place[groups] == part] for part in (0, 1, 2))
    return Parts(*(np.repeat(rows, counts[rows]) for rows in found))


def _digests(*parts: Array) -> Array:
    """Return one number per row that depends on its content alone ``[N]``, the same in every order of the rows."""
    total = np.zeros(len(parts[0]), dtype=np.uint64)
    factors = np.random.default_rng(0)
    for part in parts:
        values = np.ascontiguousarray(part.reshape(len(part), -1), dtype=np.float64) + 0.0  # one kind of zero
        bits = values.view(np.uint64)
        for column in bits.T:
            mixed = (column ^ (column >> np.uint64(29))) * (factors.integers(2**63, dtype=np.uint64) | np.uint64(1))
            total += mixed ^ (mixed >> np.uint64(32))
    return total
