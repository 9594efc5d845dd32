"""Compare the memory that posteriors hold with the formulas of docs/accelerators.md.

    python benchmarks/memory_formulas.py

Counts the bytes of all tensors that are alive after a fit and a prediction and were not before (each storage once),
on the MLP 784-300-100-10. What is kept for the next prediction (weight samples, buffers) is part of it.
"""

from __future__ import annotations

import gc
import itertools
import math
import warnings
from typing import Any

import torch
from torch import nn

from dubito import MAP, SGMCMC, SWAG, BatchEnsemble, Ensemble, Laplace, Training, Variational, models, select
from dubito.fitting.recipe import Recipe

SIZES = [784, 300, 100, 10]
PAIRS = list(itertools.pairwise(SIZES))
D = sum(i * o + o for i, o in PAIRS)
SQUARES = sum(i * i + o * o for i, o in PAIRS)
LAST = 100 * 10 + 10
CASES: list[tuple[str, Recipe, float]] = [
    ("MAP", MAP(), 4 * D),
    ("Variational", Variational(), 8 * D),
    ("BatchEnsemble of 4", BatchEnsemble(4), 4 * (D + 2 * 4 * sum(i + o for i, o in PAIRS))),
    ("Ensemble of 3", Ensemble(3), 4 * 3 * D),
    ("SWAG of rank 5", SWAG(rank=5), 4 * D + 4 * D * 6),
    ("SGMCMC of 10", SGMCMC(num_samples=10, burn_in=20), 4 * 10 * D),
    ("Laplace, diagonal", Laplace(structure="diag", prior_precision=1.0), 4 * D + 28 * D),
    ("Laplace, Kronecker", Laplace(prior_precision=1.0), 4 * D + 12 * SQUARES + 28 * D),
    ("Laplace, full last layer", Laplace("full", select.last_layer(), prior_precision=1.0), 4 * D + 8 * LAST**2),
    (
        "Laplace, rank 10",
        Laplace(structure="low-rank", rank=10, prior_precision=1.0),
        4 * D + D * (16 * 15 + 8 * 10 + 16),
    ),
]


def alive() -> dict[int, int]:
    """Return the bytes of all live tensors, by storage."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.device.type == "cpu" and not each.is_sparse:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x, y = torch.randn(64, 1, 28, 28), torch.arange(64) % 10
    print("| posterior | formula, MB | measured, MB | ratio |\n|---|---|---|---|")
    for name, recipe, formula in CASES:
        model: nn.Module = models.lenet_300_100()
        before = alive()
        training: Any = None if isinstance(recipe, Laplace) else Training(epochs=6, batch_size=32, lr=1e-3)
        posterior = recipe.fit(model, (x, y), training=training, progress=False)
        posterior.predict(x[:4])
        after = alive()
        held = sum(size for at, size in after.items() if at not in before)
        print(f"| {name} | {formula / 1e6:.1f} | {held / 1e6:.1f} | {held / formula:.2f} |", flush=True)
        assert math.isfinite(held)
        del posterior


if __name__ == "__main__":
    main()
