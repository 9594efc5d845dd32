"""Posteriors of every family over tiny networks, and how to run an exported file without Dubito."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.ensembles import BatchNormNoise, TestTimeAugmentation
from torch import Tensor, nn

import dubito
from dubito import (
    DKL,
    HMC,
    MAP,
    SGMCMC,
    SWAG,
    VBLL,
    BatchEnsemble,
    Ensemble,
    Laplace,
    MCDropout,
    Packed,
    Posterior,
    Rank1,
    Training,
    Variational,
    decisions,
    priors,
    select,
)
from extras import needs

# `make test-extras` writes ONNX, `make test` programs of torch.export.
SUFFIX = ".onnx" if os.environ.get("DUBITO_TEST_EXTRAS") else ".pt2"
any_format = pytest.mark.skipif(SUFFIX == ".onnx", reason="does not depend on the format: make test runs it")


def share(cases: Sequence[Any]) -> list[Any]:
    """Every other case in one format, the others in the other: a graph takes seconds to record."""
    return list(cases[SUFFIX == ".onnx" :: 2])


TASKS = ("classes", "numbers")
SHORT = Training(epochs=1, lr=1e-2, batch_size=20)
CHAIN: dict[str, Any] = {"burn_in": 5, "num_samples": 4, "temperature": 0.1}
RECIPES: dict[str, Any] = {
    "map": MAP(),
    "laplace of all layers": Laplace(prior_precision=1.0),
    "laplace of the last layer": Laplace(weights=select.last_layer(), structure="full", prior_precision=1.0),
    "laplace of a subnetwork": Laplace(weights=select.largest_magnitude(9), structure="full", prior_precision=1.0),
    "variational": Variational(),
    "variational in groups": Variational(prior=priors.NormalJeffreys()),
    "rank1": Rank1(components=2, start="model"),
    "batch ensemble": BatchEnsemble(members=2, start="model"),
    "deep kernel": DKL(inducing=4),
    "ensemble": Ensemble(members=2),
    "ensemble of laplace": Ensemble(members=2, recipe=Laplace(weights=select.last_layer(), prior_precision=1.0)),
    "head": VBLL(),
    "packed": Packed(members=2),
    "swag": SWAG(rank=2, collect_every=1),
    "dropout": MCDropout(0.3),
    "augmentation": TestTimeAugmentation(noise=0.1),
    "statistics": BatchNormNoise(num_samples=4),
    "sgmcmc of the last layer": SGMCMC(weights=select.last_layer(), thinning=1, **CHAIN),
    "hmc in a subspace": HMC(weights=select.subspace(3, "random"), chains=1, **CHAIN),
}


def inputs(num: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def targets(x: Tensor, task: str) -> Tensor:
    return (x[:, 0] > 0).long() + (x[:, 1] > 1) if task == "classes" else torch.stack([x[:, 0].sin(), x[:, 1]], 1)


def network(outputs: int, *layers: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), *(layers or (nn.Tanh(),)), nn.Linear(6, outputs)).eval()


@cache
def fitted(name: str, task: str = "classes") -> Posterior:
    recipe, x = RECIPES[name], inputs(60, 0)
    norm = (nn.BatchNorm1d(6), nn.ReLU()) if name in ("statistics", "swag") else ()
    model = network(3 if task == "classes" else 2, *norm)
    likelihood: Any = "categorical" if task == "classes" else "gaussian"
    if recipe.needs_trained_model:
        model = MAP().fit(model, (x, targets(x, task)), likelihood=likelihood, training=SHORT).model
    training = None if recipe.needs_trained_model else SHORT
    return recipe.fit(model, (x, targets(x, task)), likelihood=likelihood, training=training, progress=False)


def calibration(task: str = "classes", num: int = 120) -> tuple[Tensor, Tensor]:
    x = inputs(num, 1)
    return x, targets(x, task)


def run_file(path: Path, *given: Any) -> dict[str, Tensor]:
    """Run an exported file as a stranger would, and return its outputs by name."""
    names = describe(path)["outputs"]
    if path.suffix == ".pt2":
        found = _program(path, path.stat().st_mtime_ns)[0](*given)
    else:
        session = needs("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
        assert [one.name for one in session.get_outputs()] == names
        keys = [one.name for one in session.get_inputs()]
        found = session.run(None, {key: value.numpy() for key, value in zip(keys, given, strict=True)})
    return {name: torch.as_tensor(value) for name, value in zip(names, found, strict=True)}


def describe(path: Path) -> dict[str, Any]:
    """Return what a file says of itself."""
    if path.suffix == ".onnx":
        (entry,) = needs("onnx").load(str(path)).metadata_props
        assert entry.key == "dubito"
        return json.loads(entry.value)
    return _program(path, path.stat().st_mtime_ns)[1]


@lru_cache(maxsize=2)
def _program(path: Path, changed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return what a file computes and what it says of itself; loading takes longer than anything else here."""
    extra = {"dubito.json": ""}
    program = torch.export.load(path, extra_files=extra)
    return program.module(), json.loads(extra["dubito.json"])


def expected(posterior: Posterior, x: Any, names: Any, **options: Any) -> dict[str, Tensor]:
    prediction: Any = posterior.predict(x, **options)
    return {name: getattr(prediction, "mode" if name == "label" else name) for name in names}


DIRICHLET = dubito.transfer.Dirichlet
DECISIONS: dict[str, Any] = {
    "answer": decisions.Rejector,
    "unfamiliar": decisions.Detector,
    "set": decisions.ConformalSets,
}
