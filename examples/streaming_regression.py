"""Streaming regression: data come in small batches, each posterior is the prior of the next batch, no data are kept.

On a linear model in fixed features the updated posterior is exactly that of all data at once; on a network it is close,
and fine-tuning without a posterior forgets. Run it as

    python examples/streaming_regression.py [--picture docs/img/streaming.png]
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from dubito import MAP, Laplace, Training, likelihoods, models
from dubito.fitting.posterior import Posterior

NOISE = 0.1
TRAINING = Training(epochs=200, lr=5e-3, batch_size=20)


def waves(x: Tensor) -> Tensor:
    angles = x * torch.arange(1, 7, dtype=x.dtype)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Features(nn.Module):
    """A linear model in sines and cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.linear(waves(x))


def stream(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Six batches along the line, from left to right."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-3, 3, 120, dtype=dtype)[:, None]
    y = (1.5 * x).sin() + 0.3 * x + NOISE * torch.randn(120, 1, generator=generator, dtype=dtype)
    return list(zip(x.split(20), y.split(20), strict=True))


def everything(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def exact() -> None:
    """A linear model: six updates against the closed form on all data."""
    batches, likelihood = stream(torch.float64), likelihoods.Gaussian(NOISE)
    model = Features()
    with torch.no_grad():
        solution = ridge(*batches[0])
        model.linear.weight.copy_(solution[None, :-1])
        model.linear.bias.copy_(solution[-1:])
    recipe = Laplace(structure="full", prior_precision=1.0)
    posterior: Posterior = recipe.fit(model, batches[0], likelihood=likelihood)
    for batch in batches[1:]:
        posterior = posterior.update(batch, progress=False)
    mean = posterior.mean()
    found = torch.cat([mean["linear.weight"].flatten(), mean["linear.bias"]])
    error = (found - ridge(*everything(batches))).abs().max()
    print(f"linear model: largest error of the updated mean {float(error):.1e}")


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """Return the weights and the bias with the highest posterior density under unit prior precision."""
    features = torch.cat([waves(x), torch.ones_like(x)], dim=1)
    precision = torch.eye(features.shape[1], dtype=x.dtype) + features.T @ features / NOISE**2
    return torch.linalg.solve(precision, features.T @ y / NOISE**2)[:, 0]


def network(picture: str | None) -> None:
    """A network: updates against plain fine-tuning, evaluated on all data so far."""
    batches = stream()
    torch.manual_seed(0)
    model = models.mlp(1, 1, hidden=(50,), activation="tanh")
    likelihood = likelihoods.Gaussian(NOISE)
    point = MAP(prior_precision=1.0).fit(model, batches[0], likelihood=likelihood, training=TRAINING, progress=False)
    recipe = Laplace(structure="full", prior_precision=1.0)
    online: Posterior = recipe.fit(point.model, batches[0], likelihood=likelihood)
    tuned: Posterior = point
    for seen, batch in enumerate(batches[1:], start=2):
        online = online.update(batch, training=TRAINING, progress=False)
        tuned = tuned.update(batch, training=TRAINING, progress=False)
        x, y = everything(batches[:seen])
        errors = [float((p.predict(x).mean - y).square().mean().sqrt()) for p in (online, tuned)]  # type: ignore[attr-defined]
        print(f"after {seen} batches: error on all seen {errors[0]:.3f} by updates, {errors[1]:.3f} by fine-tuning")
    if picture:
        draw({"updates": online, "fine-tuning": tuned}, everything(batches), picture)


def draw(posteriors: dict[str, Posterior], seen: tuple[Tensor, Tensor], path: str) -> None:
    from matplotlib.figure import Figure

    from dubito.uses.reporting import plots

    with plots.style():
        figure = Figure(figsize=(5, 3), layout="constrained", facecolor="white")
        axes = figure.subplots()
        x = torch.linspace(-4, 4, 200)[:, None]
        for (name, posterior), color in zip(posteriors.items(), plots.PALETTE, strict=False):
            prediction = posterior.predict(x)
            low, high = prediction.interval(0.95)  # type: ignore[attr-defined]
            axes.fill_between(x[:, 0], low[:, 0], high[:, 0], color=color, alpha=0.2, linewidth=0)
            axes.plot(x, prediction.mean, color=color, label=name)  # type: ignore[attr-defined]
        axes.scatter(*seen, s=6, color=plots.INK, linewidths=0, label="data, left to right")
        axes.set(xlabel="input", ylabel="target", ylim=(-4, 4))
        axes.legend(loc="upper left")
        figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", default=None)
    torch.set_num_threads(1)
    exact()
    network(parser.parse_args().picture)


if __name__ == "__main__":
    main()
