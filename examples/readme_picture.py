"""Draw the picture of the README: noise that a network has learned, and errors that it can tell.

Run it as `python examples/readme_picture.py [FILE]`.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import dubito
from dubito import MAP, Training, data, models
from dubito.reporting import plots


def draw_noise(axes: Axes) -> None:
    """A regression whose noise grows with the input: mean and 95 % interval."""
    dataset = data.load("toy/growing-noise", validation=0)
    model = models.mlp(1, 2, hidden=(50, 50), activation="tanh")
    training = Training(epochs=400, lr=1e-2, batch_size=50)
    posterior = MAP().fit(model, dataset.train, likelihood="heteroscedastic", training=training)
    x = torch.linspace(*dataset.train[0].aminmax(), 300)[:, None]
    prediction = posterior.predict(x)
    low, high = prediction.interval(0.95)
    axes.fill_between(x[:, 0], low[:, 0], high[:, 0], color=plots.PALETTE[0], alpha=0.25, label="95 % interval")
    axes.plot(x, prediction.mean, color=plots.PALETTE[0], label="prediction")
    axes.scatter(*dataset.train, s=6, color=plots.INK, linewidths=0, label="data")
    axes.set(title="Learning how noisy the world is", xlabel="input", ylabel="target")
    axes.legend(loc="lower left", ncols=3)


def draw_rejection(axes: Axes) -> None:
    """What is left of the errors if only the surest predictions are used: digits, upright and turned."""
    dataset = data.load("digits", limit=600)
    model = models.mlp(64, 10, hidden=(100, 100))
    recipe = MAP(temperature="validation")
    posterior = recipe.fit(model, dataset.train, validation=dataset.validation, training=Training(epochs=60))
    turned = data.shifts(dataset, ["rotation"])["rotation"]
    tests = {"upright": dataset.test, "turned by 20°": turned[2], "turned by 30°": turned[3]}
    for (name, test), color in zip(tests.items(), plots.PALETTE, strict=False):
        curve = dubito.evaluate(posterior, test).curves.risk_coverage
        axes.plot(curve.coverage, curve.risk, color=color, label=name)
    axes.set(title="Knowing when not to answer", xlabel="fraction answered, surest first", ylabel="error rate")
    axes.legend(loc="upper left")


def main(path: str = "docs/img/readme.png") -> None:
    torch.manual_seed(0)
    with plots.style():
        figure = Figure(figsize=(10, 3.6), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2)
        draw_noise(left)
        draw_rejection(right)
        figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
