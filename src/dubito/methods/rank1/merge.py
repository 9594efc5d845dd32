r"""Merge factors into the weights of a plain network: $W' = W \circ r s^\top$.

With multiplicative factors, a sample of the mixture is a network of the user's architecture, with the user's parameter
names. Predictions, samples and means use these networks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dubito.core.params import Params
from dubito.methods.rank1.sites import Layout, LinearMap
from dubito.networks.layers import class_rule, weight_axis


def can_merge(network: nn.Module, layout: Layout) -> bool:
    """Return whether the layer rules know the channel axes of the weight of every site."""
    layers = [network.get_submodule(site.name) for site in layout.sites if site.kind == "layer"]
    return all(weight_axis(layer, "output") is not None or weight_axis(layer, "input") is not None for layer in layers)


@torch.no_grad()
def merge(network: nn.Module, layout: Layout, values: Mapping[str, Tensor], factors: Tensor, biases: Tensor) -> Params:
    """Return the parameters of plain networks at given factors and biases.

    Args:
        network: The network, for the types of its layers.
        layout: The sites of the factors.
        values: The shared parameters by name.
        factors: One vector ``[D]``, or one for each of S networks ``[S, D]``.
        biases: One vector ``[E]``, or ``[S, E]``.
    """
    modules, merged = dict(network.named_modules()), dict(values)
    for site, values_ in layout.split(factors, biases):
        for map_, (s, r) in zip(site.maps, values_.factors, strict=True):
            merged[map_.weight] = _scaled(modules[site.name], merged[map_.weight], map_, s, r)
        for (name, _), bias in zip(site.biases, values_.biases, strict=True):
            merged[name] = bias.reshape(*bias.shape[:-1], *values[name].shape).clone()
    return merged


def _scaled(module: nn.Module, weight: Tensor, map_: LinearMap, s: Tensor | None, r: Tensor | None) -> Tensor:
    rule = class_rule(module)
    if rule is not None:
        s = None if s is None else rule.weight_factors(module, s, "input")
        return _times(weight, s, None if r is None else rule.weight_factors(module, r, "output"))
    s, r = None if s is None else s.unsqueeze(-2), None if r is None else r.unsqueeze(-1)
    if map_.rows is None:
        return _times(weight, s, r)
    first, last = map_.rows
    part = _times(weight[..., first:last, :], s, r)
    parts = (weight[..., :first, :], part, weight[..., last:, :])
    return torch.cat([rows.expand(*part.shape[:-2], -1, -1) for rows in parts], dim=-2)


def _times(weight: Tensor, s: Tensor | None, r: Tensor | None) -> Tensor:
    weight = weight if s is None else weight * s
    return weight if r is None else weight * r
