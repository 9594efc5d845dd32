"""A dense layer with factors per block of rows as one node of autograd's graph, for faster training steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Blocks of at least this many rows: gradients of the weight by blocks are then faster than another full product.
MANY_ROWS = 20


class BlockDense(torch.autograd.Function):
    r"""$y = ((x \circ s_m) W^\top) \circ r_m + b_m$ for the rows $x$ of block $m$, in M blocks of equal size.

    With $z = (x \circ s_m) W^\top$, $\bar z = g \circ r_m$, $\bar u = \bar z W$ and sums over the rows of a block:

    $$\bar b_m = \textstyle\sum g, \quad \bar r_m = \sum g \circ z, \quad \bar s_m = \sum \bar u \circ x, \quad
      \bar W = \bar z^\top (x \circ s), \quad \bar x = \bar u \circ s_m .$$

    If the inputs are data, they need no gradient, and neither $\bar u$. The gradients of the weight by blocks,
    $G_m = \bar z_m^\top x_m$, then give, with as many multiplications,

    $$\bar W = \sum_m G_m \circ s_m, \qquad \bar s_m = 1^\top (W \circ G_m) .$$
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, s: Tensor, r: Tensor, bias: Tensor) -> Tensor:
        """Return the outputs ``[N, O]``; factors and biases are ``[M, C]``."""
        scaled = (x.view(len(s), -1, x.shape[1]) * s.unsqueeze(1)).view(x.shape)
        middle = torch.mm(scaled, weight.t())
        ctx.by_blocks = len(x) >= MANY_ROWS * len(s) and ctx.needs_input_grad[:2] == (False, True)
        ctx.save_for_backward(x, weight, s, r, None if ctx.by_blocks else scaled, middle)
        outputs = torch.addcmul(bias.unsqueeze(1), middle.view(len(s), -1, len(weight)), r.unsqueeze(1))
        # not a view of `outputs`, which autograd would not let a later layer change in place
        return torch.ops.aten._unsafe_view.default(outputs, middle.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments."""
        x, weight, s, r, scaled, middle = ctx.saved_tensors
        on_x, on_weight, *_ = ctx.needs_input_grad
        blocks = grad.reshape(len(s), -1, len(weight))
        inputs, on_middle = x.view(len(s), -1, x.shape[1]), blocks * r.unsqueeze(1)
        others = (blocks * middle.view(blocks.shape)).sum(1), blocks.sum(1)
        if ctx.by_blocks:
            return None, *_by_blocks(inputs, weight, s, on_middle), *others
        rows = on_middle.view(middle.shape)
        on_scaled = torch.mm(rows, weight).view(inputs.shape)
        return (
            (on_scaled * s.unsqueeze(1)).view(x.shape) if on_x else None,
            torch.mm(rows.t(), scaled) if on_weight else None,
            on_scaled.mul_(inputs).sum(1),
            *others,
        )


def _by_blocks(inputs: Tensor, weight: Tensor, s: Tensor, on_middle: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weight and of the input factors, one block at a time to fit into the cache."""
    on_weight, on_s, part = torch.zeros_like(weight), torch.empty_like(s), torch.empty_like(weight)
    for m, (x, grads) in enumerate(zip(inputs, on_middle, strict=True)):
        torch.mm(grads.t(), x, out=part)
        on_weight.addcmul_(part, s[m])
        torch.sum(part.mul_(weight), 0, out=on_s[m])
    return on_weight, on_s
