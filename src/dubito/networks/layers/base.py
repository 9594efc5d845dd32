"""The contract of a layer rule: everything that methods need to know about one layer type.

Every method (curvature, variational inference, rank-1 factors, pruning) is written once against `LayerRule`, so a new
layer type is one file with one rule, and a new method serves every layer type at once.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from dubito.core.errors import InputError, UnsupportedError
from dubito.networks.layers.rows import Rows

M = TypeVar("M", bound=nn.Module)
Side = Literal["input", "output"]


class LayerRule(ABC, Generic[M]):
    """One layer type, seen as a map that is linear in its parameters `weight` and `bias`.

    Only `apply` must be written. A capability that a rule leaves out raises an `UnsupportedError` that names the rule
    and the method to add. Rules hold no state and mutate nothing; except in `keep_*` they read only the settings of
    `layer`: the weights are arguments, which may be means, variances, samples or gradients, and may carry a
    `torch.func.vmap` axis.

    The batch is axis 0 of every activation. An activation without a batch axis counts as a batch of one.
    """

    linear_in_input: ClassVar[bool] = True
    """Whether $y$ is also linear in $x$, so that signs or factors may be put on the input channels."""

    takes_indices: ClassVar[bool] = False
    """Whether the input is whole numbers that choose rows of the weight, so that an input channel is such a number."""

    normalizes: ClassVar[bool] = False
    """Whether the layer is a normalization; see `dubito.networks.layers.norm`."""

    def obstacle(self, layer: M) -> str | None:
        """Return why this rule does not describe this particular layer, and what to do; None if it does."""
        return None

    @abstractmethod
    def apply(self, layer: M, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """$y = f_x(W) + b$ with $f_x$ linear; given the layer's own tensors this is `layer.forward(x)`."""

    def apply_variance(self, layer: M, x: Tensor, weight_variance: Tensor, bias_variance: Tensor | None) -> Tensor:
        r"""The variance of `apply` under independent weights, $\sum_w (\partial y / \partial w)^2 \sigma_w^2$.

        Where the layer is linear in its input, and a weight meets one input per output, this is `apply` on squares
        (Kingma et al., 2015, https://arxiv.org/abs/1506.02557).
        """
        if not self.linear_in_input:
            raise self._lacks("apply_variance", layer)
        return self.apply(layer, x.square(), weight_variance, bias_variance)

    def inputs_as_rows(self, layer: M, x: Tensor) -> Rows:
        """The input as the rows that the weight multiplies; see `dubito.networks.layers.rows`."""
        raise self._lacks("inputs_as_rows", layer)

    def grads_as_rows(self, layer: M, g: Tensor) -> Tensor:
        r"""Output gradients `g [V, *output]` in the shape that belongs to `inputs_as_rows`.

        Together: $\partial W_n = \sum_t G_{nt} a_{nt}^\top$ as a matrix, and `from_matrix` makes a weight of it.
        """
        raise self._lacks("grads_as_rows", layer)

    def bias_grads(self, layer: M, g: Tensor) -> Tensor:
        """Output gradients `g [V, *output]` summed over positions: the gradient of the flat bias, `[V, B, O]`."""
        raise self._lacks("bias_grads", layer)

    def bias_shares_rows(self, layer: M) -> bool:
        """Whether curvature can take the bias as one more column of the weight.

        The bias must meet the same rows of output gradients, and the weight be stored in the order of its matrix.
        """
        return False

    def to_matrix(self, layer: M, weight: Tensor) -> Tensor:
        """A weight `[..., *weight]` as the matrix that meets the rows: `[..., O, I]`, grouped `[..., Gr, O, I]`."""
        return weight

    def from_matrix(self, layer: M, matrix: Tensor) -> Tensor:
        """The inverse of `to_matrix`."""
        return matrix

    def constant_weights(self, layer: M) -> Tensor | None:
        """A mask, shaped as the weight, of entries that are constant and never learned; None if there are none."""
        return None

    def num_inputs(self, layer: M) -> int:
        """The number of input channels that can be scaled or removed."""
        raise self._lacks("num_inputs", layer)

    def num_outputs(self, layer: M) -> int:
        """The number of output channels that can be scaled or removed."""
        raise self._lacks("num_outputs", layer)

    def channel_axis(self, layer: M, ndim: int) -> int:
        """The axis of the channels in an activation of `ndim` axes, counted from the front."""
        raise self._lacks("channel_axis", layer)

    def scale_channels(self, layer: M, v: Tensor, side: Side, ndim: int) -> Tensor:
        """Factors `v [..., C]` reshaped to broadcast over an activation of `ndim` axes on that side of the layer.

        `v [C]` is shared by the batch, `v [B, C]` has one row per example; leading axes of `v` meet the activation's
        leading axes.
        """
        if side == "input" and not self.linear_in_input:
            raise UnsupportedError(f"{type(layer).__name__} is not linear in its input; scale its output instead")
        size = self.num_inputs(layer) if side == "input" else self.num_outputs(layer)
        axis, lead = self.channel_axis(layer, ndim), v.shape[:-1]
        if v.shape[-1:] != (size,):
            raise InputError(f"there are {size} {side} channels, but the factors have shape {tuple(v.shape)}")
        if axis < len(lead):
            raise InputError(f"factors of shape {tuple(v.shape)} have too many axes for an activation of {ndim} axes")
        return v.reshape(*lead, *[1] * (axis - len(lead)), size, *[1] * (ndim - axis - 1))

    def mixes_examples(self, layer: M) -> bool:
        """Whether, in evaluation mode too, the output for one example depends on the others of its batch."""
        return False

    def weight_axis(self, layer: M, side: Side) -> int | None:
        """The axis of the weight with one entry per channel of that side; None where the weight has no such axis."""
        return None

    def weight_factors(self, layer: M, v: Tensor, side: Side) -> Tensor:
        """Factors `v [..., C]` of the channels of one side, reshaped to multiply the weight: `[..., *weight]`.

        Scaling the weight by them gives the same outputs as scaling the channels (without the bias).
        """
        axis = self.weight_axis(layer, side)
        if axis is None:
            raise self._lacks("weight_factors", layer)
        return v.reshape(*v.shape[:-1], *[1] * axis, v.shape[-1], *[1] * (layer.weight.ndim - axis - 1))  # type: ignore[operator]

    def channelwise(self, layer: M) -> bool:
        """Whether output channel i belongs to input channel i, so that both are removed together.

        For such a layer (norms, depthwise convolutions) `keep_inputs` and `keep_outputs` are the same function.
        """
        return False

    def keep_outputs(self, layer: M, index: Tensor) -> M:
        """A new, smaller layer that gives only the outputs named by `index` (integers, or a mask)."""
        raise self._lacks("keep_outputs", layer)

    def keep_inputs(self, layer: M, index: Tensor) -> M:
        """A new, smaller layer that takes only the inputs named by `index`: as if the others were zero."""
        raise self._lacks("keep_inputs", layer)

    def _lacks(self, method: str, layer: M) -> UnsupportedError:
        rule = type(self)
        return UnsupportedError(
            f"the rule for {type(layer).__name__} lacks `{method}`; add it to {rule.__qualname__} in {rule.__module__}"
        )


