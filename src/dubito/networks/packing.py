"""Rebuild a network as several narrow ones side by side (`packed`), or with several inputs and outputs (`widened`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.errors import UnsupportedError
from dubito.networks.layers import require_rule
from dubito.networks.output_layer import gives_outputs, last_layer
from dubito.networks.swapping import put
from dubito.networks.twin import copied, light_copy

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Role = Literal["first", "hidden", "last"]
_PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm)


class PackedLayer(nn.Module):
    """M linear layers or convolutions side by side: member m has the m-th part of the channels.

    Args:
        layer: The layer of one network.
        weight: The weights of all members ``[M, *weight.shape]``; other sizes than the layer's are possible.
        repeats: Whether every member has the same inputs, as those of a first layer.
    """

    def __init__(self, layer: nn.Linear | Conv, weight: Tensor, repeats: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if layer.bias is None else nn.Parameter(weight.new_zeros(weight.shape[:2]))
        self.repeats, self.kind = repeats, type(layer)
        if not isinstance(layer, nn.Linear):
            self.options = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
            self.groups = layer.groups

    def forward(self, x: Tensor) -> Tensor:
        """Return the channels of all members, one member after the other."""
        members, inputs = len(self.weight), self.weight.shape[2]
        if self.kind is nn.Linear:
            rows = x.unsqueeze(-2) if self.repeats else x.unflatten(-1, (members, inputs))
            found = torch.einsum("...mi,moi->...mo", rows.expand(*rows.shape[:-2], members, inputs), self.weight)
            return (found if self.bias is None else found + self.bias).flatten(-2)
        bias = None if self.bias is None else self.bias.flatten()
        calls: dict[type, Any] = {nn.Conv1d: torch.conv1d, nn.Conv2d: torch.conv2d, nn.Conv3d: torch.conv3d}
        x = torch.cat([x] * members, dim=1) if self.repeats else x
        weight, groups = self.weight.flatten(0, 1), members * self.groups
        return calls[self.kind](x, weight, bias, groups=groups, **self.options)


class PackedLayerNorm(nn.Module):
    """Layer normalization of each member's part of the last axis."""

    def __init__(self, layer: nn.LayerNorm, members: int, width: int) -> None:
        super().__init__()
        self.eps = layer.eps
        like = next(layer.parameters(), torch.empty(0))
        self.weight = nn.Parameter(like.new_ones(members, width)) if layer.weight is not None else None
        self.bias = nn.Parameter(like.new_zeros(members, width)) if layer.bias is not None else None
        self.members = members

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized features."""
        rows = x.unflatten(-1, (self.members, -1))
        found = nn.functional.layer_norm(rows, rows.shape[-1:], eps=self.eps)
        found = found if self.weight is None else found * self.weight
        return (found if self.bias is None else found + self.bias).flatten(-2)


def packed(model: nn.Module, example: Any, members: int, alpha: float) -> tuple[nn.Module, dict[str, Role]]:
    """Return M narrow networks with fresh weights as one network, and which of the layers is a first or the last one.

    Each member has ``alpha / M`` of the channels of every hidden layer. The outputs of all members are concatenated.

    Args:
        model: The network; it is not changed.
        example: A few rows of inputs.
        members: M.
        alpha: The width of all members together, in units of the network's.
    """
    roles = roles_of(model, example)
    network = _built(model, example, members, alpha, roles)
    _check_members(network, example, members)
    return network, roles


def roles_of(model: nn.Module, example: Any) -> dict[str, Role]:
    """Return for each layer whether its inputs are those of the network, or else whether it is the last one."""
    last = last_layer(model, batches.take(example, slice(0, 1)))
    if type(model.get_submodule(last)) is not nn.Linear:
        raise UnsupportedError("Packed and MIMO need a network whose last layer is an nn.Linear; this one's is not.")
    owners = {n: m for n, m in model.named_modules() if [*m.parameters(recurse=False), *m.buffers(recurse=False)]}
    for name, module in owners.items():
        if type(module) not in (*_PLAIN, *_NORMS) or getattr(module, "padding_mode", "zeros") != "zeros":
            raise UnsupportedError(
                f"Packed and MIMO change the width of linear layers, convolutions and normalization layers, and "
                f"cannot change '{name}', a {type(module).__name__}."
            )
    if not gives_outputs(model, last, batches.take(example, slice(0, 2))):
        raise UnsupportedError("Packed and MIMO need a network that returns what its last layer gives, unchanged.")
    roles: dict[str, Role] = {last: "last"}
    _built(model, example, 2, 2.0, roles)  # a trial, in which every hidden layer is twice as wide
    return roles


def _built(model: nn.Module, example: Any, members: int, alpha: float, roles: dict[str, Role]) -> nn.Module:
    """Replace the layers one after the other in a call; roles that are not known are found by the widths of inputs."""
    network, made = copied(model).eval(), {}

    def build(name: str, layer: Any, x: Tensor) -> nn.Module:
        if name not in made:
            made[name] = _packed_layer(name, layer, x, members, alpha, roles)
        return made[name]

    for name, layer in list(network.named_modules()):
        if isinstance(layer, (*_PLAIN, *_NORMS)):
            network = put(network, name, _Slot(partial(build, name, layer)))
    rows = batches.take(example, [0, min(1, batches.num_rows(example) - 1)])  # one row alone is taken twice
    try:
        with torch.no_grad():
            outputs = params.call(network, rows)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UnsupportedError(f"Packed and MIMO cannot change the width of this network: {error}") from error
    classes = model.get_submodule(next(name for name, role in roles.items() if role == "last")).out_features
    if outputs.shape[:1] != (2,) or outputs.shape[-1] != members * classes:  # type: ignore[operator]
        raise UnsupportedError(
            "Packed and MIMO need a network whose code names no width; here the rows of a batch changed with the width."
        )
    for name, layer in made.items():
        network = put(network, name, layer)
    return network


class _Slot(nn.Module):
    """The place of a layer that is built when it is first called."""

    def __init__(self, build: Callable[[Tensor], nn.Module]) -> None:
        super().__init__()
        self.build = build

    def forward(self, x: Tensor) -> Tensor:
        return self.build(x)(x)


def _packed_layer(name: str, layer: Any, x: Tensor, members: int, alpha: float, roles: dict[str, Role]) -> nn.Module:
    rule = require_rule(layer, "packing")
    inputs, outputs = rule.num_inputs(layer), rule.num_outputs(layer)
    width = x.shape[rule.channel_axis(layer, x.ndim)]
    if isinstance(layer, _NORMS):
        if name not in roles:
            roles[name] = "first" if width == inputs else "hidden"
        return copied(layer) if roles[name] == "first" else _packed_norm(layer, members, width)
    if name not in roles:
        roles[name] = "first" if width == inputs else "hidden"
    repeats = width == inputs if roles[name] == "last" and roles.keys() == {name} else roles[name] == "first"
    groups = getattr(layer, "groups", 1)
    own = outputs if roles[name] == "last" else groups * max(1, round(alpha * outputs / members / groups))
    shape = (members, own, (width if repeats else width // members) // groups, *layer.weight.shape[2:])
    weight = layer.weight.new_empty(shape)
    for part in weight:
        nn.init.kaiming_uniform_(part, a=math.sqrt(5))  # as torch does
    return PackedLayer(layer, weight, repeats)


def _packed_norm(layer: Any, members: int, width: int) -> nn.Module:
    if isinstance(layer, nn.LayerNorm):
        return PackedLayerNorm(layer, members, width // members)
    like = next(layer.parameters(), torch.empty(0))
    if isinstance(layer, nn.GroupNorm):
        groups = math.gcd(layer.num_groups, width // members)
        return nn.GroupNorm(members * groups, width, layer.eps, layer.affine).to(like)
    return type(layer)(width, layer.eps, layer.momentum, layer.affine, layer.track_running_stats).to(like)


@torch.no_grad()
def _check_members(network: nn.Module, example: Any, members: int) -> None:
    """Raise an error if the outputs of a member depend on the weights of another one."""
    if members == 1:
        return
    rows = batches.take(example, slice(0, 2))
    before = params.call(network.eval(), rows).unflatten(-1, (members, -1))
    for member in range(members):
        other = light_copy(network).eval()
        for module in other.modules():
            if isinstance(module, PackedLayer):
                module.weight[member] *= -0.5
        after = params.call(other, rows).unflatten(-1, (members, -1))
        kept = [each for each in range(members) if each != member]
        if not torch.allclose(before[..., kept, :], after[..., kept, :], rtol=1e-4, atol=1e-5):
            raise UnsupportedError(
                "Packed needs a network that keeps the order of its channels, and this one mixes them."
            )


def widened(model: nn.Module, example: Tensor, roles: Mapping[str, Role], members: int) -> nn.Module:
    """Return the network with M inputs, concatenated along their second axis, and M outputs (last axis)."""
    if "first" not in roles.values():
        raise UnsupportedError("MIMO needs a network with a hidden layer: here the last layer has the inputs.")
    network = copied(model)
    for name, role in roles.items():
        layer: Any = network.get_submodule(name)
        axis = {"first": 1, "last": 0, "hidden": None}[role]
        if role == "first" and isinstance(layer, _NORMS):
            raise UnsupportedError(f"MIMO joins several inputs, and '{name}' would normalize them together: remove it.")
        if axis is not None:
            shape = list(layer.weight.shape)
            shape[axis] *= members
            network = put(network, name, resized(layer, shape))
    try:
        with torch.no_grad():
            params.call(light_copy(network).eval(), torch.cat([example[:2]] * members, dim=1))
    except (RuntimeError, ValueError, TypeError) as error:
        raise UnsupportedError(
            f"MIMO cannot join the inputs of this network along their second axis: {error}"
        ) from error
    return network


def resized(layer: Any, shape: Any) -> nn.Module:
    """Return a layer of the same kind with fresh weights of another shape."""
    other = copy.copy(layer)
    other._parameters = dict(layer._parameters)
    other.weight = nn.Parameter(layer.weight.new_empty(tuple(shape)))
    other.bias = None if layer.bias is None else nn.Parameter(layer.bias.new_empty(shape[0]))
    sizes = ("out_features", "in_features") if isinstance(layer, nn.Linear) else ("out_channels", "in_channels")
    for name, size in zip(sizes, (shape[0], shape[1] * getattr(layer, "groups", 1)), strict=True):
        setattr(other, name, size)
    other.reset_parameters()
    return other


def repacked(model: nn.Module, tensors: Mapping[str, Tensor], first: list[str], members: int) -> nn.Module:
    """Return the network whose tensors a file holds: that of `packed` or of `widened`.

    Args:
        model: The network that was given.
        tensors: The parameters of the file, by name.
        first: The first layers.
        members: M.
    """
    network = copied(model)
    for name, layer in list(network.named_modules()):
        saved = tensors.get(f"{name}.weight" if name else "weight")
        if saved is None or not isinstance(layer, (*_PLAIN, *_NORMS)) or saved.shape == layer.weight.shape:
            continue
        if isinstance(layer, _NORMS):
            other = _packed_norm(layer, members, saved.numel())
        elif saved.ndim == layer.weight.ndim + 1:
            other = PackedLayer(layer, torch.empty_like(saved, device=layer.weight.device), name in first)
        else:
            other = resized(layer, saved.shape)
        network = put(network, name, other)
    return network
