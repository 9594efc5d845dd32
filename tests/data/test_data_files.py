"""The real data sets, where this machine has them; a set that is missing skips with the sentence that says what is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dubito import data


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    """Unpacked copies go to a folder of this run, not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def need(name: str) -> None:
    row = next(row for row in data.available() if row.name == name)
    if not row.found:
        pytest.skip(row.where)


@pytest.mark.parametrize("name", [name for name in data.names() if name != "cifar10"])
def test_integrity(name: str):
    need(name)
    assert data.check(name).problems == ()


@pytest.mark.parametrize("name", [name for name in data.names() if name != "cifar10"])
def test_every_set_loads_finite_and_standardised(name: str):
    need(name)
    dataset = data.load(name, limit=2000, limit_test=2000)
    for inputs, targets in dataset.parts.values():
        assert inputs.shape[1:] == dataset.input_shape
        if dataset.task == "classification":
            assert targets.dtype == torch.int64
            assert 0 <= targets.min() <= targets.max() < dataset.num_outputs == len(dataset.class_names)
        else:
            assert targets.shape == (len(inputs), 1)
            assert targets.isfinite().all()
        assert inputs.dtype == (torch.int64 if isinstance(dataset.encoder, data.Vocabulary) else torch.float32)
        assert inputs.isfinite().all()
    if "train" in dataset.parts and not isinstance(dataset.encoder, data.Vocabulary):
        assert dataset.train[0].mean().abs() < 1e-4
    if dataset.task == "regression":
        assert dataset.train[1].mean().abs() < 1e-4
        assert abs(dataset.train[1].std(correction=0) - 1) < 1e-4


def nearest_centroid_accuracy(dataset: data.DataSet) -> float:
    """A classifier without settings: it fails at once if images and labels are not in the same order."""
    inputs, targets = dataset.train
    centroids = torch.stack([inputs[targets == c].mean(0).flatten() for c in range(dataset.num_outputs)])

    def classify(images: Tensor) -> Tensor:
        return torch.cdist(images.flatten(1), centroids).argmin(1)

    return (classify(dataset.test[0]) == dataset.test[1]).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accuracy"), [("mnist", 0.820), ("fashion-mnist", 0.677)])
def test_images_belong_to_their_labels(name: str, accuracy: float):
    need(name)
    # The published accuracies of the nearest-centroid classifier on these sets.
    assert nearest_centroid_accuracy(data.load(name, validation=0)) == pytest.approx(accuracy, abs=0.002)


@pytest.mark.slow
def test_cifar10():
    need("cifar10")
    assert data.check("cifar10").problems == ()
    cifar = data.load("cifar10", validation=0)
    assert (len(cifar.train[1]), len(cifar.test[1])) == (20_000, 10_000)
    # The published statistics are those of all 50 000 images; 20 000 of them must come close.
    torch.testing.assert_close(cifar.encoder.loc.flatten(), torch.tensor([0.4914, 0.4822, 0.4465]), atol=0.004, rtol=0)
    torch.testing.assert_close(
        cifar.encoder.scale.flatten(), torch.tensor([0.2470, 0.2435, 0.2616]), atol=0.002, rtol=0
    )
    assert cifar.test[1].bincount().tolist() == [1000] * 10
    assert nearest_centroid_accuracy(cifar) > 0.25


def test_naval_constant_features_become_zero():
    need("uci/naval")
    inputs, _ = data.load("uci/naval").train
    constant = (inputs == 0).all(0)
    assert int(constant.sum()) == 2
    assert inputs[:, ~constant].std(0).sub(1).abs().max() < 1e-3


@pytest.mark.parametrize(("name", "train", "test"), [("uci/boston", 338, 168), ("uci/protein", 30486, 15244)])
def test_gap_splits(name: str, train: int, test: int):
    need(name)
    for feature in (0, 5):
        dataset = data.load(name, split=feature, gap=True, validation=0)
        assert (len(dataset.train[1]), len(dataset.test[1])) == (train, test)
        low, high = dataset.test[0][:, feature].min(), dataset.test[0][:, feature].max()
        assert not ((dataset.train[0][:, feature] > low) & (dataset.train[0][:, feature] < high)).any()


@pytest.mark.parametrize("name", [name for name in data.names() if name.startswith("uci/")])
def test_ridge_regression_beats_the_mean(name: str):
    """Inputs and targets belong together."""
    need(name)
    dataset = data.load(name, validation=0)
    (x, y), (x_test, y_test) = dataset.train, dataset.test
    weights = torch.linalg.solve(x.T @ x + 1e-3 * torch.eye(x.shape[1]), x.T @ y)
    assert (x_test @ weights - y_test).square().mean() < 0.8 * y_test.square().mean()


@pytest.mark.slow
def test_movie_reviews():
    need("mr")
    reviews = data.load("mr")
    assert reviews.class_names == ("negative", "positive")
    inputs, targets = reviews.train
    assert (reviews.test[0] == 1).double().mean() < 0.1  # unknown words are rare
    words = reviews.encoder.words
    rate = [(inputs == words.index(word)).any(1)[targets == 1].double().mean() for word in ("dull", "moving")]
    other = [(inputs == words.index(word)).any(1)[targets == 0].double().mean() for word in ("dull", "moving")]
    assert rate[0] < other[0]
    assert rate[1] > other[1]
