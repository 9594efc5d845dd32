"""`nn.LayerNorm`, `nn.GroupNorm`, `nn.BatchNorm1d` to `3d`: weight and bias act elementwise on the normalised input."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.networks.layers.base import (
    Cost,
    LayerRule,
    M,
    Side,
    channels_first_rows,
    channels_last_rows,
    check_kept,
    count_parameters,
    resized,
)
from dubito.networks.layers.registry import register
from dubito.networks.layers.rows import Elementwise

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class NormRule(LayerRule[M]):
    r"""$y = \gamma \odot \hat x + \beta$, where $\hat x$ depends on the input and the statistics alone.

    A layer without affine parameters has the weight None and is $\hat x$ itself.
    """

    linear_in_input = False

    @abstractmethod
    def apply(self, layer: M, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        r"""$\gamma \odot \hat x + \beta$."""

    @abstractmethod
    def as_rows(self, layer: M, g: Tensor) -> Tensor:
        """An activation `g [V, ...]` as `[V, B, T, C]`."""

    def apply_variance(self, layer: M, x: Tensor, weight_variance: Tensor, bias_variance: Tensor | None) -> Tensor:
        r"""$\hat x^2 \sigma_\gamma^2 + \sigma_\beta^2$."""
        variance = self.apply(layer, x, None, None).square()
        variance = variance * self.scale_channels(layer, weight_variance.flatten(), "output", x.ndim)
        if bias_variance is None:
            return variance
        return variance + self.scale_channels(layer, bias_variance.flatten(), "output", x.ndim)

    def inputs_as_rows(self, layer: M, x: Tensor) -> Elementwise:
        """The normalised input: `[B, T, C]`."""
        return Elementwise(self.as_rows(layer, self.apply(layer, x, None, None)[None])[0])

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

    def cost(self, layer: M, input_shape: Sequence[int]) -> Cost:
        """One multiply-accumulate per element for the affine map; none without it."""
        parameters = count_parameters(layer)
        return Cost(parameters, math.prod(input_shape) if parameters else 0)


@register(nn.LayerNorm)
class LayerNormRule(NormRule[nn.LayerNorm]):
    """Input `[B, *positions, *normalized_shape]`; its channels are all elements of `normalized_shape`, flat."""

    def apply(self, layer: nn.LayerNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Statistics over `normalized_shape`, of each position by itself."""
        return F.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)

    def as_rows(self, layer: nn.LayerNorm, g: Tensor) -> Tensor:
        """`normalized_shape` becomes C."""
        return channels_last_rows(g, features=len(layer.normalized_shape))

    def to_matrix(self, layer: nn.LayerNorm, weight: Tensor) -> Tensor:
        """`[..., *normalized_shape]` as `[..., C]`."""
        return weight.flatten(-len(layer.normalized_shape))

    def from_matrix(self, layer: nn.LayerNorm, matrix: Tensor) -> Tensor:
        """The inverse of `to_matrix`."""
        return matrix.unflatten(-1, layer.normalized_shape)

    def num_outputs(self, layer: nn.LayerNorm) -> int:
        """The number of elements of `normalized_shape`."""
        return math.prod(layer.normalized_shape)

    def channel_axis(self, layer: nn.LayerNorm, ndim: int) -> int:
        """The first axis of `normalized_shape`."""
        return ndim - len(layer.normalized_shape)

    def scale_channels(self, layer: nn.LayerNorm, v: Tensor, side: Side, ndim: int) -> Tensor:
        """`v [..., C]`, with C spread over the axes of `normalized_shape`."""
        flat = super().scale_channels(layer, v, side, ndim)
        return flat.reshape(*flat.shape[: self.channel_axis(layer, ndim)], *layer.normalized_shape)

    def keep_outputs(self, layer: nn.LayerNorm, index: Tensor) -> nn.LayerNorm:
        """Not possible: every output depends on every input through the statistics."""
        raise UnsupportedError(
            "channels of a LayerNorm cannot be removed without changing the others, because its statistics run over "
            "all of them; keep the width of the layers before it"
        )


class ChannelNormRule(NormRule[M]):
    """Norms over input `[B, C, *positions]` with one weight per channel."""

    def as_rows(self, layer: M, g: Tensor) -> Tensor:
        """Channels go last."""
        return channels_first_rows(g)

    def channel_axis(self, layer: M, ndim: int) -> int:
        """1."""
        return 1


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


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormRule(ChannelNormRule[BatchNorm]):
    """Running statistics in eval mode; in training mode those of the batch, which tie the examples together."""

    def apply(self, layer: BatchNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        r"""$\gamma_c \hat x_{ct} + \beta_c$; running statistics are read but, unlike in `forward`, never updated."""
        if _uses_batch(layer):
            return F.batch_norm(x, None, None, weight, bias, training=True, eps=layer.eps)
        return F.batch_norm(x, layer.running_mean, layer.running_var, weight, bias, eps=layer.eps)

    def inputs_as_rows(self, layer: BatchNorm, x: Tensor) -> Elementwise:
        """The input normalised with the running statistics: `[B, T, C]`."""
        if _uses_batch(layer):
            raise UnsupportedError(
                f"a {type(layer).__name__} that uses the statistics of the batch has no gradient per example; call "
                "model.eval() first, and keep track_running_stats=True"
            )
        return super().inputs_as_rows(layer, x)

    def num_outputs(self, layer: BatchNorm) -> int:
        """`num_features`."""
        return layer.num_features

    def keep_outputs(self, layer: BatchNorm, index: Tensor) -> BatchNorm:
        """Channels, with their running statistics."""
        index = check_kept(index, layer.num_features)
        state = {**layer._parameters, "running_mean": layer.running_mean, "running_var": layer.running_var}
        tensors = {name: t[index] for name, t in state.items() if t is not None}
        return resized(layer, tensors, num_features=len(index))


def _uses_batch(layer: BatchNorm) -> bool:
    return layer.training or layer.running_mean is None or layer.running_var is None
