"""Operations on `Params`: a network's weights as a dict from the user's own parameter names to tensors.

Tied parameters appear once, under the first name that `model.named_parameters()` gives them. `Frozen` weights of a base
are in memory that the user's network owns: they are shared, never written to, never saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dubito.core import nests, precision
from dubito.core.errors import InputError
from dubito.core.numeric import all_finite

# The name under which a compiled module holds the one that it was made from.
COMPILED = "_orig_mod"
# What is wrong where parts of a network with other weights are called again in the backward pass.
CHECKPOINTED = (
    "gradient checkpointing calls parts of the network again in the backward pass, when its weights are other ones; "
    "switch it off: model.gradient_checkpointing_disable() for Hugging Face models"
)
Params = dict[str, Tensor]
Buffers = dict[str, Tensor]


class Frozen(nn.Parameter):
    """A parameter whose memory belongs to another network.

    A deep copy of it is an ordinary parameter with memory of its own, which may be written to.

    >>> import copy
    >>> base = nn.Parameter(torch.ones(2), requires_grad=False)
    >>> shared = Frozen.of(base)
    >>> shared.data_ptr() == base.data_ptr(), type(copy.deepcopy(shared)).__name__
    (True, 'Parameter')
    """

    @classmethod
    def of(cls, value: Tensor) -> Self:
        """Return a frozen parameter in the memory of a tensor."""
        return cls(value.detach(), requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found

    def load_(self, value: Tensor) -> None:
        """Refer to other values; the present ones stay as they are, because others may use them."""
        if value.data_ptr() != self.data_ptr() and not torch.equal(value.to(self), self.detach()):
            self.data = value.detach().to(self).clone()


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the frozen parameters of a private network."""
    return [name for name, value in model.named_parameters() if isinstance(value, Frozen)]


def of(model: nn.Module) -> Params:
    """Return a copy of every parameter of `model`, detached; those of a frozen base are not copied."""
    own = model.named_parameters()
    return {name: value.detach() if isinstance(value, Frozen) else value.detach().clone() for name, value in own}


def buffers_of(model: nn.Module) -> Buffers:
    """Return a copy of every buffer of `model`."""
    return {name: value.detach().clone() for name, value in model.named_buffers()}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the network inside `DistributedDataParallel`, `DataParallel` or `torch.compile`, with its own names."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif is_compiled(model):
            model = model.get_submodule(COMPILED)
        else:
            return model


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of `torch.compile`."""
    return COMPILED in module._modules and type(module).__module__.startswith("torch._dynamo")


def check_finite(model: nn.Module) -> None:
    """Raise an error if a weight of a network is NaN or infinite."""
    for name, value in model.named_parameters():
        if not all_finite([value.detach()]):
            raise InputError(f"The network's weight '{name}' holds NaN or infinite values: load it or train it again.")


def trainable(model: nn.Module) -> list[str]:
    """Return the names of the parameters with ``requires_grad=True``."""
    return [name for name, value in model.named_parameters() if value.requires_grad]


def load_(model: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Copy `params` and `buffers` into `model` (one of our own copies, never the user's)."""
    targets: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, value in {**params, **(buffers or {})}.items():
            if name not in targets or targets[name].shape != value.shape:
                where = tuple(targets[name].shape) if name in targets else "absent"
                raise InputError(f"'{name}' has shape {tuple(value.shape)} here but is {where} in the model.")
            target = targets[name]
            if isinstance(target, Frozen):
                target.load_(value)
            elif target is not value:
                target.copy_(value)
    return model


def call(model: nn.Module, inputs: Any) -> Tensor:
    """Call `model` on one batch of inputs: a tuple as positional arguments, a mapping as keyword arguments.

    If the output has a `logits` field, as those of Hugging Face models have, that field is returned; of a dict with an
    entry ``"out"``, as torchvision's segmentation models give, that entry. Outputs in half precision become float32.
    """
    if precision.is_casting():
        with precision.in_a_network():
            output = _call(model, inputs)
    else:
        output = _call(model, inputs)
    return precision.widened(logits_of(output))


