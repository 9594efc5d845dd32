"""The interfaces of a structured curvature matrix and of its covariance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dubito.core import limits
from dubito.core.errors import InputError, NonFiniteError
from dubito.core.limits import slices
from dubito.core.memory import TensorMemory

# The number of column blocks of a symmetric product, and the fewest columns of one block.
BLOCKS, NARROWEST = 8, 128
# Matrices in float32 of at least this width are decomposed in float32.
LARGE = 1024


class Covariance(ABC):
    r"""The inverse of a precision :math:`P = s H + \mathrm{diag}(\lambda)`."""

    @abstractmethod
    def variance(self) -> Tensor:
        """The marginal variances, ``[D]``."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """``P⁻¹ v`` for vectors ``[..., D]``."""

    @abstractmethod
    def color(self, noise: Tensor) -> Tensor:
        """Transform standard normal noise ``[S, D]`` into draws with this covariance."""

    def sample(self, num_samples: int, size: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """Draw ``[S, D]`` vectors of mean zero."""
        at_once = max(1, limits.current().drawn_weights // (8 * size))  # many draws in float64 may not fit into memory
        drawn = []
        for count in (len(part) for part in torch.arange(num_samples).split(at_once)):
            noise = torch.randn(count, size, generator=generator, dtype=torch.float64, device=generator.device)
            drawn.append(self.color(noise.to(like.device)).to(like.dtype))
        return torch.cat(drawn)


class Matrix(ABC):
    """A symmetric positive semi-definite matrix over `size` weights."""

    size: int
    saved: ClassVar[tuple[str, ...]] = ()
    """The attributes from which it is made again; each is an argument of the constructor, by the same name."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal, ``[D]``."""

    @abstractmethod
    def matmul(self, vectors: Tensor) -> Tensor:
        """``H v`` for vectors ``[..., D]``."""

    @abstractmethod
    def log_det(self, prior: Tensor, scale: Tensor) -> Tensor:
        r""":math:`\log\det(s H + \mathrm{diag}(\lambda))`, differentiable in both."""

    @abstractmethod
    def covariance(self, prior: Tensor, scale: Tensor) -> Covariance:
        r""":math:`(s H + \mathrm{diag}(\lambda))^{-1}`."""

    def covariances(self, priors: Tensor, scale: Tensor) -> Sequence[Covariance]:
        """Return the covariance for each of several numbers λ; they share computations."""
        return [self.covariance(prior, scale) for prior in priors]

    def state(self) -> dict[str, Any]:
        """Tensors and plain values from which `from_state` makes the matrix again: those of `saved`."""
        return {name: getattr(self, name) for name in self.saved}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Undo `state`."""
        return cls(**{name: state[name] for name in cls.saved})

    def precision_matmul(self, vectors: Tensor, prior: Tensor, scale: Tensor) -> Tensor:
        """``(s H + diag(λ)) v``."""
        return scale * self.matmul(vectors) + prior * vectors


class Covariances(Sequence[Covariance]):
    """The covariances of one matrix for several numbers λ, each computed when it is asked for: all take much memory."""

    def __init__(self, matrix: Matrix, priors: Tensor, scale: Tensor) -> None:
        self.matrix, self.priors, self.scale = matrix, priors, scale
        self.memory = TensorMemory()  # what a contraction keeps between batches

    def __len__(self) -> int:
        return len(self.priors)

    def __getitem__(self, index: Any) -> Any:
        """Compute one covariance."""
        return self.matrix.covariance(self.priors[index], self.scale)


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (negative ones set to 0) and eigenvectors of symmetric matrices, in float64.

    A large matrix in float32, whose entries are not more accurate, is decomposed in float32, in half the time, unless
    that fails, as it can for degenerate matrices.
    """
    matrix = check_finite(matrix)
    if matrix.dtype == torch.float32 and matrix.shape[-1] >= LARGE and (found := _eigh_float32(matrix)) is not None:
        return found
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.clamp_min(0.0), vectors


def _eigh_float32(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the eigenpairs if they give the matrix again, up to the rounding of its entries."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:  # it did not converge
        return None
    probe = torch.ones(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    probe[::2] = -1.0
    again = (vectors @ (values.unsqueeze(-1) * (vectors.mT @ probe).unsqueeze(-1))).squeeze(-1)
    error = (again - matrix @ probe).norm() / (values.abs().amax() * probe.norm()).clamp_min(1e-30)
    return (values.double().clamp_min(0.0), vectors) if float(error) < 1e-4 else None


def check_finite(curvature: Tensor) -> Tensor:
    """Return the numbers, or raise an error if one is not finite; unlike `isfinite`, without a copy."""
    if curvature.numel() and not bool(torch.stack(curvature.detach().aminmax()).isfinite().all()):
        raise NonFiniteError("The curvature is not finite: look for NaN weights or extreme outputs of the network.")
    return curvature


def check_positive(precision: Tensor) -> Tensor:
    """Return the precisions, or raise an error if one is not positive."""
    if not bool((check_finite(precision) > 0).all()):
        raise singular()
    return precision


def singular() -> InputError:
    """Return the error for a precision matrix without an inverse."""
    return InputError(
        "The precision of the selected weights is singular even in float64: raise prior_precision, or select fewer "
        "weights (some may have no influence on the outputs)."
    )


def column_blocks(size: int, narrowest: int | None = None) -> list[slice]:
    """Divide columns into blocks, so that a symmetric or triangular product can skip half of its entries.

    >>> column_blocks(300)
    [slice(0, 128, None), slice(128, 256, None), slice(256, 300, None)]
    """
    return slices(size, max(narrowest or NARROWEST, -(-size // BLOCKS)))
