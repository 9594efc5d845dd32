"""Everything on an accelerator that refuses to mix devices and counts reads by the host (`device.cpp`).

The device is registered in processes of their own, because torch must know it before its first backward pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerator import stand_in

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Path:
    found = stand_in.build(Path(request.config.cache.mkdir("accelerator")))
    if found is None:
        pytest.skip("the stand-in accelerator needs a C++ compiler (g++ or clang++)")
    return found


def run(library: Path, *what: str) -> Any:
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(TESTS / "accelerator/device_cases.py"), str(library), *what]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def listed(failures: list[list[str]]) -> str:
    return "\n".join(f"{who}: {what}\n{error}" for who, what, error in failures)


# few processes, because each of them imports everything anew
@pytest.mark.parametrize("what", [("recipes",), ("networks", "uses"), ("no-double",)], ids=" and ".join)
def test_everything_runs(library: Path, what: tuple[str, ...]) -> None:
    failures = [failure for found in run(library, *what).values() for failure in found]
    assert not failures, listed(failures)


def test_reads_by_the_host(library: Path) -> None:
    found = run(library, "reads")["reads"]
    assert all(count <= 0.1 for count in found["step"].values()), found["step"]  # two per epoch, here of 23 steps
    assert all(count <= 0.1 for count in found["short"].values()), found["short"]
    assert all(count <= 0.1 for count in found["transition"].values()), found["transition"]  # one per 50, and per epoch
    assert all(count <= 3 for count in found["batch"].values()), found["batch"]
