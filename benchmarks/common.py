"""What benchmarks share: ratios measured side by side in one run, on one thread, in process CPU time."""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito.data import DataSet


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the process CPU time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def ratios(unit: Callable[[], Any], works: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, list[float]]:
    """Return, for each piece of work and each round, its time over that of `unit` measured right before it."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            base = cpu_seconds(unit)
            found[name].append(cpu_seconds(work) / base)
    return found


def summary(values: list[float]) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):7.2f}  ({min(values):.2f} to {max(values):.2f})"


def train_epoch(model: nn.Module, inputs: Tensor, targets: Tensor, batch_size: int = 128) -> None:
    """One plain training epoch, as a user without any library would write it."""
    optimizer = torch.optim.Adam(model.parameters())
    for start in range(0, len(inputs), batch_size):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[start : start + batch_size]), targets[start : start + batch_size]).backward()
        optimizer.step()


def channels_last(data: DataSet) -> DataSet:
    """The same images with channels last in memory, which convolutions on a CPU take faster."""

    def turned(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)

    return dataclasses.replace(data, parts={name: (turned(x), y) for name, (x, y) in data.parts.items()})


def peak_memory(work: Callable[..., Any], *args: Any) -> float:
    """Return by how many megabytes `work(*args)` raises the peak memory of a process of its own.

    `work` is called with a function that it must call once models and data are in place: memory is counted from there.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(send, work, args))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"measuring the memory of {work.__name__}{args} failed")
    return receive.recv()


def _measured(send: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    before: list[float] = []

    def start() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of loading and training, is forgotten
        before.append(_peak())

    work(*args, start)
    send.send(_peak() - before[0])


def _peak() -> float:
    """The most memory that this process held since the peak was last forgotten, in megabytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return float(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]
