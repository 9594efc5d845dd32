"""What an operation of autograd's graph does with one of its arguments, read from what it saved for the backward pass.

Here is all that the curvature engine knows of single operations: one function per kind of node. They let it follow
parameters that no layer rule describes: scales and offsets of any normalization, class tokens, positions, the
projections inside of attention (the private ``_saved_*`` fields of autograd's nodes, tested with torch 2.6 to 2.15).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from dubito.networks.layers import LayerRule, class_rule
from dubito.networks.layers.rows import DenseRows, GroupedRows
from dubito.networks.parameter_uses import Node


@dataclass
class Elementwise:
    """``y = factor ⊙ w + …``, where `w` is repeated along some axes of `y`."""

    shape: tuple[int, ...]  # that of `w` with as many axes as `y`: 1 along an axis where it is repeated
    factor: Tensor | float  # a tensor that broadcasts with `y`, or a number


@dataclass
class MatrixProduct:
    """``y = rows @ w + …`` with rows ``[N, I]`` and `w` ``[I, O]``; all of them may have leading axes of size 1."""

    rows: Tensor


@dataclass
class Convolution:
    """A convolution of `inputs` with the kernel `w`."""

    inputs: Tensor  # the inputs
    layer: Any  # the settings, as `nn.Conv2d` and its like have them

    @property
    def rule(self) -> LayerRule[Any]:
        """The rule of the layer with these settings."""
        kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
        found = class_rule(kinds[len(self.layer.kernel_size)].__new__(kinds[len(self.layer.kernel_size)]))
        assert found is not None
        return found

    @property
    def rows(self) -> DenseRows | GroupedRows:
        """The windows of the inputs."""
        rows = self.rule.inputs_as_rows(self.layer, self.inputs)
        assert isinstance(rows, DenseRows | GroupedRows)
        return rows


@dataclass
class Lookup:
    """``y = w[ids]``; rows of `padding_idx` have no gradient."""

    ids: Tensor
    num_embeddings: int
    padding_idx: int | None


Operation = Elementwise | MatrixProduct | Convolution | Lookup


def read(node: Node, argument: int, shape: tuple[int, ...]) -> Operation | None:
    """Return what a node does with an argument of a shape; None where that is not known, or not linear."""
    reader = _READERS.get(node.name())
    return None if reader is None else reader(node, argument, shape)


def result_shape(node: Node) -> tuple[int, ...]:
    """Return the shape of the first result of a node."""
    return tuple(node._input_metadata[0].shape)


def _aligned(node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with as many axes as the node's result, as broadcasting aligns it."""
    return (1,) * (len(result_shape(node)) - len(shape)) + shape


def _per_channel(node: Node) -> tuple[int, ...]:
    """Return the shape of a vector with one entry per channel, which is the second axis of the result."""
    whole = result_shape(node)
    return (1, whole[1], *[1] * (len(whole) - 2))


def _add(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise:
    return Elementwise(_aligned(node, shape), float(node._saved_alpha) if argument == 1 else 1.0)


def _subtract(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise:
    return Elementwise(_aligned(node, shape), -float(node._saved_alpha) if argument == 1 else 1.0)


def _multiply(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise:
    factor = node._saved_self if argument else node._saved_other
    return Elementwise(_aligned(node, shape), factor.detach())


def _divide(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise | None:
    return Elementwise(_aligned(node, shape), node._saved_other.reciprocal()) if argument == 0 else None


def _expand(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise:
    return Elementwise(_aligned(node, shape), 1.0)


def _where(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise:
    kept = node._saved_condition if argument == 0 else ~node._saved_condition
    return Elementwise(_aligned(node, shape), kept.to(node._input_metadata[0].dtype))


def _masked_fill(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise:
    filled = node._saved_mask if argument == 1 else ~node._saved_mask
    return Elementwise(_aligned(node, shape), filled.to(node._input_metadata[0].dtype))


def _repeat(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise | None:
    aligned = _aligned(node, shape)
    plain = all(size == 1 or times == 1 for size, times in zip(aligned, node._saved_repeats, strict=True))
    return Elementwise(aligned, 1.0) if plain else None


def _layer_norm(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise:
    if argument == 2:
        return Elementwise(_aligned(node, shape), 1.0)
    normalized = (node._saved_input - node._saved_result1) * node._saved_result2
    return Elementwise(_aligned(node, shape), normalized)


def _batch_norm(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise | None:
    if node._saved_training or node._saved_running_var is None:
        return None
    if argument == 2:
        return Elementwise(_per_channel(node), 1.0)
    mean, variance = (v.view(_per_channel(node)) for v in (node._saved_running_mean, node._saved_running_var))
    return Elementwise(_per_channel(node), (node._saved_input - mean) * (variance + node._saved_eps).rsqrt())


def _group_norm(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise:
    if argument == 2:
        return Elementwise(_per_channel(node), 1.0)
    inputs, groups = node._saved_input, node._saved_group
    mean, scale = (value.reshape(len(inputs), groups, 1) for value in (node._saved_result1, node._saved_result2))
    return Elementwise(_per_channel(node), ((inputs.reshape(len(inputs), groups, -1) - mean) * scale).view_as(inputs))


def _prelu(node: Node, argument: int, shape: tuple[int, ...]) -> Elementwise | None:
    return Elementwise(_aligned(node, shape), node._saved_self.clamp_max(0.0)) if argument == 1 else None


def _addmm(node: Node, argument: int, shape: tuple[int, ...]) -> Operation | None:
    if argument == 0:
        return Elementwise(_aligned(node, shape), float(node._saved_beta))
    return MatrixProduct(node._saved_mat1.detach()) if argument == 2 and node._saved_alpha == 1 else None


def _product(node: Node, argument: int, shape: tuple[int, ...]) -> MatrixProduct | None:
    alone = math.prod(shape[:-2]) == 1  # in a batched product, one matrix for the whole batch
    return MatrixProduct(node._saved_self.detach()) if argument == 1 and alone else None


def _convolution(node: Node, argument: int, shape: tuple[int, ...]) -> Operation | None:
    if argument == 2:
        return Elementwise(_per_channel(node), 1.0)
    if argument != 1 or node._saved_transposed or len(result_shape(node)) > 5:
        return None
    settings = {name: tuple(getattr(node, f"_saved_{name}")) for name in ("stride", "padding", "dilation")}
    layer = SimpleNamespace(**settings, groups=node._saved_groups, kernel_size=shape[2:], padding_mode="zeros")
    return Convolution(node._saved_input.detach(), layer)


def _embedding(node: Node, argument: int, shape: tuple[int, ...]) -> Lookup | None:
    if node._saved_scale_grad_by_freq:
        return None
    padding = node._saved_padding_idx
    return Lookup(node._saved_indices, int(node._saved_weight_sym_argsize_0), padding if 0 <= padding < 2**62 else None)


_READERS: dict[str, Callable[[Node, int, tuple[int, ...]], Operation | None]] = {
    "AddBackward0": _add,
    "SubBackward0": _subtract,
    "MulBackward0": _multiply,
    "DivBackward0": _divide,
    "ExpandBackward0": _expand,
    "WhereBackward0": _where,
    "MaskedFillBackward0": _masked_fill,
    "RepeatBackward0": _repeat,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeBatchNormBackward0": _batch_norm,
    "NativeGroupNormBackward0": _group_norm,
    "PreluKernelBackward0": _prelu,
    "AddmmBackward0": _addmm,
    "MmBackward0": _product,
    "BmmBackward0": _product,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
}
