"""Read dates from text: ISO 8601, and the common ways to write day, month and year."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dubito.core.errors import InputError

ISO_DATE = "ISO8601"
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}.*)?", re.ASCII)
# Formats that are recognized, with what their cells look like. Of two that fit all cells the first is taken.
_FORMATS: dict[str, re.Pattern[str]] = {
    ISO_DATE: _ISO,
    "%Y/%m/%d": re.compile(r"\d{4}/\d{1,2}/\d{1,2}", re.ASCII),
    "%d.%m.%Y": re.compile(r"\d{1,2}\.\d{1,2}\.\d{4}", re.ASCII),
    "%m/%d/%Y": re.compile(r"\d{1,2}/\d{1,2}/\d{4}", re.ASCII),
    "%d/%m/%Y": re.compile(r"\d{1,2}/\d{1,2}/\d{4}", re.ASCII),
    "%d-%m-%Y": re.compile(r"\d{1,2}-\d{1,2}-\d{4}", re.ASCII),
}
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_DAY = 86_400


def date_format(cells: Sequence[str], stray: float) -> str | None:
    """Return the format in which all cells but a share of `stray` are dates, or None."""
    found: tuple[float, str] | None = None
    for name, pattern in _FORMATS.items():
        if sum(pattern.fullmatch(cell.strip()) is not None for cell in cells) < (1 - stray) * len(cells):
            continue
        readable = sum(not np.isnan(parse_date(cell, name)) for cell in cells) / len(cells)
        if readable >= 1 - stray and (found is None or readable > found[0]):
            found = readable, name
    return None if found is None else found[1]


def is_ambiguous(cells: Iterable[str], chosen: str) -> bool:
    """Return whether the cells are dates as well if day and month change places."""
    other = {"%m/%d/%Y": "%d/%m/%Y", "%d/%m/%Y": "%m/%d/%Y"}.get(chosen)
    return other is not None and all(not np.isnan(parse_date(cell, other)) for cell in cells)


def check_format(name: str, date_format: str) -> None:
    """Raise unless the format of a column is one that `datetime.strptime` knows."""
    if date_format == ISO_DATE:
        return
    example = datetime.datetime(2001, 2, 3, 4, 5, 6)
    try:
        text = example.strftime(date_format)
        read = datetime.datetime.strptime(text, date_format)
    except (ValueError, re.error, UnicodeError) as error:
        raise InputError(f"Column {name!r}: {date_format!r} is not a format of dates ({error}).") from error
    if read.year == 1900 and read.date() == datetime.date(1900, 1, 1):
        raise InputError(f"Column {name!r}: the format {date_format!r} holds no date; write one such as '%d.%m.%Y'.")


def days_of(values: NDArray[Any], date_format: str) -> NDArray[np.float64]:
    """Return dates as fractional days since 1970-01-01 UTC, with NaN for what is no date."""
    if values.dtype.kind == "M":
        return _days(values)
    return np.array([_as_days(value, date_format) for value in values], dtype=np.float64)


def as_text(days: float) -> str:
    """Return the date of a number of days since 1970-01-01."""
    return str(np.datetime64(int(np.floor(days)), "D"))


def as_datetimes(days: NDArray[np.float64]) -> NDArray[Any]:
    """Return the dates of numbers of days since 1970-01-01; NaN is no date."""
    whole = np.where(np.isnan(days), 0, days) * 86_400e6
    dates = np.datetime64("1970-01-01", "us") + np.round(whole).astype("timedelta64[us]")
    return np.where(np.isnan(days), np.datetime64("NaT", "us"), dates)


@lru_cache(maxsize=2**16)  # dates repeat
def parse_date(text: str, date_format: str) -> float:
    """Return the days since 1970-01-01 UTC of a text, or NaN.

    >>> parse_date("1970-01-02T12:00", ISO_DATE), parse_date("31.12.1969", "%d.%m.%Y")
    (1.5, -1.0)
    """
    text = text.strip()
    try:
        if date_format == ISO_DATE:
            found = datetime.datetime.fromisoformat(text) if _ISO.fullmatch(text) else None
        else:
            found = datetime.datetime.strptime(text, date_format)
        return np.nan if found is None else _seconds(found) / _DAY
    except (ValueError, OverflowError):
        return np.nan


def _as_days(value: Any, date_format: str) -> float:
    if isinstance(value, str):
        return parse_date(value, date_format)
    if isinstance(value, datetime.datetime):  # also a Timestamp of pandas, whose NaT equals nothing
        return _seconds(value) / _DAY if value == value else np.nan
    if isinstance(value, datetime.date):
        return float(value.toordinal() - _EPOCH.toordinal())
    if isinstance(value, np.datetime64):
        return float(_days(np.array([value]))[0])
    return np.nan


def _days(values: NDArray[Any]) -> NDArray[np.float64]:
    elapsed = values.astype("datetime64[us]") - np.datetime64("1970-01-01", "us")
    return elapsed / np.timedelta64(1, "D")


def _seconds(moment: datetime.datetime) -> float:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return (moment - _EPOCH).total_seconds()
