"""Rules that choose weights by the name, the type or the order of their layers."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dubito.core import batches
from dubito.core.batches import Source
from dubito.core.errors import InputError
from dubito.core.settings import setting
from dubito.networks.adapters import adapter_names
from dubito.networks.output_layer import output_layer, registered_last
from dubito.networks.selection import Selection
from dubito.select.rule import SelectionRule


@setting
class all(SelectionRule):
    """All trainable weights."""

    setting_name = "select.all"
    selects_all = True

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Select all weights with ``requires_grad=True``."""
        chosen = Selection.all_of(model)
        if chosen.num_weights == 0:
            raise InputError("Every parameter of the model is frozen: set requires_grad=True on those to be random.")
        return chosen


@setting
class last_layer(SelectionRule):
    """The output layer: the last linear map with trainable weights before the outputs.

    It is found in the graph of a forward pass (`dubito.networks.output_layer`), also where its matrix is computed from
    other tensors, as by weight normalization. Without data, it is the last linear layer that the model registers.
    """

    setting_name = "select.last_layer"

    def resolve(self, model: nn.Module, data: Any = None, *args: Any, **kwargs: Any) -> Selection:
        """Select the trainable parameters of that layer."""
        if not any(value.requires_grad for value in model.parameters()):
            raise InputError("The model has no trainable parameters: set requires_grad=True on some.")
        chosen = registered_last(model) if data is None else output_layer(model, _example(model, data))
        if not chosen:
            raise InputError(
                "The model has no linear layer with trainable weights from which its outputs are computed, so "
                "select.last_layer() cannot choose one: name layers, as in select.layers('head')."
            )
        return Selection.all_of(model, _canonical(model, chosen))


@setting
class adapters(SelectionRule):
    """The trainable weights of adapters: LoRA and its relatives, as peft adds them to a frozen network.

    They are recognized by their class. A trainable head beside them is chosen with
    ``select.adapters() | select.last_layer()``.
    """

    setting_name = "select.adapters"

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Select the trainable parameters of all adapters."""
        chosen = adapter_names(model)
        if not chosen:
            raise InputError(
                "The model has no trainable adapters: add some with peft.get_peft_model, or use select.layers(...)."
            )
        return Selection.all_of(model, chosen)


@setting
class layers(SelectionRule):
    """Layers by name or by type.

    Args:
        pattern: Part of a parameter's dotted name (``"encoder.fc"``), a shell pattern over it (``"*.weight"``), a layer
            type (``nn.Conv2d``), or a tuple of these.
    """

    setting_name = "select.layers"
    pattern: str | type[nn.Module] | tuple[str | type[nn.Module], ...]

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Select the trainable parameters that match the pattern."""
        patterns = self.pattern if isinstance(self.pattern, tuple) else (self.pattern,)
        chosen: list[str] = []
        for name, module in model.named_modules():
            for full, value in module.named_parameters(prefix=name, recurse=False):
                if value.requires_grad and any(_fits(one, full, module) for one in patterns):
                    chosen.append(full)
        if not chosen:
            names = ", ".join(name for name, _ in model.named_parameters())
            raise InputError(f"No trainable parameter matches {self.pattern!r}: the model has {names}.")
        return Selection.all_of(model, _canonical(model, chosen))


@setting
class mask(SelectionRule):
    """The weights where a mask is true.

    Args:
        params: Boolean tensors by parameter name, each in the shape of its parameter.
    """

    setting_name = "select.mask"
    params: Mapping[str, Any]

    def resolve(self, model: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        """Select where the masks are true."""
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        chosen = Selection.from_masks(shapes, {name: torch.as_tensor(value) for name, value in self.params.items()})
        if chosen.num_weights == 0:
            raise InputError("The mask selects no weight: set at least one entry to True.")
        return chosen


def _fits(pattern: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    if any(mark in pattern for mark in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def _canonical(model: nn.Module, names: list[str]) -> list[str]:
    """Return the names with tied parameters replaced by the first name of each."""
    by_id = {id(value): name for name, value in model.named_parameters()}
    everything = dict(model.named_parameters(remove_duplicate=False))
    return list(dict.fromkeys(by_id[id(everything[name])] for name in names))


def _example(model: nn.Module, data: Source) -> Any:
    """Return the inputs of the first few examples, on the model's device and in its dtype."""
    weight = next(model.parameters())
    return batches.place(batches.take(data.first().inputs, slice(0, 4)), weight.device, weight.dtype)
