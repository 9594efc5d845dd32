r"""Raise the uncertainty where an input lies outside of what the training rows showed.

A network says nothing about a category that it never saw, and little about numbers beyond the range that it was trained
on. Where an input has such features, it is read in several ways, and the prediction is their equal mixture:

- a category that no training row had (all of its features are zero): as each of the known levels, in their shares;
- a number outside of the range of the training rows: as it is, and moved to the nearest end of the range.

So the mean is that of the readings, and where they disagree the epistemic uncertainty grows by their disagreement:
$\operatorname{Var}[\mathbb E[y \mid \text{reading}]]$ for numbers, and the mutual information of class and reading
for classes. Inputs inside of the range are predicted as before, and for any posterior.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import ClassPrediction, DistributionPrediction, Prediction, RegressionPrediction
from dubito.core.batches import Data
from dubito.core.errors import UnsupportedError
from dubito.data.columns import CategoryColumn
from dubito.data.transform import TableTransform
from dubito.fitting.auto_explanation import AutoExplanation
from dubito.fitting.diagnosis import Diagnosis
from dubito.fitting.fit_record import FitRecord
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.traceable import Traceable
from dubito.fitting.wrapped_posterior import WrappedPosterior

P = TypeVar("P", bound=Prediction)

# In how many ways a row with an unseen category is read, and one with a number outside of its range.
UNSEEN_READINGS, OUTSIDE_READINGS = 8, 2


@dataclass(frozen=True, eq=False)
class TrainingRange:
    """What the training rows showed of each feature.

    Attributes:
        low: The smallest value of each feature ``[F]``; minus infinity where there is none.
        high: The largest.
        levels: For each category the first and the last of its features (exclusive), and the shares of its levels.
    """

    low: Tensor
    high: Tensor
    levels: tuple[tuple[int, int, Tensor], ...] = ()

    @classmethod
    def of(cls, transform: TableTransform) -> TrainingRange:
        """Return what a table's encoder learnt from the training rows."""
        ends = torch.tensor([pair for column in transform.columns for pair in column.ranges()], dtype=torch.float32)
        levels, spans = [], transform.spans()
        for column in transform.columns:
            if isinstance(column, CategoryColumn) and column.shares:
                start = spans[column.name].start
                levels.append((start, start + column.num_levels, torch.tensor(column.shares, dtype=torch.float64)))
        return cls(ends[:, 0].clone(), ends[:, 1].clone(), tuple(levels))

    def widened(self, inputs: Tensor) -> TrainingRange:
        """Return the range of the old rows and of these together."""
        return replace(self, low=self.low.minimum(inputs.amin(0)), high=self.high.maximum(inputs.amax(0)))

    def unseen(self, inputs: Tensor) -> Tensor:
        """Return for each row and category ``[B, categories]`` whether it has none of the known levels."""
        found = [inputs[:, start:stop].eq(0).all(dim=1) for start, stop, _ in self.levels]
        return torch.stack(found, dim=1) if found else inputs.new_zeros(inputs.shape[0], 0, dtype=torch.bool)

    def outside(self, inputs: Tensor) -> Tensor:
        """Return which features of each row ``[B, F]`` lie outside of the training rows."""
        low, high = self.low.to(inputs), self.high.to(inputs)
        slack = 4 * torch.finfo(inputs.dtype).eps
        return (inputs < low - slack * (1 + low.abs())) | (inputs > high + slack * (1 + high.abs()))

    def readings(self, num: int) -> Callable[[Tensor], Tensor]:
        """Return the function from rows ``[B, F]`` to several ways to read them ``[R, B, F]``."""
        places = [[self._level(place, reading, num) for place in range(len(self.levels))] for reading in range(num)]

        def read(inputs: Tensor) -> Tensor:
            unseen, found = self.unseen(inputs), []
            nearest = torch.where(self.outside(inputs), inputs.clamp(self.low.to(inputs), self.high.to(inputs)), inputs)
            for reading, chosen in enumerate(places):
                rows = nearest if (reading + 1) // 2 % 2 else inputs  # to and fro, as `_dealt` deals two readings
                if not chosen:
                    found.append(rows)
                    continue
                columns = list(rows.unbind(1))
                for place, column in enumerate(chosen):
                    columns[column] = columns[column].masked_fill(unseen[:, place], 1.0)
                found.append(torch.stack(columns, dim=1))
            return torch.stack(found)

        return read

    def _level(self, place: int, reading: int, num: int) -> int:
        """Return the feature of the level that a reading puts for an unseen category, each level by its share."""
        start, stop, shares = self.levels[place]
        turn = reading * (2 * place + 1) % num  # another order for each category, so that they mix
        level = int(torch.searchsorted(shares.cumsum(0), (turn + 0.5) / num * float(shares.sum())))
        return start + min(level, stop - start - 1)


