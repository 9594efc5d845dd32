"""Two processes find the mixture that one finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from rank1_worker import everything

from dubito.core import io


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    script, outputs = str(Path(__file__).with_name("rank1_worker.py")), [tmp_path / str(rank) for rank in range(2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    workers = [
        subprocess.Popen([sys.executable, script, str(tmp_path / "store"), str(rank), "2", str(out)], env=environment)
        for rank, out in enumerate(outputs)
    ]
    try:
        alone = everything()
        assert [worker.wait(timeout=240) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    first, second = (io.load(output, "results") for output in outputs)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    for name in ("points", "prior"):
        torch.testing.assert_close(first[name], alone[name], rtol=1e-10, atol=1e-10)
