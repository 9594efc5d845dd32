"""The pieces of a training step as single nodes of the graph, with few passes over memory and little of it.

`NormalMoments` and `NormalDraw` give the moments, or a draw, of a normal posterior with its divergence from a normal
prior; `NormalOutput` draws the outputs of any layer, `DenseOutput` those of a dense one. They are for a training step,
which differentiates once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dubito.core.randomness import normal_like

# Whether the graph is kept by the pass that is on its way back; where torch cannot tell, as if it were.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# The mean m and scale s of the prior of each parameter.
Numbers = Sequence[tuple[float, float]]


class NormalMoments(torch.autograd.Function):
    r"""From $\mu$ and $\rho = \log \sigma$ to $\mu$, $\sigma^2$ and the summed divergence from $\mathcal N(m, s^2)$.

    A training step needs all three, and large layers spend much of the extra time on passes over memory: this node
    makes few of them, with the gradient of the divergence written out:

    $$\bar\mu = g_\mu + \frac{g_{KL}}{s^2} (\mu - m), \qquad
      \bar\rho = 2 \sigma^2 \Big(g_{\sigma^2} + \frac{g_{KL}}{2 s^2}\Big) - g_{KL} .$$
    """

    @staticmethod
    def forward(ctx: Any, priors: Numbers, *tensors: Tensor) -> tuple[Tensor, ...]:
        """From all means and all log-scales to all means, all variances and the divergence of all together."""
        means, log_scales = _halves(tensors)
        variances = [_exp(each, 2.0) for each in log_scales]
        offs = _offs(means, priors)
        ctx.priors = priors
        ctx.save_for_backward(*offs, *variances)
        kl = _divergence(offs, variances, log_scales, priors)
        return *(mean.view_as(mean) for mean in means), *variances, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        """Return the slopes of means and log-scales."""
        on_kl = slopes[-1]
        # In place: these are fresh products of a layer's own backward pass, which nobody else looks at, and new memory
        # for a large layer costs more than the arithmetic.
        on_means, on_variances = _halves([_own(slope) for slope in slopes[:-1]])
        offs, variances = _halves(ctx.saved_tensors)
        negative = -on_kl
        for on_mean, on_variance, off, variance, (_, scale) in zip(
            on_means, on_variances, offs, variances, ctx.priors, strict=True
        ):
            pull = on_kl / scale**2
            on_mean.addcmul_(off, pull)
            torch.addcmul(negative, on_variance.add_(pull / 2), variance, value=2.0, out=on_variance)
        return None, *on_means, *on_variances


class NormalDraw(torch.autograd.Function):
    r"""From $\mu$ and $\rho = \log \sigma$ to a draw $\mu + \sigma \epsilon$ and the summed divergence.

    $$\bar\mu = g_w + \frac{g_{KL}}{s^2} (\mu - m), \qquad
      \bar\rho = g_w \sigma \epsilon + \frac{g_{KL}}{s^2} \sigma^2 - g_{KL} .$$
    """

    @staticmethod
    def forward(ctx: Any, priors: Numbers, noises: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        """From all means and all log-scales to all weights and the divergence; the noises, which are lost, are ε."""
        means, log_scales = _halves(tensors)
        scales = [_exp(each, 1.0) for each in log_scales]
        deviations = [noise.mul_(scale) for noise, scale in zip(noises, scales, strict=True)]
        offs, variances = _offs(means, priors), [scale.square_() for scale in scales]
        ctx.priors = priors
        ctx.save_for_backward(*offs, *variances, *deviations)
        kl = _divergence(offs, variances, log_scales, priors)
        return *(mean + deviation for mean, deviation in zip(means, deviations, strict=True)), kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        """Return the slopes of means and log-scales; those of the weights may be other tensors' too: left alone."""
        *on_weights, on_kl = slopes
        count, saved, negative = len(on_weights), ctx.saved_tensors, -on_kl
        offs, variances, deviations = saved[:count], saved[count : 2 * count], saved[2 * count :]
        on_means, on_log_scales = [], []
        for slope, off, variance, deviation, (_, scale) in zip(
            on_weights, offs, variances, deviations, ctx.priors, strict=True
        ):
            pull = on_kl / scale**2
            on_log_scale = torch.addcmul(negative, slope, deviation, out=_overwritten(deviation))
            on_log_scales.append(on_log_scale.addcmul_(variance, pull))
            on_means.append(torch.addcmul(slope, off, pull, out=_overwritten(variance)))
        return None, None, *on_means, *on_log_scales


