"""The moments, or a draw, of a normal posterior and its divergence from a normal prior as one node of the graph."""

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
        # In place: both slopes are fresh products of a layer's own backward pass, which nobody else looks at, and new
        # memory for a large layer costs more than the arithmetic.
        on_mean, on_variance = _own(on_mean), _own(on_variance)
        on_log_scale = on_variance.mul_(2.0).add_(pull).mul_(variance).sub_(on_kl)
        if off.device.type == "cpu":  # where a number is at hand, and a broadcast one slow
            return on_mean.add_(off, alpha=pull.item()), on_log_scale, None, None
        return on_mean.addcmul_(off, pull), on_log_scale, None, None


class NormalDraw(torch.autograd.Function):
    r"""From $\mu$ and $\rho = \log \sigma$ to a draw $\mu + \sigma \epsilon$ and the summed divergence.

    $$\bar\mu = g_w + \frac{g_{KL}}{s^2} (\mu - m), \qquad
      \bar\rho = g_w \sigma \epsilon + \frac{g_{KL}}{s^2} \sigma^2 - g_{KL} .$$
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_scale: Tensor, noise: Tensor, loc: float, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return weight and divergence; the noise, which is lost, is ε."""
        own = log_scale.exp()
        off = mean if loc == 0 else mean - loc
        deviation = noise.mul_(own)
        ctx.save_for_backward(off, own, deviation)
        ctx.scale = scale
        flat, spread = off.reshape(-1), own.reshape(-1)
        square = torch.dot(flat, flat) + torch.dot(spread, spread)
        kl = square / (2 * scale**2) - log_scale.sum() + mean.numel() * (math.log(scale) - 0.5)
        return mean + deviation, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, on_weight: Tensor, on_kl: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return the slopes of mean and log-scale; that of the weight may be another tensor's too and is left alone."""
        off, own, deviation = ctx.saved_tensors
        pull = on_kl / ctx.scale**2
        if off.device.type == "cpu":
            factor = pull.item()
            on_log_scale = torch.mul(on_weight, deviation).addcmul_(own, own, value=factor).sub_(on_kl)
            return torch.add(on_weight, off, alpha=factor), on_log_scale, None, None, None
        on_log_scale = torch.mul(on_weight, deviation).add_(own.square().mul_(pull)).sub_(on_kl)
        return torch.addcmul(on_weight, off, pull), on_log_scale, None, None, None


def _own(slope: Tensor) -> Tensor:
    """The slope, with memory of its own for every entry."""
    return slope if slope.is_contiguous() else slope.contiguous()
