"""The last linear map of a network, found in autograd's graph: it gives outputs, and its inputs are features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import params
from dubito.core.errors import UnsupportedError
from dubito.networks.layers import class_rule
from dubito.networks.parameter_uses import Node, Use, Uses, find_uses
from dubito.networks.swapping import Swapped, swap_class
from dubito.networks.twin import twin


def output_layer(model: nn.Module, inputs: Any) -> list[str]:
    """Return the trainable parameters of the last linear map between `inputs` and the outputs; none if there is none.

    It is the last matrix product or convolution with a parameter on every way from the outputs down. Several maps
    whose results are added or concatenated count as one. The matrix may be computed from parameters, as weight
    normalization and other parametrizations do. What the layer adds to the product, its bias, belongs to it.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    >>> output_layer(model, torch.zeros(1, 3))
    ['2.weight', '2.bias']
    """
    copied = twin(model).eval()
    names = [name for name, value in copied.named_parameters() if value.requires_grad]
    uses = find_uses(copied, names, inputs) if names else None
    if uses is None or not uses.order:
        return []
    above, last = _last_maps(uses)
    chosen = {use.name for use in last if use.multiplies or use.adds}
    owners = set().union(*(_owners(copied, name) for name in chosen))
    chosen |= {use.name for use in above if use.adds and _owners(copied, use.name) & owners}
    return [name for name in names if name in chosen]


def registered_last(model: nn.Module) -> list[str]:
    """Return the trainable parameters of the linear layer that a network registers last; none if there is none."""
    for name, module in reversed(list(model.named_modules())):
        rule = class_rule(module)
        if rule is not None and rule.linear_in_input and not rule.normalizes:
            own = module.named_parameters(prefix=name)
            if trainable := [full for full, value in own if value.requires_grad]:
                return trainable
    return []


def _last_maps(uses: Uses) -> tuple[list[Use], list[Use]]:
    """Return the uses above the last linear maps, and those at them."""
    by_node: dict[Node, list[Use]] = {}
    for found in uses.found.values():
        for use in found:
            by_node.setdefault(use.node, []).append(use)
    above: list[Use] = []
    maps: list[Node] = []
    stack, seen = [uses.order[0]], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(use.multiplies for use in by_node.get(node, ())):
            maps.append(node)
            continue
        above += by_node.get(node, [])
        stack += [below for below, _ in node.next_functions]
    last = [node for node in maps if not any(_is_below(node, other) for other in maps if other is not node)]
    return above, [use for node in last for use in by_node[node]]


def _is_below(node: Node, top: Node) -> bool:
    """Return whether the result of `node` is used for that of `top`."""
    stack, seen = [top], set()
    while stack:
        here = stack.pop()
        if here is node:
            return True
        if here is not None and here not in seen:
            seen.add(here)
            stack += [below for below, _ in here.next_functions]
    return False


def _owners(model: nn.Module, name: str) -> set[str]:
    """Return the modules that use a parameter, by name; a module may compute its tensors from those of parts of it."""
    value = model.get_parameter(name)
    names = [other for other, same in model.named_parameters(remove_duplicate=False) if same is value]
    return {other.rpartition(".")[0].partition(".parametrizations")[0] for other in names}


def last_layer(model: nn.Module, example: Any) -> str:
    """Return the name of the layer whose inputs are the features; raise an error if there is none.

    >>> import torch
    >>> last_layer(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.zeros(1, 3))
    '2'
    """
    names = output_layer(model, example)
    owners = {name.rpartition(".")[0].partition(".parametrizations")[0] for name in names}
    if len(owners) != 1:
        raise UnsupportedError(
            "The network has no features: they are the inputs of its last linear layer, and it has no single one."
        )
    return owners.pop()


@torch.no_grad()
def gives_outputs(model: nn.Module, layer: str, inputs: Any) -> bool:
    """Return whether the outputs of a network are what its last layer gives, not changed by a softmax or the like."""
    network = twin(model).eval()
    tap: Any = network.get_submodule(layer)
    swap_class(tap, Tap)
    outputs = params.call(network, inputs)
    return torch.equal(outputs.flatten(), tap.given.flatten().to(outputs.dtype))


class Tap(Swapped):
    """Keep the features that a layer was called with, and its result; for `swap_class`."""

    prefix = "Tapped"
    seen: Tensor | None = None
    given: Tensor | None = None

    def forward(self, features: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        self.seen = features
        self.given = super().forward(features, *args, **kwargs)
        return self.given
