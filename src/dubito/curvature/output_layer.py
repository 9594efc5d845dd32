r"""The output layer: its gradients are the output columns themselves, so few columns suffice.

A structure needs only part of the output Hessian $H_n$ of each example: the diagonal of a linear layer only
$\mathrm{diag}(H_n)$, its Kronecker factor only $\sum_n H_n$.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.core import limits
from dubito.core.limits import numbers
from dubito.curvature.calls import LayerCall
from dubito.curvature.engine import Tape
from dubito.curvature.matrices.base import eigh
from dubito.networks.layers.rows import DenseRows


def is_direct(tape: Tape) -> bool:
    """Return whether all random weights are in output layers, so that no backward pass is needed."""
    top = tape.top if tape.outputs.requires_grad else None
    return not tape.engine.fallback and all(call.edge[:2] == top for call in tape.calls)


def is_one_linear(tape: Tape) -> bool:
    """Return whether all random weights are one linear layer, called once, with the outputs ``[B, C]``."""
    if not is_direct(tape) or len(tape.calls) != 1 or tape.outputs.ndim != 2:
        return False
    call = tape.calls[0]
    return isinstance(call, LayerCall) and isinstance(call.rows, DenseRows) and call.rows.shape[1] == 1


def few_columns(structure: str, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Return few columns ``[V, B, C]`` that give one linear layer the same "diag" or "kron" `structure` as all would.

    For the diagonal, it is the column $\sqrt{\mathrm{diag}(H_n)}$. For Kronecker factors, the columns of a root of
    $\sum_n H_n$ are distributed over the examples, because only the sum of their outer products matters.
    """
    if structure == "diag":
        return hessian_diagonal(likelihood, outputs, targets).sqrt()[None]
    values, vectors = eigh(hessian_sum(likelihood, outputs, targets))
    root = (vectors * values.sqrt()).mT.to(outputs.dtype)
    batch, width = outputs.shape
    columns = -(-width // batch)
    return torch.nn.functional.pad(root, (0, 0, 0, columns * batch - width)).reshape(columns, batch, width)


def hessian_diagonal(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the diagonal of each output Hessian, ``[B, C]``."""
    if not isinstance(likelihood, Categorical):
        return torch.cat([part.diagonal(dim1=-2, dim2=-1) for part in _hessians(likelihood, outputs, targets)])
    step = max(1, numbers(limits.current().chunk) // outputs.shape[-1])
    kept = likelihood.observed(targets).unsqueeze(-1)
    parts = zip(outputs.split(step), kept.split(step), strict=True)
    return torch.cat([torch.where(some, _softmax_diagonal(logits), 0.0).to(outputs.dtype) for logits, some in parts])


def _softmax_diagonal(logits: Tensor) -> Tensor:
    """Return p(1 − p) in float64, also where p rounds to 1."""
    probs = logits.double().softmax(dim=-1)
    best = probs.argmax(dim=-1, keepdim=True)
    others = probs.scatter(-1, best, 0.0).sum(dim=-1, keepdim=True)
    return probs * (1 - probs).scatter_(-1, best, others)


def hessian_sum(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the output Hessians, ``[C, C]`` in float64."""
    if isinstance(likelihood, Categorical):
        probs = torch.where(likelihood.observed(targets).unsqueeze(-1), outputs.double().softmax(dim=-1), 0.0)
        total = -(probs.mT @ probs)
        diagonal = hessian_diagonal(likelihood, outputs.double(), targets).sum(0)
        return total.diagonal_scatter(diagonal)
    return torch.stack([part.double().sum(0) for part in _hessians(likelihood, outputs, targets)]).sum(0)


def _hessians(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    step = max(1, numbers(limits.current().chunk) // outputs.shape[-1] ** 2)
    for part in zip(outputs.split(step), targets.split(step), strict=True):
        yield likelihood.hessian(*part)
