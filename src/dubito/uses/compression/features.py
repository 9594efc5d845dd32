"""The input features of a table: which of them a network looks at."""

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
    """Return a mask over the input features, false where nothing looks at one; None where there are no plain features.

    The column of a dead feature in the first matrix is zero. That is not enough where inputs take a second way through
    the network, so the outputs must have no slope in it either.
    """
    first = first_matrix(model, example)
    if first is None:
        return None
    inputs = example.detach().clone().requires_grad_()
    outputs = params.call(model, inputs)
    looked_at = (model.get_parameter(first) != 0).any(0).cpu()
    if not outputs.requires_grad:  # no slopes: the network forbids them, or does not use its inputs
        return looked_at
    weights = torch.rand(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)  # so that none cancel
    (slopes,) = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return looked_at if slopes is None else looked_at | (slopes != 0).any(0).cpu()
