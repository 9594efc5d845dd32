"""Change modules of a private network: `swap_class` keeps the tensors and their names, `put` replaces the module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn
from torch.overrides import TorchFunctionMode

_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


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


# Modules with a fused path that reads the weights of their parts instead of calling them.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
# The attributes by which these modules decide on the fused path, before they read any weight.
_DECIDED_BY = ("activation_relu_or_gelu", "use_nested_tensor")


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
