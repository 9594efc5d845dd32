"""`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: one linear map applied to every window of the padded input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dubito.core.errors import UnsupportedError
from dubito.core.tracing import is_tracing
from dubito.networks.layers.base import LayerRule, Side, channels_first_rows, check_kept, how_to_add, resized
from dubito.networks.layers.registry import register
from dubito.networks.layers.rows import DenseRows, GroupedRows

_CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_FORWARDS = (nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward)


def windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """All windows of `x [N, C, *size]` as a view `[N, C, *positions, *kernel]`, in any number of dimensions.

    >>> windows(torch.arange(5.0).view(1, 1, 5), [2], [1], [2]).squeeze().tolist()
    [[0.0, 2.0], [1.0, 3.0], [2.0, 4.0]]
    """
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
    return x


def window_rows(view: Tensor, groups: int) -> Tensor:
    """Windows `[N, C, *positions, *kernel]` as rows `[N, T, Gr, (C / Gr)·kernel]`; a copy, no view."""
    dims = (view.ndim - 2) // 2
    rows = view.movedim(1, 1 + dims)
    positions, channels, kernel = rows.shape[1 : 1 + dims], rows.shape[1 + dims], rows.shape[2 + dims :]
    return rows.reshape(rows.shape[0], math.prod(positions), groups, channels // groups * math.prod(kernel))


def spatial_dims(layer: _ConvNd) -> int:
    """1, 2 or 3."""
    return len(layer.kernel_size)


def batched(layer: _ConvNd, g: Tensor) -> Tensor:
    """`g [V, *activation]` with the batch axis that an activation without one leaves out."""
    return g.unsqueeze(1) if g.ndim == spatial_dims(layer) + 2 else g


class ChannelsFirstRule(LayerRule[_ConvNd]):
    """What convolutions and transposed convolutions share: channels at axis 1, and groups.

    A weight is `[outer, inner / groups, *kernel]`; the outer channels are the outputs of a convolution and the inputs
    of a transposed one.
    """

    def bias_grads(self, layer: _ConvNd, g: Tensor) -> Tensor:
        """`[V, B, O]`."""
        return channels_first_rows(batched(layer, g)).sum(2)

    def num_inputs(self, layer: _ConvNd) -> int:
        """`in_channels`."""
        return layer.in_channels

    def num_outputs(self, layer: _ConvNd) -> int:
        """`out_channels`."""
        return layer.out_channels

    def channel_axis(self, layer: _ConvNd, ndim: int) -> int:
        """1, or 0 without a batch axis."""
        return ndim - spatial_dims(layer) - 1

    def weight_axis(self, layer: _ConvNd, side: Side) -> int | None:
        """0 for the outer channels; 1 for the inner ones, which each group has for itself: no axis has them all."""
        if _is_outer(layer, side):
            return 0
        return 1 if layer.groups == 1 else None

    def weight_factors(self, layer: _ConvNd, v: Tensor, side: Side) -> Tensor:
        """Inner channels of a grouped convolution meet the rows of their own group."""
        if _is_outer(layer, side) or layer.groups == 1:
            return super().weight_factors(layer, v, side)
        lead, rows, window = v.shape[:-1], layer.weight.shape[0], [1] * spatial_dims(layer)
        by_group = v.unflatten(-1, (layer.groups, 1, -1)).expand(*lead, layer.groups, rows // layer.groups, -1)
        return by_group.reshape(*lead, rows, -1, *window)

    def channelwise(self, layer: _ConvNd) -> bool:
        """True of a depthwise convolution with as many outputs as inputs."""
        return layer.groups > 1 and layer.groups == layer.in_channels == layer.out_channels

    def keep_outputs(self, layer: _ConvNd, index: Tensor) -> _ConvNd:
        """Output channels, as many in each group; a depthwise convolution keeps the same inputs."""
        index = check_kept(index, layer.out_channels)
        bias = {} if layer.bias is None else {"bias": layer.bias[index]}
        size = len(index)
        if self.channelwise(layer):
            tensors = {"weight": layer.weight[index], **bias}
            return resized(layer, tensors, in_channels=size, out_channels=size, groups=size)
        weight = _keep(layer, index, outer=_is_outer(layer, "output"))
        return resized(layer, {"weight": weight, **bias}, out_channels=size)

    def keep_inputs(self, layer: _ConvNd, index: Tensor) -> _ConvNd:
        """Input channels, as many in each group; a depthwise convolution keeps the same outputs."""
        index = check_kept(index, layer.in_channels)
        if self.channelwise(layer):
            return self.keep_outputs(layer, index)
        weight = _keep(layer, index, outer=_is_outer(layer, "input"))
        return resized(layer, {"weight": weight}, in_channels=len(index))


def _is_outer(layer: _ConvNd, side: Side) -> bool:
    return (side == "output") != layer.transposed


def _keep(layer: _ConvNd, index: Tensor, outer: bool) -> Tensor:
    """The weight with only these outer, or inner, channels; groups must stay equally wide."""
    groups, weight = layer.groups, layer.weight
    width = weight.shape[0] // groups if outer else weight.shape[1]
    even = torch.arange(groups, device=index.device).repeat_interleave(len(index) // groups)
    if not torch.equal(index // width, even):
        raise UnsupportedError(
            f"a {type(layer).__name__} with {groups} groups of {width} channels must keep equally many of each group, "
            "in the order of the groups"
        )
    if outer:
        return weight[index]
    inner = (index % width).view(groups, -1)
    return torch.cat([part[:, kept] for part, kept in zip(weight.chunk(groups), inner, strict=True)])


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(ChannelsFirstRule):
    """Input `[B, I, *size]`; rows are windows, and the weight `[O, I / Gr, *kernel]` a matrix `[Gr, O / Gr, fan_in]`.

    Every padding mode only moves inputs, so it commutes with squaring them and `apply_variance` needs nothing special.
    """

    def obstacle(self, layer: _ConvNd) -> str | None:
        """`forward` calls `_conv_forward`, so that must be torch's own too."""
        known = getattr(type(layer), "_conv_forward", None) in _CONV_FORWARDS
        return None if known else f"its _conv_forward is overridden; {how_to_add(layer)}"

    def apply(self, layer: _ConvNd, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        r"""$y_{ot} = \sum_{ik} W_{oik}\, x_{i,\,st + dk - p} + b_o$."""
        padding: Any = layer.padding
        if layer.padding_mode != "zeros":
            x, padding = pad(layer, x), 0
        conv = _CONV[spatial_dims(layer)]
        return conv(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)

    def inputs_as_rows(self, layer: _ConvNd, x: Tensor) -> DenseRows | GroupedRows:
        """The windows under the kernel: `[B, T, fan_in]`, or `[B, T, Gr, fan_in]`."""
        rows = WindowRows(self, layer, batched(layer, x[None])[0])
        return rows if layer.groups == 1 else GroupedRows(window_rows(rows.view, layer.groups))

    def grads_as_rows(self, layer: _ConvNd, g: Tensor) -> Tensor:
        """`[V, B, T, O]`, or `[V, B, T, Gr, O / Gr]`."""
        rows = channels_first_rows(batched(layer, g))
        return rows if layer.groups == 1 else rows.unflatten(-1, (layer.groups, -1))

    def bias_shares_rows(self, layer: _ConvNd) -> bool:
        """Where all channels form one group."""
        return layer.groups == 1

    def to_matrix(self, layer: _ConvNd, weight: Tensor) -> Tensor:
        """`[..., O, I / Gr, *kernel]` as `[..., O, fan_in]`, or `[..., Gr, O / Gr, fan_in]`."""
        matrix = weight.flatten(-1 - spatial_dims(layer))
        return matrix if layer.groups == 1 else matrix.unflatten(-2, (layer.groups, -1))

    def from_matrix(self, layer: _ConvNd, matrix: Tensor) -> Tensor:
        """The inverse of `to_matrix`."""
        matrix = matrix if layer.groups == 1 else matrix.flatten(-3, -2)
        return matrix.unflatten(-1, layer.weight.shape[1:])


class WindowRows(DenseRows):
    """The windows of a convolution without groups. They are copied to rows when these are first used."""

    def __init__(self, rule: ConvRule, layer: _ConvNd, x: Tensor) -> None:
        self.rule, self.layer, self.x = rule, layer, x
        self.view = windows(pad(layer, x), layer.kernel_size, layer.stride, layer.dilation)

    @cached_property
    def a(self) -> Tensor:
        """`[B, T, fan_in]`."""
        return window_rows(self.view, 1).squeeze(2)

    @property
    def shape(self) -> torch.Size:
        """The shape of `a`."""
        (size, channels), rest, dims = self.view.shape[:2], self.view.shape[2:], spatial_dims(self.layer)
        return torch.Size([size, math.prod(rest[:dims]), channels * math.prod(rest[dims:])])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `a`."""
        return self.x.dtype

    def of(self, a: Tensor) -> Self:
        """Return dense rows, which are no longer windows."""
        return DenseRows(a)  # type: ignore[return-value]

    def at(self, positions: Tensor) -> Tensor:
        """Return the array at some positions, without the others."""
        grid = self.view.shape[2 : 2 + spatial_dims(self.layer)]
        where: Any = torch.unravel_index(positions, grid)
        chosen = self.view[:, :, *where]  # [B, C, T, *kernel]
        return chosen.transpose(1, 2).flatten(2)

    def columns(self) -> Tensor:
        """Return the windows as columns, `[B, fan_in, T]`, which images give twice as fast as rows."""
        if spatial_dims(self.layer) != 2 or "a" in self.__dict__ or is_tracing():
            return super().columns()
        layer, stride, dilation = self.layer, self.layer.stride, self.layer.dilation
        return F.unfold(pad(layer, self.x), layer.kernel_size, dilation, stride=stride)

    def times(self, basis: Tensor) -> Tensor | None:
        """Convolve with the columns of `basis`: windows in other coordinates are the outputs of other filters.

        With the channels as the last axis in memory this takes about half the time of windows and a product.
        """
        is_fast = spatial_dims(self.layer) == 2 and self.dtype == basis.dtype == torch.float32
        if not is_fast or max(self.layer.kernel_size) == 1 or is_tracing():
            return None
        filters = self.rule.from_matrix(self.layer, basis.mT).contiguous(memory_format=torch.channels_last)
        x = self.x.contiguous(memory_format=torch.channels_last)
        return self.rule.apply(self.layer, x, filters, None).permute(0, 2, 3, 1).flatten(1, 2)


def _pads(layer: _ConvNd) -> list[tuple[int, int]]:
    """Padding before and after, per spatial axis; an odd total of "same" puts the extra one after."""
    if layer.padding == "valid":
        return [(0, 0)] * spatial_dims(layer)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(p), int(p)) for p in layer.padding]


def pad(layer: _ConvNd, x: Tensor) -> Tensor:
    """The input as the kernel sees it, padded in the layer's own mode."""
    amounts = [n for before_after in reversed(_pads(layer)) for n in before_after]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    if is_tracing() and mode == "constant":
        return _padded_with_zeros(x, _pads(layer))
    return F.pad(x, amounts, mode=mode) if any(amounts) else x


def _padded_with_zeros(x: Tensor, pads: list[tuple[int, int]]) -> Tensor:
    """Pad the last axes. `F.pad` would fix the number of examples in a recorded graph."""
    for axis, ends in zip(range(-len(pads), 0), pads, strict=True):
        zeros = [torch.zeros_like(x.narrow(axis, 0, 1)).expand(*x.shape[:axis], n, *x.shape[axis:][1:]) for n in ends]
        x = torch.cat([zeros[0], x, zeros[1]], dim=axis) if any(ends) else x
    return x
