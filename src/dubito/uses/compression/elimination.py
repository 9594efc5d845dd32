r"""Rank units by what the network loses once the layers that read them have adapted, per cost.

A layer with the weights $W$ reads activations $a$, with a constant 1. Without the inputs $R$ it can still predict them
from those that stay, $S$: $W_S' = W_S + W_R A_{RS} A_{SS}^{-1}$ with $A = E[a a^\top]$. The remaining loss, in nats, is

.. math::
    d_R = \tfrac12 \sum_o g_o\, W_{oR}\, \big([A^{-1}]_{RR}\big)^{-1} W_{oR}^\top ,

the damage of optimal brain surgeon (Hassibi & Stork 1993) for whole columns. $g_o$, the curvature of the output $o$,
comes from the posterior's precision. Units go one after the other, by damage per cost. Each removal updates the weights
and the inverse, so that of two equal units only the first is free.

The taps of a convolution count as outputs of their own: they share the activations of their channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from dubito.core import params
from dubito.core.params import Params
from dubito.networks.layers import require_rule
from dubito.networks.watching import first_argument, watch
from dubito.uses.compression.costs import LayerCosts, num_always_kept
from dubito.uses.compression.rules import Masks
from dubito.uses.compression.units import by_input, weight
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup

# The share of a group's units that goes in one step, at least one; their damages are not updated in between.
STEP = 0.02
# What is added to the diagonal of the moments, as a share of its mean: moments of few rows have no inverse.
RIDGE = 1e-3
# A layer keeps at least this share of the units that layers keep on average: moments of a few rows say little of units
# that are hardly used in them, and training cannot make up for a layer that is cut through.
BALANCE = 0.6


@dataclass
class Reader:
    r"""A layer that reads units."""

    matrix: Tensor  # its weights, a row per output and tap, and a column of zeros for the constant: ``[O, I + 1]``
    moments: Tensor  # $E[a a^\top]$ with a ridge, ``[I + 1, I + 1]``
    curvature: Tensor  # $g$, ``[O]``

    @classmethod
    def of(cls, model: nn.Module, layer: str, moments: Tensor, precision: Tensor) -> Self:
        r"""Read a layer; its curvature follows from $P_{oi} = g_o A_{ii}$, summed over the inputs."""
        rows = _rows_of_weight(model, layer, precision)
        curvature = rows.clamp_min(0.0).sum(1) / moments.diagonal()[:-1].sum().clamp_min(1e-30)
        ridge = RIDGE * moments.diagonal().mean()
        matrix = _rows_of_weight(model, layer, model.get_parameter(weight(layer)).detach())
        padded = torch.cat([matrix, matrix.new_zeros(len(matrix), 1)], 1)
        return cls(padded, moments + ridge * torch.eye(len(moments), dtype=moments.dtype), curvature)

    def without(self, gone: Tensor) -> Tensor:
        """Return the matrix after the columns `gone` were removed and the others have adapted: zero in `gone`."""
        stays = torch.ones(len(self.moments), dtype=torch.bool)
        stays[gone] = False
        known = self.moments[stays][:, stays]
        adapted = torch.zeros_like(self.matrix)
        adapted[:, stays] = torch.linalg.solve(known, (self.matrix @ self.moments[:, stays]).mT).mT
        return adapted


@dataclass
class _Running:
    """A reader while units go: its weights now, and the inverse of the moments of the columns that are left."""

    matrix: Tensor
    inverse: Tensor
    curvature: Tensor

    def damages(self, columns: Tensor) -> Tensor:
        """Return the damage of removing each row of columns, ``[units, columns]``."""
        blocks = self.inverse[columns[:, :, None], columns[:, None, :]]
        weights = (self.curvature.sqrt()[:, None] * self.matrix)[:, columns].permute(1, 2, 0)
        root = torch.linalg.cholesky(blocks)
        return 0.5 * torch.linalg.solve_triangular(root, weights, upper=False).square().sum((1, 2))

    def remove(self, columns: Tensor) -> None:
        """Remove columns; the others adapt."""
        gain = torch.linalg.solve(self.inverse[columns][:, columns], self.inverse[columns])
        self.matrix -= self.matrix[:, columns] @ gain
        self.inverse -= self.inverse[:, columns] @ gain
        self.matrix[:, columns] = 0.0


@dataclass
class _Queue:
    """The units of a group that are left, with their damages."""

    group: UnitGroup
    columns: dict[str, Tensor]  # [units, columns] of every reader
    left: Tensor
    damage: Tensor = field(init=False)

    @property
    def share(self) -> float:
        """The share of the units that is left."""
        return float(self.left.double().mean())

    @property
    def num_removable(self) -> int:
        """How many units may still go."""
        return int(self.left.sum()) - num_always_kept(self.group)

    def measure(self, readers: dict[str, _Running]) -> None:
        """Compute the damage of each unit that is left."""
        units = self.left.nonzero().flatten()
        self.damage = torch.full((self.group.size,), math.inf, dtype=torch.float64)
        self.damage[units] = sum(readers[name].damages(columns[units]) for name, columns in self.columns.items())


def _balanced(some: list[_Queue], queues: list[_Queue]) -> list[_Queue]:
    """Return those of some queues that have lost not much more than all have on average; all of them if none has."""
    least = BALANCE * sum(queue.share for queue in queues) / len(queues)
    return [queue for queue in some if queue.share > least] or some


class Elimination:
    """The readers of all units of a network, and the order in which units go.

    Args:
        model: The network.
        groups: Its groups of units.
        inputs: Batches of inputs; the moments are taken over all of them.
        precision: The diagonal of the precision of each weight that the data determine, without the prior's; groups
            read by other layers stay whole.
        costs: What units cost; without, units go by their damage alone.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[UnitGroup],
        inputs: Iterable[Any],
        precision: Params,
        costs: LayerCosts | None,
    ) -> None:
        self.groups = [g for g in groups if all(weight(part.layer) in precision for part in g.consumers)]
        layers = list(dict.fromkeys(part.layer for group in self.groups for part in group.consumers))
        moments = input_moments(model, layers, inputs)
        for part in (part for group in self.groups if not group.biases for part in group.consumers):
            moments[part.layer][-1, :-1] = moments[part.layer][:-1, -1] = 0.0  # as if the constant told nothing
        self.readers = {name: Reader.of(model, name, moments[name], precision[weight(name)]) for name in layers}
        self.relevance = {group.name: torch.full((group.size,), math.inf, dtype=torch.float64) for group in groups}
        for rank, (name, unit) in enumerate(self._order(costs)):
            self.relevance[name][unit] = float(rank)

    def _order(self, costs: LayerCosts | None) -> Iterable[tuple[str, Tensor]]:
        """Yield the units in the order in which they go, some of a group at a time."""
        running = {
            name: _Running(r.matrix.clone(), torch.linalg.inv(r.moments), r.curvature)
            for name, r in self.readers.items()
        }
        queues = [
            _Queue(
                g, {p.layer: _columns_of_units(p, g.size) for p in g.consumers}, torch.ones(g.size, dtype=torch.bool)
            )
            for g in self.groups
        ]
        for queue in queues:
            queue.measure(running)
        while open_queues := [queue for queue in queues if queue.num_removable > 0]:
            if costs is not None:
                open_queues = _balanced(open_queues, queues)
            best = min(open_queues, key=lambda q: float(q.damage.min()) / (costs.of_unit(q.group) if costs else 1.0))
            count = min(best.num_removable, max(1, int(STEP * int(best.left.sum()))))
            gone = best.damage.topk(count, largest=False).indices
            yield from ((best.group.name, unit) for unit in gone)
            best.left[gone] = False
            if costs is not None:
                costs.remove(best.group, count)
            for name, columns in best.columns.items():
                running[name].remove(columns[gone].flatten())
            for queue in queues:
                if queue.columns.keys() & best.columns.keys():
                    queue.measure(running)

    def adapted(self, model: nn.Module, kept: Masks) -> nn.Module:
        """Return `model`, changed: readers have adapted to the units that are not kept, and do not read them."""
        gone: dict[str, list[Tensor]] = {}
        for group in self.groups:
            for part in group.consumers:
                gone.setdefault(part.layer, []).append(part.index[~kept[group.name][part.unit]])
        for name, parts in gone.items():
            columns = torch.cat(parts)
            if len(columns):
                _write(model, name, self.readers[name].without(columns))
        return model


