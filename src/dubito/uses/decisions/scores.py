r"""Measure the uncertainty of a prediction as one number per input: higher is less certain.

| name | classes | numbers |
|---|---|---|
| ``"max-probability"`` | $1 - \max_c \bar p_c$ | |
| ``"entropy"`` | $H[\bar p]$ | entropy of the moment-matched Gaussian |
| ``"mutual-information"`` | $H[\bar p] - \mathbb E_s H[p_s]$ | $\tfrac12 \log(1 + v / \sigma^2)$ |
| ``"variance"`` | $\sum_c \mathrm{Var}_s\, p_{sc}$ | $v$, the variance of the function |
| ``"energy"`` | $-\log \sum_c e^{f_c(x)}$ | |

Positions are averaged (without padding, where the inputs have an `attention_mask`), outputs of a regression too. The
energy (Liu et al. 2020, https://arxiv.org/abs/2010.03759) is a function of raw logits, which a mixture of predictions
does not have: that of the network at the posterior's mean is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.beliefs.likelihoods import Categorical, Gaussian
from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.core import params
from dubito.core.arguments import checked_arguments
from dubito.core.errors import UnsupportedError
from dubito.core.tracing import is_tracing
from dubito.fitting.posterior import Posterior
from dubito.methods.map.posterior import PointPosterior
from dubito.methods.map.recipe import MAP
from dubito.uses.fixed_draws import check_scores

Score = Literal["max-probability", "entropy", "mutual-information", "variance", "energy"]


@checked_arguments
def score_prediction(prediction: Prediction, score: Score, real: Tensor | None = None) -> Tensor:
    """Return the uncertainty of a prediction for each datum ``[B]``, float64, by any score but the energy.

    Args:
        prediction: The prediction.
        score: Its name.
        real: Which positions ``[B, *positions]`` are averaged; by default all of them.

    >>> prediction = ClassPrediction.from_logit_samples(torch.tensor([[[40.0, 0.0]], [[0.0, 40.0]]]))
    >>> [round(score_prediction(prediction, name).item(), 4) for name in ("max-probability", "variance")]
    [0.5, 0.5]
    """
    table = _CLASSES if isinstance(prediction, ClassPrediction) else _NUMBERS
    if score not in table:
        kind = "a prediction of classes" if isinstance(prediction, ClassPrediction) else "a regression"
        raise UnsupportedError(f"The score '{score}' is not defined for {kind}: use one of {', '.join(table)}.")
    values = check_scores(table[score](prediction), score)
    return _position_mean(values, real)


def real_positions(x: Any) -> Tensor | None:
    """Return which tokens of inputs are no padding, where the inputs say so by an `attention_mask`."""
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    return None if mask is None else torch.as_tensor(mask) != 0


def _position_mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Average over positions, without padding where that is known and leaves any."""
    if values.ndim == 1:
        return values
    if real is None or real.shape != values.shape:
        return values.flatten(1).mean(dim=1)
    weights = real.to(values)
    return (values * weights).flatten(1).sum(dim=1) / weights.flatten(1).sum(dim=1).clamp_min(1.0)


def sample_variance(prediction: ClassPrediction) -> Tensor:
    r"""Return $\sum_c \mathrm{Var}_s\, p_{sc}$ ``[B, *positions]``; zero for a single network."""
    if prediction.samples is None:
        if is_tracing() or bool((prediction.epistemic == 0).all()):
            return torch.zeros_like(prediction.epistemic)
        raise UnsupportedError(
            "The score 'variance' needs the samples, which were too many to keep: lower num_samples, or use "
            "'mutual-information'."
        )
    return prediction.samples.double().exp().var(dim=0, correction=0).sum(dim=-1)


@checked_arguments
def energy(posterior: Posterior, x: Any) -> Tensor:
    """Return the energy ``[B]`` of the network at the posterior's centre; `x` is what `posterior.predict` takes."""
    if not isinstance(posterior.likelihood, Categorical):
        raise UnsupportedError(f"The energy needs a categorical likelihood, got {posterior.likelihood!r}.")
    centre = PointPosterior(_Energy(posterior), Gaussian(noise=1.0), MAP(train=False), posterior.num_data)
    prediction = centre.predict(x)
    assert isinstance(prediction, RegressionPrediction)
    return check_scores(prediction.mean[:, 0], "energy")


class _Energy(nn.Module):
    """A network that returns the energy of another network's logits, so that `predict` can batch it."""

    def __init__(self, posterior: Posterior) -> None:
        super().__init__()
        self.network, self.canonical = posterior.model, posterior.likelihood.canonical

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return energy_of(self.canonical(params.call(self.network, args or kwargs)), real_positions(kwargs))


def energy_of(logits: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return the energy ``[B]`` of logits ``[B, *positions, C]``, averaged over these positions, in float64."""
    return _position_mean(-logits.double().logsumexp(dim=-1), positions)


def _gaussian_entropy(prediction: RegressionPrediction) -> Tensor:
    return 0.5 * (2 * math.pi * math.e * prediction.variance.double()).log()


def _information(prediction: RegressionPrediction) -> Tensor:
    return 0.5 * (prediction.epistemic.double() / prediction.aleatoric.double()).log1p()


_CLASSES: dict[str, Callable[[Any], Tensor]] = {
    # In float64, where 1 - p of a float32 probability is exact and makes no ties.
    "max-probability": lambda prediction: 1 - prediction.confidence.double().clamp(max=1),
    "entropy": lambda prediction: prediction.entropy,
    "mutual-information": lambda prediction: prediction.epistemic,
    "variance": sample_variance,
}
_NUMBERS: dict[str, Callable[[Any], Tensor]] = {
    "entropy": _gaussian_entropy,
    "mutual-information": _information,
    "variance": lambda prediction: prediction.epistemic,
}
