"""Measure, at the end of a fit, what a diagnosis needs: how well posterior and network predict a few examples."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from dubito.beliefs.prediction import ClassPrediction
from dubito.core import batches, distributed, limits, params
from dubito.core.batches import Source
from dubito.core.errors import DubitoError
from dubito.core.limits import numbers
from dubito.fitting.neighbours import likeness_of_neighbours

if TYPE_CHECKING:
    from dubito.fitting.automatic import Found
    from dubito.fitting.posterior import Posterior

# The numbers of training examples, of unfamiliar inputs, of validation examples and of posterior samples looked at.
MOST_ROWS, MOST_FAR, MOST_VALIDATION, MOST_SAMPLES = 64, 16, 256, 16
# How many standard deviations the unfamiliar inputs have, in units of those of the data.
FAR = 5.0
# Means of a feature differ by more than chance if by this many standard errors; there may be thousands of features.
NOT_CHANCE = 6.0


@dataclass(frozen=True)
class ExampleScores:
    """How well a posterior predicts some examples.

    Attributes:
        num_rows: The number of examples.
        log_score: The mean log-probability of the targets.
        accuracy: The fraction of correct labels; None for a regression.
        confidence: The mean probability of the predicted label; None for a regression.
        squared_z: The mean squared residual in units of the predictive standard deviation, 1 if it is calibrated; None
            for classes.
        uneven: By what factor these residuals (root mean square) differ between the outputs of a regression; None if
            there is one output.
        error: The standard error of the log score.
    """

    num_rows: int
    log_score: float
    accuracy: float | None = None
    confidence: float | None = None
    squared_z: float | None = None
    uneven: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class FitRecord:
    """What was measured at the end of a fit.

    Attributes:
        training: The posterior on training examples.
        centre: The network at the posterior's centre on the same examples.
        constant: The mean log score of the best constant prediction on them; 0 (classes) or infinite (numbers) if all
            targets of the data are equal.
        validation: The posterior on validation examples; None if there are none.
        epistemic: The mean epistemic uncertainty of the training examples: nats, or the share of the variance.
        epistemic_far: The same for noise of five times the spread of the inputs; None if inputs are not numbers.
        spread: The standard deviation over the mean of the total uncertainty, over all these inputs.
        remaining_gain: What one more training step would gain; None if it was not measured.
        epochs: The number of training epochs; None if the fit trains nothing.
        held_out: The number of held-out examples on which it was chosen; None if it was not.
        held_out_gain: By how many nats per held-out example the plain network beat the best constant prediction.
        held_out_error: The standard error of that gain.
        held_out_score: The mean log score of the plain network on these examples.
        shift: By how many standard deviations the mean of a feature differs between training and validation data, if
            that is not by chance; the largest of all features. None if it was not measured, or is chance.
        input_size: The root mean square of the inputs over examples, the largest of all features; None if inputs are
            not one tensor of numbers.
        target_size: The same for targets that are numbers.
        tail_gain: By how many nats per held-out example a Student-t distribution fits the errors of a regression better
            than a normal one.
        likeness: By how many standard deviations the targets of neighbouring inputs are more alike than by chance; None
            if held-out or validation examples tell more, or if it cannot be told.
    """

    training: ExampleScores
    centre: ExampleScores
    constant: float
    validation: ExampleScores | None
    epistemic: float
    epistemic_far: float | None
    spread: float
    remaining_gain: float | None = None
    epochs: int | None = None
    held_out: int | None = None
    held_out_gain: float | None = None
    held_out_error: float | None = None
    held_out_score: float | None = None
    shift: float | None = None
    input_size: float | None = None
    target_size: float | None = None
    likeness: float | None = None
    tail_gain: float | None = None

    @property
    def complexity(self) -> float:
        r"""What the posterior gains on its training examples by being fitted to them, in nats per example.

        It is the effective number of weights over that of examples, $\frac1N \sum_n \operatorname{tr} \Lambda_n V_n$
        with the output Hessian Λ and the variance V of the outputs: twice the mutual information of classes, and for
        numbers the epistemic over the aleatoric variance.
        """
        if self.training.accuracy is not None:
            return 2 * self.epistemic
        return self.epistemic / max(1 - self.epistemic, 1e-6)

    @property
    def possible_gain(self) -> float:
        """`remaining_gain`, 0 if it was not measured; of classes at most what is missing to perfect predictions.

        `remaining_gain` is that of a quadratic approximation, which can exceed it.
        """
        gain = self.remaining_gain or 0.0
        return gain if self.centre.accuracy is None else min(gain, -self.centre.log_score)

    def with_held_out(self, found: Found) -> FitRecord:
        """Return the record with what a search saw of held-out examples."""
        return dataclasses.replace(
            self,
            held_out=found.num_rows,
            held_out_gain=found.gain,
            held_out_error=found.gain_error,
            held_out_score=None if found.gain is None else found.score,
            tail_gain=found.tail_gain,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, from which `from_dict` makes the record again."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> FitRecord:
        """Undo `to_dict`."""
        nested = {name: values[name] and ExampleScores(**values[name]) for name in ("training", "centre", "validation")}
        return cls(**{**values, **nested})


@torch.no_grad()
def measure(
    posterior: Posterior,
    source: Source,
    validation: Source | None,
    *,
    epochs: int | None = None,
    found: Found | None = None,
) -> FitRecord:
    """Return the record of a fit."""
    likelihood = posterior.likelihood
    inputs, targets = _few(posterior, *_rows(source, MOST_ROWS))
    near, far = _predict_near_and_far(posterior, inputs)
    centre = likelihood.predict(params.call(posterior.model, inputs))
    held_out = shift = None
    if validation is not None:
        rows = _few(posterior, *_rows(validation, MOST_VALIDATION))
        held_out = _scores(likelihood, _predict(posterior, rows[0]), rows[1])
        if source.pair is not None and validation.pair is not None and not distributed.is_active():
            shift = shift_between(inputs, rows[0])
    totals = torch.cat([_total(part).double() for part in (near, far) if part is not None])
    record = FitRecord(
        training=_scores(likelihood, near, targets),
        centre=_scores(likelihood, centre, targets),
        constant=_constant(likelihood, source, targets),
        validation=held_out,
        epistemic=_epistemic(near),
        epistemic_far=None if far is None else _epistemic(far),
        spread=float(totals.std(correction=0) / totals.mean().clamp_min(1e-30)),
        remaining_gain=posterior.remaining_gain,
        epochs=epochs,
        shift=shift,
        input_size=_size(inputs),
        target_size=None if isinstance(likelihood, Categorical | Bernoulli) else _size(targets),
        likeness=_likeness(likelihood, source) if held_out is None and found is None else None,
    )
    return record if found is None else record.with_held_out(found)


def _rows(source: Source, most: int) -> tuple[Any, Tensor]:
    """Return some rows: of a pair of tensors spread over it, of other data the first, which are cheap to get."""
    if source.pair is not None and not distributed.is_active():
        parts = list(source.spread(most))
        return batches.concatenate([part.inputs for part in parts]), torch.cat([part.targets for part in parts])
    first = source.first()  # the same in all processes
    return batches.take((first.inputs, first.targets), slice(0, most))


def _likeness(likelihood: Likelihood, source: Source) -> float | None:
    """Return how much more alike the targets of neighbours are than by chance; None for other data than two tensors."""
    if source.pair is None or distributed.is_active() or not isinstance(likelihood, Categorical | Bernoulli | Gaussian):
        return None
    inputs, targets = (batches.as_tensors(part) for part in source.pair)
    if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor) and inputs.is_floating_point()):
        return None
    classes = isinstance(likelihood, Categorical)
    if inputs.ndim < 2 or targets.ndim > (1 if classes else 2):
        return None
    return likeness_of_neighbours(inputs, targets, classes=classes)


def _few(posterior: Posterior, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
    """Return as many of the rows as have predictions of limited size, at least two."""
    # BatchNorm without running statistics takes no single row
    size = params.call_on_few(posterior.model, inputs, rows=2)[0].numel()
    return batches.take((inputs, targets), slice(0, max(2, numbers(limits.current().chunk) // size)))


def _predict(posterior: Posterior, inputs: Any) -> Any:
    return posterior.predict(inputs, num_samples=min(posterior.default_samples, MOST_SAMPLES))


def _predict_near_and_far(posterior: Posterior, inputs: Any) -> tuple[Any, Any]:
    """Predict the inputs and noise far from them in one call.

    The second is None if the inputs are not one tensor of numbers, or the network cannot take the noise.
    """
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        middle = inputs.mean(0)
        scale = (inputs - middle).square_().mean(0).sqrt()  # `std` over the first axis takes ten times as long
        shape = (min(len(inputs), MOST_FAR), *inputs.shape[1:])
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(inputs)
        try:
            both = _predict(posterior, torch.cat([inputs, middle + FAR * scale * noise]))
        except (DubitoError, RuntimeError, ValueError, LookupError):  # the network may not accept noise
            return _predict(posterior, inputs), None
        return both[: len(inputs)], both[len(inputs) :]
    return _predict(posterior, inputs), None


def _scores(likelihood: Likelihood, prediction: Any, targets: Tensor) -> ExampleScores:
    counted, targets = likelihood.observed(targets), likelihood.aligned(targets)
    logs = likelihood.log_scores(prediction, targets).double()
    log_score, error = float(logs.mean()), float(logs.std() / math.sqrt(len(logs))) if len(logs) > 1 else None
    if isinstance(prediction, ClassPrediction):
        labels = targets.reshape(prediction.mode.shape)
        right, sure = (prediction.mode == labels).double(), prediction.confidence.double()
        if counted is not None:
            right, sure = right[counted], sure[counted]
        return ExampleScores(len(prediction), log_score, float(right.mean()), float(sure.mean()), error=error)
    z = (prediction.mean - targets.reshape(prediction.mean.shape)) / prediction.stddev
    squares = z.double().square().reshape(len(z), -1).mean(0)
    uneven = float((squares.max() / squares.min().clamp_min(1e-12)).sqrt()) if len(squares) > 1 else None
    return ExampleScores(len(prediction), log_score, squared_z=float(squares.mean()), uneven=uneven, error=error)


def shift_between(first: Any, second: Any) -> float | None:
    """Return by how many standard deviations the means of a feature differ, the largest that is not chance; else None.

    >>> x = torch.linspace(-1, 1, 100)[:, None]
    >>> shift_between(x, x.flip(0)) is None, round(shift_between(x, x + 1), 2)
    (True, 1.71)
    """
    if not (isinstance(first, Tensor) and first.is_floating_point() and first.ndim > 1 and isinstance(second, Tensor)):
        return None
    if first.shape[1:] != second.shape[1:] or not first.numel() or not second.numel():  # sequences of another length
        return None
    one, other = (_thinned(part).double().flatten(1) for part in (first, second))
    gaps = (one.mean(0) - other.mean(0)).abs()
    variances = [part.var(0, correction=0) for part in (one, other)]
    errors = (variances[0] / len(one) + variances[1] / len(other)).sqrt()
    # a feature without variance that differs at all differs by the limit
    sizes = (gaps / ((variances[0] + variances[1]) / 2).sqrt().clamp_min(1e-12)).clamp_max(1e3)
    sizes = sizes.where(gaps > NOT_CHANCE * errors, 0.0)
    largest = float(sizes.max())
    return largest if largest > 0 else None


def _thinned(rows: Tensor) -> Tensor:
    """Return every so many of the rows, as many as have a limited size, at least two."""
    most = max(2, numbers(limits.current().chunk) // rows[0].numel())
    return rows[:: math.ceil(len(rows) / most)]


def _size(values: Any) -> float | None:
    """Return the root mean square over rows, the largest of all columns; None if there are no numbers."""
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        return None
    return float(values.double().reshape(len(values), -1).square().mean(0).max().sqrt())


def _constant(likelihood: Likelihood, source: Source, targets: Tensor) -> float:
    """Return the best constant score of some targets; if all targets of data in memory are equal, its limit."""
    whole = None if source.pair is None else batches.as_tensors(source.pair[1])
    if isinstance(whole, Tensor) and len(whole) > 1 and bool((whole == whole[:1]).all()):
        return 0.0 if isinstance(likelihood, Categorical | Bernoulli) else math.inf
    return constant_score(likelihood, targets)


def constant_score(likelihood: Likelihood, targets: Tensor) -> float:
    """Return the mean log score of one prediction for all examples, the best one."""
    if isinstance(likelihood, Categorical):
        counted, aligned = likelihood.observed(targets), likelihood.aligned(targets)
        labels = aligned.flatten() if counted is None else aligned[counted]
        counts = labels.unique(return_counts=True)[1].double()
        if len(counts) < 2:  # the first rows of sorted data
            return -math.inf
        return float((counts * (counts / counts.sum()).log()).sum() / len(targets))
    values = targets.double().reshape(len(targets), -1)
    if isinstance(likelihood, Bernoulli):
        p = values.mean(0).clamp(1e-6, 1 - 1e-6)
        return float((p * p.log() + (1 - p) * (1 - p).log()).sum())
    variance = values.var(0, correction=0).clamp_min(1e-12)
    return float(-0.5 * ((2 * math.pi * variance).log() + 1).sum())


def _epistemic(prediction: Any) -> float:
    """Return the mean mutual information, or the share of the variance that is epistemic."""
    if isinstance(prediction, ClassPrediction):
        return float(prediction.epistemic.double().mean())
    share = prediction.epistemic / prediction.stddev.square()
    return float(share.double().mean())


def _total(prediction: Any) -> Tensor:
    return (prediction.entropy if isinstance(prediction, ClassPrediction) else prediction.stddev).flatten()
