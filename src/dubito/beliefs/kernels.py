"""Kernels: the covariance of a function at two inputs, for priors over functions.

- ``RBF(lengthscale)``, ``Matern(lengthscale, smoothness=1.5)``: smooth functions
- ``Periodic(period)``: functions that repeat themselves
- ``RBF(1.0) + Periodic(2.0)`` and ``RBF(9.0) * Periodic(2.0)``: sums and products
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from dubito.core.constraints import CountOrZero, Positive, PositiveValue
from dubito.core.errors import InputError
from dubito.core.settings import Setting, setting

__all__ = ["RBF", "Kernel", "Matern", "Periodic", "Product", "Sum"]


@setting
class Kernel(Setting, ABC):
    """A covariance function; call `resolve` once, then `matrix`."""

    described = "one of dubito.kernels, such as kernels.RBF()"

    @abstractmethod
    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the covariances ``[N, M]`` between rows ``[N, F]`` and ``[M, F]``, in float64."""

    @abstractmethod
    def resolve(self, x: Tensor) -> Kernel:
        """Return the kernel with numbers in the place of words, given rows ``[N, F]``, and check that it fits them."""

    def __add__(self, other: Kernel) -> Sum:
        return Sum((self, other))

    def __mul__(self, other: Kernel) -> Product:
        return Product((self, other))


