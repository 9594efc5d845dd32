"""Gradient checkpointing: parts of a network that are called again in the backward pass, to save memory."""

from __future__ import annotations

from torch import nn

from dubito.core.errors import warn_once

# How modules of Hugging Face and of timm say that they are checkpointed.
FLAGS = ("gradient_checkpointing", "grad_checkpointing")


def switch_off_checkpointing(model: nn.Module) -> None:
    """Switch checkpointing off in a private network whose calls draw noise or have weights of their own.

    Its second call would not be the same as the first. Networks that call `torch.utils.checkpoint` without a flag are
    refused when they are trained.
    """
    flagged = [(module, flag) for module in model.modules() for flag in FLAGS if getattr(module, flag, False) is True]
    for module, flag in flagged:
        setattr(module, flag, False)
    if flagged:
        warn_once(
            "Gradient checkpointing is switched off in the copy of the model that is trained, because this method "
            "changes the network from call to call. Training takes more memory; the result is the same."
        )
