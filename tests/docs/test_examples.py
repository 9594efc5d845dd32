"""The example scripts: each one's core, at its smallest."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_streaming_updates_equal_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    example("streaming_regression").exact()
    assert float(capsys.readouterr().out.split()[-1]) < 1e-10


def test_attacks_stay_within_their_radius_and_raise_the_loss() -> None:
    attacks = example("adversarial")
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(20, 4), torch.arange(20) % 3

    @torch.no_grad()
    def loss(inputs: torch.Tensor) -> float:
        return float(nn.functional.cross_entropy(model(inputs), y))

    losses = [loss(x)]
    for attack in (attacks.fgsm, attacks.pgd):
        found = attack(model, x, y, 0.3)
        assert float((found - x).abs().max()) <= 0.3 + 1e-6
        losses.append(loss(found))
    assert losses[0] < losses[1] <= losses[2] + 1e-3


def test_attacked_digits_have_epistemic_uncertainty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attacks = example("adversarial")
    for name, value in {"ACTIVATIONS": ("tanh",), "PRECISIONS": (1.0,), "RADII": (0.4,)}.items():
        monkeypatch.setattr(attacks, name, value)
    monkeypatch.setattr("sys.argv", ["adversarial.py"])
    attacks.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("FGSM", "PGD"))]
    assert [row[:2] for row in rows] == [["FGSM", "0.4"], ["PGD", "0.4"]]
    for row in rows:  # accuracy left, then AUROC and share found by each of the three
        assert float(row[2].rstrip("%")) < 30
        assert all(float(area) > 0.6 for area in (row[5], row[7]))


def test_an_active_learner_asks_and_learns() -> None:
    learner = example("active_learning")
    learner.TRAINING = learner.TRAINING.replace(epochs=15)
    accuracies = learner.learn("bald", 0, 3)
    assert len(accuracies) == 3
    assert accuracies[0] < accuracies[-1]


def test_a_variance_layer_has_no_mean_and_learns_nonetheless() -> None:
    variance = example("variance_networks")
    variance.EPOCHS = 15
    torch.manual_seed(0)
    y = torch.arange(300) % 2
    x = torch.rand(300, 64)
    x[:, :32] *= y[:, None]  # one half of an image is dark
    x[:, 32:] *= 1 - y[:, None]
    module = variance.train(x, y)
    assert not module.mean_module()[1].weight.any()
    assert variance.accuracy(module, x, y, 30) > 0.8
    nothing = torch.zeros(variance.WIDTH, 64, dtype=torch.bool)
    assert variance.without(module, nothing, x, y, 3) < 0.65
    assert variance.accuracy(module, x, y, 30) > 0.8  # and the scales are back


def test_continual_learning_forgets_little() -> None:
    """Two tasks: fine-tuning has forgotten much of the first, the posterior little."""
    found = example("continual_digits").main(2)
    assert found["variational"][-1] > found["fine-tuning"][-1] + 0.05
    assert found["variational"][-1] > 0.85


def test_the_optima_of_the_renyi_picture() -> None:
    """At α = 1 the conditionals of the posterior, at α → 0⁺ its marginals, and narrower as α grows."""
    renyi = example("renyi")
    _, covariance = renyi.exact(*renyi.data())
    scales = [renyi.optimum(alpha, covariance) for alpha in renyi.ORDERS.values()]
    precision = covariance.inverse()
    assert (scales[1] - precision.diagonal().rsqrt()).abs().max() < 0.01
    assert (scales[3] - covariance.diagonal().sqrt()).abs().max() < 0.02
    means = [float(scale.mean()) for scale in scales]
    assert means == sorted(means)
