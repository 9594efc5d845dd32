"""What is believed before the data, about all sampled numbers as one vector: the weights, then a noise level."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dubito.beliefs.priors import Normal, Prior
from dubito.beliefs.priors.base import require_real, unchecked
from dubito.core.errors import InputError, UnsupportedError
from dubito.networks.selection import Selection

# The standard deviation of the normal prior on the logarithm of a noise level that is sampled with the weights.
LOG_NOISE_SCALE = 3.0


class Belief(Protocol):
    """A density over the flat vector ``[D]``, up to a constant."""

    def energy(self, flat: Tensor) -> Tensor:
        """Return the negative log-density."""

    def add_gradient_(self, gradient: Tensor, flat: Tensor) -> None:
        """Add the gradient of `energy` to `gradient`."""

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Return mean and variance ``[D]``, or None where there are none."""


@dataclass(frozen=True)
class Quadratic:
    r"""A normal density, $\tfrac12 (w - m)^\top \Lambda (w - m)$.

    Args:
        size: D.
        loc: The mean: a number or ``[D]``.
        precision: A number, ``[D]`` for independent weights, or a matrix ``[D, D]``.
    """

    size: int
    loc: float | Tensor
    precision: float | Tensor

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
    """Any priors, one for each slice of the vector; gradients by autograd."""

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
        """Return mean and variance where every prior has them."""
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
    """Raise where a sampler cannot use a prior: its density must be known, real-valued and proper."""
    if not isinstance(prior, Prior):
        raise InputError(f"{owner}(prior={prior!r}) must be one of dubito.priors.")
    require_real(prior)
    if not prior.proper:
        raise InputError(f"{prior!r} is improper, and so would be what is sampled: use priors.Normal or StudentT.")
    if isinstance(getattr(prior, "scale", None), str):
        raise InputError(f"{prior!r} is fitted to a normal posterior; a sampler needs a prior with numbers.")


def make_belief(prior: Prior, selection: Selection, weights: Mapping[str, Tensor], num_hyper: int) -> Belief:
    """Return the prior of the selected weights of a network, and of the logarithm of a noise that is sampled too.

    Args:
        prior: The prior of every weight.
        selection: Which weights are random.
        weights: Where the network is; a prior around the model is centred there.
        num_hyper: How many logarithms of noise levels follow the weights: 0 or 1.
    """
    flat, size = selection.ravel(weights), selection.num_weights + num_hyper
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
    """Return a number as it is and a tensor flat."""
    return value.flatten() if isinstance(value, Tensor) else float(value)


def from_particles(samples: Tensor, temperature: float = 1.0) -> Quadratic:
    """Return the normal density with the moments of samples ``[S, D]``: yesterday's posterior as today's prior.

    With ten samples per dimension the covariance is that of the samples, else only its diagonal.

    Args:
        samples: The samples.
        temperature: T, at which they were drawn and at which this density is part of the potential again: divided by T
            its energy is that of the samples.
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
    """The prior of the selected entries of one parameter; what it has one of per weight is cut to these and flat."""
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
    fitting.log_prob(flat[span])  # one that is still to be learned says so here
    return fitting
