"""The picture of `subnetwork_quality.py`: uncertainty between two groups of points, by the number of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito import MAP, Laplace, Training, likelihoods, models, select
from dubito.data.toys import gap_sine
from dubito.fitting.posterior import Posterior

PATH = Path(__file__).parents[1] / "docs" / "img" / "subnetwork.png"
NOISE = 0.1
PRIOR = 1.0
GRID = torch.linspace(-4.5, 4.5, 300)[:, None]
SHOWN = (0.01, 0.03, 0.1, 0.5)  # shares of the weights whose captured variance is printed
BLUE, ORANGE, GREY, GREEN = "#0072b2", "#d55e00", "#59636e", "#009e73"


def posteriors() -> tuple[Posterior, dict[str, Posterior], tuple[Tensor, Tensor]]:
    """The trained network, what is drawn, and the data: 1-50-50-1, 2,701 weights, the noise and the prior given."""
    torch.manual_seed(0)
    data = gap_sine(120, noise=NOISE, gap=(-1.3, 1.3), generator=torch.Generator().manual_seed(0))
    likelihood = likelihoods.Gaussian(noise=NOISE)
    model = models.mlp(1, 1, hidden=(50, 50), activation="tanh")
    training = Training(epochs=800, batch_size=120, lr=1e-2)
    point = MAP(prior_precision=PRIOR).fit(model, data, likelihood=likelihood, training=training, progress=False)

    def fit(structure: str, weights: Any = None) -> Posterior:
        recipe = Laplace(structure=structure, weights=weights or select.all(), prior_precision=PRIOR)
        return recipe.fit(point.model, data, likelihood=likelihood, progress=False)

    found: dict[str, Posterior] = {"the network alone": point, "full Laplace": fit("full")}
    for share in (0.5, 0.03, 0.01):
        rule = select.subnetwork(share, rule="greedy", context=GRID)
        found[f"{share:.0%} of the weights"] = fit("full", rule)
    found["diagonal, all weights"] = fit("diag")
    found["last layer"] = fit("full", select.last_layer())
    return point, found, data


def captured_curves(point: Posterior, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """The share of the full predictive variance on the drawn range, by number of weights."""
    rules = {
        "greedy, context": select.subnetwork(0.5, rule="greedy", context=GRID),
        "output variance": select.subnetwork(0.5),
        "random": select.subnetwork(0.5, rule="random"),
        "weight variance": select.subnetwork(0.5, rule="weight-variance"),
    }
    options = {"likelihood": point.likelihood, "prior_precision": PRIOR, "inputs": GRID}
    return {name: rule.report(point.model, data, **options).captured for name, rule in rules.items()}


def draw() -> Path:
    """Draw all panels into one file."""
    from matplotlib.figure import Figure

    point, found, data = posteriors()
    figure = Figure((11, 5), layout="constrained", dpi=110)
    *panels, last = figure.subplots(2, 4).flat
    for axes, (title, posterior) in zip(panels, found.items(), strict=True):
        _panel(axes, title, posterior, data)
    size = sum(value.numel() for value in point.model.parameters())
    curves = captured_curves(point, data)
    for (name, curve), color in zip(curves.items(), (BLUE, GREEN, GREY, ORANGE), strict=True):
        percent = 100 * torch.arange(1, len(curve) + 1) / size
        last.plot(percent.tolist(), curve.tolist(), color=color, label=name)
        print(f"{name}: " + ", ".join(f"{s:.0%} {float(curve[round(s * size) - 1]):.2f}" for s in SHOWN))
    last.set(xscale="log", xlabel="% of the weights", title="variance captured", ylim=(0, 1.05))
    last.legend(frameon=False, fontsize=7)
    PATH.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PATH)
    return PATH.relative_to(PATH.parents[2])


def _panel(axes: Any, title: str, posterior: Posterior, data: tuple[Tensor, Tensor]) -> None:
    prediction = posterior.predict(GRID)
    mean, spread = prediction.mean.flatten(), prediction.epistemic.sqrt().flatten()
    x = GRID.flatten().tolist()
    for width, alpha in ((2, 0.2), (1, 0.3)):
        low, high = mean - width * spread, mean + width * spread
        axes.fill_between(x, low.tolist(), high.tolist(), color=BLUE, alpha=alpha, linewidth=0)
    axes.plot(x, mean.tolist(), color=BLUE, linewidth=1.2)
    axes.plot(data[0].flatten().tolist(), data[1].flatten().tolist(), ".", color=GREY, markersize=3)
    axes.set(title=title, ylim=(-4, 4), xlim=(-4.5, 4.5))
