"""The features of a network: the inputs of its last linear layer, and the layer itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import params
from dubito.core.errors import UnsupportedError
from dubito.networks.output_layer import output_layer
from dubito.networks.swapping import Swapped, swap_class
from dubito.networks.twin import twin


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
