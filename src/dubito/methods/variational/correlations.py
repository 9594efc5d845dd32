r"""Correlated normal posteriors: $\Sigma = \mathrm{diag}(\sigma)\,R R^\top \mathrm{diag}(\sigma)$.

- ``"full"``: $R = I + L$ with $L$ strictly lower triangular: any covariance; $D^2$ numbers.
- ``"low-rank"``: $R R^\top = I + V V^\top$ with $V$ of `rank` columns (Ong et al. 2018,
  https://doi.org/10.1080/10618600.2017.1390472); $D \cdot$ rank numbers.

The factor, $L$ or $V$, has no unit: it holds the correlations, and σ the scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dubito.core import limits
from dubito.core.errors import InputError
from dubito.core.limits import numbers

Family = Literal["mean-field", "low-rank", "full"]
# The initial scale of a low-rank factor: at zero its gradient would vanish.
START = 0.1


@dataclass(frozen=True, eq=False)
class Correlations:
    """The correlations of the weights, given the factor of a family.

    Args:
        family: ``"full"`` or ``"low-rank"``.
        factor: ``[D, D]``, of which only the part below the diagonal is used, or ``[D, rank]``.

    >>> alone = Correlations("low-rank", torch.tensor([[2.0], [0.0]]))
    >>> alone.spread().square().tolist()  # the diagonal of R Rᵀ
    [5.0, 1.0]
    """

    family: str
    factor: Tensor

    @classmethod
    def start(cls, family: str, size: int, rank: int, like: Tensor) -> Tensor:
        """Return the initial factor: no correlations, or very small ones."""
        most = numbers(limits.current().covariance_factor)
        if family == "full" and size**2 > most:
            raise InputError(
                f"family='full' stores a number for every pair of weights, and {size:,} weights are too many (at most "
                f"{math.isqrt(most):,}): select fewer with `weights`, or use family='low-rank'."
            )
        if family == "low-rank" and size * rank > most:
            raise InputError(
                f"family='low-rank' of rank {rank} over {size:,} weights is too large (at most {most:,} "
                "numbers): select fewer weights with `weights`, or use a smaller rank."
            )
        if family == "full":
            return like.new_zeros(size, size)
        return like.new_empty(size, rank).normal_().mul_(START / math.sqrt(rank))

    @property
    def rows(self) -> Tensor:
        """Return the factor, with zeros where its entries are not used."""
        return self.factor.tril(-1) if self.family == "full" else self.factor

    def apply(self, noise: Tensor, generator: torch.Generator | None = None) -> Tensor:
        r"""Transform independent normal numbers ``[..., D]`` to covariance $R R^\top$; may draw more noise."""
        if self.family == "full":
            return noise + noise @ self.rows.mT
        device = noise.device if generator is None else generator.device
        more = torch.empty(*noise.shape[:-1], self.factor.shape[1], dtype=noise.dtype, device=device)
        return noise + more.normal_(generator=generator).to(noise.device) @ self.factor.mT

    def spread(self) -> Tensor:
        r"""Return the square roots of the diagonal of $R R^\top$ ``[D]``: each weight's marginal scale over its σ."""
        return (1 + self.rows.square().sum(1)).sqrt()

    def log_det(self) -> Tensor:
        r"""Return $\log \det R R^\top$."""
        if self.family == "full":
            return self.factor.new_zeros(())
        return 2 * self._inner_root().diagonal().log().sum()

    def square(self, columns: Tensor) -> Tensor:
        r"""Return $\mathrm{tr}\,B^\top (R R^\top)^{-1} B$ for columns $B$ ``[D, k]``."""
        if self.family == "full":
            root = self.rows + torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)
            return torch.linalg.solve_triangular(root, columns, upper=False).square().sum()
        inner = torch.linalg.solve_triangular(self._inner_root(), self.factor.mT @ columns, upper=False)
        return columns.square().sum() - inner.square().sum()

    def trace(self, other: Correlations, ratio: Tensor) -> Tensor:
        r"""Return $\mathrm{tr}\,(R R^\top)^{-1} \mathrm{diag}(r) R' R'^\top \mathrm{diag}(r)$, R' of this family."""
        own = other.rows * ratio[:, None]
        if self.family == "full":
            return self.square(own + torch.diag(ratio))
        inner = torch.linalg.solve_triangular(self._inner_root(), self.factor.mT, upper=False)  # [rank, D]
        alone = (ratio.square() * (1 - inner.square().sum(0))).sum()  # the part for R' R'ᵀ = I
        return alone + self.square(own)

    def _inner_root(self) -> Tensor:
        r"""Return the Cholesky factor of $I + V^\top V$."""
        identity = torch.eye(self.factor.shape[1], dtype=self.factor.dtype, device=self.factor.device)
        # without the check of `cholesky`, which reads from the device: the eigenvalues are at least 1
        return torch.linalg.cholesky_ex(identity + self.factor.mT @ self.factor).L
