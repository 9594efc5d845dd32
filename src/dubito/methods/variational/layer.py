r"""Stochastic layers: layers that are linear in their weight, with noise on the outputs, not on the weights.

`make_stochastic` turns a layer into a `StochasticLayer`, which is still an instance of its class. Its parameters are
the means. One implementation, based on `LayerRule.apply`, serves all layer types:

- local reparameterization (Kingma et al. 2015, https://arxiv.org/abs/1506.02557):
  $y = f(x; \mu) + \sqrt{f(x^2; \sigma^2)} \odot \epsilon$, an independent weight sample for every output;
- flipout (Wen et al. 2018, https://arxiv.org/abs/1803.04386): $y = f(x; \mu) + f(x \odot s; \sigma \epsilon) \odot r$
  with random signs per example and channel, a nearly independent weight sample for every example.

Reading `layer.weight` draws a weight sample (attention reads its projection this way). Within one forward pass of the
network all reads return the same sample, and a layer that is called several times uses one sample for all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dubito.core.randomness import normal_like
from dubito.methods.variational.fused import DenseOutput, NormalOutput, floored
from dubito.methods.variational.mean_field import MeanField, moments_and_kl
from dubito.networks.layers import LayerRule
from dubito.networks.layers.linear import LinearRule
from dubito.networks.swapping import Swapped, restore_class, swap_class

# The attributes that a stochastic layer adds to its class.
OWN = ("rule", "estimator", "random", "drawn", "calls", "shared", "moments", "memory")


class Memory:
    """A cache of a layer's output moments, used while its inputs are the same in every sample of a prediction."""

    def __init__(self) -> None:
        self.inputs: Tensor | None = None
        self.found: tuple[Tensor, Tensor] | None = None
        self.useless = False  # the inputs differ between samples, because an earlier layer is random

    def recall(self, inputs: Tensor, find: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return ``find(inputs)``, from the cache if the inputs have not changed."""
        if self.found is not None and self.inputs is not None and torch.equal(inputs, self.inputs):
            return self.found
        found = find(inputs)
        self.useless = self.useless or self.found is not None
        self.inputs, self.found = (None, found) if self.useless else (inputs, found)
        return found


class StochasticLayer(Swapped):
    """A mixin for the class of a layer, applied by `make_stochastic`; see the module's docstring.

    Attributes:
        weight: A property: reading it draws a sample, as for a random `bias`. `named_parameters()` has the means.
        rule: The layer rule.
        estimator: ``"local"``, ``"flipout"``, or ``"scaled"`` for a weight in groups, whose scales are sampled, too.
        random: The posteriors of its parameters ``weight`` and, if it is random, ``bias``.
        drawn: The weight samples of the network's current forward pass; None outside of one.
        calls: The number of calls of the layer and reads of its random parameters in this pass.
        shared: Whether one weight sample is used for a whole pass, because the pass uses the layer several times.
        moments: Mean and variance of its parameters, if a training step has computed them; else None.
        memory: The cache of its output moments during a prediction; else None.
    """

    prefix = "Stochastic"
    weight = property(lambda self: self._read("weight"))
    bias = property(lambda self: self._read("bias"))
    rule: LayerRule[Any]
    estimator: str
    random: dict[str, MeanField]
    drawn: dict[str, Tensor] | None
    calls: int
    shared: bool
    moments: dict[str, tuple[Tensor, Tensor]] | None
    memory: Memory | None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Call the layer with new noise."""
        self.calls += 1
        if self.shared or args or kwargs:
            return super().forward(x, *args, **kwargs)  # reads `self.weight`, which draws a sample
        if self.estimator == "scaled":
            return self.random["weight"].noisy_output(self, x)  # type: ignore[operator]
        return self._local(x) if self.estimator == "local" else self._flipout(x)

    def _local(self, x: Tensor) -> Tensor:
        if self.moments is not None and self.memory is None:
            return self._training_output(x, self.moments)
        mean, scale = self._output_spread(x) if self.memory is None else self.memory.recall(x, self._output_spread)
        return torch.addcmul(mean, scale, normal_like(mean))

    def _training_output(self, x: Tensor, moments: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Return a sample of the outputs in a training step, with few nodes in the graph."""
        dense = type(self.rule) is LinearRule and "bias" not in moments
        if dense and not torch.is_autocast_enabled(x.device.type):
            return DenseOutput.apply(x, *moments["weight"], self._parameters.get("bias"))
        return NormalOutput.apply(*self._output_moments(x))

    def _output_spread(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the outputs."""
        mean, variance = self._output_moments(x)
        return mean, floored(variance).sqrt()

    def _output_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the outputs."""
        moments: dict[str, Any] = self.moments or {
            name: (self.random[name].center(mean), self.random[name].variance(mean))
            for name, mean in self._means() if name in self.random
        }  # fmt: skip
        (weight, weight_variance), (bias, bias_variance) = (moments.get(n, (mean, None)) for n, mean in self._means())
        mean = self.rule.apply(self, x, weight, bias)
        return mean, self.rule.apply_variance(self, x, weight_variance, bias_variance)

    def _flipout(self, x: Tensor) -> Tensor:
        weight, bias = self._centers()
        mean = self.rule.apply(self, x, weight, bias)
        noise = [self.random[n].noise(v) if n in self.random else None for n, v in self._means()]
        flipped = x * self._signs(x, "input") if self.rule.linear_in_input else x
        return mean + self.rule.apply(self, flipped, *noise) * self._signs(mean, "output")  # type: ignore[arg-type]

    def _signs(self, activation: Tensor, side: Any) -> Tensor:
        """Return random signs per example and channel; an activation without a batch axis is one example."""
        channels = self.rule.num_inputs(self) if side == "input" else self.rule.num_outputs(self)
        lead = activation.shape[: min(1, self.rule.channel_axis(self, activation.ndim))]
        signs = torch.empty(*lead, channels, dtype=torch.float32, device=activation.device).bernoulli_(0.5) * 2 - 1
        like = activation.dtype if activation.is_floating_point() else signs.dtype
        return self.rule.scale_channels(self, signs.to(like), side, activation.ndim)

    def _means(self) -> list[tuple[str, Tensor]]:
        return [(name, self._parameters.get(name)) for name in ("weight", "bias")]  # type: ignore[misc]

    def _centers(self) -> list[Tensor]:
        return [self.random[name].center(mean) if name in self.random else mean for name, mean in self._means()]

    def _read(self, name: str) -> Tensor | None:
        """Return a sample of one parameter: the same within a forward pass, a new one for each read outside of it."""
        mean = self._parameters.get(name)
        if mean is None or name not in self.random:
            return mean
        if self.drawn is None:
            return self.random[name].sample(mean)
        if name not in self.drawn:
            self.drawn[name] = self.random[name].sample(mean)
            self.calls += 1
        return self.drawn[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            vars(self)[name] = value  # set in every call, and nn.Module's own __setattr__ is slow
        else:
            super().__setattr__(name, value)


def compute_moments(layers: Sequence[StochasticLayer]) -> Tensor:
    """Compute mean and variance of the layers' parameters for the next calls, and return the total KL divergence."""
    keys, parts, means = [], [], []
    for layer in layers:
        layer.moments = {}
        for name, part in layer.random.items():
            keys.append((layer.moments, name))
            parts.append(part)
            means.append(cast(Tensor, layer._parameters[name]))
    found, kl = moments_and_kl(parts, means)
    for (moments, name), each in zip(keys, found, strict=True):
        moments[name] = each
    return kl


def make_stochastic(layer: nn.Module, rule: LayerRule[Any], estimator: str, random: dict[str, MeanField]) -> None:
    """Make a layer of a private network stochastic, in place; `make_plain` undoes it."""
    values = (rule, estimator, random, None, 0, False, None, None)
    swap_class(layer, StochasticLayer, **dict(zip(OWN, values, strict=True)))


def make_plain(layer: nn.Module) -> None:
    """Undo `make_stochastic` in place; the layer's parameters are the means."""
    restore_class(layer, OWN)
