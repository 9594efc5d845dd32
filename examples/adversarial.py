"""Detect adversarial images by epistemic uncertainty: FGSM and PGD against a network trained on digits.

The attacks use the network, not the posterior. Weak attacks move images close to a decision boundary, which the
network's own entropy detects best. Strong attacks make the network more confident in the wrong class than it was in the
right one, and then only epistemic uncertainty helps. This is no defence: an attacker who knows the detector can fool
it.

The activation of the network and the prior precision of Laplace are chosen from `ACTIVATIONS` and `PRECISIONS`: by the
mean AUROC of the detectors over all attacks on one half of the validation images. The other half gives the thresholds,
and the test images are used once, at the end. Run it as

    python examples/adversarial.py             # ten seconds
    python examples/adversarial.py --seeds 5
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from dubito import MAP, Ensemble, Laplace, Posterior, Training, data, decisions, metrics, models
from dubito.uses.decisions.scores import Score, score_prediction

ACTIVATIONS, PRECISIONS, RADII = ("relu", "tanh"), (0.1, 1.0, 10.0), (0.1, 0.2, 0.4, 0.8)
NETWORK, ENSEMBLE = "network, entropy", "ensemble, epistemic"

Pair = tuple[Tensor, Tensor]
Posteriors = dict[str, tuple[Posterior, Score]]
Table = dict[tuple[str, float], list[float]]


def fgsm(model: nn.Module, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Return one step along the sign of the gradient (Goodfellow et al. 2015, https://arxiv.org/abs/1412.6572)."""
    return x + radius * _direction(model, x, y)


def pgd(model: nn.Module, x: Tensor, y: Tensor, radius: float, steps: int = 20) -> Tensor:
    """Return several small steps, kept within the radius (Madry et al. 2018, https://arxiv.org/abs/1706.06083)."""
    found = x
    for _ in range(steps):
        found = found + 2.5 * radius / steps * _direction(model, found, y)
        found = x + (found - x).clamp(-radius, radius)
    return found


def _direction(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(model(leaf), y), leaf)
    return gradient.sign()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--picture", default=None)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    torch.set_num_threads(1)
    digits = data.load("digits", validation=0.3)
    assert digits.validation is not None
    half = len(digits.validation[0]) // 2
    chosen_on, calibration = (
        (digits.validation[0][part], digits.validation[1][part]) for part in (slice(half), slice(half, None))
    )
    families = {
        activation: [posteriors(activation, digits.train, seed) for seed in seeds] for activation in ACTIVATIONS
    }
    activation, precision = choose(families, chosen_on)
    names = (NETWORK, laplace_name(precision), ENSEMBLE)
    tables = [table(found, names, calibration, digits.test) for found in families[activation]]
    show(tables, names)
    if arguments.picture:
        draw(tables, names, arguments.picture)


def choose(families: dict[str, list[Posteriors]], pair: Pair) -> tuple[str, float]:
    """Return the activation and the prior precision with the highest mean AUROC over seeds, detectors and attacks."""
    scores: dict[tuple[str, float], float] = {}
    for activation, members in families.items():
        areas = [{name: mean_area(found, name, pair) for name in found} for found in members]
        for precision in PRECISIONS:
            rows = (NETWORK, laplace_name(precision), ENSEMBLE)
            scores[activation, precision] = statistics.mean(each[name] for each in areas for name in rows)
            print(f"{activation}, prior precision {precision:g}: mean AUROC {scores[activation, precision]:.3f}")
    activation, precision = max(scores, key=lambda key: scores[key])
    print(f"chosen: {activation}, prior precision {precision:g}\n")
    return activation, precision


