"""Detectors by the features of the training data: closed forms, saving, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decision_cases import blobs, classifier, line, regressor
from dubito.decisions import Detector
from dubito.errors import InputError, UnsupportedError
from scipy import stats
from torch import nn

import dubito
from dubito import MAP, likelihoods
from dubito.uses.decisions.features import RIDGE, FeatureDensity

SCORES = ("feature-density", "mahalanobis", "nearest-neighbours")


def _linear(data: Any) -> dubito.Posterior:
    """A linear network, whose features are its inputs."""
    return MAP(train=False).fit(nn.Linear(2, 3).double(), data, progress=False)


def test_gaussian_densities_equal_scipy() -> None:
    x, y = blobs(200, 0)
    x = x.double() * torch.tensor([1.0, 3.0])
    new = torch.tensor([[0.3, -2.0], [5.0, 1.0]], dtype=torch.float64)
    posterior = _linear((x, y))
    rows = [x[y == label].numpy() for label in range(3)]
    scatters = [np.cov(each.T, bias=True) for each in rows]
    pooled = sum(len(each) * scatter for each, scatter in zip(rows, scatters, strict=True)) / 200
    ridge = RIDGE * np.diag(pooled).mean() * np.eye(2)
    density = sum(
        len(each) / 200 * stats.multivariate_normal.pdf(new, each.mean(0), scatter + ridge)
        for each, scatter in zip(rows, scatters, strict=True)
    )
    found = FeatureDensity(posterior, (x, y), "feature-density").scores(posterior, new)
    assert np.allclose(found, -np.log(density), rtol=1e-10)
    inverse = np.linalg.inv(pooled + ridge)
    gaps = [new.numpy() - each.mean(0) for each in rows]
    expected = np.min([np.einsum("bi,ij,bj->b", gap, inverse, gap) for gap in gaps], axis=0)
    assert np.allclose(FeatureDensity(posterior, (x, y), "mahalanobis").scores(posterior, new), expected, rtol=1e-10)
    unit = x / x.norm(dim=1, keepdim=True)
    distances = torch.cdist(new / new.norm(dim=1, keepdim=True), unit).sort(dim=1).values[:, 9]
    found = FeatureDensity(posterior, (x, y), "nearest-neighbours").scores(posterior, new)
    assert torch.allclose(found, distances)


@pytest.mark.parametrize("score", SCORES)
def test_detectors_of_features(score: Any, tmp_path: Path) -> None:
    posterior, training = classifier(), blobs(120, 0)
    detector = Detector(posterior, blobs(300, 3), score=score, training=training, false_positive_rate=0.1)
    assert detector.detect(blobs(400, 5)[0]).float().mean() < 0.2
    if score != "nearest-neighbours":  # a saturated tanh network turns far inputs into features of the same direction
        assert detector.detect(blobs(50, 6, shift=20.0)[0]).float().mean() > 0.8
    detector.save(tmp_path / "detector.safetensors")
    loaded = dubito.load(tmp_path / "detector.safetensors", posterior.model)
    assert torch.equal(loaded.scores(training[0]), detector.scores(training[0]))
    assert loaded.threshold == detector.threshold
    one = Detector(regressor(), line(60, 1), score=score, training=line(80, 0))
    assert one.scores(line(5, 2)[0]).shape == (5,)


def test_features_of_sequences_and_images_are_averaged() -> None:
    images, labels = torch.randn(40, 1, 6, 6), torch.randint(2, (40,))
    for last in (nn.Conv2d(3, 2, 4), nn.ConvTranspose2d(3, 2, 1, stride=4, padding=6)):
        network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), last, nn.Flatten())
        posterior = MAP(train=False).fit(network, (images, labels), progress=False)
        density = FeatureDensity(posterior, (images, labels), "mahalanobis")
        expected = network[:2](images).mean((2, 3)).double()
        assert torch.allclose(density.features(posterior, images), expected, atol=1e-6)
    items = torch.randn(30, 2, 4)
    pairs = MAP(train=False).fit(
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), (items, torch.randint(2, (30,))),
        likelihood=likelihoods.BradleyTerry(), progress=False,
    )  # fmt: skip
    found = FeatureDensity(pairs, (items, torch.randint(2, (30,))), "nearest-neighbours").features(pairs, items)
    assert torch.allclose(found, pairs.model[:2](items).mean(1).double(), atol=1e-6)


def test_what_has_no_features_says_so() -> None:
    x, y = blobs(60, 0)
    with pytest.raises(InputError, match="needs the training data"):
        Detector(classifier(), (x, y), score="mahalanobis")
    with pytest.raises(InputError, match="has no targets"):
        Detector(classifier(), (x, y), score="mahalanobis", training=x)  # type: ignore[arg-type]

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    plain = MAP(train=False).fit(Scale(), (x, y % 2), progress=False)
    with pytest.raises(UnsupportedError, match="no features"):
        Detector(plain, x, score="feature-density", training=(x, y % 2))
    detector = Detector(classifier(), (x, y), score="mahalanobis", training=(x, y))
    with pytest.raises(UnsupportedError, match="not of predictions"):
        detector.margin(classifier().predict(x))
