"""From Gaussian outputs to a prediction: probit, Laplace bridge or Monte Carlo for classes; exact for regression."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Bernoulli, Categorical, Likelihood
from dubito.beliefs.prediction import Prediction
from dubito.core import limits
from dubito.core.limits import numbers

Link = Literal["probit", "mc", "bridge", "bridge-norm"]

# The most sampled logits per example that a prediction keeps.
MOST_KEPT = 4096


@dataclass
class Noise:
    """Standard normal draws that every example shares: results do not depend on how inputs are batched."""

    num_samples: int
    generator: torch.Generator
    _drawn: dict[torch.Size, Tensor] = field(default_factory=dict, repr=False)  # sequences may differ in length

    def like(self, outputs: Tensor) -> Tensor:
        """Return draws ``[S, 1, ...]`` for outputs ``[B, ...]``."""
        shape = outputs.shape[1:]
        if shape not in self._drawn:
            draws = torch.empty(self.num_samples, 1, *shape, dtype=torch.float64, device=self.generator.device)
            self._drawn[shape] = draws.normal_(generator=self.generator)
        return self._drawn[shape].to(outputs)


def is_classification(likelihood: Likelihood) -> bool:
    """Whether the likelihood predicts classes."""
    return isinstance(likelihood, Categorical | Bernoulli)


def has_null_direction(likelihood: Likelihood) -> bool:
    """Whether shifting all outputs together changes no prediction, as for a softmax."""
    return isinstance(likelihood, Categorical)


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Scale logits down by their uncertainty, :math:`f / \sqrt{1 + \pi v / 8}` (MacKay 1992).

    >>> probit(torch.tensor([2.0]), torch.tensor([0.0])).tolist()
    [2.0]
    """
    return mean / torch.sqrt(1 + math.pi / 8 * variance.clamp_min(0))


def bridge(mean: Tensor, covariance: Tensor, normalize: bool = False) -> Tensor:
    r"""Log-probabilities of the Laplace bridge (Hobbhahn et al. 2022, https://arxiv.org/abs/2003.01227).

    The logits ``[..., C]`` are conditioned on summing to zero; then the mean of a Dirichlet with

    .. math:: \alpha_c = \frac{1}{v_c}\left(1 - \frac{2}{C} + \frac{e^{f_c}}{C^2} \sum_k e^{-f_k}\right)

    gives the probabilities. With `normalize` the mean variance is first brought to :math:`\sqrt{C/2}`, the authors'
    correction for large ones.
    """
    classes, smallest = mean.shape[-1], torch.finfo(mean.dtype).tiny
    rows, own = covariance.sum(-1), covariance.diagonal(dim1=-2, dim2=-1)
    total = rows.sum(-1, keepdim=True)
    # logits that sum to a constant already, whose total is rounding, need no conditioning
    varies = total > 10 * classes * torch.finfo(mean.dtype).eps * own.sum(-1, keepdim=True)
    share = torch.where(varies, rows / torch.where(varies, total, 1.0), 0.0)
    mean = mean - share * mean.sum(-1, keepdim=True)
    variance = (own - share * rows).clamp_min(smallest)
    if normalize:
        scale = variance.mean(-1, keepdim=True) / math.sqrt(classes / 2)
        mean, variance = mean / scale.sqrt(), variance / scale
    log_ratio = mean + torch.logsumexp(-mean, dim=-1, keepdim=True) - 2 * math.log(classes)
    constant = torch.full_like(log_ratio, math.log(1 - 2 / classes) if classes > 2 else -math.inf)
    return (torch.logaddexp(constant, log_ratio) - variance.log()).log_softmax(-1)


def predict(likelihood: Likelihood, outputs: Tensor, variance: Tensor, noise: Noise) -> Prediction:
    """Predict from means (the model's layout) and variances (canonical): probit for classes, exact for regression.

    The entropy, aleatoric and epistemic parts of a class prediction come from sampled logits.
    """
    if not is_classification(likelihood):
        return likelihood.predict_gaussian(outputs, likelihood.restore(variance, outputs))
    step = _rows_at_a_time(outputs, noise)
    parts = []
    for mean, spread in zip(outputs.split(step), variance.split(step), strict=True):
        canonical = likelihood.canonical(mean)
        log_probs = likelihood.predict(likelihood.restore(probit(canonical, spread), mean)).log_probs  # type: ignore[attr-defined]
        samples = canonical + spread.clamp_min(0).sqrt() * noise.like(canonical)
        parts.append(_with_samples(likelihood, likelihood.restore(samples, mean), log_probs))
    return parts[0] if len(parts) == 1 else type(parts[0]).cat(parts)


def predict_with_covariance(
    likelihood: Likelihood, outputs: Tensor, covariance: Tensor, noise: Noise, link: str
) -> Prediction:
    """Predict classes from means (the model's layout) and the covariance ``[B, *positions, C, C]`` at each position.

    `link` is ``"mc"``, ``"bridge"`` or ``"bridge-norm"``.
    """
    step = _rows_at_a_time(outputs, noise)
    parts = []
    for mean, spread in zip(outputs.split(step), covariance.split(step), strict=True):
        canonical = likelihood.canonical(mean)
        samples = draw(canonical.flatten(0, -2), spread.flatten(0, -3), noise).reshape(-1, *canonical.shape)
        log_probs = bridge(canonical, spread, normalize=link == "bridge-norm") if link != "mc" else None
        parts.append(_with_samples(likelihood, likelihood.restore(samples, mean), log_probs))
    return parts[0] if len(parts) == 1 else type(parts[0]).cat(parts)


def draw(mean: Tensor, covariance: Tensor, noise: Noise) -> Tensor:
    """Draw ``[S, B, C]`` from Gaussians with means ``[B, C]`` and covariances ``[B, C, C]``, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance.double())
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).to(mean.dtype)
    return mean + torch.einsum("bij,sbj->sbi", root, noise.like(mean).expand(-1, len(mean), -1))


def _with_samples(likelihood: Likelihood, samples: Tensor, log_probs: Tensor | None) -> Prediction:
    keep = samples[:, 0].numel() <= MOST_KEPT
    return likelihood.predict_samples(samples, log_probs=log_probs, keep_samples=keep)


def _rows_at_a_time(outputs: Tensor, noise: Noise) -> int:
    return max(1, numbers(limits.current().chunk) // max(noise.num_samples * outputs[0].numel(), 1))
