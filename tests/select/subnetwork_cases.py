"""Small networks in float64 for subnetworks, and brute force for what the rules and the posterior say about them."""

from __future__ import annotations

import torch
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from torch import Tensor, nn

from oracles import Case


class Tied(nn.Module):
    """One square matrix is used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(x)).mean(1))


class Recurrent(nn.Module):
    """Without a layer rule: gradients come example by example."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(2, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def case(name: str, num: int = 10) -> Case:
    """A network with random weights, a few inputs and random targets."""
    torch.manual_seed(5)
    flat, likelihood = torch.randn(num, 3).double(), Categorical()
    x: Tensor = flat
    match name:
        case "categorical":
            model: nn.Module = mlp(3)
        case "many classes":  # more than go through one product
            model = nn.Linear(3, 40)
        case "bernoulli":
            model, likelihood = mlp(2), Bernoulli()
        case "gaussian":
            model, likelihood = mlp(2), Gaussian(noise=0.5)
        case "line":
            model, likelihood = mlp(1), Gaussian(noise=0.5)
        case "gaussian, noise unknown":
            model, likelihood = mlp(1), Gaussian()
        case "heteroscedastic":
            model, likelihood = mlp(4), HeteroscedasticGaussian()
        case "sequence":
            model, x, likelihood = mlp(3), torch.randn(num, 2, 3).double(), Categorical(ignore_index=-1)
        case "image":
            layers = (nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))
            model, x = nn.Sequential(*layers), torch.randn(num, 2, 4, 3).double()
        case "grouped":
            layers = (nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 2))
            model, x = nn.Sequential(*layers), torch.randn(num, 2, 4).double()
        case "tied":
            model = Tied()
        case "tokens":
            model, x = Tokens(), torch.randint(5, (num, 4))
        case "recurrent":
            model, x = Recurrent(), torch.randn(num, 3, 2).double()
        case _:
            raise ValueError(name)
    model = model.double().eval()
    targets = likelihood.sample(model(x).detach(), {"log_noise": torch.tensor(-1.0)} if "unknown" in name else None)
    if name == "sequence":
        targets[::3, 1] = -1
    return Case(model, x, targets, likelihood)


CASES = (
    "categorical", "many classes", "bernoulli", "gaussian", "line", "gaussian, noise unknown", "heteroscedastic",
    "sequence", "image", "grouped", "tied", "tokens", "recurrent",
)  # fmt: skip


def centred(one: Case, gradients: Tensor, targets: Tensor | None = None) -> Tensor:
    """The rows ``[M, D]`` of a Jacobian whose variance matters."""
    if isinstance(one.likelihood, Categorical):
        gradients = gradients - gradients.mean(-2, keepdim=True)
        if targets is not None:
            gradients = gradients * one.likelihood.observed(targets)[..., None, None]
    return gradients.flatten(0, -2)


def captured(rows: Tensor, matrix: Tensor, prior: float, chosen: list[int]) -> float:
    """The predictive variance of a subnetwork, summed over rows: ``tr J_S (H_SS + λ)⁻¹ J_Sᵀ``."""
    part = matrix[chosen][:, chosen] + prior * torch.eye(len(chosen)).double()
    return float((rows[:, chosen] @ torch.linalg.inv(part) * rows[:, chosen]).sum())


def brute_greedy(rows: Tensor, matrix: Tensor, prior: float, count: int) -> list[int]:
    """Add the weight that captures most, again and again."""
    chosen: list[int] = []
    for _ in range(count):
        rest = [d for d in range(len(matrix)) if d not in chosen]
        chosen.append(max(rest, key=lambda d: captured(rows, matrix, prior, [*chosen, d])))
    return chosen