class GuardedPosterior(WrappedPosterior):
    """A posterior that is less certain outside of the range of its training rows.

    Args:
        known: What the training rows showed.
    """

    family = "Guarded"

    def __init__(self, posterior: Posterior, known: TrainingRange) -> None:
        super().__init__(posterior)
        self.known, self.has_spread = known, posterior.has_spread

    @property
    def fit_record(self) -> FitRecord | None:
        """What was measured of the posterior inside, whose predictions are the same for training rows."""
        return self.posterior.fit_record

    @fit_record.setter
    def fit_record(self, record: FitRecord | None) -> None:
        self.posterior.fit_record = record

    @property
    def explanation(self) -> AutoExplanation | None:
        """Why `Auto` chose the posterior inside."""
        return self.posterior.explanation

    @explanation.setter
    def explanation(self, explanation: AutoExplanation | None) -> None:
        self.posterior.explanation = explanation

    def diagnose(self) -> Diagnosis:
        """Return the diagnosis of the posterior inside."""
        return self.posterior.diagnose()

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the predictive of the posterior inside, mixed over the readings of odd rows."""
        predict_enough = _with_enough_components(self.posterior.predictor(num_samples, generator, **options))

        def guarded(inputs: Any) -> Prediction:
            found = predict_enough(inputs)
            unseen = self.known.unseen(inputs).any(dim=1)
            outside = self.known.outside(inputs).any(dim=1) & ~unseen
            for odd, num in ((unseen, UNSEEN_READINGS), (outside, OUTSIDE_READINGS)):
                rows = odd.nonzero().flatten()
                if len(rows):
                    readings = list(self.known.readings(num)(inputs[rows]))
                    # the first reading of a row outside is the row itself
                    known = [found[rows]] if num == OUTSIDE_READINGS else []
                    mixed = mixture([*known, *(predict_enough(reading) for reading in readings[len(known) :])])
                    found = _replaced(found, rows, mixed)
            return found

        return guarded

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield the forms of the posterior inside, mixed over the readings of all rows: those of a usual row agree."""
        num = UNSEEN_READINGS if self.known.levels else OUTSIDE_READINGS
        read = self.known.readings(num)
        for form in self.posterior.forms(example, num_samples, generator, **options):
            predict_enough = _with_enough_components(form.predict)

            def guarded(inputs: Any, predict: Predictor = predict_enough) -> Prediction:
                return mixture([predict(reading) for reading in read(inputs).unbind(0)])

            yield form._replace(predict=guarded, form=f"{form.form}, on {num} readings of each row")

    def _updated(self, data: Data, **options: Any) -> Posterior:
        """Return the posterior inside after new data, guarded by the range of all rows."""
        inputs = data[0] if isinstance(data, tuple | list) and len(data) == 2 else None
        if not isinstance(inputs, Tensor):
            raise UnsupportedError("A guarded posterior is updated with a pair (inputs, targets): give one.")
        return GuardedPosterior(self.posterior.update(data, **options), self.known.widened(inputs))

    def state(self) -> dict[str, Any]:
        """Return the ranges and the state of the posterior inside."""
        levels = [{"start": start, "stop": stop, "shares": shares} for start, stop, shares in self.known.levels]
        return {"low": self.known.low, "high": self.known.high, "levels": levels, **self.inside_state()}

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        levels = tuple((int(each["start"]), int(each["stop"]), each["shares"].cpu()) for each in state["levels"])
        known = TrainingRange(state["low"].cpu(), state["high"].cpu(), levels)
        return cls(cls.inside_of(model, likelihood, recipe, num_data, state), known)