def how_to_add(layer: nn.Module) -> str:
    """What to do about a layer that no rule describes, as a clause."""
    return f"describe it by a LayerRule with the decorator @dubito.networks.layers.register({type(layer).__name__})"


def check_kept(index: Tensor, size: int) -> Tensor:
    """Channels to keep, given as distinct integers in any order or as a mask, as integers.

    >>> check_kept(torch.tensor([True, False, True]), 3).tolist()
    [0, 2]
    """
    if index.dtype == torch.bool:
        if index.shape != (size,):
            raise InputError(f"a mask of channels to keep must have shape ({size},), not {tuple(index.shape)}")
        index = index.nonzero().flatten()
    if index.ndim != 1 or index.is_floating_point():
        raise InputError("channels to keep must be given as a vector of integers or a mask")
    if len(index) == 0:
        raise InputError("at least one channel must be kept; to drop a whole layer, take it out of the network")
    if index.min() < 0 or index.max() >= size:
        raise InputError(f"channels to keep must lie in 0 to {size - 1}, not {index.min()} to {index.max()}")
    if len(index.unique()) != len(index):
        raise InputError("channels to keep must be distinct")
    return index.long()


def resized(layer: M, tensors: dict[str, Tensor], **settings: Any) -> M:
    """A new layer of the same class with some tensors and settings replaced; no tensor or hook is shared.

    The constructor is not called, because a subclass may have another one.
    """
    new = type(layer).__new__(type(layer))
    nn.Module.__init__(new)
    vars(new).update({k: copy.deepcopy(v) for k, v in layer.__getstate__().items() if k not in vars(new)})
    vars(new).update(training=layer.training, **settings)
    for name, parameter in layer._parameters.items():
        value = None if parameter is None else tensors.get(name, parameter).detach().clone()
        grad = parameter is not None and parameter.requires_grad
        new.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=grad))
    for name, buffer in layer._buffers.items():
        value = None if buffer is None else tensors.get(name, buffer).detach().clone()
        new.register_buffer(name, value, persistent=name not in layer._non_persistent_buffers_set)
    return new


def channels_last_rows(g: Tensor, features: int = 1) -> Tensor:
    """`[V, B, *positions, *features]` as `[V, B, T, C]`; `features` is the number of feature axes."""
    if g.ndim == 1 + features:
        g = g.unsqueeze(1)
    positions, channels = g.shape[2 : g.ndim - features], g.shape[g.ndim - features :]
    return g.reshape(*g.shape[:2], math.prod(positions), math.prod(channels))


def channels_first_rows(g: Tensor) -> Tensor:
    """`[V, B, C, *positions]` as `[V, B, T, C]`."""
    return g.reshape(*g.shape[:3], math.prod(g.shape[3:])).transpose(-1, -2)
