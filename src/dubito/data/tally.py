"""Count the cells of new rows that the training rows did not prepare for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dubito.data.cells import Cells, Flags, Floats

# For each kind of odd cells, what is odd about one of them, and what several of them do.
_WORDS = {
    "unseen": ("no training row had it", "hold a category that the training rows did not have"),
    "outside": ("outside of the range of the training rows", "lie outside of the range of the training rows"),
    "missing": ("no training row lacked it", "are missing, although no training row lacked them"),
    "stray": ("is not what the column holds", "do not hold what their column does, and count as missing"),
    "unread": ("no training row had any of its words", "hold no word that the training rows had"),
}


@dataclass
class Tally:
    """What was odd in the rows that were encoded so far; it grows from chunk to chunk.

    Attributes:
        num_rows: How many rows were encoded.
        unseen: By column, how many cells hold a category that the training rows did not have.
        outside: By column, how many numbers or dates lie outside of the range of the training rows.
        missing: By column, how many cells are missing although no training row lacked them.
        stray: By column, how many cells hold something else than the column does, such as text among numbers.
        unread: By column, how many texts hold no word that the training rows had.
        odd_rows: In how many rows something was odd.
        examples: For each of these and each column, the first row and its value.
    """

    num_rows: int = 0
    unseen: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    stray: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    odd_rows: int = 0
    examples: dict[tuple[str, str], tuple[Any, str]] = field(default_factory=dict)
    _odd: Flags | None = None

    def start(self, num_rows: int) -> None:
        """Begin a chunk of rows."""
        self.num_rows += num_rows
        self._odd = np.zeros(num_rows, dtype=bool)

    def finish(self) -> Flags:
        """End the chunk, and return which of its rows are odd."""
        odd, self._odd = self._odd, None
        assert odd is not None
        self.odd_rows += int(odd.sum())
        return odd

    def count_numbers(
        self, cells: Cells, values: Floats, low: float | None, high: float | None, may_be_missing: bool
    ) -> None:
        """Count the odd cells of a column of numbers or dates."""
        absent = np.isnan(values)
        if absent.any():
            missing = cells.missing()
            self._count("stray", cells, absent & ~missing)
            self._count("missing", cells, missing & (not may_be_missing))
        if low is not None and high is not None:
            with np.errstate(invalid="ignore"):
                self._count("outside", cells, (values < low) | (values > high))

    def count_levels(self, cells: Cells, unseen: Flags, missing: Flags, may_be_missing: bool) -> None:
        """Count the odd cells of a column of categories."""
        self._count("unseen", cells, unseen)
        self._count("missing", cells, missing & (not may_be_missing))

    def count_texts(self, cells: Cells, unread: Flags) -> None:
        """Count the texts without a known word."""
        self._count("unread", cells, unread)

    def _count(self, what: str, cells: Cells, odd: Flags) -> None:
        if odd.any():
            getattr(self, what)[cells.name] += int(odd.sum())
            self.examples.setdefault((what, cells.name), cells.first(odd))
            if self._odd is not None:
                self._odd |= odd

    def remark(self, name: str) -> str:
        """Return what is odd about the cells of a column, in a few words; empty if nothing is."""
        return next((told for kind, (told, _) in _WORDS.items() if name in getattr(self, kind)), "")

    @property
    def odd_columns(self) -> set[str]:
        """The columns with odd cells."""
        return {name for _, name in self.examples}

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        counts = {kind: dict(getattr(self, kind)) for kind in _WORDS}
        return {"rows": self.num_rows, "odd_rows": self.odd_rows, **counts}

    def sentences(self) -> list[str]:
        """Return one sentence for each kind of odd cells."""
        found = []
        for kind, (_, told) in _WORDS.items():
            counts: Counter[str] = getattr(self, kind)
            if counts:
                columns = ", ".join(f"{name} {count:,}" for name, count in counts.most_common(5))
                more = f" and {len(counts) - 5} more columns" if len(counts) > 5 else ""
                row, value = self.examples[kind, counts.most_common(1)[0][0]]
                found.append(f"{counts.total():,} cell(s) {told} ({columns}{more}; the first is {value} in row {row}).")
        return found
