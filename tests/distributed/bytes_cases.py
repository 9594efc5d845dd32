"""How many bytes each of two processes gives to collective operations in some calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from parts_cases import fit, network, rows
from torch import nn

import dubito
from dubito import MAP, SGMCMC, Ensemble, Laplace
from dubito.core import distributed

WEIGHTS = 4 * 6 + 6 + 6 * 6 + 6 + 6 * 3 + 3  # of the network
FACTORS = sum(a * a + g * g + 1 for a, g in ((4, 6), (6, 6), (6, 3)))  # of its three layers, with a count
ROWS, BATCHES = 36, 5
DIRECTIONS = 3 + 5  # of a low-rank posterior of rank 3, with those that make it accurate


def counted(call: Callable[[], Any]) -> int:
    before = distributed.traffic.bytes
    call()
    return distributed.traffic.bytes - before


def everything(folder: Path) -> dict[str, int]:
    """Return the bytes of each call."""

    def cost(recipe: Any, **training: Any) -> int:
        model = network(1, nn.Linear(6, 6, dtype=None), nn.Tanh()).double()
        return counted(lambda: fit(recipe, rows(ROWS), model, training=training))

    def samples(number: int) -> int:
        return cost(SGMCMC(num_samples=number, chains=2, burn_in=10, thinning=1, step_size=1e-4))

    posterior = fit(MAP(), rows())
    ensemble: Any = fit(Ensemble(2), rows(), network(1, nn.Linear(6, 6), nn.Tanh()).double(), training={"epochs": 0})
    path = folder / f"member-{distributed.rank()}"
    ensemble.members[0].save(path)
    return {
        "start": cost(MAP(), epochs=0),
        "an epoch": (cost(MAP(), epochs=3) - cost(MAP(), epochs=1)) // 2,
        "diag": cost(Laplace(structure="diag")),
        "kron": cost(Laplace(structure="kron")),
        "full": cost(Laplace(structure="full")),
        "a batch of low rank": (
            cost(Laplace(structure="low-rank", rank=3)) - cost(Laplace(structure="low-rank", rank=3), batch_size=ROWS)
        ) // (BATCHES - 1),
        "100 rows": counted(lambda: dubito.evaluate(posterior, rows(280)))
        - counted(lambda: dubito.evaluate(posterior, rows(180))),
        "a member": (cost(Ensemble(4), epochs=0) - cost(Ensemble(2), epochs=0)) // 2,
        "its file": path.stat().st_size,
        "5 samples of 2 chains": samples(9) - samples(4),
    }  # fmt: skip
