"""Temperature scaling against MAP's own, a grid, closed forms, and the file format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from decision_cases import TRAINING, blobs, classifier, line, network, regressor
from dubito.decisions import TemperedPosterior, temper, tempered
from dubito.errors import InputError, UnsupportedError

import dubito
from dubito import MAP, Laplace
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction

LOGITS = torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_point_gets_the_temperature_that_map_finds(task: str) -> None:
    held_out: Any = blobs(100, 9) if task == "classification" else line(100, 9)
    data: Any = blobs(120, 0) if task == "classification" else line(80, 0)
    likelihood = "categorical" if task == "classification" else "gaussian"
    model = network(2, 3) if task == "classification" else network(1, 1)
    own = MAP(temperature="validation").fit(model, data, likelihood=likelihood, validation=held_out, training=TRAINING)
    found = temper(MAP().fit(model, data, likelihood=likelihood, training=TRAINING), held_out)
    assert found.temperature == pytest.approx(own.temperature, rel=1e-4)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["laplace", "variational"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_no_other_temperature_is_better(method: str, task: str) -> None:
    posterior = classifier(method) if task == "classification" else regressor(method)
    data: Any = blobs(150, 9) if task == "classification" else line(150, 9)
    found = temper(posterior, data)
    doubt = 1.0 if task == "classification" else 0.0

    prediction = posterior.predict(data[0]).to(torch.float64)

    def objective(temperature: float) -> float:
        log_prob = tempered(prediction, temperature).log_prob(data[1])
        return -float(log_prob.sum()) + doubt * math.log1p((math.log(temperature) / 0.3) ** 2)

    grid = torch.logspace(-1, 1, 41, dtype=torch.float64)
    assert objective(found.temperature) <= min(objective(float(t)) for t in grid) + 1e-6


def test_classes_are_tempered_after_pooling_and_samples_one_by_one() -> None:
    prediction = ClassPrediction.from_logit_samples(LOGITS)
    cooler = tempered(prediction, 2.5)
    assert isinstance(cooler, ClassPrediction)
    pooled = LOGITS.softmax(-1).mean(0) ** (1 / 2.5)
    torch.testing.assert_close(cooler.probs, pooled / pooled.sum(-1, keepdim=True), rtol=1e-12, atol=1e-12)
    alone = ClassPrediction.from_logit_samples(LOGITS / 2.5)
    torch.testing.assert_close(cooler.samples, alone.samples, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(cooler.epistemic, alone.epistemic, rtol=1e-12, atol=1e-12)
    assert torch.equal(cooler.mode, prediction.mode)


def test_without_samples_the_share_of_doubt_stays() -> None:
    prediction = ClassPrediction.from_logit_samples(LOGITS, keep_samples=False)
    cooler = tempered(prediction, 2.5)
    assert isinstance(cooler, ClassPrediction)
    total = torch.special.entr(cooler.probs).sum(-1)
    torch.testing.assert_close(cooler.entropy, total, rtol=1e-12, atol=1e-12)
    share = prediction.epistemic / prediction.entropy
    torch.testing.assert_close(cooler.epistemic / cooler.entropy, share, rtol=1e-12, atol=1e-12)


def test_numbers_keep_their_mean_and_spread_by_the_temperature() -> None:
    covariance = torch.eye(4, dtype=torch.float64).expand(5, 4, 4)
    small = torch.tensor(0.2, dtype=torch.float64)
    prediction = RegressionPrediction(LOGITS, small, small / 2, covariance)
    wider = tempered(prediction, 3.0)
    assert isinstance(wider, RegressionPrediction)
    torch.testing.assert_close(wider.mean, prediction.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wider.aleatoric, 9 * prediction.aleatoric, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wider.epistemic, 9 * prediction.epistemic, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wider.covariance, 9 * covariance)
    for level in (0.1, 0.6):
        moved = prediction.mean + 3 * (prediction.quantile(level) - prediction.mean)
        torch.testing.assert_close(wider.quantile(level), moved, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("method", ["map", "laplace", "variational"])
def test_it_is_a_posterior_like_the_one_inside(method: str, tmp_path: Path) -> None:
    inside, (x, y) = classifier(method), blobs(100, 9)
    posterior = temper(inside, (x, y))
    torch.testing.assert_close(posterior.sample(2), inside.sample(2))
    torch.testing.assert_close(posterior.marginals(), inside.marginals())
    if method != "map":
        torch.testing.assert_close(posterior.prior(), inside.prior())
        assert posterior.log_evidence() == inside.log_evidence()
    assert dubito.evaluate(posterior, (x, y)).scores["nll"] <= dubito.evaluate(inside, (x, y)).scores["nll"] + 1e-4
    posterior.save(tmp_path / "posterior")
    again = dubito.load(tmp_path / "posterior", network(2, 3))
    assert isinstance(again, TemperedPosterior)
    assert again.digest() == posterior.digest()
    assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"update `.posterior`"):
        posterior.update((x, y))


def test_ignored_positions_do_not_count() -> None:
    x, y = blobs(60, 9)
    padded = torch.where(torch.arange(60) < 30, y, -100)
    posterior = classifier("map")
    assert temper(posterior, (x, padded)).temperature == pytest.approx(
        temper(posterior, (x[:30], y[:30])).temperature, rel=1e-5
    )


def test_temperature_faults() -> None:
    with pytest.raises(InputError, match="`temperature` must be a positive number"):
        tempered(ClassPrediction.from_logits(LOGITS[0]), 0.0)
    x, y = blobs(20, 1)
    with pytest.raises(InputError, match="calibration data is empty"):
        temper(classifier("map"), (x[:0], y[:0]))
    posterior = Laplace(prior_precision=1.0).fit(classifier("map").model, (x, y))
    with pytest.raises(InputError, match="no predict option"):
        TemperedPosterior(posterior, 2.0).predict(x, colour="red")
