"""AUROC, AUPR and FPR95 against scikit-learn, torchmetrics and all pairs, with ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from dubito import metrics


def draw(num: int, fraction: float, decimals: int | None, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.rand(num, generator=generator) < fraction
    labels[:2] = torch.tensor([True, False])
    scores = torch.sigmoid(torch.randn(num, generator=generator, dtype=torch.float64) + labels)
    return (scores if decimals is None else scores.round(decimals=decimals)), labels


def scikit_learn_fpr95(scores: Tensor, labels: Tensor) -> float:
    false_rate, true_rate, _ = roc_curve(labels.numpy(), scores.numpy(), drop_intermediate=False)
    return float(false_rate[np.argmax(true_rate >= 0.95)])


@pytest.mark.parametrize("decimals", [None, 2, 1, 0])
@pytest.mark.parametrize(("num", "fraction"), [(2, 0.5), (37, 0.1), (1000, 0.5), (1000, 0.02)])
@pytest.mark.parametrize("seed", [0, 1])
def test_equal_scikit_learn_and_torchmetrics(decimals: int | None, num: int, fraction: float, seed: int) -> None:
    scores, labels = draw(num, fraction, decimals, seed)
    auroc, aupr = float(metrics.auroc(scores, labels)), float(metrics.aupr(scores, labels))
    assert auroc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert aupr == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    assert auroc == pytest.approx(float(binary_auroc(scores, labels.long())), abs=1e-6)
    assert aupr == pytest.approx(float(binary_average_precision(scores, labels.long())), abs=1e-6)
    assert float(metrics.fpr95(scores, labels)) == pytest.approx(scikit_learn_fpr95(scores, labels), abs=1e-15)


def test_auroc_is_the_fraction_of_ordered_pairs() -> None:
    scores, labels = draw(300, 0.3, 1, seed=5)
    difference = scores[labels][:, None] - scores[~labels][None, :]
    expected = ((difference > 0).double() + 0.5 * (difference == 0).double()).mean()
    assert float(metrics.auroc(scores, labels)) == pytest.approx(float(expected), abs=1e-14)
    assert float(metrics.auroc(-scores, labels)) == pytest.approx(1 - float(expected), abs=1e-14)


@pytest.mark.parametrize("num_positive", [1, 19, 20, 40, 100, 101])
def test_fpr95_at_exactly_95_percent(num_positive: int) -> None:
    # Positives n, ..., 1 with a negative just below each: finding k positives above a threshold costs k - 1 negatives.
    positive = torch.arange(num_positive, 0, -1, dtype=torch.float64)
    scores, labels = torch.cat([positive, positive - 0.5]), torch.tensor([1] * num_positive + [0] * num_positive)
    needed = math.ceil(num_positive * 95 / 100)
    assert float(metrics.fpr95(scores, labels)) == pytest.approx((needed - 1) / num_positive, abs=1e-15)


def test_constant_scores_and_infinite_scores() -> None:
    labels = torch.tensor([0, 1, 0, 1, 1])
    constant = torch.ones(5)
    assert float(metrics.auroc(constant, labels)) == 0.5
    assert float(metrics.aupr(constant, labels)) == pytest.approx(0.6, abs=1e-15)
    assert float(metrics.fpr95(constant, labels)) == 1
    separated = torch.tensor([-math.inf, 1.0, -3.0, math.inf, math.inf])
    assert [float(metric(separated, labels)) for metric in (metrics.auroc, metrics.aupr, metrics.fpr95)] == [1, 1, 0]


def test_order_of_rows_and_kind_of_labels_are_irrelevant() -> None:
    scores, labels = draw(200, 0.4, 1, seed=2)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    for metric in (metrics.auroc, metrics.aupr, metrics.fpr95):
        value = metric(scores, labels)
        assert torch.equal(metric(scores[order], labels[order]), value)
        assert torch.equal(metric(scores.reshape(10, 20), labels.double().reshape(10, 20)), value)
