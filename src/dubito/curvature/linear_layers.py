r"""The full curvature of whole linear layers: a Kronecker product per example and pair of layers.

A row of the Jacobian is $g_v \otimes a$ for a layer with the gradients $g$ and the inputs $a$, and $h_v \otimes b$ for
another. So their block is $\sum_n \big(\sum_v g_{vn} h_{vn}^\top\big) \otimes a_n b_n^\top$. That costs `B·D²` for `V`
columns of `B` examples, where half of the product of all rows costs `V·B·D²/2`, and no row is formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.core import limits
from dubito.core.limits import numbers, slices
from dubito.curvature.factor import Factor
from dubito.curvature.factors import OuterFactor
from dubito.curvature.layer_factors import LayerFactor, layer_factors
from dubito.networks.selection import Selection

# The number of columns from which on it is cheaper than rows.
FEWEST = 3


def linear_gram(factors: dict[str, Factor], selection: Selection) -> Tensor | None:
    """Return ``JᵀJ`` of a batch, in flat order; None for other layers, or where rows are cheaper.

    Rows are cheaper for few columns, and take less memory for many weights.
    """
    is_small = selection.num_weights**2 <= numbers(limits.current().chunk)
    is_cheaper = next(iter(factors.values())).columns >= FEWEST
    if not (is_small and is_cheaper and all(map(selection.is_whole, selection.names))):
        return None
    groups = layer_factors({name: factors[name] for name in selection.names}, selection)
    if not all(isinstance(each.factor, OuterFactor) for each in groups):
        return None
    blocks = [[_block(one, other) for other in groups[place:]] for place, one in enumerate(groups)]
    sizes = [row[0].shape[0] for row in blocks]
    found = blocks[0][0].new_zeros(sum(sizes), sum(sizes))
    places = torch.cat([_places(each, selection) for each in groups]).to(found.device)
    where = places.split(sizes)
    for row, own in enumerate(where):
        for block, other in zip(blocks[row], where[row:], strict=True):
            found[own[:, None], other] = block
            found[other[:, None], own] = block.mT
    return found


def _block(one: LayerFactor, other: LayerFactor) -> Tensor:
    """Return the block of two layers, ``[O·I, O'·I']``, some examples at a time."""
    first, second = one.factor, other.factor
    assert isinstance(first, OuterFactor)
    assert isinstance(second, OuterFactor)
    (outputs, inputs), (others, features) = ((each.grads.shape[-1], each.inputs.shape[-1]) for each in (first, second))
    total = first.grads.new_zeros(outputs * others, inputs * features)
    for some in slices(first.size, numbers(limits.current().chunk) // (outputs * others + inputs * features)):
        weights = torch.einsum("vbo,vbp->bop", first.grads[:, some], second.grads[:, some])
        products = first.inputs[some, :, None] * second.inputs[some, None, :]
        total += weights.flatten(1).mT @ products.flatten(1)
    parts = total.reshape(outputs, others, inputs, features).transpose(1, 2)
    return parts.reshape(outputs * inputs, others * features)


def _places(each: LayerFactor, selection: Selection) -> Tensor:
    """Return where the weights of a factor, in its own order, stand in the flat selection."""
    flat = {
        name: torch.arange(selection.slices[name].start, selection.slices[name].stop).reshape(selection.shapes[name])
        for name in each.names
    }
    return each.join(flat).flatten()
