from __future__ import annotations

import os
from pathlib import Path

import pytest
from dubito.errors import InputError, MissingDataError

from dubito import data
from dubito.data.formats import cache_folder, find_root


def touch(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def test_folders_are_searched_in_order_then_the_cache(no_data: Path, tmp_path: Path, monkeypatch):
    files = ("set/a", "set/b")
    touch(no_data, *files)
    assert find_root("set", files) == no_data
    first, second = touch(tmp_path / "one", *files), touch(tmp_path / "two", *files)
    monkeypatch.setenv("DUBITO_DATA", os.pathsep.join(["", str(first), str(second)]))
    assert find_root("set", files) == first
    (first / "set/b").unlink()  # a folder that holds only some of the files does not count
    assert find_root("set", files) == second


def test_cache_folder_follows_xdg_and_home(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dubito"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "dubito"


def test_a_missing_set_says_what_where_and_how_in_one_sentence(no_data: Path, tmp_path: Path, monkeypatch):
    with pytest.raises(MissingDataError) as caught:
        data.load("uci/boston")
    message = str(caught.value)
    for part in ("'uci/boston'", "uci/boston/data.npz", str(no_data), "DUBITO_DATA is not set", "cambridge-mlg/DUN"):
        assert part in message
    assert message.endswith(".")
    assert "\n" not in message

    partial = touch(tmp_path / "data", "mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz")
    monkeypatch.setenv("DUBITO_DATA", str(partial))
    with pytest.raises(MissingDataError, match=r"needs the file mnist/t10k-images-idx3-ubyte\.gz and 1 more") as caught:
        data.load("mnist")
    assert str(partial) in str(caught.value)
    assert "not set" not in str(caught.value)


def test_fashion_mnist_is_also_looked_for_where_debian_installs_it(no_data: Path):
    row = next(row for row in data.available() if row.name == "fashion-mnist")
    if not row.found:
        assert "/usr/share/datasets" in row.where
        assert "dataset-fashion-mnist" in row.where
    else:
        assert row.where == "/usr/share/datasets"


def test_available_without_any_folder(no_data: Path):
    rows = {row.name: row for row in data.available()}
    assert set(rows) == set(data.names())
    found = {name for name, row in rows.items() if row.found} - {"fashion-mnist"}
    assert found == {"digits", "diabetes", "toy/moons", "toy/gap-sine", "toy/cubic", "toy/growing-noise"}
    assert rows["digits"].where == "scikit-learn"
    assert rows["toy/moons"].where == "generated"
    assert "DUBITO_DATA" in rows["mr"].where


def test_an_unknown_name_is_told_apart_from_a_missing_set():
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        data.load("cifar-10")
    with pytest.raises(InputError, match="known are digits, "):
        data.check("xyzzy")
