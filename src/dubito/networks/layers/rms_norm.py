"""`nn.RMSNorm`: divide by the root mean square, without subtracting a mean."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dubito.networks.layers.norm import LastAxesNormRule
from dubito.networks.layers.registry import register


@register(nn.RMSNorm)
class RMSNormRule(LastAxesNormRule[nn.RMSNorm]):
    """Statistics over `normalized_shape`, of each position by itself; the layer has no bias."""

    def apply(self, layer: nn.RMSNorm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        r"""$\gamma \odot x / \sqrt{\operatorname{mean} x^2 + \epsilon}$."""
        y = F.rms_norm(x, layer.normalized_shape, weight, layer.eps)
        return y if bias is None else y + bias
