"""Draw new weights for a network, or for its output layer only, as the network itself initializes them."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from dubito.core import params
from dubito.core.errors import InputError
from dubito.core.once import warn_once
from dubito.core.params import Frozen
from dubito.networks.output_layer import output_layer
from dubito.networks.twin import light_copy

# Parameters that nobody can redraw keep their values if they are at most this fraction of all weights.
KEPT = 0.05
# Where Hugging Face models note that they have been initialized.
_INITIALIZED = "_is_hf_initialized"


def redraw(model: nn.Module, start: Any, inputs: Callable[[], Any]) -> None:
    """Draw new weights in place: all of them for the start ``"fresh"``, the output layer's for ``"head"``.

    Args:
        model: A private copy of the user's network.
        start: The start of a recipe; other values change nothing.
        inputs: Returns some inputs, from which the output layer is found.
    """
    if start == "fresh":
        reset_parameters(model)
    elif start == "head":
        head = output_layer(model, inputs())
        if not head:
            raise InputError(
                "start='head' needs a linear layer that gives the outputs, and this network has none that is trainable:"
                " use start='model' or 'fresh'."
            )
        fresh = light_copy(model)
        reset_parameters(fresh, only=set(head))
        own = dict(fresh.named_parameters())
        params.load_(model, {name: own[name].detach() for name in head})


def reset_parameters(model: nn.Module, only: set[str] | None = None) -> None:
    """Draw new weights, in place, by the functions that the network has for it; frozen weights are kept.

    Each layer's own `reset_parameters` comes first, inner modules before outer ones. Then come the functions with which
    a whole network initializes its parts, `init_weights` and `_init_weights` (Hugging Face, timm), and last those of
    adapters (`reset_lora_parameters` and the like).

    Args:
        model: A private copy of the user's network.
        only: The parameters that must be redrawn; by default all trainable ones.
    """
    before, magnitudes = params.of(model), _magnitudes(model)
    for value in model.parameters():
        if isinstance(value, Frozen):
            value.data = value.detach().clone()  # which the functions below may overwrite
    drawn = {id(value) for module in model.modules() for value in _reset_parametrized(module)}
    for value in model.parameters():
        if _can_be_marked(value) and id(value) not in drawn:
            value.data.fill_(math.nan)  # what is still NaN in the end was not redrawn
    for module in reversed(list(model.modules())):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if _takes(reset, 0) and not parametrize.is_parametrized(module) and _has_trainable(module):
            reset()  # type: ignore[misc]
    for initialize in _whole_initializers(model):
        initialize()
    _reset_adapters(model)
    for parameter, magnitude in magnitudes:
        parameter.data.copy_(magnitude)
    now = dict(model.named_parameters())
    missed = [name for name in before if _can_be_marked(now[name]) and bool(now[name].isnan().any())]
    kept = {name: before[name] for name in before if name in missed or not now[name].requires_grad}
    params.load_(model, kept)
    for name, value in now.items():
        if isinstance(value, Frozen):
            value.data = before[name]
    _check_missed(model, [name for name in missed if only is None or name in only])


def _check_missed(model: nn.Module, missed: list[str]) -> None:
    """Say which few parameters kept their values; raise an error if they are many."""
    if not missed:
        return
    sizes = {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}
    if sum(sizes[name] for name in missed) > KEPT * sum(sizes.values()):
        raise InputError(f"start='fresh' cannot reset '{missed[0]}': its module has no reset_parameters(); add one.")
    more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
    warn_once(
        f"start='fresh' keeps the model's values of {', '.join(missed[:3])}{more}: their modules have no "
        "reset_parameters()."
    )


def _can_be_marked(value: torch.Tensor) -> bool:
    return value.requires_grad and value.is_floating_point()


def _has_trainable(module: nn.Module) -> bool:
    return any(value.requires_grad for value in module.parameters())


def _takes(function: Any, count: int) -> bool:
    """Return whether a function can be called with `count` arguments, and not with fewer."""
    if not callable(function):
        return False
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a compiled function, as of a scripted module
        return count == 0
    required = [p for p in given if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(required) == count


def _reset_parametrized(module: nn.Module) -> list[nn.Parameter]:
    """Redraw a layer whose tensors are computed from others (weight norm), through the inverse of that computation."""
    reset = getattr(module, "reset_parameters", None)
    if not parametrize.is_parametrized(module) or not _takes(reset, 0) or not _has_trainable(module):
        return []
    lists: Any = module.parametrizations
    with torch.no_grad(), parametrize.cached():  # in this block the tensors can be written to
        before = {name: getattr(module, name) for name in lists}
        reset()  # type: ignore[misc]
        drawn = {name: value.clone() for name, value in before.items()}
    try:
        for name, value in drawn.items():
            setattr(module, name, value)
    except (NotImplementedError, RuntimeError) as error:
        raise InputError(f"start='fresh' cannot reset a parametrized {type(module).__name__}: {error}") from error
    return list(module.parameters())


def _whole_initializers(model: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield the functions with which modules initialize all of their parts, inner modules first."""
    handled: set[nn.Module] = set()
    found: list[Callable[[], Any]] = []
    for module in model.modules():  # outer ones first: a Hugging Face model initializes the models inside of it
        whole, each = getattr(module, "init_weights", None), getattr(module, "_init_weights", None)
        if module in handled or not _has_trainable(module):
            continue
        if _takes(whole, 0) and callable(each):
            handled |= set(module.modules())
            found.append(lambda module=module: _initialize_again(module))  # type: ignore[misc]
        elif _takes(whole, 0):
            found.append(whole)  # type: ignore[arg-type]
        elif _takes(each := each or _function_beside(module), 1):
            handled |= set(module.modules())
            found.append(lambda module=module, each=each: module.apply(each))  # type: ignore[misc]
    yield from reversed(found)


