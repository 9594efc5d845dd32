"""`TableModule`: the encoding of table rows as a network, for exported files that take one number per column."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dubito.core.errors import UnsupportedError
from dubito.data.columns import CategoryColumn, Column, DateColumn, NumberColumn
from dubito.data.table import Table
from dubito.data.text_column import TextColumn


class TableModule(nn.Module):
    """Turn rows ``[B, columns]`` of one number per column into the inputs of the network ``[B, features]``.

    A number is given as it is, a boolean as 0 or 1, a date as its days since 1970-01-01, and a category as the place
    of its level (`describe` lists them), or -1 if the training rows did not have it. NaN is a missing cell.
    """

    def __init__(self, columns: tuple[Column, ...]) -> None:
        super().__init__()
        self.columns = exportable(columns)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the features, as `TableTransform.encode` computes them."""
        features: list[Tensor] = []
        for column, given in zip(self.columns, rows.double().unbind(1), strict=True):
            missing = given.isnan()
            if isinstance(column, CategoryColumn):
                features += _levels(column, given, missing)
            else:
                filled = torch.where(missing, column.fill, given)
                parts = column.parts if isinstance(column, DateColumn) else (("days", column.loc, column.scale),)
                found = _date_parts(filled) if len(parts) > 1 or parts[0][0] != "days" else {"days": filled}
                features += [(found[part] - loc) / scale for part, loc, scale in parts]
            if column.indicator:
                features.append(missing.double())
        return torch.stack(features, dim=1).float()


def exportable(columns: tuple[Column, ...]) -> list[NumberColumn | CategoryColumn | DateColumn]:
    """Return the columns; raise if one cannot be given as one number."""
    found: list[NumberColumn | CategoryColumn | DateColumn] = []
    for column in columns:
        if isinstance(column, TextColumn):
            raise UnsupportedError(
                f"The column {column.name!r} holds free text, which a file that takes numbers cannot read: export the "
                "network alone (--plain), or use `dubito serve`."
            )
        found.append(column)
    return found


def numbers_of(columns: tuple[Column, ...], table: Any) -> Tensor:
    """Return the rows of a table as a `TableModule` takes them, in float64 ``[N, columns]``."""
    table, found = Table.of(table), []
    for column in exportable(columns):
        cells = table[column.name]
        if isinstance(column, CategoryColumn):
            places = _places(column)
            labels = [np.nan if label is None else places.get(label, -1.0) for label in cells.labels()]
            found.append(np.array(labels, dtype=np.float64))
        elif isinstance(column, DateColumn):
            found.append(cells.without_strays(cells.days(column.format), column.holds))
        else:
            found.append(cells.without_strays(cells.numbers(words=column.boolean), column.holds))
    return torch.from_numpy(np.stack(found, axis=1))


def describe(columns: tuple[Column, ...]) -> list[dict[str, Any]]:
    """Return for each column what its number means, for the file's description of itself."""
    found: list[dict[str, Any]] = []
    for column in columns:
        if isinstance(column, CategoryColumn):
            found.append({"name": column.name, "is": "category", "levels": list(column.levels), "other": -1})
            if column.rare:
                found[-1] |= {"rare": len(column.levels), "rare levels": list(column.rare)}
        else:
            kind = "days since 1970-01-01" if isinstance(column, DateColumn) else "number"
            found.append({"name": column.name, "is": kind})
    return found


def _places(column: CategoryColumn) -> dict[str, float]:
    return {level: float(place) for place, level in enumerate(column.levels)} | dict.fromkeys(
        column.rare, float(len(column.levels))
    )


def _levels(column: CategoryColumn, given: Tensor, missing: Tensor) -> list[Tensor]:
    """Return the 0/1 features of a category; without an indicator a missing one has none."""
    place = torch.where(missing, _places(column)[column.fill] if column.indicator else -1.0, given)
    return [(place == level).double() for level in range(column.num_levels)]


def _date_parts(days: Tensor) -> dict[str, Tensor]:
    """Return days, year, month and weekday of days since 1970-01-01, in the proleptic Gregorian calendar.

    Years are counted from March, so that the leap day is the last; 400 of them have 146,097 days.
    """
    whole = days.floor()
    since = whole + 719_468
    era = (since / 146_097).floor()
    day_of_era = since - era * 146_097
    leaps = (day_of_era / 1460).floor() - (day_of_era / 36_524).floor() + (day_of_era / 146_096).floor()
    year_of_era = ((day_of_era - leaps) / 365).floor()
    day = day_of_era - (365 * year_of_era + (year_of_era / 4).floor() - (year_of_era / 100).floor())
    march_month = ((5 * day + 2) / 153).floor()
    month = torch.where(march_month < 10, march_month + 3, march_month - 9)
    year = year_of_era + era * 400 + (month <= 2).double()
    weekday = whole + 3 - 7 * ((whole + 3) / 7).floor()
    return {"days": days, "year": year, "month": month, "weekday": weekday}
