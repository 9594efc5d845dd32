from __future__ import annotations

import datetime
import gzip
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from dubito.errors import FileFormatError, InputError, MissingDataError, UnsupportedError
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from dubito import data
from dubito.core import limits
from dubito.data import Table, TableTransform, Tally, table_files
from dubito.data.table import RowTable


def frame(num: int = 60) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "size": rng.normal(100, 20, num),
            "rooms": rng.integers(1, 6, num),
            "town": rng.choice(["Ulm", "Graz", "Bern"], num),
            "garden": rng.random(num) < 0.3,
            "sold": pd.date_range("2019-11-20", periods=num, freq="36h"),
            "price": rng.normal(3.0, 1.0, num),
        }
    )


def feature(transform: TableTransform, table: pd.DataFrame, name: str) -> np.ndarray:
    return transform.encode(table)[:, transform.feature_names.index(name)].numpy()


def test_every_kind_of_column_against_scikit_learn_and_pandas():
    table = frame()
    transform = TableTransform.fit(table, "price")
    parts = ("sold.days", "sold.year", "sold.month", "sold.weekday")
    assert transform.feature_names == ("size", "rooms", "town=Bern", "town=Graz", "town=Ulm", "garden", *parts)
    assert transform.task == "regression"

    numbers = table[["size", "rooms", "garden"]].astype(float)
    expected = StandardScaler().fit_transform(numbers)
    for column, name in enumerate(numbers):
        np.testing.assert_allclose(feature(transform, table, name), expected[:, column], atol=1e-6)
    one_hot = OneHotEncoder(sparse_output=False).fit_transform(table[["town"]])
    np.testing.assert_array_equal(transform.encode(table)[:, 2:5], one_hot)
    stamps = table["sold"].dt
    days = (table["sold"] - pd.Timestamp("1970-01-01")) / pd.Timedelta("1D")
    dates = np.stack([days, stamps.year, stamps.month, stamps.day_of_week], axis=1)
    np.testing.assert_allclose(transform.encode(table)[:, 6:], StandardScaler().fit_transform(dates), atol=1e-5)
    targets = transform.encode_targets(table)
    np.testing.assert_allclose(targets, StandardScaler().fit_transform(table[["price"]]), atol=1e-6)


def test_missing_values_are_filled_and_marked():
    table = frame()
    table.loc[[0, 5], "size"] = np.nan
    table["rooms"] = table["rooms"].astype("Int64")
    table.loc[1, "rooms"] = pd.NA
    table.loc[[2], "town"] = None
    table["garden"] = table["garden"].astype(object)
    table.loc[3, "garden"] = None
    table.loc[4, "sold"] = pd.NaT
    transform = TableTransform.fit(table, "price")
    for row, name in [(0, "size"), (1, "rooms"), (2, "town"), (3, "garden"), (4, "sold")]:
        marked = feature(transform, table, f"{name} missing")
        assert marked[row] == 1
        assert marked.sum() == table[name].isna().sum()

    filled = table.copy()
    filled["size"] = table["size"].fillna(table["size"].median())
    filled["rooms"] = table["rooms"].fillna(int(table["rooms"].median()))
    filled["town"] = table["town"].fillna(table["town"].mode()[0])
    filled["garden"] = table["garden"].isin([True])  # the mode is False
    filled["sold"] = table["sold"].fillna(table["sold"].median())
    plain = TableTransform.fit(filled, "price")
    for name in plain.feature_names:
        np.testing.assert_allclose(feature(transform, table, name), feature(plain, filled, name), atol=2e-5)


def test_new_rows_use_the_training_statistics():
    train, new = frame(), frame().iloc[:3].copy()
    new["town"] = ["Bern", "Rom", None]
    new["garden"] = [True, True, None]
    new["extra"] = 1.0
    transform = TableTransform.fit(train, "price")
    encoded = transform.encode(new.drop(columns="price")[["extra", "sold", "garden", "town", "rooms", "size"]])
    torch.testing.assert_close(encoded[:, :2], transform.encode(train)[:3, :2])
    assert encoded[0, 2:5].tolist() == [1, 0, 0]
    assert encoded[1, 2:5].tolist() == [0, 0, 0]  # a level the training rows did not have
    assert encoded[2, 2:5].tolist() == [0, 0, 0]  # no training row lacked it: any level is possible
    assert encoded.isfinite().all()


