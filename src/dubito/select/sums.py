"""Sum the scores of each weight over the parts of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.core import limits
from dubito.core.limits import numbers
from dubito.curvature.factors import OuterFactor
from dubito.curvature.layer_factors import LayerFactor
from dubito.networks.selection import Selection
from dubito.select.quadratic_scores import ScoreForms


class ScoreSums:
    """The squared derivatives and the curvature of all weights, in float64.

    If the gradient of each example is an outer product, so is its elementwise square, and the sum over examples is one
    matrix product. It is computed for many rows at once, because reading and writing the total is slow.

    Args:
        weights: The weights.
    """

    def __init__(self, weights: Selection) -> None:
        self.weights = weights
        self._total = torch.zeros(2, weights.num_weights, dtype=torch.float64)
        self._rows: dict[tuple[int, int, tuple[str, ...]], list[tuple[Tensor, Tensor]]] = {}
        self._waiting = 0

    @property
    def total(self) -> Tensor:
        """The sums so far, ``[2, D]``."""
        self._multiply()
        return self._total

    def add(self, each: LayerFactor, forms: ScoreForms) -> None:
        """Add the values of both quadratic forms."""
        if isinstance(factor := each.factor, OuterFactor):
            self._wait(0, each.names, forms(factor.grads.transpose(0, 1)), factor.inputs)
        else:
            self._add(0, each.names, factor.form_sum(forms).reshape(2, *factor.shape))

    def add_squares(self, which: int, each: LayerFactor) -> None:
        """Add the squares of gradients to one of the two sums."""
        if isinstance(factor := each.factor, OuterFactor):
            self._wait(which, each.names, factor.grads.square().sum(0).unsqueeze(1), factor.inputs)
        else:
            self._add(which, each.names, factor.square_sum().reshape(1, *factor.shape))

    def _wait(self, first: int, names: tuple[str, ...], rows: Tensor, inputs: Tensor) -> None:
        """Add ``Σ_n rows_n inputs_n²ᵀ`` for rows ``[B, k, O]``, as soon as there are enough of them."""
        # not all batches have both forms, so k may change
        self._rows.setdefault((first, rows.shape[1], names), []).append((rows, inputs.square()))
        self._waiting += rows.numel() + inputs.numel()
        if self._waiting > numbers(limits.current().chunk):
            self._multiply()

    def _multiply(self) -> None:
        for (first, _, names), pairs in self._rows.items():
            rows, squares = (torch.cat(each) for each in zip(*pairs, strict=True))
            self._add(first, names, (rows.flatten(1).mT @ squares).unflatten(0, rows.shape[1:]))
        self._rows.clear()
        self._waiting = 0

    def _add(self, first: int, names: tuple[str, ...], values: Tensor) -> None:
        """Add values ``[k, *shape]`` of a parameter, or of a weight with its bias, to the k sums from `first` on."""
        parts = [values] if len(names) == 1 else [values[..., :-1], values[..., -1]]
        for name, part in zip(names, parts, strict=True):
            self._total[first : first + len(part), self.weights.slices[name]] += part.flatten(1).cpu()
