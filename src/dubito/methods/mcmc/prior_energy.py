"""The prior density of the sampled vector: the weights, followed by the logarithm of a noise level."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dubito.beliefs.priors import Normal, Prior
from dubito.beliefs.priors.base import require_real, unchecked
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.params import Params
from dubito.core.precision import widened
from dubito.networks.selection import Selection

# The standard deviation of the normal prior on the logarithm of a noise level that is sampled with the weights.
LOG_NOISE_SCALE = 3.0


class PriorDensity(Protocol):
    """A density over the flat vector ``[D]``, up to a constant."""

    def energy(self, flat: Tensor) -> Tensor:
        """Return the negative log-density."""

    def add_gradient_(self, gradient: Tensor, flat: Tensor) -> None:
        """Add the gradient of `energy` to `gradient`."""

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Return the mean and the variance ``[D]``, or None if they are not finite."""


@dataclass(frozen=True)
class Quadratic:
    r"""A normal density, $\tfrac12 (w - m)^\top \Lambda (w - m)$."""

    size: int  # D
    loc: float | Tensor  # the mean: a number or ``[D]``
    precision: float | Tensor  # a number, ``[D]`` for independent weights, or a matrix ``[D, D]``

    def energy(self, flat: Tensor) -> Tensor:
        """Return the quadratic form."""
        away = flat - self.loc
        return 0.5 * (away * self._times(away)).sum()

    def add_gradient_(self, gradient: Tensor, flat: Tensor) -> None:
        """Add Λ (w − m)."""
        if isinstance(self.loc, float) and self.loc == 0 and isinstance(self.precision, float):
            gradient.add_(flat, alpha=self.precision)
        else:
            gradient.add_(self._times(flat - self.loc))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance."""
        loc, precision = (torch.as_tensor(value).double() for value in (self.loc, self.precision))
        variance = torch.linalg.inv(precision).diagonal() if precision.ndim == 2 else 1 / precision
        return loc.expand(self.size), variance.expand(self.size)

    def _times(self, away: Tensor) -> Tensor:
        is_matrix = isinstance(self.precision, Tensor) and self.precision.ndim == 2
        return self.precision @ away if is_matrix else self.precision * away  # type: ignore[operator]


@dataclass(frozen=True)
class Independent:
    """A product of priors, one for each slice of the vector, differentiated by autograd."""

    parts: tuple[tuple[slice, Prior], ...]

    def energy(self, flat: Tensor) -> Tensor:
        """Return the sum of the negative log-densities."""
        return -torch.stack([prior.log_prob(flat[span]).sum() for span, prior in self.parts]).sum()

    def add_gradient_(self, gradient: Tensor, flat: Tensor) -> None:
        """Add the gradient."""
        with torch.enable_grad():
            leaf = flat.detach().requires_grad_()
            gradient.add_(torch.autograd.grad(self.energy(leaf), leaf)[0])

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Return the mean and the variance, or None if some prior has none."""
        found: list[list[Tensor]] = [[], []]
        for span, prior in self.parts:
            try:
                values = prior.mean(), prior.variance()
            except UnsupportedError:
                return None
            for parts, value in zip(found, values, strict=True):
                parts.append(torch.as_tensor(value).double().flatten().expand(span.stop - span.start))
        return torch.cat(found[0]), torch.cat(found[1])


def check_prior(prior: Prior, owner: str) -> None:
    """Raise an error unless the prior has a known, real-valued and proper density."""
    if not isinstance(prior, Prior):
        raise InputError(f"`prior` of {owner} must be one of dubito.priors, got {prior!r}.")
    require_real(prior)
    if not prior.proper:
        raise InputError(f"{prior!r} is improper, so the posterior may be, too: use priors.Normal or priors.StudentT.")
    if isinstance(getattr(prior, "scale", None), str):
        raise InputError(f"{prior!r} learns its scale from a normal posterior; a sampler needs a fixed scale.")


def make_prior_density(prior: Prior, selection: Selection, weights: Params, num_hyper: int) -> PriorDensity:
    """Return the prior density of the selected weights and of the logarithm of a sampled noise.

    Args:
        prior: The prior of every weight.
        selection: Which weights are random.
        weights: The network's weights, the centre of a prior around the model.
        num_hyper: The number of log noise levels that follow the weights: 0 or 1.
    """
    flat, size = widened(selection.ravel(weights)), selection.num_weights + num_hyper
    parts = [(span, _part(prior, name, span, selection, flat)) for name, span in selection.slices.items()]
    if num_hyper:
        parts.append((slice(size - num_hyper, size), Normal(0.0, LOG_NOISE_SCALE)))
    if not all(isinstance(part, Normal) for _, part in parts):
        return Independent(tuple(parts))
    values = [(span, float_or_flat(part.loc), float_or_flat(part.scale)) for span, part in parts]  # type: ignore[attr-defined]
    first = values[0][1:]
    if all(not isinstance(v, Tensor) for v in first) and all(pair[1:] == first for pair in values):
        return Quadratic(size, float(first[0]), 1 / float(first[1]) ** 2)
    loc, scale = flat.new_empty(size), flat.new_empty(size)
    for span, mean, spread in values:
        loc[span], scale[span] = mean, spread
    return Quadratic(size, loc, scale.square().reciprocal())


def float_or_flat(value: float | Tensor | str) -> float | Tensor:
    """Return a number unchanged and a tensor flattened."""
    return value.flatten() if isinstance(value, Tensor) else float(value)


def from_particles(samples: Tensor, temperature: float = 1.0) -> Quadratic:
    """Return the normal density with the moments of samples ``[S, D]``, the prior of an update.

    The covariance of the samples is used if there are ten samples per dimension, otherwise only its diagonal.

    Args:
        samples: The samples.
        temperature: T, at which the samples were drawn. The energy is multiplied by T, because the potential that
            contains it is divided by T again.
    """
    count, size = samples.shape
    wide = samples.double()
    if count >= 10 * size:
        precision = torch.linalg.inv(torch.cov(wide.mT).reshape(size, size))
    else:
        variance = wide.var(0) if count > 1 else torch.ones(size, dtype=torch.float64)
        precision = 1 / variance.clamp_min(1e-12)
    return Quadratic(size, wide.mean(0).to(samples), (temperature * precision).to(samples))


def _part(prior: Prior, name: str, span: slice, selection: Selection, flat: Tensor) -> Prior:
    """Return the prior of the selected entries of one parameter, with its tensors cut to them and flattened."""
    resolved = prior.resolve(name, flat[span])
    check_prior(resolved, "The sampler")
    count, total = span.stop - span.start, math.prod(selection.shapes[name])
    changes = {}
    for field, value in resolved.fields().items():
        if not isinstance(value, Tensor) or not value.ndim:
            continue
        value = value.flatten()
        if len(value) == total != count:
            value = value[selection.positions(name)]
        if len(value) != count:
            raise InputError(f"The prior of '{name}' has {len(value)} values of {field} for {count} random weights.")
        changes[field] = value.to(flat)
    fitting = unchecked(resolved, **changes) if changes else resolved
    fitting.log_prob(flat[span])  # raises for a prior that must still be learned
    return fitting
