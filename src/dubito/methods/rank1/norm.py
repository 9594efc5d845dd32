"""Normalization layers of a mixture: one set of tensors for each component."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.networks.layers import rule_for
from dubito.networks.layers.norm import NormRule
from dubito.networks.swapping import Swapped, swap_class

STACKED = ("weight", "bias", "running_mean", "running_var")


class ComponentNorm(Swapped):
    """A mixin for a normalization layer whose tensors have a leading axis ``[K]``, one slice per component.

    Attributes:
        blocks: The components of the rows: pairs of component and number of rows.
    """

    prefix = "Component"
    blocks: list[tuple[int, int]]
    rule: NormRule[Any]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the rows of each component separately."""
        layer: Any = self
        if self.training and layer._buffers.get("num_batches_tracked") is not None:
            layer.num_batches_tracked += 1
        rows = sum(rows for _, rows in self.blocks)
        if x.shape[0] != rows:
            raise UnsupportedError(
                f"A normalization layer was given {x.shape[0]} rows for {rows} examples: one for each component needs "
                "the examples on the first axis; use normalization='shared'."
            )
        parts = x.split([rows for _, rows in self.blocks])
        return torch.cat([self._one(part, k) for part, (k, _) in zip(parts, self.blocks, strict=True)])

    def _one(self, x: Tensor, component: int) -> Tensor:
        stacked = {name: value for name, value in {**self._parameters, **self._buffers}.items() if name in STACKED}
        own = {name: None if value is None else value[component] for name, value in stacked.items()}
        return self.rule.forward_with(self, x, own)


def make_component_norms(network: nn.Module, components: int) -> dict[str, ComponentNorm]:
    """Give every normalization layer of a private network one slice per component; return the layers by name."""
    found: dict[str, ComponentNorm] = {}
    for name, module in network.named_modules():
        rule = rule_for(module)
        if not isinstance(rule, NormRule):
            continue
        for key, value in module.named_parameters(recurse=False):
            stacked = value.detach().expand(components, *value.shape).clone()
            module.register_parameter(key, nn.Parameter(stacked, requires_grad=value.requires_grad))
        for key in ("running_mean", "running_var"):
            buffer = module._buffers.get(key)
            if buffer is not None:
                module._buffers[key] = buffer.expand(components, *buffer.shape).clone()
        swap_class(module, ComponentNorm, blocks=[], rule=rule)
        assert isinstance(module, ComponentNorm)
        found[name] = module
    return found
