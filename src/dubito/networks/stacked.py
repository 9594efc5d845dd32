r"""Several networks of the same form as one: their linear layers as one batched product.

$$Y_k = X_k W_k^\top + b_k \quad (k = 1 \dots K) \qquad \text{as one product of } [K, B, I] \text{ and } [K, I, O]$$

The rows of all networks form one batch of ``K * B`` rows, so the operations between linear layers need no change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.randomness import Stream
from dubito.networks.layers import rule_for
from dubito.networks.swapping import put
from dubito.networks.twin import light_copy


class _Products(torch.autograd.Function):
    """``x Wᵀ + b`` for K members; written by hand, so that the gradient of W has the memory layout of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            torch.bmm(grads, weight) if of_x else None,
            torch.bmm(grads.mT, x) if of_weight else None,
            grads.sum(dim=1) if of_bias else None,
        )


class StackedLinear(nn.Module):
    """K linear layers: the k-th of K equal parts of the rows is multiplied by the k-th weight of ``[K, O, I]``."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        for name, first in layers[0].named_parameters():
            values = torch.stack([getattr(layer, name).detach() for layer in layers])
            self.register_parameter(name, nn.Parameter(values, requires_grad=first.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, stacked like the inputs."""
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        members, outputs, inputs = weight.shape
        rows = x.reshape(members, -1, inputs)
        if torch.is_autocast_enabled(x.device.type):  # which does not reach into functions of our own
            found = torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
        else:
            found = _Products.apply(rows, weight, bias)
        return found.reshape(*x.shape[:-1], outputs)


def stacked(models: list[nn.Module]) -> nn.Module:
    """Return one network with the linear layers of all models; all other parts are those of the first."""
    layers = [dict(model.named_modules()) for model in models]
    if isinstance(models[0], nn.Linear):
        return StackedLinear(models)  # type: ignore[arg-type]
    joint = light_copy(models[0])
    for name, layer in list(joint.named_modules()):
        if isinstance(layer, nn.Linear):
            put(joint, name, StackedLinear([one[name] for one in layers]))
    return joint


def stacking_obstacle(model: nn.Module, inputs: Any) -> str | None:
    """Return why copies of a network cannot be stacked, as a clause for an error; None if they can.

    Args:
        model: The network.
        inputs: A batch, a few rows of which are used to try it.
    """
    modules = list(model.named_modules(remove_duplicate=False))
    owners = [m for _, m in modules if [*m.parameters(recurse=False), *m.buffers(recurse=False)]]
    if not owners or any(not isinstance(m, nn.Linear) or rule_for(m) is None for m in owners):
        return "all weights must belong to plain linear layers"
    if len(modules) != len(list(model.modules())) or len({id(p) for m in owners for p in m.parameters()}) != sum(
        len(list(m.parameters())) for m in owners
    ):
        return "layers must not share weights"
    try:
        agrees = _agrees(model, inputs)
    except (RuntimeError, TypeError, ValueError, LookupError):  # the fit of a single member reports it
        return "the network cannot be copied or called on a batch"
    return None if agrees else "the network mixes the rows of a batch"


@torch.no_grad()
def _agrees(model: nn.Module, inputs: Any) -> bool:
    """Return whether two networks together have the outputs of each alone, on a few rows."""
    weight = next(model.parameters())
    parts = [batches.take(inputs, rows) for rows in (slice(0, 2), slice(-2, None))]
    copies = [batches.map_leaves(torch.clone, part) for part in parts]  # which a network may overwrite
    placed = [batches.place(part, weight.device, weight.dtype) for part in copies]
    models = [light_copy(model).eval() for _ in range(2)]
    for value in models[1].parameters():
        value.mul_(-0.5)
    with Stream(0, weight.device).active():
        both = params.call(stacked(models), batches.concatenate(placed))
        alone = torch.cat([params.call(one, rows) for one, rows in zip(models, placed, strict=True)])
    return both.shape == alone.shape and torch.allclose(both, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()))
