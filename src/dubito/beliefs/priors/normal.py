"""The normal prior, with fixed numbers, centred on given weights, or with a learned scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dubito.beliefs.priors.base import Prior, Value, blank, like, log, unchecked
from dubito.core.constraints import FiniteValue, Positive, PositiveValue
from dubito.core.errors import InputError
from dubito.core.settings import setting


@setting
class Normal(Prior):
    r"""The normal distribution $p(w) = \mathcal N(m, s^2)$, with an exact KL divergence.

    $$\mathrm{KL} = \log\frac{s}{\sigma} + \frac{\sigma^2 + (\mu - m)^2}{2 s^2} - \frac12 .$$

    With ``scale="learn"`` each parameter has its own scale, which maximizes the ELBO in closed form:
    $s^2 = \frac1n \sum_i \sigma_i^2 + (\mu_i - m)^2$ (type-II maximum likelihood). A `hyperprior` regularizes it in
    small layers: with an inverse gamma density of shape a and rate b, $s^2 = (2b + \sum_i \dots) / (n + 2a + 2)$ (Wu et
    al. 2019, https://arxiv.org/abs/1810.03958). Its negative log-density is part of `summed_kl`.

    Args:
        loc: The mean m: a number, a tensor with one number per weight, or ``"model"`` for the fit's initial weights.
        scale: The standard deviation s: a number, a tensor, or ``"learn"``.
        hyperprior: ``(shape, rate)`` of the inverse gamma density of a learned $s^2$, such as ``(2.01, 0.101)``.

    >>> Normal(0.0, 2.0).kl(torch.tensor(1.0), torch.tensor(2.0)).item()  # (μ/s)² / 2
    0.125
    """

    setting_name = "priors.Normal"
    loc: FiniteValue | Literal["model"] = 0.0
    scale: PositiveValue | Literal["learn"] = 1.0
    hyperprior: tuple[Positive, Positive] | None = None

    def __post_init__(self) -> None:
        if self.hyperprior is not None and self.scale != "learn":
            raise InputError("A hyperprior needs a learned scale: write priors.Normal(scale='learn', hyperprior=...).")

    @property
    def refers_to_model(self) -> bool:
        """Whether the mean is the model's weights."""
        return isinstance(self.loc, str)

    @property
    def learns_scale(self) -> bool:
        """Whether the scale is learned."""
        return isinstance(self.scale, str)

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-density; `loc` and `scale` must be known."""
        loc, scale = self._numbers(w)
        return -0.5 * ((w - loc) / scale).square() - log(scale) - 0.5 * math.log(2 * math.pi)

    def kl(self, q_mean: Tensor, q_scale: Tensor) -> Tensor:
        """Return the exact KL divergence of each weight."""
        prior = self.fitted(q_mean, q_scale)
        loc, scale = prior._numbers(q_mean)
        return ((q_mean - loc).square() + q_scale.square()) / (2 * scale**2) + log(scale) - q_scale.log() - 0.5

    def summed_kl(self, mean: Tensor, log_scale: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return the KL divergence summed over one parameter, plus the penalty of the hyperprior."""
        loc, count = like(self._known_loc, mean), mean.numel()
        square = (mean if _is_zero(loc) else mean - loc).square()
        variance = (2 * log_scale).exp()
        if isinstance(self.scale, Tensor):
            scale = self.scale.to(mean)
            return ((square + variance) / (2 * scale.square()) + scale.log() - log_scale).sum() - 0.5 * count
        total, entropy = square.sum() + variance.sum(), log_scale.sum()
        if not isinstance(self.scale, str):
            return total / (2 * self.scale**2) - entropy + count * (math.log(self.scale) - 0.5)
        learned = self._learned_variance(total, count)
        return total / (2 * learned) - entropy + count * (0.5 * learned.log() - 0.5) + self._penalty(learned)

    def fitted(self, mean: Tensor, scale: Tensor) -> Normal:
        """Return the prior with the learned scale, in closed form."""
        if not self.learns_scale:
            return self
        total = (mean - like(self._known_loc, mean)).square().sum() + scale.square().sum()
        return unchecked(self, scale=self._learned_variance(total, mean.numel()).sqrt(), hyperprior=None)

    def resolve(self, name: str, weights: Tensor) -> Normal:
        """Return the prior centred on the given weights if ``loc="model"``, else this prior."""
        return self.replace(loc=weights.detach().clone()) if isinstance(self.loc, str) else self

    def sample(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw weights."""
        drawn = blank(shape, dtype, generator).normal_(generator=generator)
        loc, scale = self._numbers(drawn)
        return loc + scale * drawn

    def mean(self) -> Value:
        """Return m."""
        return self._known_loc

    def variance(self) -> Value:
        """Return s²."""
        return self._known_scale**2

    def _learned_variance(self, total: Tensor, count: int) -> Tensor:
        if self.hyperprior is None:
            return total / count
        shape, rate = self.hyperprior
        return (total + 2 * rate) / (count + 2 * shape + 2)

    def _penalty(self, variance: Tensor) -> Tensor:
        """Return the negative log-density of the hyperprior."""
        if self.hyperprior is None:
            return torch.zeros_like(variance)
        shape, rate = self.hyperprior
        return (shape + 1) * variance.log() + rate / variance + math.lgamma(shape) - shape * math.log(rate)

    def _numbers(self, w: Tensor) -> tuple[Value, Value]:
        return like(self._known_loc, w), like(self._known_scale, w)

    @property
    def _known_loc(self) -> Value:
        if isinstance(self.loc, str):
            raise InputError(f"{self!r} is centred on a network: call `resolve` with that network's weights first.")
        return self.loc

    @property
    def _known_scale(self) -> Value:
        if isinstance(self.scale, str):
            raise InputError(f"{self!r} learns its scale: call `fitted` with a posterior's mean and scale first.")
        return self.scale


def _is_zero(loc: Value) -> bool:
    return not isinstance(loc, Tensor) and loc == 0
