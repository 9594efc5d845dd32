"""Gradients of the coordinates of a subspace: those of the network's own weights along its directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dubito.core import params
from dubito.networks.twin import copied

if TYPE_CHECKING:
    from dubito.curvature.engine import Engine
    from dubito.networks.subspace import SubspaceNetwork


class SubspaceGradients:
    """The products ``J P`` of the gradients of a network's weights, in factored form, with a subspace's directions.

    Args:
        network: A network whose only parameter are the coordinates.
        kind: The class `Engine`, which uses this one.
    """

    def __init__(self, network: SubspaceNetwork, kind: type[Engine]) -> None:
        model, self.subspace = network.parts
        self.coordinates, self.weights = network.z, self.subspace.weights
        self.model = copied(model)
        self.engine = kind(self.model, self.weights.names)
        self.moved = params.of(self.engine.model)
        self.base = params.map_values(torch.clone, self.moved)
        self.directions = self.weights.fill(self.subspace.basis.mT.to(self.coordinates).contiguous())

    @torch.no_grad()
    def pull(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        """Return ``{"z": [V, B, 1, r]}`` for output columns ``[V, B, ...]``."""
        for name, value in self.subspace.merge(self.base, self.coordinates.detach().reshape(-1)).items():
            self.moved[name].copy_(value)
        tape = self.engine.run(inputs)
        with tape.lend() as memory:
            factors = tape.pull(columns, memory)
            along = [factors[name].dot(self.directions[name]) for name in self.weights.names]
            return {"z": torch.stack(along).sum(0).unsqueeze(2)}
