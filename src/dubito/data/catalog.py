"""Load data sets by name, list which are available, and check their files."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import numpy as np
import torch

from dubito.core.arguments import checked_arguments
from dubito.core.errors import FileFormatError, InputError, MissingDataError
from dubito.data import images, numeric, text, toys
from dubito.data.dataset import DataSet, Task
from dubito.data.formats import wrong_checksums
from dubito.data.source import CatalogEntry, Raw, assemble

_SOURCES = {source.name: source for source in (*images.SOURCES, *numeric.SOURCES, *text.SOURCES, *toys.SOURCES)}


@dataclass(frozen=True)
class Availability:
    """One row of `available()`: `where` is the folder or package of the data set, or why it was not found."""

    name: str
    task: Task
    found: bool
    where: str


@dataclass(frozen=True)
class Integrity:
    """The result of `check`: `problems` is empty if nothing is wrong."""

    name: str
    where: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


def names() -> tuple[str, ...]:
    """Return the names that `load` accepts."""
    return tuple(_SOURCES)


@checked_arguments
def load(
    name: str,
    *,
    split: int = 0,
    gap: bool = False,
    validation: float = 0.1,
    limit: int | None = None,
    limit_test: int | None = None,
    like: DataSet | None = None,
    generator: torch.Generator | None = None,
) -> DataSet:
    """Load a data set by name: `"digits"`, `"fashion-mnist"`, `"uci/boston"`, `"mr"`, `"toy/moons"`, … (see `names`).

    Digits, diabetes and the generated toys are always there; the others are looked for in the folders of the
    environment variable `DUBITO_DATA` and in the user's cache. Inputs and regression targets are standardised with the
    mean and the deviation of the rows that remain for training (images per channel, after scaling pixels to [0, 1]); a
    set that has only a test part uses its own, unless `like` is given.

    Args:
        name: One of `names()`.
        split: Which of the fixed train/test splits. UCI sets have the 20 (protein 5) published random ones. Sets
            without an official test part are dealt into folds, stratified by class (digits, diabetes, mcycle and two
            toys 5, text 10), and `split` names the test fold. A generated toy takes it as its seed. All others have
            only 0: the official test part, or (co2) the last fifth of the time.
        gap: UCI only: use the gap split of feature `split`, whose middle third is the test part (Foong et al. 2019,
            "'In-Between' Uncertainty in Bayesian Neural Networks").
        validation: The fraction carved from the training part; 0 for none.
        limit: Draw at most this many rows for training and validation together; the test part stays whole.
        limit_test: Draw at most this many rows for the test part.
        like: Prepare the inputs exactly as those of this data set: what a model trained on `like` must be shown when
            this set serves as out-of-distribution data.
        generator: Draws the rows of `validation`, `limit` and `limit_test`; by default the same ones on every call.

    Example:
        >>> load("digits")
        DataSet('digits', classification, train=1293, validation=144, test=360, input_shape=(1, 8, 8), num_outputs=10)
    """
    source = _source(name)
    return assemble(
        source,
        source.raw(split, gap),
        validation=validation,
        limit=limit,
        limit_test=limit_test,
        like=like,
        generator=generator,
    )


def raw(name: str, split: int = 0) -> Raw:
    """Return a data set as it is in its files; see `load`."""
    return _source(name).raw(split)


def available() -> list[Availability]:
    """List every data set with the place where it was found, or why it was not; no file is read."""
    return [_availability(source) for source in _SOURCES.values()]


@checked_arguments
def check(name: str) -> Integrity:
    """Read every split of a data set and check it against its description.

    Compared are the checksums (if a `SHA256SUMS` lies in the data folder), the numbers of rows, the shapes, the range
    of the labels, and that every number is finite. Raises `MissingDataError` if the set is not here.
    """
    source = _source(name)
    root = source.root()
    problems = (
        [] if root is None else [f"{file} differs from SHA256SUMS" for file in wrong_checksums(root, source.files)]
    )
    splits = [(split, False) for split in range(source.num_splits)]
    splits += [(split, True) for split in range(source.num_gap_splits)]
    for split, gap in splits:
        label = f"{'gap ' if gap else ''}split {split}"
        try:
            problems += [f"{label}: {problem}" for problem in _problems(source, source.raw(split, gap))]
        except FileFormatError as error:
            problems.append(f"{label}: {error}")
    return Integrity(name, _where(source), tuple(problems))


def _source(name: str) -> CatalogEntry:
    if name in _SOURCES:
        return _SOURCES[name]
    close = difflib.get_close_matches(name, _SOURCES, n=1)
    hint = f"did you mean {close[0]!r}" if close else f"known are {', '.join(_SOURCES)}"
    raise InputError(f"There is no data set {name!r}; {hint}.")


def _where(source: CatalogEntry) -> str:
    root = source.root()
    return source.obtain if root is None else str(root)


def _availability(source: CatalogEntry) -> Availability:
    try:
        return Availability(source.name, source.task, True, _where(source))
    except MissingDataError as error:
        return Availability(source.name, source.task, False, str(error))


def _problems(source: CatalogEntry, raw: Raw) -> list[str]:
    """Return the problems of one split."""
    problems = []
    parts = [part for part in (raw.train, raw.test) if part is not None]
    num_rows = sum(len(targets) for _, targets in parts)
    if num_rows != source.num_rows:
        problems.append(f"{num_rows} rows instead of {source.num_rows}")
    for inputs, targets in parts:
        if len(inputs) != len(targets):
            problems.append(f"{len(inputs)} inputs but {len(targets)} targets")
        if inputs.shape[1:] != source.input_shape:
            problems.append(f"inputs of shape {inputs.shape[1:]} instead of {source.input_shape}")
        if not raw.is_text and not np.isfinite(inputs).all():
            problems.append("an input is not finite")
        if raw.class_names and set(np.unique(targets)) != set(range(len(raw.class_names))):
            problems.append(f"labels other than 0 to {len(raw.class_names) - 1}, or a class without a row")
        if not raw.class_names and not np.isfinite(targets).all():
            problems.append("a target is not finite")
    return problems