def test_json_round_trip_gives_the_same_numbers():
    table = frame()
    table.loc[0, "size"] = np.nan
    table["label"] = np.where(table["price"] > 3, "high", "low")
    for target in ("price", "label"):
        transform = TableTransform.fit(table, target)
        again = TableTransform.from_json(transform.to_json())
        assert again == transform
        assert hash(again) == hash(transform)
        assert torch.equal(again.encode(table), transform.encode(table))
        assert torch.equal(again.encode_targets(table), transform.encode_targets(table))
    for text in ("{", "[]", "{}", '{"format": "other"}', json.dumps({"format": "dubito.table/1", "columns": [{}]})):
        with pytest.raises(FileFormatError, match="not written by TableTransform"):
            TableTransform.from_json(text)


def test_the_given_frame_is_not_changed():
    table = frame()
    table.loc[0, "size"] = np.nan
    copy = table.copy(deep=True)
    data.load_table(table, "price")
    pd.testing.assert_frame_equal(table, copy)


@pytest.mark.parametrize(
    ("targets", "task", "class_names"),
    [
        (["b", "a"] * 10, "classification", ("a", "b")),
        ([True, False] * 10, "classification", ("False", "True")),
        ([10, 9] * 10, "classification", ("9", "10")),
        ([1.0, 0.0] * 10, "classification", ("0", "1")),
        ([0.5, 1.0] * 10, "regression", ()),
        (list(range(20)), "classification", tuple(map(str, range(20)))),
        (list(range(21)), "regression", ()),
        (pd.Categorical(["b", "a"] * 10), "classification", ("a", "b")),
    ],
)
def test_the_task_is_inferred(targets, task: str, class_names: tuple[str, ...]):
    table = pd.DataFrame({"x": np.arange(len(targets)), "y": targets})
    transform = TableTransform.fit(table, "y")
    assert (transform.task, transform.class_names) == (task, class_names)
    if task == "classification":
        names = [class_names[number] for number in transform.encode_targets(table)]
        assert names == [str(int(v)) if isinstance(v, float) else str(v) for v in targets]


def test_the_task_can_be_given():
    table = pd.DataFrame({"x": range(10), "y": [1, 2] * 5})
    assert TableTransform.fit(table, "y", task="regression").encode_targets(table).unique().tolist() == [-1.0, 1.0]


def test_numbers_as_categories_keep_their_names_when_missing_values_make_them_floats():
    train = pd.DataFrame({"zip": [1, 2, None, 2], "y": ["a", "b", "a", "b"]})
    transform = TableTransform.fit(train, "y", categorical=["zip"])
    assert transform.feature_names == ("zip=1", "zip=2", "zip missing")
    assert transform.encode(pd.DataFrame({"zip": [1, 2]})).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_only_the_most_frequent_levels_get_a_feature():
    table = pd.DataFrame({"c": list("aaabbc"), "y": [0, 1] * 3})
    transform = TableTransform.fit(table, "y", max_levels=2)
    assert transform.feature_names == ("c=a", "c=b", "c=other levels")
    assert transform.encode(table)[5].tolist() == [0, 0, 1]
    assert transform.encode(pd.DataFrame({"c": ["d"]})).tolist() == [[0, 0, 0]]  # a level that no training row had


def test_dates_as_text_and_objects():
    days = [datetime.date(2020, 1, 1), datetime.date(2021, 6, 15), datetime.date(2022, 12, 31)]
    columns = {
        "iso": [day.isoformat() for day in days],
        "object": days,
        "zoned": [f"{day}T02:00:00+02:00" for day in days],
        "german": [day.strftime("%d.%m.%Y") for day in days],
    }
    encoded = []
    for name, values in columns.items():
        dates = {"german": "%d.%m.%Y"} if name == "german" else None
        transform = TableTransform.fit(pd.DataFrame({name: values, "y": [0, 1, 0]}), "y", dates=dates)
        assert transform.feature_names == tuple(f"{name}.{part}" for part in ("days", "year", "month", "weekday"))
        encoded.append(transform.encode(pd.DataFrame({name: values})))
        missing = transform.encode(pd.DataFrame({name: [None, None]}))  # a whole column may be missing later
        torch.testing.assert_close(missing, encoded[-1][[1, 1]])
        with pytest.raises(InputError, match=f"Column '{name}' must hold dates"):
            transform.encode(pd.DataFrame({name: ["soon"]}))
    for other in encoded[1:]:
        torch.testing.assert_close(other, encoded[0])


