"""The numbers of the fixture still come out, and its files still load. `outputs_fixture.py` makes the fixture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from first_version_files import network_of
from outputs_fixture import FILES, FOLDER, outputs, probe
from safetensors import safe_open
from test_posterior_contract import RECIPES, TASKS, problem, quantities

import dubito
from dubito import compression

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("index", range(len(RECIPES)), ids=lambda index: repr(RECIPES[index]))
def test_the_same_seed_gives_the_same_numbers_as_before(index: int, task: str) -> None:
    with safe_open(FOLDER / "outputs.safetensors", "pt") as stored:
        if stored.metadata()["probe"] != probe():
            pytest.skip("this machine's arithmetic differs from that of the machine that made the fixture")
        for name, value in outputs(index, task).items():
            assert name in stored.keys(), f"run python tests/contracts/outputs_fixture.py {index}"  # noqa: SIM118
            assert torch.equal(value, stored.get_tensor(name)), name


@pytest.mark.parametrize("file", sorted(FILES.glob("*.safetensors")), ids=lambda file: file.stem)
def test_files_of_the_first_version_load(file: Path) -> None:
    name, _, task = file.stem.rpartition("-")
    posterior = dubito.load(file, network_of(name, task))
    prediction = posterior.predict(problem(task, torch.float32)[0])
    assert all(bool(value.isfinite().all()) for value in quantities(prediction).values())


def test_compressed_files_of_the_first_version_load() -> None:
    model = network_of("compressed", "classification")
    found = {form: compression.load(FILES / f"compressed-{form}.bin", model) for form in ("dense", "csr", "coded")}
    for name, value in found["dense"].named_parameters():
        assert torch.equal(found["csr"].get_parameter(name), value)
        assert (found["coded"].get_parameter(name) - value).abs().max() <= (0.05 / 2 + 1e-6 if value.ndim > 1 else 0)


def test_a_new_process_knows_every_family() -> None:
    kinds = {"Snapshot", "MeanStudent", "DistributionStudent", "SNGP", "DKL", "MIMO"}  # of other families' files
    families = {file.stem.rpartition("-")[0] for file in FILES.glob("*.safetensors")} - kinds
    code = "import dubito; from dubito.core.settings import load_all; load_all(); print(*dubito.Posterior._families)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert families == set(found.stdout.split())  # so there is a file of every family
