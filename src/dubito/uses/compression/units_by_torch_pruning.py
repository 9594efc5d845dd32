"""Find the units of networks with skip connections and concatenation, with torch-pruning's dependency graph."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from dubito.core.errors import DubitoError, UnsupportedError
from dubito.networks.layers import rule_for
from dubito.networks.layers.norm import NormRule
from dubito.networks.twin import copied
from dubito.uses.compression.shrink import TOLERANCE, largest_difference, shrink, silenced
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup


def depend(model: nn.Module, example: Any) -> list[UnitGroup]:
    """Return the groups of units that torch-pruning finds by calling the network once.

    A group keeps its width if weights other than those of linear layers, convolutions and norms per channel depend on
    it, or if the network's own code assumes it (heads of attention, zeros padded to a fixed number of channels); the
    latter is found by removing one unit of each group.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise UnsupportedError(
            "This network is no plain chain of layers, so removing its units needs torch-pruning: pip install "
            "'dubito[shrink]', or use structure=\"weights\"."
        ) from error
    private = copied(model).eval()
    for value in private.parameters():
        value.requires_grad_()
    names = {module: name for name, module in private.named_modules()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of parameters outside of layers, which keep their width
            graph = torch_pruning.DependencyGraph().build_dependency(private, example_inputs=example)
            roots = tuple({type(module) for module in private.modules() if mixes_channels(module)})
            found = list(graph.get_all_groups(root_module_types=roots))
    except Exception as error:
        raise UnsupportedError(
            f"This network cannot be traced ({type(error).__name__}: {error}), so its units cannot be removed: use "
            'structure="weights", which needs no trace.'
        ) from error
    groups = [_units(graph, group, names) for group in found]
    return [group for group in groups if group is not None and can_shrink(model, group, example)]


def can_shrink(model: nn.Module, group: UnitGroup, example: Any) -> bool:
    """Return whether removing the last unit of a group gives the same network as silencing it."""
    if group.size == 1:
        return False
    kept = {group.name: torch.arange(group.size) < group.size - 1}
    try:
        quiet, _ = silenced(model, [group], kept, example)
        return largest_difference(quiet, shrink(quiet, [group], kept, example), example) <= TOLERANCE
    except (RuntimeError, ValueError, LookupError, DubitoError):  # shapes do not fit any more
        return False


def _units(graph: Any, group: Any, names: dict[nn.Module, str]) -> UnitGroup | None:
    producers, passers, consumers = [], [], []
    for item in group:
        module, index = item.dep.target.module, torch.tensor(list(item.idxs))
        if not isinstance(module, nn.Module):
            return None  # a parameter outside of layers, which no rule makes smaller
        rule = rule_for(module)
        if rule is None and not any(True for _ in module.parameters()):
            continue  # an activation, a sum, a reshaping
        if item.root_idxs is None or None in item.root_idxs or rule is None or getattr(module, "groups", 1) != 1:
            return None
        part = LayerChannels(names[module], torch.tensor(list(item.root_idxs)), index)
        if isinstance(rule, NormRule) and not rule.mixes_channels:
            passers.append(part)
        elif not mixes_channels(module):
            return None
        elif graph.is_out_channel_pruning_fn(item.dep.handler):
            producers.append(part)
        else:
            consumers.append(part)
    if not consumers or not producers:  # the outputs of the network
        return None
    return UnitGroup(int(producers[0].unit.max()) + 1, _once(producers), _once(passers), _once(consumers))


def mixes_channels(module: nn.Module) -> bool:
    """Return whether a layer's rule says that each output is a linear function of all inputs, as in a convolution."""
    rule = rule_for(module)
    return rule is not None and rule.linear_in_input and not rule.channelwise(module)


def _once(parts: list[LayerChannels]) -> tuple[LayerChannels, ...]:
    """Return the parts without repetitions: the graph may reach a layer on two paths."""
    found: dict[tuple[str, int], LayerChannels] = {}
    for part in parts:
        found.setdefault((part.layer, int(part.index[0])), part)
    return tuple(found.values())