def test_a_year_that_never_varies_is_not_a_feature():
    table = pd.DataFrame({"day": ["2020-01-01", "2020-01-02"], "y": [0, 1]})
    assert TableTransform.fit(table, "y").feature_names == ("day.days", "day.weekday")


def test_constant_columns_are_dropped():
    table = pd.DataFrame({"a": [0.1] * 4, "b": ["x"] * 4, "c": [True] * 4, "d": ["2020-01-01"] * 4, "e": [1, 2, 3, 4]})
    table["y"] = [0, 1, 0, 1]
    assert TableTransform.fit(table, "y").feature_names == ("e",)
    (number,) = TableTransform.fit(pd.DataFrame({"a": [0.1] * 999 + [None], "y": [0] * 999 + [1]}), "y").columns
    assert number.scale == 1  # although numpy computes a deviation of 1e-17 for a thousand times 0.1
    table["b"] = ["x", None, "x", "x"]  # constant where known, but being known varies
    table["a"] = [0.1, None, 0.1, 0.1]
    assert TableTransform.fit(table, "y").feature_names == ("a", "a missing", "b=x", "b missing", "e")
    assert TableTransform.fit(table, "y").encode(table).isfinite().all()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"x": [1, 2]}, "no target column 'y'; it has 'x'"),
        ({"x": [], "y": []}, "has no rows"),
        ({"x": [None, None], "y": [0, 1]}, r"nothing to learn from; left out: 'x' \(empty\)"),
        ({"x": [1.0, 2.0], "y": [0.5, 0.5]}, "The target column 'y' is always 0.5: there is nothing to predict"),
        ({"x": [1.0, 1e308], "y": [0, 1]}, "Column 'x' holds 1e\\+308, beyond 1e\\+100"),
        ({"x": [1.0, np.inf], "y": [0, 1]}, "Column 'x' holds an infinite value"),
        ({"x": [1, 1], "y": [0, 1]}, "no column beside 'y' that varies"),
        ({"y": [0, 1]}, "no column beside 'y' that varies"),
        ({"x": [1, 2], "y": [0, None]}, "target column 'y' has missing values"),
        ({"x": [1, 2], "y": ["a", "a"]}, "only one class, 'a'"),
        ({"x": pd.to_timedelta([1, 2], unit="D"), "y": [0, 1]}, "Column 'x' holds timedelta"),
    ],
)
def test_bad_tables(table: dict, message: str):
    with pytest.raises(InputError, match=message):
        TableTransform.fit(pd.DataFrame(table), "y")


def test_bad_arguments_and_wrong_columns_later():
    table = frame()
    with pytest.raises(InputError, match="no column 'zip'; it has 'size', 'rooms'"):
        TableTransform.fit(table, "price", ignore=["zip"])
    with pytest.raises(InputError, match="Column 'town' must hold numbers"):
        TableTransform.fit(table, "town", task="regression")
    with pytest.raises(InputError, match="two columns named 'x'"):
        TableTransform.fit(pd.DataFrame([[1, 2, 3]], columns=["x", "x", "y"]), "y")
    transform = TableTransform.fit(table, "price")
    with pytest.raises(InputError, match=r"lacks the column\(s\) 'rooms', 'town'"):
        transform.encode(table.drop(columns=["town", "rooms"]))
    with pytest.raises(InputError, match="no rows; there is nothing to transform"):
        transform.encode(table.iloc[:0])
    with pytest.raises(InputError, match="Column 'rooms' must hold numbers"):
        transform.encode(table.assign(rooms="many"))
    classes = TableTransform.fit(table, "town")
    with pytest.raises(InputError, match="unknown class 'Rom'; known are Bern, Graz, Ulm"):
        classes.encode_targets(table.assign(town="Rom"))


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".tsv", ".parquet"])
def test_files_give_the_same_data_set_as_frames(tmp_path: Path, suffix: str):
    table, path = frame(), tmp_path / f"houses{suffix}"
    if suffix == ".parquet":
        table.to_parquet(path)
    else:
        table.to_csv(path, sep="\t" if suffix == ".tsv" else ",")  # with row numbers, which must not become a feature
    from_file, from_frame = data.load_table(path, "price"), data.load_table(table, "price")
    assert from_file.name == path.name
    assert from_file.feature_names == from_frame.feature_names
    for part in ("train", "validation", "test"):
        torch.testing.assert_close(from_file.parts[part], from_frame.parts[part])


