"""Cache the features in front of the first random layer, which are the same for every posterior sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito.core import batches, limits, params
from dubito.core.batches import Source
from dubito.networks.watching import inputs_of, watch


class _RecordedCall(NamedTuple):
    module: nn.Module
    name: str
    given: Tensor | None  # the argument, if the call has exactly one tensor argument
    returned: Any


class RandomHead(nn.Module):
    """The last modules of a network, called one after the other, which hold all of its random weights.

    Args:
        model: The network that the modules belong to.
        modules: The modules, in the order in which they are called.
    """

    def __init__(self, model: nn.Module, modules: list[nn.Module]) -> None:
        super().__init__()
        self.chain = nn.ModuleList(modules)
        self._whole = [model]  # in a list, so that it is not registered as a submodule

    def forward(self, features: Tensor) -> Tensor:
        """Compute the network's output from the input of the first random layer."""
        for module in self.chain:
            features = module(features)
        return features

    @torch.no_grad()
    def features(self, inputs: Any) -> Tensor:
        """Return the input of the first random layer for a batch."""
        return inputs_of(self._whole[0], {"": self.chain[0]}, inputs)[""]


@torch.no_grad()
def split(model: nn.Module, names: list[str], inputs: Any) -> RandomHead | None:
    """Split off the part of a network that starts at its first random layer; None if it cannot be run by itself.

    One forward pass is recorded. The head is the longest chain of calls that ends with the network's output, each call
    taking exactly what the one before returned. It is used only if it holds all of `names`, is not the whole network,
    is called once, and gives the same outputs when it is run by itself.

    Args:
        model: The network.
        names: The parameters with random entries.
        inputs: Example inputs.
    """
    with _watched(model) as calls:
        outputs = params.call(model, inputs)
    owners = _owners(model, names)
    chain: list[_RecordedCall] = []
    wanted: Any = outputs
    for call in reversed(calls):
        if call.returned is not wanted or call.given is None:
            continue
        chain.insert(0, call)
        wanted = call.given
    first = next((i for i, call in enumerate(chain) if call.name in owners), None)
    if first is None:
        return None
    kept = chain[first:]
    called = [call.name for call in calls]
    features = kept[0].given
    assert features is not None
    complete = owners <= {call.name for call in kept} and all(called.count(call.name) == 1 for call in kept)
    if not complete or len(features) != batches.num_rows(inputs) or kept[0].name == called[0]:
        return None
    head = RandomHead(model, [call.module for call in kept])
    head.train(model.training)
    return head if torch.equal(head(head.features(inputs)), outputs) else None


def cached_features(head: RandomHead, source: Source) -> Source | None:
    """Return the data with its inputs replaced by the head's features; None if they do not fit into memory.

    Only data in memory is replaced, because a loader may augment each example anew.
    """
    if source.pair is None:
        return None
    inputs, targets = source.pair
    one = head.features(source.place(batches.take(inputs, slice(0, 1))))
    if one.numel() * one.element_size() * source.num_data > limits.current().cached_features:
        return None
    rows = range(0, batches.num_rows(inputs), 1024)
    parts = [head.features(source.place(batches.take(inputs, slice(row, row + 1024)))) for row in rows]
    pair = (torch.cat(parts), targets)
    return source.changed(pair=pair, in_memory=[pair])


def _owners(model: nn.Module, names: list[str]) -> set[str]:
    """Return the modules that own the named parameters; a tied parameter has several."""
    chosen = {id(value) for name, value in model.named_parameters() if name in names}
    return {
        name
        for name, module in model.named_modules()
        if any(id(value) in chosen for value in module.parameters(recurse=False))
    }


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[_RecordedCall]]:
    """Record every call of a module that has no children or owns parameters."""
    calls: list[_RecordedCall] = []

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        alone = args[0] if len(args) == 1 and isinstance(args[0], Tensor) and not kwargs else None
        calls.append(_RecordedCall(module, name, alone, returned))

    watched = {
        name: module
        for name, module in model.named_modules()
        if next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None
    }
    with watch(watched, after=note):
        yield calls
