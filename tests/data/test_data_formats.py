from __future__ import annotations

import gzip
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from dubito.errors import FileFormatError
from tiny_files import write_idx, write_npz

from dubito.core import limits
from dubito.data import formats


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_idx_reads_what_was_written(tmp_path: Path, shape):
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    write_idx(tmp_path / "a.gz", values)
    np.testing.assert_array_equal(formats.read_idx(tmp_path / "a.gz"), values)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x03ab", mtime=0), "shape \\(3,\\) but holds 2"),
        (gzip.compress(b"\x00\x00\x0d\x01\x00\x00\x00\x01abcd", mtime=0), "not an idx file"),
        (gzip.compress(b"\x00\x00\x08\x03\x00", mtime=0), "not an idx file"),
        (gzip.compress(b"", mtime=0), "not an idx file"),
        (gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x03abc", mtime=0)[:-6], "not a complete gzip file"),
        (b"hello", "not a complete gzip file"),
    ],
)
def test_a_bad_idx_file_is_one_clear_sentence(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        formats.read_idx(tmp_path / "a.gz")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_npz_reads_what_was_written(no_data: Path, tmp_path: Path, compression: int):
    x, y = np.random.default_rng(0).normal(size=(7, 3)), np.arange(4)
    write_npz(tmp_path / "a.npz", compression, x=x, y=y)
    for _ in range(2):  # the second time from the cache, for LZMA
        got_y, got_x = formats.read_npz(tmp_path / "a.npz", "y", "x")
        np.testing.assert_array_equal(got_x, x)
        np.testing.assert_array_equal(got_y, y)
    assert len(list(no_data.rglob("*.npy"))) == (2 if compression == zipfile.ZIP_LZMA else 0)


def test_a_bad_npz_file_is_one_clear_sentence(tmp_path: Path):
    path = tmp_path / "a.npz"
    write_npz(path, x=np.arange(1000))
    with pytest.raises(FileFormatError, match="lacks an array"):
        formats.read_npz(path, "z")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(FileFormatError, match="not a complete npz"):
        formats.read_npz(path, "x")
    damaged = bytearray(content)
    damaged[len(content) // 3] ^= 0xFF
    path.write_bytes(bytes(damaged))
    with pytest.raises(FileFormatError, match="not a complete npz"):
        formats.read_npz(path, "x")
    write_npz(path, x=np.array([{}], dtype=object))  # pickled inside: refused
    with pytest.raises(FileFormatError, match="not a complete npz"):
        formats.read_npz(path, "x")


def test_a_damaged_cache_entry_is_not_believed(no_data: Path, tmp_path: Path):
    values = np.arange(100)
    write_npz(tmp_path / "a.npz", zipfile.ZIP_LZMA, x=values)
    formats.read_npz(tmp_path / "a.npz", "x")
    (entry,) = no_data.rglob("*.npy")
    good = entry.read_bytes()
    entry.write_bytes(good[:-1] + b"\x07")
    (again,) = formats.read_npz(tmp_path / "a.npz", "x")
    np.testing.assert_array_equal(again, values)
    assert entry.read_bytes() == good
    assert os.listdir(entry.parent) == [entry.name]  # no temporary file stays behind


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a folder below a file cannot be made, even by root
    write_npz(tmp_path / "a.npz", zipfile.ZIP_LZMA, x=np.arange(10))
    (values,) = formats.read_npz(tmp_path / "a.npz", "x")
    np.testing.assert_array_equal(values, np.arange(10))


def test_checksums(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"x")
    assert formats.wrong_checksums(tmp_path, ("a", "b")) == []
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing
    (tmp_path / "SHA256SUMS").write_text(f"{empty}  a\n{empty} *b\n\n{empty}  not-here\n")
    assert formats.wrong_checksums(tmp_path, ("a", "b", "unlisted")) == ["b"]


def test_an_npz_file_may_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write_npz(path, zipfile.ZIP_DEFLATED, a=np.zeros(10**6))
    with limits.using(unpacked=10**6), pytest.raises(FileFormatError, match="unpacks to more than 100 times its size"):
        formats.read_npz(path, "a")
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, header)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", stream.getvalue() + bytes(8))
    with pytest.raises(FileFormatError, match=r"declares the shape \(1000000000000,\) but holds 1 values"):
        formats.read_npz(path, "a")
