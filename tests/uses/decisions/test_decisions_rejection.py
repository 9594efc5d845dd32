"""Thresholds against brute force over every threshold, and the promised risk against many calibration sets."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decision_cases import blobs, classifier, line, regressor
from dubito.decisions import Rejector
from dubito.errors import InputError, UnsupportedError
from scipy.stats import binom
from torch import Tensor

from dubito import Posterior
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.uses.decisions.rejection import NUM_TESTS
from dubito.uses.decisions.scores import score_prediction


@Posterior.register
class Fake:
    """A posterior that gives back probabilities of two classes, which are its inputs."""

    device, dtype, likelihood = torch.device("cpu"), torch.float64, SimpleNamespace()

    def predict(self, x: Tensor, **_: Any) -> ClassPrediction:
        return ClassPrediction.from_logits(torch.stack([1 - x, x], -1).double().log())


def binary(num: int, generator: torch.Generator, grid: int | None = None) -> tuple[Tensor, Tensor]:
    """Confidences, and labels that are 1 with that probability: a calibrated classifier."""
    x = 0.5 + 0.5 * torch.rand(num, generator=generator, dtype=torch.float64)
    x = x if grid is None else (x * grid).round() / grid
    x = x.clamp(0.501, 0.999)
    return x, (torch.rand(num, generator=generator, dtype=torch.float64) < x).long()


@pytest.mark.parametrize("grid", [None, 20])
@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_is_the_best_of_all_thresholds(seed: int, grid: int | None) -> None:
    x, y = binary(200, torch.Generator().manual_seed(seed), grid)
    fitted = Rejector(Fake(), (x, y), risk=0.1)  # type: ignore[arg-type]
    scores = score_prediction(Fake().predict(x), "max-probability")
    good = [
        float(threshold) for threshold in scores.unique() if float((y != 1)[scores <= threshold].double().mean()) <= 0.1
    ]
    assert fitted.threshold == max(good)
    assert fitted.coverage == pytest.approx(float((scores <= max(good)).double().mean()))
    accepted = fitted.predict(x).accepted
    assert float((y != 1)[accepted].double().mean()) <= 0.1


@pytest.mark.parametrize("seed", range(5))
def test_the_guarantee_is_the_largest_rank_that_passes(seed: int) -> None:
    x, y = binary(400, torch.Generator().manual_seed(seed))
    fitted = Rejector(Fake(), (x, y), risk=0.2, confidence=0.9)  # type: ignore[arg-type]
    scores = score_prediction(Fake().predict(x), "max-probability")
    ordered = scores.sort().values
    passed = []
    for test in range(1, NUM_TESTS + 1):
        cut = math.inf if test == NUM_TESTS else float(ordered[400 * test // NUM_TESTS - 1])
        below = scores < cut
        if binom.cdf(int((y != 1)[below].sum()), int(below.sum()), 0.2) <= 0.1 / NUM_TESTS:
            passed.append(cut)
    assert fitted.threshold == math.nextafter(max(passed), -math.inf)
    assert fitted.coverage == pytest.approx(float((scores < max(passed)).double().mean()))


@pytest.mark.slow
def test_the_guarantee_holds_over_calibration_sets() -> None:
    """The true risk of answering confidences c and above is the mean of 1 − p over them, (1 − c)/2 for uniform ones."""
    broken, plain_broken, coverages = 0, 0, []
    for seed in range(200):
        data = binary(500, torch.Generator().manual_seed(1000 + seed))
        sure = Rejector(Fake(), data, risk=0.2, confidence=0.8)  # type: ignore[arg-type]
        broken += min(sure.threshold, 0.5) / 2 > 0.2
        plain_broken += min(Rejector(Fake(), data, risk=0.2).threshold, 0.5) / 2 > 0.2  # type: ignore[arg-type]
        coverages.append(sure.coverage)
    assert broken <= 40 + 4 * math.sqrt(200 * 0.2 * 0.8)
    assert broken < 40  # the union over ranks makes it safer than asked for
    assert plain_broken > 60  # an estimate promises nothing
    assert sum(coverages) / 200 > 0.3  # and it does not answer nothing


def test_regression_by_squared_error() -> None:
    posterior, data = regressor("laplace"), line(400, 7)
    free = Rejector(posterior, data, risk=10.0, loss="squared")
    assert free.coverage == 1.0
    full = float(free.curve.risk[-1])
    prediction = posterior.predict(data[0])
    assert isinstance(prediction, RegressionPrediction)
    assert full == pytest.approx(float((prediction.mean - data[1]).square().mean()), rel=1e-5)
    own = Rejector(posterior, data, risk=0.5, loss=lambda p, y: (p.mean - y).abs()[:, 0], score="variance")  # type: ignore[attr-defined]
    assert own.score == "variance"


def test_regression_risk_is_in_the_units_of_the_target() -> None:
    posterior, data, (x, y) = regressor("laplace"), line(400, 7), line(2000, 8)
    plain = Rejector(posterior, data, risk=0.3)
    scaled = Rejector(posterior, data, risk=300.0, target_scale=(5000.0, 1000.0))
    assert scaled.coverage == plain.coverage
    decision = scaled.predict(x)
    assert isinstance(decision.prediction, RegressionPrediction)
    assert torch.equal(decision.accepted, plain.predict(x).accepted)
    error = (decision.prediction.mean - (5000 + 1000 * y)).abs()[decision.accepted]
    assert 200 < float(error.mean()) < 400
    assert torch.equal(scaled.margin(posterior.predict(x)) >= 0, decision.accepted)
    with pytest.raises(UnsupportedError, match="'error' is not defined for a regression: use absolute or squared"):
        Rejector(posterior, data, loss="error")
    with pytest.raises(InputError, match="posterior predicts classes"):
        Rejector(classifier("map"), blobs(50, 1), target_scale=(0.0, 1.0))
    for wrong in (3.0, (1.0, -1.0), (1.0, 2.0, 3.0), "wide", (math.nan, 1.0)):
        with pytest.raises(InputError, match="target_scale"):
            Rejector(posterior, data, target_scale=wrong)


def test_a_decision_and_its_figure() -> None:
    posterior = classifier("laplace")
    rejector = Rejector(posterior, blobs(300, 3), risk=0.05)
    x, y = blobs(300, 4)
    decision = rejector.predict(x)
    assert isinstance(decision.prediction, ClassPrediction)
    wrong = decision.prediction.mode != y
    assert 0 < int(decision.accepted.sum()) < 300
    assert float(wrong[decision.accepted].double().mean()) < float(wrong.double().mean()) / 2
    axes = rejector.plot().axes[0]
    assert axes.get_xlabel().startswith("Fraction answered")
    assert float(axes.lines[-1].get_xdata()[0]) == rejector.coverage  # type: ignore[index, arg-type]
    assert repr(rejector).startswith("<Rejector: answers ")


def test_rejector_faults() -> None:
    posterior, data = classifier("laplace"), blobs(60, 3)
    with pytest.raises(InputError, match="needs at least 397 calibration data even without an error, but there are 60"):
        Rejector(posterior, data, risk=0.015, confidence=0.95)
    wrong = (data[0], (posterior.predict(data[0]).mode + 1) % 3)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="No threshold reaches a risk of 1e-09"):
        Rejector(posterior, wrong, risk=1e-9)
    with pytest.raises(InputError, match=r"No threshold reaches a risk of 0.2 with confidence 0.9"):
        Rejector(posterior, wrong, risk=0.2, confidence=0.9)
    for risk in (0.0, math.inf, "low"):
        with pytest.raises(InputError, match="`risk` must be a positive number"):
            Rejector(posterior, data, risk=risk)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no targets"):
        Rejector(posterior, [(data[0],)])
    with pytest.raises(InputError, match="is not one of the classes, which are 0 to 2"):
        Rejector(posterior, (data[0], data[1] + 5))
    with pytest.raises(InputError, match="one number per datum"):
        Rejector(posterior, data, loss=lambda p, y: torch.zeros(3))
    with pytest.raises(UnsupportedError, match="losses of 0 and 1"):
        Rejector(regressor("map"), line(500, 1), risk=0.3, confidence=0.9)
