"""`nn.Linear`: $y = W x + b$ at every position."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dubito.networks.layers.base import LayerRule, M, Side, channels_last_rows, check_kept, resized
from dubito.networks.layers.registry import register
from dubito.networks.layers.rows import DenseRows


class ChannelsLastRule(LayerRule[M]):
    """A matrix product at every position of inputs `[B, *positions, I]`."""

    def inputs_as_rows(self, layer: M, x: Tensor) -> DenseRows:
        """Every position is a row: `[B, T, I]`."""
        return DenseRows(channels_last_rows(x[None])[0])

    def grads_as_rows(self, layer: M, g: Tensor) -> Tensor:
        """Every position is a row: `[V, B, T, O]`."""
        return channels_last_rows(g)

    def bias_grads(self, layer: M, g: Tensor) -> Tensor:
        """`[V, B, O]`."""
        return channels_last_rows(g).sum(2)

    def channel_axis(self, layer: M, ndim: int) -> int:
        """The last."""
        return ndim - 1


@register(nn.Linear)
class LinearRule(ChannelsLastRule[nn.Linear]):
    """Input `[B, *positions, I]`; the weight `[O, I]` is its own matrix."""

    def apply(self, layer: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """$W x + b$."""
        return F.linear(x, weight, bias)

    def bias_shares_rows(self, layer: nn.Linear) -> bool:
        """Always."""
        return True

    def num_inputs(self, layer: nn.Linear) -> int:
        """`in_features`."""
        return layer.in_features

    def num_outputs(self, layer: nn.Linear) -> int:
        """`out_features`."""
        return layer.out_features

    def weight_axis(self, layer: nn.Linear, side: Side) -> int:
        """`[O, I]`."""
        return 0 if side == "output" else 1

    def keep_outputs(self, layer: nn.Linear, index: Tensor) -> nn.Linear:
        """Rows of the weight and entries of the bias."""
        index = check_kept(index, layer.out_features)
        tensors = {name: p[index] for name, p in layer.named_parameters(recurse=False)}
        return resized(layer, tensors, out_features=len(index))

    def keep_inputs(self, layer: nn.Linear, index: Tensor) -> nn.Linear:
        """Columns of the weight."""
        index = check_kept(index, layer.in_features)
        return resized(layer, {"weight": layer.weight[:, index]}, in_features=len(index))
