"""Parts of a training step, each as one node of the autograd graph, to save memory and passes over it.

`NormalMoments` and `NormalDraw` compute the moments, or a sample, of a normal posterior, and its KL divergence from a
normal prior. `NormalOutput` samples the outputs of any layer, `DenseOutput` those of a linear layer. All of them can be
differentiated once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dubito.core.randomness import normal_like

# Whether the running backward pass keeps the graph (retain_graph=True). If it does not, the nodes below overwrite the
# tensors that they saved, to save memory. This private function of autograd was tested with torch 2.6 to 2.15; where
# it is missing, nothing is overwritten.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# The mean m and scale s of the prior of each parameter.
Numbers = Sequence[tuple[float, float]]


class NormalMoments(torch.autograd.Function):
    r"""From $\mu$ and $\rho = \log \sigma$ to $\mu$, $\sigma^2$ and the total KL divergence from $\mathcal N(m, s^2)$.

    A training step needs all three. This node computes them, and the gradients below, in few passes over memory:

    $$\bar\mu = g_\mu + \frac{g_{KL}}{s^2} (\mu - m), \qquad
      \bar\rho = 2 \sigma^2 \Big(g_{\sigma^2} + \frac{g_{KL}}{2 s^2}\Big) - g_{KL} .$$
    """

    @staticmethod
    def forward(ctx: Any, priors: Numbers, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Map all means and log-scales to all means, all variances and the total KL divergence."""
        means, log_scales = _halves(tensors)
        variances = [_exp(each, 2.0) for each in log_scales]
        offs = _offs(means, priors)
        ctx.priors = priors
        ctx.save_for_backward(*offs, *variances)
        kl = _divergence(offs, variances, log_scales, priors)
        return *(mean.view_as(mean) for mean in means), *variances, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the means and log-scales."""
        on_kl = grads[-1]
        # In place, because new memory for a large layer costs more than the arithmetic. Only the layer's own backward
        # pass has used these gradients.
        on_means, on_variances = _halves([_own(grad) for grad in grads[:-1]])
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
    r"""From $\mu$ and $\rho = \log \sigma$ to a sample $\mu + \sigma \epsilon$ and the total KL divergence.

    $$\bar\mu = g_w + \frac{g_{KL}}{s^2} (\mu - m), \qquad
      \bar\rho = g_w \sigma \epsilon + \frac{g_{KL}}{s^2} \sigma^2 - g_{KL} .$$
    """

    @staticmethod
    def forward(ctx: Any, priors: Numbers, noises: Sequence[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Map all means and log-scales to all weights and the KL divergence; overwrites the noises, which are ε."""
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of means and log-scales; those of the weights may be shared and are not overwritten."""
        *on_weights, on_kl = grads
        count, saved, negative = len(on_weights), ctx.saved_tensors, -on_kl
        offs, variances, deviations = saved[:count], saved[count : 2 * count], saved[2 * count :]
        on_means, on_log_scales = [], []
        for grad, off, variance, deviation, (_, scale) in zip(
            on_weights, offs, variances, deviations, ctx.priors, strict=True
        ):
            pull = on_kl / scale**2
            on_log_scale = torch.addcmul(negative, grad, deviation, out=_overwritten(deviation))
            on_log_scales.append(on_log_scale.addcmul_(variance, pull))
            on_means.append(torch.addcmul(grad, off, pull, out=_overwritten(variance)))
        return None, None, *on_means, *on_log_scales


class NormalOutput(torch.autograd.Function):
    r"""From the mean $m$ and variance $v$ of a layer's outputs to a sample $m + \sqrt v\,\epsilon$ of them.

    $$\bar m = g, \qquad \bar v = \frac{\epsilon}{2 \sqrt v} \odot g .$$
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the sample; overwrites mean and variance, which nothing else uses."""
        drawn, ratio = _drawn(mean, variance)
        ctx.mark_dirty(drawn)
        ctx.save_for_backward(ratio)
        return drawn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of mean and variance."""
        (ratio,) = ctx.saved_tensors
        return grad, torch.addcmul(grad.new_zeros(()), ratio, grad, value=0.5, out=_overwritten(ratio))


