"""Turn Gaussian outputs into a prediction: through a link of the table `LINKS` for classes, exactly for regression.

To add a link, write its function, add its entry to `LINKS` and its name to `LinkName`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.beliefs.likelihoods.kinds import ClassLikelihood
from dubito.beliefs.prediction import ClassPrediction, Prediction
from dubito.beliefs.prediction.uncertainty import split_rows
from dubito.core import limits
from dubito.core.constraints import check
from dubito.core.errors import InputError
from dubito.core.limits import numbers
from dubito.core.tensor_checks import at_least_float32
from dubito.core.tracing import is_tracing

LinkName = Literal["probit", "mc", "bridge", "bridge-norm"]
# A graph draws logits by a matrix of at most so many numbers.
_FLAT = 2**16


@dataclass
class Noise:
    """Standard normal draws that all examples share, so that results do not depend on the batch size."""

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
    return isinstance(likelihood, ClassLikelihood)


def has_null_direction(likelihood: Likelihood) -> bool:
    """Return whether adding one constant to all outputs changes no prediction, as for a softmax."""
    return isinstance(likelihood, Categorical)


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    r"""Scale logits down by their uncertainty, :math:`f / \sqrt{1 + \pi v / 8}` (MacKay 1992).

    >>> probit(torch.tensor([2.0]), torch.tensor([0.0])).tolist()
    [2.0]
    """
    return mean / torch.sqrt(1 + math.pi / 8 * _at_least_0(variance))


def against_others(classes: int, centred: bool) -> float:
    r"""Return `r`, the distance of a logit from the mean of the others over the logit itself.

    Probabilities depend on differences of logits. Of `centred` logits, which sum to zero, the mean of the others is
    $-f_c / (C - 1)$. So the distance is $r f_c$ with $r = C / (C - 1)$, and its variance is $r^2 v_c$; with two classes
    it is the only difference there is. The rows of the covariance sum to zero, too: so the variance of a difference of
    two logits is $2 r \bar v$ in the mean over all pairs, and logits that are drawn independently need $r v$.
    """
    return classes / (classes - 1) if centred and classes > 1 else 1.0


def _at_least_0(variance: Tensor) -> Tensor:
    """Return the variance without rounding errors below 0; a graph computes it without any."""
    return variance if is_tracing() else variance.clamp_min(0)


def bridge(mean: Tensor, covariance: Tensor, normalize: bool = False) -> Tensor:
    r"""Return the log-probabilities of the Laplace bridge (Hobbhahn et al. 2022, https://arxiv.org/abs/2003.01227).

    The logits ``[..., C]`` are conditioned on summing to zero; then the mean of a Dirichlet with

    .. math:: \alpha_c = \frac{1}{v_c}\left(1 - \frac{2}{C} + \frac{e^{f_c}}{C^2} \sum_k e^{-f_k}\right)

    gives the probabilities. With `normalize` the mean variance is first brought to :math:`\sqrt{C/2}`, the authors'
    correction for large ones.
    """
    classes, smallest = mean.shape[-1], torch.finfo(mean.dtype).tiny
    rows, own = covariance.sum(-1), covariance.diagonal(dim1=-2, dim2=-1)
    total = rows.sum(-1, keepdim=True)
    # logits whose sum has no variance but rounding errors need no conditioning
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


@dataclass(frozen=True)
class Link:
    """How a Gaussian over logits becomes class probabilities.

    Attributes:
        log_probs: Returns canonical log-probabilities, given the likelihood, the mean logits in canonical layout, their
            variances or covariances, and the outputs; None: the mean probabilities of the sampled logits.
        reads_covariance: Whether it takes covariances ``[B, *positions, C, C]``, not variances ``[B, *positions, C]``.
        softmax_only: Whether it is for a categorical likelihood only.
    """

    log_probs: Callable[[Likelihood, Tensor, Tensor, Tensor], Tensor] | None
    reads_covariance: bool = True
    softmax_only: bool = False

    def sample(self, mean: Tensor, spread: Tensor, noise: Noise, ratio: float = 1.0) -> Tensor:
        """Draw logits ``[S, B, ...]`` in canonical layout; see `against_others`."""
        if not self.reads_covariance:
            return mean + _at_least_0(spread).sqrt() * (noise.like(mean) * math.sqrt(ratio))
        return draw(mean.flatten(0, -2), spread.flatten(0, -3), noise).reshape(-1, *mean.shape)


def _probit_link(likelihood: Likelihood, mean: Tensor, variance: Tensor, outputs: Tensor) -> Tensor:
    return likelihood.predict(likelihood.restore(probit(mean, variance), outputs)).log_probs  # type: ignore[attr-defined]


def _bridge_link(
    likelihood: Likelihood, mean: Tensor, covariance: Tensor, outputs: Tensor, normalize: bool = False
) -> Tensor:
    return bridge(mean, covariance, normalize)


PROBIT = Link(_probit_link, reads_covariance=False)
LINKS: dict[LinkName, Link] = {
    "probit": PROBIT,
    "mc": Link(None),
    "bridge": Link(_bridge_link, softmax_only=True),
    "bridge-norm": Link(partial(_bridge_link, normalize=True), softmax_only=True),
}


def find_link(name: LinkName, likelihood: Likelihood) -> Link:
    """Return the link of this name, or raise an `InputError` if there is none or the likelihood cannot use it."""
    check("link", LinkName, name)
    if LINKS[name].softmax_only and not has_null_direction(likelihood):
        others = " or ".join(f"'{other}'" for other, link in LINKS.items() if not link.softmax_only)
        raise InputError(f"The '{name}' link is for a categorical likelihood, not {likelihood!r}: use {others}.")
    return LINKS[name]


def predict(
    likelihood: Likelihood, outputs: Tensor, spread: Tensor, noise: Noise, link: Link = PROBIT, centred: bool = False
) -> Prediction:
    """Predict from means (the model's layout) and variances, or covariances if the link reads them (both canonical).

    Regression is exact and takes variances. The entropy, aleatoric and epistemic parts of a class prediction come from
    sampled logits: by their covariances, or independently of each other by their variances. `centred` says that these
    variances are those of logits that sum to zero.
    """
    if not is_classification(likelihood):
        return likelihood.predict_gaussian(outputs, likelihood.restore(spread, outputs))
    if is_tracing():
        rows = isinstance(likelihood, Categorical) and outputs.ndim == 2 and link is PROBIT
        few = noise.num_samples * outputs.shape[-1] ** 2 <= _FLAT
        return (_predict_rows if rows and few else _predict_classes)(likelihood, outputs, spread, noise, link, centred)
    numbers_of_one = max(noise.num_samples * outputs[0].numel(), 1)
    if outputs.ndim > 2 and not link.reads_covariance and numbers_of_one > numbers(limits.current().outputs):
        return _predict_positions(likelihood, outputs, spread, noise, link, centred)
    step = max(1, numbers(limits.current().chunk) // numbers_of_one)
    parts = [
        _predict_classes(likelihood, *some, noise, link, centred)
        for some in zip(outputs.split(step), spread.split(step), strict=True)
    ]
    return parts[0] if len(parts) == 1 else type(parts[0]).cat(parts)


def _times(factor: float, spread: Tensor) -> Tensor:
    return spread if factor == 1.0 else factor * spread


def _predict_positions(
    likelihood: Likelihood, outputs: Tensor, spread: Tensor, noise: Noise, link: Link, centred: bool
) -> ClassPrediction:
    """Predict some positions at a time, as if they were examples; all positions share the noise."""
    mean = likelihood.canonical(outputs)
    found = predict(Categorical(), mean.flatten(0, -2), spread.flatten(0, -2), noise, link, centred)
    assert isinstance(found, ClassPrediction)
    log_probs, *parts = (
        part.reshape(*mean.shape[:-1], *part.shape[1:]) for part in (found.log_probs, found.aleatoric, found.epistemic)
    )
    return ClassPrediction(log_probs, *parts)


def _predict_classes(
    likelihood: Likelihood, outputs: Tensor, spread: Tensor, noise: Noise, link: Link, centred: bool
) -> ClassPrediction:
    mean = likelihood.canonical(outputs)
    ratio = against_others(mean.shape[-1], centred and not link.reads_covariance)
    samples = likelihood.restore(link.sample(mean, spread, noise, ratio), outputs)
    log_probs = link.log_probs and link.log_probs(likelihood, mean, _times(ratio**2, spread), outputs)
    keep = samples[:, 0].numel() <= numbers(limits.current().kept_logits)
    return likelihood.predict_samples(samples, log_probs=log_probs, keep_samples=keep)  # type: ignore[return-value]


def _predict_rows(
    likelihood: Likelihood, outputs: Tensor, variance: Tensor, noise: Noise, link: Link, centred: bool
) -> ClassPrediction:
    """Predict with all samples of an example in one row ``[B, S·C]``, which one product draws; for a graph."""
    ratio = against_others(outputs.shape[-1], centred)
    draws = noise.like(outputs)[:, 0] * math.sqrt(ratio)
    copies = torch.eye(draws.shape[1], dtype=draws.dtype, device=draws.device).repeat(1, len(draws))
    spread = torch.diag_embed(draws).permute(1, 0, 2).flatten(1)  # [C, S·C]
    both = torch.cat([outputs, variance.sqrt()], dim=1)
    logits = at_least_float32(both @ torch.cat([copies, spread]))
    assert link.log_probs is not None
    log_probs = link.log_probs(likelihood, outputs, _times(ratio**2, variance), outputs)
    _, aleatoric, epistemic = split_rows(logits, len(draws))
    samples = logits.unflatten(1, draws.shape).transpose(0, 1).log_softmax(-1)  # dropped from a graph without a use
    return ClassPrediction(log_probs, aleatoric, epistemic, samples)


def draw(mean: Tensor, covariance: Tensor, noise: Noise) -> Tensor:
    """Draw ``[S, B, C]`` from Gaussians with means ``[B, C]`` and covariances ``[B, C, C]``, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance.double())
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).to(mean.dtype)
    return mean + torch.einsum("bij,sbj->sbi", root, noise.like(mean).expand(-1, len(mean), -1))
