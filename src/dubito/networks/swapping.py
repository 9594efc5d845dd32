"""Change modules of a private network: `swap_class` keeps the tensors and their names, `put` replaces the module.

Hooks, swapped weights and gradients per layer need plain modules: `uncompile_parts` replaces those that `torch.compile`
made, and `switch_off_checkpointing` ends the second calls of parts in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn
from torch.overrides import TorchFunctionMode

from dubito.core.once import warn_once
from dubito.core.params import COMPILED, is_compiled

_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}

# Modules with a fused path that reads the weights of their parts instead of calling them.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
# The attributes by which these modules decide on the fused path, before they read any weight.
_DECIDED_BY = ("activation_relu_or_gelu", "use_nested_tensor")
# How modules of Hugging Face and of timm say that they are checkpointed.
FLAGS = ("gradient_checkpointing", "grad_checkpointing")


class Swapped(nn.Module):
    """The base of mixin classes for `swap_class`.

    The module is still an instance of its own class, which comes next in the method resolution order.
    """

    prefix: ClassVar[str] = "Swapped"
    """The prefix of the names of the combined classes."""

    def __reduce__(self) -> Any:  # combined classes are created at run time, so copies cannot find them by name
        return _blank, type(self).__bases__, self.__getstate__()


def swap_class(module: nn.Module, mixin: type[Swapped], **attributes: Any) -> None:
    """Mix a class into the class of a module of a private network, in place, and set its attributes."""
    module.__class__ = _mixed(mixin, type(module))
    vars(module).update(attributes)


def restore_class(module: nn.Module, attributes: tuple[str, ...]) -> None:
    """Undo `swap_class` and delete these attributes."""
    module.__class__ = type(module).__bases__[1]
    for name in attributes:
        del vars(module)[name]


def put(network: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put a module in the place of another of a private network, in place; return the network.

    >>> put(nn.Sequential(nn.Linear(2, 2)), "0", nn.ReLU())
    Sequential(
      (0): ReLU()
    )
    """
    if not name:
        return module
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, module)
    return network


def _mixed(mixin: type[Swapped], plain: type[nn.Module]) -> type[nn.Module]:
    """Return the combined class, created on first use."""
    if (mixin, plain) not in _CLASSES:
        made = type(f"{mixin.prefix}{plain.__name__}", (mixin, plain), {"__module__": mixin.__module__})
        _CLASSES.setdefault((mixin, plain), made)
    return _CLASSES[mixin, plain]


def _blank(mixin: type[Swapped], plain: type[nn.Module]) -> nn.Module:
    cls = _mixed(mixin, plain)
    return cls.__new__(cls)


def fused_modules(network: nn.Module) -> list[nn.Module]:
    """Return the modules that may take a fused path, which reads weights instead of calling layers."""
    return [module for module in network.modules() if isinstance(module, _FUSED)]


@contextmanager
def calling_every_layer(fused: Sequence[nn.Module]) -> Iterator[None]:
    """Turn off the fused paths of these modules of a private network, so that their layers are called.

    Torch's own switch affects all threads.
    """
    if not fused:
        yield
        return
    before = [(vars(module), name) for module in fused for name in _DECIDED_BY if vars(module).get(name)]
    values = [own[name] for own, name in before]
    for own, name in before:
        own[name] = False
    try:
        with _Watching():
            yield
    finally:
        for (own, name), value in zip(before, values, strict=True):
            own[name] = value


class _Watching(TorchFunctionMode):
    """Do nothing; torch takes no fused path while a function mode is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Uncompiled(nn.Module):
    """Stands in the place of a compiled part, with the same parameter names, and calls the plain module."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.add_module(COMPILED, plain)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # the network may use attributes of its part
            if name == COMPILED:
                raise
            return getattr(super().__getattr__(COMPILED), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the plain module."""
        return self.get_submodule(COMPILED)(*args, **kwargs)


def uncompile_parts(model: nn.Module) -> nn.Module:
    """Replace compiled parts of a private network by the modules that they were made from, in place.

    A compiled forward pass knows nothing of hooks and other weights that come after it was compiled: dropout that
    should stay on would be off. The names of parameters stay the same.
    """
    for module in list(model.modules()):
        for name, part in module.named_children():
            if is_compiled(part):
                setattr(module, name, Uncompiled(part.get_submodule(COMPILED)))
    return model


def switch_off_checkpointing(model: nn.Module) -> None:
    """Switch checkpointing off in a private network whose calls draw noise or have weights of their own.

    Its second call would not be the same as the first. Networks that call `torch.utils.checkpoint` without a flag are
    refused when they are trained.
    """
    flagged = [(module, flag) for module in model.modules() for flag in FLAGS if getattr(module, flag, False) is True]
    for module, flag in flagged:
        setattr(module, flag, False)
    if flagged:
        warn_once(
            "Gradient checkpointing is switched off in the copy of the model that is trained, because this method "
            "changes the network from call to call. Training takes more memory; the result is the same."
        )
