"""Files are predicted chunk by chunk, with the numbers that all rows at once give."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from dubito.errors import InputError
from run_cases import houses, run_of, write

from dubito import data
from dubito.uses.runs import stream
from dubito.uses.runs.stream import predict_file
from extras import needs


def rows_of(path: Path, separator: str = ",") -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter=separator))


@pytest.mark.parametrize("target", ["price", "cheap"])
def test_rows_are_kept_and_columns_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setattr(stream, "BATCH_SIZE", 7)
    run, table, calls = run_of(target), houses(50, seed=1), []
    source = write(tmp_path / "new.csv", table)
    found = predict_file(
        run, source, tmp_path / "out.csv", progress=lambda rows, fraction: calls.append((rows, fraction))
    )
    whole, written = run.predict(table), rows_of(tmp_path / "out.csv")
    assert list(written[0]) == [*table, *run.columns]
    assert [row["size"] for row in written] == [str(size) for size in table["size"]]
    for name in run.columns:
        if whole[name].dtype.kind == "f":
            np.testing.assert_allclose([float(row[name]) for row in written], whole[name], rtol=1e-5)
        else:
            assert [row[name] for row in written] == whole[name].tolist()
    assert found.num_rows == 50
    assert found.num_asked == (whole["decision"] == "ask").sum()
    assert [rows for rows, _ in calls] == [*range(7, 50, 7), 50]
    assert calls[-1][1] == 1.0


def test_the_dialect_of_the_input_is_kept(tmp_path: Path) -> None:
    source = write(tmp_path / "new.csv", houses(20, seed=1), separator=";", decimal=",")
    predict_file(run_of(), source, tmp_path / "out.csv")
    written = rows_of(tmp_path / "out.csv", ";")
    assert "," in written[0]["prediction"]
    found = data.read_table(tmp_path / "out.csv")["prediction"].numbers()
    np.testing.assert_allclose(found, run_of().predict(houses(20, seed=1))["prediction"], rtol=1e-5)


def test_odd_cells_are_counted_and_do_not_stop_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BATCH_SIZE", 10)
    table = houses(40, seed=1)
    table["town"][3], table["size"][17], table["size"][18], table["size"][19] = "Rom", "n/k", "?", 900.0
    found = predict_file(run_of(), write(tmp_path / "new.csv", table), tmp_path / "out.csv")
    assert found.tally.to_json() == {
        "rows": 40, "odd_rows": 4, "unseen": {"town": 1}, "outside": {"size": 1}, "missing": {}, "stray": {"size": 2},
        "unread": {},
    }  # fmt: skip
    written = rows_of(tmp_path / "out.csv")
    usual = [float(row["epistemic"]) for place, row in enumerate(written) if place not in (3, 17, 18, 19)]
    assert min(float(written[place]["epistemic"]) for place in (3, 19)) > 5 * max(usual)
    assert written[17]["size"] == "n/k"


def test_parquet_and_standard_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet = needs("pyarrow.parquet")
    monkeypatch.setattr(stream, "BATCH_SIZE", 8)
    source = write(tmp_path / "new.csv", houses(20, seed=1))
    predict_file(run_of(), source, tmp_path / "out.parquet")
    found = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert found["size"] == houses(20, seed=1)["size"]
    np.testing.assert_allclose(found["prediction"], run_of().predict(houses(20, seed=1))["prediction"], rtol=1e-6)
    for name in run_of().columns:
        found.pop(name)
    import pyarrow

    parquet.write_table(pyarrow.table(found), tmp_path / "new.parquet")
    predict_file(run_of(), tmp_path / "new.parquet", tmp_path / "again.csv")
    assert rows_of(tmp_path / "again.csv")[0]["prediction"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(source.read_bytes())))
    predict_file(run_of(), "-", "-")
    assert capsys.readouterr().out.count("\n") == 21


def test_what_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    source, run = write(tmp_path / "new.csv", houses(5)), run_of()
    for out, sentence in (
        (source, "it is the input itself"),
        (tmp_path, "it is a folder"),
        (tmp_path / "a" / "b.csv", "does not exist"),
        (tmp_path / "out.xlsx", r"not as \.xlsx|openpyxl"),
        (tmp_path / "out.csv.gz", r"not as \.gz"),
    ):
        with pytest.raises((InputError, NotImplementedError), match=sentence):
            predict_file(run, source, out)
    predict_file(run, source, tmp_path / "out.csv")
    with pytest.raises(InputError, match="has a column 'prediction' already"):
        predict_file(run, tmp_path / "out.csv", tmp_path / "twice.csv")
    with pytest.raises(InputError, match="Column 'size' must hold numbers, but row 1 holds 'x'"):
        predict_file(run, write(tmp_path / "x.csv", {**houses(5), "size": ["x"] * 5}), tmp_path / "twice.csv")
    with pytest.raises(InputError, match="no rows: there is nothing to predict"):
        predict_file(run, write(tmp_path / "x.csv", {name: [] for name in houses(5)}), tmp_path / "twice.csv")
    with pytest.raises(InputError, match=r"lacks the column\(s\) 'town'"):
        predict_file(run, write(tmp_path / "x.csv", {"size": [1]}), tmp_path / "twice.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "out.csv", "x.csv"]


def test_an_interrupted_stream_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    source = write(tmp_path / "new.csv", houses(5))
    with pytest.raises(KeyboardInterrupt):
        predict_file(run_of(), source, tmp_path / "out.csv", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]
