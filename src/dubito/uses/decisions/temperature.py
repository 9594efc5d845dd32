r"""Calibrate any posterior by temperature scaling: one number, fitted on held-out data.

Classes are tempered after the samples were pooled, $\bar p_c^{1/T} / \sum_k \bar p_k^{1/T}$ (Guo et al. 2017,
https://arxiv.org/abs/1706.04599; pooled first: Rahaman & Thiery 2021, https://arxiv.org/abs/2007.08792), so the order
of the classes stays. For numbers the standard deviation around the mean is multiplied by T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from dubito.beliefs.likelihoods import Likelihood
from dubito.beliefs.prediction import ClassPrediction, DistributionPrediction, Prediction, RegressionPrediction
from dubito.core.arguments import checked_arguments
from dubito.core.batches import Data
from dubito.core.constraints import Count, Positive
from dubito.core.errors import UnsupportedError
from dubito.fitting.output_noise import penalized_temperature
from dubito.fitting.posterior import Posterior, Predictor
from dubito.fitting.traceable import Traceable
from dubito.fitting.wrapped_posterior import WrappedPosterior
from dubito.uses.fixed_draws import FixedDraws


@checked_arguments
def temper(
    posterior: Posterior,
    calibration: Data,
    *,
    num_samples: Count | None = None,
    generator: torch.Generator | None = None,
) -> TemperedPosterior:
    """Return the posterior at the temperature that maximizes the likelihood of labelled calibration data.

    For classes a prior on log T keeps it finite where no calibration datum is answered wrongly
    (`dubito.fitting.output_noise.penalized_temperature`). For a `MAP` posterior this finds the same temperature as
    ``MAP(temperature="validation")``.

    Args:
        posterior: Any posterior; it stays as it is.
        calibration: Labelled data that was not trained on.
        num_samples: How many samples a prediction draws.
        generator: The source of randomness; by default the same call gives the same numbers.
    """
    prediction, targets = FixedDraws(posterior, num_samples, generator).labelled(calibration, by_position=True)
    wide = prediction.to(torch.float64)

    def loss(log_temperature: float) -> float:
        if isinstance(wide, ClassPrediction):
            log_probs = (wide.log_probs / math.exp(log_temperature)).log_softmax(dim=-1)
            log_prob = posterior.likelihood.log_scores(replace(wide, log_probs=log_probs), targets)
        else:
            log_prob = tempered(wide, math.exp(log_temperature)).log_prob(targets)
        return -float(log_prob.sum())

    return TemperedPosterior(posterior, penalized_temperature(loss, isinstance(wide, ClassPrediction)))


@checked_arguments
def tempered(prediction: Prediction, temperature: Positive) -> Prediction:
    """Return a less certain (temperature above 1) or more certain prediction, with the same mode or mean.

    >>> tempered(ClassPrediction.from_logits(torch.tensor([[2.0, 0.0]])), 2.0).log_probs.diff().item()
    -1.0
    """
    if isinstance(prediction, DistributionPrediction):
        raise UnsupportedError(
            f"Only classes and Gaussian predictions can be tempered, not {prediction.distribution!r}."
        )
    if isinstance(prediction, RegressionPrediction):
        mean, square = prediction.mean, temperature**2
        both = (prediction.covariance, prediction.noise_covariance)
        covariances = [None if part is None else part * square for part in both]
        noise, function = (value * square for value in (prediction.noise_variance, prediction.function_variance))
        return RegressionPrediction(mean + temperature * (prediction.means - mean), noise, function, *covariances)
    assert isinstance(prediction, ClassPrediction)
    log_probs = (prediction.log_probs / temperature).log_softmax(dim=-1)
    if prediction.samples is not None:
        return ClassPrediction.from_logit_samples(prediction.samples / temperature, log_probs)
    total = torch.special.entr(log_probs.exp()).sum(dim=-1)
    share = prediction.epistemic / prediction.entropy.clamp_min(torch.finfo(total.dtype).tiny)
    return ClassPrediction(log_probs, total * (1 - share), total * share)  # the samples were too many to keep


def _tempering(predict: Predictor, temperature: float) -> Predictor:
    return lambda inputs: tempered(predict(inputs), temperature)


class TemperedPosterior(WrappedPosterior):
    """A posterior whose predictions are tempered; weights, prior and evidence are those of the posterior inside.

    Args:
        posterior: The posterior inside.
        temperature: Above 1 makes predictions less sure.
    """

    family = "Tempered"
    passes_options = True

    @checked_arguments
    def __init__(self, posterior: Posterior, temperature: float) -> None:
        super().__init__(posterior)
        self.temperature = temperature

    def predictor(self, num_samples: int, generator: torch.Generator, **options: Any) -> Predictor:
        """Return the tempered predictive; options are those of the posterior inside."""
        return _tempering(self.posterior.predictor(num_samples, generator, **options), self.temperature)

    def forms(self, example: Any, num_samples: int, generator: torch.Generator, **options: Any) -> Iterator[Traceable]:
        """Yield the tempered forms of the posterior inside."""
        for form in self.posterior.forms(example, num_samples, generator, **options):
            yield form._replace(predict=_tempering(form.predict, self.temperature))

    def _updated(self, data: Data, **options: Any) -> Posterior:
        """Raise an error: the temperature was fitted for the present weights."""
        raise UnsupportedError("A temperature belongs to one posterior: update `.posterior`, then temper the result.")

    def state(self) -> dict[str, Any]:
        """Return the temperature and the state of the posterior inside."""
        return {"temperature": self.temperature, **self.inside_state()}

    @classmethod
    def from_state(cls, model: nn.Module, likelihood: Likelihood, recipe: Any, num_data: int, state: Any) -> Self:
        """Undo `state`."""
        return cls(cls.inside_of(model, likelihood, recipe, num_data, state), state["temperature"])
