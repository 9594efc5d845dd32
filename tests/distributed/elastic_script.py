"""A script for `torchrun`: the second process kills itself in the middle of two fits, and all are started again."""

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
from parts_cases import fit, network, part, rows, weights
from torch import Tensor, nn

from dubito import Laplace, Variational
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
    """Run each fit with deaths and a checkpoint, and once more without."""
    warnings.simplefilter("ignore", ShardsWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases: dict[str, Any] = {"parts": (Variational(), part()), "laplace": (Laplace(structure="diag"), rows())}
    found: dict[str, Any] = {}
    for name, (recipe, data) in cases.items():
        file = {"checkpoint": str(FOLDER / name), "checkpoint_every": 0.0}
        broken = fit(recipe, data, network(1, Deadly(name)), training=file)
        whole = fit(recipe, data, network(1, nn.Identity()))
        found[name] = {"broken": weights(broken), "whole": weights(whole)}
        found[name]["variances"] = {kind: each.marginals()[1] for kind, each in (("broken", broken), ("whole", whole))}
    if dist.get_rank() == 0:
        found["restarts"] = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        io.save(FOLDER / "results", "results", found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
