"""Normalizations: weight and bias act elementwise on the normalised input. LayerNorm, GroupNorm and BatchNorm."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.networks.layers.base import LayerRule, M, Side, channels_first_rows, channels_last_rows, check_kept, resized
from dubito.networks.layers.registry import register
from dubito.networks.layers.rows import ElementwiseRows

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
L = TypeVar("L", bound=nn.LayerNorm | nn.RMSNorm)


class NormRule(LayerRule[M]):
    r"""$y = \gamma \odot \hat x + \beta$, where $\hat x$ depends on the input and the statistics alone.

    A layer without affine parameters has the weight None and is $\hat x$ itself.
    """

    linear_in_input = False
    normalizes = True
    mixes_channels: ClassVar[bool] = True
    """Whether statistics run over several channels, so that removing one changes the others."""

    @abstractmethod
    def apply(self, layer: M, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        r"""$\gamma \odot \hat x + \beta$."""

    @abstractmethod
    def as_rows(self, layer: M, g: Tensor) -> Tensor:
        """An activation `g [V, ...]` as `[V, B, T, C]`."""

    def forward_with(self, layer: M, x: Tensor, tensors: dict[str, Tensor | None]) -> Tensor:
        """Compute `layer.forward(x)` with other tensors, given by name; training updates running ones among them."""
        return self.apply(layer, x, tensors.get("weight"), tensors.get("bias"))

    def apply_variance(self, layer: M, x: Tensor, weight_variance: Tensor, bias_variance: Tensor | None) -> Tensor:
        r"""$\hat x^2 \sigma_\gamma^2 + \sigma_\beta^2$."""
        variance = self.apply(layer, x, None, None).square()
        variance = variance * self.scale_channels(layer, weight_variance.flatten(), "output", x.ndim)
        if bias_variance is None:
            return variance
        return variance + self.scale_channels(layer, bias_variance.flatten(), "output", x.ndim)

    def inputs_as_rows(self, layer: M, x: Tensor) -> ElementwiseRows:
        """The normalised input: `[B, T, C]`."""
        return ElementwiseRows(self.as_rows(layer, self.apply(layer, x, None, None)[None])[0])

    def grads_as_rows(self, layer: M, g: Tensor) -> Tensor:
        """`[V, B, T, C]`."""
        return self.as_rows(layer, g)

    def bias_grads(self, layer: M, g: Tensor) -> Tensor:
        """`[V, B, C]`."""
        return self.as_rows(layer, g).sum(2)

    def num_inputs(self, layer: M) -> int:
        """As many as outputs."""
        return self.num_outputs(layer)

    def channelwise(self, layer: M) -> bool:
        """True."""
        return True

    def keep_inputs(self, layer: M, index: Tensor) -> M:
        """The same as `keep_outputs`."""
        return self.keep_outputs(layer, index)


class LastAxesNormRule(NormRule[L]):
    """Input `[B, *positions, *normalized_shape]`; its channels are all elements of `normalized_shape`, flat."""

    def as_rows(self, layer: L, g: Tensor) -> Tensor:
        """`normalized_shape` becomes C."""
        return channels_last_rows(g, features=len(layer.normalized_shape))

    def to_matrix(self, layer: L, weight: Tensor) -> Tensor:
        """`[..., *normalized_shape]` as `[..., C]`."""
        return weight.flatten(-len(layer.normalized_shape))

    def from_matrix(self, layer: L, matrix: Tensor) -> Tensor:
        """The inverse of `to_matrix`."""
        return matrix.unflatten(-1, layer.normalized_shape)

    def num_outputs(self, layer: L) -> int:
        """The number of elements of `normalized_shape`."""
        return math.prod(layer.normalized_shape)

    def channel_axis(self, layer: L, ndim: int) -> int:
        """The first axis of `normalized_shape`."""
        return ndim - len(layer.normalized_shape)

    def scale_channels(self, layer: L, v: Tensor, side: Side, ndim: int) -> Tensor:
        """`v [..., C]`, with C spread over the axes of `normalized_shape`."""
        flat = super().scale_channels(layer, v, side, ndim)
        return flat.reshape(*flat.shape[: self.channel_axis(layer, ndim)], *layer.normalized_shape)

    def keep_outputs(self, layer: L, index: Tensor) -> L:
        """Not possible: every output depends on every input through the statistics."""
        raise UnsupportedError(
            f"channels of a {type(layer).__name__} cannot be removed without changing the others, because its "
            "statistics run over all of them; keep the width of the layers before it"
        )


@register(nn.LayerNorm)
class LayerNormRule(LastAxesNormRule[nn.LayerNorm]):
    """Statistics over `normalized_shape`, of each position by itself."""

    def apply(self, layer: nn.LayerNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        r"""$\gamma \odot (x - \mu) / \sigma + \beta$."""
        return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)


class ChannelNormRule(NormRule[M]):
    """Norms over input `[B, C, *positions]` with one weight per channel."""

    def as_rows(self, layer: M, g: Tensor) -> Tensor:
        """Channels go last."""
        return channels_first_rows(g)

    def channel_axis(self, layer: M, ndim: int) -> int:
        """1."""
        return 1

    def weight_axis(self, layer: M, side: Side) -> int | None:
        """One weight per output channel; inputs are not scaled."""
        return 0 if side == "output" else None


@register(nn.GroupNorm)
class GroupNormRule(ChannelNormRule[nn.GroupNorm]):
    """Statistics over groups of channels, of each example by itself."""

    def apply(self, layer: nn.GroupNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        r"""$\gamma_c \hat x_{ct} + \beta_c$."""
        return F.group_norm(x, layer.num_groups, weight, bias, layer.eps)

    def num_outputs(self, layer: nn.GroupNorm) -> int:
        """`num_channels`."""
        return layer.num_channels

    def keep_outputs(self, layer: nn.GroupNorm, index: Tensor) -> nn.GroupNorm:
        """Whole groups only: the statistics of a group run over all its channels."""
        index = check_kept(index, layer.num_channels)
        width = layer.num_channels // layer.num_groups
        blocks = index.view(-1, width) // width if len(index) % width == 0 else None
        if blocks is None or not torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
            raise UnsupportedError(
                f"a GroupNorm can only keep whole groups of {width} channels, because its statistics run over them"
            )
        tensors = {name: p[index] for name, p in layer.named_parameters(recurse=False)}
        return resized(layer, tensors, num_channels=len(index), num_groups=len(blocks))


class RunningNormRule(ChannelNormRule[M]):
    """Norms of each channel by itself that may keep running statistics."""

    mixes_channels = False

    def num_outputs(self, layer: M) -> int:
        """`num_features`."""
        return int(layer.num_features)  # type: ignore[arg-type]

    def keep_outputs(self, layer: M, index: Tensor) -> M:
        """Channels, with their running statistics."""
        index = check_kept(index, self.num_outputs(layer))
        state = {**layer._parameters, "running_mean": layer.running_mean, "running_var": layer.running_var}
        tensors = {name: t[index] for name, t in state.items() if isinstance(t, Tensor)}
        return resized(layer, tensors, num_features=len(index))


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class BatchNormRule(RunningNormRule[BatchNorm]):
    """Running statistics in eval mode; in training mode those of the batch, which tie the examples together."""

    def obstacle(self, layer: BatchNorm) -> str | None:
        """The statistics of a `SyncBatchNorm` are those of all processes together."""
        if isinstance(layer, nn.SyncBatchNorm):
            return "it takes its statistics over several processes; use BatchNorm1d, 2d or 3d"
        return None

    def mixes_examples(self, layer: BatchNorm) -> bool:
        """Without running statistics it always normalizes by those of the batch."""
        return layer.running_mean is None

    def apply(self, layer: BatchNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        r"""$\gamma_c \hat x_{ct} + \beta_c$; running statistics are read but, unlike in `forward`, never updated."""
        if _uses_batch(layer):
            return F.batch_norm(x, None, None, weight, bias, training=True, eps=layer.eps)
        return F.batch_norm(x, layer.running_mean, layer.running_var, weight, bias, eps=layer.eps)

    def inputs_as_rows(self, layer: BatchNorm, x: Tensor) -> ElementwiseRows:
        """The input normalised with the running statistics: `[B, T, C]`."""
        if _uses_batch(layer):
            raise UnsupportedError(
                f"a {type(layer).__name__} that uses the statistics of the batch has no gradient per example; call "
                "model.eval() first, and keep track_running_stats=True"
            )
        return super().inputs_as_rows(layer, x)

    def forward_with(self, layer: BatchNorm, x: Tensor, tensors: dict[str, Tensor | None]) -> Tensor:
        """One value per channel has no variance: it is normalised by the running statistics in training, too."""
        mean, variance, weight, bias = (tensors.get(n) for n in ("running_mean", "running_var", "weight", "bias"))
        by_batch = mean is None or (layer.training and x.numel() > x.shape[1])
        momentum = 1 / int(layer.num_batches_tracked or 1) if layer.momentum is None else layer.momentum
        return F.batch_norm(x, mean, variance, weight, bias, by_batch, momentum, layer.eps)


def _uses_batch(layer: BatchNorm) -> bool:
    return layer.training or layer.running_mean is None or layer.running_var is None
