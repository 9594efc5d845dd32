"""Networks that overwrite their inputs, as `x.sub_(0.5)` does: private copies of them get copies of the inputs.

Without that the next weight sample, the next epoch and the user's own data would have what the first call left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from dubito.core import nests
from dubito.networks.twin import version_of

T = TypeVar("T")


def on_copies(call: Callable[[Any], T], inputs: Any) -> tuple[T, bool]:
    """Return what a call makes of a copy of the inputs, and whether it has overwritten the copy."""
    own = nests.map_leaves(torch.clone, inputs)
    before = [version_of(leaf) for leaf in nests.leaves(own)]
    found = call(own)
    return found, [version_of(leaf) for leaf in nests.leaves(own)] != before


def keep_inputs(model: nn.Module) -> None:
    """Let a private network, and copies of it, compute with copies of their inputs from now on."""
    if not keeps_inputs(model):
        model.register_forward_pre_hook(_copy, with_kwargs=True)


def keeps_inputs(model: nn.Module) -> bool:
    """Return whether `keep_inputs` was called for a network, or for the one that it was copied from."""
    return _copy in model._forward_pre_hooks.values()


def _copy(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return nests.map_leaves(torch.clone, args), nests.map_leaves(torch.clone, kwargs)
