"""Convert a network into one whose groups of weights share random scales."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import GroupPrior
from dubito.core.errors import InputError
from dubito.methods.variational.groups.field import ScaledField
from dubito.methods.variational.groups.layout import AxisGroups, find_groups
from dubito.methods.variational.groups.module import GroupModule
from dubito.methods.variational.groups.scales import make_scales
from dubito.methods.variational.layer import make_stochastic
from dubito.networks.layers import rule_for
from dubito.networks.selection import Selection

# The estimator of layers that sample the scales of their weight.
SCALED = "scaled"


def convert_groups(
    network: nn.Module,
    selection: Selection,
    prior: GroupPrior,
    estimator: str,
    initial_scale: float | dict[str, Tensor],
    hold_rest: bool = True,
) -> GroupModule:
    """Convert a network in place to a posterior over weights and the scales of their groups.

    Args:
        network: A private copy of the network.
        selection: The random weights.
        prior: The group prior.
        estimator: ``"local"`` or ``"weight"``.
        initial_scale: The initial standard deviation of weights and of scales, whose mean starts at 1.
        hold_rest: Whether entries that are not random stay fixed; otherwise they are trained as points.
    """
    if estimator == "flipout":
        raise InputError("A group prior needs estimator='local' or 'weight', got 'flipout'.")
    if isinstance(initial_scale, dict):
        raise InputError("A group prior needs one number as initial_scale, not a tensor per parameter.")
    parameters = dict(network.named_parameters())
    masks = selection.masks()
    vectors = [name for name in selection.names if parameters[name].ndim < 2]
    if vectors:
        raise InputError(f"A group prior is for matrices, and '{vectors[0]}' is a vector: use biases='deterministic'.")
    kinds, owned = [], {name: [] for name in selection.names}  # type: ignore[var-annotated]
    for kind in find_groups(network, list(selection.names), prior.groups):
        scales = make_scales(kind.size, prior, initial_scale, parameters[kind.members[0].parameter].detach())
        kinds.append((kind, scales, _active(kind, masks).to(parameters[kind.members[0].parameter].device)))
        for member in kind.members:
            owned[member.parameter].append((member.axis, member.side, scales))
    width = initial_scale if prior.random_weights else None
    posterior = {
        name: ScaledField(parameters[name], parts, None if selection.is_whole(name) else masks[name], width, hold_rest)
        for name, parts in owned.items()
    }
    if estimator == "local":
        _scale_on_the_fly(network, posterior)
    return GroupModule(network, posterior, selection, estimator, kinds)


def _active(kind: AxisGroups, masks: dict[str, Tensor]) -> Tensor:
    """Return the mask of groups with at least one random weight."""
    found = torch.zeros(kind.size, dtype=torch.bool)
    for member in kind.members:
        found |= masks[member.parameter].movedim(member.axis, 0).flatten(1).any(1)
    return found


def _scale_on_the_fly(network: nn.Module, posterior: dict[str, ScaledField]) -> None:
    """Make every layer stochastic whose weight is untied, fully random and multiplies its inputs."""
    names = {id(value): name for name, value in network.named_parameters()}
    owners = Counter(id(value) for module in network.modules() for value in module._parameters.values())
    for module in list(network.modules()):
        rule, weight = rule_for(module), module._parameters.get("weight")
        if rule is None or weight is None or not rule.linear_in_input or owners[id(weight)] > 1:
            continue
        part = posterior.get(names[id(weight)])
        if part is not None and part.mask is None:
            make_stochastic(module, rule, SCALED, {"weight": part})  # type: ignore[dict-item]
