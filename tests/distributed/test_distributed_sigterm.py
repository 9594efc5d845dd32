"""When torchrun stops its processes, they agree to stop between two steps and leave a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dubito.core import io

pytestmark = pytest.mark.slow

SCRIPT = """
    import sys, time, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from dubito import MAP, Training
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    class Slow(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                time.sleep(0.02)
                yield batch
    data = Slow(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16)
    print("ready", flush=True)
    training = Training(epochs=100_000, checkpoint="run", checkpoint_every=1e9)
    MAP().fit(nn.Linear(4, 2), data, training=training, progress=False)
"""


def test_torchrun_stops_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("w") as out:
        command = [sys.executable, *words]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out) as process:
            until = time.monotonic() + 120
            while log.read_text().count("ready") < 2 and time.monotonic() < until:
                time.sleep(0.2)
            time.sleep(3)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) != 0
    assert re.search(r"signal: (SIGTERM|15)", log.read_text()), log.read_text()
    saved = io.load(tmp_path / "run", "checkpoint")
    assert saved["done"] is False
    assert saved["epoch"] * 4 + saved["batch"] > 0
