"""The calibration of a run agrees with the objects of `dubito.decisions` on the same rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from run_cases import houses, run_of

from dubito import decisions
from dubito.uses.runs.calibration import Calibration


def test_intervals_are_split_conformal() -> None:
    run = run_of()
    exact = decisions.ConformalIntervals(run.posterior, run.parts["held_out"], coverage=0.8)
    assert run.calibration.reach(0.8) == pytest.approx(float(exact.threshold), rel=1e-5)
    found = run.predict(houses(30, seed=1), coverage=0.8)
    low, high = exact.predict(run.encoder.encode(houses(30, seed=1)))
    loc, scale = run.target_scale
    np.testing.assert_allclose(found["lower"], (loc + scale * low)[:, 0], rtol=1e-4)
    np.testing.assert_allclose(found["upper"], (loc + scale * high)[:, 0], rtol=1e-4)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Many calibrations of 39 rows cover new rows with 90 %, on average, although the errors are not Gaussian."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(400):
        error = torch.rand(240, generator=generator, dtype=torch.float64) ** 3
        calibration = Calibration(torch.ones(39), error[:39], torch.arange(39), error[:39].sort().values)
        shares.append(float((error[39:] <= calibration.reach(0.9)).double().mean()))
    assert sum(shares) / len(shares) == pytest.approx(0.9, abs=0.01)
    few = Calibration(torch.ones(8), torch.ones(8), torch.ones(8), torch.ones(8))
    assert few.reach(0.9) is None


def test_decisions_at_a_risk_are_those_of_a_rejector() -> None:
    run = run_of("cheap")
    exact = decisions.Rejector(run.posterior, run.parts["held_out"], risk=0.05)
    assert run.calibration.threshold(0.05) == pytest.approx(exact.threshold, rel=1e-6)
    found = run.predict(houses(60, seed=1), risk=0.05)
    certain = 1 - found["confidence"] <= exact.threshold
    np.testing.assert_array_equal(found["decision"] == "answer", certain & (found["unfamiliar"] < 0.99))


def test_the_risk_of_numbers_is_their_mean_absolute_error_in_original_units() -> None:
    run = run_of()
    calibration = run.calibration
    typical = float(calibration.loss.mean())
    for risk in (typical, 1.1 * typical):
        answered = calibration.uncertainty <= calibration.threshold(risk)
        assert float(calibration.loss[answered].mean()) <= risk
    assert 5 < typical < 50  # prices are around 350, noise 20
    assert calibration.threshold(None) == math.inf
    with pytest.warns(UserWarning, match=r"No answer is certain enough for a risk of 1e-06.*every row is to be asked"):
        assert calibration.threshold(1e-6) == -math.inf
    with pytest.raises(InputError, match="`risk` must be a positive number"):
        calibration.threshold(-1.0)


def test_unfamiliar_is_the_share_of_more_familiar_rows() -> None:
    run = run_of()
    held_out = run.predict_inputs(run.parts["held_out"][0])["unfamiliar"]
    assert sorted(held_out) == pytest.approx([i / len(held_out) for i in range(len(held_out))], abs=0.08)
    odd = run.predict({"size": [120.0, 2000.0], "town": ["Rom", "Ulm"]})
    assert odd["unfamiliar"].tolist() == [1.0, 1.0]
    assert odd["decision"].tolist() == ["ask", "ask"]
