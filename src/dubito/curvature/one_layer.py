"""Curvature and covariance if all random weights are one whole linear layer: a Kronecker product per example."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.curvature import matrices as linalg
from dubito.curvature.factor import Factor
from dubito.curvature.factors import OuterFactor
from dubito.curvature.layer_factors import layer_factors
from dubito.curvature.products import gram
from dubito.networks.selection import Selection


@dataclass
class OneLayerCurvature:
    """``JᵀJ`` of some examples, ``Σ_n W_n ⊗ a_n a_nᵀ`` with ``W_n = Σ_v g_vn g_vnᵀ``."""

    weights: Tensor  # ``[O, O, B]``
    inputs: Tensor  # ``[B, I]``, as in `OneLayer`
    has_bias: bool

    @property
    def size(self) -> int:
        """The number of numbers that are held."""
        return self.weights.numel() + self.inputs.numel()

    @classmethod
    def joined(cls, parts: list[OneLayerCurvature]) -> OneLayerCurvature:
        """Return the curvature of the examples of all parts."""
        weights = torch.cat([part.weights for part in parts], dim=2)
        return cls(weights, torch.cat([part.inputs for part in parts]), parts[0].has_bias)

    def add_to(self, total: Tensor) -> None:
        """Add it to the upper half of `total`.

        It costs about `B·O²·I²/4`, not `V·B·O²·I²`, because of the symmetry in outputs and in inputs.
        """
        weights, outputs, width = self.weights, len(self.weights), self.inputs.shape[-1] - self.has_bias
        first_bias, features = outputs * width, self.inputs[:, :width]
        whole = total[:first_bias, :first_bias].unflatten(1, (outputs, width)).unflatten(0, (outputs, width))
        for o in range(outputs):
            whole[o, :, o:] += gram(features, weights[o, o:]).transpose(0, 1).to(total.device)
        if self.has_bias:
            across = torch.einsum("opb,bi->oip", weights, features).to(total.device)
            total[:first_bias, first_bias:] += across.flatten(0, 1)
            total[first_bias:, first_bias:] += weights.sum(-1).to(total.device)


@dataclass
class OneLayer:
    """The case that all random weights are one whole linear layer called once per example: ``J = G ⊗ (a, 1)``."""

    grads: Tensor  # ``[V, B, O]``
    inputs: Tensor  # ``[B, I]``, with a column of ones if the bias is random
    has_bias: bool  # whether the bias is random; the flat selection then holds weight ``[O, I]`` and bias ``[O]``

    @property
    def curvature(self) -> OneLayerCurvature:
        """The terms of ``JᵀJ``."""
        weights = torch.einsum("vbo,vbp->opb", self.grads, self.grads)
        return OneLayerCurvature(weights, self.inputs, self.has_bias)

    def blocks(self, flat: Tensor) -> Tensor:
        """Return a matrix over the flat selection as ``[O, I, O, I]``."""
        outputs, inputs = self.grads.shape[-1], self.inputs.shape[-1]
        if not self.has_bias:
            return flat.reshape(outputs, inputs, outputs, inputs)
        size = outputs * (inputs - 1)
        whole = flat.new_empty(outputs, inputs, outputs, inputs)
        whole[:, :-1, :, :-1] = flat[:size, :size].reshape(outputs, inputs - 1, outputs, inputs - 1)
        whole[:, :-1, :, -1] = flat[:size, size:].reshape(outputs, inputs - 1, outputs)
        whole[:, -1, :, :-1] = flat[size:, :size].reshape(outputs, outputs, inputs - 1)
        whole[:, -1, :, -1] = flat[size:, size:]
        return whole

    def variance(self, covariance: linalg.DenseCovariance) -> Tensor:
        """Return the diagonal of ``J Σ Jᵀ``, ``[V, B]``; it costs `V·B·I²` if all examples share the columns."""
        if self.grads.stride(1) != 0:
            return self.gram(covariance).diagonal(dim1=1, dim2=2).mT
        columns = self.grads[:, 0]
        known = covariance.memory.get("columns")
        if known is None or not torch.equal(known, columns):  # the same for every batch of one prediction
            covariance.memory |= {"columns": columns, "mixed": self._mixed(columns, covariance)}
        return ((self.inputs @ covariance.memory["mixed"]) * self.inputs).sum(-1)

    def _mixed(self, columns: Tensor, covariance: linalg.DenseCovariance) -> Tensor:
        """Return ``(g_v ⊗ 1)ᵀ Σ (g_v ⊗ 1)``, ``[V, I, I]``, from a root of Σ, which is cheaper than Σ."""
        outputs, width = columns.shape[1], self.inputs.shape[-1] - self.has_bias
        mixed: Tensor | None = None
        for root in covariance.root_columns():
            if mixed is None:
                columns = columns.to(root)
                mixed = root.new_zeros(len(columns), *[self.inputs.shape[-1]] * 2)
            root = torch.nn.functional.pad(root, (0, 0, 0, outputs * self.inputs.shape[-1] - len(root)))
            rows = torch.tensordot(columns, root[: outputs * width].unflatten(0, (outputs, width)), dims=1)
            if self.has_bias:
                rows = torch.cat([rows, (columns @ root[outputs * width :])[:, None]], dim=1)
            mixed.baddbmm_(rows, rows.mT)
        assert mixed is not None
        return mixed.to(self.inputs)

    def gram(self, covariance: linalg.DenseCovariance) -> Tensor:
        """Return ``J Σ Jᵀ`` per example, ``[B, V, V]``, from the blocks of Σ between outputs."""
        outputs, blocks = self.grads.shape[-1], self._blocks_of(covariance)
        between = self.inputs.new_empty(len(self.inputs), outputs, outputs)
        for o in range(outputs):
            half = torch.einsum("bi,ipj->pbj", self.inputs, blocks[o, :, o:, :])
            between[:, o, o:] = between[:, o:, o] = (half * self.inputs).sum(-1).mT
        if self.grads.stride(1) == 0:
            return self.grads[:, 0] @ between @ self.grads[:, 0].mT
        return torch.einsum("vbo,bop,ubp->bvu", self.grads, between, self.grads)

    def _blocks_of(self, covariance: linalg.DenseCovariance) -> Tensor:
        if "blocks" not in covariance.memory:
            covariance.memory["blocks"] = self.blocks(covariance.matrix.to(self.inputs.dtype))
        return covariance.memory["blocks"]


def one_layer(factors: dict[str, Factor], selection: Selection) -> OneLayer | None:
    """Return the `OneLayer` of these factors; None if the random weights are not one whole linear layer."""
    groups = layer_factors({name: factors[name] for name in selection.names}, selection)
    if len(groups) != 1 or groups[0].names != tuple(selection.names) or not selection.is_whole(selection.names[0]):
        return None
    if not isinstance(factor := groups[0].factor, OuterFactor):
        return None
    return OneLayer(factor.grads, factor.inputs, has_bias=len(groups[0].names) == 2)
