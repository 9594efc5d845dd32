"""Outputs with positions (tokens, pixels): treat positions as examples, or look at a few of them.

A head that maps each position by itself (a linear layer over tokens, a convolution over pixels) has one Jacobian per
position. If it alone is random, positions are examples: one column per class serves all of them, not one per class
and position. In other networks the gradients of one position pass through all others, so each position needs its own
columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dubito.beliefs.likelihoods import Categorical, Likelihood
from dubito.core.tracing import is_tracing
from dubito.curvature.call_gradients import LayerCall, RotatedGradient
from dubito.curvature.engine import Tape
from dubito.curvature.factor import Factor
from dubito.curvature.factors import make_factor
from dubito.curvature.output_columns import is_direct
from dubito.curvature.products import Workspace
from dubito.networks.layers.rows import DenseRows, rows_as


@dataclass
class PositionGradient(RotatedGradient):
    """A gradient at one position, whose `grad` is already in rows."""

    def bias_rows(self) -> Tensor:
        """Return the rows unchanged."""
        return self.grad


@dataclass
class PositionTape(Tape):
    """A tape whose examples are the positions of another one: outputs ``[N, C]`` and inputs ``[N, I]`` of the head."""

    rows: Tensor = field(kw_only=True)

    def take(self, where: Any) -> PositionTape:
        """Return the tape of some positions."""
        return replace(self, outputs=self.outputs.detach()[where].requires_grad_(), rows=self.rows[where])

    def likelihood(self, likelihood: Likelihood) -> Likelihood:
        """Return the likelihood of one position, whose label is its own."""
        assert isinstance(likelihood, Categorical)
        return likelihood.replace(next_token=False)

    def pull(self, columns: Tensor, workspace: Workspace | None = None) -> dict[str, Factor]:
        """Return the factors of the head for columns ``[V, N, C]``; no backward pass is needed."""
        call = self.calls[0]
        assert isinstance(call, LayerCall)
        found: dict[str, Factor] = {}
        for role, name in call.roles.items():
            rows = rows_as(DenseRows(self.rows.unsqueeze(1)), columns) if role == "weight" else None
            shape = (columns.shape[-1], self.rows.shape[-1]) if role == "weight" else self.engine.shapes[name]
            gradient = PositionGradient(call.rule, call.layer, rows, columns.unsqueeze(2))
            found[name] = make_factor(shape, len(columns), columns.shape[1], columns, [gradient])
        return found | self._factors(columns, {name: [] for name in self.engine.names if name not in found}, {})


def by_position(tape: Tape, likelihood: Likelihood) -> PositionTape | None:
    """Return the tape with positions as examples; None unless only a head that maps each by itself is random."""
    if not isinstance(likelihood, Categorical) or is_tracing() or not is_direct(tape) or len(tape.calls) != 1:
        return None
    call, outputs = tape.calls[0], tape.outputs.detach()
    if not isinstance(call, LayerCall) or not isinstance(call.rows, DenseRows) or "weight" not in call.roles:
        return None
    weight = call.layer.get_parameter("weight")
    matrix, inputs = call.rule.to_matrix(call.layer, weight), call.rows.a
    in_order = matrix.data_ptr() == weight.data_ptr() and matrix.is_contiguous() and weight.is_contiguous()
    given = call.rule.grads_as_rows(call.layer, outputs[None])[0]
    flat = likelihood.canonical(outputs).reshape(len(outputs), -1, likelihood.canonical(outputs).shape[-1])
    same = flat.shape == given.shape and flat.shape[:2] == inputs.shape[:2] and torch.equal(flat[:1], given[:1])
    if not in_order or not same:
        return None
    found = flat.flatten(0, 1).requires_grad_()
    return PositionTape(tape.engine, tape.inputs, found, [call], rows=inputs.flatten(0, 1))


def targets_by_position(likelihood: Likelihood, targets: Tensor) -> Tensor:
    """Return the labels ``[B · T]`` of positions that are examples."""
    assert isinstance(likelihood, Categorical)
    return likelihood.aligned(targets).flatten()


def some_positions(likelihood: Likelihood, targets: Tensor, count: int, seed: int = 0) -> Tensor:
    """Choose positions ``[B, count]`` of each example at random, those with a target first."""
    assert isinstance(likelihood, Categorical)
    known = likelihood.observed(targets)
    order = torch.rand(known.flatten(1).shape, generator=torch.Generator().manual_seed(seed)).to(known.device)
    return (order + known.flatten(1)).argsort(dim=1, descending=True)[:, :count]


def at(values: Tensor, positions: Tensor) -> Tensor:
    """Return the entries ``[B, P, ...]`` of values ``[B, T, ...]`` at positions ``[B, P]``.

    >>> at(torch.tensor([[[1.0], [2.0]]]), torch.tensor([[1]])).tolist()
    [[[2.0]]]
    """
    index = positions.reshape(*positions.shape, *[1] * (values.ndim - 2))
    return values.gather(1, index.expand(*positions.shape, *values.shape[2:]))


def units_at(positions: Tensor, canonical: Tensor, some: slice, centred: bool) -> Tensor:
    """Return unit columns ``[v, B, T, C]`` of some of the outputs ``[P · C]`` at chosen positions ``[B, P]``."""
    batch, width = len(canonical), canonical.shape[-1]
    numbers = torch.arange(some.start, some.stop, device=canonical.device)
    unit = torch.zeros(len(numbers), width, dtype=canonical.dtype, device=canonical.device)
    unit[torch.arange(len(numbers)), numbers % width] = 1.0
    if centred:
        unit -= unit.mean(-1, keepdim=True)
    found = canonical.new_zeros(len(numbers), batch, math.prod(canonical.shape[1:-1]), width)
    where: Any = positions[:, numbers // width].mT  # [v, B]
    rows = torch.arange(len(numbers), device=canonical.device)[:, None]
    found[rows, torch.arange(batch, device=canonical.device), where] = unit[:, None]
    return found.reshape(len(numbers), *canonical.shape)
