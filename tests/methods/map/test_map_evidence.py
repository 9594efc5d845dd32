"""Training under a prior that the evidence chooses along the way."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.likelihoods import Gaussian
from torch import Tensor, nn
from torch.utils.data import Dataset

import dubito
from dubito import MAP, Laplace, Training
from oracles import LinearRegression

pytestmark = pytest.mark.slow


def centred_data() -> tuple[Tensor, Tensor]:
    """Inputs of mean zero, so that weight and bias do not interact and Kronecker blocks are exact."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    x = x - x.mean(0)
    noise = torch.randn(60, 1, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.3]], dtype=torch.float64) + 0.4 + 0.5 * noise


def best_settings(x: Tensor, y: Tensor, noise: float | None) -> np.ndarray:
    """The maximum of the exact evidence over λ of weights and bias (and σ), as logarithms."""

    def loss(logs: np.ndarray) -> float:
        weight, bias, sigma = np.exp([*logs, math.log(noise)] if noise else logs)
        precision = torch.tensor([weight] * 3 + [bias], dtype=torch.float64)
        return -LinearRegression(x, y, sigma, precision).log_evidence

    start = np.zeros(2 if noise else 3)
    found = scipy.optimize.minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-8, "fatol": 1e-10})
    return found.x if noise is None else np.array([*found.x, math.log(noise)])


@pytest.mark.parametrize("noise", ["evidence", 0.5])
def test_a_linear_model_reaches_the_maximum_of_the_exact_evidence(noise) -> None:
    x, y = centred_data()
    training = Training(epochs=600, lr=0.05, batch_size=60, evidence_every=20, evidence_burn_in=100)
    point = MAP().fit(nn.Linear(3, 1).double(), (x, y), likelihood=Gaussian(noise=noise), training=training)
    weight, bias, sigma = np.exp(best_settings(x, y, None if isinstance(noise, str) else noise))
    assert point.precision == pytest.approx({"weight": weight, "bias": bias}, rel=1e-3)
    assert point.likelihood.noise == pytest.approx(sigma, rel=1e-3)
    exact = LinearRegression(x, y, sigma, torch.tensor([weight] * 3 + [bias], dtype=torch.float64))
    found = torch.cat([value.flatten() for value in point.mean().values()])
    torch.testing.assert_close(found, exact.mean, rtol=0, atol=1e-3)
    mean, variance = point.prior()
    assert variance["bias"].item() == pytest.approx(1 / bias, rel=1e-3)
    assert mean["bias"].item() == 0


def noisy_classes(size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 10, generator=generator)
    return x, (x[:, 0] + 1.5 * torch.randn(size, generator=generator) > 0).long()


def test_a_network_overfits_less() -> None:
    """Nine of ten inputs are noise, and so are many labels."""
    train, test = noisy_classes(80, seed=0), noisy_classes(1000, seed=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 2))

    def score(training: Training) -> float:
        return MAP().fit(model, train, training=training).predict(test[0]).log_prob(test[1]).mean().item()

    plain = Training(epochs=150, lr=0.01, batch_size=80)
    assert score(plain.replace(evidence_every=10, evidence_burn_in=20)) > score(plain) + 0.3


class Failing(Dataset):
    def __init__(self, data: tuple[Tensor, Tensor], after: int) -> None:
        self.data, self.left = data, after

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left == 0:
            raise ConnectionError
        return self.data[0][index], self.data[1][index]


@pytest.mark.parametrize("after", [30, 100, 190])
def test_an_interrupted_run_goes_on_exactly(after: int, tmp_path: Path) -> None:
    x, y = centred_data()
    data = x[:20], y[:20]
    training = Training(epochs=8, lr=0.02, batch_size=7, evidence_every=2, evidence_burn_in=1)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    whole = MAP().fit(model, Failing(data, 10**9), likelihood="gaussian", training=training)
    saved = training.replace(checkpoint=str(tmp_path / "c.safetensors"), checkpoint_every=0.0)
    with pytest.raises(ConnectionError):
        MAP().fit(model, Failing(data, after), likelihood="gaussian", training=saved)
    resumed = MAP().fit(model, Failing(data, 10**9), likelihood="gaussian", training=saved)
    assert resumed.digest() == whole.digest()
    assert resumed.precision == whole.precision


def test_the_prior_is_saved(tmp_path: Path) -> None:
    x, y = centred_data()
    model = nn.Linear(3, 1).double()
    model.bias.requires_grad_(False)
    training = Training(epochs=4, evidence_every=2)
    point = MAP(prior_precision=3.0).fit(model, (x, y), likelihood="gaussian", training=training)
    assert list(point.precision) == ["weight"]
    assert point.precision["weight"] != 3.0
    point.save(tmp_path / "p")
    loaded = dubito.load(tmp_path / "p", model)
    assert loaded.precision == point.precision
    assert loaded.prior()[1]["bias"].item() == 0.0
    posterior = Laplace(prior_precision=point.precision).fit(point.model, (x, y), likelihood=point.likelihood)
    assert posterior.prior_precision[0].item() == point.precision["weight"]


def test_without_it_nothing_changes() -> None:
    x, y = centred_data()
    point = MAP().fit(nn.Linear(3, 1).double(), (x, y), likelihood="gaussian", training=Training(epochs=1))
    assert point.precision is None
    with pytest.raises(UnsupportedError, match="flat prior"):
        point.prior()
    taken = MAP(train=False).fit(
        nn.Linear(3, 1).double(), (x, y), likelihood="gaussian", training=Training(evidence_every=1)
    )
    assert taken.precision is None


def test_bad_settings() -> None:
    x, y = centred_data()
    for settings in ({"evidence_every": 0}, {"evidence_every": 1.5}, {"evidence_burn_in": -1}):
        with pytest.raises(InputError, match=r"`evidence_.*` must be a whole number"):
            Training(**settings)
    for settings, message in (
        ({"evidence_every": 3, "evidence_burn_in": 3}, "Training ends after 5 epochs, before the evidence"),
        ({"evidence_every": 1, "weight_decay": 0.1}, "both set the prior precision"),
    ):
        with pytest.raises(InputError, match=message):
            MAP().fit(nn.Linear(3, 1).double(), (x, y), likelihood="gaussian", training=Training(epochs=5, **settings))
