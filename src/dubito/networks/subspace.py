r"""`Subspace`: a few directions through the weights of a network, $w(z) = \hat w + P z$, as a selection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from dubito.core.errors import InputError
from dubito.core.params import Params
from dubito.networks.selection import Selection


class Subspace(Selection):
    """A selection whose random numbers are the coordinates of an affine subspace.

    Args:
        weights: The weights that move.
        offset: Where they are at z = 0, ``[D]``.
        basis: Orthonormal directions ``[D, r]``.
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
        return (flat - self.offset.to(flat)) @ self.basis.to(flat)

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