def call_on_few(model: nn.Module, inputs: Any, rows: int = 1) -> Tensor:
    """Call `model` on a copy of the first rows, which it may overwrite."""
    return call(model, nests.map_leaves(torch.clone, nests.take(inputs, slice(0, rows))))


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def logits_of(output: Any) -> Tensor:
    """Return what a model gave if it is a tensor, else its field `logits`, or the entry ``"out"`` of a dict."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        logits = output["logits"] if "logits" in output else output.get("out")
    else:
        logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise InputError(f"The model returned a {type(output).__name__}: it must return a tensor or have `.logits`.")
    return logits


def functional_call(model: nn.Module, params: Mapping[str, Tensor], inputs: Any) -> Tensor:
    """Call `model` with `params` instead of its own parameters; tied weights stay tied."""
    with swapped(model, params):
        return call(model, inputs)


@contextmanager
def swapped(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """Replace the parameters of `model` by `params` (any tensors, also non-leaf ones) inside the block.

    A parameter in half precision is replaced by one of its own dtype, also if the given values have a finer one.
    """
    from torch.nn.utils import stateless

    again = torch.is_grad_enabled()  # and so there may be a backward pass, which calls checkpointed parts again
    own = {name: value.dtype for name, value in model.named_parameters() if value.dtype in precision.HALF}
    given = {name: value.to(own[name]) if name in own else value for name, value in params.items()}
    with (
        torch.autograd.graph.disable_saved_tensors_hooks(CHECKPOINTED) if again else nullcontext(),
        # restored in reverse: a module that is registered under several names is replaced once for each
        stateless._reparametrize_module(model, given, tie_weights=True, stack_weights=True),
    ):
        yield model


def map_values(function: Callable[..., Tensor], first: Params, *others: Params) -> Params:
    """Apply `function` to the tensors of each name.

    >>> import torch
    >>> map_values(torch.add, {"w": torch.ones(2)}, {"w": torch.ones(2)})["w"].tolist()
    [2.0, 2.0]
    """
    for other in others:
        check_same(first, other)
    return {name: function(value, *(other[name] for other in others)) for name, value in first.items()}


def add(a: Params, b: Params, scale: float = 1.0) -> Params:
    """Return ``a + scale * b``."""
    return map_values(lambda x, y: x + scale * y, a, b)


def zeros_like(a: Params) -> Params:
    """Return zeros with the shapes of `a`."""
    return map_values(torch.zeros_like, a)


def clone(a: Params) -> Params:
    """Return a detached copy."""
    return map_values(lambda x: x.detach().clone(), a)


def dot(a: Params, b: Params) -> Tensor:
    """Return the inner product over all names, summed in float64."""
    check_same(a, b)
    return torch.stack([(a[name].double() * b[name].double()).sum() for name in a]).sum()


def stack(many: list[Params]) -> Params:
    """Stack parameter sets along a new leading axis ``[S]``."""
    return {name: torch.stack([one[name] for one in many]) for name in many[0]}


def unstack(stacked: Params) -> list[Params]:
    """Undo `stack`."""
    size = next(iter(stacked.values())).shape[0]
    return [{name: value[s] for name, value in stacked.items()} for s in range(size)]


def num_weights(a: Params) -> int:
    """Return the number of weights."""
    return sum(value.numel() for value in a.values())


def check_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Raise if two parameter sets differ in their names or shapes."""
    if a.keys() != b.keys():
        differing = sorted(a.keys() ^ b.keys())
        raise InputError(f"Two parameter sets differ in their names: {', '.join(differing[:5])}.")
    for name in a:
        if a[name].shape != b[name].shape:
            shapes = f"{tuple(a[name].shape)} in one set and {tuple(b[name].shape)} in another"
            raise InputError(f"'{name}' has shape {shapes}.")


@contextmanager
def differentiable_twice() -> Iterator[None]:
    """Compute attention by its plain implementation, and a hard sigmoid as a clamp: others have one derivative only."""
    with sdpa_kernel(SDPBackend.MATH), _Plain():
        yield


class _Plain(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (_hardsigmoid if func is F.hardsigmoid else func)(*args, **(kwargs or {}))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return F.relu6(input + 3) / 6
