"""Tables of text as people have them: other separators, encodings and decimal marks, and what is said about columns."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dubito.errors import FileFormatError, InputError

from dubito import data
from dubito.data import TableTransform, Tally, describe_table, read_table
from dubito.data.dialect import detect_encoding
from dubito.data.number_text import decimal_mark, parse_number
from extras import needs

ROWS = 40


def write(path: Path, header: str, rows: list[str], encoding: str = "utf-8") -> Path:
    path.write_bytes("\n".join([header, *rows]).encode(encoding))
    return path


def numbers(table: data.Table, name: str) -> list[float]:
    return table[name].numbers().tolist()


@pytest.mark.parametrize("separator", [",", ";", "\t", "|", " "])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"])
def test_separator_and_encoding_are_found(tmp_path: Path, separator: str, encoding: str) -> None:
    town = "Köln–Süd" if encoding == "cp1252" else "Köln"  # a dash that latin-1 lacks
    rows = [separator.join([str(i), town, f"{i / 4}"]) for i in range(ROWS)]
    table = read_table(write(tmp_path / "t.csv", separator.join(["Größe", "b", "y"]), rows, encoding))
    assert table.names == ("Größe", "b", "y")
    assert table["b"].labels() == [town] * ROWS
    assert numbers(table, "y") == [i / 4 for i in range(ROWS)]
    assert (table.dialect.separator, table.dialect.encoding) == (separator, encoding)


@pytest.mark.slow
def test_an_encoding_is_judged_by_the_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a,b", [*["1,x"] * 100_000, "2,é"], "latin-1")
    assert read_table(path)["b"].labels()[-1] == "é"
    assert detect_encoding([b"\xc3", b"\xa9"]) == "utf-8"  # a character that two pieces share
    with pytest.raises(FileFormatError, match=r"not in the encoding utf-8 \(byte 0xe9\): give the right one"):
        read_table(path, encoding="utf-8")


def test_the_dialect_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a;b", ["1;2,5"] * 3, "utf-8")
    assert numbers(read_table(path), "b") == [2.5] * 3
    assert read_table(path, separator="|").names == ("a;b",)
    assert np.isnan(numbers(read_table(path, decimal="."), "b")).all()
    for wrong in (
        {"separator": ""},
        {"separator": "ab"},
        {"decimal": "x"},
        {"encoding": "klingon"},
        {"encoding": "hex"},
    ):
        with pytest.raises(InputError, match=r"must be|no encoding"):
            read_table(path, **wrong)


@pytest.mark.parametrize(
    ("cells", "mark"),
    [
        (["1.5"], "."), (["1,5"], ","), (["376,532"], None), (["376.532"], None), (["1,376,532"], "."),
        (["1.376.532"], ","), (["0,532"], ","), (["0.532"], "."), (["1,234.5"], "."), (["1.234,5"], ","),
        (["376,532", "2.25"], "."), (["376,532", "2,25"], ","), (["1e5", "x,y"], None), ([], None),
    ],
)  # fmt: skip
def test_decimal_marks_by_evidence(cells: list[str], mark: str | None) -> None:
    assert decimal_mark(cells) == mark


@pytest.mark.parametrize(
    ("text", "decimal", "number"),
    [
        ("376,532", ".", 376532), ("1,376,532.25", ".", 1376532.25), ("-1,000", ".", -1000), ("1,5", ".", None),
        ("12,34,567", ".", None), ("1.234,5", ",", 1234.5), ("1234,5", ",", 1234.5), ("1.5", ",", None),
        ("1 234,5", ",", 1234.5), ("1'234.5", ".", 1234.5), (" 7 ", ".", 7), ("1e3", ".", 1000), ("1e3", ",", 1000),
        ("", ".", None), ("x", ",", None), ("1.000", ",", 1000), ("1.000", ".", 1),
    ],
)  # fmt: skip
def test_numbers_are_read_by_the_decimal_mark(text: str, decimal: Any, number: float | None) -> None:
    found = parse_number(text, decimal)
    assert np.isnan(found) if number is None else found == number


def test_thousands_are_numbers_and_it_is_said(tmp_path: Path) -> None:
    rows = [f'{i},"{i + 100},{i * 7 % 900 + 100}"' for i in range(ROWS)]
    dataset = data.load_table(write(tmp_path / "t.csv", "size,price", rows), "price")
    assert dataset.task == "regression"
    assert dataset.encoder.target_loc > 100_000
    assert "'100,100' is read as 100100" in dataset.description["price"].remark
    english = write(tmp_path / "s.csv", "a;b;c", [f"{i};376,532;{i}.25" for i in range(ROWS)])
    assert numbers(read_table(english), "b")[0] == 376_532  # the decimal points of another column decide
    german = write(tmp_path / "s.csv", "a;b", [f"{i};376,532" for i in range(ROWS)])
    assert numbers(read_table(german), "b")[0] == 376.532  # nothing else to go by: semicolons


def test_each_column_is_described(tmp_path: Path) -> None:
    rows = [f"{1000 + i},{i},{'n/k' if i == 9 else i / 7},{'red' if i % 3 else ''},{i % 27 + 1}.03.2024,,k,u{i},{i % 2}"
            for i in range(ROWS)]  # fmt: skip
    path = write(tmp_path / "t.csv", "house_id,count,size,colour,sold,nothing,always,key name,y", rows)
    found = describe_table(read_table(path), "y")
    remarks = {column.name: column.remark for column in found.columns}
    assert remarks["house_id"] == remarks["key name"] == "looks like an id: left out"
    assert "looks like an id, but is used" in remarks["count"]
    assert "such as 'n/k' in row 10, count as missing" in remarks["size"]
    assert remarks["sold"] == "read as day.month.year"
    assert remarks["nothing"] == "empty: left out"
    assert remarks["always"] == "always 'k': left out"
    assert remarks["y"] == "target: 2 classes"
    kinds = {column.name: (column.kind, column.missing, column.levels, column.range) for column in found.columns}
    assert kinds["size"] == ("number", 1, ROWS - 1, "0 to 5.57143")
    assert kinds["colour"] == ("category", 14, 1, "")
    assert kinds["sold"] == ("date", 0, 27, "2024-03-01 to 2024-03-27")
    lines = str(found).splitlines()
    assert lines[0].split() == ["column", "type", "missing", "levels", "range"]
    assert len(lines) == 10
    assert len(found.to_json()["columns"]) == 9


def test_columns_are_used_or_left_out_as_asked(tmp_path: Path) -> None:
    rows = [f"{1000 + i},{i % 5},{i / 3}" for i in range(ROWS)]
    path = write(tmp_path / "t.csv", "id,b,y", rows)
    assert data.load_table(path, "y").feature_names == ("b",)
    assert data.load_table(path, "y", keep=["id"], ignore=["b"]).feature_names == ("id",)
    with pytest.raises(InputError, match=r"nothing to learn from; left out: 'id' \(looks like an id\), 'b' \(left out"):
        data.load_table(path, "y", ignore=["b"])


@pytest.mark.parametrize(
    ("cells", "form", "first"),
    [
        (["31.12.2020", "01.02.2021"], "%d.%m.%Y", 18627),
        (["12/31/2020", "02/01/2021"], "%m/%d/%Y", 18627),
        (["31/12/2020", "01/02/2021"], "%d/%m/%Y", 18627),
        (["2020/12/31", "2021/02/01"], "%Y/%m/%d", 18627),
        (["2020-12-31 12:00", "2021-02-01"], "ISO8601", 18627.5),
    ],
)
def test_usual_dates_are_recognised(tmp_path: Path, cells: list[str], form: str, first: float) -> None:
    table = read_table(write(tmp_path / "t.csv", "day,y", [f"{day},{i}" for i, day in enumerate(cells * 10)]))
    described = describe_table(table)["day"]
    assert (described.kind, described.date_format) == ("date", form)
    assert described.values_of(table["day"])[0] == first


def test_dates_that_can_be_read_in_two_ways_say_so(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", "day,y", [f"0{i % 9 + 1}/02/2020,{i}" for i in range(ROWS)]))
    assert describe_table(table)["day"].remark == "read as month/day/year, or is the day first?"
    with pytest.raises(InputError, match="'%H' holds no date"):
        describe_table(table, dates={"day": "%H"})


@pytest.mark.parametrize(
    ("header", "row", "sentence"),
    [
        ("x,price", "{i},2020-01-{d:02d}", "holds dates, but only numbers and classes can be predicted"),
        ("x,price", "{i},house {i}", "holds 40 different texts in 40 rows, such as 'house 0'"),
        ("1,2", "{i},{d}", "its first line seems to hold data in place of column names"),
    ],
)
def test_targets_that_cannot_be_predicted(tmp_path: Path, header: str, row: str, sentence: str) -> None:
    path = write(tmp_path / "t.csv", header, [row.format(i=i, d=i % 28 + 1) for i in range(ROWS)])
    with pytest.raises(InputError, match=sentence):
        data.load_table(path, "price")


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        (b"a,price\n1,2\n3,4\n5,6\n", InputError, r"3 row\(s\) with a target; at least 10 are needed"),
        (b"a,price\n1,2\n3,4,5\n", FileFormatError, r"2 column names, but row 2 has 3 cells"),
        (b"", FileFormatError, "it is empty"),
        (b"\n\n", FileFormatError, "it is empty"),
        (b"PK\x03\x04", FileFormatError, "a spreadsheet or a zip archive"),
        (b"a,b\n\x00\x01,2\n", FileFormatError, "holds NUL characters, as binary files do"),
        (b"PAR1", FileFormatError, "a Parquet file"),
        (b'a,price\n"1,2\n' + b"3,4\n" * 50_000, FileFormatError, "a quote may be missing"),
        (b"a,price\n", InputError, "no rows"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, content: bytes, error: type[Exception], sentence: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(error, match=sentence):
        data.load_table(tmp_path / "t.csv", "price")


def test_a_folder_and_other_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder, not a table: give a file, for example a \.csv"):
        read_table(tmp_path)
    (tmp_path / "houses.csv").write_text("a\n1\n")
    with pytest.raises(InputError, match=r"such as .*houses\.csv"):
        read_table(tmp_path)


def test_rows_that_end_early_are_missing_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a,b,c", ["1,2,3", "4,5", "", "6,7,8,,"])
    with pytest.warns(UserWarning, match=r"has 1 row\(s\) with fewer cells than columns"):
        table = read_table(path)
    assert table["c"].missing().tolist() == [False, True, False]
    assert table.rows() == [("1", "2", "3"), ("4", "5", ""), ("6", "7", "8")]


def test_names_are_made_unique(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", ",a,a, b ,", ["0,1,2,3,4"] * 3))
    assert table.names == ("Unnamed: 0", "a", "a.1", "b", "Unnamed: 4")
    assert describe_table(table)["Unnamed: 0"].used is False


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a;b\n1;2,5\n")))
    assert numbers(read_table("-"), "b") == [2.5]


def test_chunks_are_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress("\n".join(["a,b", *(f"{i},x{i % 3}" for i in range(100))]).encode()))
    opened = data.table_files.OpenTable(path)
    with opened as file:
        parts = list(file.chunks(30))
        assert opened.fraction() == 1
    assert [len(part) for part in parts] == [30, 30, 30, 10]
    assert parts[1]["a"].rows[0] == 31
    assert data.Table.joined(parts).rows() == read_table(path).rows()


def test_text_and_typed_tables_agree(tmp_path: Path) -> None:
    """A frame and the file that it was written to give the same inputs, types or not."""
    pd = needs("pandas")
    frame = pd.DataFrame({
        "size": [1.5, None, 3.25] * 8, "code": [1, 2, 3] * 8, "town": ["Ulm", None, "Bern"] * 8,
        "new": [True, False, False] * 8, "day": pd.date_range("2020-01-01", periods=24), "y": range(24),
    })  # fmt: skip
    frame.to_csv(tmp_path / "t.csv", index=False)
    transform = TableTransform.fit(frame, "y", categorical=["code"])
    again = TableTransform.fit(read_table(tmp_path / "t.csv"), "y", categorical=["code"])
    assert again == transform
    assert (again.encode(read_table(tmp_path / "t.csv")) == transform.encode(frame)).all()
    back = read_table(tmp_path / "t.csv").to_frame()
    assert back["day"].equals(frame["day"].astype("datetime64[us]"))
    assert [back[name].dtype.kind for name in ("size", "new", "y")] == ["f", "b", "f"]


def test_odd_cells_are_counted() -> None:
    train = {"size": list(range(10, 30)), "town": ["Ulm", "Bern"] * 10, "day": ["2020-01-01", "2020-06-01"] * 10}
    transform = TableTransform.fit({**train, "y": list(range(20))}, "y", task="regression", keep=["size"])
    tally = Tally()
    new = {
        "size": [9, 30, "x", None, 15],
        "town": ["Rom", "Ulm", None, "Bern", "Ulm"],
        "day": ["2020-02-02"] * 4 + ["2021-01-01"],
    }
    transform.encode(new, tally)
    assert tally.finish().tolist() == [True] * 5
    assert (tally.unseen, tally.outside, tally.missing, tally.stray) == (
        {"town": 1}, {"size": 2, "day": 1}, {"size": 1, "town": 1}, {"size": 1}
    )  # fmt: skip
    assert tally.sentences()[1].startswith(
        "3 cell(s) lie outside of the range of the training rows (size 2, day 1; the"
    )
    assert "'Rom' in row 0" in tally.sentences()[0]
    transform.encode({name: values[:4] for name, values in train.items()}, tally)
    assert not tally.finish().any()
    assert (tally.num_rows, tally.odd_rows) == (9, 5)


@pytest.mark.slow
def test_a_csv_file_needs_neither_pandas_nor_pyarrow(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv", "a,b,d,y", [f"{i / 3},x{i % 3},2020-01-{i % 28 + 1:02d},{i % 2}" for i in range(ROWS)]
    )
    code = (
        "import sys\n"
        "for name in ('pandas', 'pyarrow', 'openpyxl'): sys.modules[name] = None\n"
        f"from dubito import data; print(data.load_table({str(path)!r}, 'y').input_shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(6,)\n"


def test_spreadsheets(tmp_path: Path) -> None:
    openpyxl = needs("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["size", "town", "day", "y", None])
    day = np.datetime64("2020-01-01")
    for i in range(ROWS):
        book.active.append([i / 4, "Ulm" if i % 2 else None, (day + i).item(), i % 2])
    book.save(tmp_path / "t.xlsx")
    table = read_table(tmp_path / "t.xlsx")
    assert table.names == ("size", "town", "day", "y")
    assert [column.kind for column in describe_table(table).columns] == ["number", "category", "date", "number"]
    book.create_sheet("second")
    book.save(tmp_path / "t.xlsx")
    with pytest.warns(UserWarning, match="has 2 sheets; the first"):
        assert len(read_table(tmp_path / "t.xlsx")) == ROWS
    (tmp_path / "t.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(FileFormatError, match="not a readable xlsx table"):
        read_table(tmp_path / "t.xlsx")
