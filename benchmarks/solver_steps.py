"""How good unconverged samples of ``structure="sampled"`` are: a small residual network, against the exact solution.

    DUBITO_DATA=... python benchmarks/solver_steps.py [--draws 16 64]

All samples are solved for together, so more of them search more directions in each step. The steps are those of
`dubito.curvature.sampled`, in float64 with the full matrix in the place of passes over the data, with the Kronecker
factors or with mixtures of gradients as the preconditioner.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from common import train_epoch
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import Laplace
from dubito.core.batches import Batch
from dubito.curvature.curvature_pass import CurvaturePass
from dubito.curvature.sampled import orthonormal
from dubito.curvature.subset import SubsetInverse

STEPS = 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.beside = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations."""
        return F.relu(self.second(self.first(x)) + self.beside(x))


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """Return a trained network of about 2,000 weights."""
    torch.manual_seed(0)
    blocks = [Block(4, 4, 1), Block(4, 8, 2), Block(8, 8, 1)]
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    for _ in range(20):
        train_epoch(model, x, y, 64)
    return model.eval()


def kept_rows(fit: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Return the rows of the Jacobian that a fit of samples keeps."""
    batch = Batch(x, y, len(x))
    curvature = CurvaturePass("sampled", fit.model, fit.selection, fit.likelihood)
    sums = curvature.zeros(SimpleNamespace(num_data=len(x), first=lambda: batch))  # type: ignore[arg-type]
    curvature.add(sums, batch)
    return sums["subset"]


def steps(curvature: Tensor, prior: float, preconditioner: Any, num_draws: int) -> list[str]:
    """Return, after each step, the error of the outputs, its estimate and the share of their variance."""

    def turn(residual: Tensor) -> Tensor:
        return preconditioner.solve(residual).to(residual)

    precision = curvature + prior * torch.eye(len(curvature), dtype=torch.float64)
    root = torch.linalg.cholesky(precision)
    noise = torch.randn(len(root), num_draws, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    residual = (root @ noise).mT
    exact = torch.cholesky_solve(residual.mT, root).mT
    variance = ((exact @ curvature) * exact).sum()
    draws, found = torch.zeros_like(exact), []
    directions = orthonormal(turn(residual))
    for _ in range(STEPS):
        products = directions @ precision
        inner = torch.linalg.cholesky((directions @ products.mT + products @ directions.mT) / 2)
        step = torch.cholesky_solve(directions @ residual.mT, inner).mT
        draws, residual = draws + step @ directions, residual - step @ products
        turned = turn(residual)
        missing = draws - exact
        error = float((((missing @ curvature) * missing).sum() / variance).sqrt())
        estimate = float(((residual * turned).sum() / variance).sqrt())
        found.append(f"{error:.2f}, {estimate:.2f}, {float(((draws @ curvature) * draws).sum() / variance):.2f}")
        directions = orthonormal(turned - torch.cholesky_solve(products @ turned.mT, inner).mT @ directions)
    return found


def main() -> None:
    """Print one row for each prior precision and number of samples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, nargs="+", default=[16])
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = (values[:500] for values in dubito.data.load("cifar10", validation=0.0).train)
    x = F.avg_pool2d(x, 2)
    model = trained(x, y)
    fits: dict[str, Any] = {
        name: Laplace(structure=name, prior_precision=1.0).fit(model, (x, y), progress=False)  # type: ignore[arg-type]
        for name in ("full", "kron")
    }
    curvature = fits["full"].matrix.matrix.double()
    kept = kept_rows(fits["full"], x, y)
    print(f"{len(curvature):,} weights, {kept['used']} mixtures. After each step:")
    print("error of the outputs, its estimate, share of their variance", flush=True)
    for prior in (3.0, 30.0, 300.0):
        ones = torch.ones(len(curvature), dtype=torch.float64)
        scale = torch.ones((), dtype=torch.float64)
        kron, mixtures = fits["kron"].matrix.covariance(prior * ones, scale), SubsetInverse(kept, prior * ones, scale)
        for num_draws in options.draws:
            for name, used in {"kron": kron, "mixtures": mixtures}.items():
                found = " | ".join(steps(curvature, prior, used, num_draws))
                print(f"| {prior:g}, {num_draws} samples, {name} | {found} |", flush=True)


if __name__ == "__main__":
    main()
