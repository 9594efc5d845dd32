"""`DataSet`: pairs of tensors, and the statistics they were standardised with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.errors import InputError, MissingDataError

if TYPE_CHECKING:
    from dubito.data.describe import TableDescription
    from dubito.data.transform import TableTransform
    from dubito.data.vocabulary import Vocabulary

Task = Literal["classification", "regression"]
Pair = tuple[Tensor, Tensor]


class Standardizer(NamedTuple):
    """The map `z = (x − loc) / scale`, with one `loc` and one `scale` (a standard deviation) per feature or channel.

    Example:
        >>> loc, scale = standardizer = Standardizer.fit(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        >>> loc.tolist(), scale.tolist()  # the second feature is constant: its deviation is guarded
        ([2.0, 5.0], [1.0, 1.0])
        >>> standardizer.encode(torch.tensor([[4.0, 5.0]])).tolist()
        [[2.0, 0.0]]
    """

    loc: Tensor
    scale: Tensor

    @classmethod
    @checked_arguments
    def fit(cls, values: Tensor) -> Standardizer:
        """Fit to `[N, features]` or `[N, channels, ...]`: means and population standard deviations over all other axes.

        A feature without variation gets the scale 1, so that it becomes 0 instead of NaN.
        """
        if values.ndim == 0 or not values.numel() or values.is_complex():
            shape = tuple(values.shape)
            raise InputError(f"A standardizer is fitted to real numbers [N, features], got {values.dtype} {shape}.")
        values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
        axes = [axis for axis in range(values.ndim) if axis != 1]
        variance, loc = torch.var_mean(values, dim=axes, correction=0, keepdim=True)
        # The range decides, because the computed deviation of a constant can be rounding noise above zero.
        constant = values.amax(axes, keepdim=True) == values.amin(axes, keepdim=True)
        return cls(loc.squeeze(0), torch.where(constant, 1.0, variance.sqrt()).squeeze(0))

    @checked_arguments
    def encode(self, values: Tensor) -> Tensor:
        """Standardise: original units in, `(values − loc) / scale` out, in the dtype of `values`."""
        loc, scale = self._statistics(values)
        return values.to(loc.dtype).sub(loc).div_(scale).to(_floating(values, loc))

    @checked_arguments
    def decode(self, values: Tensor) -> Tensor:
        """Undo `encode`: standardised values in, original units out, in the dtype of `values`."""
        loc, scale = self._statistics(values)
        return values.to(loc.dtype).mul(scale).add_(loc).to(_floating(values, loc))

    def _statistics(self, values: Tensor) -> tuple[Tensor, Tensor]:
        try:
            fits = torch.broadcast_shapes(values.shape, self.loc.shape) == values.shape
        except RuntimeError:
            fits = False
        if not fits or values.is_complex():
            shapes = f"{tuple(values.shape)} of {values.dtype}, and it was fitted to features {tuple(self.loc.shape)}"
            raise InputError(f"The standardizer cannot be used on values {shapes}.")
        return self.loc.to(values.device), self.scale.to(values.device)


def _floating(values: Tensor, other: Tensor) -> torch.dtype:
    """Return the dtype of the values, or that of `other` if they are whole numbers."""
    return values.dtype if values.is_floating_point() else other.dtype


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set that is ready for `fit` and `evaluate`.

    Each part is a pair `(inputs, targets)`. Inputs are float32 (`[N, features]`, or `[N, C, H, W]` for images) or int64
    token numbers (`[N, length]`); targets are int64 class numbers `[N]` or float32 values `[N, 1]`. Everything is
    standardised with the statistics of the training part alone.

    Attributes:
        name: What `dubito.data.load` calls it.
        task: `"classification"` or `"regression"`.
        parts: The pairs, under `"train"`, `"validation"` and `"test"`.
        num_outputs: The number of outputs a network for it needs: the classes, or 1 for regression.
        encoder: What turned raw inputs into tensors: a `Standardizer` (for images it works on pixels in [0, 1]), a
            `Vocabulary` (text) or a `TableTransform` (tables). New inputs go through its `encode`.
        target_scale: Regression only: `target_scale.decode(prediction.mean)` is in original units; a standard deviation
            is multiplied by `target_scale.scale`.
        class_names: Classification only, in the order of the class numbers.
        feature_names: The columns of the inputs, where they have names.
        description: Tables only: what was understood of each column.
        texts: Tables only: for each part the columns of free text as they are, which the inputs do not tell.
    """

    name: str
    task: Task
    parts: Mapping[str, Pair]
    num_outputs: int
    encoder: Standardizer | Vocabulary | TableTransform
    target_scale: Standardizer | None = None
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    description: TableDescription | None = None
    texts: Mapping[str, Mapping[str, Sequence[str | None]]] = field(default_factory=dict)

    @property
    def train(self) -> Pair:
        """The training part; a set that has only a test part (KMNIST, notMNIST) raises a `MissingDataError`."""
        if "train" not in self.parts:
            raise MissingDataError(f"The data set {self.name!r} has only a test part: train on another one.")
        return self.parts["train"]

    @property
    def validation(self) -> Pair | None:
        """The validation part, taken from the training part, or None if none was requested."""
        return self.parts.get("validation")

    @property
    def test(self) -> Pair:
        """The test part."""
        return self.parts["test"]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input, without the batch axis."""
        return tuple(self.test[0].shape[1:])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{part}={len(pair[1])}" for part, pair in self.parts.items())
        return (
            f"DataSet({self.name!r}, {self.task}, {sizes}, "
            f"input_shape={self.input_shape}, num_outputs={self.num_outputs})"
        )
