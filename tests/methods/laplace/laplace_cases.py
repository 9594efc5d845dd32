"""Small problems of every likelihood and layout in float64, and brute force for what Laplace says about them."""

from __future__ import annotations

import torch
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from torch import Tensor, nn

from dubito import select
from dubito.methods.laplace import LaplacePosterior
from dubito.select.rule import SelectionRule
from oracles import Case


class Squeeze(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(-1)


def mlp(outputs: int, *after: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs), *after)


def case(name: str) -> Case:
    """A network with random weights, 12 inputs and random targets."""
    torch.manual_seed(3)
    likelihood: Likelihood
    flat, image = torch.randn(12, 3).double(), torch.randn(12, 2, 4, 3).double()
    match name:
        case "categorical":
            model, x, likelihood = mlp(3), flat, Categorical()
        case "bernoulli":
            model, x, likelihood = mlp(1, Squeeze()), flat, Bernoulli()
        case "labels":
            model, x, likelihood = mlp(2), flat, Bernoulli()
        case "gaussian":
            model, x, likelihood = mlp(2), flat, Gaussian(noise=0.5)
        case "gaussian [B]":
            model, x, likelihood = mlp(1, Squeeze()), flat, Gaussian(noise=0.5)
        case "heteroscedastic":
            model, x, likelihood = mlp(4), flat, HeteroscedasticGaussian()
        case "sequence":
            model, x, likelihood = mlp(3), torch.randn(12, 2, 3).double(), Categorical(ignore_index=-1)
        case "image":
            model, x, likelihood = (
                nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1)),
                image,
                Categorical(),
            )
        case "norm":
            layers = (
                nn.Conv2d(2, 2, 2),
                nn.BatchNorm2d(2),
                nn.ReLU(),
                nn.Flatten(),
                nn.LayerNorm(12),
                nn.Linear(12, 3),
            )
            model, x, likelihood = nn.Sequential(*layers), image, Categorical()
            layers[1](image.float()[:, :, 1:, :2])  # statistics that are not 0 and 1
        case "instance and rms norm":
            layers = (nn.Conv2d(2, 2, 2), nn.InstanceNorm2d(2, affine=True), nn.Flatten(), nn.RMSNorm(12))
            model, x, likelihood = nn.Sequential(*layers, nn.Linear(12, 3)), image, Categorical()
        case _:
            raise ValueError(name)
    model = model.double().eval()
    targets = likelihood.sample(model(x).detach(), generator=torch.Generator().manual_seed(1))
    if name == "sequence":
        targets[::5, 1] = -1
    return Case(model, x, targets, likelihood)


CASES = (
    "categorical", "bernoulli", "labels", "gaussian", "gaussian [B]", "heteroscedastic", "sequence", "image", "norm",
    "instance and rms norm",
)  # fmt: skip
STRUCTURES = ("kron", "full", "diag", "low-rank")
SELECTIONS: dict[str, SelectionRule] = {
    "all": select.all(),
    "last layer": select.last_layer(),
    "weights": select.layers("*.weight"),
    "random": select.random(9),
    "union": select.last_layer() | select.largest_magnitude(0.3),
}


def dense(posterior: LaplacePosterior) -> Tensor:
    """The covariance of the random weights as a matrix."""
    return posterior.covariance.solve(torch.eye(posterior.selection.num_weights, dtype=torch.float64))


def dense_curvature(posterior: LaplacePosterior) -> Tensor:
    """The curvature as a matrix, at the posterior's own noise."""
    scale = posterior.evidence.scale(posterior.noise)
    return scale * posterior.matrix.matmul(torch.eye(posterior.selection.num_weights, dtype=torch.float64))