def test_table_parts_and_units():
    dataset = data.load_table(frame(100), "price", test=0.3, validation=0.2, ignore=["town"])
    assert [len(pair[1]) for pair in dataset.parts.values()] == [56, 14, 30]
    assert dataset.num_outputs == 1
    assert dataset.input_shape == (len(dataset.feature_names),)
    assert not any(name.startswith("town") for name in dataset.feature_names)
    torch.testing.assert_close(dataset.train[0].mean(0), torch.zeros(7), atol=1e-5, rtol=0)
    prices = torch.cat([dataset.target_scale.decode(targets) for _, targets in dataset.parts.values()])
    np.testing.assert_allclose(np.sort(prices[:, 0]), np.sort(frame(100)["price"]), rtol=1e-5)
    other = data.load_table(frame(100), "price", test=0.3, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(other.test[1], dataset.test[1])


def test_a_test_table_of_its_own_and_rare_classes():
    table = pd.DataFrame({"x": np.arange(40.0), "y": ["a"] * 39 + ["rare"]})
    dataset = data.load_table(table, "y", test=table.iloc[:5], validation=0.5)
    assert (len(dataset.train[1]), len(dataset.validation[1]), len(dataset.test[1])) == (20, 20, 5)
    # A class that only the held-out rows have is still a class.
    assert dataset.class_names == ("a", "rare")
    assert sum(int(targets.sum()) for _, targets in dataset.parts.values()) == 1


def test_rows_without_a_target_are_left_out_with_a_warning():
    table = frame()
    table.loc[:4, "price"] = np.nan
    with pytest.warns(UserWarning, match="5 of 60 rows have no 'price' and are left out"):
        dataset = data.load_table(table, "price")
    assert sum(len(pair[1]) for pair in dataset.parts.values()) == 55
    with pytest.raises(InputError, match="has no values"):
        data.load_table(table.assign(price=np.nan), "price")


def test_bad_files(tmp_path: Path):
    with pytest.raises(MissingDataError, match="There is no file"):
        data.read_table(tmp_path / "a.csv")
    (tmp_path / "a.xls").write_bytes(b"\xd0\xcf\x11\xe0")
    with pytest.raises(FileFormatError, match=r"an old spreadsheet \(.xls\): save it as .xlsx or .csv"):
        data.read_table(tmp_path / "a.xls")
    (tmp_path / "a.csv").touch()
    (tmp_path / "a.parquet").write_bytes(b"nothing")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(FileFormatError, match="not a readable"):
            data.read_table(tmp_path / name)
    with pytest.raises(InputError, match="`test` must be a number above 0 and below 1"):
        data.load_table(frame(), "price", test=0.0)


def test_a_truncated_gzip_file_is_one_sentence(tmp_path: Path):
    frame().to_csv(tmp_path / "a.csv.gz", index=False)
    whole = (tmp_path / "a.csv.gz").read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 4):
        (tmp_path / "a.csv.gz").write_bytes(whole[:size])
        with pytest.raises(FileFormatError, match=r"not a complete gzip file|not a readable table"):
            data.read_table(tmp_path / "a.csv.gz")


@pytest.mark.slow
def test_a_gzip_file_may_not_fill_the_memory(tmp_path: Path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 250_000))
    assert len(data.read_table(path)) == 250_000  # a few megabytes are always allowed
    with limits.using(unpacked=250_000, file_part=2**16):
        with pytest.raises(FileFormatError, match=r"unpacks to more than 100 times its size.*raise data.read_table"):
            data.read_table(path)
        assert len(data.read_table(path, max_ratio=2000)) == 250_000


