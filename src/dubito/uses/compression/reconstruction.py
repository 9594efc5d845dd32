r"""Fit the layers of a smaller network to the outputs of the large one, one after the other, by least squares.

`elimination` lets every layer adapt by itself, from the activations of the large network, and a convolution tap by tap.
But the layers before have changed too, and errors add up. Here each layer, in the order of the calls, sees what the
smaller network really gives it, $\hat a$, and moves to

.. math::
    W + \arg\min_\Delta \; E\,\lVert y - W \hat a - \Delta \hat a \rVert^2 + \lambda \lVert \Delta \rVert^2

with the large network's outputs $y$ of the layer and the windows of a convolution as $\hat a$. $\lambda$ is the one
with the least error on rows that were held out; none at all, $\Delta = 0$, is one of the choices. No targets are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import batches, limits, params
from dubito.networks.layers import require_rule, rule_for
from dubito.networks.layers.rows import DenseRows
from dubito.networks.watching import call_order, first_argument, watch
from dubito.uses.compression.rules import Masks

# Rows of a layer's regression for each of its inputs, and at least so many.
ROWS_PER_INPUT, FEWEST_ROWS = 8, 8192
# What is added to the moments, as shares of the mean of their diagonal.
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# One batch of so many is held out to choose the ridge.
HELD_OUT = 4
# Examples whose windows are taken at a time.
EXAMPLES = 16


class _Enough(Exception):
    """Ends a forward pass."""


@torch.no_grad()
def reconstruct_(small: nn.Module, dense: nn.Module, units: Masks, rows: Sequence[Any]) -> None:
    """Change the layers of `small`, in place, so that they repeat the outputs of those of `dense`.

    Args:
        small: The smaller network.
        dense: The large one.
        units: For each layer that has lost outputs, which of them stay.
        rows: Batches of inputs, two at least.
    """
    names = _layers(small, rows[0])
    changed = [place for place, name in enumerate(names) if _num_inputs(small, name) < _num_inputs(dense, name)]
    if not changed or len(rows) < 2:
        return
    for part in _parts(dense, names[changed[0] :]):
        targets = _outputs(dense, part, units, rows)
        for name in part:
            _refit_(small, name, targets.pop(name), rows, num_rows(dense, name))


def _layers(model: nn.Module, example: Any) -> list[str]:
    """Return the layers whose weight multiplies rows, in the order of their calls.

    Layers that are called more than once, are frozen or share their weight with others are left as they are.
    """
    known: dict[str, nn.Module] = {}
    owners = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    for name, layer in model.named_modules():
        rule, own = rule_for(layer), layer._parameters.get("weight")
        if rule is not None and rule.bias_shares_rows(layer) and own is not None and own.requires_grad:
            known |= {name: layer} if owners[id(own)] == 1 else {}
    called = call_order(model, known, batches.take(example, slice(0, 2)))
    return [name for name in called if called.count(name) == 1]


def _num_inputs(model: nn.Module, name: str) -> int:
    layer: Any = model.get_submodule(name)
    return require_rule(layer, "fitting outputs").to_matrix(layer, layer.weight).shape[1]


def num_rows(model: nn.Module, name: str) -> int:
    """Return how many rows the regression of a layer has."""
    return max(FEWEST_ROWS, ROWS_PER_INPUT * _num_inputs(model, name))


def _parts(dense: nn.Module, names: list[str]) -> Iterator[list[str]]:
    """Yield layers, in order, whose outputs are held at a time."""
    part: list[str] = []
    numbers, most = 0, limits.numbers(limits.current().fitted_outputs)
    for name in names:
        layer = dense.get_submodule(name)
        size = num_rows(dense, name) * require_rule(layer, "fitting outputs").num_outputs(layer)
        if part and numbers + size > most:
            yield part
            part, numbers = [], 0
        part, numbers = [*part, name], numbers + size
    if part:
        yield part


def _chosen(wanted: int, per_batch: int, positions: int, batch: int) -> Tensor:
    """Return the positions, such as pixels, that are used of a batch's rows: others of every batch."""
    count = max(1, -(-wanted // per_batch))
    return torch.randperm(positions, generator=torch.Generator().manual_seed(batch))[:count]


def _outputs(dense: nn.Module, names: list[str], units: Masks, rows: Sequence[Any]) -> dict[str, list[Tensor]]:
    """Return the outputs of layers that stay, ``[rows, outputs]`` for each batch."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        y = require_rule(layer, "fitting outputs").grads_as_rows(layer, output[None])[0]  # [B, T, O]
        y = y[:, _chosen(num_rows(dense, name), total, y.shape[1], len(found[name]))].flatten(0, 1)
        found[name].append(y[:, units[name].to(y.device)] if name in units else y)

    total = sum(map(batches.num_rows, rows))
    with watch({name: dense.get_submodule(name) for name in names}, after=keep):
        for batch in rows:
            params.call(dense, batch)
    return found


def _inputs(model: nn.Module, name: str, rows: Sequence[Any], wanted: int) -> Iterator[Tensor]:
    """Yield the rows that a layer multiplies, ``[rows, inputs]`` for each batch, at the same positions."""
    layer: Any = model.get_submodule(name)
    rule, total = require_rule(layer, "fitting outputs"), sum(map(batches.num_rows, rows))
    seen: list[Tensor] = []

    def keep(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(first_argument(args, kwargs))
        raise _Enough

    for count, batch in enumerate(rows):
        with watch({name: layer}, before=keep), suppress(_Enough):
            params.call(model, batch)
        parts = []
        for some in seen.pop().split(EXAMPLES):
            found = rule.inputs_as_rows(layer, some)
            assert isinstance(found, DenseRows)
            parts.append(found.at(_chosen(wanted, total, found.shape[1], count)).flatten(0, 1))
        yield torch.cat(parts)


def _refit_(model: nn.Module, name: str, targets: list[Tensor], rows: Sequence[Any], wanted: int) -> None:
    """Move the weights of one layer, in place."""
    layer: Any = model.get_submodule(name)
    rule = require_rule(layer, "fitting outputs")
    matrix = rule.to_matrix(layer, layer.weight).double()
    sums = [_Sums(), _Sums()]  # of the rows to fit, and of those held out
    for count, (x, y) in enumerate(zip(_inputs(model, name, rows, wanted), targets, strict=True)):
        x, y = x.double(), y.double()
        missed = y - x @ matrix.mT
        if layer.bias is not None:
            missed = missed - layer.bias.double()
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        sums[count % HELD_OUT == HELD_OUT - 1 or count == len(rows) - 1].add(x, missed)
    step = _step(*sums)
    if step is None:
        return
    layer.weight.add_(rule.from_matrix(layer, step[:, : matrix.shape[1]]).to(layer.weight))
    if layer.bias is not None:
        layer.bias.add_(step[:, -1].to(layer.bias))


class _Sums:
    """Sums over rows: of the inputs' products, of those with the outputs that are missed, and of their squares."""

    def __init__(self) -> None:
        self.count, self.xx, self.xy, self.yy = 0, torch.zeros(()), torch.zeros(()), 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add rows."""
        self.count += len(x)
        self.xx, self.xy, self.yy = self.xx + x.mT @ x, self.xy + x.mT @ y, self.yy + float(y.square().sum())


def _step(fitted: _Sums, held_out: _Sums) -> Tensor | None:
    """Return what is added to the weights, ``[outputs, inputs]``; None if no ridge makes the held-out error less."""

    def solved(of: _Sums, ridge: float) -> Tensor:
        added = ridge * of.xx.diagonal().mean().clamp_min(1e-30)
        return torch.linalg.solve(of.xx + added * torch.eye(len(of.xx), dtype=of.xx.dtype, device=of.xx.device), of.xy)

    def error(step: Tensor) -> float:
        return held_out.yy + float(((held_out.xx @ step) * step).sum() - 2 * (held_out.xy * step).sum())

    errors = {ridge: error(solved(fitted, ridge)) for ridge in RIDGES}
    best = min(errors, key=lambda ridge: errors[ridge])
    if not errors[best] < held_out.yy:
        return None
    both = _Sums()
    both.xx, both.xy = fitted.xx + held_out.xx, fitted.xy + held_out.xy
    return solved(both, best).mT
