"""Find which input features of a table a network uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import params


def first_matrix(model: nn.Module, example: Any) -> str | None:
    """Return the name of the weight matrix that sees the input features, where inputs are plain features."""
    if not isinstance(example, Tensor) or example.ndim != 2 or not example.is_floating_point():
        return None
    name, value = next((name, value) for name, value in model.named_parameters() if value.ndim > 1)
    return name if value.shape[1:] == example.shape[1:] else None


def live_features(model: nn.Module, example: Any) -> Tensor | None:
    """Return a mask over the input features, false where the network does not use one; None if inputs are no features.

    The column of an unused feature in the first matrix is zero. Inputs may reach the outputs on another path too, so
    the gradient of the outputs with respect to the feature must be zero as well.
    """
    first = first_matrix(model, example)
    if first is None:
        return None
    inputs = example.detach().clone().requires_grad_()
    used = (model.get_parameter(first) != 0).any(0).cpu()
    try:
        outputs = params.call(model, inputs)
    except (RuntimeError, ValueError):  # it only runs without gradients
        return used
    if not outputs.requires_grad:  # the network disables gradients, or does not use its inputs
        return used
    weights = torch.rand(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)  # so that none cancel
    (gradients,) = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return used if gradients is None else used | (gradients != 0).any(0).cpu()
