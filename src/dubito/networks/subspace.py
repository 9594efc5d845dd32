r"""`Subspace`: a few directions through the weights of a network, $w(z) = \hat w + P z$, as selection and network."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dubito.core import params
from dubito.core.errors import InputError
from dubito.core.params import Params
from dubito.networks.selection import Selection
from dubito.networks.twin import copied, twin


class Subspace(Selection):
    """A selection whose random numbers are the coordinates of an affine subspace.

    Args:
        weights: The weights that move.
        offset: Where they are at z = 0, ``[D]``.
        basis: Orthogonal directions ``[D, r]``, of any lengths.
    """

    def __init__(self, weights: Selection, offset: Tensor, basis: Tensor) -> None:
        super().__init__(weights.shapes, weights.indices)
        if basis.shape[0] != weights.num_weights or offset.shape != basis.shape[:1]:
            raise InputError(f"A basis {tuple(basis.shape)} does not fit {weights.num_weights} weights.")
        self.weights, self.offset, self.basis = weights, offset, basis.contiguous()
        self.num_weights = basis.shape[1]

    def lift(self, coordinates: Tensor) -> Tensor:
        """Return the weights ``[..., D]`` at coordinates ``[..., r]``."""
        return self.offset.to(coordinates) + coordinates @ self.basis.to(coordinates).mT

    def ravel(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the coordinates of the point of the subspace that is closest to some weights."""
        flat = self.weights.ravel(params)
        basis = self.basis.to(flat)
        return ((flat - self.offset.to(flat)) @ basis) / basis.square().sum(0)

    def merge(self, base: Mapping[str, Tensor], flat: Tensor) -> Params:
        """Return `base` with the weights at coordinates ``[r]`` or ``[S, r]``."""
        if flat.shape[-1] != self.num_weights:
            raise InputError(f"Expected {self.num_weights} coordinates, got a vector of {flat.shape[-1]}.")
        return self.weights.merge(base, self.lift(flat))

    def to_state(self) -> dict[str, Any]:
        """Return tensors and plain values from which `from_state` makes the subspace again."""
        return {"weights": self.weights.to_state(), "offset": self.offset, "basis": self.basis}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], model: nn.Module) -> Subspace:
        """Undo `to_state`."""
        return cls(Selection.from_state(state["weights"], model), state["offset"], state["basis"])

    def masks(self) -> NoReturn:
        """A subspace has directions, not single weights."""
        raise InputError("A subspace consists of directions, not of weights: it has no masks, and no |, & or ~.")

    def __repr__(self) -> str:
        return f"Subspace of {self.num_weights} directions through {self.weights.num_weights:,} weights"


class SubspaceNetwork(nn.Module):
    """The network with weights ``w(z)``; its only parameter is z ``[1, r]``.

    Args:
        model: The network; it is not changed and runs in evaluation mode.
        subspace: The subspace.
        coordinates: z ``[r]``; by default 0.
    """

    no_rule_because = "each coordinate of a subspace changes weights of many layers"

    def __init__(self, model: nn.Module, subspace: Subspace, coordinates: Tensor | None = None) -> None:
        super().__init__()
        self._hidden: list[Any] = [
            copied(model).eval().requires_grad_(False),
            subspace,
        ]  # in a list, so that they are not submodules
        start = torch.zeros(subspace.num_weights) if coordinates is None else coordinates
        self.z = nn.Parameter(start.to(next(model.parameters())).reshape(1, -1).clone())

    def __deepcopy__(self, memo: dict[int, Any]) -> SubspaceNetwork:
        """Return a copy with its own coordinates; weights and basis, which never change, are shared."""
        model, subspace = self._hidden
        memo |= {id(subspace): subspace, id(model): twin(model, memo)}
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @property
    def parts(self) -> tuple[nn.Module, Subspace]:
        """The network at the subspace's centre, and the subspace."""
        model, subspace = self._hidden
        return model, subspace

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the network with the weights ``w(z)``."""
        model, subspace = self.parts
        base = {name: value for name, value in model.named_parameters() if name in subspace.weights.indices}
        inputs: Any = kwargs or (args[0] if len(args) == 1 else args)
        return params.functional_call(model, subspace.merge(base, self.z.reshape(-1)), inputs)


def whole_network(model: nn.Module) -> nn.Module:
    """Return the network of which `model` is a subspace, at the subspace's centre; any other is returned as it is."""
    return copied(model._hidden[0]).requires_grad_() if isinstance(model, SubspaceNetwork) else model