def _with_enough_components(predict: Predictor) -> Predictor:
    """Return a predictive whose distributions have a component for each reading."""

    def predict_enough(inputs: Any) -> Prediction:
        found = predict(inputs)
        if isinstance(found, DistributionPrediction) and len(found.means) < UNSEEN_READINGS:
            return DistributionPrediction.mixed([found] * UNSEEN_READINGS)
        return found

    return predict_enough


def mixture(readings: Sequence[Prediction]) -> Prediction:
    """Return the equal mixture of several predictions for the same rows, with the same number of samples.

    >>> means, noise, spread = torch.tensor([1.0, 5.0]), torch.tensor(4.0), torch.tensor(1.0)
    >>> low, high = (RegressionPrediction(mean.reshape(1, 1, 1), noise, spread) for mean in means)
    >>> both = mixture([low, high])
    >>> both.mean.item(), both.aleatoric.item(), both.epistemic.item()
    (3.0, 4.0, 5.0)
    """
    first = readings[0]
    if isinstance(first, DistributionPrediction):
        return _dealt(readings)  # type: ignore[arg-type]
    if isinstance(first, RegressionPrediction):
        means = torch.stack([each.means for each in readings])  # type: ignore[attr-defined]
        noise = torch.stack([each.noise_variance for each in readings]).mean(0)  # type: ignore[attr-defined]
        spread = torch.stack([each.function_variance for each in readings]).mean(0)  # type: ignore[attr-defined]
        total = spread + means.var(0, correction=0)
        return RegressionPrediction(means.mean(0), noise, total, noise_covariance=first.noise_covariance)
    assert isinstance(first, ClassPrediction)
    log_probs = torch.stack([each.log_probs for each in readings])  # type: ignore[attr-defined]
    pooled = log_probs.logsumexp(0) - torch.tensor(len(readings)).log()
    aleatoric, epistemic = (
        torch.stack([getattr(each, name) for each in readings]).mean(0) for name in ("aleatoric", "epistemic")
    )
    disagreement = _entropy(pooled) - _entropy(log_probs).mean(0)
    samples = None
    if first.samples is not None:  # sample s is one of the weights and one of the readings
        count = first.samples.shape[0]
        samples = torch.stack([readings[s % len(readings)].samples[s] for s in range(count)])  # type: ignore[index]
    return ClassPrediction(pooled, aleatoric, epistemic + disagreement.clamp_min(0), samples)


def _dealt(readings: Sequence[DistributionPrediction]) -> DistributionPrediction:
    """Return a mixture in which each component is of one reading; all readings get about the same weight."""
    first, num = readings[0], len(readings)
    weights, turn = first.weights.cpu(), torch.arange(len(first.weights))
    # by comparisons, so that a file deals equal weights in the same order: it cannot sort them so
    before = (weights > weights[:, None]) | ((weights == weights[:, None]) & (turn < turn[:, None]))
    rank = before.sum(1)
    back = rank // num % 2 == 1  # heaviest first, in turns to and fro
    reading = torch.where(back, num - 1 - rank % num, rank % num)
    fields = ("means", "noise_variance", "function_variance", "outputs")
    picked = {name: torch.stack([getattr(each, name) for each in readings])[reading, turn] for name in fields}
    return replace(first, **picked)  # type: ignore[arg-type]


def _entropy(log_probs: Tensor) -> Tensor:
    return torch.special.entr(log_probs.exp()).sum(dim=-1)


def _replaced(found: P, rows: Tensor, new: Prediction) -> P:
    """Return the prediction with those for some rows in place of its own."""

    def put(name: str, axis: int) -> Tensor | None:
        own, other = getattr(found, name), getattr(new, name)
        if own is None or other is None:  # a joint covariance of a mixture is not known
            return None
        return own.clone().index_copy_(axis, rows, other.to(own))

    return replace(found, **{name: put(name, axis) for name, axis in found._batch_axis.items()})  # type: ignore[type-var]
