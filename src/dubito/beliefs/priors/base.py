"""`Prior`, the base class of distributions of the weights before the data."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from dubito.core.errors import InputError, UnsupportedError
from dubito.core.settings import Setting, setting

Value = float | Tensor  # a number, or one per weight
P = TypeVar("P", bound="Prior")


@setting
class Prior(Setting, ABC):
    r"""A distribution $p(w)$ of independent weights.

    A subclass must define `log_prob`. `kl` returns the exact KL divergence of a normal posterior if a closed form is
    known; otherwise `summed_kl` estimates it without bias from one sample, with the exact entropy of the posterior. A
    prior that learns its own numbers is `fitted` to a posterior; one that refers to the network (``loc="model"``) must
    be `resolve`-d first.
    """

    described = "one of dubito.priors for weights"
    positive: ClassVar[bool] = False
    """Whether the prior allows only positive values; such a prior is for scales, not for weights."""

    proper: ClassVar[bool] = True
    """Whether the density can be normalized; otherwise the evidence is defined only up to a constant."""

    adapts: ClassVar[bool] = False
    """Whether the prior adapts to each weight: such a prior has no most probable weights."""

    heavy_tails: ClassVar[bool] = False
    """Whether the KL divergence of a Cauchy posterior from this prior is finite."""

    needs_normal: ClassVar[bool] = False
    """Whether the prior has a density only once it is `fitted` to a normal posterior."""

    learned_fields: ClassVar[tuple[str, ...]] = ()
    """The fields with tensors that are trained along with the weights."""

    @property
    def refers_to_model(self) -> bool:
        """Whether the prior depends on the model's parameters, and must be `resolve`-d first."""
        return False

    @abstractmethod
    def log_prob(self, w: Tensor) -> Tensor:
        """Return the log-density of each weight, in the shape of `w`."""

    def kl(self, q_mean: Tensor, q_scale: Tensor) -> Tensor | None:
        r"""Return $\mathrm{KL}(\mathcal N(\mu, \sigma^2) \,\|\, p)$ of each weight, or None if it has no closed form.

        Args:
            q_mean: The means μ of the posterior.
            q_scale: Its standard deviations σ.
        """
        return None

    def kl_from_cauchy(self, q_loc: Tensor, q_scale: Tensor) -> Tensor | None:
        """Return the KL divergence of a Cauchy posterior of each weight, or None if it has no closed form."""
        return None

    def kl_from_log_normal(self, q_loc: Tensor, q_scale: Tensor) -> Tensor | None:
        """Return the KL divergence of a log-normal posterior of each weight, or None if it has no closed form."""
        return None

    def summed_kl(self, mean: Tensor, log_scale: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        r"""Return $\mathrm{KL}(q \| p)$ summed over the weights of one parameter, differentiable in both arguments.

        Args:
            mean: The means of a normal posterior.
            log_scale: The logarithms of its standard deviations.
            generator: The source of randomness, if there is no closed form; by default the global generator.
        """
        require_real(self)
        scale = log_scale.exp()
        exact = self.kl(mean, scale)
        if exact is not None:
            return exact.sum()
        drawn = mean + scale * _normal(mean.shape, mean, generator)
        entropy = log_scale.sum() + 0.5 * mean.numel() * math.log(2 * math.pi * math.e)
        return -entropy - self.fitted(mean, scale).log_prob(drawn).sum()

    def fitted(self, mean: Tensor, scale: Tensor) -> Prior:
        """Return the prior with its learned numbers at their optimum for a normal posterior."""
        return self

    def penalty(self) -> Tensor | float:
        """Return the negative log-density of the learned tensors under their hyperprior."""
        return 0.0

    def resolve(self, name: str, weights: Tensor) -> Prior:
        """Return the prior of the named parameter, with the given weights in the place of ``loc="model"``."""
        return self

    def sample(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw weights of a given shape, on the generator's device."""
        raise UnsupportedError(f"{self!r} cannot be sampled: it is not a proper distribution.")

    def mean(self) -> Value:
        """Return the mean."""
        raise UnsupportedError(f"{self!r} has no mean.")

    def variance(self) -> Value:
        """Return the variance."""
        raise UnsupportedError(f"{self!r} has no variance.")


def require_real(prior: Prior) -> None:
    """Raise an error if a prior for positive scales is used for weights."""
    if prior.positive:
        raise InputError(
            f"{prior!r} allows only positive weights, but the posterior is over all real numbers, so the KL divergence "
            "is infinite: use a prior such as priors.Normal, Laplace or Cauchy."
        )


def unchecked(prior: P, **changes: object) -> P:
    """Return a copy with some fields changed, without checks, which would have to wait for a GPU."""
    changed = object.__new__(type(prior))
    for name, value in {**prior.fields(), **changes}.items():
        object.__setattr__(changed, name, value)
    return changed


def blank(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """Return an uninitialized tensor on the generator's device, to be filled with noise."""
    return torch.empty(tuple(shape), dtype=dtype, device=None if generator is None else generator.device)


def like(value: Value, w: Tensor) -> Value:
    """Convert a tensor to the dtype and device of `w`; return a number as it is."""
    return value.to(w) if isinstance(value, Tensor) else value


def log(value: Value) -> Value:
    """Return the logarithm of a number or a tensor."""
    return value.log() if isinstance(value, Tensor) else math.log(value)


def _normal(shape: Sequence[int], w: Tensor, generator: torch.Generator | None) -> Tensor:
    device = w.device if generator is None else generator.device
    return torch.empty(tuple(shape), dtype=w.dtype, device=device).normal_(generator=generator).to(w.device)
