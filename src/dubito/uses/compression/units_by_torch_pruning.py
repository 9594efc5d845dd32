"""Groups of units where a network is no chain: skip connections and concatenation, by torch-pruning's graph."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dubito.core.errors import DubitoError, UnsupportedError
from dubito.networks.layers import rule_for
from dubito.uses.compression.shrink import shrink, silenced
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup
from dubito.uses.compression.verify import TOLERANCE, largest_difference

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def depend(model: nn.Module, example: Any) -> list[UnitGroup]:
    """Return the groups of units that torch-pruning finds by calling the network once.

    A group keeps its width where anything but linear layers, convolutions and batch norms holds weights, and where the
    network's own code counts on it (heads of attention, zeros padded to a fixed number of channels): each is tried.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise UnsupportedError(
            "This network is no plain chain of layers: removing its units needs torch-pruning (pip install "
            "'dubito[shrink]'); structure=\"weights\" needs nothing."
        ) from error
    private = copy.deepcopy(model).eval()
    for value in private.parameters():
        value.requires_grad_()
    names = {module: name for name, module in private.named_modules()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about parameters outside of layers, which keep their width
            graph = torch_pruning.DependencyGraph().build_dependency(private, example_inputs=example)
            found = list(graph.get_all_groups(root_module_types=_LAYERS))
    except Exception as error:
        raise UnsupportedError(
            f"This network cannot be traced ({type(error).__name__}: {error}), so its units cannot be removed; "
            'structure="weights" needs no trace.'
        ) from error
    groups = [_units(graph, group, names) for group in found]
    return [group for group in groups if group is not None and _can_shrink(model, group, example)]


def _can_shrink(model: nn.Module, group: UnitGroup, example: Any) -> bool:
    """Whether the network without the last unit of a group is the network with that unit silenced."""
    if group.size == 1:
        return False
    kept = {group.name: torch.arange(group.size) < group.size - 1}
    try:
        quiet, _ = silenced(model, [group], kept, example)
        return largest_difference(quiet, shrink(quiet, [group], kept, example), example) <= TOLERANCE
    except (RuntimeError, ValueError, LookupError, DubitoError):  # shapes that do not fit
        return False


def _units(graph: Any, group: Any, names: dict[nn.Module, str]) -> UnitGroup | None:
    producers, passers, consumers = [], [], []
    for item in group:
        module, index = item.dep.target.module, torch.tensor(list(item.idxs))
        if not isinstance(module, nn.Module):
            return None  # a parameter of the network's own, which no rule makes smaller
        if not any(True for _ in module.parameters()):
            continue  # an activation, a sum, a reshaping
        if item.root_idxs is None or rule_for(module) is None or getattr(module, "groups", 1) != 1:
            return None
        part = LayerChannels(names[module], torch.tensor(list(item.root_idxs)), index)
        if isinstance(module, _BatchNorm):
            passers.append(part)
        elif not isinstance(module, _LAYERS):
            return None
        elif graph.is_out_channel_pruning_fn(item.dep.handler):
            producers.append(part)
        else:
            consumers.append(part)
    if not consumers or not producers:  # the outputs of the network
        return None
    return UnitGroup(int(producers[0].unit.max()) + 1, _once(producers), _once(passers), _once(consumers))


def _once(parts: list[LayerChannels]) -> tuple[LayerChannels, ...]:
    """Parts without repetition: a group may reach the same layer on two ways."""
    found: dict[tuple[str, int], LayerChannels] = {}
    for part in parts:
        found.setdefault((part.layer, int(part.index[0])), part)
    return tuple(found.values())
