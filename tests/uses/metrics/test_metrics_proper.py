"""Accuracy, NLL and Brier score against scikit-learn and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from dubito import metrics


def draw(num_rows: int, num_classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(num_rows, num_classes, generator=generator, dtype=dtype).mul(2).log_softmax(-1)
    return log_probs, torch.randint(num_classes, (num_rows,), generator=generator)


@pytest.mark.parametrize("num_classes", [2, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scikit_learn(num_classes: int, dtype: torch.dtype) -> None:
    log_probs, targets = draw(500, num_classes, dtype)
    probs = log_probs.exp()
    wide, labels = log_probs.double().softmax(-1).numpy(), list(range(num_classes))
    assert float(metrics.accuracy(probs, targets)) == accuracy_score(targets, probs.argmax(-1))
    assert float(metrics.nll(log_probs, targets)) == pytest.approx(log_loss(targets, wide, labels=labels), abs=1e-6)
    expected = brier_score_loss(targets, wide, labels=labels, scale_by_half=False)
    assert float(metrics.brier(probs, targets)) == pytest.approx(expected, abs=1e-6)


def test_equal_probabilities_count_for_the_first_class() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.25, 0.75]])
    assert float(metrics.accuracy(probs, torch.tensor([0, 1, 1]))) == pytest.approx(2 / 3, abs=1e-15)


def test_positions_are_flattened_and_ignored_ones_left_out() -> None:
    log_probs, targets = draw(24, 5, torch.float64)
    sequence, labels = log_probs.reshape(4, 6, 5).clone(), targets.reshape(4, 6).clone()
    labels[:, 4:] = -100
    sequence[:, 4:] = math.nan  # what stands at an ignored position is irrelevant
    kept_log_probs, kept_labels = sequence[:, :4].reshape(-1, 5), labels[:, :4].reshape(-1)
    for metric in (metrics.accuracy, metrics.brier, metrics.ece, metrics.mce, metrics.classwise_ece):
        got = metric(sequence.exp(), labels, ignore_index=-100)
        assert torch.equal(got, metric(kept_log_probs.exp(), kept_labels))
    assert torch.equal(metrics.nll(sequence, labels, ignore_index=-100), metrics.nll(kept_log_probs, kept_labels))


def test_nll_of_an_impossible_target_is_infinite() -> None:
    log_probs = torch.tensor([[0.0, -math.inf]])
    assert float(metrics.nll(log_probs, torch.tensor([1]))) == math.inf
    assert float(metrics.nll(log_probs, torch.tensor([0]))) == 0


def test_brier_keeps_the_digits_of_confident_float32_rows() -> None:
    doubt = 2.0**-20
    probs = torch.tensor([[1 - doubt, doubt]])
    assert float(metrics.brier(probs, torch.tensor([0]))) == pytest.approx(2 * doubt**2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype: torch.dtype) -> None:
    log_probs, targets = draw(200, 4, torch.float32)
    half = log_probs.exp().to(dtype)
    assert torch.equal(metrics.brier(half, targets), metrics.brier(half.float(), targets))
    assert torch.equal(metrics.ece(half, targets), metrics.ece(half.float(), targets))
    assert torch.equal(metrics.nll(log_probs.to(dtype), targets), metrics.nll(log_probs.to(dtype).float(), targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_carry_no_gradient_and_change_nothing(dtype: torch.dtype) -> None:
    log_probs, targets = draw(50, 3, dtype)
    log_probs.requires_grad_()
    probs = log_probs.exp()
    before = probs.detach().clone(), log_probs.detach().clone(), targets.clone()
    for score in (
        metrics.accuracy(probs, targets),
        metrics.brier(probs, targets),
        metrics.ece(probs, targets),
        metrics.ece(probs, targets, binning="equal-mass"),
        metrics.classwise_ece(probs, targets),
        metrics.nll(log_probs, targets),
    ):
        assert score.dtype == torch.float64
        assert score.ndim == 0
        assert not score.requires_grad
    for value, old in zip((probs, log_probs, targets), before, strict=True):
        assert torch.equal(value, old)
