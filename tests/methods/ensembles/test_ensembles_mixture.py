"""The mixture of predictions against brute force over all samples."""

from __future__ import annotations

import math

import pytest
import torch
from dubito.errors import UnsupportedError
from dubito.likelihoods import Categorical, Gaussian

from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.methods.ensembles.posterior import mixture

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def logits(*shape: int) -> torch.Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4, 7, 5, 3), (3, 1, 5, 2, 4)], ids=str)
def test_members_with_samples_are_one_pool_of_samples(shape: tuple[int, ...]) -> None:
    """The split of the uncertainty is that of all samples together, exactly."""
    drawn = logits(*shape)
    found = mixture([ClassPrediction.from_logit_samples(member) for member in drawn])
    expected = ClassPrediction.from_logit_samples(drawn.flatten(0, 1))
    assert isinstance(found, ClassPrediction)
    for name in ("log_probs", "aleatoric", "epistemic", "entropy", "samples"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **EXACT)


def test_networks_without_samples_are_one_sample_each() -> None:
    drawn = logits(4, 5, 3)
    found = mixture([Categorical().predict(member) for member in drawn])
    expected = ClassPrediction.from_logit_samples(drawn)
    for name in ("log_probs", "aleatoric", "epistemic", "samples"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **EXACT)


def test_members_that_agree_add_no_doubt() -> None:
    part = ClassPrediction.from_logit_samples(logits(7, 5, 3))
    found = mixture([part, part, part])
    torch.testing.assert_close(found.log_probs, part.log_probs, **EXACT)
    torch.testing.assert_close(found.epistemic, part.epistemic, **EXACT)


def test_certain_members_that_contradict_each_other() -> None:
    certain = torch.tensor([[[400.0, 0.0]], [[0.0, 400.0]]], dtype=torch.float64)
    found = mixture([Categorical().predict(member) for member in certain])
    assert found.epistemic.item() == pytest.approx(math.log(2), abs=1e-12)
    assert found.aleatoric.item() == pytest.approx(0.0, abs=1e-100)


def test_numbers_are_a_mixture_of_densities() -> None:
    means, noises, y = logits(3, 5, 2), (0.3, 0.7, 1.1), logits(5, 2)
    parts = [Gaussian(noise=noise).predict(mean) for mean, noise in zip(means, noises, strict=True)]
    found = mixture(parts)
    assert isinstance(found, RegressionPrediction)
    density = torch.stack([part.log_prob(y).exp() for part in parts]).mean(0)
    torch.testing.assert_close(found.log_prob(y).exp(), density, **EXACT)
    torch.testing.assert_close(found.aleatoric, torch.full_like(y, sum(n * n for n in noises) / 3), **EXACT)
    torch.testing.assert_close(found.epistemic, means.var(0, correction=0), **EXACT)


def test_one_is_itself() -> None:
    part = Categorical().predict(logits(5, 3))
    assert mixture([part]) is part


def test_kinds_that_do_not_mix() -> None:
    parts = [Categorical().predict(logits(5, 3)), Gaussian(noise=1.0).predict(logits(5, 3))]
    with pytest.raises(UnsupportedError, match="cannot be mixed"):
        mixture(parts)
