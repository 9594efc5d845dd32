"""Adversarial images, found by the doubt of a posterior: FGSM and PGD against a network trained on digits.

The attacks see the network, not the posterior. Weak attacks leave images near a border between classes, which the
network's own entropy sees best; strong ones make it surer of the wrong answer than of the right one, and only the
doubt about its weights is left to tell. No detector here is a defence: an attacker who knows it can fool it as well.

The activation of the network and the prior precision of Laplace are chosen from `ACTIVATIONS` and `PRECISIONS`: by the
mean AUROC of the detectors over all attacks on one half of the validation images. Their other half gives the
thresholds, and the test images are looked at once, at the end. Run it as

    python examples/adversarial.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from dubito import MAP, Ensemble, Laplace, Posterior, Training, data, metrics, models
from dubito.decisions import Detector
from dubito.decisions.scores import Score, score_prediction

ACTIVATIONS, PRECISIONS, RADII = ("relu", "tanh"), (0.1, 1.0, 10.0), (0.1, 0.2, 0.4, 0.8)
NETWORK, ENSEMBLE = "network, entropy", "ensemble, doubt"

Pair = tuple[Tensor, Tensor]
Posteriors = dict[str, tuple[Posterior, Score]]


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
    (slope,) = torch.autograd.grad(functional.cross_entropy(model(leaf), y), leaf)
    return slope.sign()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = data.load("digits", validation=0.3)
    assert digits.validation is not None
    half = len(digits.validation[0]) // 2
    chosen_on, calibration = (
        (digits.validation[0][part], digits.validation[1][part]) for part in (slice(half), slice(half, None))
    )
    scores: dict[tuple[str, float], float] = {}
    families = {activation: posteriors(activation, digits.train) for activation in ACTIVATIONS}
    for activation, found in families.items():
        areas = {name: mean_area(found, name, chosen_on) for name in found}
        for precision in PRECISIONS:
            rows = (NETWORK, laplace_name(precision), ENSEMBLE)
            scores[activation, precision] = sum(areas[name] for name in rows) / len(rows)
            print(f"{activation}, prior precision {precision:g}: mean AUROC {scores[activation, precision]:.3f}")
    activation, precision = max(scores, key=lambda key: scores[key])
    print(f"chosen: {activation}, prior precision {precision:g}\n")
    show(families[activation], (NETWORK, laplace_name(precision), ENSEMBLE), calibration, digits.test)


def posteriors(activation: str, train: Pair) -> Posteriors:
    """Return the network, Laplace posteriors around it and an ensemble, each with what it detects by."""
    training = Training(epochs=60, lr=3e-3)
    model = models.mlp(64, 10, hidden=(100, 100), activation=activation)
    point = MAP().fit(model, train, training=training)
    found: Posteriors = {NETWORK: (point, "entropy")}
    for precision in PRECISIONS:
        posterior = Laplace(prior_precision=precision).fit(point.model, train)
        found[laplace_name(precision)] = (posterior, "mutual-information")
    found[ENSEMBLE] = (Ensemble(members=10).fit(model, train, training=training), "mutual-information")
    return found


def laplace_name(precision: float) -> str:
    return f"Laplace {precision:g}, doubt"


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


def show(found: Posteriors, names: tuple[str, ...], calibration: Pair, test: Pair) -> None:
    """Print what each detector finds among attacked test images."""
    detectors = {name: Detector(found[name][0], calibration, score=found[name][1]) for name in names}
    images, labels = test
    print("AUROC of attacked against clean test images, and share found at 5 % false alarms")
    print(f"{'attack':12s} accuracy  {'  '.join(f'{name:>18s}' for name in detectors)}")
    for name, radius, attacked in attacks(found, images, labels):
        right = float((found[NETWORK][0].predict(attacked).mode == labels).double().mean())  # type: ignore[attr-defined]
        cells = [f"{separation(each, images, attacked):18s}" for each in detectors.values()]
        print(f"{name:5s} {radius:5.1f}  {right:8.1%}  {'  '.join(cells)}")


def separation(detector: Detector, clean: Tensor, attacked: Tensor) -> str:
    found = detector.detect(attacked).double().mean()
    return f"{area(detector.scores(clean), detector.scores(attacked)):10.2f} {float(found):7.0%}"


if __name__ == "__main__":
    main()