@pytest.mark.parametrize("column", [[1] * 300_000, ["a" * 10_000] * 300, ["a", "b"] * 100_000], ids=["1", "a", "ab"])
def test_a_parquet_file_may_not_fill_the_memory(tmp_path: Path, column: list[object]):
    path = tmp_path / "a.parquet"
    pd.DataFrame({"a": column}).to_parquet(path)
    assert path.stat().st_size < 20_000  # for all of the equal cells
    with limits.using(unpacked=1_000_000):
        with pytest.raises(FileFormatError, match=r"unpacks to more than 10 times its size.*raise data.read_table"):
            data.read_table(path, max_ratio=10)
        assert len(data.read_table(path, max_ratio=10_000)) == len(column)


def test_nested_columns_of_a_parquet_file_are_left_out(tmp_path: Path):
    """They are no cells, and in pyarrow 26 reading them from a damaged file can end the process."""
    path, rows = tmp_path / "a.parquet", 30
    lists, structs = [[i] * (i % 3) for i in range(rows)], [{"p": i, "q": "z"} for i in range(rows)]
    pd.DataFrame({"a": range(rows), "l": lists, "s": structs, "y": ["u", "v"] * 15}).to_parquet(path)
    with pytest.warns(UserWarning, match="holds lists or structs in 'l', 's': they are left out"):
        assert data.read_table(path).names == ("a", "y")
    pd.DataFrame({"l": lists}).to_parquet(path)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(FileFormatError, match="no column of plain values"):
        data.read_table(path)


