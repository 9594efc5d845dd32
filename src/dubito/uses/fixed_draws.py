"""Predict with fixed random draws, so that a threshold fitted on one data set can be used on another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction, Prediction
from dubito.core import batches
from dubito.core.batches import Batch, Data, Source
from dubito.core.errors import InputError
from dubito.core.randomness import default_generator
from dubito.core.tracing import is_tracing
from dubito.fitting.posterior import Posterior


def inputs_of(posterior: Posterior, data: Data | Tensor, what: str) -> Any:
    """Return the inputs of `data` in its order; a tensor is returned as it is, targets are left out."""
    return batches.concatenate(input_groups(posterior, data, what))


def input_groups(posterior: Posterior, data: Data | Tensor, what: str) -> list[Any]:
    """Return the inputs of `data` in its order, in as few parts as the shapes of their rows allow."""
    alone = batches.bare_inputs(data, f"The {what}")
    if alone is not None:
        return [alone]
    return [batches.concatenate([batch.inputs for batch in group]) for group in _groups(posterior, data, what)]


def labelled_groups(posterior: Posterior, data: Data, what: str) -> list[tuple[Any, Tensor]]:
    """Return inputs and targets in as few parts as the shapes of their rows allow."""
    if batches.bare_inputs(data, f"The {what}") is not None:
        raise InputError(f"The {what} has no targets: give (inputs, targets) or a loader of them.")
    return [
        (batches.concatenate([part.inputs for part in group]), torch.cat([part.targets for part in group]))
        for group in _groups(posterior, data, what)
    ]


class FixedDraws:
    """Predict with the same posterior samples at every call.

    A threshold belongs to the samples it was fitted with, and batches that are predicted one by one give what one call
    for all of them would.

    Args:
        posterior: Any posterior.
        num_samples: How many samples a prediction draws; the posterior's own default if not given.
        generator: The source of randomness, which is read and not advanced; by default a fixed seed.
        batch_size: How many rows are predicted at a time.
    """

    def __init__(
        self, posterior: Posterior, num_samples: int | None, generator: torch.Generator | None, batch_size: int = 1024
    ) -> None:
        self.posterior, self.num_samples, self.batch_size = posterior, num_samples, batch_size
        self.state = default_generator(generator).clone_state()

    def predict(self, x: Any) -> Prediction:
        """Return the prediction for what `posterior.predict` takes."""
        draws = self.state.clone_state()
        return self.posterior.predict(x, num_samples=self.num_samples, generator=draws, batch_size=self.batch_size)

    def to_tree(self) -> dict[str, Any]:
        """Return what to save: the number of samples, and the state of the generator."""
        return {"num_samples": self.num_samples, "device": str(self.state.device), "state": self.state.get_state()}

    @classmethod
    def from_tree(cls, posterior: Posterior, tree: Mapping[str, Any]) -> FixedDraws:
        """Undo `to_tree`."""
        return cls(posterior, tree["num_samples"], restored_generator(tree))

    def labelled(self, data: Data, *, by_position: bool = False) -> tuple[Prediction, Tensor]:
        """Return the prediction for all of the calibration data, and its targets in the same order.

        Args:
            data: The calibration data.
            by_position: Whether each position of an input (a token, a pixel) that has a label counts as one datum.
        """
        predictions, labels = [], []
        for group in _groups(self.posterior, data, "calibration data"):
            if group[0].targets is None:
                raise InputError("The calibration data has no targets: give (inputs, targets) or a loader of them.")
            prediction = self.predict(batches.concatenate([part.inputs for part in group]))
            targets = torch.cat([part.targets for part in group])
            if by_position and isinstance(prediction, ClassPrediction) and prediction.log_probs.ndim > 2:
                kept = self.posterior.likelihood.observed(targets)
                prediction = prediction.at_positions(kept)
                targets = self.posterior.likelihood.aligned(targets)[kept]
            predictions.append(prediction)
            labels.append(targets)
        return predictions[0].cat(predictions) if len(predictions) > 1 else predictions[0], torch.cat(labels)


def restored_generator(tree: Mapping[str, Any]) -> torch.Generator:
    """Return a generator on a device and in a state that were saved."""
    generator = torch.Generator(tree["device"])
    generator.set_state(tree["state"].cpu())
    return generator


def of_classes(prediction: Prediction, what: str) -> ClassPrediction:
    """Return the prediction if it is one of classes; otherwise raise an error that names `what`."""
    if not isinstance(prediction, ClassPrediction):
        raise InputError(f"{what} is for classification, which this posterior does not do.")
    return prediction


def rank_for(level: float, num_data: int, what: str) -> int:
    r"""Return the rank $k = \lceil (n + 1)\,\ell \rceil$ of the order statistic that a new value exceeds rarely enough.

    For exchangeable values $P(s_{n+1} \le s_{(k)}) \ge k / (n + 1) \ge \ell$, with equality on the left where values do
    not tie.

    >>> rank_for(0.9, 99, "A coverage of 0.9")
    90
    """
    rank = math.ceil((num_data + 1) * level - 1e-9)  # 0.9 * 110 is a little above 99 in floating point
    if rank > num_data:
        needed = math.ceil(level / (1 - level) - 1e-9)
        raise InputError(f"{what} needs at least {needed} calibration data, but there are {num_data}: give more.")
    return rank


def check_scores(scores: Tensor, what: str) -> Tensor:
    """Return the scores in float64, or raise where one of them is not a number."""
    if not is_tracing() and bool(scores.isnan().any()):
        raise InputError(f"The posterior's {what} is NaN for some inputs: look at its weights and at those inputs.")
    return scores.double()


def _batches(posterior: Posterior, data: Any, what: str) -> list[Batch]:
    if batches.is_empty(data):
        raise InputError(f"The {what} is empty: give at least one example.")
    place: dict[str, Any] = {"device": posterior.device, "dtype": posterior.dtype}
    source = Source(data, batch_size=1024, must_count=False, shard=False, **place)
    found = [batch for batch in source.replay() if batch.num_rows]
    if not found:
        raise InputError(f"The {what} is empty: give at least one example.")
    return found


def _groups(posterior: Posterior, data: Any, what: str) -> list[list[Batch]]:
    """Return the batches in groups of neighbours whose rows have the same shapes."""

    def shapes(batch: Batch) -> list[tuple[int, ...]]:
        return [tuple(leaf.shape[1:]) for leaf in batches.leaves((batch.inputs, batch.targets))]

    return [list(group) for _, group in itertools.groupby(_batches(posterior, data, what), key=shapes)]
