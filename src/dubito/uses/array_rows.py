"""Rows of arrays for a fit: weights become numbers of copies, and parts are drawn by content, not by position.

So a weight of 3 gives exactly what three equal rows give, and a weight of 0 what leaving the row out gives. The order
of the rows does not matter, and equal rows are always in one part: no copy of a row that is trained on is held out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dubito.core.errors import InputError

Array = NDArray[Any]

# Fewer rows are not held out: an interval of 90 % cannot be calibrated with less than nine.
FEWEST_HELD_OUT = 10
# No part takes more than this share of the rows.
MOST = 1 / 3


class Parts(NamedTuple):
    """The rows of each part, with a row as often as it has copies.

    Attributes:
        train: The rows to train on.
        validation: The rows that choose settings; may be empty.
        held_out: The rows that calibrate intervals; may be empty.
    """

    train: Array
    validation: Array
    held_out: Array


def copies(weights: Array | None, num_rows: int, seed: int) -> Array:
    """Return how often each row counts ``[N]``.

    Whole numbers are taken as they are. Other weights are scaled to a mean of 1 and rounded up or down at random such
    that each is right on average.

    >>> copies(np.array([2.0, 0.0, 1.0]), 3, seed=0).tolist()
    [2, 0, 1]
    """
    if weights is None:
        return np.ones(num_rows, dtype=np.int64)
    if (weights < 0).any():
        raise InputError(f"A sample weight must not be negative, got {weights.min():g}.")
    if not weights.any():
        raise InputError("All sample weights are zero: at least one row must have a positive weight.")
    if (weights == np.round(weights)).all() and weights.max() < 2**31:
        return weights.astype(np.int64)
    ends = np.cumsum(weights / weights.sum() * num_rows)
    drawn = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).item()
    ends[-1] = num_rows  # not a little less by rounding
    return np.diff(np.floor(ends + drawn), prepend=np.floor(drawn)).astype(np.int64)


def draw_parts(inputs: Array, targets: Array, counts: Array, validation: float, held_out: float, seed: int) -> Parts:
    """Draw the parts of a fit.

    Args:
        inputs: One row per example ``[N, F]``.
        targets: Their targets ``[N]`` or ``[N, O]``.
        counts: How often each row counts ``[N]``.
        validation: The share of the rows for validation; no row if there are too few.
        held_out: The share of the rows to hold out; at least ten rows, or none if there are fewer than thirty.
        seed: Draws the rows.
    """
    for name, share in (("validation", validation), ("held_out", held_out)):
        if not 0 <= share <= MOST:
            raise InputError(f"`{name}` must be a share of the rows from 0 to 1/3, got {share}.")
    present = counts.nonzero()[0]
    digests = _digests(inputs[present], targets[present])
    present = present[digests.argsort(kind="stable")]
    groups = np.unique(np.sort(digests), return_inverse=True)[1]  # equal rows are one group
    num = int(groups[-1]) + 1
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).numpy()
    num_held_out = max(round(held_out * num), FEWEST_HELD_OUT) if held_out else 0
    num_held_out *= num_held_out <= MOST * num
    num_validation = round(validation * num) if num >= 3 * FEWEST_HELD_OUT else 0
    place = np.zeros(num, dtype=np.int8)
    place[order[:num_held_out]] = 2
    place[order[num_held_out : num_held_out + num_validation]] = 1
    found = (present[place[groups] == part] for part in (0, 1, 2))
    return Parts(*(np.repeat(rows, counts[rows]) for rows in found))


def _digests(*parts: Array) -> Array:
    """Return one number per row that depends on its content alone ``[N]``, the same in every order of the rows."""
    total = np.zeros(len(parts[0]), dtype=np.uint64)
    factors = np.random.default_rng(0)
    for part in parts:
        values = np.ascontiguousarray(part.reshape(len(part), -1), dtype=np.float64) + 0.0  # one kind of zero
        bits = values.view(np.uint64)
        for column in bits.T:
            mixed = (column ^ (column >> np.uint64(29))) * (factors.integers(2**63, dtype=np.uint64) | np.uint64(1))
            total += mixed ^ (mixed >> np.uint64(32))
    return total
