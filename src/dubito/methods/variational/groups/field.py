"""The posterior over one parameter whose groups of weights share scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.beliefs.priors import Normal
from dubito.core.randomness import normal_like
from dubito.methods.variational.groups.layout import Side
from dubito.methods.variational.groups.scales import Scales

Draws = dict[Scales, Tensor]  # one sample of the scales, by kind of groups


class ScaledField(nn.Module):
    r"""$w = \tilde w \prod_k z_k$, with a scale along some axes of the parameter and a mean-field normal $\tilde w$.

    The mean of $\tilde w$ is the network's own parameter and is passed to each method; this module holds $\log \sigma$
    and the scales. All factors are independent, so the moments of w are products:

    $$\mathbb E w = \mu \prod_k \mathbb E z_k, \qquad \mathbb E w^2 = (\mu^2 + \sigma^2) \prod_k \mathbb E z_k^2 .$$

    Args:
        mean: The parameter.
        scales: Axis, side and scales of each kind of groups that the parameter belongs to.
        mask: The random entries; None for all.
        initial_scale: The initial σ; None if $\tilde w$ is a point.
        hold_rest: Whether entries that are not random stay fixed; otherwise they are trained as points.
    """

    mask: Tensor | None

    def __init__(
        self,
        mean: Tensor,
        scales: list[tuple[int, Side, Scales]],
        mask: Tensor | None,
        initial_scale: float | None,
        hold_rest: bool,
    ) -> None:
        super().__init__()
        self.hold_rest = hold_rest
        self.axes = [(axis, side) for axis, side, _ in scales]
        self.scales = nn.ModuleList(part for _, _, part in scales)
        self.register_buffer("mask", None if mask is None else mask.to(mean.device))
        start = None if initial_scale is None else torch.full_like(mean.detach(), initial_scale).log()
        self.log_scale = None if start is None else nn.Parameter(start)

    def expected(self, mean: Tensor) -> Tensor:
        r"""Return $\mathbb E w$."""
        return self._kept(mean, self._scaled(mean, {part: part.mean() for part in self._parts()}))

    def variance(self, mean: Tensor) -> Tensor:
        r"""Return $\mathrm{Var}\, w$, 0 for entries that are not random."""
        square = mean.square() if self.log_scale is None else mean.square() + (2 * self.log_scale).exp()
        second = self._scaled(square, {part: part.second_moment() for part in self._parts()})
        first = self._scaled(mean, {part: part.mean() for part in self._parts()}).square()
        return self._kept(torch.zeros_like(mean), (second - first).clamp_min(0))

    def sample(self, mean: Tensor, drawn: Draws | None = None, *, generator: torch.Generator | None = None) -> Tensor:
        """Return a differentiable sample of the whole parameter; `drawn` holds scales that other parameters share."""
        weight = mean
        if self.log_scale is not None:
            device = mean.device if generator is None else generator.device
            noise = torch.empty(mean.shape, dtype=mean.dtype, device=device).normal_(generator=generator)
            weight = mean + self.log_scale.exp() * noise.to(mean.device)
        if drawn is None:
            drawn = {part: part.sample(generator=generator) for part in self._parts()}
        return self._kept(mean, self._scaled(weight, drawn))

    def kl(self, mean: Tensor) -> Tensor:
        r"""Return the KL divergence of $\tilde w$ from its standard normal prior, without that of the scales."""
        if self.log_scale is None:
            return mean.new_zeros(())
        if self.mask is None:
            return Normal().summed_kl(mean, self.log_scale)
        return Normal().summed_kl(mean[self.mask], self.log_scale[self.mask])

    def noisy_output(self, layer: Any, x: Tensor) -> Tensor:
        r"""Return the output of a layer with this weight, by local reparameterization.

        $$y = z^{out} \odot \big(f(\tilde x; \mu) + \sqrt{f(\tilde x^2; \sigma^2)} \odot \epsilon\big) + b, \qquad
          \tilde x = x \odot z^{in},$$

        with new scales for every example.
        """
        rule, mean, bias = layer.rule, layer._parameters["weight"], layer._parameters.get("bias")
        x = x * self._factors(layer, x, "inputs")
        y = rule.apply(layer, x, mean, None)
        if self.log_scale is not None:
            variance = rule.apply_variance(layer, x, (2 * self.log_scale).exp(), None)
            # the square root has no gradient at a variance of 0
            y = y + variance.clamp_min(torch.finfo(y.dtype).tiny).sqrt() * normal_like(y)
        y = y * self._factors(layer, y, "outputs")
        return y if bias is None else y + rule.scale_channels(layer, bias, "output", y.ndim)

    def _factors(self, layer: Any, activation: Tensor, side: Side) -> Tensor | float:
        """Return samples of the scales on one side of a layer, for each example of an activation."""
        lead = tuple(activation.shape[: min(1, layer.rule.channel_axis(layer, activation.ndim))])
        for (_, own), part in zip(self.axes, self._parts(), strict=True):
            if own == side:
                return layer.rule.scale_channels(layer, part.sample(lead), side[:-1], activation.ndim)
        return 1.0

    def _scaled(self, weight: Tensor, factors: Draws) -> Tensor:
        for (axis, _), part in zip(self.axes, self._parts(), strict=True):
            shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
            weight = weight * factors[part].reshape(shape)
        return weight

    def _kept(self, mean: Tensor, weight: Tensor) -> Tensor:
        """Return `weight` at random entries and `mean` elsewhere."""
        if self.mask is None:
            return weight
        return torch.where(self.mask, weight, mean.detach() if self.hold_rest else mean)

    def _parts(self) -> list[Scales]:
        return list(self.scales)  # type: ignore[arg-type]
