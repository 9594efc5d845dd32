"""Toy data for figures and quick checks: four generated sets, and three 1-D sets with gaps, read from files."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dubito.core.constraints import Count, check
from dubito.core.errors import FileFormatError, InputError
from dubito.data.dataset import Pair, Task
from dubito.data.formats import Array, read_npz
from dubito.data.source import CatalogEntry, Raw, fold_numbers

NUM_TRAIN, NUM_TEST = 200, 1000


def two_moons(num: int, *, noise: float = 0.15, generator: torch.Generator | None = None) -> Pair:
    """Two interleaved half circles of radius 1 in the plane: inputs `[num, 2]`, int64 classes `[num]` in turn.

    Class 0 is `(cos t, sin t)`, class 1 `(1 − cos t, ½ − sin t)`, with `t ~ U(0, π)`, plus noise of deviation `noise`.
    """
    targets = torch.arange(_checked(num)) % 2
    angle = math.pi * torch.rand(num, generator=generator)
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    moons = torch.where(targets[:, None] == 0, circle, torch.tensor([1.0, 0.5]) - circle)
    return moons + noise * torch.randn(num, 2, generator=generator), targets


def gap_sine(
    num: int, *, noise: float = 0.1, gap: tuple[float, float] = (-1.0, 1.0), generator: torch.Generator | None = None
) -> Pair:
    """`y = sin(2x) + ε` on `[−3, 3]` without a gap in the middle; `gap=(0, 0)` fills it. Both are `[num, 1]`."""
    low, high = gap
    if not -3 <= low <= high <= 3:
        raise InputError(f"`gap` must be an interval inside [-3, 3], got {gap}.")
    position = -3 + (6 - (high - low)) * torch.rand(_checked(num), 1, generator=generator)
    inputs = torch.where(position < low, position, position + (high - low))
    return inputs, (2 * inputs).sin() + noise * torch.randn(num, 1, generator=generator)


def cubic(num: int, *, noise: float = 3.0, half_width: float = 4.0, generator: torch.Generator | None = None) -> Pair:
    """`y = x³ + ε` on `[−half_width, half_width]` (Hernández-Lobato and Adams 2015). Both are `[num, 1]`."""
    inputs = half_width * (2 * torch.rand(_checked(num), 1, generator=generator) - 1)
    return inputs, inputs**3 + noise * torch.randn(num, 1, generator=generator)


def growing_noise(num: int, *, generator: torch.Generator | None = None) -> Pair:
    """`y = sin(2x) + (0.05 + 0.15 |x|) ε` on `[−3, 3]`: the noise depends on the input. Both are `[num, 1]`."""
    inputs = 6 * torch.rand(_checked(num), 1, generator=generator) - 3
    noise = (0.05 + 0.15 * inputs.abs()) * torch.randn(num, 1, generator=generator)
    return inputs, (2 * inputs).sin() + noise


def _checked(num: int) -> int:
    check("num", Count, num)
    return num


def _generated_source(
    name: str,
    task: Task,
    num_inputs: int,
    train: Callable[..., Pair],
    test: Callable[..., Pair],
    class_names: tuple[str, ...] = (),
) -> CatalogEntry:
    """A toy whose split `k` is generated from the seed `k`."""

    def read(root: Path, split: int, gap: bool) -> Raw:
        generator = torch.Generator().manual_seed(split)
        pairs = train(NUM_TRAIN, generator=generator), test(NUM_TEST, generator=generator)
        train_arrays, test_arrays = ((inputs.numpy(), targets.numpy().reshape(-1)) for inputs, targets in pairs)
        return Raw(train_arrays, test_arrays, class_names=class_names)

    num_rows = NUM_TRAIN + NUM_TEST
    return CatalogEntry(f"toy/{name}", task, read, num_rows, (num_inputs,), num_splits=20, obtain="generated")


def _stored_source(name: str) -> CatalogEntry:
    """A toy of 400 points in a file; fold `split` of five is the test part."""
    file = f"toy1d/{name}_1d.npz"

    def read(root: Path, split: int, gap: bool) -> Raw:
        rows = _read_rows(root / file, 2)
        test = fold_numbers(np.zeros(len(rows)), 5) == split
        return Raw((rows[~test, :1], rows[~test, 1]), (rows[test, :1], rows[test, 1]))

    return CatalogEntry(f"toy/{name}", "regression", read, 400, (1,), (file,), num_splits=5, obtain=_DUN)


def _read_my(root: Path, split: int, gap: bool) -> Raw:
    rows = _read_rows(root / "toy1d/my_1d.npz", 4)
    return Raw((rows[:, :1], rows[:, 1]), (rows[:, 2:3], rows[:, 3]))


def _read_rows(path: Path, num_columns: int) -> Array:
    (rows,) = read_npz(path, "data")
    if rows.ndim != 2 or rows.shape[1] != num_columns:
        raise FileFormatError(
            f"The file {path} holds `data` of shape {rows.shape}, not [N, {num_columns}]: fetch it again."
        )
    return rows


_DUN = "the repository cambridge-mlg/DUN carries it"
SOURCES = (
    _generated_source("moons", "classification", 2, two_moons, two_moons, ("upper", "lower")),
    _generated_source("gap-sine", "regression", 1, gap_sine, partial(gap_sine, gap=(0.0, 0.0))),
    _generated_source("cubic", "regression", 1, cubic, partial(cubic, half_width=6.0)),
    _generated_source("growing-noise", "regression", 1, growing_noise, growing_noise),
    _stored_source("agw"),
    _stored_source("matern"),
    CatalogEntry("toy/my", "regression", _read_my, 1002, (1,), ("toy1d/my_1d.npz",), obtain=_DUN),
)
