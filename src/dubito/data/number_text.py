"""Read numbers from text: "1.5", "376,532", "1.234,5", "1 234"; and find out which mark is the decimal one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Literal

Mark = Literal[".", ","]

# What stands for a missing value in a text file; the list is that of pandas.
MISSING = frozenset(
    ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
     "NULL", "NaN", "None", "n/a", "nan", "null"]
)  # fmt: skip

_SPACES = "\u00a0\u2009\u202f '’"
_GROUPED = {
    ".": re.compile(rf"[+-]?\d{{1,3}}(?:(?:,\d{{3}})+|(?:[{_SPACES}]\d{{3}})+)(?:\.\d*)?", re.ASCII),
    ",": re.compile(rf"[+-]?\d{{1,3}}(?:(?:\.\d{{3}})+|(?:[{_SPACES}]\d{{3}})+)(?:,\d*)?", re.ASCII),
}
_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?", re.ASCII)
_REMOVED = {mark: str.maketrans({**dict.fromkeys(_SPACES), other: None}) for mark, other in ((".", ","), (",", "."))}


def parse_number(text: str, decimal: Mark = ".") -> float:
    """Return the number that a text holds, or NaN if it holds none.

    Marks between groups of three digits are left out; where they do not separate groups of three, there is no number.

    >>> parse_number("376,532"), parse_number("1.234,5", decimal=","), parse_number("3,76")
    (376532.0, 1234.5, nan)
    """
    text = text.strip()
    if _GROUPED[decimal].fullmatch(text):
        text = text.translate(_REMOVED[decimal])
    elif decimal == "," and "." in text:
        return math.nan  # 1.5 here may be a date, a version, or a number of another file
    if decimal == ",":
        text = text.replace(",", ".")
    try:
        return float(text)
    except (ValueError, OverflowError):
        return math.nan


def decimal_mark(cells: Iterable[str]) -> Mark | None:
    """Return the decimal mark that the numbers among some cells show, or None if they leave it open.

    "1,5" shows a comma, "1.5" and "1,234,567" a point. "376,532" and "376.532" show nothing: the mark may also
    separate thousands.

    >>> decimal_mark(["12", "3,5"]), decimal_mark(["376,532", "1.25"]), decimal_mark(["376,532"])
    (',', '.', None)
    """
    votes = {".": 0, ",": 0}
    for cell in cells:
        text = cell.strip()
        for mark, other in ((".", ","), (",", ".")):
            grouped = _GROUPED[mark].fullmatch(text) is not None
            plain = not grouped and _is_plain(text, mark)
            several = grouped and (text.count(other) > 1 or mark in text)
            if several or (plain and mark in text and not _may_be_groups(text, mark)):
                votes[mark] += 1
    if votes["."] == votes[","]:
        return None
    return "." if votes["."] > votes[","] else ","


def first_groups(cells: Iterable[str]) -> str | None:
    """Return the first cell that holds groups of three digits such as "376,532", whatever the mark means, or None."""
    return next((cell for cell in cells if "," in cell and _GROUPED["."].fullmatch(cell.strip())), None)


def _is_plain(text: str, mark: str) -> bool:
    if mark == ",":
        return _COMMA.fullmatch(text) is not None
    try:
        float(text)
    except ValueError:
        return False
    return "," not in text


def _may_be_groups(text: str, mark: str) -> bool:
    """Return whether the mark may separate thousands: 376.532 but not 0.532, .532 or 37.65."""
    other = "," if mark == "." else "."
    return _GROUPED[other].fullmatch(text) is not None and not text.lstrip("+-").startswith("0")
