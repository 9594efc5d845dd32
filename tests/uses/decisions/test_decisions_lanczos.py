"""The sketched Lanczos score against brute force, and as a detector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.decisions import Detector
from dubito.errors import InputError
from torch import Tensor, nn

import dubito
from dubito import MAP, Training, likelihoods
from dubito.uses.decisions.lanczos import Sketch, SketchedLanczos
from oracles import close, fixed_normal, seeded


def point(outputs: int, likelihood: Any) -> tuple[Any, tuple[Tensor, Tensor]]:
    x = fixed_normal(6, 3)
    y = torch.arange(6) % outputs if likelihood == "categorical" else fixed_normal(6, outputs, seed=1)
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)))
    return MAP(train=False).fit(model, (x, y), likelihood=likelihood), (x, y)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """Gradients of all outputs ``[B, C, D]``."""
    values = {name: value.detach() for name, value in model.named_parameters()}
    found = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)))(values)
    return torch.cat([each.flatten(2) for each in found.values()], dim=2)


def test_a_whole_sketch_is_orthogonal_and_a_part_keeps_lengths() -> None:
    whole = Sketch(31, 31, seed=3)(torch.eye(31, dtype=torch.float64))
    close(whole @ whole.T, torch.eye(31, dtype=torch.float64), 1e-12)
    vectors = torch.linalg.qr(fixed_normal(4000, 5)).Q.T
    part = Sketch(4000, 800, seed=3)(vectors)
    close(part @ part.T, torch.eye(5, dtype=torch.float64), 0.2)  # about 4 standard errors, √(2 / 800)


@pytest.mark.parametrize(("outputs", "likelihood"), [(3, "categorical"), (2, likelihoods.Gaussian(noise=0.5))])
def test_the_score_is_the_length_outside_of_the_range_of_the_curvature(outputs: int, likelihood: Any) -> None:
    posterior, data = point(outputs, likelihood)
    found = SketchedLanczos(posterior, data, steps=20, rows=10**6)  # an orthogonal sketch, a complete Krylov space
    training = jacobian(posterior.model, data[0])
    if likelihood == "categorical":  # a constant added to all outputs has no curvature
        training = training - training.mean(1, keepdim=True)
    rows = torch.linalg.svd(training.flatten(0, 1), full_matrices=False)
    basis = rows.Vh[1e-9 * rows.S[0] < rows.S]
    new = fixed_normal(5, 3, seed=9)
    gradients = jacobian(posterior.model, new)
    expected = gradients.square().sum((1, 2)) - (gradients @ basis.T).square().sum((1, 2))
    close(found.scores(posterior, new), expected, 1e-3)


def test_a_detector_is_saved_and_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    posterior = MAP().fit(model, (x[:100], (x[:100, 0] > 0).long()), training=Training(epochs=10, lr=1e-2))
    training = (x[:100], (x[:100, 0] > 0).long())
    detector = Detector(posterior, x[100:], score="lanczos", training=training)
    assert float(detector.scores(20 * x[:20]).mean()) > float(detector.scores(x[:20]).mean())
    detector.save(tmp_path / "rule")
    again: Any = dubito.load(tmp_path / "rule", model)
    assert torch.equal(again.scores(x[:9]), detector.scores(x[:9]))
    with pytest.raises(InputError, match="needs the training data"):
        Detector(posterior, x[100:], score="lanczos")


def test_single_numbers_may_be_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.layer(x)

    x = fixed_normal(24, 3).float()
    posterior = MAP(train=False).fit(seeded(Scaled).float(), (x, torch.arange(24) % 2))
    found = Detector(posterior, x, score="lanczos", training=(x, torch.arange(24) % 2)).scores(x)
    assert found.shape == (24,)
    assert bool(found.isfinite().all())
