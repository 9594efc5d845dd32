"""What one process, and each of two, fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank1_cases import blobs, small

from dubito import BatchEnsemble, Rank1, Training
from dubito.core import params


def everything(_: Path) -> dict[str, Any]:
    """Point components that see every row: without noise the result does not depend on the number of processes."""
    data, training = blobs(41, torch.float64), Training(epochs=3, lr=1e-2, batch_size=8)
    found = {}
    for name, recipe in {"points": BatchEnsemble(batch="repeat"), "prior": Rank1(family="delta")}.items():
        posterior = recipe.fit(small(torch.float64), data, training=training)
        found[name] = {"loc": posterior.mixture.loc, "bias": posterior.mixture.bias, **params.of(posterior.model)}
    noisy = Rank1(batch="split").fit(small(torch.float64), data, training=training)
    return {**found, "noisy": {"loc": noisy.mixture.loc, "scale": noisy.mixture.scale}}
