"""How the order of a Rényi bound shapes a factorized posterior: from fitting the mode to covering the mass.

    python examples/renyi.py [docs/img/renyi.png]

A Bayesian linear regression with two correlated weights has an exact normal posterior p. The factorized normal q that
is closest to it in the Rényi divergence of order α → ∞, 1, ½, 0⁺ and −∞ is known in closed form except for two numbers,
which are found here by gradient descent (solid). The dotted ellipses are the result of
`Variational(objective=objectives.Renyi(alpha))` with 32 samples. A larger α gives a narrower q. Below α = ½, 32 samples
are too few, and the two differ.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from dubito import Training, Variational, likelihoods, objectives, priors

NOISE, PRECISION, DRAWS = 0.6, 1.0, 32
ORDERS = {"α → ∞": 40.0, "α = 1 (ELBO)": 1.0, "α = ½": 0.5, "α → 0⁺": 0.01, "α → −∞": -40.0}


def data() -> tuple[Tensor, Tensor]:
    """Twelve points whose two inputs are strongly correlated."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, generator=generator) @ torch.tensor([[0.6, 0.5], [0.0, 0.3]])
    return x, x.sum(1, keepdim=True) + NOISE * torch.randn(12, 1, generator=generator)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the true posterior."""
    covariance = torch.linalg.inv(x.mT @ x / NOISE**2 + PRECISION * torch.eye(2))
    return (covariance @ x.mT @ y / NOISE**2).flatten(), covariance


def fit(alpha: float, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scales of the factorised posterior at one order."""
    mean, covariance = exact(x, y)
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = mean[None].clone()
    recipe = Variational(
        prior=priors.Normal(0.0, PRECISION**-0.5),
        objective=objectives.Renyi(alpha, num_samples=DRAWS),
        estimator="weight",
        initial_scale=float(covariance.diagonal().mean().sqrt()),
    )
    training = Training(epochs=200, lr=0.03, batch_size=len(x))
    found: Any = recipe.fit(model, (x, y), likelihood=likelihoods.Gaussian(NOISE), training=training, progress=False)
    return found.mean()["weight"].flatten(), found.scale


def optimum(alpha: float, covariance: Tensor) -> Tensor:
    r"""The scales of the best factorised normal, from $\\int q^\\alpha p^{1 - \\alpha}$ of two normals.

    A negative order is that of $1 - \\alpha$ with p and q exchanged, but for a factor.
    """
    precision = torch.linalg.inv(covariance.double())
    # a start at which the integral is finite: narrower than p along every axis, or wider
    edge = torch.linalg.eigvalsh(precision)[-1 if alpha > 0.5 else 0]
    log_own = edge.log().add(0.7 if alpha > 0.5 else -0.7).expand(2).clone().requires_grad_()
    optimizer = torch.optim.Adam([log_own], lr=0.01)
    for _ in range(600):
        own, truth = torch.diag(log_own.exp()), precision
        order, first, second = (alpha, own, truth) if alpha > 0.5 else (1 - alpha, truth, own)
        if order == 1:
            loss = 0.5 * ((torch.linalg.inv(first) * second).sum() + torch.logdet(first) - torch.logdet(second))
        else:
            mixed = torch.logdet(order * first + (1 - order) * second)
            loss = 0.5 * (order * torch.logdet(first) + (1 - order) * torch.logdet(second) - mixed) / (order - 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return log_own.detach().mul(-0.5).exp().float()


def draw(path: str) -> None:
    """Draw the true posterior and the fits beside it."""
    import matplotlib.pyplot as plt

    x, y = data()
    mean, covariance = exact(x, y)
    figure, panels = plt.subplots(1, len(ORDERS), figsize=(3 * len(ORDERS), 3.2), sharex=True, sharey=True)
    reach = 3.2 * covariance.diagonal().sqrt()
    grid = [torch.linspace(float(m - r), float(m + r), 120) for m, r in zip(mean, reach, strict=True)]
    points = torch.stack(torch.meshgrid(*grid, indexing="ij"), -1)
    truth = torch.distributions.MultivariateNormal(mean, covariance).log_prob(points).exp()
    for panel, (title, alpha) in zip(panels, ORDERS.items(), strict=True):
        panel.contourf(grid[0], grid[1], truth.mT, levels=6, cmap="Greys", alpha=0.7)
        kinds = {"exact": (mean, optimum(alpha, covariance), "solid"), f"K = {DRAWS}": (*fit(alpha, x, y), "dotted")}
        for kind, (center, scale, style) in kinds.items():
            density = torch.distributions.Normal(center, scale).log_prob(points).sum(-1).exp()
            panel.contour(grid[0], grid[1], density.mT, levels=3, colors="C1", linestyles=style)
            ratio = float((scale / covariance.diagonal().sqrt()).mean())
            print(f"{title:14} {kind:7} scales over those of the true marginals: {ratio:.3f}", flush=True)
        panel.set_title(title)
        panel.set_xlabel("$w_1$")
    panels[0].set_ylabel("$w_2$")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    torch.set_num_threads(1)
    draw(sys.argv[1] if len(sys.argv) > 1 else "docs/img/renyi.png")
