"""laplace-torch on the same models and points, for `laplace.py --peers`.

It would take hours on all points, so each piece runs on some of them and its time is scaled up. The result is a rough
estimate.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# (name, subset of weights, structure, backend, points to fit on, points to predict for)
PIECES = (
    ("diag", "all", "diag", "BackPackGGN", 1200, 32),
    ("kron", "all", "kron", "CurvlinopsGGN", 1200, 16),
    ("last-layer full", "last_layer", "full", "BackPackGGN", 1200, 1000),
)


def _peer() -> tuple[Any, Any]:
    """Import the package `laplace`, which the benchmark of the same name in this folder would hide."""
    here = Path(__file__).parent.resolve()
    before, sys.path = sys.path, [path for path in sys.path if Path(path or ".").resolve() != here]
    try:
        return importlib.import_module("laplace").Laplace, importlib.import_module("laplace.curvature")
    finally:
        sys.path = before


def peer_works(model: nn.Module, train: Any, test: Any) -> dict[str, tuple[Callable[[], Any], float]]:
    """Return pieces of work and the factors that scale them to all points; empty where the peer is not installed."""
    try:
        Laplace, backends = _peer()
    except ImportError:
        print("laplace-torch is not installed: only Dubito is measured.")
        return {}
    found: dict[str, tuple[Callable[[], Any], float]] = {}
    for name, subset, structure, backend, num_fit, num_predict in PIECES:
        loader = DataLoader(TensorDataset(*(part[:num_fit] for part in train)), batch_size=128)
        options = {"subset_of_weights": subset, "hessian_structure": structure}
        kind = getattr(backends, backend)

        clean = copy.deepcopy(model)  # a backend leaves hooks and tensors on the model it was given

        def fit(loader: Any = loader, options: Any = options, kind: Any = kind, clean: nn.Module = clean) -> Any:
            posterior = Laplace(copy.deepcopy(clean), "classification", backend=kind, prior_precision=35.0, **options)
            posterior.fit(loader)
            return posterior

        posterior = fit()
        inputs = test[:num_predict].split(16)
        found[f"laplace-torch {name} fit"] = (fit, len(train[0]) / num_fit)
        found[f"laplace-torch {name} predict"] = (
            lambda posterior=posterior, inputs=inputs: [posterior(x, link_approx="probit") for x in inputs],
            len(test) / num_predict,
        )
    torch.set_num_threads(1)
    return found