def _function_beside(module: nn.Module) -> Any:
    """Return the function of timm's that initializes the parts of this network, if its file has one."""
    if not type(module).__module__.startswith("timm.models."):
        return None
    beside = vars(sys.modules[type(module).__module__])
    return next((value for name, value in beside.items() if name.endswith("init_weights") and _takes(value, 1)), None)


def _initialize_again(model: Any) -> None:
    """Let a Hugging Face model initialize itself although it has done so before."""
    for holder in (*model.modules(), *model.parameters(), *model.buffers()):
        if getattr(holder, _INITIALIZED, False):
            setattr(holder, _INITIALIZED, False)
    model.init_weights()


def _reset_adapters(model: nn.Module) -> None:
    """Redraw adapters as peft does when it adds them, by the function that their layers have for it."""
    configs: Any = next((m.peft_config for m in model.modules() if hasattr(m, "peft_config")), {})
    for module in model.modules():
        parts = [getattr(module, part, None) for part in getattr(module, "adapter_layer_names", ())]
        names = {name: None for part in parts if isinstance(part, nn.Module) for name in part}  # type: ignore[attr-defined]
        resets = [name for name in dir(module) if re.fullmatch(r"reset_[a-z0-9]+_parameters", name)] if names else []
        if len(resets) != 1:
            continue
        reset = getattr(module, resets[0])
        for name in names:
            how = getattr(configs.get(name), "init_lora_weights", True)
            if how is False:  # each matrix as any linear layer, which is done
                continue
            if how not in (True, "gaussian"):
                raise InputError(
                    f"start='fresh' cannot redraw adapters with init_lora_weights={how!r}, which are computed from the "
                    "original weights: use start='model'."
                )
            others = list(inspect.signature(reset).parameters)[1:]  # the first is the adapter
            reset(name, **{other: getattr(configs.get(name), other, True) for other in others})


def _magnitudes(model: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return the magnitudes of DoRA with what they are before training: the norms of the base's weights."""
    found = []
    modules: Iterator[Any] = model.modules()
    for module in modules:
        vectors = getattr(module, "lora_magnitude_vector", None)
        for layer in vectors.values() if isinstance(vectors, nn.Module) else ():  # type: ignore[operator]
            base = module.get_base_layer()
            nothing = torch.zeros((), dtype=base.weight.dtype, device=base.weight.device)
            found.append((layer.weight, layer.get_weight_norm(base.weight.detach().clone(), nothing, 1.0)))
    return found
