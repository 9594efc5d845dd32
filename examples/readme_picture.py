"""Draw the picture of the README: uncertainty away from the data, and lower confidence in wrong answers.

Run it as `python examples/readme_picture.py [FILE]`.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dubito import MAP, Laplace, Training, data, models
from dubito.uses.reporting import plots


def draw_gap(axes: Axes) -> None:
    """A regression with a gap in its data: the network's own 95 % interval, and that of its posterior."""
    dataset = data.load("toy/gap-sine", validation=0)
    model = models.mlp(1, 1, hidden=(50, 50), activation="tanh")
    training = Training(epochs=1500, lr=1e-2, batch_size=50)
    point = MAP(prior_precision=0.3).fit(model, dataset.train, likelihood="gaussian", training=training)
    posterior = Laplace(structure="full").fit(point.model, dataset.train, likelihood="gaussian")
    low, high = (float(bound) for bound in dataset.train[0].aminmax())
    x = torch.linspace(low - 0.6, high + 0.6, 300)[:, None]
    for (name, fitted), color in zip({"Laplace": posterior, "MAP": point}.items(), plots.PALETTE, strict=False):
        prediction = fitted.predict(x)
        below, above = prediction.interval(0.95)
        band = (x[:, 0], below[:, 0], above[:, 0])
        axes.fill_between(*band, color=color, alpha=0.25, linewidth=0, label=f"{name}, 95 %")
    axes.plot(x, prediction.mean, color=plots.INK, linewidth=1)
    axes.scatter(*dataset.train, s=6, color=plots.INK, linewidths=0, label="data")
    axes.set(title="Doubt where there is no data", xlabel="input", ylabel="target", ylim=(-4, 4))
    axes.legend(loc="lower left", ncols=3)


def draw_rotation(axes: Axes) -> None:
    """Digits rotated further and further: accuracy and confidence of the network."""
    dataset = data.load("digits", limit=1000, validation=0.4)
    model = models.mlp(64, 10, hidden=(100, 100))
    point = MAP().fit(model, dataset.train, training=Training(epochs=300, lr=3e-3))
    posterior = Laplace().fit(point.model, dataset.train, validation=dataset.validation)
    images, labels = dataset.test
    angles = range(0, 91, 10)
    turned = [data.rotate(images, float(angle), standardizer=dataset.encoder) for angle in angles]
    right = [float((point.predict(x).mode == labels).float().mean()) for x in turned]
    axes.plot(angles, right, color=plots.INK, linestyle="--", label="accuracy")
    for (name, fitted), color in zip({"Laplace": posterior, "MAP": point}.items(), plots.PALETTE, strict=False):
        confidence = [float(fitted.predict(x).confidence.mean()) for x in turned]
        axes.plot(angles, confidence, color=color, label=f"confidence, {name}")
    axes.set(title="Less sure of itself where it fails", xlabel="digits turned by (degrees)", ylim=(0, 1.02))
    axes.legend(loc="lower left")


def main(path: str = "docs/img/readme.png") -> None:
    torch.manual_seed(0)
    with plots.style():
        figure = Figure(figsize=(10, 3.6), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2)
        draw_gap(left)
        draw_rotation(right)
        figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
