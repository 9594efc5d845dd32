"""The distillation losses: likelihoods whose targets are the teacher's predictions.

Each is the student's own likelihood with soft targets in place of observed ones, so the one fit loop trains it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from dubito.beliefs.likelihoods.base import Hyper
from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from dubito.core.constraints import Positive
from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.uses.transfer.student_likelihoods import Dirichlet, GaussianWithUncertainty

# The range of target concentrations: beyond it the epistemic uncertainty is below 1e-4 nats and its size irrelevant.
LOG_CONCENTRATIONS = (math.log(1e-2), math.log(1e5))
# The weight of the concentration: its logarithm ranges over ten units, the loss of the mean over a nat or two.
CONCENTRATION_WEIGHT = 0.02
# The smallest target for the function variance, as a fraction of the noise variance.
MIN_FUNCTION_VARIANCE = 1e-4


class DistillationLoss(Likelihood, ABC):
    """A likelihood over a teacher's answers."""

    scores_targets: ClassVar[bool] = False

    @abstractmethod
    def answers(self, prediction: Prediction) -> Tensor:
        """Return the teacher's prediction as targets, one row per datum."""

    @abstractmethod
    def needed(self, targets: Tensor) -> tuple[int, str]:
        """Return how many outputs a student needs for one datum, and for what."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise unless the student has the number of outputs that the loss needs and the targets are finite."""
        given, (needed, purpose) = outputs[0].numel(), self.needed(targets)
        if given != needed:
            raise InputError(
                f"The student gives {given} output{'s' if given > 1 else ''} per input, but {purpose} needs {needed}: "
                "change its last layer."
            )
        if not bool(targets.isfinite().all()):
            raise InputError(
                "The teacher's answers are NaN or infinite for some inputs: look at it and at those inputs."
            )

    def gradient(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the gradient of ``-log_prob``, by differentiating it."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(-self.log_prob(leaf, targets, hyper).sum(), leaf)
        return self.canonical(gradient)


@setting
class SoftLabels(DistillationLoss, Categorical):
    r"""The teacher's class probabilities (Hinton et al. 2015, https://arxiv.org/abs/1503.02531).

    $$T^2 \sum_c \bar p_c \log p_c , \qquad \bar p \propto \bar p_\text{teacher}^{1/T} , \quad
      p = \mathrm{softmax}(f / T)$$

    Args:
        temperature: T. Above 1 it shows how a sure teacher ranks the other classes; $T^2$ keeps the size of gradients.
    """

    setting_name = "transfer.SoftLabels"
    temperature: Positive = 1.0

    def answers(self, prediction: Prediction) -> Tensor:
        """Return the class probabilities ``[B, *positions, C]``."""
        assert isinstance(prediction, ClassPrediction)
        return prediction.probs if self.temperature == 1 else (prediction.log_probs / self.temperature).softmax(dim=-1)

    def needed(self, targets: Tensor) -> tuple[int, str]:
        """One output per class."""
        return targets[0].numel(), f"the mean over {targets.shape[-1]} classes"

    def observed(self, targets: Tensor) -> Tensor:
        """Return True everywhere: a teacher has an answer at every position."""
        return torch.ones(targets.shape[:-1], dtype=torch.bool, device=targets.device)

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the expected log-probability ``[B]``."""
        log_probs = (self.canonical(outputs) / self.temperature).log_softmax(dim=-1)
        return self.temperature**2 * (targets * log_probs).flatten(1).sum(dim=1)


@setting
class SoftBernoulli(DistillationLoss, Bernoulli):
    """The teacher's probabilities of yes."""

    setting_name = "transfer.SoftBernoulli"

    def answers(self, prediction: Prediction) -> Tensor:
        """Return the probabilities of yes ``[B, L]``."""
        assert isinstance(prediction, ClassPrediction)
        return prediction.probs[..., 1].reshape(len(prediction), -1)

    def needed(self, targets: Tensor) -> tuple[int, str]:
        """One output per label."""
        return targets.shape[1], f"the mean of {targets.shape[1]} yes/no label{'s' if targets.shape[1] > 1 else ''}"

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the expected log-probability ``[B]``."""
        logits = self.canonical(outputs)
        log_yes, log_no = torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(-logits)
        return (targets * log_yes + (1 - targets) * log_no).sum(dim=1)


@setting
class Means(DistillationLoss, Gaussian):
    """The teacher's means, by squared error."""

    setting_name = "transfer.Means"

    def answers(self, prediction: Prediction) -> Tensor:
        """Return the means ``[B, O]``."""
        assert isinstance(prediction, RegressionPrediction)
        return prediction.mean

    def needed(self, targets: Tensor) -> tuple[int, str]:
        """One output per number."""
        return targets.shape[1], f"the mean of {_numbers(targets.shape[1])}"


@setting
class Moments(DistillationLoss, HeteroscedasticGaussian):
    r"""The teacher's mean μ and variance v: $\mathbb E \log \mathcal N(y; m, e^s)$ under $\mathcal N(\mu, v)$."""

    setting_name = "transfer.Moments"

    def answers(self, prediction: Prediction) -> Tensor:
        """Return means and variances ``[B, 2·O]``."""
        assert isinstance(prediction, RegressionPrediction)
        return torch.cat([prediction.mean, prediction.variance], dim=-1)

    def needed(self, targets: Tensor) -> tuple[int, str]:
        """Two outputs per number."""
        return targets.shape[1], f"mean and log-variance of {_numbers(targets.shape[1] // 2)}"

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the expected log-density ``[B]``."""
        (mean, variance), (means, log_variances) = targets.chunk(2, dim=-1), self.canonical(outputs).chunk(2, dim=-1)
        return expected_log_normal(mean, variance, means, log_variances)


@setting
class Concentration(DistillationLoss, Dirichlet):
    r"""The Dirichlet $\alpha^*$ with the teacher's mean and mutual information.

    $$\sum_c \bar p_c \log p_c - \tfrac\lambda2 (\log \alpha_0 - \log \alpha_0^*)^2$$

    The divergence between the two Dirichlets would weigh the mean of each datum by its concentration, and sure data
    would outweigh the uncertain ones; here every datum counts once. Malinin et al. (2020,
    https://arxiv.org/abs/1905.00076) fit the Dirichlet to the samples instead, Ryabinin et al. (2021,
    https://arxiv.org/abs/2105.06987) to a proxy of them, as here.

    Args:
        weight: λ, how much the concentration counts beside the mean.
    """

    setting_name = "transfer.Concentration"
    weight: Positive = CONCENTRATION_WEIGHT

    def answers(self, prediction: Prediction) -> Tensor:
        """Return the class probabilities and log-concentrations ``[B, *positions, C + 1]``."""
        assert isinstance(prediction, ClassPrediction)
        concentration = match_concentration(prediction.probs, prediction.epistemic)
        return torch.cat([prediction.probs, concentration.unsqueeze(-1).to(prediction.probs.dtype)], dim=-1)

    def needed(self, targets: Tensor) -> tuple[int, str]:
        """One output per class."""
        classes = targets.shape[-1] - 1
        return targets[0, ..., :-1].numel(), f"a Dirichlet over {classes} classes"

    def observed(self, targets: Tensor) -> Tensor:
        """Return True everywhere: a teacher has an answer at every position."""
        return torch.ones(targets.shape[:-1], dtype=torch.bool, device=targets.device)

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the (negative) loss of each datum ``[B]``."""
        logits, probs, concentration = self.canonical(outputs), targets[..., :-1], targets[..., -1]
        level = logits.logsumexp(dim=-1)
        by_position = (probs * logits).sum(dim=-1) - level - 0.5 * self.weight * (level - concentration).square()
        return by_position.flatten(1).sum(dim=1) if by_position.ndim > 1 else by_position


@setting
class GaussianWithUncertaintyMoments(DistillationLoss, GaussianWithUncertainty):
    """The teacher's mean, noise variance and function variance, each Gaussian matched by its expected log-density."""

    setting_name = "transfer.GaussianWithUncertaintyMoments"
    former_names = ("transfer.NoiseAndDoubtMoments",)

    def answers(self, prediction: Prediction) -> Tensor:
        """Return means, noise variances and function variances ``[B, 3·O]``."""
        assert isinstance(prediction, RegressionPrediction)
        noise = prediction.aleatoric
        return torch.cat([prediction.mean, noise, prediction.epistemic.maximum(MIN_FUNCTION_VARIANCE * noise)], dim=-1)

    def needed(self, targets: Tensor) -> tuple[int, str]:
        """Three outputs per number."""
        return targets.shape[1], f"mean, noise and function variance of {_numbers(targets.shape[1] // 3)}"

    def log_prob(self, outputs: Tensor, targets: Tensor, hyper: Hyper = None) -> Tensor:
        """Return the sum of both expected log-densities ``[B]``."""
        (mean, noise, function), (m, s, d) = targets.chunk(3, dim=-1), self.canonical(outputs).chunk(3, dim=-1)
        zero = torch.zeros_like(mean)
        return expected_log_normal(mean, function, m, d) + expected_log_normal(zero, noise, zero, s)


def expected_log_normal(mean: Tensor, variance: Tensor, m: Tensor, s: Tensor) -> Tensor:
    r"""Return $\mathbb E \log \mathcal N(y; m, e^s)$ for y of some mean and variance, summed over outputs ``[B]``."""
    return -0.5 * (s + ((mean - m).square() + variance) * (-s).exp() + math.log(2 * math.pi)).sum(dim=-1)


def match_concentration(probs: Tensor, information: Tensor) -> Tensor:
    r"""Return the $\log \alpha_0$ at which $\mathrm{Dir}(\alpha_0\,\bar p)$ has the given mutual information ``[...]``.

    It falls from $H[\bar p]$ at $\alpha_0 = 0$ to 0, so bisection finds it; what lies outside of `LOG_CONCENTRATIONS`
    gets the nearer end.

    >>> probs = torch.tensor([0.5, 0.5], dtype=torch.float64)
    >>> round(match_concentration(probs, torch.tensor(math.log(2) - 0.5)).exp().item(), 4)  # that of Dir(1, 1)
    2.0
    """
    wide = probs.double()
    total, wanted = torch.special.entr(wide).sum(dim=-1), information.double()
    low, high = (torch.full_like(wanted, end) for end in LOG_CONCENTRATIONS)
    for _ in range(50):
        middle = (low + high) / 2
        level = middle.exp()
        expected = (wide * torch.digamma(level.unsqueeze(-1) * wide + 1)).sum(dim=-1)
        too_uncertain = total - torch.digamma(level + 1) + expected > wanted
        low, high = torch.where(too_uncertain, middle, low), torch.where(too_uncertain, high, middle)
    return (low + high) / 2


def _numbers(count: int) -> str:
    return f"{count} number{'s' if count > 1 else ''}"
