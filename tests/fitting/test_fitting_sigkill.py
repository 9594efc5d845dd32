"""A process killed with SIGKILL, at points nobody chose, and started again ends where an unbroken run ends."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dubito import MAP, Training
from dubito.core import io, params

pytestmark = pytest.mark.slow

BATCHES = 43  # in one epoch


def examples() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(300, 6, generator=drawn), torch.randint(3, (300,), generator=drawn)


class Augmented(Dataset[Any]):
    """Examples that are drawn anew from all global generators, none of which is seeded."""

    inputs, targets = examples()

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(6) + random.random() + float(np.random.rand())  # noqa: NPY002
        return self.inputs[index] + 0.1 * noise, self.targets[index]


def run(target: str, checkpoint: str | None, started: Any) -> None:
    """Fit with everything that has state: dropout, BatchNorm, Adam, the loader's own generator, early stopping."""
    torch.set_num_threads(1)
    random.seed()
    torch.seed()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    loader = DataLoader(Augmented(), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(2))
    training = Training(epochs=6, lr=1e-2, early_stopping=5, checkpoint=checkpoint, checkpoint_every=0.0)
    started.set()
    posterior = MAP().fit(model, loader, validation=examples(), training=training)
    io.save(target, "weights", {"params": params.of(posterior.model), "buffers": params.buffers_of(posterior.model)})


def start(target: Path, checkpoint: Path | None) -> Any:
    """Start a new process and wait until it begins to fit."""
    context = multiprocessing.get_context("forkserver")  # imports torch once, for all of them
    context.set_forkserver_preload(["dubito.methods.map.recipe"])
    started = context.Event()
    process = context.Process(target=run, args=(str(target), checkpoint and str(checkpoint), started))
    process.start()
    assert started.wait(120)
    return process


def position(checkpoint: Path) -> int:
    saved = io.load(checkpoint, "checkpoint") if checkpoint.exists() else {"epoch": 0, "batch": 0}
    return saved["epoch"] * BATCHES + saved["batch"]


def test_a_killed_run_ends_in_the_same_weights(tmp_path: Path) -> None:
    whole, target, checkpoint = tmp_path / "whole", tmp_path / "target", tmp_path / "run"
    process, began = start(whole, None), time.monotonic()
    process.join()
    usual = time.monotonic() - began
    positions = []
    for _ in range(5):
        process = start(target, checkpoint)
        time.sleep(random.uniform(0.1, 0.5) * usual)
        process.kill()
        process.join()
        positions.append(position(checkpoint))
        if process.exitcode == 0:  # it was quicker
            break
        assert process.exitcode == -signal.SIGKILL
    assert positions == sorted(positions)  # no kill threw the run back, and none left a file that cannot be read
    assert any(place % BATCHES for place in positions)  # some came in the middle of an epoch
    process = start(target, checkpoint)
    process.join()
    assert process.exitcode == 0
    expected, found = io.load(whole, "weights"), io.load(target, "weights")
    for part in ("params", "buffers"):
        for name, value in expected[part].items():
            assert torch.equal(value, found[part][name]), name
