"""`nn.InstanceNorm1d`, `2d`, `3d`: each channel of each example is normalised over its positions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from dubito.networks.layers.norm import RunningNormRule
from dubito.networks.layers.registry import register


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(RunningNormRule[_InstanceNorm]):
    """Input `[B, C, *positions]` or `[C, *positions]`.

    Statistics are the example's own; with `track_running_stats=True`, evaluation mode uses the running ones.
    """

    def apply(self, layer: _InstanceNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        r"""$\gamma_c \hat x_{ct} + \beta_c$; running statistics are read but, unlike in `forward`, never updated."""
        tensors = {"weight": weight, "bias": bias}
        if not layer.training:
            tensors |= {"running_mean": layer.running_mean, "running_var": layer.running_var}
        return self.forward_with(layer, x, tensors)

    def forward_with(self, layer: _InstanceNorm, x: Tensor, tensors: dict[str, Tensor | None]) -> Tensor:
        """Update the given running statistics in training."""
        mean, variance, weight, bias = (tensors.get(n) for n in ("running_mean", "running_var", "weight", "bias"))
        batch = x if self.channel_axis(layer, x.ndim) else x.unsqueeze(0)
        by_example, momentum = layer.training or mean is None, layer.momentum or 0.0
        y = F.instance_norm(batch, mean, variance, weight, bias, by_example, momentum, layer.eps)
        return y if batch is x else y.squeeze(0)

    def as_rows(self, layer: _InstanceNorm, g: Tensor) -> Tensor:
        """Channels go last."""
        return super().as_rows(layer, g if self.channel_axis(layer, g.ndim - 1) else g.unsqueeze(1))

    def channel_axis(self, layer: _InstanceNorm, ndim: int) -> int:
        """1, or 0 without a batch axis."""
        return ndim - layer._get_no_batch_dim()
