"""Make private copies of the user's network, which a method may change."""

from __future__ import annotations

from torch import nn

from dubito.core import distributed, params
from dubito.core.errors import InputError, UnsupportedError
from dubito.core.frozen import Frozen
from dubito.networks.adapters import copied_beside_base
from dubito.networks.compiled import uncompile_parts


def check_model(model: nn.Module) -> None:
    """Raise an error if the user's network cannot be used."""
    if not isinstance(model, nn.Module):
        raise InputError(f"The model must be a torch.nn.Module, not {type(model).__name__}.")
    if distributed.is_sharded(model.parameters()):
        raise UnsupportedError(
            "The parameters of the model are sharded over processes (FSDP, DTensor), but Dubito needs whole ones: load "
            "its full state dict (torch.distributed.checkpoint.state_dict, full_state_dict=True) into a plain copy of "
            "the network, and choose weights that fit one process, such as weights=select.last_layer()."
        )
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise InputError("The model has lazy layers: call it once on a batch to initialize their parameters.")
    if next(model.parameters(), None) is None:
        raise InputError("The model has no parameters: give a network with weights.")


def private_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the user's network; raise an error if it cannot be used."""
    check_model(model)
    model = params.unwrapped(model)
    try:
        private = uncompile_parts(copied_beside_base(model))
    except (RuntimeError, TypeError) as error:
        raise InputError(f"The model cannot be copied with copy.deepcopy: {error}") from error
    for value in private.parameters():
        value.grad = None
    for module in private.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # KL divergences and penalties have a gradient at every entry
    return private


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of the user's network with the weights and buffers of the first process in every process."""
    private = private_copy(model)
    own = [value for value in private.parameters() if not isinstance(value, Frozen)]
    distributed.share_([*own, *private.buffers()])
    return private
