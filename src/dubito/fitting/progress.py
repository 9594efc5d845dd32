"""The progress bar of long work, on the first process only."""

from __future__ import annotations

from typing import Any

from dubito.core import distributed


def progress_bar(
    total: int | None, shown: bool, description: str | None = None, *, done: int = 0, unit: str = "step"
) -> Any:
    """Return a progress bar for a terminal; elsewhere it shows nothing."""
    from tqdm.auto import tqdm

    quiet = None if shown and distributed.rank() == 0 else True
    return tqdm(
        total=total, initial=done, disable=quiet, leave=False, unit=unit, dynamic_ncols=True, desc=description
    )  # fmt: skip


def batch_bar(per_epoch: int | None, epochs: int, done: tuple[int, int], shown: bool) -> Any:
    """Return the bar of a fit: batches per epoch if known, epochs, and the finished epochs and batches of the next."""
    total = None if per_epoch is None else per_epoch * epochs
    return progress_bar(total, shown, done=0 if per_epoch is None else per_epoch * done[0] + done[1], unit="batch")
