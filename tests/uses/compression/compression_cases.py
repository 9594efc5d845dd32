"""Small networks of every kind that can be shrunk, and posteriors that cost next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dubito.likelihoods import Categorical
from torch import Tensor, nn

from dubito import MAP, Laplace, Training, Variational, priors
from dubito.fitting.posterior import Posterior
from dubito.methods.map.posterior import PointPosterior
from extras import needs


class Functional(nn.Module):
    """A chain that is written with functions: relu, max_pool2d and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.fc1, self.fc2 = nn.Linear(6 * 9, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.max_pool2d(torch.relu(self.conv(x)), 2)
        h = h.view(h.size(0), -1)
        return self.fc2(torch.sigmoid(self.fc1(h)))


class Skip(nn.Module):
    """A residual network of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.outer, self.head = (nn.Linear(a, b) for a, b in ((5, 8), (8, 9), (9, 8), (8, 3)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.head((h + self.outer(self.inner(h).relu())).relu())


class Joined(nn.Module):
    """Two branches that are concatenated and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 5, 3, padding=1)
        self.norm, self.mix, self.head = nn.BatchNorm2d(9), nn.Conv2d(9, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.left(x).relu(), self.right(x).relu()], 1)
        return self.head(self.mix(self.norm(h).relu()).relu().mean((2, 3)))


CHAINS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)), (5,)),
    "no bias": (lambda: nn.Sequential(nn.Linear(5, 9), nn.Sigmoid(), nn.Linear(9, 3, bias=False)), (5,)),
    "norm": (lambda: nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, 3)), (5,)),
    "lenet": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 4, 10),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(10, 3),
        ),
        (1, 8, 8),
    ),
    "padded": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.BatchNorm1d(20),
            nn.Linear(20, 3),
        ),
        (1, 8, 8),
    ),
    "instance norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3),
            nn.InstanceNorm2d(6, affine=True),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3),
            nn.InstanceNorm2d(5, affine=True, track_running_stats=True),
            nn.Flatten(),
            nn.Linear(80, 3),
        ),
        (1, 8, 8),
    ),
    "circular": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 6, 3),
            nn.Softplus(),
            nn.Conv1d(6, 4, 3, padding=1, padding_mode="circular"),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 8, 3),
        ),
        (2, 10),
    ),
    "functional": (Functional, (1, 8, 8)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)),
        (3, 5),
    ),
}
GRAPHS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "skip": (Skip, (5,)),
    "joined": (Joined, (1, 6, 6)),
}


def needs_graph(kind: str) -> None:
    """Skip a test of networks that are no chains where torch-pruning is not installed."""
    if kind in GRAPHS:
        needs("torch_pruning")


def build(kind: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A network with strong biases and statistics that are not those of a fresh norm, and a batch of inputs."""
    torch.manual_seed(seed)
    make, shape = {**CHAINS, **GRAPHS}[kind]
    model = make().double().eval()
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias)
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
    return model, torch.randn(6, *shape, dtype=torch.float64)


def point(model: nn.Module) -> PointPosterior:
    return PointPosterior(model, Categorical(), MAP(), 100)


def table(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes that depend on the first two of five features."""
    x = torch.randn(120, 5, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


POSTERIORS: dict[str, Any] = {
    "variational": Variational(priors.Normal()),
    "log-uniform": Variational(priors.LogUniform(), kl_warmup=0.5),
    "ard": Variational(priors.ARD()),
    "diag": Laplace(structure="diag", prior_precision=1.0),
    "kron": Laplace(structure="kron", prior_precision=1.0),
    "full": Laplace(structure="full", prior_precision=1.0),
}
_fitted: dict[str, Posterior] = {}


def fit(kind: str) -> Posterior:
    """A posterior of one kind over a small network, fitted once."""
    if kind not in _fitted:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        training = Training(epochs=20, lr=1e-2, batch_size=30)
        trained = MAP(prior_precision=1.0).fit(model, table(), training=training, progress=False)
        _fitted["point"] = trained
        if kind != "point":
            how = {} if kind in ("diag", "kron", "full") else {"training": training.replace(epochs=10)}
            _fitted[kind] = POSTERIORS[kind].fit(trained.model, table(), progress=False, **how)
    return _fitted[kind]
