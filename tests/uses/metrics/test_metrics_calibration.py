"""Calibration errors against torchmetrics, scikit-learn and loops over bins, edges and ties included."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from dubito import metrics
from dubito.uses.metrics.calibration import bin_rows


def draw(num_rows: int, num_classes: int, scale: float, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(num_rows, num_classes, generator=generator, dtype=dtype).mul(scale).softmax(-1)
    return probs, torch.multinomial(probs.sqrt(), 1, generator=generator)[:, 0]


def two_class(confidence: Tensor) -> Tensor:
    return torch.stack([confidence, 1 - confidence], dim=-1)


def loop_over_bins(probs: Tensor, targets: Tensor, edges: Tensor) -> list[float]:
    """Gap of each bin [lower, upper), the last one closed, weighted by its share of rows, row by row in Python."""
    rows = [
        (float(row.max()), float(int(row.argmax()) == int(target))) for row, target in zip(probs, targets, strict=True)
    ]
    gaps = []
    for b, (lower, upper) in enumerate(pairwise(edges.tolist())):
        last = b == len(edges) - 2
        inside = [(conf, hit) for conf, hit in rows if lower <= conf and (conf < upper or (last and conf <= upper))]
        gaps.append(abs(sum(conf - hit for conf, hit in inside)) / len(rows))
    return gaps


@pytest.mark.parametrize("num_bins", [1, 10, 15, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_equal_torchmetrics(num_bins: int, dtype: torch.dtype, scale: float) -> None:
    probs, targets = draw(3000, 10, scale, dtype)
    for norm, metric in (("l1", metrics.ece), ("max", metrics.mce)):
        peer = multiclass_calibration_error(probs, targets, num_classes=10, n_bins=num_bins, norm=norm)
        assert float(metric(probs, targets, num_bins=num_bins)) == pytest.approx(float(peer), abs=1e-6)


@pytest.mark.parametrize("num_bins", [2, 10, 15])
def test_confidences_exactly_at_inner_edges_equal_torchmetrics(num_bins: int) -> None:
    edges = torch.linspace(0, 1, num_bins + 1)
    confidence = edges[(edges >= 0.5) & (edges < 1)].repeat_interleave(3)
    targets = (torch.arange(len(confidence)) % 3 == 0).long()
    peer = multiclass_calibration_error(two_class(confidence), targets, num_classes=2, n_bins=num_bins)
    assert float(metrics.ece(two_class(confidence), targets, num_bins=num_bins)) == pytest.approx(float(peer), abs=1e-6)


def test_confidence_of_one_shares_the_last_bin() -> None:
    # torchmetrics 1.9 counts exactly 1 in a sixteenth bin: gaps +0.05 and -1 become 0.525 instead of 0.475.
    probs, targets = two_class(torch.tensor([0.95, 1.0], dtype=torch.float64)), torch.tensor([0, 1])
    bins = metrics.reliability(probs, targets)
    assert bins.counts.tolist() == [0.0] * 14 + [2.0]
    assert float(bins.ece) == pytest.approx(0.475, abs=1e-12)
    assert float(bins.mce) == pytest.approx(0.475, abs=1e-12)


def test_rounding_above_one_counts_as_one() -> None:
    half = torch.tensor([[1.0, 0.0], [1.005, 0.0]])  # what bfloat16 arithmetic may leave
    bins = metrics.reliability(half, torch.tensor([0, 0]), num_bins=1000)
    assert bins.confidence_sums[-1] == bins.counts[-1] == 2


@pytest.mark.parametrize("num_bins", [1, 2, 3, 7, 15, 100, 1000, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_bin_index_is_bucketize_also_next_to_edges(num_bins: int, dtype: torch.dtype) -> None:
    edges = torch.linspace(0, 1, num_bins + 1, dtype=dtype)
    fractions = (torch.arange(num_bins + 1, dtype=torch.float64) / num_bins).to(dtype)
    near = torch.cat([edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1), fractions])
    uniform = torch.rand(5000, dtype=dtype, generator=torch.Generator().manual_seed(0))
    confidence = torch.cat([near, uniform]).clamp(0, 1)
    index = torch.bucketize(confidence, edges[1:-1].contiguous(), right=True)
    bins = bin_rows(confidence, confidence > 0.5, num_bins)
    assert torch.equal(bins.counts, torch.bincount(index, minlength=num_bins).double())
    assert torch.equal(bins.confidence_sums, torch.bincount(index, confidence.double(), num_bins))


@pytest.mark.parametrize("binning", ["equal-width", "equal-mass"])
def test_equal_a_loop_over_bins_with_ties(binning: str) -> None:
    probs, targets = draw(400, 4, 3.0, torch.float64)
    rounded = (probs * 20).round() / 20  # many equal confidences, some exactly 1
    rounded[rounded.sum(-1) != 1] = torch.tensor([0.65, 0.35, 0.0, 0.0], dtype=torch.float64)
    bins = metrics.reliability(rounded, targets, num_bins=8, binning=binning)
    gaps = loop_over_bins(rounded, targets, bins.edges)
    assert int((rounded == 1).any(-1).sum()) > 10
    assert float(bins.ece) == pytest.approx(sum(gaps), abs=1e-12)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    again = metrics.reliability(rounded[order], targets[order], num_bins=8, binning=binning)
    assert torch.equal(bins.counts, again.counts)
    assert float(bins.ece) == pytest.approx(float(again.ece), abs=1e-14)


@pytest.mark.parametrize("num_rows", [150, 157, 9])
def test_equal_mass_splits_the_sorted_rows_evenly(num_rows: int) -> None:
    probs, targets = draw(num_rows, 5, 1.0, torch.float64)
    confidence, prediction = probs.max(-1)
    order = confidence.argsort()
    correct = (prediction == targets).double()
    starts = [-(-k * num_rows // 15) for k in range(16)]
    gaps = [abs(float((confidence[order[a:b]] - correct[order[a:b]]).sum())) for a, b in pairwise(starts)]
    bins = metrics.reliability(probs, targets, binning="equal-mass")
    assert sorted(bins.counts.tolist()) == sorted(float(b - a) for a, b in pairwise(starts))
    assert float(metrics.ece(probs, targets, binning="equal-mass")) == pytest.approx(sum(gaps) / num_rows, abs=1e-12)


def test_equal_mass_keeps_equal_confidences_together() -> None:
    confidence = torch.tensor([0.6, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.9], dtype=torch.float64)
    bins = metrics.reliability(two_class(confidence), torch.zeros(8).long(), num_bins=4, binning="equal-mass")
    assert bins.edges.tolist() == [0.6, 0.7, 0.7, 0.7, 0.9]
    assert bins.counts.tolist() == [1.0, 0.0, 0.0, 7.0]


@pytest.mark.parametrize(("binning", "strategy"), [("equal-width", "uniform"), ("equal-mass", "quantile")])
def test_diagram_equals_scikit_learn(binning: str, strategy: str) -> None:
    generator = torch.Generator().manual_seed(3)
    confidence = torch.rand(600, dtype=torch.float64, generator=generator) / 2 + 0.5
    targets = (torch.rand(600, generator=generator) > 0.7).long()
    bins = metrics.reliability(two_class(confidence), targets, num_bins=12, binning=binning)
    accuracy, mean = calibration_curve(targets == 0, confidence, n_bins=12, strategy=strategy)
    filled = bins.counts > 0
    np.testing.assert_allclose(bins.accuracy[filled], accuracy, atol=1e-12)
    np.testing.assert_allclose(bins.confidence[filled], mean, atol=1e-12)
    assert bool(bins.accuracy[~filled].isnan().all())


@pytest.mark.parametrize(("binning", "strategy"), [("equal-width", "uniform"), ("equal-mass", "quantile")])
def test_classwise_is_the_mean_of_one_against_rest_curves(binning: str, strategy: str) -> None:
    probs, targets = draw(1500, 6, 1.5, torch.float64)
    expected = []
    for c in range(6):
        index = np.minimum((probs[:, c].numpy() * 15).astype(int), 14)
        counts = np.bincount(index, minlength=15) if strategy == "uniform" else np.full(15, 100)
        accuracy, mean = calibration_curve(targets == c, probs[:, c], n_bins=15, strategy=strategy)
        expected.append((counts[counts > 0] / 1500 * np.abs(accuracy - mean)).sum())
    assert float(metrics.classwise_ece(probs, targets, binning=binning)) == pytest.approx(np.mean(expected), abs=1e-12)


def test_one_bin_is_the_gap_of_the_means() -> None:
    probs, targets = draw(500, 7, 1.0, torch.float64)
    gap = probs.amax(-1).mean() - metrics.accuracy(probs, targets)
    assert float(metrics.ece(probs, targets, num_bins=1)) == pytest.approx(abs(float(gap)), abs=1e-14)
    assert float(metrics.mce(probs, targets, num_bins=1)) == pytest.approx(abs(float(gap)), abs=1e-14)


@pytest.mark.parametrize("binning", ["equal-width", "equal-mass"])
def test_strided_probabilities_are_welcome(binning: str) -> None:
    probs, targets = draw(300, 5, 1.0, torch.float32)
    strided = probs.t().contiguous().t()
    for metric in (metrics.ece, metrics.mce, metrics.classwise_ece):
        assert torch.equal(metric(strided, targets, binning=binning), metric(probs, targets, binning=binning))