@setting
class _Stationary(Kernel):
    """A kernel of the distance between inputs, each feature divided by its lengthscale."""

    lengthscale: PositiveValue | Literal["median"] = "median"
    scale: Positive = 1.0
    columns: tuple[CountOrZero, ...] | None = None

    def resolve(self, x: Tensor) -> Kernel:
        """Replace ``"median"`` by the median distance between the rows."""
        seen = _chosen(x, self.columns)
        if self.lengthscale != "median" or isinstance(self.lengthscale, Tensor):
            _check_width("lengthscale", self.lengthscale, seen)
            return self
        distances = torch.pdist(seen[:: max(1, len(seen) // 1000)])
        distances = distances[distances > 0]
        if not len(distances):
            raise InputError("All inputs are the same, so they show no lengthscale: give lengthscale= a number.")
        return self.replace(lengthscale=float(distances.median()))

    def _length(self, x: Tensor) -> Tensor:
        if isinstance(self.lengthscale, str):
            raise InputError("The lengthscale is not known yet: call `resolve` with some inputs first.")
        return torch.as_tensor(self.lengthscale, dtype=torch.float64, device=x.device)

    def _distance(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = _chosen(x, self.columns), _chosen(y, self.columns)
        # not by matrix products, whose rounding would make nearby inputs too distant
        return torch.cdist(
            first / self._length(x), second / self._length(x), compute_mode="donot_use_mm_for_euclid_dist"
        )


@setting
class RBF(_Stationary):
    r"""Infinitely smooth functions, $k(x, y) = s^2 \exp(-\|x - y\|^2 / 2 \ell^2)$.

    >>> float(RBF(2.0).matrix(torch.zeros(1, 1), 2 * torch.ones(1, 1)))  # exp(-1/2)
    0.6065306597126334

    Args:
        lengthscale: ℓ, a number or one per feature; ``"median"`` is the median distance between the context points.
        scale: s, the standard deviation of a function's value.
        columns: Which features it looks at; by default all.
    """

    setting_name = "kernels.RBF"

    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the covariances ``[N, M]``."""
        return self.scale**2 * (-0.5 * self._distance(x, y).square()).exp()


@setting
class Matern(_Stationary):
    r"""Functions that are differentiable less than ν times; ``smoothness=0.5`` is $s^2 \exp(-\|x - y\| / \ell)$.

    >>> float(Matern(2.0, smoothness=0.5).matrix(torch.zeros(1, 1), 2 * torch.ones(1, 1)))  # exp(-1)
    0.36787944117144233

    Args:
        lengthscale: As in `RBF`.
        scale: s, the standard deviation of a function's value.
        columns: Which features it looks at; by default all.
        smoothness: ν: 0.5, 1.5 or 2.5.
    """

    setting_name = "kernels.Matern"
    smoothness: Positive = 2.5

    def __post_init__(self) -> None:
        if self.smoothness not in (0.5, 1.5, 2.5):
            raise InputError(f"`smoothness` must be 0.5, 1.5 or 2.5, got {self.smoothness:g}.")

    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the covariances ``[N, M]``."""
        distance = math.sqrt(2 * self.smoothness) * self._distance(x, y)
        factor = torch.ones_like(distance)
        if self.smoothness > 0.5:
            factor += distance
        if self.smoothness > 1.5:
            factor += distance.square() / 3
        return self.scale**2 * factor * (-distance).exp()


@setting
class Periodic(Kernel):
    r"""Functions of a given period, $k(x, y) = s^2 \exp\big(-2 \sum_f \sin^2(\pi (x_f - y_f) / p) / \ell^2\big)$.

    >>> float(Periodic(3.0).matrix(torch.zeros(1, 1), 6 * torch.ones(1, 1)))  # two periods away
    1.0

    Args:
        period: p, a number or one per feature, in the units of the inputs.
        lengthscale: ℓ, relative to the period; large values are close to a sine.
        scale: s, the standard deviation of a function's value.
        columns: Which features it looks at; by default all.
    """

    setting_name = "kernels.Periodic"
    period: PositiveValue
    lengthscale: Positive = 1.0
    scale: Positive = 1.0
    columns: tuple[CountOrZero, ...] | None = None

    def resolve(self, x: Tensor) -> Kernel:
        """Check that it fits the inputs."""
        _check_width("period", self.period, _chosen(x, self.columns))
        return self

    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the covariances ``[N, M]``."""
        period = torch.as_tensor(self.period, dtype=torch.float64, device=x.device)
        first, second = _chosen(x, self.columns) / period, _chosen(y, self.columns) / period
        total = first.new_zeros(len(first), len(second))
        for one, other in zip(first.mT, second.mT, strict=True):  # feature by feature, to save memory
            total += (math.pi * (one[:, None] - other)).sin().square()
        return self.scale**2 * (-2 * total / self.lengthscale**2).exp()


@setting
class _Combined(Kernel):
    """A kernel made of several."""

    kernels: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        if not self.kernels:
            raise InputError("`kernels` must hold at least one kernel, got none.")

    def resolve(self, x: Tensor) -> Kernel:
        """Resolve each kernel."""
        return self.replace(kernels=tuple(kernel.resolve(x) for kernel in self.kernels))


@setting
class Sum(_Combined):
    """The sum of independent functions, as ``RBF() + Periodic(1.0)`` makes it.

    Args:
        kernels: Their kernels.
    """

    setting_name = "kernels.Sum"

    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the covariances."""
        return torch.stack([kernel.matrix(x, y) for kernel in self.kernels]).sum(0)


@setting
class Product(_Combined):
    """The product of kernels: ``RBF(9.0) * Periodic(1.0)`` is a period that changes slowly.

    Args:
        kernels: The kernels.
    """

    setting_name = "kernels.Product"

    def matrix(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the product of the covariances."""
        return torch.stack([kernel.matrix(x, y) for kernel in self.kernels]).prod(0)


def _chosen(x: Tensor, columns: tuple[int, ...] | None) -> Tensor:
    """Return the columns that a kernel looks at, in float64."""
    if columns is None:
        return x.double()
    if not columns or max(columns) >= x.shape[1]:
        raise InputError(f"`columns` is {columns}, but the inputs have {x.shape[1]} features, from 0 on.")
    return x[:, list(columns)].double()


def _check_width(name: str, value: object, x: Tensor) -> None:
    """Raise an error unless `value` is a number or has one entry per feature."""
    if isinstance(value, Tensor) and value.ndim and value.shape != x.shape[1:]:
        raise InputError(
            f"`{name}` must be a number or have one value for each of the {x.shape[1]} features, got shape "
            f"{tuple(value.shape)}."
        )
