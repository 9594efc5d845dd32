"""Make the files of the first version that the recipes of the contract suite do not make.

    PYTHONPATH=<a checkout of the first version>/src python tests/contracts/first_version_files.py

They were made once, by the code of the first version, and stay as they are: see `SECURITY.md` for the promise.
`network_of` gives the architecture of each file in ``fixtures/v1``, which a reader must know.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import dubito
from dubito import MAP, Laplace, Snapshot, Training, compression

FILES = Path(__file__).parent / "fixtures" / "v1"
TRAINING = Training(epochs=3, lr=1e-2, batch_size=16)
# The families and uses with a file of their own, beyond those of `outputs_fixture`.
MORE = ("BatchNormNoise", "Tempered", "Guarded", "Snapshot", "MeanStudent", "DistributionStudent")


def data_of(task: str) -> tuple[Tensor, Tensor]:
    """Return a small data set."""
    x = torch.randn(45, 4, generator=torch.Generator().manual_seed(0))
    classes, numbers = (x[:, 0] > 0).long() + (x[:, 1] > 1), torch.stack([x[:, 0].sin(), x[:, 1]], 1)
    return x, classes if task == "classification" else numbers


def network_of(name: str, task: str) -> nn.Module:
    """Return a network of the architecture of one file; its weights do not matter."""
    outputs = 3 if task == "classification" else 6 if name == "DistributionStudent" else 2
    norm = nn.BatchNorm1d(6) if name == "BatchNormNoise" else nn.LayerNorm(6)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if name == "compressed":
            return nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, outputs))
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), norm, nn.Linear(6, outputs))


def posterior_of(name: str, task: str) -> dubito.Posterior:
    """Fit what one file holds."""
    data, likelihood = data_of(task), "categorical" if task == "classification" else "gaussian"
    model = network_of(name, task)
    if name == "BatchNormNoise":
        recipe = dubito.ensembles.BatchNormNoise(num_samples=4)
        return recipe.fit(model, data, likelihood=likelihood, training=TRAINING)
    if name == "Snapshot":
        return Snapshot(cycles=2).fit(model, data, likelihood=likelihood, training=TRAINING)
    point = MAP().fit(network_of("", task), data, likelihood=likelihood, training=TRAINING)
    laplace = Laplace().fit(point.model, data, likelihood=likelihood)
    if name == "Tempered":
        return dubito.decisions.temper(laplace, data)
    if name == "Guarded":
        levels = ((2, 4, torch.tensor([0.5, 0.5], dtype=torch.float64)),)
        known = dubito.runs.TrainingRange(-torch.ones(4), torch.ones(4), levels)
        return dubito.runs.GuardedPosterior(laplace, known)
    keep = "mean" if name == "MeanStudent" else "distribution"
    return dubito.distill(laplace, model, data[0], keep, training=TRAINING)


def main() -> None:
    """Write the files."""
    torch.set_num_threads(1)
    for task in ("classification", "regression"):
        for name in MORE:
            posterior_of(name, task).save(FILES / f"{name}-{task}.safetensors")
    model = network_of("compressed", "classification")
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(value.abs() > value.abs().quantile(0.9) if value.ndim > 1 else 1.0)
    steps = {name: 0.05 for name, value in model.named_parameters() if value.ndim > 1}
    for format in ("dense", "csr", "coded"):
        compression.save(FILES / f"compressed-{format}.bin", model, format, steps)


if __name__ == "__main__":
    main()
