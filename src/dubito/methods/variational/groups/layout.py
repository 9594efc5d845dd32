"""Find the groups of a network: the weights that share a scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from dubito.networks.layers import rule_for, weight_axis

Side = Literal["inputs", "outputs"]


@dataclass(frozen=True)
class GroupedAxis:
    """One axis of one parameter that the scales of a kind of groups multiply."""

    parameter: str  # the name of the parameter
    axis: int  # its axis
    side: Side  # whether the entries of that axis are inputs or outputs of its layer


@dataclass(frozen=True)
class AxisGroups:
    """Groups of one kind, such as the inputs of one layer, and the parameters that they scale."""

    name: str  # such as ``"0.inputs"`` or ``"lstm.gates_l0"``
    members: tuple[GroupedAxis, ...]  # the parameters that the groups scale
    size: int  # the number of groups


def find_groups(network: nn.Module, names: list[str], groups: str) -> list[AxisGroups]:
    """Return the groups of the named parameters.

    Args:
        network: The network.
        names: The random parameters, each a matrix or more.
        groups: ``"auto"``, ``"inputs"`` or ``"outputs"``; see `dubito.priors.GroupPrior`.
    """
    first_names = {id(value): name for name, value in network.named_parameters()}
    found: list[AxisGroups] = []
    seen: set[str] = set()
    for path, module in network.named_modules():
        own = {n: first_names[id(v)] for n, v in module.named_parameters(recurse=False)}
        own = {n: name for n, name in own.items() if name in names and name not in seen}
        seen |= set(own.values())
        if isinstance(module, nn.RNNBase):
            found += _recurrent(path, module, own, groups)
        else:
            found += [_plain(path, module, n, name, groups) for n, name in own.items()]
    return found


def _plain(path: str, module: nn.Module, attribute: str, name: str, groups: str) -> AxisGroups:
    """Return one group per input or output of a parameter; without a layer rule, rows are outputs."""
    value = getattr(module, attribute)
    is_convolution = rule_for(module) is not None and value.ndim > 2
    side: Side = groups if groups != "auto" else "outputs" if is_convolution else "inputs"  # type: ignore[assignment]
    axes = {"inputs": weight_axis(module, "input"), "outputs": weight_axis(module, "output")}
    if axes[side] is None:  # a grouped convolution has one of the two axes only
        side = "outputs" if side == "inputs" else "inputs"
    axis = axes[side]
    if axis is None:  # neither: the weight of a LayerNorm over several axes
        axis = 0 if side == "outputs" else 1
    label = side if attribute == "weight" else f"{attribute}.{side}"
    return AxisGroups(".".join(filter(None, (path, label))), (GroupedAxis(name, axis, side),), value.shape[axis])


def _recurrent(path: str, module: nn.RNNBase, own: dict[str, str], groups: str) -> Iterator[AxisGroups]:
    """Yield inputs, hidden units and gates of each layer and direction; a gate has a row in two matrices."""
    prefix, kinds = f"{path}." if path else "", {"weight_ih": "inputs", "weight_hh": "hidden"}
    layers: dict[str, list[str]] = {}
    for attribute in own:
        if attribute[:9] in kinds:
            layers.setdefault(attribute[9:], []).append(attribute)
        else:
            yield _plain(path, module, attribute, own[attribute], groups)
    for suffix, pair in layers.items():
        for attribute in pair if groups != "outputs" else ():
            member, size = GroupedAxis(own[attribute], 1, "inputs"), getattr(module, attribute).shape[1]
            yield AxisGroups(f"{prefix}{kinds[attribute[:9]]}{suffix}", (member,), size)
        if groups != "inputs":
            rows = tuple(GroupedAxis(own[attribute], 0, "outputs") for attribute in pair)
            yield AxisGroups(f"{prefix}gates{suffix}", rows, getattr(module, pair[0]).shape[0])
