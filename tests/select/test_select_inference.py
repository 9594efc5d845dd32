"""Laplace over a subnetwork: exact identities, and brute force in float64 for the same indices."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from dubito.errors import InputError
from hypothesis import given, settings
from hypothesis import strategies as st
from subnetwork_cases import case, centred
from torch import Tensor

from dubito import Laplace, select
from dubito.core import limits
from dubito.curvature import FallbackWarning
from dubito.methods.laplace import LaplacePosterior
from dubito.networks.selection import Selection
from dubito.select.rule import SelectionRule
from oracles import Case, curvature, jacobian
from two_processes import started

pytestmark = pytest.mark.slow

PRIOR = 0.7
STRUCTURES = ("full", "diag", "kron", "low-rank")


def fit(one: Case, rule: SelectionRule, structure: str = "full", **options) -> LaplacePosterior:
    recipe = Laplace(structure=structure, weights=rule, prior_precision=PRIOR, rank=31, **options)
    return recipe.fit(one.model, one.data, likelihood=one.likelihood)


def predicted(posterior: LaplacePosterior, inputs: Tensor) -> tuple[Tensor, Tensor]:
    prediction = posterior.predict(inputs)
    return (prediction.probs,) * 2 if hasattr(prediction, "probs") else (prediction.mean, prediction.stddev)


def same(one: Case, mine: LaplacePosterior, other: LaplacePosterior) -> None:
    inputs = 2 * one.inputs[:6]
    for ours, theirs in zip(predicted(mine, inputs), predicted(other, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    for ours, theirs in zip(mine.functional(inputs), other.functional(inputs), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    for ours, theirs in zip(mine.marginals(), other.marginals(), strict=True):
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(mine.log_evidence(), other.log_evidence(), atol=1e-9, rtol=1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["categorical", "gaussian", "bernoulli", "image", "tied"])
def test_all_weights_are_the_full_network(name: str, structure: str) -> None:
    one = case(name)
    everything = one.weights().num_weights
    rules = ("output-variance", "greedy") if structure == "full" else ("output-variance",)
    for rule in rules:
        mine = fit(one, select.subnetwork(everything, rule=rule), structure)
        assert mine.selection == one.weights()
        same(one, mine, fit(one, select.all(), structure))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_last_layer_as_a_subnetwork(structure: str) -> None:
    one = case("categorical")
    last = select.subnetwork(15, candidates=select.last_layer())
    same(one, fit(one, last, structure), fit(one, select.last_layer(), structure))


@pytest.mark.parametrize("name", ["categorical", "gaussian", "sequence", "image", "tied", "recurrent"])
def test_precision_evidence_and_predictions_by_brute_force(name: str) -> None:
    """Equations (14), (17) and (18) of the method, with plain matrices over the chosen weights."""
    one = case(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        posterior = fit(one, select.subnetwork(11))
        x = 2 * one.inputs[:6]
        chosen = _flat(one, posterior.selection)
        precision = curvature(one)[chosen][:, chosen] + PRIOR * torch.eye(11).double()
        covariance = torch.linalg.inv(precision)
        gradients = jacobian(one, x)[..., chosen]
        functional = posterior.functional(x)[1]
    expected = gradients.flatten(1, -2) @ covariance @ gradients.flatten(1, -2).mT
    torch.testing.assert_close(functional, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(posterior.precision_matmul(torch.eye(11).double()), precision, atol=1e-10, rtol=1e-10)
    weights = one.weights().ravel(posterior.mean())[chosen]
    evidence = one.likelihood.log_prob(one.model(one.inputs).detach(), one.targets).sum() - 0.5 * (
        torch.logdet(precision) - 11 * math.log(PRIOR) + PRIOR * weights.square().sum()
    )
    torch.testing.assert_close(posterior.log_evidence(), evidence, atol=1e-9, rtol=1e-10)
    outputs = one.model(x).detach()
    if name == "gaussian":
        prediction = posterior.predict(x)
        spread = (expected.diagonal(dim1=1, dim2=2) + one.likelihood.noise**2).sqrt()
        torch.testing.assert_close(prediction.mean, outputs, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(prediction.stddev, spread, atol=1e-10, rtol=1e-10)
    else:
        classes = outputs.shape[-1]  # a logit minus the mean of the others
        middle = classes / (classes - 1) * (gradients - gradients.mean(-2, keepdim=True))
        variance = torch.einsum("...cd,de,...ce->...c", middle, covariance, middle)
        probit = (outputs / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
        torch.testing.assert_close(posterior.predict(x).probs, probit, atol=1e-10, rtol=1e-10)
        if name != "sequence":
            plain = (outputs / (1 + math.pi / 8 * expected.diagonal(dim1=1, dim2=2)).sqrt()).softmax(-1)
            found = posterior.predict(x, centred=False).probs
            torch.testing.assert_close(found, plain, atol=1e-10, rtol=1e-10)


def test_the_prior_scaling_of_the_paper() -> None:
    one = case("categorical")
    scaled = fit(one, select.subnetwork(11), prior_scaling="S/D")
    torch.testing.assert_close(scaled.prior_precision, torch.tensor(PRIOR * 11 / 31).double())
    recipe = Laplace(structure="full", weights=select.mask(scaled.selection.masks()), prior_precision=PRIOR * 11 / 31)
    same(one, scaled, recipe.fit(one.model, one.data))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=31, unique=True), st.floats(0.01, 100.0), st.data())
def test_a_larger_subnetwork_captures_more_in_every_direction(order: list[int], prior: float, data) -> None:
    one = case("categorical")
    cut = data.draw(st.integers(1, len(order)))
    recipe = Laplace(structure="full", prior_precision=prior)
    covariances = [
        recipe.replace(weights=rule).fit(one.model, one.data).functional(2 * one.inputs)[1]
        for rule in (_mask(one, order[:cut]), _mask(one, order), select.all())
    ]
    for smaller, larger in pairwise(covariances):
        assert float(torch.linalg.eigvalsh(larger - smaller).min()) > -1e-12 * float(larger.abs().max())


@pytest.mark.parametrize("rule", ["output-variance", "sampled", "greedy", "weight-variance", "magnitude", "random"])
def test_captured_variance_grows_with_size(rule: str) -> None:
    one = case("categorical")
    rows, matrix = centred(one, jacobian(one)), curvature(one)
    order = select.subnetwork(31, rule=rule).rank(one.model, one.data, one.likelihood, PRIOR).order
    values = []
    for size in range(1, 32):
        chosen = order[:size]
        covariance = torch.linalg.inv(matrix[chosen][:, chosen] + PRIOR * torch.eye(size).double())
        values.append(float((rows[:, chosen] @ covariance * rows[:, chosen]).sum()))
    assert all(after >= before - 1e-12 for before, after in pairwise(values))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_tuning_and_updating_over_a_subnetwork(structure: str) -> None:
    one = case("categorical")
    recipe = Laplace(structure=structure, weights=select.subnetwork(11), rank=11, prior_precision="evidence")
    tuned = recipe.fit(one.model, one.data)
    grid = [float(tuned.log_evidence(prior_precision=float(tuned.prior_precision) * f)) for f in (0.9, 1.0, 1.1)]
    assert grid[1] >= max(grid)
    judged = recipe.replace(prior_precision="validation").fit(one.model, one.data, validation=one.data)
    assert float(judged.prior_precision) > 0
    assert tuned.update(one.data).selection == tuned.selection


def test_too_many_weights_for_a_full_matrix_have_a_low_rank_form() -> None:
    one = case("categorical")
    with limits.using(full_matrix=8 * 19**2):
        with pytest.raises(InputError, match=r"over 20 weights would need .* GB: select fewer .*'low-rank'"):
            fit(one, select.subnetwork(20))
        small = fit(one, select.subnetwork(20), "low-rank")  # its rank is large enough to be exact
    same(one, small, fit(one, select.subnetwork(20)))


def choices() -> list[list[int]]:
    """With a last batch of one row, of which the second process has nothing."""
    one = case("categorical", num=9)
    data = [(one.inputs[i : i + 4], one.targets[i : i + 4]) for i in (0, 4, 8)]
    rules = [
        select.subnetwork(9),
        select.subnetwork(9, rule="greedy"),
        select.subnetwork(9, rule="greedy", context=3 * one.inputs),
        select.subnetwork(9, rule="sampled"),
        select.subnetwork(9, variance="kron"),
    ]
    return [rule.rank(one.model, data, one.likelihood, PRIOR).order.tolist() for rule in rules]


def shared(_: Path) -> list[list[int]]:
    return choices()


def test_two_processes_choose_what_one_does(tmp_path: Path) -> None:
    with started(__file__, "shared", tmp_path) as wait:
        expected = choices()
        assert wait() == (expected, expected)


def _flat(one: Case, chosen: Selection) -> Tensor:
    return one.weights().ravel({n: mask.double() for n, mask in chosen.masks().items()}).nonzero().squeeze(1)


def _mask(one: Case, flat: list[int]) -> select.mask:
    chosen = torch.zeros(31).double()
    chosen[flat] = 1.0
    return select.mask({name: value.bool() for name, value in one.weights().fill(chosen).items()})
