"""Networks, data and recipes of the API target, by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dubito
from dubito import likelihoods, priors, select
from fitting.valid_networks import Attention, Bag, LogitScale, Recurrent, WeightNorm, mlp, normalized


def convolution(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, outputs)
    )


def dropped(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, outputs))


def layer_norm(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, outputs))


def frozen(outputs: int) -> nn.Module:
    model = mlp(outputs)
    next(model.parameters()).requires_grad_(False)
    return model


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": mlp,
    "in place": lambda outputs: mlp(outputs, inplace=True),
    "linear": lambda outputs: nn.Linear(5, outputs),
    "convolution": convolution,
    "dropout": dropped,
    "batch norm": normalized,
    "layer norm": layer_norm,
    "lstm": Recurrent,
    "attention": Attention,
    "weight norm": WeightNorm,
    "embedding bag": Bag,
    "logit scale": LogitScale,
    "frozen": frozen,
}

# Recipes as text, so that a case is plain JSON.
RECIPES = [
    "MAP()", "MAP(prior_precision=0.1)", "MAP(start=fresh)", "MAP(train=False)",
    "Laplace()", "Laplace(structure=diag)", "Laplace(structure=full)", "Laplace(structure=low-rank, rank=3)",
    "Laplace(weights=select.last_layer())", "Laplace(structure=full, weights=select.subnetwork(5))",
    "Laplace(structure=full, weights=select.subspace(2, epochs=2))", "Laplace(structure=diag, curvature=fisher-empirical)",
    "Laplace(structure=diag, weights=select.random(4))", "Laplace(prior_precision=1.0, curvature=fisher-mc)",
    "Laplace(structure=diag, prior_groups=weight)", "Laplace(structure=full, curvature=hessian)",
    "Variational()", "Variational(estimator=flipout)", "Variational(estimator=weight, biases=random)",
    "Variational(weights=select.last_layer())", "Variational(family=low-rank, rank=2)", "Variational(optimizer=natural)",
    "Variational(prior=priors.LogUniform())", "Variational(family=full, weights=select.last_layer())",
    "Variational(weights=select.subspace(2, epochs=2))",
    "VBLL()", "SNGP(num_features=8)", "DKL(inducing=4)", "Packed(members=2)", "MIMO(members=2)",
    "Rank1(components=2)", "Rank1(components=2, batch=split)", "BatchEnsemble(members=2)",
    "BatchEnsemble(members=2, batch=repeat, normalization=component)",
    "SWAG(num_samples=2)", "SWAG(num_samples=2, weights=select.subspace(2, epochs=2))", "SWAG(num_samples=2, rank=0)",
    "Ensemble(2)", "Ensemble(2, start=model)", "Ensemble(2, bootstrap=True)", "Ensemble(2, recipe=Laplace())",
    "MCDropout()", "MCDropout(rate=0.2, learn=True)", "MCDropout(train=False)", "Snapshot(cycles=2)",
    "SGMCMC(burn_in=3, num_samples=3, thinning=1)", "SGMCMC(burn_in=3, num_samples=2, thinning=1, kernel=sgld, chains=2)",
    "SVGD(num_particles=3)", "HMC(burn_in=3, num_samples=3, chains=1, max_depth=2)",
    "HMC(method=hmc, burn_in=3, num_samples=2, chains=2, num_steps=2, weights=select.last_layer())",
    "ensembles.BatchNormNoise(num_samples=2)", "ensembles.TestTimeAugmentation(noise=0.1)",
    "Laplace(structure=ekfac)", "Auto(budget=0, train=False)",
]  # fmt: skip

LIKELIHOODS = [
    "categorical", "gaussian", "heteroscedastic", "bernoulli", "fixed noise", "poisson", "negative-binomial", "student-t",
    "mixture-density", "ordinal",
]  # fmt: skip
CLASSES = ("categorical", "ordinal")
DATA = ["pair", "arrays", "loader", "shuffled loader", "dataset", "batches", "tensor dataset", "dict batches"]


class Rows(Dataset[Any]):
    """A dataset that draws noise from the global generators, as augmentation does."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.01 * torch.randn(()) + 0.01 * random.random() + 0.01 * np.random.rand(), self.y[index]


def outputs_of(likelihood: str, classes: int) -> int:
    several = {
        "categorical": classes,
        "ordinal": classes - 1,
        "heteroscedastic": 2,
        "student-t": 2,
        "mixture-density": 9,
    }
    return several.get(likelihood, 1)


def likelihood_of(name: str) -> Any:
    return likelihoods.Gaussian(noise=0.5) if name == "fixed noise" else name


def tensors_of(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case["seed"])
    x = torch.randn(case["rows"], 5, generator=generator) * case["scale"]
    if case["likelihood"] in CLASSES:
        return x, torch.randint(case["classes"], (case["rows"],), generator=generator)
    if case["likelihood"] == "bernoulli":
        return x, torch.randint(2, (case["rows"], 1), generator=generator).float()
    if case["likelihood"] in ("poisson", "negative-binomial"):
        return x, torch.randint(5, (case["rows"], 1), generator=generator).float()
    return x, torch.randn(case["rows"], 1, generator=generator)


def data_of(kind: str, x: Tensor, y: Tensor) -> Any:
    match kind:
        case "arrays":
            return x.numpy(), y.numpy()
        case "loader":
            return DataLoader(TensorDataset(x, y), batch_size=5)
        case "shuffled loader":
            return DataLoader(
                TensorDataset(x, y), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(1)
            )
        case "dataset":
            return Rows(x, y)
        case "batches":
            return [(a, b) for a, b in zip(x.split(5), y.split(5), strict=True)]
        case "tensor dataset":
            return TensorDataset(x, y)
        case "dict batches":
            return [(a, b) for a, b in zip(x.split(3), y.split(3), strict=True)]
    return x, y


__all__ = [
    "CLASSES",
    "DATA",
    "LIKELIHOODS",
    "NETWORKS",
    "RECIPES",
    "data_of",
    "dubito",
    "likelihood_of",
    "outputs_of",
    "priors",
    "select",
    "tensors_of",
]
