"""A script for `torchrun`: the second process kills itself in the middle of a fit, and all are started again."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dubito.errors import ShardsWarning
from parts_cases import fit, network, part, weights
from torch import Tensor, nn

from dubito import Variational
from dubito.core import io

FOLDER = Path(sys.argv[1])


class Deadly(nn.Module):
    """A layer in whose fourth call the second process dies, the first time."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.mark, self.left = FOLDER / f"{name}-died", 4

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def main() -> None:
    """Run a fit with a death and a checkpoint, and once more without."""
    warnings.simplefilter("ignore", ShardsWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    file = {"checkpoint": str(FOLDER / "parts"), "checkpoint_every": 0.0}
    fits = {
        "broken": fit(Variational(), part(), network(1, Deadly("parts")), training=file),
        "whole": fit(Variational(), part(), network(1, nn.Identity())),
    }
    if dist.get_rank() == 0:
        found: dict[str, Any] = {
            name: {"weights": weights(each), "variances": each.marginals()[1]} for name, each in fits.items()
        }
        found["restarts"] = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        io.save(FOLDER / "results", "results", found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
