"""A learned mixture of normal distributions, for soft weight sharing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from dubito.beliefs.priors.base import Prior, blank, unchecked
from dubito.core.constraints import OpenProbability, Positive, Range
from dubito.core.errors import InputError
from dubito.core.settings import setting

Hyperprior = tuple[Positive, Positive] | None

# Components whose symmetric KL divergence is below this number of nats are merged.
MERGED = 1e-10


@setting
class Mixture(Prior):
    r"""$p(w) = \pi_0\, \mathcal N(0, s_0^2) + \sum_{k \ge 1} \pi_k\, \mathcal N(m_k, s_k^2)$, learned with the weights.

    Soft weight sharing (Nowlan and Hinton 1992; Ullrich et al. 2017, https://arxiv.org/abs/1702.04008): the weights
    cluster around few values, most of them around 0, and can then be encoded by the number of their component. $m_k$,
    $s_k$ and $\pi_k$ for $k \ge 1$, and $s_0$, are trained along with the weights; a gamma hyperprior on the precisions
    $s_k^{-2}$ keeps components from merging or collapsing.

    With ``MAP(prior=Mixture(), prior_weight=0.003)`` all matrices of a network share one mixture; with `Variational`
    each parameter has its own. The components of `ScaleMixture`, in contrast, are fixed and have the same centre.

    Args:
        components: The number of components, including the one at 0; 16 components take 4 bits per weight.
        zero_share: The probability $\pi_0$, which is not learned.
        zero_hyperprior: Shape and rate of the gamma hyperprior of $s_0^{-2}$, or None.
        hyperprior: Shape and rate of the gamma hyperprior of the other $s_k^{-2}$, or None.
        means: The $m_k$; by default they start evenly spaced over the range of the weights.
        log_scales: The logarithms of all $s_k$; by default they start at the mode of their hyperprior, but not below
            a quarter of the distance between two means.
        logits: The $\pi_k$ of the other components before a softmax; by default they start equal.
    """

    setting_name = "priors.Mixture"
    learned_fields = ("means", "log_scales", "logits")
    components: Annotated[int, Range(2, 256)] = 16
    zero_share: OpenProbability = 0.99
    zero_hyperprior: Hyperprior = (5e3, 2.0)
    hyperprior: Hyperprior = (2.5e2, 0.1)
    means: Tensor | None = None
    log_scales: Tensor | None = None
    logits: Tensor | None = None

    def resolve(self, name: str, weights: Tensor) -> Mixture:
        """Return the mixture with the initial values of its components for the given weights."""
        if self.means is not None:
            return self
        reach, others = float(weights.detach().abs().max()) or 1.0, self.components - 1
        means = torch.linspace(-reach, reach, others, dtype=weights.dtype, device=weights.device)
        gap = 2 * reach / max(others - 1, 1)
        scales = weights.new_full((self.components,), gap / 4)
        for part, pair in ((slice(0, 1), self.zero_hyperprior), (slice(1, None), self.hyperprior)):
            if pair is not None and pair[0] > 1:
                scales[part] = max(gap / 4, math.sqrt(pair[1] / (pair[0] - 1)))
        return unchecked(self, means=means, log_scales=scales.log(), logits=torch.zeros_like(means))

    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-density."""
        return self._log_joint(w).logsumexp(-1)

    def summed_kl(self, mean: Tensor, log_scale: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return an estimate of the KL divergence from one sample, plus the penalty of the hyperprior."""
        return super().summed_kl(mean, log_scale, generator=generator) + self.penalty()

    def penalty(self) -> Tensor:
        """Return the negative log-density of the hyperprior."""
        _, log_scales, _ = self._numbers()
        total = log_scales.new_zeros(())
        for part, pair in ((log_scales[:1], self.zero_hyperprior), (log_scales[1:], self.hyperprior)):
            if pair is not None:
                shape, rate = pair
                constant = math.lgamma(shape) - shape * math.log(rate)
                total = total + ((shape - 1) * 2 * part + rate * (-2 * part).exp() + constant).sum()
        return total

    def fitted(self, mean: Tensor, scale: Tensor) -> Mixture:
        """Return a copy of the mixture with its current values."""
        now = {name: getattr(self, name).clone() for name in self.learned_fields if getattr(self, name) is not None}
        return unchecked(self, **now)

    def sample(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw a component for each weight, then the weight from that component."""
        normal = blank(shape, dtype, generator).normal_(generator=generator)
        means, log_scales, log_shares = (value.detach().to(normal) for value in self._numbers())
        chosen = torch.multinomial(log_shares.exp(), normal.numel(), replacement=True, generator=generator)
        chosen = chosen.reshape(normal.shape)
        return means[chosen] + log_scales.exp()[chosen] * normal

    def mean(self) -> Tensor:
        r"""Return $\sum_k \pi_k m_k$."""
        means, _, log_shares = self._numbers()
        return (log_shares.exp() * means).sum()

    def variance(self) -> Tensor:
        r"""Return $\sum_k \pi_k (s_k^2 + m_k^2)$ minus the squared mean."""
        means, log_scales, log_shares = self._numbers()
        return (log_shares.exp() * ((2 * log_scales).exp() + means.square())).sum() - self.mean().square()

    def codebook(self) -> Tensor:
        """Return the centres of all components ``[K]``; the first is 0."""
        return self._numbers()[0]

    def assign(self, w: Tensor) -> Tensor:
        """Return the number of the most probable component of each weight, as ``uint8`` in the shape of `w`."""
        return self._log_joint(w).argmax(-1).to(torch.uint8)

    def merged(self, tolerance: float = MERGED) -> Mixture:
        """Return the mixture with nearly equal components merged, keeping their joint mean and variance.

        Args:
            tolerance: Components are merged if their symmetric KL divergence in nats is at most this.
        """
        means, log_scales, log_shares = (value.detach().double() for value in self._numbers())
        order = torch.cat([torch.zeros(1, dtype=torch.long, device=means.device), 1 + means[1:].argsort()])
        means, variances, shares = means[order], (2 * log_scales[order]).exp(), log_shares[order].exp()
        at = 1
        while at < len(means) - 1:
            a, b = at, at + 1
            if _divergence(means[a], variances[a], means[b], variances[b]) > tolerance:
                at += 1
                continue
            total = shares[a] + shares[b]
            center = (shares[a] * means[a] + shares[b] * means[b]) / total
            second = (shares[a] * (variances[a] + means[a] ** 2) + shares[b] * (variances[b] + means[b] ** 2)) / total
            means[a], variances[a], shares[a] = center, second - center**2, total
            kept = torch.arange(len(means), device=means.device) != b
            means, variances, shares = means[kept], variances[kept], shares[kept]
        like = self.codebook()
        values = {"means": means[1:], "log_scales": variances.log() / 2, "logits": shares[1:].log()}
        return unchecked(self, components=len(means), **{name: value.to(like) for name, value in values.items()})

    def _log_joint(self, w: Tensor) -> Tensor:
        """Return the log-density of each weight in each component, weighted by its share: ``[..., K]``."""
        means, log_scales, log_shares = (value.to(w) for value in self._numbers())
        constant = log_shares - log_scales - 0.5 * math.log(2 * math.pi)
        return constant - 0.5 * ((w.unsqueeze(-1) - means) * (-log_scales).exp()).square()

    def _numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return centres, log-scales and log-shares of all components, the one at 0 first."""
        if self.means is None or self.log_scales is None or self.logits is None:
            raise InputError(f"{self!r} has no components yet: call `resolve` with the weights of a network first.")
        others = math.log1p(-self.zero_share) + torch.log_softmax(self.logits, 0)
        zero = self.means.new_tensor([math.log(self.zero_share)])
        return torch.cat([self.means.new_zeros(1), self.means]), self.log_scales, torch.cat([zero, others])


def _divergence(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> float:
    """Return the symmetric KL divergence of two normal distributions."""
    square = (mean - other_mean).square()
    ratio = variance / other_variance
    return float(0.5 * (ratio + 1 / ratio - 2 + square / variance + square / other_variance))
