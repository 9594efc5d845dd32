r"""Layers with rank-1 factors: $y = ((x \circ s) W) \circ r + b$, written once over `LayerRule.apply`.

`make_factored` changes a module of a private network in place, so that it reads its factors and biases from `values`.
It is still an instance of its class with the same parameters; the weight $W$ is shared by all components.

`merge` and its relatives multiply the factors into the weight, $W' = W \circ r s^\top$: a sample of the mixture is a
network of the user's architecture, with the user's parameter names. Predictions, samples and means use these networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dubito.core.errors import UnsupportedError
from dubito.core.params import CHECKPOINTED, Params
from dubito.core.tracing import is_tracing
from dubito.methods.rank1.sites import Layout, LinearMap, SiteValues
from dubito.networks.layers import LayerRule, Side, class_rule, weight_axis
from dubito.networks.layers.linear import LinearRule
from dubito.networks.swapping import Swapped, swap_class

Perturbation = Literal["multiplicative", "additive"]

# Blocks of at least this many rows: gradients of the weight by blocks are then faster than another full product.
MANY_ROWS = 20


class Factored(Swapped):
    """Mixed into the class of a module by `make_factored`.

    Attributes:
        values: The factors and biases of the current forward pass; None outside of one.
        examples: The number of examples in this pass; None if all of them share their factors.
        narrow: In an exported file, the number of examples before the first layer with factors makes a copy for each
            block; else None.
        stacked: In an exported file, whether copies are on an axis of their own, which suits networks of dense layers.
        perturbation: How factors change a channel.
        label: The name of the module in its network, for messages.
    """

    prefix = "Factored"
    values: SiteValues | None
    examples: int | None
    narrow: int | None
    stacked: bool
    perturbation: Perturbation
    label: str

    def current(self) -> SiteValues:
        """The factors and biases of this pass."""
        if self.values is None:
            raise UnsupportedError(f"The layer '{self.label}' is called outside of its network: {CHECKPOINTED}.")
        return self.values

    def scaled(self, value: Tensor, factor: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Perturb channels by factors that broadcast over them, then add a bias; a factor of 1 changes nothing."""
        if factor is None:
            return value if bias is None else value + bias
        if self.perturbation == "additive":
            return value + (factor - 1) if bias is None else value + (factor - 1 + bias)
        return value * factor if bias is None else torch.addcmul(bias, value, factor)

    def check_rows(self, rows: int) -> None:
        """Raise an error unless the layer's input has one row per example."""
        if self.examples is not None and rows != self.examples and rows != self.narrow:
            raise UnsupportedError(
                f"The layer '{self.label}' was given {rows} rows for {self.examples} examples: rank-1 factors need the "
                "examples on the first axis of every layer's input."
            )

    def by_example(self, v: Tensor | None) -> Tensor | None:
        """Repeat the vectors of blocks of examples for each example."""
        if v is None or v.ndim == 1 or self.examples is None or len(v) == self.examples:
            return v
        return v.repeat_interleave(self.examples // len(v), dim=0)


class FactoredLayer(Factored):
    """A linear layer, convolution, transposed convolution, embedding, or any other layer with a rule."""

    rule: LayerRule[Any]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Scale the inputs, apply the shared weight, scale the outputs, add the component's bias."""
        if args or kwargs:
            raise UnsupportedError(f"The layer '{self.label}' has several arguments; rank-1 factors allow one.")
        values = self.current()
        ((s, r),) = values.factors
        if self.stacked:
            return self._on_stack(x, s, r, values.biases[0] if values.biases else None)
        self.check_rows(x.shape[0])
        if values.once and self._is_dense(x) and s is not None and r is not None and values.biases:
            (bias,) = values.biases
            if len(s) == len(r) == len(bias) < len(x):
                return BlockDense.apply(x, self._parameters["weight"], s, r, bias)
        x = self._on_channels(x, "input", s, None)
        y = self.rule.apply(self, x, self._parameters["weight"], None)  # type: ignore[arg-type]
        return self._on_channels(y, "output", r, values.biases[0] if values.biases else None)

    def _on_stack(self, x: Tensor, s: Tensor | None, r: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return outputs ``[M, N, O]`` of a dense layer for inputs ``[N, I]`` that blocks share, or ``[M, N, I]``."""
        if not isinstance(self.rule, LinearRule) or x.ndim > 3:
            raise UnsupportedError(f"The layer '{self.label}' takes no stack of inputs.")
        s, r, bias = (None if v is None else v.unsqueeze(1) for v in (s, r, bias))
        y = self.rule.apply(self, self.scaled(x, s), self._parameters["weight"], None)  # type: ignore[arg-type]
        return self.scaled(y, r, bias)

    def _is_dense(self, x: Tensor) -> bool:
        """Return whether `BlockDense` can compute this layer."""
        plain = type(self.rule) is LinearRule and self.perturbation == "multiplicative"
        return plain and x.ndim == 2 and x.is_contiguous() and not torch.is_autocast_enabled(x.device.type)

    def _on_channels(self, value: Tensor, side: Side, factor: Tensor | None, bias: Tensor | None) -> Tensor:
        """Perturb the channels of one side; the vector of a block is broadcast over its examples."""
        given = [v for v in (factor, bias) if v is not None]
        if not given:
            return value
        shaped = [None if v is None else self.rule.scale_channels(self, v, side, value.ndim) for v in (factor, bias)]
        blocks = min((v.shape[0] for v in given if v.ndim == 2), default=None)
        narrow = self.narrow is not None and value.shape[0] == self.narrow
        if blocks is None or (not narrow and not is_tracing() and blocks == value.shape[0]):
            return self.scaled(value, *shaped)
        shaped = [None if v is None else v.view(blocks, -1, *v.shape[1:]) for v in shaped]
        return self.scaled(value.view(1 if narrow else blocks, -1, *value.shape[1:]), *shaped).flatten(0, 1)


def make_factored(module: nn.Module, mixin: type[Factored], label: str, perturbation: Perturbation, **own: Any) -> None:
    """Change a module, in place, into a factored one."""
    fresh: dict[str, Any] = {"values": None, "examples": None, "narrow": None, "stacked": False}
    swap_class(module, mixin, **fresh, perturbation=perturbation, label=label, **own)


class BlockDense(torch.autograd.Function):
    r"""$y = ((x \circ s_m) W^\top) \circ r_m + b_m$ for the rows $x$ of block $m$, in M blocks of equal size.

    With $z = (x \circ s_m) W^\top$, $\bar z = g \circ r_m$, $\bar u = \bar z W$ and sums over the rows of a block:

    $$\bar b_m = \textstyle\sum g, \quad \bar r_m = \sum g \circ z, \quad \bar s_m = \sum \bar u \circ x, \quad
      \bar W = \bar z^\top (x \circ s), \quad \bar x = \bar u \circ s_m .$$

    If the inputs are data, they need no gradient, and neither $\bar u$. The gradients of the weight by blocks,
    $G_m = \bar z_m^\top x_m$, then give, with as many multiplications,

    $$\bar W = \sum_m G_m \circ s_m, \qquad \bar s_m = 1^\top (W \circ G_m) .$$
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, s: Tensor, r: Tensor, bias: Tensor) -> Tensor:
        """Return the outputs ``[N, O]``; factors and biases are ``[M, C]``."""
        scaled = (x.view(len(s), -1, x.shape[1]) * s.unsqueeze(1)).view(x.shape)
        middle = torch.mm(scaled, weight.t())
        ctx.by_blocks = len(x) >= MANY_ROWS * len(s) and ctx.needs_input_grad[:2] == (False, True)
        ctx.save_for_backward(x, weight, s, r, None if ctx.by_blocks else scaled, middle)
        outputs = torch.addcmul(bias.unsqueeze(1), middle.view(len(s), -1, len(weight)), r.unsqueeze(1))
        # not a view of `outputs`, which autograd would not let a later layer change in place
        return torch.ops.aten._unsafe_view.default(outputs, middle.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments."""
        x, weight, s, r, scaled, middle = ctx.saved_tensors
        on_x, on_weight, *_ = ctx.needs_input_grad
        blocks = grad.reshape(len(s), -1, len(weight))
        inputs, on_middle = x.view(len(s), -1, x.shape[1]), blocks * r.unsqueeze(1)
        others = (blocks * middle.view(blocks.shape)).sum(1), blocks.sum(1)
        if ctx.by_blocks:
            return None, *_by_blocks(inputs, weight, s, on_middle), *others
        rows = on_middle.view(middle.shape)
        on_scaled = torch.mm(rows, weight).view(inputs.shape)
        return (
            (on_scaled * s.unsqueeze(1)).view(x.shape) if on_x else None,
            torch.mm(rows.t(), scaled) if on_weight else None,
            on_scaled.mul_(inputs).sum(1),
            *others,
        )


def _by_blocks(inputs: Tensor, weight: Tensor, s: Tensor, on_middle: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weight and of the input factors, one block at a time to fit into the cache."""
    on_weight, on_s, part = torch.zeros_like(weight), torch.empty_like(s), torch.empty_like(weight)
    for m, (x, grads) in enumerate(zip(inputs, on_middle, strict=True)):
        torch.mm(grads.t(), x, out=part)
        on_weight.addcmul_(part, s[m])
        torch.sum(part.mul_(weight), 0, out=on_s[m])
    return on_weight, on_s


def can_merge(network: nn.Module, layout: Layout) -> bool:
    """Return whether the layer rules know the channel axes of the weight of every site."""
    layers = [network.get_submodule(site.name) for site in layout.sites if site.kind == "layer"]
    return all(weight_axis(layer, "output") is not None or weight_axis(layer, "input") is not None for layer in layers)


@torch.no_grad()
def merge(network: nn.Module, layout: Layout, values: Mapping[str, Tensor], factors: Tensor, biases: Tensor) -> Params:
    """Return the parameters of plain networks at given factors and biases.

    Args:
        network: The network, for the types of its layers.
        layout: The sites of the factors.
        values: The shared parameters by name.
        factors: One vector ``[D]``, or one for each of S networks ``[S, D]``.
        biases: One vector ``[E]``, or ``[S, E]``.
    """
    modules, merged = dict(network.named_modules()), dict(values)
    for site, values_ in layout.split(factors, biases):
        for map_, (s, r) in zip(site.maps, values_.factors, strict=True):
            merged[map_.weight] = _scaled(modules[site.name], merged[map_.weight], map_, s, r)
        for (name, _), bias in zip(site.biases, values_.biases, strict=True):
            merged[name] = bias.reshape(*bias.shape[:-1], *values[name].shape).clone()
    return merged


def _scaled(module: nn.Module, weight: Tensor, map_: LinearMap, s: Tensor | None, r: Tensor | None) -> Tensor:
    rule = class_rule(module)
    if rule is not None:
        s = None if s is None else rule.weight_factors(module, s, "input")
        return _times(weight, s, None if r is None else rule.weight_factors(module, r, "output"))
    s, r = None if s is None else s.unsqueeze(-2), None if r is None else r.unsqueeze(-1)
    if map_.rows is None:
        return _times(weight, s, r)
    first, last = map_.rows
    part = _times(weight[..., first:last, :], s, r)
    parts = (weight[..., :first, :], part, weight[..., last:, :])
    return torch.cat([rows.expand(*part.shape[:-2], -1, -1) for rows in parts], dim=-2)


def _times(weight: Tensor, s: Tensor | None, r: Tensor | None) -> Tensor:
    weight = weight if s is None else weight * s
    return weight if r is None else weight * r
