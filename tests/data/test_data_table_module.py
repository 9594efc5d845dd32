"""The encoding as a network computes what the encoder does, cell by cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dubito.data import TableTransform
from dubito.data.table_module import describe, numbers_of

RNG = np.random.default_rng(0)
DAYS = np.datetime64("1895-01-01") + RNG.integers(0, 366 * 210, 400)
TABLE: dict[str, Any] = {
    "size": [None, *RNG.normal(100, 20, 399).round(3).tolist()],
    "weight": RNG.normal(size=400).tolist(),
    "town": [None, *RNG.choice(["Ulm", "Bonn", "Kiel"], 398).tolist(), "Ulm"],
    "kind": RNG.choice(["a", "b"], 400).tolist(),
    "garden": RNG.choice([True, False], 400).tolist(),
    "sold": [None, *map(str, DAYS[1:])],
    "price": RNG.normal(size=400).tolist(),
}
ODD = {
    "size": [None, 1e4], "weight": [np.nan, -3.0], "town": ["Rom", None], "kind": [None, "c"], "garden": [True, None],
    "sold": ["2000-02-29", None],
}  # fmt: skip


@pytest.mark.parametrize("max_levels", [50, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_computes_what_the_encoder_does(max_levels: int, dtype: torch.dtype) -> None:
    encoder = TableTransform.fit(TABLE, "price", max_levels=max_levels)
    module = encoder.to_module()
    for table in (TABLE, ODD):
        rows = numbers_of(encoder.columns, table).to(dtype)
        assert rows.shape == (len(table["size"]), 6)
        tolerance = 0.0 if dtype == torch.float64 else 1e-4
        assert torch.allclose(module(rows), encoder.encode(table), rtol=0, atol=tolerance)


def test_days_of_four_centuries() -> None:
    days = np.arange("1800-01-01", "2200-01-01", dtype="datetime64[D]")[::15]
    days = np.concatenate([days, np.arange("1896-02-25", "1896-03-05", dtype="datetime64[D]")])
    encoder = TableTransform.fit({"day": [str(day) for day in days], "y": np.arange(len(days)).tolist()}, "y")
    assert [part for part, _, _ in encoder.columns[0].parts] == ["days", "year", "month", "weekday"]
    rows = torch.from_numpy(days.astype(np.float64))[:, None]
    assert torch.equal(encoder.to_module()(rows), encoder.encode({"day": [str(day) for day in days]}))


def test_a_file_can_say_what_its_numbers_mean() -> None:
    encoder = TableTransform.fit(TABLE, "price", max_levels=2)
    told = {column["name"]: column for column in describe(encoder.columns)}
    assert told["sold"]["is"] == "days since 1970-01-01"
    assert told["kind"] == {"name": "kind", "is": "category", "levels": ["a", "b"], "other": -1}
    assert told["town"]["rare"] == 2
