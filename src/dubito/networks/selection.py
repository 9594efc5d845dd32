"""`Selection`: which weights of a network are random; the rest stay at their trained value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core.errors import InputError
from dubito.core.params import Params


class Selection:
    """A subset of a network's weights; the rest stay at their trained value.

    The flat order is the order of the model's parameters and, within one, of its flattened entries; a tied parameter is
    counted once, under its first name.

    Args:
        shapes: The shape of every parameter of the model, in the model's order.
        indices: For each selected parameter the sorted flat positions, or None for all of it.

    >>> import torch
    >>> chosen = Selection({"w": (2, 2), "b": (2,)}, {"w": torch.tensor([0, 3]), "b": None})
    >>> chosen.ravel({"w": torch.arange(4.0).reshape(2, 2), "b": torch.tensor([7.0, 8.0])}).tolist()
    [0.0, 3.0, 7.0, 8.0]
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], indices: Mapping[str, Tensor | None]) -> None:
        unknown = [name for name in indices if name not in shapes]
        if unknown:
            raise InputError(f"The model has no parameter '{unknown[0]}'; it has {', '.join(list(shapes)[:8])}.")
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.indices: dict[str, Tensor | None] = {}
        self.slices: dict[str, slice] = {}
        start = 0
        for name, shape in self.shapes.items():
            if name not in indices:
                continue
            chosen, size = indices[name], math.prod(shape)
            if chosen is not None:
                chosen = _checked_indices(name, chosen, size)
                if len(chosen) == size:
                    chosen = None
            count = size if chosen is None else len(chosen)
            if count == 0:
                continue
            self.indices[name] = chosen
            self.slices[name] = slice(start, start + count)
            start += count
        self.num_weights = start

    @classmethod
    def all_of(cls, model: nn.Module, names: list[str] | None = None) -> Selection:
        """Select whole parameters: those in `names`, or every trainable one."""
        parameters = dict(model.named_parameters())
        chosen = [n for n, p in parameters.items() if p.requires_grad] if names is None else names
        return cls({n: tuple(p.shape) for n, p in parameters.items()}, dict.fromkeys(chosen))

    @classmethod
    def from_masks(cls, shapes: Mapping[str, tuple[int, ...]], masks: Mapping[str, Tensor]) -> Selection:
        """Select where the masks are true; a parameter without a mask is not selected."""
        for name, mask in masks.items():
            if name in shapes and tuple(mask.shape) != tuple(shapes[name]):
                given, wanted = tuple(mask.shape), tuple(shapes[name])
                raise InputError(f"The mask of '{name}' has shape {given}, the weight {wanted}.")
        return cls(shapes, {name: mask.reshape(-1).bool().nonzero().squeeze(1) for name, mask in masks.items()})

    @property
    def names(self) -> list[str]:
        """The parameters with at least one selected weight."""
        return list(self.indices)

    @property
    def total(self) -> int:
        """The number of weights of the whole network."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def is_whole(self, name: str) -> bool:
        """Whether every entry of `name` is selected."""
        return name in self.indices and self.indices[name] is None

    def positions(self, name: str) -> Tensor:
        """The selected flat positions within `name`."""
        chosen = self.indices[name]
        return torch.arange(math.prod(self.shapes[name])) if chosen is None else chosen

    def ravel(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the selected weights as one vector ``[D]``, or ``[S, D]`` where tensors have a leading sample axis."""
        parts = []
        for name, chosen in self.indices.items():
            if name not in params:
                raise InputError(f"The selected parameter '{name}' is missing.")
            value, shape = params[name], self.shapes[name]
            lead = value.shape[: value.ndim - len(shape)]
            if value.shape != (*lead, *shape):
                raise InputError(f"'{name}' has shape {tuple(value.shape)}, but the selection knows it as {shape}.")
            flat = value.reshape((*lead, math.prod(shape)))
            parts.append(flat if chosen is None else flat[..., chosen.to(value.device)])
        if not parts:
            raise InputError("Nothing is selected: choose at least one weight.")
        return torch.cat(parts, dim=-1)

    def merge(self, base: Mapping[str, Tensor], flat: Tensor) -> Params:
        """Return `base` with the selected weights from `flat` ``[D]`` or ``[S, D]``; nothing is changed in place.

        With a leading sample axis every tensor gets it; those that are not selected are expanded views of `base`.
        """
        if flat.shape[-1] != self.num_weights:
            raise InputError(f"Expected {self.num_weights} selected weights, got a vector of {flat.shape[-1]}.")
        missing = [name for name in self.indices if name not in base]
        if missing:
            raise InputError(f"The selected parameter '{missing[0]}' is missing.")
        lead = flat.shape[:-1]
        merged: Params = {}
        for name, value in base.items():
            if name not in self.indices:
                merged[name] = value.expand((*lead, *value.shape)) if lead else value
                continue
            part, chosen = flat[..., self.slices[name]], self.indices[name]
            if chosen is None:
                merged[name] = part.reshape((*lead, *value.shape))
            else:
                where = chosen.to(part.device).expand(part.shape)
                whole = value.reshape(-1).to(part.dtype).expand(*lead, value.numel())
                merged[name] = whole.scatter(-1, where, part).reshape((*lead, *value.shape))
        return merged

    def fill(self, flat: Tensor, fill: float = 0.0) -> Params:
        """Return `flat` as tensors of the selected parameters' shapes, `fill` where a weight is not selected."""
        base = {name: flat.new_full(self.shapes[name], fill) for name in self.indices}
        return self.merge(base, flat)

    def masks(self) -> dict[str, Tensor]:
        """Return one boolean tensor per parameter of the model: true where selected."""
        masks = {name: torch.zeros(math.prod(shape), dtype=torch.bool) for name, shape in self.shapes.items()}
        for name in self.indices:
            masks[name][self.positions(name)] = True
        return {name: mask.reshape(self.shapes[name]) for name, mask in masks.items()}

    def to_state(self) -> dict[str, Any]:
        """Return tensors and plain values from which `from_state` makes the selection again."""
        partial = {name: index for name, index in self.indices.items() if index is not None}
        whole = [name for name, index in self.indices.items() if index is None]
        return {"shapes": {n: list(s) for n, s in self.shapes.items()}, "whole": whole, "partial": partial}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], model: nn.Module) -> Selection:
        """Undo `to_state`; a selection of another network than `model` is refused."""
        shapes = {name: tuple(shape) for name, shape in state["shapes"].items()}
        own = {name: tuple(value.shape) for name, value in model.named_parameters()}
        if list(shapes.items()) != list(own.items()):
            raise InputError("A saved selection belongs to another network than this one: its parameters differ.")
        return cls(shapes, {**dict.fromkeys(state["whole"]), **state["partial"]})

    def _combine(self, other: Selection, join: Any) -> Selection:
        if self.shapes != other.shapes:
            raise InputError("Two selections of different networks cannot be combined.")
        mine, theirs = self.masks(), other.masks()
        return Selection.from_masks(self.shapes, {name: join(mine[name], theirs[name]) for name in mine})

    def __or__(self, other: Selection) -> Selection:
        return self._combine(other, torch.logical_or)

    def __and__(self, other: Selection) -> Selection:
        return self._combine(other, torch.logical_and)

    def __invert__(self) -> Selection:
        return Selection.from_masks(self.shapes, {name: ~mask for name, mask in self.masks().items()})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection) or self.shapes != other.shapes or self.slices != other.slices:
            return False
        return all(torch.equal(self.positions(name), other.positions(name)) for name in self.indices)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [f"Selection of {self.num_weights:,} of {self.total:,} weights"]
        for name, shape in self.shapes.items():
            span = self.slices.get(name)
            count = span.stop - span.start if span else 0
            filled = round(20 * count / math.prod(shape)) if math.prod(shape) else 0
            bar = ("█" * filled or "▏" * bool(count)).ljust(20, "·")  # a bar for a few weights is not empty
            lines.append(f"  {name:<32} {bar} {count:>9,} of {math.prod(shape):,}")
        return "\n".join(lines)


def _checked_indices(name: str, chosen: Tensor, size: int) -> Tensor:
    chosen = torch.as_tensor(chosen, dtype=torch.long).reshape(-1).cpu()
    if len(chosen) and (chosen.min() < 0 or chosen.max() >= size):
        raise InputError(f"'{name}' has {size} weights; a selected position lies outside of them.")
    unique = chosen.unique()
    if len(unique) != len(chosen):
        raise InputError(f"A weight of '{name}' is selected twice.")
    return unique
