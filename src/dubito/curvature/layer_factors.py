"""A layer's weight and bias as one factor: the bias is the weight of one more input that is always 1.

Weight and bias share the same rows of gradients, so these are squared, rotated and weighted only once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.curvature.call_gradients import RotatedGradient
from dubito.curvature.factor import Factor
from dubito.curvature.factors import BiasFactor, CallsFactor, ConvolutionFactor, OuterFactor, make_factor
from dubito.networks.layers.rows import DenseRows
from dubito.networks.selection import Selection


@dataclass
class LayerFactor:
    """The factor of one parameter, or of a weight and its bias together."""

    factor: Factor
    names: tuple[str, ...]

    def join(self, values: dict[str, Tensor]) -> Tensor:
        """Return values per weight in the order of the factor: ``[O, I + 1]`` for a pair, else unchanged."""
        if len(self.names) == 1:
            return values[self.names[0]]
        weight, bias = (values[name] for name in self.names)
        return torch.cat([weight.reshape(len(bias.flatten()), -1), bias.reshape(-1, 1)], dim=1)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Undo `join` for values in flat order."""
        if len(self.names) == 1:
            return {self.names[0]: flat}
        matrix = flat.reshape(self.factor.shape)
        return {self.names[0]: matrix[:, :-1].flatten(), self.names[1]: matrix[:, -1]}


def paired_names(factors: dict[str, Factor], selection: Selection) -> list[tuple[str, ...]]:
    """Pair each whole selected weight with the whole selected bias of its layer if they share rows."""
    whole = {name: factor for name, factor in factors.items() if selection.is_whole(name)}
    biases = {f.calls[0].layer: name for name, f in whole.items() if isinstance(f, BiasFactor)}
    found: list[tuple[str, ...]] = []
    for name, factor in whole.items():
        if isinstance(factor, OuterFactor | ConvolutionFactor):
            call = factor.calls[0]
            if call.layer in biases and call.rule.bias_shares_rows(call.layer):
                found.append((name, biases[call.layer]))
    taken = {name for pair in found for name in pair}
    return found + [(name,) for name in factors if name not in taken]


def layer_factors(factors: dict[str, Factor], selection: Selection) -> list[LayerFactor]:
    """Return one factor for each entry of `paired_names`."""
    return [
        LayerFactor(with_ones(factors[names[0]]) if len(names) == 2 else factors[names[0]], names)
        for names in paired_names(factors, selection)
    ]


def with_ones(factor: Factor) -> CallsFactor:
    """Return the factor of weight and bias together, ``[O, I + 1]``."""
    assert isinstance(factor, CallsFactor)
    call = factor.calls[0]
    assert isinstance(call.rows, DenseRows)
    rows, grads = call.rows.a, call.grads_as_rows()
    padded = DenseRows(torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], dim=2))
    both = RotatedGradient(call.rule, call.layer, padded, grads, call.later)
    return make_factor((grads.shape[-1], rows.shape[-1] + 1), factor.columns, factor.size, factor.like, [both])
