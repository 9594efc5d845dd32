"""Predict one data set batch by batch; keep sums for the scores and one number per datum for the curves."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.core import batches, distributed
from dubito.core.batches import Data, Source
from dubito.core.errors import DubitoError, InputError, NonFiniteError
from dubito.uses import metrics
from dubito.uses.fixed_draws import FixedDraws

Metrics = metrics.ClassificationMetrics | metrics.RegressionMetrics
Scale = tuple[float | Tensor, float | Tensor]
Vectors = dict[str, Tensor]

BAND_LEVEL = 0.95

# All vectors that a pass can return: a process without rows must take part in gathering them too.
_VECTORS = (
    "max-probability", "entropy", "stddev", "epistemic", "nll", "loss", "pit", "x", "low", "high", "answer", "truth",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RescaledDraws:
    """Predict with fixed draws, on the CPU, and in the original units of the targets."""

    draws: FixedDraws
    target_scale: Scale | None

    def predict(self, inputs: Any) -> Prediction:
        """Return the prediction for one batch: classes without samples, numbers in float64 and rescaled."""
        prediction = self.draws.predict(inputs)
        if isinstance(prediction, RegressionPrediction):
            wide = prediction.to("cpu", torch.float64)
            return wide if self.target_scale is None else wide.rescale(*self.target_scale)
        if self.target_scale is not None:
            raise InputError("`target_scale` is for regression, but this posterior predicts classes: leave it out.")
        assert isinstance(prediction, ClassPrediction)
        return dataclasses.replace(prediction, samples=None).cpu()

    def scaled(self, targets: Tensor) -> Tensor:
        """Return targets in the units of the predictions."""
        if self.target_scale is None:
            return targets
        loc, scale = (torch.as_tensor(part, dtype=torch.float64) for part in self.target_scale)
        return loc + scale * targets


@dataclasses.dataclass(frozen=True)
class EvaluationPass:
    """The result of one pass over a data set, summed and gathered over processes.

    Attributes:
        metrics: The accumulated scores; None if targets were not scored.
        vectors: One number per scored datum: those of `UNCERTAINTIES`, ``nll``, ``loss`` (0/1 or squared error) and for
            regression ``pit`` (one per output); ``answer`` and ``truth``, the class numbers or values, where each
            example has one target; and ``x, low, high`` where the input is a single number.
        seconds: The time spent in predicting.
        num_rows: How many inputs there were.
        shapes: The shape of one example's inputs.
        num_classes: The number of classes; None for numbers.
    """

    metrics: Metrics | None
    vectors: Vectors
    seconds: float
    num_rows: int
    shapes: list[tuple[int, ...]]
    num_classes: int | None = None


def collect(
    predictor: RescaledDraws,
    data: Data | Tensor,
    what: str,
    like: EvaluationPass | None = None,
    *,
    labelled: bool = True,
    watch: Callable[[Any, Vectors], None] | None = None,
) -> EvaluationPass:
    """Predict all of `data` batch by batch.

    Args:
        predictor: How to predict.
        data: What to predict; without `labelled` its targets are ignored and may be missing.
        what: The data's name, with which an error begins.
        like: The pass over the original data, if this is shifted or out-of-distribution data.
        labelled: Whether to score the targets.
        watch: Is called with the inputs and the vectors of every batch.
    """
    kept: dict[str, list[Tensor]] = {}
    sums: Metrics | None = None
    clock = torch.zeros(2, dtype=torch.float64)
    shapes: list[tuple[int, ...]] = []
    num_classes: int | None = None
    for inputs, targets in _batches(data, predictor.draws.batch_size, what):
        shapes = shapes or _shapes(inputs)
        start = time.perf_counter()
        prediction = _predict(predictor, inputs, what, like)
        clock += torch.tensor([time.perf_counter() - start, batches.num_rows(inputs)], dtype=torch.float64)
        if labelled and targets is None:
            raise InputError(f"{what} has no targets to score against: give (inputs, targets) or a loader of them.")
        if isinstance(prediction, ClassPrediction):
            num_classes = prediction.log_probs.shape[-1]
        if labelled:
            sums = sums or _new_metrics(isinstance(prediction, ClassPrediction))
            vectors = _scored(predictor, prediction, targets, inputs, sums)
            if watch is not None:
                watch(inputs, vectors)
        else:
            vectors = _uncertainties(prediction)
        for name, vector in vectors.items():
            kept.setdefault(name, []).append(vector)
    distributed.sum_([clock])
    vectors = _gathered(kept)
    if not vectors:
        raise InputError(f"{what} is empty, or every target is to be ignored: give at least one example.")
    summed = _summed(sums, vectors) if labelled else None
    return EvaluationPass(summed, vectors, float(clock[0]), int(clock[1]), shapes, num_classes)


def _batches(data: Any, batch_size: int, what: str) -> Iterator[tuple[Any, Any]]:
    """Yield this process's inputs and targets; a batch of which it has no row is left out."""
    if batches.is_empty(data):
        raise InputError(f"{what} is empty: give at least one example.")
    alone = batches.bare_inputs(data, what)  # as an out-of-distribution set may be
    if alone is not None:
        data = [(part,) for part in alone.split(batch_size)]
    source = Source(data, batch_size=batch_size, must_count=False)
    yield from ((batch.inputs, batch.targets) for batch in source.epoch() if batches.num_rows(batch.inputs) > 0)


