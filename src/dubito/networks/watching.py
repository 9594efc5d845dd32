"""Watch the calls of a network's modules by forward hooks, which are registered only here.

The network must be private (a copy, or one that no other thread runs), because hooks affect every call. Those of
`watch` are removed when its block ends, also after an error; those of `watch_always` stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dubito.core import params

# Maps the module's name, the module, its arguments and keyword arguments to new arguments, or None to keep them.
Before = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
# The same with the output as the last argument; returns a new output, or None to keep it.
After = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@contextmanager
def watch(
    modules: Mapping[str, nn.Module], *, before: Before | None = None, after: After | None = None
) -> Iterator[None]:
    """Run a callback before or after each call of some modules, for the length of the block.

    Args:
        modules: The modules by name. Script modules take no hooks and are left out.
        before: Called with a call's arguments; may return other arguments.
        after: Called with its output, too; may return another output.
    """
    with ExitStack() as stack:
        for name, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if before is not None:
                handle = module.register_forward_pre_hook(_bound(before, name), with_kwargs=True)
                stack.callback(handle.remove)
            if after is not None:
                handle = module.register_forward_hook(_bound(after, name), with_kwargs=True)
                stack.callback(handle.remove)
        yield


def watch_always(module: nn.Module, after: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
    """Run a callback after each call of a module, before the user's hooks, which may replace its output."""
    module.register_forward_hook(after, with_kwargs=True, prepend=True)


def call_order(model: nn.Module, modules: Mapping[str, nn.Module], inputs: Any) -> list[str]:
    """Return the names of modules in the order in which they return in a forward pass, including repetitions.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> call_order(model, dict(model.named_children()), torch.ones(1, 2))
    ['0', '1']
    """
    called: list[str] = []
    with watch(modules, after=lambda name, *_: called.append(name)), torch.no_grad():
        params.call(model, inputs)
    return called


def inputs_of(model: nn.Module, modules: Mapping[str, nn.Module], inputs: Any) -> dict[str, Tensor]:
    """Return a copy of the first argument of modules in a forward pass; of the last call, if there are several.

    Args:
        model: The network.
        modules: Some of its modules, by name.
        inputs: The inputs of the network.
    """
    seen: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[name] = first_argument(args, kwargs).detach().clone()

    with watch(modules, before=keep), torch.no_grad():
        params.call(model, inputs)
    return seen


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first positional or keyword argument of a call; None if it has none."""
    return next(iter((*args, *kwargs.values())), None)


def _bound(callback: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda *call: callback(name, *call)
