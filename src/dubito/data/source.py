"""Make a `DataSet` from raw arrays: draw rows, fit statistics to the training rows, make tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.core.constraints import Count, Share, check
from dubito.core.errors import InputError
from dubito.data.dataset import DataSet, Pair, Standardizer, Task
from dubito.data.formats import Array, find_root
from dubito.data.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Raw:
    """One split as it is in the files: not standardised, without a validation part.

    Attributes:
        train: `(inputs, targets)`, or None for a set that has only a test part.
        test: `(inputs, targets)`; inputs `[N, features]`, `[N, C, H, W]`, or `[N]` Python strings; targets `[N]`.
        class_names: Empty for regression.
        feature_names: The columns of the inputs, where they have names.
        unit: What a raw input is divided by first: the largest pixel value of images.
    """

    train: tuple[Array, Array] | None
    test: tuple[Array, Array]
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    unit: float = 1.0

    @property
    def is_text(self) -> bool:
        """Whether the inputs are strings."""
        return self.test[0].dtype == object


@dataclass(frozen=True)
class CatalogEntry:
    """One entry of the catalogue: where a data set is, how it is read, and what it must look like."""

    name: str  # what `dubito.data.load` calls it
    task: Task  # `"classification"` or `"regression"`
    read: Callable[[Path, int, bool], Raw]  # `read(root, split, gap)` gives the `Raw` split
    num_rows: int  # rows of training and test part together
    input_shape: tuple[int, ...]  # the shape of one input; `()` for text
    files: tuple[str, ...] = ()  # what must lie under a data folder; empty for sets that need no file
    num_splits: int = 1  # how many train/test splits there are
    num_gap_splits: int = 0  # how many gap splits there are
    obtain: str = ""  # where the files come from, or what provides a set without files
    extra_roots: tuple[Path, ...] = ()  # further folders to look into, such as a system package's

    def root(self) -> Path | None:
        """Return the folder that holds the files, None if no file is needed; raise `MissingDataError` if none does."""
        if not self.files:
            return None
        return find_root(self.name, self.files, extra=self.extra_roots, obtain=self.obtain)

    def raw(self, split: int = 0, gap: bool = False) -> Raw:
        """Read one split."""
        num_splits = self.num_gap_splits if gap else self.num_splits
        kind = "gap split" if gap else "split"
        if num_splits == 0:
            raise InputError(f"The data set {self.name!r} has no gap splits: leave gap=False.")
        if not 0 <= split < num_splits:
            raise InputError(f"The data set {self.name!r} has {num_splits} {kind}(s), numbered from 0; got {split}.")
        return self.read(self.root() or Path(), split, gap)


def fold_numbers(strata: Array, num_folds: int) -> Array:
    """Deal rows into `num_folds` folds of equal size and equal mix of `strata`, the same way on every call.

    Example:
        >>> folds = fold_numbers(np.array([0] * 10 + [1] * 5), 5)
        >>> [int((folds[:10] == k).sum()) for k in range(5)], [int((folds[10:] == k).sum()) for k in range(5)]
        ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1])
    """
    order = torch.randperm(len(strata), generator=torch.Generator().manual_seed(0)).numpy()
    order = order[np.argsort(strata[order], kind="stable")]
    folds = np.empty(len(strata), dtype=np.int64)
    folds[order] = np.arange(len(strata)) % num_folds
    return folds


def carve(
    num_rows: int, *, validation: float, limit: int | None = None, generator: torch.Generator | None = None
) -> tuple[Array, Array]:
    """Draw the rows of the training and the validation part from `num_rows`, each in ascending order.

    First at most `limit` rows are drawn, then `round(validation · drawn)` of these (at least one, if `validation` is
    positive) become the validation part. Without a `generator` the draw is the same on every call.
    """
    check("validation", Share, validation)
    check("limit", Count | None, limit)
    num_drawn = num_rows if limit is None else min(limit, num_rows)
    num_validation = max(1, round(validation * num_drawn)) if validation > 0 else 0
    if num_drawn <= num_validation:
        raise InputError(f"{num_drawn} row(s) leave nothing to train on once {validation:.0%} are held out: add rows.")
    if num_drawn == num_rows and num_validation == 0:
        return np.arange(num_rows), np.arange(0)
    generator = generator or torch.Generator().manual_seed(0)
    order = torch.randperm(num_rows, generator=generator, device=generator.device).cpu().numpy()
    return np.sort(order[num_validation:num_drawn]), np.sort(order[:num_validation])


def assemble(
    source: CatalogEntry,
    raw: Raw,
    *,
    validation: float,
    limit: int | None,
    limit_test: int | None,
    like: DataSet | None,
    generator: torch.Generator | None,
) -> DataSet:
    """Make the tensors of a `DataSet`; all statistics come from the rows of its training part."""
    arrays = _draw_parts(raw, validation, limit, limit_test, generator)
    values = {part: _prepare(raw, inputs) for part, (inputs, _) in arrays.items()}
    fitted_on = "train" if "train" in arrays else "test"
    encoder = _fit_encoder(raw, values[fitted_on]) if like is None else _encoder_of(like, source, raw)
    target_scale = None if source.task == "classification" else Standardizer.fit(_column(arrays[fitted_on][1]))

    parts: dict[str, Pair] = {}
    for part, (_, targets) in arrays.items():
        # Popped, so that the raw and the finished copies of large parts do not pile up.
        inputs = encoder.encode(values.pop(part))
        parts[part] = (
            inputs if raw.is_text else inputs.float(),
            torch.from_numpy(targets.astype(np.int64))
            if target_scale is None
            else target_scale.encode(_column(targets)).float(),
        )
    return DataSet(
        name=source.name,
        task=source.task,
        parts=parts,
        num_outputs=max(1, len(raw.class_names)),
        encoder=encoder,
        target_scale=target_scale,
        class_names=raw.class_names,
        feature_names=raw.feature_names,
    )


def _draw_parts(
    raw: Raw, validation: float, limit: int | None, limit_test: int | None, generator: torch.Generator | None
) -> dict[str, tuple[Array, Array]]:
    parts: dict[str, tuple[Array, Array]] = {}
    if raw.train is not None:
        inputs, targets = raw.train
        train, held_out = carve(len(targets), validation=validation, limit=limit, generator=generator)
        parts["train"] = inputs[train], targets[train]
        if len(held_out):
            parts["validation"] = inputs[held_out], targets[held_out]
    inputs, targets = raw.test
    rows, _ = carve(len(targets), validation=0, limit=limit_test, generator=generator)
    parts["test"] = inputs[rows], targets[rows]
    return parts


def _prepare(raw: Raw, inputs: Array) -> Any:
    """Return the input of the encoder: a list of strings, or a tensor of numbers with pixels in [0, 1]."""
    if raw.is_text:
        return list(inputs)
    # Pixels fit float32; features with large offsets (a year, say) are standardised in float64 first.
    kind = torch.float32 if raw.unit != 1 else torch.float64
    # In the plain order: where numpy leaves the stride of a single channel open, torch may take it for channels-last,
    # and a network that calls `view` behind a convolution fails.
    return torch.from_numpy(inputs).to(kind, memory_format=torch.contiguous_format).div_(raw.unit)


def _column(targets: Array) -> Tensor:
    return torch.from_numpy(targets.astype(np.float64))[:, None]


def _fit_encoder(raw: Raw, values: Any) -> Standardizer | Vocabulary:
    return Vocabulary.fit(values) if raw.is_text else Standardizer.fit(values)


def _encoder_of(like: DataSet, source: CatalogEntry, raw: Raw) -> Standardizer | Vocabulary:
    """Return the encoder of the data set `like`, if the inputs of both are of the same kind."""
    if raw.is_text and isinstance(like.encoder, Vocabulary):
        return like.encoder
    if isinstance(like.encoder, Standardizer) and like.input_shape == source.input_shape:
        return like.encoder
    shape = "text" if raw.is_text else f"inputs of shape {source.input_shape}"
    raise InputError(
        f"{source.name!r} has {shape}, which cannot be prepared like {like.name!r} with inputs of shape "
        f"{like.input_shape}: choose a set with the same kind of inputs."
    )
