"""Adversarial images, found by the doubt of a posterior: FGSM and PGD against a network trained on digits.

The attacks see the network, not the posterior. Weak attacks leave images near a border between classes, which the
network's own entropy sees best; strong ones make it surer of the wrong answer than of the right one, and only the
doubt about its weights is left to tell. No detector here is a defence: an attacker who knows it can fool it as well.
Run it as

    python examples/adversarial.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dubito import MAP, Ensemble, Laplace, Posterior, Training, data, metrics, models
from dubito.decisions import Detector
from dubito.decisions.scores import Score


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
    digits = data.load("digits", validation=0.2)
    assert digits.validation is not None
    training = Training(epochs=60, lr=3e-3)
    model = models.mlp(64, 10, hidden=(100, 100), activation="tanh")
    point = MAP().fit(model, digits.train, training=training)
    posteriors: dict[str, tuple[Posterior, Score]] = {
        "network, entropy": (point, "entropy"),
        "Laplace, doubt": (Laplace(prior_precision=1.0).fit(point.model, digits.train), "mutual-information"),
        "ensemble, doubt": (Ensemble(members=10).fit(model, digits.train, training=training), "mutual-information"),
    }
    detectors = {name: Detector(p, digits.validation, score=score) for name, (p, score) in posteriors.items()}
    images, labels = digits.test
    print("AUROC of attacked against clean images, and share found at 5 % false alarms")
    print(f"{'attack':12s} accuracy  {'  '.join(f'{name:>18s}' for name in detectors)}")
    for radius in (0.1, 0.2, 0.4, 0.8):
        for name, attack in (("FGSM", fgsm), ("PGD", pgd)):
            attacked = attack(point.model, images, labels, radius)
            right = float((point.predict(attacked).mode == labels).double().mean())  # type: ignore[attr-defined]
            cells = [f"{separation(each, images, attacked):18s}" for each in detectors.values()]
            print(f"{name:5s} {radius:5.1f}  {right:8.1%}  {'  '.join(cells)}")


def separation(detector: Detector, clean: Tensor, attacked: Tensor) -> str:
    scores = torch.cat([detector.scores(clean), detector.scores(attacked)])
    is_attacked = torch.arange(len(scores)) >= len(clean)
    found = detector.detect(attacked).double().mean()
    return f"{float(metrics.auroc(scores, is_attacked)):10.2f} {float(found):7.0%}"


if __name__ == "__main__":
    main()
