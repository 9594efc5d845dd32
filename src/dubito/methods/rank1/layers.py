r"""Layers with rank-1 factors: $y = ((x \circ s) W) \circ r + b$, written once over `LayerRule.apply`.

`make_factored` changes a module of a private network in place, so that it reads its factors and biases from `values`.
It is still an instance of its class with the same parameters; the weight $W$ is shared by all components.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.core.params import CHECKPOINTED
from dubito.core.tracing import is_tracing
from dubito.methods.rank1.fused import BlockDense
from dubito.methods.rank1.sites import SiteValues
from dubito.networks.layers import LayerRule, Side
from dubito.networks.layers.linear import LinearRule
from dubito.networks.swapping import Swapped, swap_class

Perturbation = Literal["multiplicative", "additive"]


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
