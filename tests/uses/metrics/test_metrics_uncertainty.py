"""The entropy decomposition against scipy, its identity, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from scipy.stats import entropy

from dubito import metrics
from dubito.beliefs.prediction.uncertainty import split_entropy, split_rows
from dubito.core.tracing import recording


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 3, 2), (20, 50, 10), (5, 4, 3, 6), (7, 4)])
def test_equals_scipy(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    log_probs = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype).mul(3).log_softmax(-1)
    before = log_probs.clone()
    parts = metrics.entropy_decomposition(log_probs)
    assert torch.equal(log_probs, before)
    probs = log_probs.double().exp().numpy()
    mean = probs.mean(0)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(parts.total, entropy(mean, axis=-1), atol=tolerance)
    np.testing.assert_allclose(parts.aleatoric, entropy(probs, axis=-1).mean(0), atol=tolerance)
    np.testing.assert_allclose(parts.epistemic, rel_entr(probs, mean).sum(-1).mean(0), atol=tolerance)
    assert parts.total.shape == shape[1:-1]


def test_sum_is_exact_and_epistemic_is_never_negative() -> None:
    # Samples that agree up to the last bits: the difference of entropies is rounding of either sign.
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(1, 5000, 10, generator=generator, dtype=torch.float64)
    log_probs = (shared + 1e-15 * torch.randn(30, 5000, 10, generator=generator, dtype=torch.float64)).log_softmax(-1)
    parts = metrics.entropy_decomposition(log_probs)
    assert torch.equal(parts.total, parts.aleatoric + parts.epistemic)
    assert float(parts.epistemic.min()) == 0
    assert float(parts.epistemic.max()) < 1e-13


def test_impossible_classes_and_rounding_above_one() -> None:
    certain = torch.tensor([[[0.0, -math.inf, -math.inf]]])
    assert [float(part) for part in metrics.entropy_decomposition(certain)] == [0, 0, 0]
    above = torch.tensor([[[1e-7, -math.inf]]])
    assert [float(part) for part in metrics.entropy_decomposition(above)] == [0, 0, 0]
    disagree = torch.full((4, 1, 4), -math.inf).diagonal_scatter(torch.zeros(1, 4), dim1=0, dim2=2)
    parts = metrics.entropy_decomposition(disagree)
    assert float(parts.aleatoric) == 0
    assert float(parts.epistemic) == pytest.approx(math.log(4), abs=1e-14)


def test_samples_that_agree_leave_no_doubt_in_single_precision_either() -> None:
    one = (6 * torch.randn(1, 1000, 10, generator=torch.Generator().manual_seed(0))).log_softmax(-1)
    assert metrics.entropy_decomposition(one.expand(32, -1, -1)).epistemic.max() < 1e-12


@pytest.mark.parametrize("scale", [1.0, 500.0])
def test_graphs_split_the_entropy_as_usual(scale: float) -> None:
    """Both ways of a graph, samples on an axis and in a row; with logits whose probabilities are 0 in float32."""
    logits = scale * torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
    expected = metrics.entropy_decomposition(logits.double().log_softmax(-1))
    with recording():
        found = split_entropy(logits.log_softmax(-1)), split_rows(logits.transpose(0, 1).flatten(1), 5)
    for parts in found:
        for part, wanted in zip(parts, expected, strict=True):
            torch.testing.assert_close(part.double(), wanted, rtol=1e-5, atol=1e-6)
