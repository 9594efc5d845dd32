"""A layer's weight and bias as one factor: the bias is the weight of one more input that is always 1.

Both meet the same rows of gradients, so everything that is squared, rotated or weighted is done once for the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.curvature.factors import Factor, Turned
from dubito.networks.layers.rows import Dense
from dubito.networks.selection import Selection


@dataclass
class Group:
    """One factor that stands for one parameter, or for a weight and its bias."""

    factor: Factor
    names: tuple[str, ...]

    def join(self, values: dict[str, Tensor]) -> Tensor:
        """Put numbers per weight together in the order of the factor: ``[O, I + 1]`` for a pair, else as they are."""
        if len(self.names) == 1:
            return values[self.names[0]]
        weight, bias = (values[name] for name in self.names)
        return torch.cat([weight.reshape(len(bias.flatten()), -1), bias.reshape(-1, 1)], dim=1)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Undo `join` for numbers in flat order."""
        if len(self.names) == 1:
            return {self.names[0]: flat}
        matrix = flat.reshape(self.factor.shape)
        return {self.names[0]: matrix[:, :-1].flatten(), self.names[1]: matrix[:, -1]}


def pairs(factors: dict[str, Factor], selection: Selection) -> list[tuple[str, ...]]:
    """Pair each whole weight with the whole bias of the same layer where they share rows; the rest stay alone."""
    biases = (name for name, factor in factors.items() if factor.is_bias and selection.is_whole(name))
    layers = {id(factors[name].parts[0].layer): name for name in biases}
    found: list[tuple[str, ...]] = []
    for name, factor in factors.items():
        bias = layers.get(id(factor.parts[0].layer)) if _can_pair(factor) and selection.is_whole(name) else None
        if bias is not None:
            found.append((name, bias))
    taken = {name for pair in found for name in pair}
    return found + [(name,) for name in factors if name not in taken]


def group(factors: dict[str, Factor], selection: Selection) -> list[Group]:
    """Return every factor, those of `pairs` as one."""
    return [
        Group(with_ones(factors[names[0]]) if len(names) == 2 else factors[names[0]], names)
        for names in pairs(factors, selection)
    ]


def _can_pair(factor: Factor) -> bool:
    if factor.explicit is not None or len(factor.parts) != 1 or factor.is_bias:
        return False
    part = factor.parts[0]
    return isinstance(part.rows, Dense) and part.rule.bias_shares_rows(part.layer)


def with_ones(factor: Factor) -> Factor:
    """The factor of weight and bias together, ``[O, I + 1]``."""
    part = factor.parts[0]
    assert isinstance(part.rows, Dense)
    rows, grads = part.rows.a, part.grads_as_rows()
    padded = Dense(torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], dim=2))
    both = Turned(part.rule, part.layer, "weight", padded, grads, part.later if isinstance(part, Turned) else None)
    return Factor((grads.shape[-1], rows.shape[-1] + 1), factor.columns, factor.size, factor.like, [both])