def posteriors(activation: str, train: Pair, seed: int) -> Posteriors:
    """Return the network, Laplace posteriors around it and an ensemble, each with the score it detects by."""
    torch.manual_seed(seed)
    training = Training(epochs=60, lr=3e-3)
    model = models.mlp(64, 10, hidden=(100, 100), activation=activation)
    generator = torch.Generator().manual_seed(seed)
    point = MAP().fit(model, train, training=training, generator=generator)
    found: Posteriors = {NETWORK: (point, "entropy")}
    for precision in PRECISIONS:
        posterior = Laplace(prior_precision=precision).fit(point.model, train)
        found[laplace_name(precision)] = (posterior, "mutual-information")
    ensemble = Ensemble(members=10).fit(model, train, training=training, generator=generator)
    found[ENSEMBLE] = (ensemble, "mutual-information")
    return found


def laplace_name(precision: float) -> str:
    return f"Laplace {precision:g}, epistemic"


def attacks(found: Posteriors, images: Tensor, labels: Tensor) -> Iterator[tuple[str, float, Tensor]]:
    """Yield each attack on the network: its name, radius and images."""
    model = found[NETWORK][0].model
    for radius in RADII:
        yield "FGSM", radius, fgsm(model, images, labels, radius)
        yield "PGD", radius, pgd(model, images, labels, radius)


def mean_area(found: Posteriors, name: str, pair: Pair) -> float:
    """Return the AUROC of one detector, averaged over all attacks."""
    posterior, score = found[name]
    clean = score_prediction(posterior.predict(pair[0]), score)
    areas = [area(clean, score_prediction(posterior.predict(x), score)) for _, _, x in attacks(found, *pair)]
    return sum(areas) / len(areas)


def area(clean: Tensor, attacked: Tensor) -> float:
    scores = torch.cat([clean, attacked])
    return float(metrics.auroc(scores, torch.arange(len(scores)) >= len(clean)))


def table(found: Posteriors, names: tuple[str, ...], calibration: Pair, test: Pair) -> Table:
    """Return, for each attack on test images, the accuracy, and AUROC and detected fraction of each detector."""
    detectors = [decisions.Detector(found[name][0], calibration, score=found[name][1]) for name in names]
    images, labels = test
    rows: Table = {}
    for name, radius, attacked in attacks(found, images, labels):
        right = (found[NETWORK][0].predict(attacked).mode == labels).double().mean()  # type: ignore[attr-defined]
        rows[name, radius] = [float(right)]
        for each in detectors:
            rows[name, radius] += [
                area(each.scores(images), each.scores(attacked)),
                float(each.detect(attacked).double().mean()),
            ]
    return rows


def show(tables: list[Table], names: tuple[str, ...]) -> None:
    """Print means over seeds, and the standard deviation of the AUROC where there are several."""
    print("AUROC of attacked against clean test images, and fraction detected at 5 % false alarms")
    print(f"{'attack':11s} accuracy  {'  '.join(f'{name:>18s}' for name in names)}")
    for name, radius in tables[0]:
        columns = list(zip(*(each[name, radius] for each in tables), strict=True))
        cells = [
            f"{spread(areas)} {statistics.mean(shares):4.0%}"
            for areas, shares in zip(columns[1::2], columns[2::2], strict=True)
        ]
        print(
            f"{name:5s} {radius:5.1f} {statistics.mean(columns[0]):8.1%}  {'  '.join(f'{cell:>18s}' for cell in cells)}"
        )


def draw(tables: list[Table], names: tuple[str, ...], path: str) -> None:
    """Draw the AUROC against the radius of the stronger attack."""
    from dubito.uses.reporting import plots

    curves = {
        name: [{radius: rows["PGD", radius][1 + 2 * column] for radius in RADII} for rows in tables]
        for column, name in enumerate(names)
    }
    figure = plots.shift(curves, score="AUROC, attacked against clean", target=0.5)
    figure.axes[0].set_xlabel("Radius of the attack (PGD)")
    figure.set_facecolor("white")
    figure.savefig(path, dpi=110)


def spread(values: Sequence[float]) -> str:
    around = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{around}"


if __name__ == "__main__":
    main()
