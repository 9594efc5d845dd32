"""Find the units of networks that no tracer follows, such as transformers: change a channel, and see who reads it.

The outputs of all linear layers and embeddings are replaced by fixed numbers. Then one output channel of a layer
changes, and the inputs of the other layers show who reads it, without any layer in between. A hidden unit of an MLP
changes one input of the next layer; a channel of a query or key changes those of its attention head; a channel of the
residual stream changes all inputs after the next norm, and is left alone. Channels that are connected form a unit: one
channel of each layer of a gated MLP, one head of an attention layer, a group of heads that share keys and values.

The network's own code may hold the number of heads or the width of a layer. Integers of the module around the layers
that equal one of them shrink with it, if the smaller network then equals the masked one; this is tried for every group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import batches, limits, params
from dubito.core.errors import DubitoError
from dubito.networks.layers import channel_axis, class_rule, rule_for
from dubito.networks.twin import copied
from dubito.networks.watching import first_argument, watch
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup
from dubito.uses.compression.units_by_torch_pruning import can_shrink, mixes_channels

# Channels that are probed in one call, each in a row of the batch of its own.
ROWS = 64
# A channel has changed if it did by more than this share of the largest input of its layer.
CHANGED = 1e-5
# Rows on which the smaller network is compared with the masked one, for every group.
COMPARED = 4
# How many kinds of integers of a network's own code are changed together at most.
MOST_KINDS = 4
Channel = tuple[str, str, int]  # layer, side, number


def probe(model: nn.Module, example: Any) -> list[UnitGroup]:
    """Return the groups of units between linear layers; empty where there are none, or the network cannot be probed.

    Args:
        model: The network, in evaluation mode; it is not changed.
        example: A batch of inputs.
    """
    if any(map(_has_channels_first, model.modules())):  # convolutions, whose channels are followed by other tracers
        return []
    try:
        probing = _Probing(model, batches.take(example, slice(0, 1)))
        edges = list(probing.edges())
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, DubitoError):
        return []  # it does not run in float64, or not on made-up activations
    some = batches.take(example, slice(0, COMPARED))
    found = (_verified(model, group, some) for group in _groups(probing, edges))
    return [group for group in found if group is not None]


def _has_channels_first(module: nn.Module) -> bool:
    rule = class_rule(module)
    return rule is not None and rule.linear_in_input and channel_axis(module, 5) < 4


def _takes_indices(module: nn.Module) -> bool:
    rule = class_rule(module)
    return rule is not None and rule.takes_indices


@dataclass(frozen=True)
class _Probed:
    """A layer that is called once: its output, made up, for one example, and by how much a channel of it changes.

    The change differs between positions: attention does not see one that is the same for all keys.
    """

    output: Tensor
    change: Tensor
    batched: bool

    @property
    def size(self) -> int:
        """The number of output channels."""
        return self.output.shape[-1]


class _Probing:
    """A network in which linear layers and embeddings that are called once return made-up numbers."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = copied(model).double().eval()
        self.inputs = batches.place(inputs, next(self.model.parameters()).device, torch.float64)
        modules = {n: m for n, m in self.model.named_modules() if mixes_channels(m) or _takes_indices(m)}
        self.readers = {name: module for name, module in modules.items() if not _takes_indices(module)}
        once, twice = self._outputs(modules, 1), self._outputs(modules, 2)
        self.layers = {}
        generator = torch.Generator().manual_seed(0)
        for name, (one,) in ((name, shapes) for name, shapes in once.items() if len(shapes) == 1):
            batched = one[:1] == (1,) and twice[name] == [(2, *one[1:])]
            # positive, so that no activation such as a ReLU hides a channel
            made_up = 0.1 + torch.rand(one, generator=generator, dtype=torch.float64)
            change = 5 * torch.rand(one[batched:-1], generator=generator, dtype=torch.float64)
            self.layers[name] = _Probed(made_up, change, batched)
        for name in self.layers:  # in a private copy; nothing is multiplied any more
            modules[name].forward = partial(self._stub, name)
        self.readers = {name: module for name, module in self.readers.items() if name in self.layers}
        largest = max((layer.output.numel() for layer in self.layers.values()), default=1)
        self.most_rows = max(1, min(ROWS, limits.numbers(limits.current().probed_activation) // largest))
        self.baseline = self._inputs({}, 1)

    @torch.no_grad()
    def _outputs(self, modules: dict[str, nn.Module], rows: int) -> dict[str, list[tuple[int, ...]]]:
        """Return the shapes of the outputs of all calls."""
        shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        with watch(modules, after=lambda name, *call: shapes[name].append(tuple(call[-1].shape))):
            params.call(self.model, self._repeated(rows))
        return shapes

    def _repeated(self, rows: int) -> Any:
        return batches.take(self.inputs, [0] * rows)

    def _stub(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Stand for a layer: keep its input, and return the made-up output with its changes."""
        layer = self.layers[name]
        if name in self.readers:
            self.seen[name] = first_argument(args, kwargs).detach()
        output = layer.output.expand(self.rows, *layer.output.shape[1:]) if layer.batched else layer.output
        if name in self.changes:
            output = output.clone()
        for row, channel in enumerate(self.changes.get(name, ())):
            if channel >= 0:
                place = output[row] if layer.batched else output
                place[..., channel] += layer.change
        return output

    @torch.no_grad()
    def _inputs(self, changes: dict[str, list[int]], rows: int) -> dict[str, Tensor]:
        """Return the inputs of all layers, and the outputs of the network as ``""``, after changes.

        Args:
            changes: For some layers, the channel that changes in each row; -1 for none.
            rows: The number of rows.
        """
        self.changes, self.rows, self.seen = changes, rows, {}
        self.seen[""] = params.call(self.model, self._repeated(rows))
        return self.seen

    def _changed(self, changes: dict[str, list[int]], rows: int) -> dict[str, Tensor]:
        """Return which channels of each layer's input differ from the baseline: ``[rows, channels]``."""
        found = {}
        for name, value in self._inputs(changes, rows).items():
            base = self.baseline[name].double()
            difference = (value.double() - base).abs()
            difference = difference.reshape(len(value), -1, value.shape[-1] if value.ndim > 1 else 1)  # positions
            found[name] = difference.amax(1) > CHANGED * base.abs().max().clamp_min(1.0)
        return found

    def edges(self) -> Iterator[tuple[Channel, Channel]]:
        """Yield pairs of an output channel of a layer and an input channel of a layer that reads it directly."""
        local = self._local()
        while local:
            together: dict[str, set[str]] = {}  # layers of one kind that have no reader in common
            for name, readers in local.items():
                same = all(self.layers[other].batched == self.layers[name].batched for other in together)
                if same and not any(readers & other for other in together.values()):
                    together[name] = readers
            yield from self._edges_of(together)
            local = {name: readers for name, readers in local.items() if name not in together}

    def _edges_of(self, together: dict[str, set[str]]) -> Iterator[tuple[Channel, Channel]]:
        rows = self.most_rows if all(self.layers[name].batched for name in together) else 1
        most = max(self.layers[name].size for name in together)
        for start in range(0, most, rows):
            channels = range(start, min(start + rows, most))
            changes = {n: [c if c < self.layers[n].size else -1 for c in channels] for n in together}
            found = self._changed(changes, len(channels))
            for name, readers in together.items():
                for reader in readers:
                    for row, channel in found[reader].nonzero().tolist():
                        if changes[name][row] >= 0:
                            yield (name, "output", changes[name][row]), (reader, "input", channel)

    def _local(self) -> dict[str, set[str]]:
        """Return the layers whose first channel is read by a part of the inputs of some layers, and which these are.

        A layer that the outputs of the network read directly, or that changes all inputs of a layer, is not local.
        """
        names = [name for name, layer in self.layers.items() if layer.size > 1]
        single = [[name] for name in names if not self.layers[name].batched]
        many = [name for name in names if self.layers[name].batched]
        found = {}
        for part in (*single, *(many[i : i + self.most_rows] for i in range(0, len(many), self.most_rows))):
            changes = {name: [0 if place == row else -1 for place in range(len(part))] for row, name in enumerate(part)}
            changed = self._changed(changes, len(part))
            for row, name in enumerate(part):
                own = {reader: mask[row] for reader, mask in changed.items() if bool(mask[row].any())}
                if own and "" not in own and not any(bool(mask.all()) for mask in own.values()):
                    found[name] = set(own)
        return found


def _groups(probing: _Probing, edges: list[tuple[Channel, Channel]]) -> Iterator[UnitGroup]:
    """Yield groups of units: connected channels, of the same layers, that make up all channels of these layers."""
    sizes = {(name, "output"): layer.size for name, layer in probing.layers.items()}
    sizes |= {(name, "input"): value.shape[-1] for name, value in probing.baseline.items()}
    alike: dict[tuple[tuple[str, str], ...], list[dict[tuple[str, str], list[int]]]] = defaultdict(list)
    for unit in _connected(edges):
        sides: dict[tuple[str, str], list[int]] = defaultdict(list)
        for layer, side, channel in unit:
            sides[layer, side].append(channel)
        alike[tuple(sorted(sides))].append(sides)
    for layers, units in alike.items():
        units.sort(key=lambda unit: min(unit[layers[0]]))
        whole = all(sum(len(unit[side]) for unit in units) == sizes[side] for side in layers)
        even = all(len({len(unit[side]) for unit in units}) == 1 for side in layers)
        if len(units) < 2 or not whole or not even:
            continue
        parts = {side: _part(side[0], [sorted(unit[side]) for unit in units]) for side in layers}
        order = list(probing.layers)  # so that the first layer that is called names the group
        producers = sorted((s for s in layers if s[1] == "output"), key=lambda s: order.index(s[0]))
        consumers = [side for side in layers if side[1] == "input"]
        yield UnitGroup(len(units), tuple(parts[s] for s in producers), (), tuple(parts[s] for s in consumers))


def _part(layer: str, channels: list[list[int]]) -> LayerChannels:
    owner = [unit for unit, own in enumerate(channels) for _ in own]
    return LayerChannels(layer, torch.tensor(owner), torch.tensor(list(chain.from_iterable(channels))))


def _connected(edges: list[tuple[Channel, Channel]]) -> list[list[Channel]]:
    """Return the connected parts of a graph."""
    leader: dict[Channel, Channel] = {}

    def find(node: Channel) -> Channel:
        leader.setdefault(node, node)
        while leader[node] != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for one, other in edges:
        leader[find(one)] = find(other)
    parts: dict[Channel, list[Channel]] = defaultdict(list)
    for node in list(leader):
        parts[find(node)].append(node)
    return list(parts.values())


def _verified(model: nn.Module, group: UnitGroup, example: Any) -> UnitGroup | None:
    """Return the group with the integers that shrink with it, or None if no choice of them gives the same network."""
    around = [(type(model.get_submodule(name)), name, attribute, n) for name, attribute, n in _integers(model, group)]
    kinds = list(dict.fromkeys((kind, attribute) for kind, _, attribute, _ in around))
    for chosen in chain.from_iterable(combinations(kinds, count) for count in range(min(len(kinds), MOST_KINDS) + 1)):
        counts = tuple((name, attribute, n) for kind, name, attribute, n in around if (kind, attribute) in chosen)
        tried = replace(group, counts=counts)
        if can_shrink(model, tried, example):
            return tried
    return None


def _integers(model: nn.Module, group: UnitGroup) -> Iterator[tuple[str, str, int]]:
    """Yield integers of the modules around the layers that may count units or channels, with the share of one unit."""
    layers = [(part.layer, "output") for part in group.producers] + [(part.layer, "input") for part in group.consumers]
    values = {group.size}
    for name, side in layers:
        layer = model.get_submodule(name)
        rule: Any = rule_for(layer)
        values.add(rule.num_outputs(layer) if side == "output" else rule.num_inputs(layer))
    for parent in dict.fromkeys(name.rpartition(".")[0] for name, side in layers if side == "input"):
        for attribute, value in vars(model.get_submodule(parent)).items():
            if type(value) is int and value in values and value % group.size == 0:
                yield parent, attribute, value // group.size
