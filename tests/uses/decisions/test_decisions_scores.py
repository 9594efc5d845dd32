"""Scores against their formulas, and detectors against the rate of false alarms they promise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decision_cases import blobs, classifier, line, regressor
from dubito.decisions import Detector, energy, score_prediction
from dubito.errors import InputError, NonFiniteError, UnsupportedError
from dubito.metrics import auroc
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dubito import MAP
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.uses.fixed_draws import rank_for

LOGITS = torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_class_scores_are_their_formulas() -> None:
    prediction = ClassPrediction.from_logit_samples(LOGITS)
    probs = LOGITS.softmax(-1)
    mean = probs.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    expected = {
        "max-probability": 1 - mean.amax(-1),
        "entropy": entropy,
        "mutual-information": entropy + (probs * probs.log()).sum(-1).mean(0),
        "variance": (probs - mean).square().mean(0).sum(-1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(score_prediction(prediction, name), value, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


def test_number_scores_are_their_formulas() -> None:
    means, noise = LOGITS[..., :2], torch.tensor([0.3, 0.7], dtype=torch.float64)
    prediction = RegressionPrediction(means, noise, torch.zeros((), dtype=torch.float64))
    doubt = means.var(0, correction=0)
    expected = {
        "variance": doubt.mean(-1),
        "mutual-information": 0.5 * (1 + doubt / noise).log().mean(-1),
        "entropy": 0.5 * (2 * math.pi * math.e * (doubt + noise)).log().mean(-1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(score_prediction(prediction, name), value, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


def test_positions_are_averaged() -> None:
    prediction = ClassPrediction.from_logit_samples(LOGITS.reshape(7, 1, 5, 4))
    flat = ClassPrediction.from_logit_samples(LOGITS)
    assert score_prediction(prediction, "entropy").item() == pytest.approx(float(flat.entropy.mean()), abs=1e-12)


def test_the_energy_is_that_of_the_central_network() -> None:
    posterior, (x, _) = classifier("variational"), blobs(9, 1)
    expected = -posterior.model(x).double().logsumexp(-1)
    torch.testing.assert_close(energy(posterior, x), expected.detach(), rtol=1e-6, atol=1e-6)
    loader = DataLoader(TensorDataset(x), batch_size=4)
    torch.testing.assert_close(energy(posterior, loader), expected.detach(), rtol=1e-6, atol=1e-6)
    with pytest.raises(UnsupportedError, match="needs a categorical likelihood"):
        energy(regressor("map"), line(3, 1)[0])


def test_what_a_prediction_cannot_tell() -> None:
    numbers = regressor("map").predict(line(3, 1)[0])
    with pytest.raises(UnsupportedError, match="'max-probability' is not defined for a regression"):
        score_prediction(numbers, "max-probability")
    with pytest.raises(InputError, match=r"`score` must be .*, got 'colour'"):
        score_prediction(numbers, "colour")  # type: ignore[arg-type]
    many = ClassPrediction.from_logit_samples(LOGITS, keep_samples=False)
    with pytest.raises(UnsupportedError, match="were too many to keep"):
        score_prediction(many, "variance")
    assert not score_prediction(ClassPrediction.from_logits(LOGITS[0]), "variance").any()


@pytest.mark.slow
@pytest.mark.parametrize("score", ["max-probability", "entropy", "mutual-information", "variance", "energy"])
def test_false_alarms_are_as_rare_as_promised(score: Any) -> None:
    """Over many calibration sets the rate of false alarms has the mean 1 − k/(n + 1), at most that asked for."""
    posterior, rates = classifier("laplace"), []
    for seed in range(60):
        detector = Detector(posterior, blobs(59, 100 + seed), score=score, false_positive_rate=0.1)
        rates.append(float(detector.detect(blobs(500, 5000 + seed)[0]).double().mean()))
    rank, mean = rank_for(0.9, 59, ""), sum(rates) / len(rates)
    expected = 1 - rank / 60
    assert expected == pytest.approx(0.1)
    # Beta(6, 54) has a standard deviation of 0.0384; the mean of 60 of them, with 500 test data each, one of 0.0052.
    assert abs(mean - expected) < 4 * 0.0053


def test_what_lies_far_away_is_detected() -> None:
    posterior = classifier("laplace")
    detector = Detector(posterior, blobs(300, 3), score="mutual-information")
    far = blobs(300, 4, shift=6.0)[0]
    assert float(detector.detect(far).double().mean()) > 0.9
    scores = torch.cat([detector.scores(blobs(300, 5)[0]), detector.scores(far)])
    assert float(auroc(scores, torch.cat([torch.zeros(300), torch.ones(300)]))) > 0.9
    assert repr(detector).startswith("<Detector: mutual-information above ")


def test_every_kind_of_calibration_data_gives_the_same_threshold() -> None:
    posterior, (x, y) = classifier("variational"), blobs(50, 3)
    kinds = (x, (x, y), DataLoader(TensorDataset(x, y), 7), TensorDataset(x, y))
    thresholds = [Detector(posterior, kind, score="entropy").threshold for kind in kinds]
    assert max(thresholds) - min(thresholds) < 1e-6


def test_a_detector_keeps_the_draws_it_was_fitted_with() -> None:
    posterior, (x, _) = classifier("variational"), blobs(50, 3)
    generator = torch.Generator().manual_seed(8)
    detector = Detector(posterior, x, num_samples=3, generator=generator)
    expected = posterior.predict(x, num_samples=3, generator=torch.Generator().manual_seed(8)).epistemic  # type: ignore[attr-defined]
    assert torch.equal(detector.scores(x), expected.double())
    assert torch.equal(detector.scores(x), expected.double())


def test_detector_faults() -> None:
    posterior, (x, _) = classifier("laplace"), blobs(30, 3)
    with pytest.raises(InputError, match=r"rate of 0.01 needs at least 99 calibration data, but there are 30"):
        Detector(posterior, x, false_positive_rate=0.01)
    with pytest.raises(InputError, match="above 0 and below 1"):
        Detector(posterior, x, false_positive_rate=0.0)
    with pytest.raises(InputError, match="calibration data is empty"):
        Detector(posterior, x[:0])
    with pytest.raises(InputError, match="calibration data is empty"):
        Detector(posterior, (x[:0], x[:0]))
    with pytest.raises(InputError, match="NaN or infinite"):
        Detector(posterior, torch.full((30, 2), math.nan))
    with pytest.raises(InputError, match="cannot separate inputs"):
        Detector(classifier("map"), x)
    with pytest.raises(InputError, match="`score` must be"):
        Detector(posterior, x, score="colour")  # type: ignore[arg-type]


def test_a_network_that_gives_nan_is_named() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).sqrt()

    x = blobs(30, 3)[0].abs()
    posterior = MAP(train=False).fit(Broken(), (x, torch.zeros(30, dtype=torch.long)))
    with pytest.raises(NonFiniteError, match="prediction is NaN or infinite"):
        energy(posterior, -x)


RANKS = [(0.9, 9, 9), (0.9, 19, 18), (0.9, 109, 99), (0.95, 19, 19), (0.5, 1, 1)]


@pytest.mark.parametrize(("level", "num", "rank"), RANKS)
def test_ranks(level: float, num: int, rank: int) -> None:
    assert rank_for(level, num, "") == rank
    with pytest.raises(InputError, match=f"at least {math.ceil(level / (1 - level) - 1e-9)}"):
        rank_for(level, math.ceil(level / (1 - level) - 1e-9) - 1, "This")
