r"""Choose weights greedily, so that together they capture most of the predictive variance.

With precision $P = H + \lambda I$ and the Jacobian $J$ of the outputs at the inputs that matter, a subnetwork $S$
captures $\operatorname{tr} J_S P_{SS}^{-1} J_S^\top$. Adding weight $d$ gains

$$\frac{\sum_m R_{md}^2}{r_d}, \qquad R = J - J_S P_{SS}^{-1} P_{S:}, \qquad r_d = P_{dd} - P_{dS} P_{SS}^{-1} P_{Sd}$$

where $R$ and $r$ are the residuals of a pivoted Cholesky factorization of $P$. Neither $H$ nor $J^\top J$ is formed:
only the columns of the most promising weights are computed, in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dubito.core import distributed, limits
from dubito.core.limits import numbers
from dubito.select.budgets import SelectionBudget

# The number of columns of the Gram matrices that one pass over the rows computes.
BLOCK = 128


class JacobianRows:
    """Rows of a Jacobian over the candidates, of whose Gram matrix single columns can be computed.

    Args:
        make: Yields the rows in parts ``[m, n]``.
        size: The number of candidates n.
        shared: Whether each process has only its own rows.
        scale: The factor of the Gram matrix.
    """

    def __init__(
        self, make: Callable[[], Iterator[Tensor]], size: int, *, shared: bool = False, scale: float = 1.0
    ) -> None:
        self.make, self.size, self.shared, self.scale = make, size, shared, scale
        self.kept: list[Tensor] | None = None

    def gram_columns(self, wanted: Tensor) -> Tensor:
        """Return the columns `wanted` of ``scale · JᵀJ``, ``[n, w]``."""
        total = torch.zeros(self.size, len(wanted), dtype=torch.float64)
        for rows in self._parts():
            total += (rows.mT @ rows[:, wanted]).cpu()
        distributed.sum_([total] if self.shared else [])
        return total * self.scale

    def _parts(self) -> Iterator[Tensor]:
        if self.kept is not None:
            yield from self.kept
            return
        kept: list[Tensor] | None = []
        most = numbers(limits.current().kept_rows)
        for rows in self.make():
            if kept is not None:
                kept.append(rows)
                kept = kept if sum(part.numel() for part in kept) <= most else None
            yield rows
        self.kept = kept


class _Columns:
    """The columns of several Gram matrices, computed in blocks of the most promising weights."""

    def __init__(self, *streams: JacobianRows) -> None:
        self.streams = streams
        self.known: dict[int, tuple[Tensor, ...]] = {}

    def take(self, index: int, gains: Tensor) -> tuple[Tensor, ...]:
        """Return one column of each matrix, and forget it."""
        if index not in self.known:
            fresh = gains.clone()
            fresh[list(self.known)] = -math.inf
            count = min(BLOCK, int(fresh.isfinite().sum()))
            wanted = torch.topk(fresh, count).indices
            blocks = [stream.gram_columns(wanted) for stream in self.streams]
            for column, weight in enumerate(wanted.tolist()):
                self.known[weight] = tuple(block[:, column] for block in blocks)
        return self.known.pop(index)


def greedy(
    curvature: JacobianRows,
    jacobian: JacobianRows,
    diagonal: Tensor,
    squares: Tensor,
    prior: float,
    budget: SelectionBudget,
) -> Tensor:
    """Return the chosen candidates in the order in which they were chosen.

    Args:
        curvature: Rows whose Gram matrix is the curvature H.
        jacobian: Rows of the Jacobian J whose variance is to be captured.
        diagonal: The diagonal of H, ``[n]``.
        squares: The diagonal of ``JᵀJ``, ``[n]``.
        prior: The prior precision λ.
        budget: How many to choose, in all and of each group.
    """
    columns = _Columns(curvature, jacobian)
    size, count = len(diagonal), budget.count
    factor, along = torch.zeros(count, size).double(), torch.zeros(count, size).double()  # L and UᵀJ, a row per step
    inner = torch.zeros(count, count).double()  # UᵀU
    left, residual, rest = diagonal.double() + prior, squares.double().clone(), list(budget.limits)
    open_ = torch.ones(size, dtype=torch.bool)
    for index, limit in enumerate(rest):
        open_ &= (budget.group != index) | (limit > 0)
    order = []
    for step in range(count):
        gains = torch.where(open_, residual / left, -math.inf)
        best = int(gains.argmax())
        column, cross = columns.take(best, gains)
        column = column.index_add(0, torch.tensor([best]), column.new_tensor([prior]))
        root, own = left[best].sqrt(), factor[:step, best]
        new = (column - own @ factor[:step]) / root
        derivative = (cross - own @ along[:step]) / root  # Jᵀu for the new unit direction u
        overlap = (along[:step, best] - inner[:step, :step] @ own) / root
        norm = residual[best] / left[best]
        residual = residual - 2 * new * (derivative - overlap @ factor[:step]) + new.square() * norm
        residual, left = residual.clamp_min(0.0), (left - new.square()).clamp_min(prior)
        factor[step], along[step] = new, derivative
        inner[step, :step] = inner[:step, step] = overlap
        inner[step, step] = norm
        order.append(best)
        open_[best] = False
        group = int(budget.group[best])
        if group >= 0:
            rest[group] -= 1
            if rest[group] == 0:
                open_ &= budget.group != group
    return torch.tensor(order)
