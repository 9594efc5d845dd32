"""Predictions of a variational posterior: noise on outputs instead of weights, and as many samples as are needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.core import params
from dubito.core.constraints import Positive, check
from dubito.fitting.posterior import Predictor
from dubito.methods.variational.layer import Memory, compute_moments
from dubito.methods.variational.module import VariationalModule

# Samples from which the needed number is first guessed, and the most that are drawn unless told otherwise.
PILOT, MOST = 16, 1024


def local_predictor(module: VariationalModule, likelihood: Likelihood, num_samples: int) -> Predictor:
    """Return the predictive with noise on the outputs of each layer; the samples of different rows are independent.

    The moments of a layer that sees the same inputs in every sample, as the first one does, are computed once. In a
    dense network a row has exactly the distribution that weight samples give it; in a convolution positions are drawn
    independently, as in training.

    Args:
        module: A converted network, for this alone, with ``estimator="local"``.
        likelihood: The likelihood.
        num_samples: How many samples.
    """
    module.eval()
    if module.layers:
        compute_moments(module.layers)

    def predict(inputs: Any) -> Prediction:
        for layer in module.layers:
            layer.memory = Memory()
        try:
            outputs = torch.stack([params.call(module, inputs) for _ in range(num_samples)])
        finally:
            for layer in module.layers:
                layer.memory = None
        return likelihood.predict_samples(outputs)

    return predict


def predict_to(standard_error: float, most: int | None, predict: Callable[[int], Prediction]) -> Prediction:
    """Predict with so many samples that every number is known to a standard error.

    Args:
        standard_error: Of class probabilities, or of predicted means in regression, each of them.
        most: The most samples to draw; the prediction with so many is given where they are not enough.
        predict: From a number of samples to the prediction.
    """
    check("standard_error", Positive, standard_error)
    limit = MOST if most is None else most
    count = min(PILOT, limit)
    while True:
        prediction = predict(count)
        found = largest_error(prediction)
        if found <= standard_error or count >= limit:
            return prediction
        # the error falls as the root of the number; a little more, for it was estimated itself
        count = min(max(math.ceil(1.1 * count * (found / standard_error) ** 2), count + 1), limit)


def largest_error(prediction: Prediction) -> float:
    """The largest standard error of a class probability, or of a mean in regression, over all data."""
    draws = _draws(prediction)
    return float(draws.std(0).max()) / math.sqrt(len(draws)) if len(draws) > 1 else math.inf


def _draws(prediction: Prediction) -> Tensor:
    if isinstance(prediction, RegressionPrediction):
        return prediction.means
    assert isinstance(prediction, ClassPrediction)
    assert prediction.samples is not None
    return prediction.samples.exp()
