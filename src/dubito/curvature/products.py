r"""Explicit gradients of a layer whose positions add up, :math:`\sum_t G_{vnt} a_{nt}^\top`, a cacheful at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Numbers of explicit gradients that are held at a time: what stays in a processor's cache.
CACHED = 2**20


def explicit_products(grads: Tensor, inputs: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield gradients ``[b, V, x]`` of some examples and some entries of the matrix ``[O, I]``, and which those are.

    They are in a buffer that is used again for the next ones; until then the caller may change them.

    Args:
        grads: Rows of output gradients, ``[V, B, T, O]``.
        inputs: Rows of inputs, ``[B, T, I]``.
    """
    columns, size, _, num_outputs = grads.shape
    width = inputs.shape[-1]
    outputs = slices(num_outputs, CACHED // max(columns * width, 1))
    height = outputs[0].stop
    parts = slices(size, CACHED // max(columns * width * height, 1))
    buffer = grads.new_empty(parts[0].stop, columns, height, width)
    for examples in parts:
        for some in outputs:
            product = buffer[: examples.stop - examples.start, :, : some.stop - some.start]
            for n, each in enumerate(product, examples.start):  # all examples at once would copy the gradients
                torch.bmm(grads[:, n, :, some].mT, inputs[n].expand(columns, -1, -1), out=each)
            yield examples, slice(some.start * width, some.stop * width), product.flatten(2)


def slices(size: int, step: int) -> list[slice]:
    """Divide `size` into parts of `step`, but of at least one.

    >>> slices(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, step)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