class NormalOutput(torch.autograd.Function):
    r"""From the mean $m$ and variance $v$ of a layer's outputs to a draw $m + \sqrt v\,\epsilon$ of them.

    $$\bar m = g, \qquad \bar v = \frac{\epsilon}{2 \sqrt v} \odot g .$$
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the draw; mean and variance, which nobody else looks at, are lost."""
        drawn, ratio = _drawn(mean, variance)
        ctx.mark_dirty(drawn)
        ctx.save_for_backward(ratio)
        return drawn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slopes of mean and variance."""
        (ratio,) = ctx.saved_tensors
        return slope, torch.addcmul(slope.new_zeros(()), ratio, slope, value=0.5, out=_overwritten(ratio))


class DenseOutput(torch.autograd.Function):
    r"""A draw of the outputs of a dense layer, $y = W x + b + \sqrt v\,\epsilon$ with $v = \sigma^2 x^2$, by rows.

    $$\bar W = g x^\top, \quad \bar b = g, \quad \bar{\sigma^2} = \tfrac12 h (x^2)^\top, \quad
      \bar x = W^\top g + x \odot {\sigma^2}^\top h, \qquad h = \frac{\epsilon}{\sqrt v} \odot g .$$
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, variance: Tensor, bias: Tensor | None) -> Tensor:
        """Return the draw."""
        rows = x.reshape(-1, x.shape[-1])
        squares = rows.square()
        mean = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
        drawn, ratio = _drawn(mean, torch.mm(squares, variance.t()))
        ctx.save_for_backward(rows, squares, weight, variance, ratio)
        # not a view of `drawn`, which autograd would not let a later layer change in place
        return torch.ops.aten._unsafe_view.default(drawn, (*x.shape[:-1], len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Return the slopes of all arguments."""
        rows, squares, weight, variance, ratio = ctx.saved_tensors
        flat = slope.reshape(-1, slope.shape[-1])
        twice, zero = torch.mul(ratio, flat, out=_overwritten(ratio)), flat.new_zeros(())
        needs_x, needs_weight, needs_variance, needs_bias = ctx.needs_input_grad
        on_x = torch.mm(flat, weight).addcmul_(rows, torch.mm(twice, variance)) if needs_x else None
        return (
            None if on_x is None else on_x.view(*slope.shape[:-1], -1),
            torch.mm(flat.t(), rows) if needs_weight else None,
            torch.addmm(zero, twice.t(), squares, beta=0, alpha=0.5) if needs_variance else None,
            flat.sum(0) if needs_bias else None,
        )


def _drawn(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""A draw, and $\epsilon / \sqrt v$ for its slope; in the memory of mean and variance, which are lost."""
    scale, noise = floored(variance, out=variance).sqrt_(), normal_like(mean)
    return mean.addcmul_(scale, noise), noise.div_(scale)


def floored(variance: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The variance of outputs, above 0: one that no input reaches has none, and the root no slope there."""
    return torch.clamp_min(variance, torch.finfo(variance.dtype).tiny, out=out)


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    middle = len(tensors) // 2
    return tensors[:middle], tensors[middle:]


def _exp(exponent: Tensor, factor: float) -> Tensor:
    """The exponential of a multiple: by powers of two, which take a third of the time."""
    return torch.mul(exponent, factor / math.log(2)).exp2_()


def _offs(means: Sequence[Tensor], priors: Numbers) -> list[Tensor]:
    """How far each mean is from that of the prior."""
    return [mean if loc == 0 else mean - loc for mean, (loc, _) in zip(means, priors, strict=True)]


def _divergence(
    offs: Sequence[Tensor], variances: Sequence[Tensor], log_scales: Sequence[Tensor], priors: Numbers
) -> Tensor:
    """The divergence, summed over all weights."""
    total, constant = offs[0].new_zeros(()), 0.0
    for off, variance, log_scale, (_, scale) in zip(offs, variances, log_scales, priors, strict=True):
        flat = off.reshape(-1)
        square = torch.dot(flat, flat).add_(variance.sum())
        total.add_(square, alpha=0.5 / scale**2).sub_(log_scale.sum())
        constant += log_scale.numel() * (math.log(scale) - 0.5)
    return total.add_(constant)


def _overwritten(saved: Tensor) -> Tensor | None:
    """The memory of a saved tensor, for a result, if the graph is freed on the way back; None if it is kept."""
    return None if _keeps_graph() else saved


def _own(slope: Tensor) -> Tensor:
    """The slope, with memory of its own for every entry."""
    return slope if slope.is_contiguous() else slope.contiguous()
