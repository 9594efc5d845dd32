"""Run one function of a file in two processes that exchange data.

The processes are forked from a server that has imported torch and the library, which takes longer than most cases.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dubito
from dubito.core import io
from dubito.core.errors import TrustWarning

TIMEOUT = 240
_CONTEXT = multiprocessing.get_context("forkserver")
# `torch.autograd.grad` imports `symbolic_shapes` and with it sympy
_PRELOADED = ["torch.distributed", "torch.fx.experimental.symbolic_shapes"]
_CONTEXT.set_forkserver_preload([*_PRELOADED, *{module for module, _ in dubito._PUBLIC.values()}])


def run(file: str, case: str, folder: Path) -> tuple[Any, Any]:
    """Return what the function `case(folder)` of `file` returns in each of two processes."""
    with started(file, case, folder) as wait:
        return wait()


@contextmanager
def started(file: str, case: str, folder: Path) -> Iterator[Callable[[], tuple[Any, Any]]]:
    """Let two processes run `case(folder)` of `file` during a block, and yield what waits for their two results.

    They meet in a file, so no port can be taken.
    """
    outputs = [folder / f"{case}-{rank}" for rank in range(2)]
    store = str(folder / f"{case}-store")
    workers = [
        _CONTEXT.Process(target=_main, args=(file, case, store, rank, str(output), str(folder)))
        for rank, output in enumerate(outputs)
    ]
    for worker in workers:
        worker.start()

    def wait() -> tuple[Any, Any]:
        for worker in workers:
            worker.join(TIMEOUT)
        assert [worker.exitcode for worker in workers] == [0, 0]
        first, second = (io.load(output, "results") for output in outputs)
        return first, second

    try:
        yield wait
    finally:
        for worker in workers:
            worker.kill()


def _main(file: str, case: str, store: str, rank: int, output: str, folder: str) -> None:
    import torch.distributed as dist

    warnings.simplefilter("error")
    warnings.simplefilter("ignore", TrustWarning)  # as in all tests: most networks here are not trained
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    sys.path.insert(0, str(Path(file).parent))  # for what stands beside the file
    spec = importlib.util.spec_from_file_location("cases", file)
    assert spec is not None
    assert spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = cases
    spec.loader.exec_module(cases)
    io.save(output, "results", getattr(cases, case)(Path(folder)))
    dist.destroy_process_group()
