"""Predict with a variational posterior: noise on outputs, and a number of samples that reaches a given error."""

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

# The number of samples for the first estimate of the error, and the default of the largest number.
PILOT, MOST = 16, 1024


def local_predictor(module: VariationalModule, likelihood: Likelihood, num_samples: int) -> Predictor:
    """Return a predictor with noise on the outputs of each layer; the samples of different rows are independent.

    The moments of a layer with the same inputs in every sample, such as the first layer, are computed once. In a dense
    network each row has exactly the distribution of weight sampling; in a convolution, positions are sampled
    independently, as in training.

    Args:
        module: A converted network with ``estimator="local"``, not used elsewhere.
        likelihood: The likelihood.
        num_samples: The number of samples.
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
    """Predict with as many samples as a given standard error needs.

    Args:
        standard_error: The error of every class probability or, in regression, of every mean.
        most: The largest number of samples, which is used even if the error is still larger.
        predict: Maps a number of samples to a prediction.
    """
    check("standard_error", Positive, standard_error)
    limit = MOST if most is None else most
    count = min(PILOT, limit)
    while True:
        prediction = predict(count)
        found = largest_error(prediction)
        if found <= standard_error or count >= limit:
            return prediction
        # the error falls with the root of the number; a little more, because it is itself an estimate
        count = min(max(math.ceil(1.1 * count * (found / standard_error) ** 2), count + 1), limit)


def largest_error(prediction: Prediction) -> float:
    """Return the largest standard error of a class probability or, in regression, of a mean."""
    draws = _draws(prediction)
    return float(draws.std(0).max()) / math.sqrt(len(draws)) if len(draws) > 1 else math.inf


def _draws(prediction: Prediction) -> Tensor:
    if isinstance(prediction, RegressionPrediction):
        return prediction.means
    assert isinstance(prediction, ClassPrediction)
    assert prediction.samples is not None
    return prediction.samples.exp()
