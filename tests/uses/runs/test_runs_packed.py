"""A run in one file: it predicts as before, and a file that was altered or forged is refused in one sentence."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from dubito.errors import FileFormatError
from run_cases import houses

from dubito import Laplace, runs


@pytest.fixture(scope="module")
def run() -> runs.TableRun:
    return runs.fit(
        houses(), "price", recipe=Laplace(structure="kron", prior_precision=1.0), network="mlp(hidden=[4])",
        training={"epochs": 3, "lr": 0.03}, progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def packed(run: runs.TableRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "houses.dubito"
    assert runs.pack(run, path) == path.stat().st_size
    return path


def test_it_predicts_as_the_run(run: runs.TableRun, packed: Path) -> None:
    new = houses(12, seed=1)
    found, expected = runs.load(packed).predict(new), run.predict(new)
    for name in run.columns:
        np.testing.assert_array_equal(found[name], expected[name])


def test_altered_files_are_refused(packed: Path, tmp_path: Path) -> None:
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "altered").write_bytes(content)
    with pytest.raises(FileFormatError, match="altered' is no run, or was altered or damaged"):
        runs.load(tmp_path / "altered")
    (tmp_path / "cut").write_bytes(packed.read_bytes()[:-100])
    with pytest.raises(FileFormatError, match="cut' is no run"):
        runs.load(tmp_path / "cut")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("../escape", b"x", "it holds '../escape'"),
        ("decisions/../../x.safetensors", b"x", "it holds"),
        ("run.json", b" " * 2**26, "far more than a run of its size"),
        ("run.json", b"{}", "forged/run.json' lacks"),
    ],
)
def test_forged_files_are_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    with zipfile.ZipFile(tmp_path / "forged", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    with pytest.raises(FileFormatError, match=says):
        runs.load(tmp_path / "forged")
    assert not (tmp_path.parent / "escape").exists()
