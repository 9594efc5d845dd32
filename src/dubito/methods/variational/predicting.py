"""Predict with a variational posterior: noise on outputs, samples up to a standard error, moments for exports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.core import params
from dubito.core.constraints import Positive, check
from dubito.core.errors import UnsupportedError
from dubito.core.tracing import rows_to_record
from dubito.curvature import links
from dubito.fitting.posterior import Predictor
from dubito.fitting.traceable import Traceable
from dubito.methods.variational.layer import Memory, compute_moments
from dubito.methods.variational.module import VariationalModule
from dubito.networks.moments import propagated

if TYPE_CHECKING:
    from dubito.methods.variational.posterior import VariationalPosterior


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


# Points at which Gaussian logits are averaged, and weight samples of the prediction that the result is compared with.
POINTS, REFERENCE = 64, 512
APPROXIMATIONS = (
    "Activations are treated as independent Gaussians, so correlations between units are lost.",
    f"Class probabilities are averaged over {POINTS} fixed points of the Gaussian logits.",
)


def moment_forms(posterior: VariationalPosterior, example: Any) -> Iterator[Traceable]:
    """Yield the form, or nothing if a layer has no rule for moments."""
    few = rows_to_record(example)
    _, variances = posterior.marginals()
    random = {name: variances[name] for name in posterior.selection.names}
    try:
        moments = propagated(posterior.model, random, few)
        moments(few)
    except UnsupportedError:
        return
    noise, link = FixedPoints(), replace(links.PROBIT, log_probs=None)

    def predict(inputs: Any) -> Prediction:
        outputs, variance = moments(inputs)
        return links.predict(posterior.likelihood, outputs, posterior.likelihood.canonical(variance), noise, link)

    notes = APPROXIMATIONS if links.is_classification(posterior.likelihood) else APPROXIMATIONS[:1]
    yield Traceable(predict, "moments propagated through the layers", notes, REFERENCE)


class FixedPoints(links.Noise):
    """Evenly spread standard normal points (a Sobol sequence), which average better than random ones."""

    def __init__(self) -> None:
        super().__init__(POINTS, torch.Generator())

    def like(self, outputs: Tensor) -> Tensor:
        """Return the points ``[S, 1, ...]`` for outputs ``[B, ...]``."""
        shape = outputs.shape[1:]
        if shape not in self._drawn:
            engine = torch.quasirandom.SobolEngine(outputs[0].numel(), scramble=True, seed=0)
            points = engine.draw(POINTS, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
            self._drawn[shape] = torch.special.ndtri(points).reshape(POINTS, 1, *shape)
        return self._drawn[shape].to(outputs)
