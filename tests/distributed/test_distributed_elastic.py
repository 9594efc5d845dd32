"""A process that is killed is started again by `torchrun`, and the run ends as if nothing had happened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dubito.core import io

pytestmark = pytest.mark.slow


def test_killed_processes_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).with_name("elastic_script.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    # without it a restarted process may find the address of a dead one (https://github.com/pytorch/pytorch/issues/135712)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*launch, "--monitor-interval=0.1", str(script), str(tmp_path)],
        env=environment, timeout=200, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = io.load(tmp_path / "results", "results")
    assert found["restarts"] == 1
    torch.testing.assert_close(found["broken"], found["whole"], rtol=0.0, atol=0.0)
