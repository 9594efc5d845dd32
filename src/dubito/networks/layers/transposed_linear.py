"""$y = x W + b$ with the weight `[I, O]`, recognized by what a layer computes: Hugging Face's `Conv1D` in GPT-2."""

from __future__ import annotations

import copy
import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.core.randomness import Stream
from dubito.networks.layers.base import Side, check_kept, resized
from dubito.networks.layers.linear import ChannelsLastRule
from dubito.networks.layers.registry import register_where

_ANSWERS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def multiplies_from_the_right(module: nn.Module) -> bool:
    """Return whether a module of an unknown class computes `x @ weight + bias`, in training mode too.

    It is asked: the class's `forward` runs once on made-up weights, in a shallow copy of the module.
    """
    if isinstance(module, torch.jit.ScriptModule):  # it cannot be copied with other weights
        return False
    own = module._parameters
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or weight.ndim != 2 or min(weight.shape) < 2 or not own.keys() <= {"weight", "bias"}:
        return False
    if module._modules or module._buffers or "forward" in vars(module) or (bias is not None and bias.ndim != 1):
        return False
    if module not in _ANSWERS:
        _ANSWERS[module] = all(_computes_product(module, weight, bias, training) for training in (False, True))
    return _ANSWERS[module]


@torch.no_grad()
def _computes_product(module: nn.Module, weight: Tensor, bias: Tensor | None, training: bool) -> bool:
    x, matrix = _made_up(2, 3, len(weight)), _made_up(*weight.shape)
    offset = None if bias is None else _made_up(len(bias))
    asked = copy.copy(module)
    given = {"weight": nn.Parameter(matrix), "bias": None if offset is None else nn.Parameter(offset)}
    vars(asked).update(_parameters={name: given[name] for name in module._parameters}, training=training)
    try:
        with Stream(0).active():  # it may draw noise
            found = type(module).forward(asked, x)
        expected = x @ matrix if offset is None else x @ matrix + offset
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError):  # it takes other inputs
        return False
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9)


def _made_up(*shape: int) -> Tensor:
    """Return values without a pattern, and without drawing from a generator."""
    return torch.arange(1.0, 1.0 + math.prod(shape), dtype=torch.float64).square().sin().reshape(shape)


@register_where(multiplies_from_the_right)
class TransposedLinearRule(ChannelsLastRule[nn.Module]):
    """Input `[B, *positions, I]`; the weight `[I, O]` is the transpose of its matrix."""

    def apply(self, layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """$x W + b$."""
        y = x @ weight
        return y if bias is None else y + bias

    def to_matrix(self, layer: nn.Module, weight: Tensor) -> Tensor:
        """The transpose."""
        return weight.mT

    def from_matrix(self, layer: nn.Module, matrix: Tensor) -> Tensor:
        """The transpose."""
        return matrix.mT

    def num_inputs(self, layer: nn.Module) -> int:
        """The rows of the weight."""
        return layer.get_parameter("weight").shape[0]

    def num_outputs(self, layer: nn.Module) -> int:
        """The columns of the weight."""
        return layer.get_parameter("weight").shape[1]

    def weight_axis(self, layer: nn.Module, side: Side) -> int:
        """`[I, O]`."""
        return 1 if side == "output" else 0

    def keep_outputs(self, layer: nn.Module, index: Tensor) -> nn.Module:
        """Columns of the weight and entries of the bias."""
        size = self.num_outputs(layer)
        index = check_kept(index, size)
        tensors = {name: value[..., index] for name, value in layer.named_parameters(recurse=False)}
        return _resized(layer, tensors, size, len(index))

    def keep_inputs(self, layer: nn.Module, index: Tensor) -> nn.Module:
        """Rows of the weight."""
        size = self.num_inputs(layer)
        index = check_kept(index, size)
        return _resized(layer, {"weight": layer.get_parameter("weight")[index]}, size, len(index))


def _resized(layer: nn.Module, tensors: dict[str, Tensor], before: int, after: int) -> nn.Module:
    """Return the smaller layer, with those of its integers changed that make it compute the product again."""
    names = [name for name, value in vars(layer).items() if type(value) is int and value == before]
    for chosen in ((), *((name,) for name in names), tuple(names)):
        new = resized(layer, tensors, **dict.fromkeys(chosen, after))
        if multiplies_from_the_right(new):
            return new
    raise UnsupportedError(f"a {type(layer).__name__} cannot be made smaller: its own code depends on its size")
