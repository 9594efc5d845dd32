"""Private copies of the user's network, which a method may change, and new weights for them."""

from __future__ import annotations

import copy

from torch import nn

from dubito.core import distributed, params
from dubito.core.errors import InputError, UnsupportedError


def private_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the user's network that we may change."""
    if not isinstance(model, nn.Module):
        raise InputError(f"The model must be a torch.nn.Module, not {type(model).__name__}.")
    model = params.unwrapped(model)
    if distributed.is_sharded(model.parameters()):
        raise UnsupportedError(
            "The parameters of the model are sharded over processes (FSDP, DTensor), and Dubito needs whole ones: load "
            "its full state dict (torch.distributed.checkpoint.state_dict, full_state_dict=True) into a plain copy of "
            "the network, and choose weights that fit one process, such as weights=select.last_layer()."
        )
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise InputError("The model has lazy layers: call it once on a batch, so that they know their shapes.")
    try:
        private = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"The model cannot be copied, and it must not be changed: {error}") from error
    if next(private.parameters(), None) is None:
        raise InputError("The model has no parameters: there is nothing to be uncertain about.")
    for value in private.parameters():
        value.grad = None
    for module in private.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # divergences and penalties have a slope at every entry
    return private


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the user's network that has the first process's weights and buffers in every process."""
    private = private_copy(model)
    distributed.share_([*private.parameters(), *private.buffers()])
    return private


def reset_parameters(model: nn.Module) -> None:
    """Draw new weights by each layer's own `reset_parameters`; what is frozen stays.

    Inner modules come first, so that a model's own initialization has the last word.
    """
    reset: set[int] = set()
    frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    for module in reversed(list(model.modules())):
        own = list(module.parameters())
        redraw = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(redraw) and any(value.requires_grad for value in own):
            redraw()
            reset |= {id(value) for value in own}
    params.load_(model, frozen)
    for name, value in model.named_parameters():
        if value.requires_grad and id(value) not in reset:
            raise InputError(f"start='fresh' cannot redraw '{name}': its module has no reset_parameters(); add one.")
