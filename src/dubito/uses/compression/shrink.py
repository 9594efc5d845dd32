"""Remove units from layers, fold the constants that they become into the next bias, and verify the smaller network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.errors import UnsupportedError
from dubito.networks.layers import require_rule
from dubito.networks.swapping import put
from dubito.networks.twin import copied
from dubito.networks.watching import inputs_of
from dubito.uses.compression.plan import Plan, both
from dubito.uses.compression.rules import Masks
from dubito.uses.compression.units import by_input, gone_of, incoming
from dubito.uses.compression.units_by_fx import LayerChannels, UnitGroup

TOLERANCE = 1e-5
MORE_ROWS = 16


def silenced(model: nn.Module, groups: list[UnitGroup], kept: Masks, example: Any) -> tuple[nn.Module, Masks]:
    r"""Return a copy whose removed units have no input, and its masks: the reference for the smaller network.

    Such a unit is a constant, such as $\mathrm{relu}(b)$. Where the next layer can take it into its bias it stays a
    constant; where it cannot (a convolution with zero padding, which sees the constant end at the border; units that
    are added to or joined with others) it is zero: its bias goes too, and the gain and shift of its norm.

    Args:
        model: The network.
        groups: Its groups of units.
        kept: For some groups, which units stay.
        example: A batch of inputs.
    """
    changed = [group for group in groups if group.name in kept]
    masks = incoming(model, groups, kept)
    quiet = Plan(masks).masked(model)
    seen = inputs_of(quiet, _consumers(quiet, changed), example)
    for group in changed:
        if not _foldable(quiet, group, kept[group.name], seen):
            masks = both(masks, _muting(quiet, group, kept[group.name]))
    return Plan(masks).masked(quiet), masks


def shrink(model: nn.Module, groups: list[UnitGroup], kept: Masks, example: Any) -> nn.Module:
    """Return a smaller copy of a network that `silenced` prepared; it must be verified against that one."""
    small = copied(model)
    changed = [group for group in groups if group.name in kept]
    seen = inputs_of(model, _consumers(model, changed), example)
    outputs: dict[str, list[Tensor]] = {}
    inputs: dict[str, list[Tensor]] = {}
    for group in changed:
        stays = kept[group.name]
        for part in (*group.producers, *group.passers):
            outputs.setdefault(part.layer, []).append(gone_of(part, stays))
        for part in group.consumers:
            _fold(small, part, stays, seen[part.layer])
            inputs.setdefault(part.layer, []).append(gone_of(part, stays))
        for name, attribute, amount in group.counts:
            module = small.get_submodule(name)
            setattr(module, attribute, getattr(module, attribute) - amount * int((~stays).sum()))
    for name, gone in inputs.items():
        _without(small, name, "inputs", torch.cat(gone))
    for name, gone in outputs.items():
        _without(small, name, "outputs", torch.cat(gone))
    return small


def _consumers(model: nn.Module, groups: list[UnitGroup]) -> dict[str, nn.Module]:
    return {part.layer: model.get_submodule(part.layer) for group in groups for part in group.consumers}


def _without(model: nn.Module, name: str, side: str, gone: Tensor) -> None:
    layer = model.get_submodule(name)
    rule = require_rule(layer, "removing units")
    size = rule.num_inputs(layer) if side == "inputs" else rule.num_outputs(layer)
    keep = torch.ones(size, dtype=torch.bool)
    keep[gone] = False
    function = rule.keep_inputs if side == "inputs" else rule.keep_outputs
    put(model, name, function(layer, keep.to(next(model.parameters()).device)))


def _constants(model: nn.Module, part: LayerChannels, seen: Tensor) -> Tensor:
    """Return the inputs of a layer at the positions of a few examples, ``[positions, channels]``."""
    layer = model.get_submodule(part.layer)
    axis = require_rule(layer, "removing units").channel_axis(layer, seen.ndim)
    return seen.movedim(axis, -1).reshape(-1, seen.shape[axis])


def _foldable(model: nn.Module, group: UnitGroup, stays: Tensor, seen: dict[str, Tensor]) -> bool:
    """Return whether there is one next layer, which turns the constants of these units into a constant output."""
    if len(group.producers) > 1 or len(group.consumers) != 1:
        return False
    part = group.consumers[0]
    layer: Any = model.get_submodule(part.layer)
    if hasattr(layer, "kernel_size"):
        padded = layer.padding_mode == "zeros" and layer.padding not in ("valid", (0,) * len(layer.kernel_size))
        if padded or layer.transposed:
            return False
    constants = _constants(model, part, seen[part.layer])[:, gone_of(part, stays)]
    return bool((constants == constants[:1]).all())


def _fold(model: nn.Module, part: LayerChannels, stays: Tensor, seen: Tensor) -> None:
    """Add the contribution of constant inputs to the bias of a layer."""
    gone = gone_of(part, stays)
    constants = _constants(model, part, seen)[0, gone].double()
    if not bool(constants.any()):
        return
    layer: Any = model.get_submodule(part.layer)
    with torch.no_grad():
        weights = by_input(model, part.layer, layer.weight)[gone].double()  # [gone, outputs, *kernel]
        shift = torch.einsum("i,io->o", constants, weights.flatten(2).sum(2) if weights.ndim > 2 else weights)
        bias = shift if layer.bias is None else layer.bias.double() + shift
        layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)


def _muting(model: nn.Module, group: UnitGroup, stays: Tensor) -> Masks:
    """Return masks over the biases of removed units, and over the gains and shifts of their norms.

    The running mean of a norm without gains is set to zero in place instead.
    """
    masks: Masks = {}
    kinds = [(part, ("bias",)) for part in group.producers] + [(part, ("weight", "bias")) for part in group.passers]
    for part, names in kinds:
        layer, gone = model.get_submodule(part.layer), gone_of(part, stays)
        for kind in names:
            value: Any = getattr(layer, kind, None)
            if value is not None:
                key = f"{part.layer}.{kind}" if part.layer else kind
                masks.setdefault(key, torch.ones(value.shape, dtype=torch.bool))[gone] = False
            elif kind == "weight" and layer.running_mean is not None:  # an instance norm keeps zero as it is
                layer.running_mean[gone] = 0.0  # type: ignore[operator]
    return masks


def varied(example: Any) -> Any:
    """Return the batch and some of its rows again, their numbers scaled at random: what depends on the data shows."""
    generator = torch.Generator().manual_seed(0)

    def more(leaf: Tensor) -> Tensor:
        some = leaf[:MORE_ROWS]
        if leaf.is_floating_point():
            some = some * (0.5 + torch.rand(some.shape, generator=generator)).to(some)
        return torch.cat([leaf, some])

    return batches.map_leaves(more, example)


def largest_difference(first: nn.Module, second: nn.Module, example: Any) -> float:
    """Return the largest difference of two networks' outputs, relative to the largest output if that is above 1."""
    with torch.no_grad():
        expected, found = (params.call(model.eval(), example).double() for model in (first, second))
    if expected.shape != found.shape or not bool(found.isfinite().all()):
        return float("inf")
    return float((expected - found).abs().max() / expected.abs().max().clamp_min(1.0))


def require_same(reference: nn.Module, small: nn.Module, example: Any, tolerance: float = TOLERANCE) -> float:
    """Return the difference, if it is within the tolerance."""
    difference = largest_difference(reference, small, example)
    tolerance = max(tolerance, 4 * torch.finfo(next(reference.parameters()).dtype).eps)  # half precision
    if not difference <= tolerance:
        raise UnsupportedError(
            f"The smaller network differs from the masked one by {difference:.2g}, more than {tolerance:g}: units of "
            'this network cannot be removed exactly; use structure="weights".'
        )
    return difference
