r"""The families of a component's posterior over factors, and their KL divergences from a prior.

| family | a draw | KL divergence in closed form from |
|---|---|---|
| ``"normal"`` | $\mu + \sigma \epsilon$ | `Normal`, `Laplace`, `LogUniform`, `ARD` |
| ``"cauchy"`` | $\mu + \gamma \tan \pi (u - \frac12)$ | `Cauchy` |
| ``"log-normal"`` | $e^{\mu + \sigma \epsilon}$ | `LogNormal` |
| ``"delta"`` | $\mu$ | any prior: $-\log p(\mu)$ |

For any other pair with a finite KL divergence, an unbiased estimate is computed from one sample and the exact entropy
of the posterior.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from dubito.beliefs.priors import Prior
from dubito.beliefs.priors.base import require_real
from dubito.core.errors import InputError, UnsupportedError

Family = Literal["normal", "cauchy", "log-normal", "delta"]
CLIP = 10.0  # the largest factor; a larger one from a heavy tail would dominate a whole batch


def check_pair(family: str, prior: Prior | None) -> None:
    """Raise an error if a posterior family has no finite KL divergence from a prior."""
    if prior is None:
        if family != "delta":
            raise InputError(f"A {family} posterior needs a prior; only family='delta' can do without one.")
        return
    if prior.refers_to_model:
        raise InputError(f"{prior!r} is for weights, but this prior is for factors: use priors.Normal(1.0, 0.1).")
    if prior.positive and family != "log-normal":
        raise InputError(
            f"{prior!r} allows only positive factors, but a {family} posterior is over all real numbers: use "
            "family='log-normal' with it, or a prior such as priors.Normal(1.0, 0.1)."
        )
    if family == "cauchy" and not prior.heavy_tails:
        raise InputError(
            f"The KL divergence of a Cauchy posterior from {prior!r} is infinite, because its tails are heavier: use "
            "priors.Cauchy(1.0, 0.1) or priors.StudentT."
        )
    if family == "delta" and prior.adapts:
        raise InputError(f"{prior!r} has no highest density, so it has no most probable factors: use another prior.")
    if family == "log-normal" and prior.needs_normal:
        raise InputError(f"{prior!r} fits normal factors only: use priors.LogNormal, HalfCauchy or LogUniform.")


def draw(
    family: str,
    loc: Tensor,
    scale: Tensor | None,
    *,
    shape: tuple[int, ...] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw factors, differentiable in location and scale.

    Args:
        family: The family of the posterior.
        loc: Locations.
        scale: Scales of either sign that broadcast over the locations; None for point estimates.
        shape: The shape of the noise; by default that of the locations.
        generator: The source of randomness; by default the global one.
    """
    if scale is None:
        return loc
    device = loc.device if generator is None else generator.device
    noise = torch.empty(loc.shape if shape is None else shape, dtype=loc.dtype, device=device)
    if family == "cauchy":
        noise = noise.uniform_(generator=generator).sub_(0.5).mul_(math.pi).tan_()
    else:
        noise = noise.normal_(generator=generator)
    drawn = torch.addcmul(loc, scale, noise.to(loc.device))
    if family == "normal":
        return drawn
    return drawn.clamp(-CLIP, CLIP) if family == "cauchy" else drawn.clamp_max(math.log(CLIP)).exp()


def center(family: str, loc: Tensor) -> Tensor:
    """Return the medians of the factors."""
    return loc.exp() if family == "log-normal" else loc


def location(family: str, factors: Tensor) -> Tensor:
    """Return the locations with these medians: the inverse of `center`."""
    if family != "log-normal":
        return factors
    if bool((factors <= 0).any()):
        raise InputError("A log-normal posterior cannot start from factors below zero: use family='normal'.")
    return factors.log()


def moments(family: str, loc: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the factors, without the clipping of far tails."""
    if scale is None:
        return loc, torch.zeros_like(loc)
    if family == "cauchy":
        raise UnsupportedError("Cauchy factors have neither mean nor variance: draw weights with sample.")
    square = scale.square().expand(loc.shape)
    if family == "normal":
        return loc, square
    mean = (loc + square / 2).exp()
    return mean, mean.square() * square.expm1()


def kl_divergence(
    family: str,
    prior: Prior | None,
    loc: Tensor,
    log_scale: Tensor | None,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""$\mathrm{KL}(q \| p)$ summed over all factors, differentiable in location and scale.

    >>> from dubito.beliefs.priors import Cauchy
    >>> kl_divergence("cauchy", Cauchy(1.0, 0.1), torch.ones(3), torch.full((3,), 0.1).log()).item()
    0.0
    """
    if prior is None:
        return loc.new_zeros(())
    if log_scale is None:
        return -prior.fitted(loc, torch.zeros_like(loc)).log_prob(loc).sum()
    log_scale = log_scale.expand(loc.shape)
    if family == "normal":
        require_real(prior)
        return prior.summed_kl(loc, log_scale, generator=generator)
    scale = log_scale.exp()
    exact = prior.kl_from_cauchy(loc, scale) if family == "cauchy" else prior.kl_from_log_normal(loc, scale)
    if exact is not None:
        return exact.sum()
    drawn = draw(family, loc, scale, generator=generator)
    return -_entropy(family, loc, log_scale) - prior.log_prob(drawn).sum()


def _entropy(family: str, loc: Tensor, log_scale: Tensor) -> Tensor:
    """Return the exact entropy: log 4πγ for a Cauchy variable, μ + ½ log 2πeσ² for a log-normal one."""
    if family == "cauchy":
        return (log_scale + math.log(4 * math.pi)).sum()
    return (loc + log_scale + 0.5 * math.log(2 * math.pi * math.e)).sum()
