"""Tiny files in every layout a data folder may have, so that the readers are tested on any machine."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from tiny_files import write_idx, write_npz, write_text


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No data folder is set, and the user's cache is an empty folder, which this returns."""
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dubito"


@pytest.fixture
def tiny_data(no_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a few rows of everything."""
    root, rng = tmp_path / "data", np.random.default_rng(0)
    for name in ("mnist", "fashion-mnist", "notmnist"):
        for part, count in (("train", 40), ("t10k", 20)):
            write_idx(root / name / f"{part}-images-idx3-ubyte.gz", rng.integers(0, 256, (count, 28, 28)))
            write_idx(root / name / f"{part}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    write_npz(root / "kmnist/kmnist-test-imgs.npz", arr_0=rng.integers(0, 256, (20, 28, 28), dtype=np.uint8))
    write_npz(root / "kmnist/kmnist-test-labels.npz", arr_0=(np.arange(20) % 10).astype(np.uint8))
    for name in ("data_batch_1", "data_batch_2", "test_batch"):
        images = rng.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
        write_npz(root / f"cifar10/{name}.npz", zipfile.ZIP_LZMA, images=images, labels=np.arange(20) % 10)
    _write_uci(root / "uci/yacht/data.npz", rng)
    write_text(root / "text/rt-polarity.pos.gz", "a fine\x85film \na moving caf\xe9 story\n" * 20, "latin-1")
    write_text(root / "text/rt-polarity.neg.gz", "a bad film\n" * 40, "latin-1")
    write_text(root / "text/SMSSpamCollection.tsv.gz", "ham\tsee you\nspam\tWIN a £10 prize\n" * 20)
    write_text(root / "small/mcycle.csv", '"","times","accel"\n' + "".join(f'"{i}",{i}.5,{-i}\n' for i in range(20)))
    dates = "".join(f"19{year}0101,{'' if year == 60 else 300 + year}\n" for year in range(58, 79))
    write_text(root / "small/mauna_loa_co2_weekly.csv", "date,co2\n" + dates)
    header = '"","npreg","glu","bp","skin","bmi","ped","age","type"\n'
    for part in ("train", "test"):
        write_text(
            root / f"small/pima_{part}.csv", header + '"1",1,2,3,4,5,0.5,20,"No"\n"2",2,3,4,5,6,0.7,30,"Yes"\n' * 5
        )
    write_npz(root / "toy1d/agw_1d.npz", data=rng.normal(size=(20, 2)))
    write_npz(root / "toy1d/matern_1d.npz", data=rng.normal(size=(20, 2)).astype(np.float32))
    write_npz(root / "toy1d/my_1d.npz", data=rng.normal(size=(20, 4)).astype(np.float32))
    monkeypatch.setenv("DUBITO_DATA", str(root))
    return root


def _write_uci(path: Path, rng: np.random.Generator) -> None:
    inputs = rng.normal(size=(30, 6)) * [1, 10, 100, 1, 1, 0] + [0, 0, 1e4, 0, 0, 0.1]  # the last one is constant
    splits = np.stack([rng.permutation(30) for _ in range(20)])
    order = np.argsort(inputs, axis=0, kind="stable").T
    write_npz(
        path,
        x=inputs,
        y=rng.normal(size=30) * 3 + 7,
        train_idx=splits[:, 3:],
        test_idx=splits[:, :3],
        gap_train_idx=np.concatenate([order[:, :10], order[:, 20:]], axis=1),
        gap_test_idx=order[:, 10:20],
    )
