"""A learned mixture of normals: soft weight sharing."""

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

# Two components that differ by less than this many nats are one.
MERGED = 1e-10


@setting
class Mixture(Prior):
    r"""$p(w) = \pi_0\, \mathcal N(0, s_0^2) + \sum_{k \ge 1} \pi_k\, \mathcal N(m_k, s_k^2)$, learned with the weights.

    Soft weight sharing (Nowlan and Hinton 1992; Ullrich et al. 2017, https://arxiv.org/abs/1702.04008): the weights
    gather around few values, most of them around 0, and afterwards each can be replaced by the number of its component.
    $m_k$, $s_k$ and the shares of the components that are not at 0 are trained along with the weights; a gamma
    hyperprior on the precisions $s_k^{-2}$ keeps components from growing together or collapsing.

    Under ``MAP(prior=Mixture(), prior_weight=0.003)`` all matrices of a network share one mixture; under `Variational`
    each parameter has its own. It differs from `ScaleMixture`, whose components are fixed and all at one centre.

    Args:
        components: Their number, the one at 0 included; 16 are numbered by 4 bits.
        zero_share: $\pi_0$, which is not learned.
        zero_hyperprior: Shape and rate of the gamma density of $s_0^{-2}$; None for none.
        hyperprior: That of the other components.
        means: The $m_k$; None starts them evenly over the range of the weights.
        log_scales: The logarithms of all $s_k$; None starts them at the mode of their hyperprior, but not below
            a quarter of the distance between two means.
        logits: The shares of the other components before a softmax; None starts them equal.
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
        """Return the mixture with the values its components start from, spread over the given weights."""
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
        """Return an estimate of the divergence from one draw, and the penalty of the hyperprior."""
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
        """Return the mixture at its current values."""
        now = {name: getattr(self, name).clone() for name in self.learned_fields if getattr(self, name) is not None}
        return unchecked(self, **now)

    def sample(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw weights: a component for each, then a normal."""
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
        r"""Return $\sum_k \pi_k (s_k^2 + m_k^2)$ less the squared mean."""
        means, log_scales, log_shares = self._numbers()
        return (log_shares.exp() * ((2 * log_scales).exp() + means.square())).sum() - self.mean().square()

    def codebook(self) -> Tensor:
        """Return the centres of all components ``[K]``; the first is 0."""
        return self._numbers()[0]

    def assign(self, w: Tensor) -> Tensor:
        """Return the number of the most probable component of each weight, as ``uint8`` in the shape of `w`."""
        return self._log_joint(w).argmax(-1).to(torch.uint8)

    def merged(self, tolerance: float = MERGED) -> Mixture:
        """Return the mixture with components that are nearly the same made one, by their common moments.

        Args:
            tolerance: The divergence in nats, in both directions together, up to which two components are the same.
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
        """The log-density of each weight in each component, with its share: ``[..., K]``."""
        means, log_scales, log_shares = (value.to(w) for value in self._numbers())
        constant = log_shares - log_scales - 0.5 * math.log(2 * math.pi)
        return constant - 0.5 * ((w.unsqueeze(-1) - means) * (-log_scales).exp()).square()

    def _numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Centres, log-scales and log-shares of all components, the one at 0 first."""
        if self.means is None or self.log_scales is None or self.logits is None:
            raise InputError(f"{self!r} is spread over a network: resolve it with that network's weights first.")
        others = math.log1p(-self.zero_share) + torch.log_softmax(self.logits, 0)
        zero = self.means.new_tensor([math.log(self.zero_share)])
        return torch.cat([self.means.new_zeros(1), self.means]), self.log_scales, torch.cat([zero, others])


def _divergence(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> float:
    """The symmetric divergence of two normals."""
    square = (mean - other_mean).square()
    ratio = variance / other_variance
    return float(0.5 * (ratio + 1 / ratio - 2 + square / variance + square / other_variance))
