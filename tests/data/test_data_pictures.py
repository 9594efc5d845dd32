"""Pictures as tables: folders of files, archives, and data sets by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from dubito.core.errors import DubitoError, FileFormatError
from dubito.data import load_table, read_table
from dubito.data.pictures import is_of_pictures
from dubito.data.table_files import default_target

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 5, 4), dtype=np.uint8)
LABELS = np.arange(24) % 2


def folder_of(path: Path, pictures: np.ndarray, classes: bool = True) -> Path:
    for place, (pixels, label) in enumerate(zip(pictures, LABELS, strict=False)):
        folder = path / ("even", "odd")[label] if classes else path
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{place:02}.png")
    return path


def pixels_of(path: Path | str) -> np.ndarray:
    table = read_table(path)
    names = [name for name in table.names if name.startswith("pixel_")]
    return np.stack([table[name].numbers() for name in names], axis=1)


def test_a_folder_with_a_folder_per_class(tmp_path: Path) -> None:
    table = read_table(folder_of(tmp_path, PIXELS))
    assert table.names[:4] == ("file", "label", "pixel_0_0", "pixel_0_1")
    assert len(table) == 24
    order = [int(Path(name).stem) for name in table["file"].values]
    assert [("even", "odd")[place % 2] for place in order] == table["label"].values.tolist()
    np.testing.assert_allclose(pixels_of(tmp_path), PIXELS[order].reshape(24, -1) / 255, rtol=1e-12)
    assert default_target(str(tmp_path)) == "label"
    data = load_table(tmp_path, "label")
    assert is_of_pictures(table)
    assert "file" not in data.feature_names  # 24 names that are all different
    assert float(data.train[0].min()) >= 0
    assert float(data.train[0].max()) <= 1  # pixels are not standardised


def test_archives_and_data_sets_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", images=PIXELS, labels=LABELS)
    np.savez(tmp_path / "colour.npz", images=np.stack([PIXELS, 0 * PIXELS, PIXELS], axis=1))
    np.testing.assert_allclose(pixels_of(tmp_path / "some.npz"), PIXELS.reshape(24, -1) / 255, rtol=1e-12)
    np.testing.assert_allclose(
        pixels_of(tmp_path / "colour.npz"), 0.413 * PIXELS.reshape(24, -1) / 255, rtol=1e-9, atol=1e-12
    )
    assert "label" not in read_table(tmp_path / "colour.npz")
    ours, theirs = pixels_of("digits"), load_digits().data / 16
    assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs))
    assert default_target("digits") == "label"
    assert default_target("houses.csv") is None


def test_large_pictures_are_made_smaller(tmp_path: Path) -> None:
    halves = np.zeros((1, 56, 112), dtype=np.uint8)
    halves[:, :, 56:] = 255
    table = read_table(folder_of(tmp_path, halves, classes=False))
    assert table.names[0] == "file"
    assert "label" not in table
    assert table["pixel_27_13"].values == [0.0]
    assert table["pixel_27_14"].values == [1.0]
    assert "pixel_27_28" not in table


def test_what_are_no_pictures_is_said_in_a_sentence(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "mixed", PIXELS)
    Image.fromarray(PIXELS[0, :3]).save(folder / "odd" / "x.png")
    with pytest.raises(DubitoError, match=r"x\.png has 4 × 3 pixels, but .*00\.png has 4 × 5: make them equal"):
        read_table(folder)
    (folder / "odd" / "x.png").rename(folder / "x.png")
    with pytest.raises(DubitoError, match=r"x\.png is in no folder of a class"):
        read_table(folder)
    (folder / "x.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(FileFormatError, match="not a readable picture"):
        read_table(_only(folder / "x.png", tmp_path / "one"))
    for name, arrays, told in (
        ("flat", {"images": PIXELS[0]}, r"\[N, H, W\]"),
        ("few", {"images": PIXELS, "labels": LABELS[:3]}, "24 images, but labels of shape"),
        ("large", {"images": np.zeros((2, 64, 64))}, "64 × 64 pixels"),
        ("other", {"pictures": PIXELS}, "lacks an array"),
    ):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        with pytest.raises(DubitoError, match=told):
            read_table(tmp_path / f"{name}.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DubitoError, match="is a folder, not a table"):
        read_table(tmp_path / "empty")


def _only(file: Path, folder: Path) -> Path:
    folder.mkdir()
    file.rename(folder / file.name)
    return folder
