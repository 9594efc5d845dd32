"""Conformal prediction of other kinds: penalties, groups, weights, several outputs, drift. The coverage of each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decision_cases import blobs, classifier, line, network, regressor
from dubito.decisions import ConformalIntervals, ConformalSets, OnlineConformal, density_ratio
from torch import Tensor

from dubito import MAP, Training
from dubito.core.errors import InputError, UnsupportedError
from dubito.uses.decisions.calibration_scores import CalibrationScores
from dubito.uses.fixed_draws import rank_for

SPLITS, CALIBRATION, TEST = 60, 60, 300


def mean_coverage(one: Any) -> float:
    """The mean of a function of the seed over the splits."""
    return sum(float(one(seed)) for seed in range(SPLITS)) / SPLITS


def error(rank: int, num: int, test: int = TEST) -> float:
    level = rank / (num + 1)
    return 4 * math.sqrt(level * (1 - level) * (1 / (num + 2) + 1 / test) / SPLITS)


def holds(inside: Tensor, y: Tensor) -> Tensor:
    return inside.gather(-1, y[:, None])[:, 0].double()


@pytest.mark.slow
def test_raps_covers_and_has_small_sets() -> None:
    posterior = classifier("laplace")

    def one(seed: int) -> float:
        sets = ConformalSets(
            posterior, blobs(CALIBRATION, 100 + seed), coverage=0.8, method="raps", penalty=0.2, free_classes=1,
            randomized=True, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        x, y = blobs(TEST, 9000 + seed)
        return float(holds(sets.predict(x), y).mean())

    rank = rank_for(0.8, CALIBRATION, "")
    assert abs(mean_coverage(one) - rank / (CALIBRATION + 1)) < error(rank, CALIBRATION)
    x, _ = blobs(400, 1)
    sizes = [
        int(ConformalSets(posterior, blobs(300, 2), coverage=0.97, method="raps", penalty=p, free_classes=1).predict(x)
            .sum(1).max()) for p in (0.0, 5.0)
    ]  # fmt: skip
    assert sizes[0] == 3 >= sizes[1]


def test_raps_by_brute_force() -> None:
    posterior, (x, _) = classifier("map"), blobs(20, 4)
    sets = ConformalSets(posterior, blobs(50, 3), method="raps", penalty=0.3, free_classes=2)
    prediction: Any = posterior.predict(x)
    for probs, found in zip(prediction.probs.double(), sets.nonconformity(prediction), strict=True):
        order = probs.argsort(descending=True).tolist()
        for rank, label in enumerate(order):
            expected = sum(float(probs[c]) for c in order[: rank + 1]) / float(probs.sum()) + 0.3 * max(rank + 1 - 2, 0)
            assert float(found[label]) == pytest.approx(expected, abs=1e-9)


def test_groups_cover_each_by_itself() -> None:
    """The noise of `line` grows outwards, which one threshold for all does not see."""
    posterior = regressor("map")

    def one(seed: int, grouped: bool) -> Tensor:
        x, y = line(2 * CALIBRATION, 100 + seed)
        x_new, y_new = line(TEST, 9000 + seed)
        own, new = ((part[:, 0].abs() > 0.5).long() for part in (x, x_new))
        rule = ConformalIntervals(posterior, (x, y), coverage=0.8, groups=own if grouped else None)
        low, high = rule.predict(x_new, groups=new if grouped else None)
        inside = ((low <= y_new) & (y_new <= high))[:, 0].double()
        return torch.stack([inside[new == group].mean() for group in (0, 1)])

    grouped, plain = (torch.stack([one(seed, how) for seed in range(SPLITS)]).mean(0) for how in (True, False))
    assert (grouped - 0.8).abs().max() < 0.035  # at least 0.8, and at most 0.8 + 1 / (n + 1) with about 60 data
    assert plain[0] > 0.85
    assert plain[1] < 0.75


def test_groups_of_classes_cover_each_class() -> None:
    posterior = classifier("map")

    def one(seed: int) -> Tensor:
        sets = ConformalSets(posterior, blobs(3 * CALIBRATION, 100 + seed), coverage=0.8, groups="class")
        x, y = blobs(TEST, 9000 + seed)
        inside = holds(sets.predict(x), y)
        return torch.stack([inside[y == label].mean() for label in range(3)])

    assert (torch.stack([one(seed) for seed in range(SPLITS)]).mean(0) - 0.81).abs().max() < 0.03


def test_weights_keep_the_coverage_under_covariate_shift() -> None:
    """New inputs have the density (1 + x) / 2 on [-1, 1] in place of 1 / 2, so the ratio is 1 + x."""
    posterior = regressor("map")

    def one(seed: int, weighted: bool) -> float:
        x, y = line(4 * CALIBRATION, 100 + seed)
        x_new, y_new = line(4 * TEST, 9000 + seed)
        generator = torch.Generator().manual_seed(seed)
        kept = torch.rand(len(x_new), generator=generator) < ((1 + x_new[:, 0]) / 2) ** 8
        x_new, y_new = x_new[kept], y_new[kept]
        ratio, new = ((9 * ((1 + part[:, 0]) / 2) ** 8) for part in (x, x_new))
        rule = ConformalIntervals(posterior, (x, y), coverage=0.8, weights=ratio if weighted else None)
        low, high = rule.predict(x_new, weights=new if weighted else None)
        return float(((low <= y_new) & (y_new <= high)).double().mean())

    assert mean_coverage(lambda seed: one(seed, False)) < 0.7
    assert 0.78 < mean_coverage(lambda seed: one(seed, True)) < 0.86  # with few effective data a little more than asked


def test_the_density_ratio_of_two_normals() -> None:
    """N(1, 1) against N(0, 1) has the ratio exp(x − 1/2)."""
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(4000, 1, generator=generator), 1 + torch.randn(2000, 1, generator=generator)
    at = torch.tensor([[-1.0], [0.0], [1.0]])
    found = density_ratio(old, new, at)
    torch.testing.assert_close(found[2], (at[:, 0].double() - 0.5).exp(), rtol=0.15, atol=0.0)
    assert abs(float(found[0].mean()) - 1) < 0.05
    with pytest.raises(InputError, match="differ in their shapes"):
        density_ratio(old, torch.zeros(3, 2))
    with pytest.raises(InputError, match="not be empty"):
        density_ratio(old, old[:0])


def test_a_box_of_several_outputs_holds_all_of_them() -> None:
    x = torch.linspace(-1, 1, 80)[:, None]
    posterior = MAP().fit(
        network(1, 3), (x, torch.cat([x, -x, x], 1)), likelihood="gaussian", training=Training(epochs=5)
    )

    def one(seed: int, joint: bool) -> float:
        generator = torch.Generator().manual_seed(seed)
        x, y = (
            torch.rand(CALIBRATION + TEST, 1, generator=generator),
            torch.randn(CALIBRATION + TEST, 3, generator=generator),
        )
        rule = ConformalIntervals(posterior, (x[:CALIBRATION], y[:CALIBRATION]), coverage=0.8, joint=joint)
        low, high = rule.predict(x[CALIBRATION:])
        truth = y[CALIBRATION:]
        return float(((low <= truth) & (truth <= high)).all(dim=1).double().mean())

    rank = rank_for(0.8, CALIBRATION, "")
    assert abs(mean_coverage(lambda seed: one(seed, True)) - rank / (CALIBRATION + 1)) < error(rank, CALIBRATION)
    assert mean_coverage(lambda seed: one(seed, False)) < 0.65  # about 0.8 to the power of three


@pytest.mark.parametrize("window", [None, 50])
def test_online_coverage_holds_under_any_drift(window: int | None) -> None:
    posterior, num, rate = regressor("map"), 600, 0.05
    x, y = line(num, 5)
    y = y + 0.01 * torch.arange(num)[:, None]  # it drifts away from the curve
    online = OnlineConformal(ConformalIntervals(posterior, line(100, 6), coverage=0.8), rate=rate, window=window)
    after = online.observed(x, y)
    assert after.coverage is not None
    assert online.coverage is None
    assert abs(after.coverage - 0.8) <= (0.8 + rate) / (num * rate)
    one_by_one = online
    for row in range(40):
        one_by_one = one_by_one.observed(x[row : row + 1], y[row : row + 1])
    assert one_by_one.level == pytest.approx(online.observed(x[:40], y[:40]).level)
    low, high = after.predict(x[-1:])
    early = online.predict(x[-1:])
    assert float(high - low) > float(early[1] - early[0])


def test_online_sets_at_extreme_levels() -> None:
    sets = ConformalSets(classifier("map"), blobs(50, 3), coverage=0.8)
    x, y = blobs(5, 4)
    online = OnlineConformal(sets, rate=0.5)
    for level, expected in ((1.2, True), (-0.1, False)):
        online.level = level
        assert bool((online.predict(x) == expected).all())
    assert "nothing observed" in repr(online)
    assert "of 5 covered" in repr(online.observed(x, y))


def test_thresholds_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, weights = torch.rand(30, 2, generator=generator).double(), torch.rand(30, generator=generator).double()
    new = torch.tensor([0.1, 5.0, 100.0], dtype=torch.float64)
    found = CalibrationScores(scores, weights=weights).thresholds(0.7, 3, None, new)
    for row, own in enumerate(new):
        for output in range(2):
            column = scores[:, output]
            good = [s for s in column if weights[column <= s].sum() >= 0.7 * (weights.sum() + own)]
            assert float(found[row, output]) == float(min(good, default=torch.tensor(math.inf)))
    equal = CalibrationScores(scores, weights=torch.full((30,), 0.37)).thresholds(0.7, 1, None, torch.tensor([0.37]))
    assert torch.equal(equal[0], CalibrationScores(scores).threshold(0.7))
    assert torch.equal(equal[0], scores.sort(0).values[rank_for(0.7, 30, "") - 1])


def test_faults_of_groups_weights_and_drift() -> None:
    posterior, data, (x, y) = classifier("map"), blobs(40, 3), blobs(4, 4)
    groups = torch.arange(40) % 2
    sets = ConformalSets(posterior, data, coverage=0.8, groups=groups)
    assert sets.threshold is None
    assert "several thresholds" in repr(sets)
    for options, told in (
        ({}, "`groups` must be given"), ({"groups": torch.tensor([0, 1, 7, 0])}, "is in group 7"),
        ({"groups": torch.zeros(3, dtype=torch.long)}, "one value for each of the 4 rows"),
        ({"groups": torch.zeros(4, dtype=torch.long), "weights": torch.ones(4)}, "`weights` must not be given"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=told):
            sets.predict(x, **options)
    with pytest.raises(UnsupportedError, match="needs them for new data"):
        sets.margin(posterior.predict(x))
    with pytest.raises(InputError, match="in group 3 needs at least 9 calibration data, but there are 1"):
        ConformalSets(posterior, data, groups=torch.tensor([3] + [1] * 39))
    with pytest.raises(InputError, match="one value for each of the 40 calibration data"):
        ConformalSets(posterior, data, groups=torch.zeros(3, dtype=torch.long))
    with pytest.raises(InputError, match="whole numbers"):
        ConformalSets(posterior, data, groups=torch.zeros(40))
    with pytest.raises(InputError, match='`groups` must be "class"'):
        ConformalSets(posterior, data, groups="classes")
    for weights in (torch.full((40,), -1.0), torch.full((40,), math.nan), torch.zeros(40)):
        with pytest.raises(InputError, match="weights"):
            ConformalSets(posterior, data, weights=weights)
    with pytest.raises(UnsupportedError, match="no groups and no weights"):
        OnlineConformal(sets)
    with pytest.raises(InputError, match="give one target for each input"):
        OnlineConformal(ConformalSets(posterior, data)).observed(x, y[:2])