class DenseOutput(torch.autograd.Function):
    r"""A sample of the outputs of a linear layer, $y = W x + b + \sqrt v\,\epsilon$ with $v = \sigma^2 x^2$, by rows.

    $$\bar W = g x^\top, \quad \bar b = g, \quad \bar{\sigma^2} = \tfrac12 h (x^2)^\top, \quad
      \bar x = W^\top g + x \odot {\sigma^2}^\top h, \qquad h = \frac{\epsilon}{\sqrt v} \odot g .$$
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, variance: Tensor, bias: Tensor | None) -> Tensor:
        """Return the sample."""
        rows = x.reshape(-1, x.shape[-1])
        squares = rows.square()
        mean = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
        drawn, ratio = _drawn(mean, torch.mm(squares, variance.t()))
        ctx.save_for_backward(rows, squares, weight, variance, ratio)
        # not a view of `drawn`: autograd forbids in-place changes of a view that a custom function returns
        return torch.ops.aten._unsafe_view.default(drawn, (*x.shape[:-1], len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments."""
        rows, squares, weight, variance, ratio = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        twice, zero = torch.mul(ratio, flat, out=_overwritten(ratio)), flat.new_zeros(())
        needs_x, needs_weight, needs_variance, needs_bias = ctx.needs_input_grad
        on_x = torch.mm(flat, weight).addcmul_(rows, torch.mm(twice, variance)) if needs_x else None
        return (
            None if on_x is None else on_x.view(*grad.shape[:-1], -1),
            torch.mm(flat.t(), rows) if needs_weight else None,
            torch.addmm(zero, twice.t(), squares, beta=0, alpha=0.5) if needs_variance else None,
            flat.sum(0) if needs_bias else None,
        )


def _drawn(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return a sample, and $\epsilon / \sqrt v$ for its gradient; overwrites mean and variance."""
    scale, noise = floored(variance, out=variance).sqrt_(), normal_like(mean)
    return mean.addcmul_(scale, noise), noise.div_(scale)


def floored(variance: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the variance of outputs, at least tiny: the square root has no gradient at 0."""
    return torch.clamp_min(variance, torch.finfo(variance.dtype).tiny, out=out)


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    middle = len(tensors) // 2
    return tensors[:middle], tensors[middle:]


def _exp(exponent: Tensor, factor: float) -> Tensor:
    """Return ``exp(factor · exponent)``, computed as a power of two, which takes a third of the time."""
    return torch.mul(exponent, factor / math.log(2)).exp2_()


def _offs(means: Sequence[Tensor], priors: Numbers) -> list[Tensor]:
    """Return the difference between each mean and that of the prior."""
    return [mean if loc == 0 else mean - loc for mean, (loc, _) in zip(means, priors, strict=True)]


def _divergence(
    offs: Sequence[Tensor], variances: Sequence[Tensor], log_scales: Sequence[Tensor], priors: Numbers
) -> Tensor:
    """Return the KL divergence, summed over all weights."""
    total, constant = offs[0].new_zeros(()), 0.0
    for off, variance, log_scale, (_, scale) in zip(offs, variances, log_scales, priors, strict=True):
        flat = off.reshape(-1)
        square = torch.dot(flat, flat).add_(variance.sum())
        total.add_(square, alpha=0.5 / scale**2).sub_(log_scale.sum())
        constant += log_scale.numel() * (math.log(scale) - 0.5)
    return total.add_(constant)


def _overwritten(saved: Tensor) -> Tensor | None:
    """Return a saved tensor as the memory for a result, or None if the backward pass keeps the graph."""
    return None if _keeps_graph() else saved


def _own(grad: Tensor) -> Tensor:
    """Return the gradient with separate memory for every entry."""
    return grad if grad.is_contiguous() else grad.contiguous()