def test_damaged_text_in_a_parquet_file_is_refused(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pd.DataFrame({"a": ["some text", "more"] * 10, "y": [0, 1] * 10}).to_parquet(path, compression=None)
    path.write_bytes(path.read_bytes().replace(b"some text", b"some\xfftext"))
    with pytest.raises(FileFormatError, match="not a readable parquet table"):
        data.load_table(path, "y")


@pytest.mark.parametrize(("module", "suffix"), [("openpyxl", ".xlsx"), ("pyarrow", ".parquet")])
def test_a_missing_package_is_one_clear_sentence(tmp_path: Path, monkeypatch, module: str, suffix: str):
    path = tmp_path / f"a{suffix}"
    path.touch()
    monkeypatch.setattr(table_files, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=rf"needs {module}, which is not installed: run pip install 'dubito\["):
        data.read_table(path)


# ---------------------------------------------------------------------- stray cells


def _with_stray(value: object = "n/k", rows: int = 60, at: int = 7) -> pd.DataFrame:
    frame = pd.DataFrame({"size": np.arange(rows) / 4, "day": pd.date_range("2024-01-01", periods=rows).strftime("%F")})
    frame["price"] = frame["size"] * 2.5
    frame["size"] = frame["size"].astype(object)
    frame.loc[at, "size"] = value
    return frame


@pytest.mark.parametrize("value", ["n/k", "1.2.3", "4\x00", "\x00", [1.0], 1j])
def test_a_stray_cell_is_missing_and_said(value: object):
    frame = _with_stray()
    frame.at[7, "size"] = value
    with pytest.warns(UserWarning, match="Column 'size' holds numbers but for row 7, which holds .*counted as missing"):
        transform = TableTransform.fit(frame, "price")
    clean = frame.assign(size=pd.to_numeric(frame["size"].where(frame.index != 7)))
    assert transform == TableTransform.fit(clean, "price")
    with pytest.warns(UserWarning, match="row 7"):
        encoded = transform.encode(frame)
    assert torch.equal(encoded, transform.encode(clean))


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_a_stray_cell_in_any_part_of_a_file_leaves_the_column_numeric(tmp_path: Path, at: int):
    path = tmp_path / "table.csv"
    _with_stray("4\x00", at=at).to_csv(path, index=False)
    told = f"'size' holds numbers but for row {at + 1}, which holds '4.x00'"  # the rows of a file are counted from 1
    with pytest.warns(UserWarning, match=told) as said:
        found = data.load_table(path, "price")
    assert len(said) == 1
    assert found.feature_names[0] == "size"
    assert not any("=" in name for name in found.feature_names)


def test_a_stray_date_is_missing_and_said():
    frame = _with_stray(0.5)
    frame.loc[3, "day"] = "yesterday"
    with pytest.warns(UserWarning, match="Column 'day' holds dates but for row 3, which holds 'yesterday'"):
        transform = TableTransform.fit(frame.assign(size=frame["size"].astype(float)), "price")
    assert "day.days" in transform.feature_names


def test_many_strays_are_text_or_an_error():
    frame = _with_stray()
    frame.loc[:10, "size"] = "unknown"
    assert any(name.startswith("size=") for name in TableTransform.fit(frame, "price").feature_names)
    numeric = TableTransform.fit(_with_stray(0.5).astype({"size": float}), "price")
    with pytest.raises(InputError, match="Column 'size' must hold numbers, but row 0 holds 'unknown'"):
        numeric.encode(frame)


def test_a_stray_target_is_an_error_and_categories_can_be_kept():
    frame = _with_stray()
    with pytest.raises(InputError, match="target column 'size' holds numbers but for row 7, which holds 'n/k'"):
        TableTransform.fit(frame, "size")
    kept = TableTransform.fit(frame, "price", categorical=("size",), max_levels=60)
    assert "size=n/k" in kept.feature_names


def test_examples_of_cells_are_plain_numbers() -> None:
    cells = Table.of({"a": np.array([1.5, 2.5])})["a"]
    assert cells.first(np.array([False, True])) == (1, "2.5")


def test_many_columns_at_once_are_encoded_as_one_by_one() -> None:
    rng = np.random.default_rng(0)
    table = {f"x{place}": rng.normal(place, 2, 50) for place in range(6)}
    table["x1"][3], table["y"] = np.nan, rng.normal(size=50)
    transform = TableTransform.fit(table, "y")
    odd = {name: values[:5].copy() for name, values in table.items()}
    odd["x2"][1], odd["x3"][2], odd["x4"] = 1e6, np.nan, np.array(["1", "2", "3", "4", "5"])
    for rows in (table, odd):
        tally, single = Tally(), Tally()
        single.start(len(rows["y"]))
        parts = [column.encode(Table.of(rows)[column.name], single) for column in transform.columns]
        np.testing.assert_array_equal(
            transform.encode(rows, tally).numpy(), np.concatenate(parts, axis=1).astype(np.float32)
        )
        assert tally.to_json()["outside"] == single.to_json()["outside"]
        assert tally.to_json()["missing"] == single.to_json()["missing"]


def test_rows_are_encoded_as_their_columns_are() -> None:
    names = ("size", "garden", "age", "town")
    train = {"size": [1.0, 2.0, 4.0, 8.0], "garden": [True, False, True, True], "age": [3.0, None, 5.0, 4.0],
             "town": ["Ulm", "Bern", "Ulm", "Bern"], "y": [0.5, 1.5, 2.5, 3.5]}  # fmt: skip
    encoder = TableTransform.fit(train, "y", keep=names)
    cells = [2, 2.5, 9.0, -1e30, 0, None, "3", "1,5", "x", True, False, "Ulm", "Rom", 1e101, float("inf")]
    rng = np.random.default_rng(0)
    outcomes = []
    for _ in range(300):
        usual = [[3.0, True, 4, "Ulm"] for _ in range(rng.integers(1, 4))]
        for _ in range(rng.integers(0, 3)):
            usual[rng.integers(len(usual))][rng.integers(4)] = cells[rng.integers(len(cells))]
        tables = RowTable(names, usual), Table.of(dict(zip(names, map(list, zip(*usual, strict=True)), strict=True)))
        told = []
        for table in tables:
            tally = Tally()
            try:
                # column by column is how it is done where a column is not all numbers
                found = encoder.encode(table, tally).tolist()
            except InputError as error:
                found = str(error)
            told.append((found, tally.finish().tolist(), tally.to_json(), tally.examples))
        assert told[0] == told[1]
        outcomes.append(type(told[0][0]))
        if isinstance(told[1][0], list):
            one_by_one = [column.encode(tables[1][column.name], Tally()) for column in encoder.columns]
            assert np.array_equal(np.concatenate(one_by_one, axis=1).astype(np.float32), np.float32(told[0][0]))
    assert set(outcomes) == {list, str}