def input_moments(model: nn.Module, layers: list[str], inputs: Iterable[Any]) -> dict[str, Tensor]:
    r"""Return $E[a a^\top]$ over examples and positions of each layer's inputs and a constant: ``[I + 1, I + 1]``."""
    sums: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_argument(args, kwargs).detach()
        axis = require_rule(module, "removing units").channel_axis(module, x.ndim)
        rows = x.movedim(axis, -1).reshape(-1, x.shape[axis])
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        sums[name] = sums.get(name, 0.0) + (rows.mT @ rows).double().cpu()

    with watch({name: model.get_submodule(name) for name in layers}, before=add), torch.no_grad():
        for batch in inputs:
            params.call(model, batch)
    return {name: total / total[-1, -1] for name, total in sums.items()}


def _rows_of_weight(model: nn.Module, layer: str, tensor: Tensor) -> Tensor:
    """Return a tensor in the shape of a layer's weight as ``[outputs · taps, inputs]``."""
    return by_input(model, layer, tensor).flatten(1).mT.double().cpu()


def _columns_of_units(part: LayerChannels, size: int) -> Tensor:
    """Return the input channels of each unit, ``[units, channels]``; every unit has equally many."""
    return part.index[torch.argsort(part.unit, stable=True)].reshape(size, -1)


@torch.no_grad()
def _write(model: nn.Module, name: str, matrix: Tensor) -> None:
    """Write a reader's matrix into its layer; what the constant adds goes into the bias."""
    layer: Any = model.get_submodule(name)
    own = by_input(model, name, layer.weight)  # [inputs, outputs, *taps], a view
    own.copy_(matrix[:, :-1].mT.reshape(own.shape))
    constant = matrix[:, -1].reshape(own.shape[1], -1).sum(1).to(layer.weight)
    if layer.bias is not None:
        layer.bias += constant
    elif bool((constant != 0).any()):
        layer.bias = nn.Parameter(constant, requires_grad=layer.weight.requires_grad)
