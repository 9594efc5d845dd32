"""Adapters: small trainable layers beside a frozen base, as peft adds them (LoRA, IA3, prompts and their relatives).

They are recognized by their class. A private copy of a network with adapters shares the memory of its base
(`core/frozen`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from dubito.core.frozen import Frozen
from dubito.networks.twin import copied


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters of all adapters."""
    chosen = {id(value) for part in _parts(model) for value in part}
    return [name for name, value in model.named_parameters() if id(value) in chosen and value.requires_grad]


def has_adapters(model: nn.Module) -> bool:
    """Return whether a network has adapters."""
    return next(_parts(model), None) is not None


def copied_beside_base(model: nn.Module) -> nn.Module:
    """Return a deep copy of a network; if it has adapters, its frozen weights share the memory of the network's."""
    if not has_adapters(model):
        return copied(model)
    return copied(model, {id(value): Frozen.of(value) for value in model.parameters() if not value.requires_grad})


def _parts(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each layer that is an adapter, or holds one."""
    for module in model.modules():
        if _is_a(module, "BaseTunerLayer"):
            layer: Any = module
            yield [value for name in layer.adapter_layer_names for value in _held(getattr(layer, name, None))]
        elif _is_a(module, "PeftModel"):
            prompts = getattr(module, "prompt_encoder", None)
            if isinstance(prompts, nn.Module) and next(prompts.parameters(), None) is not None:
                yield list(prompts.parameters())


def _held(part: Any) -> list[nn.Parameter]:
    if isinstance(part, nn.Parameter):
        return [part]
    return list(part.parameters()) if isinstance(part, nn.Module) else []


def _is_a(module: nn.Module, name: str) -> bool:
    """Return whether a module has a class of peft with this name, without importing peft."""
    return any(cls.__name__ == name and cls.__module__.startswith("peft.") for cls in type(module).__mro__)
