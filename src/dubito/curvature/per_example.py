"""Gradients of parameters without a layer rule: slower, but correct for every differentiable model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.core import batches, params
from dubito.core.locks import ProcessLock
from dubito.networks.twin import copied

if TYPE_CHECKING:
    from dubito.curvature.engine import Engine
    from dubito.networks.subspace import SubspaceNetwork


# From a network, or a part of it, and inputs to its output.
Call = Callable[[nn.Module, Any], Tensor]
# The type of `by_vmap` and `by_loop`.
Pull = Callable[..., dict[str, Tensor]]

# The number of examples that are differentiated at once.
SIDE_BY_SIDE = 16


def by_vmap(
    model: nn.Module, names: list[str], inputs: Any, columns: Tensor, call: Call = params.call
) -> dict[str, Tensor]:
    """Return ``[V, B, *shape]`` per parameter for columns ``[V, B, ...]``, through `torch.func`.

    Args:
        model: The network, or a part of it.
        names: The parameters.
        inputs: Its inputs, one row per example.
        columns: Gradients at its output.
        call: How it is called on inputs.

    Raises:
        RuntimeError: Some operators (recurrent kernels, custom autograd functions, checkpointing) do not allow it.
    """
    own = dict(model.named_parameters())
    chosen = {name: own[name].detach() for name in names}

    def one(index: Tensor, columns: Tensor) -> dict[str, Tensor]:
        example = batches.take(inputs, index.reshape(1))

        def run(values: dict[str, Tensor]) -> Tensor:
            with params.swapped(model, values):
                return call(model, example)

        pull = torch.func.vjp(run, chosen)[1]
        return torch.func.vmap(pull)(columns.unsqueeze(1))[0]

    numbers = torch.arange(columns.shape[1], device=columns.device)
    # Without no_grad autograd would record the products too, for parameters with rules that also ask for gradients:
    # some operators have no second derivative, and the results would not be plain numbers.
    with torch.no_grad(), _quiet():
        found = torch.func.vmap(one, in_dims=(0, 1), chunk_size=SIDE_BY_SIDE)(numbers, columns)
    return {name: value.transpose(0, 1) for name, value in found.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore vmap's warnings about operators that it loops over: without vmap, we would loop ourselves.

    All threads share one list of warning filters: the first thread adds a filter, and the last one restores the list.
    """
    with _filtering.lock:
        _filtering.users += 1
        if _filtering.users == 1:
            _filtering.filters = warnings.catch_warnings()
            _filtering.filters.__enter__()
            warnings.filterwarnings("ignore", message=".*performance drop.*")
    try:
        yield
    finally:
        with _filtering.lock:
            _filtering.users -= 1
            if _filtering.users == 0:
                _filtering.filters.__exit__(None, None, None)


class _Filtering:
    def __init__(self) -> None:
        self.users, self.lock = 0, ProcessLock()
        self.filters = warnings.catch_warnings()


_filtering = _Filtering()


def by_loop(
    model: nn.Module, names: list[str], inputs: Any, columns: Tensor, call: Call = params.call
) -> dict[str, Tensor]:
    """Return the same as `by_vmap`, one column and example at a time, through `backward`."""
    own = dict(model.named_parameters())
    found = {name: columns.new_zeros(*columns.shape[:2], *own[name].shape) for name in names}
    for n in range(columns.shape[1]):
        with torch.enable_grad():
            output = call(model, batches.map_leaves(torch.clone, batches.take(inputs, slice(n, n + 1))))
        for v, column in enumerate(columns if output.requires_grad else ()):
            model.zero_grad(set_to_none=True)
            output.backward(column[n : n + 1], retain_graph=True)
            for name in names:
                grad = own[name].grad
                if grad is not None:
                    found[name][v, n] = grad.to_dense()
    model.zero_grad(set_to_none=True)
    return found


class SubspaceGradients:
    """The products ``J P`` of the gradients of a network's weights, in factored form, with a subspace's directions.

    Args:
        network: A network whose only parameter is the vector of coordinates.
        kind: The class `Engine`, which uses this one.
    """

    def __init__(self, network: SubspaceNetwork, kind: type[Engine]) -> None:
        model, self.subspace = network.parts
        self.coordinates, self.weights = network.z, self.subspace.weights
        self.model = copied(model)
        self.engine = kind(self.model, self.weights.names)
        self.moved = params.of(self.engine.model)
        self.base = params.map_values(torch.clone, self.moved)
        self.directions = self.weights.fill(self.subspace.basis.mT.to(self.coordinates).contiguous())

    @torch.no_grad()
    def pull(self, inputs: Any, columns: Tensor) -> dict[str, Tensor]:
        """Return ``{"z": [V, B, 1, r]}`` for output columns ``[V, B, ...]``."""
        for name, value in self.subspace.merge(self.base, self.coordinates.detach().reshape(-1)).items():
            self.moved[name].copy_(value)
        tape = self.engine.run(inputs)
        with tape.lend() as memory:
            factors = tape.pull(columns, memory)
            along = [factors[name].dot(self.directions[name]) for name in self.weights.names]
            return {"z": torch.stack(along).sum(0).unsqueeze(2)}
