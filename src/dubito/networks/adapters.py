"""Adapters: small trainable layers beside a frozen base, as peft adds them (LoRA, IA3, prompts and their relatives).

They are recognized by their class. A private copy of a network with adapters shares the memory of its base
(`core/params`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from dubito.core.params import Frozen
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


def low_rank_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Return the names of the two layers of every LoRA product ``B A``: first `A`, whose outputs are the ranks."""
    found = []
    for name, module in model.named_modules():
        if _is_a(module, "LoraLayer"):
            layer: Any = module
            prefix = f"{name}." if name else ""
            found += [(f"{prefix}lora_A.{key}", f"{prefix}lora_B.{key}") for key in layer.lora_A]
    return found


def record_ranks_(model: nn.Module) -> nn.Module:
    """Write the ranks of all LoRA products into peft's own records, so that its files fit; return the model.

    The scaling of a product stays, whatever its rank: peft reads it as ``alpha / rank``.
    """
    for name, module in model.named_modules():
        if not _is_a(module, "LoraLayer"):
            continue
        layer: Any = module
        for key, down in layer.lora_A.items():
            rank = down.weight.shape[0]
            if rank == layer.r[key]:
                continue
            layer.r[key], layer.lora_alpha[key] = rank, layer.scaling[key] * rank
            for config in _configs(model, key):
                own = name.removeprefix("base_model.model.")
                config.use_rslora = False  # whose scaling depends on the rank in another way
                config.rank_pattern = {**config.rank_pattern, own: rank}
                config.alpha_pattern = {**config.alpha_pattern, own: layer.lora_alpha[key]}
    return model


def _configs(model: nn.Module, adapter: str) -> Iterator[Any]:
    """Yield the settings of an adapter, if the network is a model of peft."""
    if _is_a(model, "PeftModel"):
        peft_model: Any = model
        yield peft_model.peft_config[adapter]


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
