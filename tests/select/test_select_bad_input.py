"""Settings that cannot be: one sentence each, where they are given or where they are used."""

from __future__ import annotations

import warnings

import pytest
import torch
from dubito.errors import InputError
from subnetwork_cases import brute_greedy, case, centred
from torch import nn

from dubito import select
from oracles import curvature, jacobian

PRIOR = 0.7


@pytest.mark.parametrize("size", ["many", None, [3], float("nan")])
@pytest.mark.parametrize("rule", [select.subnetwork, select.random, select.largest_variance], ids=repr)
def test_a_size_that_is_no_number(rule, size) -> None:
    one = case("categorical")
    with pytest.raises(InputError, match="must be a number of weights or a fraction below 1, got"):
        rule(size).resolve(one.model, one.data)


@pytest.mark.parametrize("candidates", [3, ("0", 3)])
def test_candidates_that_are_no_layers(candidates) -> None:
    one = case("categorical")
    with pytest.raises(
        InputError, match=r"`candidates` must be text, a type, a tuple, each entry text or a type, .* got"
    ):
        select.subnetwork(3, candidates=candidates).resolve(one.model, one.data)


def test_a_mask_that_has_no_names() -> None:
    with pytest.raises(InputError, match="`params` must be a dict, got"):
        select.mask([torch.ones(3)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_layer": [3]}, "must be 'proportional', a dict of sizes or None"),
        ({"per_layer": 3}, "must be 'proportional', a dict of sizes or None"),
        ({"variance": 3}, "`variance` must be 'diag', 'kron', a recipe such as MAP\\(\\) or a posterior"),
        ({"num_samples": 1.5}, "`num_samples` must be a whole number of at least 1 or None, got 1.5"),
        ({"prefilter": 0}, "`prefilter` must be a whole number of at least 1, got 0"),
        ({"prefilter": 2.5}, "`prefilter` must be a whole number of at least 1, got 2.5"),
    ],
)
def test_options(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        select.subnetwork(3, **options)


@pytest.mark.parametrize("prior", [0.0, -1.0, float("nan"), float("inf"), "evidence"])
def test_a_prior_precision_that_is_not_positive(prior) -> None:
    one = case("categorical")
    for rule in (select.subnetwork(3), select.largest_variance(3)):
        with pytest.raises(InputError, match="`prior_precision` must be a positive number, got"):
            rule.resolve(one.model, one.data, one.likelihood, prior)
    for rule in (select.subnetwork(3), select.last_layer()):
        with pytest.raises(InputError, match="`prior_precision` must be a positive number, got"):
            rule.report(one.model, one.data, prior_precision=prior)


def test_greedy_does_not_warn_of_weights_that_matter_through_others() -> None:
    """At the context a weight may move nothing and still free others, with which the data tie it together."""
    one = case("categorical")
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(5.0)
    one, context = one._replace(model=model), torch.zeros(1, 3).double()  # the first weights move nothing there
    rows, matrix = centred(one, jacobian(one, context)), curvature(one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = select.subnetwork(25, rule="greedy", context=context).rank(one.model, one.data, one.likelihood, PRIOR)
    assert found.order.tolist() == brute_greedy(rows, matrix, PRIOR, 25)
    assert float(rows[:, found.order].abs().amax(0).min()) == 0


@pytest.mark.parametrize("rule", [select.subnetwork(3), select.subspace(1, epochs=2), select.last_layer()], ids=repr)
def test_a_rule_leaves_the_model_as_it_is_and_explains_bad_data(rule: select.SelectionRule) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).train()
    model[1].eval()  # a frozen normalization layer
    x, y = torch.randn(8, 4), torch.arange(8) % 2
    rule.resolve(model, (x, y), "categorical")
    assert [module.training for module in model] == [True, False, True]
    with pytest.raises(InputError, match="The label 5 is not one of"):
        rule.resolve(model, (x, y + 5), "categorical")
    with pytest.raises(InputError, match="cannot be called on a batch of inputs"):
        rule.resolve(model, (x[:, :3], y), "categorical")
    with pytest.raises(InputError, match="lazy layers"):
        rule.resolve(nn.LazyLinear(2), (x, y), "categorical")
    assert [module.training for module in model] == [True, False, True]
