r"""The columns of a vector-Jacobian product, whose outer products sum to the likelihood's output Hessian.

`ggn`: all columns of a square root of the Hessian, exact. `fisher-mc`: a few sampled gradients, an unbiased estimate;
targets at different positions are drawn independently, so one column has all positions. `fisher-empirical`: the
gradient at the observed target. `identity`: the outputs themselves, for Jacobians.

Columns are generated on demand: all of them at once would be one number per example and pair of outputs.
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
