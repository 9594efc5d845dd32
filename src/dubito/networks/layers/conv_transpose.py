"""`nn.ConvTranspose1d`, `2d`, `3d`: every input position adds to its window of the output."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dubito.networks.layers.base import channels_first_rows
from dubito.networks.layers.conv import ChannelsFirstRule, batched, pad, spatial_dims, window_rows, windows
from dubito.networks.layers.registry import register
from dubito.networks.layers.rows import DenseRows, GroupedRows

_CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(ChannelsFirstRule):
    r"""Input `[B, I, *size]`; rows are input positions, and gradient rows the windows they add to.

    The weight `[I, O / Gr, *kernel]` is the matrix `[fan_out, I]` with fan_out = O · kernel, or
    `[Gr, fan_out / Gr, I / Gr]`, because $\partial W_{iok} = \sum_t x_{it}\, g_{o,\,st + dk - p}$.
    """

    def apply(self, layer: _ConvNd, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        r"""$y_{o,\,st + dk - p} \mathrel{+}= W_{iok}\, x_{it}$, plus the bias; without the `output_size` argument."""
        conv = _CONV_TRANSPOSE[spatial_dims(layer)]
        return conv(x, weight, bias, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)

    def inputs_as_rows(self, layer: _ConvNd, x: Tensor) -> DenseRows | GroupedRows:
        """`[B, T, I]`, or `[B, T, Gr, I / Gr]`, with T the input positions."""
        rows = channels_first_rows(batched(layer, x[None]))[0]
        return DenseRows(rows) if layer.groups == 1 else GroupedRows(rows.unflatten(-1, (layer.groups, -1)))

    def grads_as_rows(self, layer: _ConvNd, g: Tensor) -> Tensor:
        """The output gradients in each position's window: `[V, B, T, fan_out]`, or `[V, B, T, Gr, fan_out / Gr]`."""
        g = batched(layer, g)
        view = windows(pad(layer, g.flatten(0, 1)), layer.kernel_size, layer.stride, layer.dilation)
        for axis, (extra, step) in enumerate(zip(layer.output_padding, layer.stride, strict=True), start=2):
            # output_padding may reach past the stride if it is below the dilation: windows that no input adds to
            view = view.narrow(axis, 0, view.shape[axis] - extra // step)
        rows = window_rows(view, layer.groups).unflatten(0, g.shape[:2])
        return rows.squeeze(3) if layer.groups == 1 else rows

    def to_matrix(self, layer: _ConvNd, weight: Tensor) -> Tensor:
        """`[..., I, O / Gr, *kernel]` as `[..., fan_out, I]`, or `[..., Gr, fan_out / Gr, I / Gr]`."""
        matrix = weight.flatten(-1 - spatial_dims(layer))
        grouped = matrix if layer.groups == 1 else matrix.unflatten(-2, (layer.groups, -1))
        return grouped.transpose(-1, -2)

    def from_matrix(self, layer: _ConvNd, matrix: Tensor) -> Tensor:
        """The inverse of `to_matrix`."""
        grouped = matrix.transpose(-1, -2)
        return (grouped if layer.groups == 1 else grouped.flatten(-3, -2)).unflatten(-1, layer.weight.shape[1:])
