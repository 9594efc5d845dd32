"""What each of two processes sees where one of them fails, and where it goes on after that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from parts_cases import fit, network, rows, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import MAP, Ensemble, Laplace, rules, select
from dubito.core import distributed


class Own(Exception):
    """An error class that the other process does not know by name."""


class Failing(nn.Module):
    """A layer that fails in one process after some calls."""

    def __init__(self, kind: type[BaseException], after: int) -> None:
        super().__init__()
        self.kind, self.left = kind, after

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.left -= 1
            if self.left == 0 and dist.get_rank() == 1:  # also while each process trains members of its own
                raise self.kind("broken")
        return x


class FailingData(TensorDataset):
    """A data set that fails in the second process, at one of its examples."""

    def __getitem__(self, index: Any) -> Any:
        if index == 20 and distributed.rank() == 1:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def failing(kind: type[BaseException] = RuntimeError, after: int = 4) -> nn.Module:
    return network(1, Failing(kind, after))


def ask(call: Callable[[], Any]) -> str:
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # as a script does that must go on
        notes = " ".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error} | {notes}"
    return "no error"


def errors(folder: Path) -> dict[str, Any]:
    """Each call fails in the second process only; all of them are made one after the other."""
    posterior, rank = fit(MAP(), rows()), distributed.rank()
    calls: dict[str, Callable[[], Any]] = {
        "at the start": lambda: fit(MAP(), rows(), likelihood=("categorical", "gauss")[rank]),
        "in a step": lambda: fit(MAP(), rows(), failing()),
        "of a class of its own": lambda: fit(MAP(), rows(), failing(Own)),
        "interrupted": lambda: fit(MAP(), rows(), failing(KeyboardInterrupt)),
        "in the loader": lambda: fit(MAP(), DataLoader(FailingData(*rows()), batch_size=8)),
        "in a member": lambda: fit(Ensemble(2), rows(), failing()),
        "in curvature": lambda: fit(Laplace(), DataLoader(FailingData(*rows()), batch_size=8)),
        "in the evaluation": lambda: dubito.evaluate(posterior, DataLoader(FailingData(*rows()), batch_size=8)),
        "in the selection": lambda: select.subnetwork(5).resolve(network(), rows(), ("categorical", "x")[rank]),
        "in the compression": lambda: dubito.compress(
            posterior, rules.Magnitude(0.5), finetune=rows(), temperature=1.0 + rank
        ),
        "in both": lambda: fit(MAP(), (rows()[0], rows()[1] + 7)),
        "different work": lambda: fit(MAP(), rows()) if rank else dubito.evaluate(posterior, rows()),
    }  # fmt: skip
    said = {name: ask(call) for name, call in calls.items()}
    return {"said": said, "after": weights(fit(MAP(), rows()))}


def refused(folder: Path) -> str:
    """What is said of a network whose parameters are sharded."""
    from torch.distributed.fsdp import fully_shard

    model = network().float()
    fully_shard(model)
    x, y = rows()
    try:
        fit(MAP(), (x.float(), y), model)
    except dubito.errors.UnsupportedError as error:
        return str(error)
    return "no error"


def everything(folder: Path) -> dict[str, Any]:
    """Run all cases."""
    return {case.__name__: case(folder) for case in (errors, refused)}
