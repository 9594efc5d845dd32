"""The moments of a normal posterior and its divergence from a normal prior as one node of the graph."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class NormalMoments(torch.autograd.Function):
    r"""From $\mu$ and $\rho = \log \sigma$ to $\mu$, $\sigma^2$ and the summed divergence from $\mathcal N(m, s^2)$.

    A training step needs all three, and large layers spend much of the extra time on passes over memory: this node
    makes few of them, with the gradient of the divergence written out:

    $$\bar\mu = g_\mu + \frac{g_{KL}}{s^2} (\mu - m), \qquad
      \bar\rho = \sigma^2 \Big(2 g_{\sigma^2} + \frac{g_{KL}}{s^2}\Big) - g_{KL} .$$
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_scale: Tensor, loc: float, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and divergence."""
        variance = (2 * log_scale).exp_()
        off = mean if loc == 0 else mean - loc
        ctx.save_for_backward(off, variance)
        ctx.scale = scale
        flat = off.reshape(-1)
        square = torch.dot(flat, flat) + variance.sum()
        kl = square / (2 * scale**2) - log_scale.sum() + mean.numel() * (math.log(scale) - 0.5)
        return mean.view_as(mean), variance, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, on_mean: Tensor, on_variance: Tensor, on_kl: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the slopes of mean and log-scale."""
        off, variance = ctx.saved_tensors
        pull = on_kl / ctx.scale**2
        on_log_scale = torch.add(pull, on_variance, alpha=2).mul_(variance).sub_(on_kl)
        return torch.addcmul(on_mean, off, pull), on_log_scale, None, None
