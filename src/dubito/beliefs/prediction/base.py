"""`Prediction`, the base class: indexing, concatenation, conversion to arrays and data frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dubito.core.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import pandas as pd


class Prediction(ABC):
    """A batch of predictive distributions, one per datum."""

    # The fields that hold tensors, and which of their axes is the batch.
    _batch_axis: ClassVar[dict[str, int]]

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability or log-density of the targets, one number per datum ``[B]``."""

    @property
    def samples(self) -> Tensor | None:
        """The prediction of each posterior sample, on a leading axis; None if it was not kept."""
        raise NotImplementedError

    @abstractmethod
    def summary(self) -> Self:
        """Return the prediction without its samples; its memory does not depend on their number."""

    @abstractmethod
    def _headlines(self) -> dict[str, Tensor]:
        """Return the quantities that `numpy` gives, by name."""

    def __getitem__(self, index: Any) -> Self:
        """Return the prediction for some of the data; an int gives a batch of one."""
        if not isinstance(index, slice):
            index = torch.atleast_1d(torch.as_tensor(index))
            wrong_mask = index.dtype == torch.bool and len(index) != len(self)
            if index.ndim != 1 or index.is_floating_point() or wrong_mask:
                given = f"{index.dtype} of shape {tuple(index.shape)}"
                raise InputError(f"{len(self)} data are indexed by whole numbers or {len(self)} booleans, not {given}.")
        return self._map(lambda tensor, axis: tensor[(slice(None),) * axis + (index,)])

    def __len__(self) -> int:
        name, axis = next(iter(self._batch_axis.items()))
        return getattr(self, name).shape[axis]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the prediction on another device or in another dtype, as `torch.Tensor.to` does."""
        return self._map(lambda tensor, _: tensor.to(*args, **kwargs))

    def cpu(self) -> Self:
        """Return the prediction on the CPU."""
        return self.to("cpu")

    def numpy(self) -> dict[str, np.ndarray]:
        """Return the main quantities as arrays, by name."""
        return {name: value.detach().cpu().numpy() for name, value in self._headlines().items()}

    def _map(self, function: Callable[[Tensor, int], Tensor]) -> Self:
        tensors = {name: (getattr(self, name), axis) for name, axis in self._batch_axis.items()}
        changed = {name: function(value, axis) for name, (value, axis) in tensors.items() if value is not None}
        return replace(self, **changed)  # type: ignore[type-var]

    @classmethod
    def cat(cls, predictions: Sequence[Self]) -> Self:
        """Concatenate along the batch; all must have the same type and the same number of samples and outputs."""
        if not predictions:
            raise InputError("There is no prediction to concatenate: give at least one.")
        first = predictions[0]
        if any(type(other) is not type(first) for other in predictions):
            kinds = sorted({type(other).__name__ for other in predictions})
            raise InputError(f"Predictions of different kinds cannot be concatenated: {', '.join(kinds)}.")
        joined = {}
        for name, axis in first._batch_axis.items():
            parts = [getattr(prediction, name) for prediction in predictions]
            _check_joinable(name, parts, axis)
            joined[name] = None if parts[0] is None else torch.cat(parts, dim=axis)
        return replace(first, **joined)  # type: ignore[type-var]


def _check_joinable(name: str, parts: list[Tensor | None], axis: int) -> None:
    shapes = {None if part is None else tuple(part.shape[:axis]) + tuple(part.shape[axis + 1 :]) for part in parts}
    if len(shapes) > 1:
        listed = " and ".join(sorted("none" if shape is None else str(shape) for shape in shapes))
        raise InputError(f"Predictions that differ in their {name} (per datum: {listed}) cannot be concatenated.")


def frame(columns: dict[str, Any]) -> pd.DataFrame:
    """Return columns as a pandas data frame; raise an `UnsupportedError` if pandas is not installed."""
    try:
        import pandas as pd
    except ImportError as error:
        raise UnsupportedError("A data frame needs pandas: install it with `pip install 'dubito[tables]'`.") from error
    return pd.DataFrame(columns)
