"""Acquisition against brute force: every batch's joint mutual information, and closed forms for Gaussians."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from decision_cases import blobs, classifier, line, regressor
from dubito.decisions import joint_information, temper
from dubito.errors import InputError, UnsupportedError
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import Ensemble, Laplace, Training, select
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.core import limits
from dubito.curvature import FallbackWarning
from dubito.uses.decisions import batch_information
from dubito.uses.decisions.acquisition import predict_jointly
from dubito.uses.decisions.batch_information import greedy_batch


def random_probs(seed: int, samples: int = 5, inputs: int = 6, classes: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2.5 * torch.randn(samples, inputs, classes, generator=generator, dtype=torch.float64)).softmax(-1)


def brute_information(probs: Tensor, batch: tuple[int, ...]) -> float:
    """I[y; w] = H[y] − E_s H[y | w_s], with every sum written out."""
    samples, _, classes = probs.shape
    joint_entropy, conditional = 0.0, 0.0
    for labels in itertools.product(range(classes), repeat=len(batch)):
        each = [math.prod(float(probs[s, i, c]) for i, c in zip(batch, labels, strict=True)) for s in range(samples)]
        mean = sum(each) / samples
        joint_entropy -= mean * math.log(mean)
        conditional -= sum(p * math.log(p) for p in each) / samples
    return joint_entropy - conditional


@pytest.mark.parametrize("seed", range(3))
def test_the_joint_information_is_that_of_brute_force(seed: int) -> None:
    probs = random_probs(seed)
    for batch in ((0,), (2, 2), (0, 1), (1, 3, 5), (0, 1, 2, 3)):
        assert joint_information(probs[:, list(batch)]).item() == pytest.approx(
            brute_information(probs, batch), abs=1e-12
        )


@pytest.mark.parametrize("seed", range(5))
def test_batchbald_takes_the_greedy_steps_of_brute_force(seed: int) -> None:
    probs = random_probs(seed)
    prediction = ClassPrediction.from_logit_samples(probs.log())
    chosen: tuple[int, ...] = ()
    for _ in range(3):
        gains = {i: brute_information(probs, (*chosen, i)) for i in range(6) if i not in chosen}
        chosen = (*chosen, max(gains, key=lambda i: gains[i]))
    assert tuple(greedy_batch(prediction, 3, generator=torch.Generator()).tolist()) == chosen
    best = max(brute_information(probs, batch) for batch in itertools.combinations(range(6), 3))
    assert brute_information(probs, chosen) >= (1 - 1 / math.e) * best


def test_drawn_labellings_estimate_the_same_entropies() -> None:
    probs = random_probs(1, samples=8)
    joint, weights = batch_information.draw_labellings(probs[:, [0, 3]], 200_000, torch.Generator().manual_seed(0))
    found = batch_information.joint_entropies(probs, joint, weights)
    for i in range(6):
        exact = joint_information(probs[:, [0, 3, i]]) + batch_information.conditional_entropies(probs)[[0, 3, i]].sum()
        assert found[i].item() == pytest.approx(float(exact), abs=0.01)


def test_blocks_and_draws_choose_as_enumeration_does() -> None:
    prediction = ClassPrediction.from_logit_samples(random_probs(2, samples=10, inputs=20).log())
    whole = greedy_batch(prediction, 4, generator=torch.Generator())
    with limits.using(chunk=1):  # one candidate at a time
        assert torch.equal(greedy_batch(prediction, 4, generator=torch.Generator()), whole)
    # drawn from the second on
    few = greedy_batch(prediction, 4, max_labellings=3, generator=torch.Generator().manual_seed(0))
    assert len(few.unique()) == 4
    assert few[:2].tolist() == whole[:2].tolist()


def test_a_copy_of_a_question_is_not_asked_twice() -> None:
    """Each sample is sure of its label, so that a second answer to the same question says nothing new."""
    generator = torch.Generator().manual_seed(0)
    sure = (40 * torch.randn(5, 3, 3, generator=generator, dtype=torch.float64)).softmax(-1)
    probs = torch.cat([sure[:, :1].expand(5, 3, 3), sure[:, 1:]], dim=1)
    batch = greedy_batch(ClassPrediction.from_logit_samples(probs.log()), 3, generator=torch.Generator())
    assert {3, 4} <= set(batch.tolist())


def test_numbers_are_chosen_by_the_log_determinant() -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(6, 8, 1, generator=generator, dtype=torch.float64)
    noise = 0.1 + torch.rand(8, 1, generator=generator, dtype=torch.float64)
    prediction = RegressionPrediction(means, noise, torch.zeros((), dtype=torch.float64))
    kernel = torch.cov(means[..., 0].T, correction=0)

    def information(batch: list[int]) -> float:
        rows = torch.tensor(batch)
        return float(torch.logdet(torch.eye(len(batch)) + kernel[rows][:, rows] / noise[rows]) / 2)

    chosen: list[int] = []
    for _ in range(4):
        rest = [i for i in range(8) if i not in chosen]
        chosen.append(max(rest, key=lambda i: information([*chosen, i])))
    assert greedy_batch(prediction, 4, generator=torch.Generator()).tolist() == chosen


@pytest.mark.parametrize("strategy", ["bald", "entropy", "variance"])
@pytest.mark.parametrize("method", ["laplace", "variational"])
def test_single_scores_take_the_largest(strategy: Any, method: str) -> None:
    posterior, (x, y) = classifier(method), blobs(80, 3)
    prediction = posterior.predict(x)
    assert isinstance(prediction, ClassPrediction)
    assert prediction.samples is not None
    values = {
        "bald": prediction.epistemic,
        "entropy": prediction.entropy,
        "variance": prediction.samples.exp().var(0, correction=0).sum(-1),
    }[strategy]
    expected = values.sort(descending=True).indices[:5].tolist()
    for pool in (x, (x, y), DataLoader(TensorDataset(x, y), 80)):
        assert dubito.acquire(posterior, pool, 5, strategy).tolist() == expected
    assert dubito.acquire(posterior, pool=x, num=5, method=strategy).tolist() == expected


def test_regression_and_the_baseline() -> None:
    x, _ = line(50, 3)
    prediction = regressor("laplace").predict(x)
    assert isinstance(prediction, RegressionPrediction)
    top = prediction.epistemic[:, 0].argmax()
    for strategy in ("bald", "variance"):
        assert dubito.acquire(regressor("laplace"), x, 1, strategy).item() == top  # type: ignore[arg-type]
    drawn = dubito.acquire(regressor("map"), x, 50, "random", generator=torch.Generator().manual_seed(1))
    assert sorted(drawn.tolist()) == list(range(50))
    assert drawn.tolist() != list(range(50))


def test_equal_scores_do_not_follow_the_order_of_the_pool() -> None:
    x = blobs(60, 3)[0][:1].expand(60, 2)
    for method in ("bald", "entropy"):
        assert dubito.acquire(classifier("variational"), x, 5, method).tolist() != list(range(5))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["bald", "variance"])
def test_a_single_network_has_no_epistemic_uncertainty(method: Any) -> None:
    for posterior, pool in ((classifier("map"), blobs(60, 3)[0]), (regressor("map"), line(30, 3)[0])):
        with pytest.raises(InputError, match=f"The score '{method}' is 0 for every input of the pool"):
            dubito.acquire(posterior, pool, 5, method)
        assert len(dubito.acquire(posterior, pool, 5, "entropy")) == 5


@pytest.mark.slow
def test_a_linearized_posterior_draws_functions() -> None:
    """Over many draws their covariance between inputs is that of the linearized outputs."""
    posterior: Any = classifier("laplace")
    x = blobs(4, 3)[0]
    prediction = predict_jointly(posterior, x, 2500, torch.Generator().manual_seed(0))
    numbers: Any = regressor("laplace")
    inputs = line(4, 3)[0]
    drawn = predict_jointly(numbers, inputs, 2500, torch.Generator().manual_seed(0))
    assert isinstance(drawn, RegressionPrediction)
    mean, covariance = numbers.functional(inputs, joint=True)
    torch.testing.assert_close(drawn.means.mean(0), mean, rtol=0.05, atol=0.03)
    torch.testing.assert_close(torch.cov(drawn.means[..., 0].T), covariance, rtol=0.2, atol=1e-3)
    assert isinstance(prediction, ClassPrediction)
    assert prediction.samples is not None
    assert prediction.samples.shape == (2500, 4, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.FallbackWarning")
def test_a_linearized_posterior_of_a_subspace_draws_functions_too() -> None:
    inputs, (x, y) = line(4, 3)[0], line(80, 0)
    recipe = Laplace(structure="full", weights=select.subspace(3, directions="random"), prior_precision=1.0)
    posterior: Any = recipe.fit(regressor("map").model, (x, y), likelihood="gaussian")
    drawn = predict_jointly(posterior, inputs, 4000, torch.Generator().manual_seed(0))
    assert isinstance(drawn, RegressionPrediction)
    _, covariance = posterior.inner.functional(inputs, joint=True)
    size = covariance.diagonal().max().item()
    torch.testing.assert_close(torch.cov(drawn.means[..., 0].T), covariance, rtol=0, atol=0.1 * size)


def test_an_ensemble_of_laplaces_says_what_to_use() -> None:
    members = Ensemble(members=2, recipe=Laplace(prior_precision=1.0))
    posterior = members.fit(classifier("map").model, blobs(120, 0), training=Training(epochs=1))
    with pytest.raises(UnsupportedError, match="ensemble of Laplaces: use 'bald'"):
        dubito.acquire(posterior, blobs(20, 3)[0], 2, "batchbald")


@pytest.mark.parametrize("method", ["laplace", "variational", "tempered"])
def test_batchbald_runs_on_posteriors_and_spreads_its_questions(method: str) -> None:
    posterior = temper(classifier("laplace"), blobs(80, 5)) if method == "tempered" else classifier(method)
    x, _ = blobs(60, 3)
    pool = torch.cat([x[:1].expand(20, 2), x])  # one input is there many times
    batch = dubito.acquire(posterior, pool, 4, "batchbald", num_samples=20)
    assert len(batch.unique()) == 4
    assert int((batch < 21).sum()) <= 1
    assert len(dubito.acquire(regressor("variational"), line(30, 1)[0], 3, "batchbald").unique()) == 3


def test_acquisition_faults() -> None:
    posterior, (x, _) = classifier("laplace"), blobs(10, 3)
    with pytest.raises(InputError, match="The pool is empty"):
        dubito.acquire(posterior, x[:0], 1)
    for nothing in ([], (x[:0], x[:0]), TensorDataset(x[:0]), DataLoader(TensorDataset(x[:0])), x[:0].numpy()):
        with pytest.raises(InputError, match="The pool is empty"):
            dubito.acquire(posterior, nothing, 1)
    for wrong in (2.5, True, "3", None):
        with pytest.raises(InputError, match="`num` must be a whole number"):
            dubito.acquire(posterior, x, wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="single number"):
        dubito.acquire(posterior, torch.tensor(1.0), 1)
    with pytest.raises(
        InputError, match=r"`posterior` must be a posterior such as Laplace\(\).fit\(model, data\), got Sequential"
    ):
        dubito.acquire(posterior.model, x, 1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="`num` must be a whole number from 1 to 10"):
        dubito.acquire(posterior, x, 11)
    with pytest.raises(InputError, match="`num` must be a whole number from 1 to 10"):
        dubito.acquire(posterior, x, 0)
    with pytest.raises(InputError, match=r"`method` must be .*, got 'best'"):
        dubito.acquire(posterior, x, 1, "best")  # type: ignore[arg-type]
    for strategy in ("bald", "batchbald"):
        with pytest.raises(InputError, match="NaN or infinite"):
            dubito.acquire(posterior, torch.full((10, 2), math.nan), 1, strategy)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="needs several samples of one label per input: use 'entropy'"):
        dubito.acquire(classifier("map"), x, 2, "batchbald")
    with pytest.raises(UnsupportedError, match="several samples of one output"):
        dubito.acquire(regressor("map"), line(5, 1)[0], 2, "batchbald")
