"""Accumulators equal the pure functions over all data at once, however the data were split and merged."""

from __future__ import annotations

import math

import pytest
import torch
from dubito.errors import InputError
from dubito.metrics import ClassificationMetrics, RegressionMetrics
from torch import Tensor

from dubito import metrics
from dubito.beliefs.prediction import gaussian_mixture
from dubito.uses.metrics.scores import CLASS_SUMS, SCORES, Score


def classification_data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(1000, 5, generator=generator, dtype=dtype).mul(6).log_softmax(-1)
    return log_probs, torch.multinomial(log_probs.exp().sqrt(), 1, generator=generator)[:, 0]


def regression_data(components: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(components, 300, generator=generator)
    stddevs = 0.3 + torch.rand(components, 300, generator=generator)
    return means, stddevs, torch.randn(300, generator=generator)


def assert_close(got: dict[str, float], expected: dict[str, float]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_classification_equals_the_functions() -> None:
    log_probs, targets = classification_data()
    whole = ClassificationMetrics()
    whole.update(log_probs, targets)
    probs = log_probs.exp()
    expected = {
        "accuracy": float(metrics.accuracy(probs, targets)),
        "nll": float(metrics.nll(log_probs, targets)),
        "brier": float(metrics.brier(probs, targets)),
        "ece": float(metrics.ece(probs, targets)),
        "mce": float(metrics.mce(probs, targets)),
        "count": 1000.0,
    }
    assert_close(whole.compute(), expected)
    bins = metrics.reliability(probs, targets)
    assert torch.equal(whole.reliability().correct_sums, bins.correct_sums)
    torch.testing.assert_close(whole.reliability().edges, bins.edges.double(), rtol=0, atol=1e-7)


def test_a_score_that_is_a_sum_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    log_probs, targets = classification_data(torch.float64)
    score = Score("Spherical", math.inf, "", class_sum=lambda rows, probs, labels: probs.norm(dim=1).sum(), power=2.0)
    monkeypatch.setitem(SCORES, "norm", score)
    monkeypatch.setitem(CLASS_SUMS, "norm", score.class_sum)
    found = ClassificationMetrics()
    for part in (slice(0, 300), slice(300, 1000)):
        found.update(log_probs[part], targets[part])
    assert found.compute()["norm"] == pytest.approx(float(log_probs.exp().norm(dim=1).mean()) ** 2, rel=1e-12)
    assert found.compute()["ece"] == pytest.approx(float(metrics.ece(log_probs.exp(), targets)), rel=1e-12)


@pytest.mark.parametrize("sizes", [(1000,), (1, 999), (333, 333, 334), (100,) * 10])
def test_merged_parts_equal_one_pass(sizes: tuple[int, ...]) -> None:
    log_probs, targets = classification_data(torch.float64)
    whole = ClassificationMetrics(num_bins=10)
    whole.update(log_probs, targets)
    batched, merged, summed = ClassificationMetrics(10), ClassificationMetrics(10), torch.zeros_like(whole.state())
    for rows, labels in zip(log_probs.split(sizes), targets.split(sizes), strict=True):
        batched.update(rows, labels)
        part = ClassificationMetrics(10)
        part.update(rows, labels)
        merged = merged.merge(part)
        summed += part.state()
    for parts in (batched, merged, ClassificationMetrics.from_state(summed, num_bins=10)):
        assert_close(parts.compute(), whole.compute())
        torch.testing.assert_close(parts.state(), whole.state(), rtol=1e-12, atol=1e-12)


def test_positions_and_ignored_targets() -> None:
    log_probs, targets = classification_data()
    padded = targets.reshape(10, 100).clone()
    padded[:, 90:] = -1
    sequence = ClassificationMetrics(ignore_index=-1)
    sequence.update(log_probs.reshape(10, 100, 5), padded)
    plain = ClassificationMetrics()
    plain.update(log_probs.reshape(10, 100, 5)[:, :90], padded[:, :90])
    assert_close(sequence.compute(), plain.compute())


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("sizes", [(300,), (10, 200, 90)])
def test_regression_equals_the_functions(components: int, sizes: tuple[int, ...]) -> None:
    means, stddevs, targets = regression_data(components)
    weights = torch.full((components, 1), 1 / components, dtype=torch.float64)
    shaped = (means, stddevs) if components > 1 else (means[0], stddevs[0])
    expected = {
        "rmse": float(metrics.rmse(means.double().mean(0), targets)),
        "nll": float(metrics.gaussian_nll(*shaped, targets)),
        "crps": float(metrics.crps(*shaped, targets)),
    }
    bounds = {
        level: [
            gaussian_mixture.quantile(means.double(), stddevs.double(), weights, (1 + side * level) / 2)
            for side in (-1, 1)
        ]
        for level in (0.5, 0.9, 0.95)
    }
    expected |= {f"coverage@{level}": float(metrics.interval_coverage(*bounds[level], targets)) for level in bounds}
    expected |= {f"width@{level}": float(metrics.interval_width(*bounds[level])) for level in bounds}
    merged = RegressionMetrics()
    for mean, stddev, truth in zip(*(part.split(sizes, -1) for part in (*shaped, targets)), strict=True):
        part = RegressionMetrics()
        part.update(mean, stddev, truth)
        merged = merged.merge(part)
    assert_close(merged.compute(), expected | {"count": 300.0})
    assert_close(RegressionMetrics.from_state(merged.state()).compute(), merged.compute())


def test_interval_of_a_standard_normal() -> None:
    wide = RegressionMetrics(levels=(0.95,))
    wide.update(torch.zeros(2), torch.ones(2), torch.tensor([1.95, 1.97]))
    assert wide.compute()["coverage@0.95"] == 0.5
    assert wide.compute()["width@0.95"] == pytest.approx(2 * 1.959963984540054, abs=1e-12)


def test_mixture_weights_are_used() -> None:
    accumulator = RegressionMetrics()
    means = torch.tensor([[0.0], [4.0]])
    accumulator.update(means, torch.ones(2, 1), torch.tensor([1.0]), weights=torch.tensor([0.75, 0.25]))
    assert accumulator.compute()["rmse"] == pytest.approx(0, abs=1e-12)
    expected = -math.log((0.75 * math.exp(-0.5) + 0.25 * math.exp(-4.5)) / math.sqrt(2 * math.pi))
    assert accumulator.compute()["nll"] == pytest.approx(expected, abs=1e-12)


def test_merging_and_states_share_no_memory() -> None:
    log_probs, targets = classification_data()
    one = ClassificationMetrics()
    one.update(log_probs, targets)
    before = one.state().clone()
    assert before.dtype == torch.float64
    merged = one.merge(ClassificationMetrics())
    restored = ClassificationMetrics.from_state(before)
    for changed in (merged, restored):
        changed.update(log_probs, targets)
    one.state().zero_()
    one.reliability().counts.zero_()
    assert torch.equal(one.state(), before)
    assert merged.compute()["count"] == 2000


def test_a_rejected_batch_leaves_no_trace() -> None:
    log_probs, targets = classification_data()
    accumulator = ClassificationMetrics()
    with pytest.raises(InputError, match="targets must lie in"):
        accumulator.update(log_probs, targets + 1)
    assert float(accumulator.state().abs().sum()) == 0
    with pytest.raises(InputError, match="has seen no data"):
        accumulator.compute()
    with pytest.raises(InputError, match="has seen no data"):
        RegressionMetrics().compute()


def test_different_settings_do_not_merge() -> None:
    with pytest.raises(InputError, match="different settings cannot be merged"):
        ClassificationMetrics(10).merge(ClassificationMetrics(15))
    with pytest.raises(InputError, match="different settings cannot be merged"):
        RegressionMetrics().merge(ClassificationMetrics())
    with pytest.raises(InputError, match="has 47 numbers"):
        ClassificationMetrics.from_state(torch.zeros(32, dtype=torch.float64))
    with pytest.raises(InputError, match=r"above 0 and below 1|strictly between 0 and 1"):
        RegressionMetrics(levels=(0.5, 1.0))
    with pytest.raises(InputError, match="num_bins"):
        ClassificationMetrics(0)
