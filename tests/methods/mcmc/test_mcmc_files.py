"""Samples in files: the space is reserved before the first step, and a run that goes on knows its own samples."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from dubito.errors import FileFormatError
from torch import nn

from dubito import SGMCMC, Posterior, Training
from dubito.methods.mcmc import chains

RECIPE = SGMCMC(burn_in=4, thinning=2, num_samples=6, memory=1e-6)


def fit(checkpoint: Path | None = None, seed: int = 0) -> Posterior:
    torch.manual_seed(1)
    x = torch.randn(20, 3)
    training = Training(checkpoint=None if checkpoint is None else str(checkpoint), checkpoint_every=0.0)
    generator = torch.Generator().manual_seed(seed)
    return RECIPE.fit(nn.Linear(3, 2), (x, (x[:, 0] > 0).long()), training=training, generator=generator)


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_full_disk_is_found_before_the_first_step(
    with_checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "reserve", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(FileFormatError, match=r"The samples need 0\.0 MB in the folder .*No space left on device"):
        fit(tmp_path / "run" if with_checkpoint else None)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_no_signal_ends_the_process_where_files_may_not_grow(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: without the reservation writes beyond it fail too late."""
    code = (
        "import resource, torch; from torch import nn; import dubito\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "recipe = dubito.SGMCMC(burn_in=2, thinning=1, num_samples=50, memory=1e-6)\n"
        "x = torch.randn(20, 100)\n"
        "try: recipe.fit(nn.Linear(100, 10), (x, torch.arange(20) % 10))\n"
        "except dubito.errors.FileFormatError as error: print(error)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (found.returncode, "The samples need 0.2 MB" in found.stdout) == (0, True), found


@pytest.mark.slow
def test_samples_of_another_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fit().digest()
    assert fit(tmp_path / "run").digest() == expected
    assert fit(tmp_path / "run").digest() == expected  # read back from its files
    fit(tmp_path / "other", seed=7)
    os.replace(tmp_path / "other.chain0", tmp_path / "run.chain0")
    with pytest.raises(FileFormatError, match="the file holds other samples"):
        fit(tmp_path / "run")


def test_a_longer_file_of_an_earlier_run_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "run.chain0").write_bytes(bytes(100_000))
    fit(tmp_path / "run")
    assert fit(tmp_path / "run").digest() == fit().digest()