def _predict(predictor: RescaledDraws, inputs: Any, what: str, like: EvaluationPass | None) -> Prediction:
    """Predict; if the network fails on inputs of another shape than the evaluated data, raise an error that says so."""
    try:
        return predictor.predict(inputs)
    except NonFiniteError as error:
        raise NonFiniteError(f"{what} cannot be scored. {error}") from error
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        shapes = _shapes(inputs)
        meant = isinstance(error, DubitoError) and error.__cause__ is None  # not what the network itself raised
        if like is None or shapes == like.shapes or meant:
            raise
        raise InputError(
            f"{what} has inputs of shape {_show(shapes)}, but the evaluated data has {_show(like.shapes)}, and the "
            "network cannot take both: bring them to the same shape."
        ) from error


def _shapes(inputs: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape[1:]) for leaf in batches.leaves(inputs)]


def _show(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(map(str, shapes))


def _scored(predictor: RescaledDraws, prediction: Prediction, targets: Tensor, inputs: Any, sums: Metrics) -> Vectors:
    """Add one batch to the sums and return its vectors."""
    if isinstance(prediction, ClassPrediction) and isinstance(sums, metrics.ClassificationMetrics):
        return _scored_classes(prediction, targets, predictor.draws.posterior.likelihood, sums)
    if isinstance(prediction, RegressionPrediction) and isinstance(sums, metrics.RegressionMetrics):
        truth = predictor.scaled(prediction.checked_targets(targets))
        return _scored_numbers(prediction, truth, inputs, sums)
    raise InputError(f"A {type(prediction).__name__} cannot be scored together with those before it.")


def _scored_classes(
    prediction: ClassPrediction, targets: Tensor, likelihood: Likelihood, sums: metrics.ClassificationMetrics
) -> Vectors:
    given = prediction.checked_targets(targets)
    labels, counted = likelihood.aligned(given), likelihood.observed(given)
    kept = torch.ones_like(labels, dtype=torch.bool) if counted is None else counted
    log_probs = prediction.log_probs[kept]
    if len(log_probs) == 0:  # a batch of nothing but padding
        return {}
    sums.update(log_probs, labels[kept])
    uncertainties = {name: value[kept.flatten()] for name, value in _uncertainties(prediction).items()}
    found = log_probs.exp().argmax(dim=-1)
    nll = -log_probs.gather(-1, labels[kept].long().unsqueeze(-1)).squeeze(-1)
    vectors = {**uncertainties, "nll": nll, "loss": found != labels[kept]}
    return vectors | {"answer": found, "truth": labels[kept]} if kept.ndim == 1 and bool(kept.all()) else vectors


def _scored_numbers(
    prediction: RegressionPrediction, truth: Tensor, inputs: Any, sums: metrics.RegressionMetrics
) -> Vectors:
    sums.update_prediction(prediction, truth)
    vectors = {
        **_uncertainties(prediction),
        "nll": -prediction.to(torch.float64).log_prob_each(truth).mean(dim=-1),
        "loss": (prediction.mean - truth).square().mean(dim=-1),
        "pit": prediction.to(torch.float64).pit(truth).flatten(),
    }
    if truth.shape[1] == 1:
        vectors |= {"answer": prediction.mean[:, 0], "truth": truth[:, 0]}
        if isinstance(inputs, Tensor) and inputs[0].numel() == 1:
            low, high = prediction.interval(BAND_LEVEL)
            vectors |= {"x": inputs.cpu().double().flatten(), "low": low.flatten(), "high": high.flatten()}
    return vectors


def _uncertainties(prediction: Prediction) -> Vectors:
    """Return the uncertainties of `UNCERTAINTIES`: one number per position, or one per datum of a regression.

    Several outputs of a regression are taken together by their mean variance.
    """
    if isinstance(prediction, ClassPrediction):
        # In float64, where 1 - p of a float32 probability is exact and makes no ties.
        found = {
            "max-probability": 1 - prediction.confidence.double().clamp(max=1),
            "entropy": prediction.entropy,
            "epistemic": prediction.epistemic,
        }
        return {name: value.flatten() for name, value in found.items()}
    assert isinstance(prediction, RegressionPrediction)
    return {"stddev": prediction.variance.mean(dim=-1).sqrt(), "epistemic": prediction.epistemic.mean(dim=-1).sqrt()}


def _new_metrics(classes: bool) -> Metrics:
    return metrics.ClassificationMetrics() if classes else metrics.RegressionMetrics()


def _summed(sums: Metrics | None, vectors: Vectors) -> Metrics:
    """Return the accumulator of all processes together, also in a process that had no row."""
    mine = sums or _new_metrics("entropy" in vectors)
    state = mine.state()
    distributed.sum_([state])
    return type(mine).from_state(state)


def _gathered(kept: dict[str, list[Tensor]]) -> Vectors:
    """Concatenate the vectors over batches and over processes, in the order of their ranks."""
    joined = {name: torch.cat(kept.get(name, [torch.zeros(0)])) for name in _VECTORS}
    if distributed.is_active():
        joined = {name: _over_processes(vector.double()) for name, vector in joined.items()}
    return {name: vector for name, vector in joined.items() if len(vector)}


def _over_processes(vector: Tensor) -> Tensor:
    lengths = torch.zeros(distributed.world_size(), dtype=torch.float64)
    lengths[distributed.rank()] = len(vector)
    distributed.sum_([lengths])
    start = int(lengths[: distributed.rank()].sum())
    whole = torch.zeros(int(lengths.sum()), dtype=torch.float64)
    whole[start : start + len(vector)] = vector
    distributed.sum_([whole])  # every place is zero in all processes but one, so the sum is exact
    return whole
