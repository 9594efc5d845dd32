"""Conformal sets and intervals: brute force, and coverage over repeated splits against its exact distribution."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from decision_cases import blobs, classifier, line, regressor
from dubito.decisions import ConformalIntervals, ConformalSets
from dubito.errors import InputError

from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.uses.fixed_draws import rank_for

SPLITS, CALIBRATION, TEST = 100, 49, 300


def beta_binomial_error(rank: int) -> float:
    """The standard deviation of the mean coverage over the splits: Beta(k, n + 1 − k), then binomial test data."""
    level = rank / (CALIBRATION + 1)
    across = level * (1 - level) / (CALIBRATION + 2)
    return math.sqrt((across + level * (1 - level) / TEST) / SPLITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind", "randomized"),
    [("map", "thr", False), ("laplace", "aps", True), ("laplace", "aps", False), ("variational", "aps", True)],
)
def test_sets_cover_as_often_as_the_exact_bound_says(
    method: str, kind: Literal["thr", "aps"], randomized: bool
) -> None:
    posterior, covered = classifier(method), []
    for seed in range(SPLITS):
        sets = ConformalSets(
            posterior, blobs(CALIBRATION, 100 + seed), coverage=0.8, method=kind, randomized=randomized, num_samples=8,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        x, y = blobs(TEST, 9000 + seed)
        covered.append(float(sets.predict(x).gather(-1, y[:, None]).double().mean()))
    rank = rank_for(0.8, CALIBRATION, "")
    exact, error = rank / (CALIBRATION + 1), 4 * beta_binomial_error(rank)
    mean = sum(covered) / SPLITS
    assert mean >= exact - error
    if kind == "thr" or randomized:
        assert mean <= exact + error


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), [("map", "stddev"), ("laplace", "quantile"), ("variational", "stddev")])
def test_intervals_cover_as_often_as_the_exact_bound_says(method: str, kind: Any) -> None:
    posterior, covered = regressor(method), []
    for seed in range(SPLITS):
        intervals = ConformalIntervals(
            posterior, line(CALIBRATION, 100 + seed), coverage=0.8, method=kind, num_samples=4
        )
        x, y = line(TEST, 9000 + seed)
        low, high = intervals.predict(x)
        covered.append(float(((low <= y) & (y <= high)).double().mean()))
    rank = rank_for(0.8, CALIBRATION, "")
    assert abs(sum(covered) / SPLITS - rank / (CALIBRATION + 1)) < 4 * beta_binomial_error(rank)


@pytest.mark.slow
def test_coverage_given_the_calibration_data_is_beta_distributed() -> None:
    """A Kolmogorov-Smirnov test: test coverage is nearly exact with 4,000 test data."""
    from scipy.stats import beta, kstest

    posterior, covered = classifier("map"), []
    x, y = blobs(4000, 5)
    for seed in range(200):
        sets = ConformalSets(posterior, blobs(CALIBRATION, 300 + seed), coverage=0.8)
        covered.append(float(sets.predict(x).gather(-1, y[:, None]).double().mean()))
    rank = rank_for(0.8, CALIBRATION, "")
    assert kstest(covered, beta(rank, CALIBRATION + 1 - rank).cdf).pvalue > 0.01


def test_sets_by_brute_force() -> None:
    posterior, data = classifier("laplace"), blobs(40, 3)
    x, _ = blobs(10, 4)
    for kind in ("thr", "aps"):
        sets = ConformalSets(posterior, data, coverage=0.75, method=kind)  # type: ignore[arg-type]
        calibration, new = posterior.predict(data[0]), posterior.predict(x)
        assert isinstance(calibration, ClassPrediction)
        assert isinstance(new, ClassPrediction)

        def score(probs: torch.Tensor, label: int, kind: str = kind) -> float:
            own = probs[label]
            return float(1 - own) if kind == "thr" else float((probs[probs > own].sum() + own) / probs.sum())

        scores = sorted(score(p, int(y)) for p, y in zip(calibration.probs.double(), data[1], strict=True))
        threshold = scores[rank_for(0.75, 40, "") - 1]
        assert sets.threshold == pytest.approx(threshold, abs=1e-12)
        expected = torch.tensor([[score(p, c) <= threshold + 1e-12 for c in range(3)] for p in new.probs.double()])
        assert torch.equal(sets.predict(x), expected)


def test_randomized_sets_are_smaller_and_change_from_call_to_call() -> None:
    posterior, data, (x, _) = classifier("laplace"), blobs(300, 3), blobs(400, 4)
    plain = ConformalSets(posterior, data, method="aps")
    drawn = ConformalSets(posterior, data, method="aps", randomized=True)
    assert float(drawn.predict(x).sum()) < float(plain.predict(x).sum())
    assert not torch.equal(drawn.predict(x), drawn.predict(x))
    assert torch.equal(plain.predict(x), plain.predict(x))
    assert repr(drawn).startswith("<ConformalSets: coverage 0.9 by aps")


def test_intervals_follow_the_posterior() -> None:
    posterior, data, (x, _) = regressor("laplace"), line(200, 3), line(20, 4)
    prediction = posterior.predict(x)
    assert isinstance(prediction, RegressionPrediction)
    scaled = ConformalIntervals(posterior, data, coverage=0.9)
    low, high = scaled.predict(x)
    widths = (high - low) / (2 * prediction.stddev.double())
    torch.testing.assert_close(widths, scaled.threshold.expand_as(widths), rtol=1e-5, atol=1e-5)
    shifted = ConformalIntervals(posterior, data, coverage=0.9, method="quantile")
    ends = prediction.to(torch.float64).interval(0.9)
    for end, own, sign in zip(shifted.predict(x), ends, (-1, 1), strict=True):
        torch.testing.assert_close(end - own, sign * shifted.threshold.expand_as(end), rtol=1e-5, atol=1e-6)
    assert repr(shifted).startswith("<ConformalIntervals: coverage 0.9 by quantile")


def test_conformal_faults() -> None:
    classes, numbers, data = classifier("map"), regressor("map"), blobs(20, 3)
    with pytest.raises(InputError, match=r"coverage of 0.99 needs at least 99 calibration data, but there are 20"):
        ConformalSets(classes, data, coverage=0.99)
    with pytest.raises(InputError, match=r"coverage of 0.99 needs at least 99"):
        ConformalIntervals(numbers, line(20, 1), coverage=0.99)
    with pytest.raises(InputError, match="`method` must be 'thr', 'aps' or 'raps'"):
        ConformalSets(classes, data, method="best")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`method` must be 'stddev' or 'quantile'"):
        ConformalIntervals(numbers, line(20, 1), method="thr")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="above 0 and below 1"):
        ConformalSets(classes, data, coverage=1.0)
    with pytest.raises(InputError, match="is for classification"):
        ConformalSets(numbers, line(20, 1))
    with pytest.raises(InputError, match="use ConformalSets for classes"):
        ConformalIntervals(classes, data)
    with pytest.raises(InputError, match="NaN or infinite"):
        ConformalIntervals(numbers, (line(20, 1)[0], torch.full((20, 1), math.nan)))
