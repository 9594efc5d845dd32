"""What the engine records in a forward pass: calls of layers with rules, and of modules without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dubito.core import batches
from dubito.curvature import per_example
from dubito.curvature.call_gradients import CallGradient
from dubito.networks.layers.base import LayerRule
from dubito.networks.layers.rows import Rows, rows_as


@dataclass
class LayerCall:
    """One call of a layer with a rule: its input, and the gradient edge of its output."""

    layer: nn.Module
    rule: LayerRule[Any]
    roles: Mapping[str, str]
    inputs: Tensor
    version: int
    edge: GradientEdge
    output_size: int
    _rows: Rows | None = None

    @property
    def names(self) -> list[str]:
        """The parameters."""
        return list(self.roles.values())

    @property
    def is_stale(self) -> bool:
        """Whether the input was overwritten after the call."""
        return self.inputs._version != self.version

    @property
    def rows(self) -> Rows:
        """The input as rows."""
        if self._rows is None:
            self._rows = self.rule.inputs_as_rows(self.layer, self.inputs)
        return self._rows

    def gradients(self, grad: Tensor) -> list[tuple[str, CallGradient]]:
        """Return the gradient of each parameter for gradients ``[V, *output]``."""
        return [
            (name, CallGradient(self.rule, self.layer, rows_as(self.rows, grad) if role == "weight" else None, grad))
            for role, name in self.roles.items()
        ]


@dataclass
class ModuleCall:
    """One call of a module whose parameters have neither a rule nor an operation that is understood.

    Only this module is differentiated example by example; what follows it is pulled back for all examples at once.
    """

    module: nn.Module
    local: Mapping[str, str]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    edge: GradientEdge
    output_size: int

    @property
    def names(self) -> list[str]:
        """The parameters, by the names that the network has for them; `local` has those of the module."""
        return list(self.local)

    @property
    def is_stale(self) -> bool:
        """Whether an argument was overwritten after the call."""
        return self.versions != [leaf._version for leaf in batches.leaves((self.args, self.kwargs))]

    @property
    def rows(self) -> None:
        """None: nothing is known of the module."""
        return

    def explicit(self, grad: Tensor, pull: per_example.Pull) -> dict[str, Tensor]:
        """Return ``[V, B, *shape]`` for gradients ``[V, *output]``."""
        dtype = self.edge.node._input_metadata[self.edge.output_nr].dtype
        found = pull(self.module, list(self.local.values()), (self.args, self.kwargs), grad.to(dtype), _call)
        return {name: found[local].to(grad.dtype) for name, local in self.local.items()}


def _call(module: nn.Module, inputs: Any) -> Tensor:
    args, kwargs = inputs
    found = module(*args, **kwargs)
    return found if isinstance(found, Tensor) else found[0]
