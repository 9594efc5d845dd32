"""Networks with parts that `torch.compile` made: hooks, swapped weights and gradients per layer need the plain ones."""

from __future__ import annotations

from typing import Any

from torch import nn

from dubito.core.params import COMPILED, is_compiled


class Uncompiled(nn.Module):
    """Stands in the place of a compiled part, with the same parameter names, and calls the plain module."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.add_module(COMPILED, plain)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # the network may use attributes of its part
            if name == COMPILED:
                raise
            return getattr(super().__getattr__(COMPILED), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain module."""
        return self.get_submodule(COMPILED)(*args, **kwargs)


def uncompile_parts(model: nn.Module) -> nn.Module:
    """Replace compiled parts of a private network by the modules that they were made from, in place.

    A compiled forward pass knows nothing of hooks and other weights that come after it was compiled: dropout that
    should stay on would be off. The names of parameters stay the same.
    """
    for module in list(model.modules()):
        for name, part in module.named_children():
            if is_compiled(part):
                setattr(module, name, Uncompiled(part.get_submodule(COMPILED)))
    return model
