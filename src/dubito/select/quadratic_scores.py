r"""Two scores per weight from one vector-Jacobian product: quadratic forms, diagonal minus rank one.

With $g_k$ the gradient of column $k$, the squared derivative of the outputs and the curvature of a weight are both

$$\sum_k w_k g_k^2 - \Big(\sum_k u_k g_k\Big)^2$$

For a softmax the columns are the logits minus that of the most probable class $c^*$, $g_c = J_c - J_{c^*}$. Then
$\lVert (I - \mathbf 1\mathbf 1^\top / C) J \rVert^2 = \sum_c g_c^2 - (\sum_c g_c)^2 / C$ and
$J^\top (\mathrm{diag}(p) - p p^\top) J = \sum_c p_c g_c^2 - (\sum_c p_c g_c)^2$. By the
Cauchy-Schwarz inequality the second term is at most $1 - 1/C$ of the first, in both forms. So the difference is
positive, and its relative rounding error grows by at most a factor of $C$, however confident the network is. With
another class in place of $c^*$, both terms of the curvature would be nearly equal for confident predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.select.directions import at_each_position, direction_columns


@dataclass(frozen=True)
class ScoreForms:
    """Squared derivatives and curvature as forms of the gradients of `columns`, K of them at each of T positions."""

    columns: Tensor  # the output columns, ``[T·K, *outputs]``
    squares: Tensor  # the weights w of both forms, ``[B, 2, T·K]``
    sums: Tensor | None = None  # the weights u of both forms, ``[B, T, 2, K]``; None for zeros

    @classmethod
    def of(cls, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> ScoreForms | None:
        """Return the forms of a softmax, or of a diagonal output Hessian; None for others."""
        if isinstance(likelihood, Categorical):
            return cls._of_softmax(likelihood, outputs, targets)
        hessian = likelihood.hessian(outputs, targets)
        own = hessian.diagonal(dim1=-2, dim2=-1)
        if hessian.count_nonzero() != own.count_nonzero():
            return None
        each = own.flatten(1)
        (columns,) = direction_columns(likelihood, outputs, targets, each.shape[1])
        return cls(columns, torch.stack([torch.ones_like(each), each], 1))

    @classmethod
    def _of_softmax(cls, likelihood: Categorical, outputs: Tensor, targets: Tensor) -> ScoreForms:
        logits, kept = likelihood.canonical(outputs), likelihood.observed(targets).unsqueeze(-1)
        width = logits.shape[-1]
        probs = torch.where(kept, logits, 0.0).softmax(-1).reshape(len(logits), -1, width)
        best = probs.argmax(-1, keepdim=True)
        classes = torch.arange(width, device=best.device)
        others = (best + classes[1:]) % width  # [B, T, C − 1]
        columns = (others.unsqueeze(-1) == classes).to(probs) - (best == classes).to(probs).unsqueeze(2)
        probs = probs.gather(-1, others)
        ones = torch.ones_like(probs)
        return cls(
            likelihood.restore(at_each_position(columns).reshape(-1, *logits.shape) * kept, outputs),
            torch.stack([ones.flatten(1), probs.flatten(1)], 1),
            torch.stack([ones / math.sqrt(width), probs], 2),
        )

    def __call__(self, grads: Tensor, examples: Any = slice(None)) -> Tensor:
        """Return both forms of gradients ``[B, T·K, X]`` for each example, ``[B, 2, X]``."""
        found = self.squares[examples] @ grads.square()
        for each in self._sums(grads, examples):
            found.addcmul_(each, each, value=-1)
        return found

    def added_up(self, grads: Tensor, examples: slice) -> Tensor:
        """Return both forms summed over examples, ``[2, X]``; the gradients are overwritten."""
        sums = self._sums(grads, examples)
        found = self.squares[examples].transpose(0, 1).flatten(1) @ grads.square_().flatten(0, 1)
        for each in sums:
            found -= each.square_().sum(0)
        return found

    def _sums(self, grads: Tensor, examples: Any) -> tuple[Tensor, ...]:
        """Return the sums of both forms at each position, ``[B, 2, X]``."""
        if self.sums is None:
            return ()
        weights = self.sums[examples]
        return (weights @ grads.unflatten(1, (weights.shape[1], -1))).unbind(1)
