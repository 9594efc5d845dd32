r"""The columns of a vector-Jacobian product, whose outer products sum to the likelihood's output Hessian.

`ggn`: all columns of a square root of the Hessian, exact. `fisher-mc`: a few sampled gradients, an unbiased estimate;
targets at different positions are drawn independently, so one column has all positions. `fisher-empirical`: the
gradient at the observed target. `identity`: the outputs themselves, for Jacobians.

Columns are generated on demand: all of them at once would be one number per example and pair of outputs. The gradients
of the output layer are these columns themselves, and a structure needs only part of the output Hessian $H_n$ of each
example: the diagonal of a linear layer only $\mathrm{diag}(H_n)$, its Kronecker factor only $\sum_n H_n$.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.beliefs.likelihoods.categorical import softmax_root
from dubito.core import limits
from dubito.core.errors import InputError
from dubito.core.limits import numbers
from dubito.curvature.call_gradients import LayerCall
from dubito.curvature.engine import Tape
from dubito.curvature.matrices.base import eigh
from dubito.networks.layers.rows import DenseRows

Kind = Literal["auto", "ggn", "fisher-mc", "fisher-empirical", "hessian"]

# Maps indices of columns and of positions, both [v], to the columns at these positions, [v, B, C].
Root = Callable[[Tensor, Tensor], Tensor]


def columns(
    kind: str,
    likelihood: Likelihood,
    outputs: Tensor,
    targets: Tensor,
    *,
    num_samples: int = 1,
    most: int = 64,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield columns ``[v, *outputs]``, at most `most` at a time."""
    outputs = outputs.detach()
    if kind == "fisher-mc":
        sampled = likelihood.fisher_columns(outputs, num_samples, targets, generator=generator)
        yield from (likelihood.restore(part, outputs) for part in sampled.split(most))
    elif kind == "fisher-empirical":
        yield likelihood.restore(likelihood.gradient(outputs, targets)[None], outputs)
    elif kind == "ggn":
        yield from _root_columns(likelihood, outputs, targets, most)
    else:
        raise InputError(f"There is no curvature '{kind}'; choose one of {', '.join(get_args(Kind))}.")


def identity(likelihood: Likelihood, outputs: Tensor, most: int, *, centred: bool = False) -> Iterator[Tensor]:
    """Yield the unit vectors of one example's canonical outputs as columns ``[v, *outputs]``, for all examples at once.

    Centred over the classes, e_c − 1/C, they span the directions that can change a softmax.
    """
    layout = likelihood.canonical(outputs).shape[1:]
    size = outputs[0].numel()
    for start in range(0, size, most):
        unit = torch.zeros(min(most, size - start), size, dtype=outputs.dtype, device=outputs.device)
        unit[torch.arange(len(unit)), torch.arange(start, start + len(unit))] = 1.0
        unit = unit.reshape(-1, *layout)
        if centred:
            unit = unit - unit.mean(-1, keepdim=True)
        everyone = unit[:, None].expand(-1, outputs.shape[0], *layout)
        yield likelihood.restore(everyone, outputs)


def _root_columns(likelihood: Likelihood, outputs: Tensor, targets: Tensor, most: int) -> Iterator[Tensor]:
    """Yield the columns of the Hessian's root; each is zero at all positions but one."""
    canonical = likelihood.canonical(outputs)
    batch, width = len(canonical), canonical.shape[-1]
    positions = math.prod(canonical.shape[1:-1])
    root, count = _root(likelihood, outputs, targets)
    for start in range(0, count * positions, most):
        numbers = torch.arange(start, min(start + most, count * positions), device=outputs.device)
        values = root(numbers % count, numbers // count)
        if positions > 1:
            alone = values.new_zeros(len(numbers), batch, positions, width)
            alone[torch.arange(len(numbers)), :, numbers // count] = values
            values = alone
        yield likelihood.restore(values.reshape(-1, *canonical.shape), outputs)


def _root(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> tuple[Root, int]:
    """Return a function for the columns of a root of the output Hessian, and their number."""
    canonical = likelihood.canonical(outputs)
    width = canonical.shape[-1]
    if isinstance(likelihood, Categorical):
        return _softmax_root(canonical, likelihood.observed(targets)), max(width - 1, 1)
    most = numbers(limits.current().chunk)
    large = canonical.ndim == 2 and canonical.numel() * width > most
    if large and (scales := _scales(likelihood, outputs, targets, max(1, most // width**2))) is not None:
        return _diagonal_root(scales), width
    whole = likelihood.hessian_root(outputs, targets)
    flat = whole.reshape(len(whole), len(outputs), -1, width)
    return lambda r, t: flat[r, :, t], len(whole)


def _softmax_root(logits: Tensor, observed: Tensor) -> Root:
    """Return C − 1 columns for C classes; zero where there is no target."""
    kept = observed.reshape(len(logits), -1, 1)
    log_probs = torch.where(kept, logits.reshape(*kept.shape[:2], -1), 0.0).log_softmax(dim=-1)
    if kept.shape[1] == 1:  # all columns share the sums over classes
        return lambda r, t: (softmax_root(log_probs, r) * kept).transpose(0, 1)
    return lambda r, t: (softmax_root(log_probs[:, t], r) * kept[:, t]).transpose(0, 1)


def _diagonal_root(scales: Tensor) -> Root:
    """Return one column per output, for outputs ``[B, C]`` whose Hessian is diagonal."""

    def columns(r: Tensor, t: Tensor) -> Tensor:
        made = scales.new_zeros(len(r), *scales.shape)
        made[torch.arange(len(r)), :, r] = scales[:, r].mT
        return made

    return columns


def _scales(likelihood: Likelihood, outputs: Tensor, targets: Tensor, step: int) -> Tensor | None:
    """Return the diagonals ``[B, C]`` of the roots, a few examples at a time; None if the Hessian is not diagonal."""
    scales = []
    for part in zip(outputs.split(step), targets.split(step), strict=True):
        root = likelihood.hessian_root(*part)
        own = root.diagonal(dim1=0, dim2=-1)
        if len(root) != root.shape[-1] or root.count_nonzero() != own.count_nonzero():
            return None
        scales.append(own.clone())
    return torch.cat(scales)


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
