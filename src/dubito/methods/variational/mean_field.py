"""The mean-field normal posterior over one parameter of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import Normal, Prior
from dubito.beliefs.priors.base import unchecked
from dubito.core.errors import InputError
from dubito.core.numeric import sum_scalars
from dubito.core.randomness import own_generator
from dubito.methods.variational.fused import NormalDraw, NormalMoments


class MeanField(nn.Module):
    r"""$q(w) = \prod_i \mathcal N(\mu_i, \sigma_i^2)$ over the random entries of one parameter, and their prior.

    The mean is the network's own parameter and is passed to each method; this module holds $\log \sigma$. Entries that
    are not random have no noise and no prior.

    Args:
        mean: The parameter.
        index: The flat positions of the random entries, sorted; None for all.
        prior: The prior of this parameter. Its tensors have the shape of the parameter or of its random entries; they
            become buffers of this module.
        initial_scale: The initial σ: a number, or a tensor with one value per random entry.
        hold_rest: Whether entries that are not random stay fixed; otherwise they are trained as points.
    """

    index: Tensor | None
    numbers: tuple[float, float] | None
    """Mean and scale of the prior if all entries are random and it is a normal with fixed numbers; else None."""

    def __init__(
        self, mean: Tensor, index: Tensor | None, prior: Prior, initial_scale: float | Tensor, hold_rest: bool = False
    ) -> None:
        super().__init__()
        self.register_buffer("index", None if index is None else index.to(mean.device))
        self.hold_rest = hold_rest
        chosen = self.chosen(mean.detach())
        start = torch.as_tensor(initial_scale, dtype=mean.dtype, device=mean.device)
        self.log_scale = nn.Parameter(start.log().expand(chosen.shape).clone())
        tensors = {name: value for name, value in prior.fields().items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            if name in prior.learned_fields:
                self.register_parameter(f"prior_{name}", nn.Parameter(value.detach().clone().to(mean)))
                continue
            own = self.chosen(value) if value.shape == mean.shape else value
            if own.ndim and own.shape != chosen.shape:
                raise InputError(
                    f"The prior's {name} has shape {tuple(value.shape)}, but the parameter has {tuple(mean.shape)}."
                )
            self.register_buffer(f"prior_{name}", own.detach().clone().to(mean))
        self._prior, self._tensor_fields = unchecked(prior, **dict.fromkeys(tensors)), tuple(tensors)
        self.numbers = None if tensors or index is not None else _numbers(prior)

    @property
    def prior(self) -> Prior:
        """Return the prior, with its tensors on this module's device."""
        return unchecked(self._prior, **{name: getattr(self, f"prior_{name}") for name in self._tensor_fields})

    @property
    def scale(self) -> Tensor:
        """Return the standard deviations of the random entries."""
        return self.log_scale.exp()

    def chosen(self, values: Tensor) -> Tensor:
        """Return the random entries of a tensor with the parameter's shape."""
        return values if self.index is None else values.flatten()[self.index]

    def center(self, mean: Tensor) -> Tensor:
        """Return the mean; if the other entries are fixed, only the random ones have a gradient."""
        if self.index is None or not self.hold_rest:
            return mean
        return self.placed(self.chosen(mean), mean.detach())

    def variance(self, mean: Tensor) -> Tensor:
        """Return the variances in the shape of the parameter, 0 for entries that are not random."""
        variance = (2 * self.log_scale).exp()
        return variance if self.index is None else self.placed(variance, torch.zeros_like(mean))

    def noise(self, mean: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        r"""Return a sample of $w - \mu$, differentiable in the scale."""
        noise = self.scale * self.normal(mean, generator=generator)
        return noise if self.index is None else self.placed(noise, torch.zeros_like(mean))

    def normal(self, mean: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return standard normal noise for the random entries."""
        generator = own_generator() if generator is None else generator
        device = mean.device if generator is None else generator.device
        drawn = torch.empty(self.log_scale.shape, dtype=mean.dtype, device=device).normal_(generator=generator)
        return drawn.to(mean.device)

    def sample(self, mean: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return a sample of the whole parameter, differentiable in mean and scale."""
        return self.center(mean) + self.noise(mean, generator=generator)

    def kl(self, mean: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return the KL divergence from the prior, summed over the random entries."""
        return self.prior.summed_kl(self.chosen(mean), self.log_scale, generator=generator)

    def log_ratio(self, mean: Tensor, weight: Tensor) -> Tensor:
        r"""Return $\log p(w) - \log q(w)$, summed over the random entries, plus the log hyperprior.

        It is differentiable in `weight` and in the learned fields of the prior, not in mean and scale.
        """
        drawn, center = self.chosen(weight), self.chosen(mean).detach()
        log_scale = self.log_scale.detach()
        scale = log_scale.exp()
        log_q = -0.5 * ((drawn - center) / scale).square() - log_scale - 0.5 * math.log(2 * math.pi)
        prior = self.prior.fitted(center, scale)
        return (prior.log_prob(drawn) - log_q).sum() - prior.penalty()

    def scale_gradient(self, gradient: Tensor, factor: Tensor | float) -> Tensor:
        """Multiply a gradient in the shape of the parameter by a factor, at the random entries."""
        if self.index is None:
            return gradient * factor
        return self.placed(self.chosen(gradient) * factor, gradient)

    def placed(self, values: Tensor, base: Tensor) -> Tensor:
        """Return `base` with its random entries replaced by `values`."""
        index = cast(Tensor, self.index)
        return base.flatten().index_copy(0, index, values).view_as(base)


def _numbers(prior: Prior) -> tuple[float, float] | None:
    """Return mean and scale of a normal prior with fixed numbers; None for other priors."""
    if not isinstance(prior, Normal) or isinstance(prior.loc, Tensor | str) or isinstance(prior.scale, Tensor | str):
        return None
    return prior.loc, prior.scale


def moments_and_kl(parts: Sequence[MeanField], means: Sequence[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return center and variance of each parameter and the total KL divergence; one node for fixed normal priors."""
    simple, others = _by_prior(parts)
    found = {i: (parts[i].center(means[i]), parts[i].variance(means[i])) for i in others}
    terms = [parts[i].kl(means[i]) for i in others]
    if simple:
        *both, kl = NormalMoments.apply(*_arguments(parts, means, simple))
        found |= zip(simple, zip(both[: len(simple)], both[len(simple) :], strict=True), strict=True)
        terms.append(kl)
    return [found[i] for i in range(len(parts))], sum_scalars(terms)


def samples_and_kl(
    parts: Sequence[MeanField], means: Sequence[Tensor], *, generator: torch.Generator | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return a sample of each parameter and the total KL divergence; one node for fixed normal priors."""
    simple, others = _by_prior(parts)
    drawn = [
        (part.normal if part.numbers else part.sample)(mean, generator=generator)
        for part, mean in zip(parts, means, strict=True)
    ]
    terms = [parts[i].kl(means[i]) for i in others]
    if simple:
        numbers, *tensors = _arguments(parts, means, simple)
        *weights, kl = NormalDraw.apply(numbers, [drawn[i] for i in simple], *tensors)
        for i, weight in zip(simple, weights, strict=True):
            drawn[i] = weight
        terms.append(kl)
    return drawn, sum_scalars(terms)


def _by_prior(parts: Sequence[MeanField]) -> tuple[list[int], list[int]]:
    """Return the indices of the parts with fixed normal priors, and of the others."""
    simple = [i for i, part in enumerate(parts) if part.numbers]
    return simple, [i for i, part in enumerate(parts) if not part.numbers]


def _arguments(parts: Sequence[MeanField], means: Sequence[Tensor], simple: list[int]) -> list[Any]:
    numbers = [parts[i].numbers for i in simple]
    return [numbers, *(means[i] for i in simple), *(parts[i].log_scale for i in simple)]
