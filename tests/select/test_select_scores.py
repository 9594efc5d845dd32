"""The numbers per weight that subnetworks are chosen by, against an explicit Jacobian in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from dubito.errors import InputError, NonFiniteError
from subnetwork_cases import CASES, case, centred
from torch import nn

from dubito.core import limits
from dubito.core.batches import Source
from dubito.curvature import FallbackWarning
from dubito.select import scores
from dubito.select.scores import Scores, measure
from oracles import Case, curvature, jacobian

pytestmark = pytest.mark.slow


def scored(one: Case, **options) -> Scores:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        generator, source = torch.Generator().manual_seed(0), Source(one.data, batch_size=4)
        return measure(one.model, one.weights().names, source, one.likelihood, generator=generator, **options)


@pytest.mark.parametrize("name", CASES)
def test_both_numbers_are_those_of_the_explicit_jacobian(name: str) -> None:
    one = case(name)
    found = scored(one)
    rows = centred(one, jacobian(one), one.targets)
    torch.testing.assert_close(found.curvature, curvature(one).diagonal(), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found.squared_derivatives, rows.square().sum(0), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found.variance(0.3), 1 / (curvature(one).diagonal() + 0.3), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_context_replaces_the_inputs_of_the_derivatives_only(name: str) -> None:
    one, other = case(name), case(name, num=7)
    context = other.inputs.flip(0) if name == "tokens" else 2 * other.inputs + 1
    found = scored(one, context=context)
    rows = centred(one, jacobian(one, context))
    torch.testing.assert_close(found.curvature, curvature(one).diagonal(), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found.squared_derivatives, rows.square().sum(0), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("cached", [1, 30, 100])
@pytest.mark.parametrize("name", ["categorical", "bernoulli", "sequence", "image", "grouped", "tokens", "tied"])
def test_parts_of_any_size_change_nothing(name: str, cached: int) -> None:
    one = case(name)
    expected = scored(one)
    with limits.using(cached_products=4 * cached):
        found = scored(one)
    torch.testing.assert_close(found.curvature, expected.curvature, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found.squared_derivatives, expected.squared_derivatives, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "sequence", "image", "tokens"])
def test_a_product_for_each_column_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = case(name)
    expected = scored(one)
    monkeypatch.setattr(scores, "MOST_COLUMNS", 1)
    found = scored(one)
    torch.testing.assert_close(found.curvature, expected.curvature, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found.squared_derivatives, expected.squared_derivatives, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", ["categorical", "gaussian", "sequence"])
def test_sampled_directions_are_right_on_average(name: str) -> None:
    one = case(name)
    exact, found = scored(one), scored(one, samples=4000)
    # 40,000 draws per weight: the average is within a few percent, and no draw is left out
    torch.testing.assert_close(found.squared_derivatives, exact.squared_derivatives, atol=0.0, rtol=0.1)
    torch.testing.assert_close(found.curvature, exact.curvature, atol=0.0, rtol=0.1)


def test_a_shift_of_all_logits_does_not_count() -> None:
    """A bias that moves all logits together cannot change a prediction."""
    one = case("categorical")

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shift = one.model, nn.Linear(1, 1).double()

        def forward(self, x):
            return self.body(x) + self.shift(x[:, :1])

    shifted = Case(Shifted(), one.inputs, one.targets, one.likelihood)
    found = scored(shifted)
    expected = scored(one)
    size = len(expected.squared_derivatives)
    torch.testing.assert_close(found.squared_derivatives[:size], expected.squared_derivatives)
    assert float(found.squared_derivatives[size:].max()) < 1e-20
    assert float(found.curvature[size:].max()) < 1e-20


def test_the_model_is_left_as_it_was() -> None:
    one = case("image")
    one.model.train()
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    scored(one, context=one.inputs[:1])
    assert one.model.training
    assert not any(module._forward_hooks for module in one.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in one.model.state_dict().items())


def test_nan_weights_are_named() -> None:
    one = case("bernoulli")
    with torch.no_grad():
        one.model[0].weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="outputs at the training inputs are NaN"):
        scored(one)


def test_inputs_of_wrong_width() -> None:
    one = case("bernoulli")
    with pytest.raises(InputError, match=r"cannot be called on the training inputs of shape \(4, 2\)"):
        scored(one._replace(inputs=one.inputs[:, :2]))


def test_an_error_without_words_is_named_by_its_type() -> None:
    class Silent(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    with pytest.raises(InputError, match=r"the context inputs of shape \(4, 2\): ValueError"):
        scores.check_inputs(Silent(2, 1), torch.zeros(4, 2), "the context")
