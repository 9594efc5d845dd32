"""Factored layers of every type: unit factors, factors per example, and the same factors merged into the weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.rank1 import BatchEnsemble, Rank1, convert
from rank1_cases import CASES, network, small
from torch import Tensor, nn

from dubito import Training, models, priors
from dubito.core import params
from dubito.methods.rank1.layers import merge
from dubito.methods.rank1.sites import find_layout, without_batch_axis
from dubito.networks.layers import LayerRule, register

TIGHT = {"rtol": 1e-11, "atol": 1e-11}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("perturbation", ["multiplicative", "additive"])
def test_unit_factors_give_the_networks_own_outputs(name: str, perturbation: str) -> None:
    model, x = network(name)
    plan = Rank1(components=3, family="delta", prior=None, spread=0.0, perturbation=perturbation)
    module = convert(model, plan, inputs=x)
    with torch.no_grad():
        expected = model(x)
        assert bool((module.loc == 1).all())
        torch.testing.assert_close(module(x), expected.expand(3, *expected.shape), **TIGHT)
        if perturbation == "multiplicative":
            same = merge(model, module.layout, dict(model.named_parameters()), module.loc[0], module.bias[0])
            assert all(torch.equal(same[key], value) for key, value in model.named_parameters())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("factors", ["both", "input", "output"])
def test_each_example_has_the_network_of_its_own_factors(name: str, factors: str) -> None:
    """Row n of a factored pass is what a plain network with merged weights gives for example n."""
    model, x = network(name)
    module = convert(model, Rank1(components=2, factors=factors), inputs=x)
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = 1 + 0.5 * torch.randn(len(x), module.loc.shape[1], dtype=torch.float64)
        bias = torch.randn(len(x), module.bias.shape[1], dtype=torch.float64)
        found = module.run_with(x, [(0, len(x))], drawn, bias)
        for row in range(len(x)):
            weights = merge(model, module.layout, dict(model.named_parameters()), drawn[row], bias[row])
            alone = params.functional_call(model, weights, x[row : row + 1])
            torch.testing.assert_close(found[row : row + 1], alone, **TIGHT)
            torch.testing.assert_close(
                module.run_with(x, [(0, len(x))], drawn[row], bias[row])[row : row + 1], alone, **TIGHT
            )


@pytest.mark.parametrize("name", CASES)
def test_rows_meet_the_factors_of_their_own_component(name: str) -> None:
    model, x = network(name)
    module = convert(model, Rank1(components=3, family="delta", prior=None, spread=0.5), inputs=x)
    with torch.no_grad():
        module.bias += torch.randn_like(module.bias)
        alone = [module.run_with(x, [(k, len(x))], module.loc[k], module.bias[k]) for k in range(3)]
        torch.testing.assert_close(module(x), torch.stack(alone), **TIGHT)
        uneven = module.run(x, [(2, 2), (0, 0), (1, 3)])
        torch.testing.assert_close(uneven, torch.cat([alone[2][:2], alone[1][2:]]), **TIGHT)
        even = module.run(x[:4], [(1, 2), (0, 2)])
        torch.testing.assert_close(even, torch.cat([alone[1][:2], alone[0][2:4]]), **TIGHT)


def test_additive_factors_shift_inputs_and_outputs() -> None:
    layer = nn.Linear(3, 2).double()
    module = convert(layer, Rank1(components=1, perturbation="additive", family="delta", prior=None))
    s, r = torch.randn(3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)
    found = module.run_with(x, [(0, 4)], torch.cat([s, r]), layer.bias)
    torch.testing.assert_close(found, (x + s - 1) @ layer.weight.T + r - 1 + layer.bias, **TIGHT)


def test_factors_are_drawn_for_each_example_or_for_a_batch() -> None:
    x = torch.ones(6, 4)
    for sample, distinct in (("example", 6), ("batch", 1)):
        module = convert(small(), Rank1(components=2, sample=sample, initial_scale=0.3))
        outputs = module(x)
        assert all(len(component.detach().unique(dim=0)) == distinct for component in outputs)
        assert not torch.equal(module(x), outputs)


PRIORS = [("normal", priors.Normal(1.0, 0.1)), ("cauchy", priors.Cauchy(1.0, 0.1))]


@pytest.mark.parametrize(("family", "prior"), PRIORS)
def test_draws_of_examples_and_components_are_uncorrelated(family: Any, prior: priors.Prior) -> None:
    """Signs are compared, because a Cauchy variable has no correlation."""
    recipe = Rank1(components=2, family=family, prior=prior, spread=0.0, factors="input")
    module = convert(nn.Linear(2000, 1), recipe)
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = module.draw([(0, 3), (1, 3)])
    signs = (drawn - 1).sign()
    together = signs @ signs.T / 2000
    assert float((together - torch.eye(6)).abs().max()) < 4.5 / 2000**0.5
    widths = (drawn - 1).abs().median(1).values / 0.03
    torch.testing.assert_close(widths, torch.full((6,), 0.6745 if family == "normal" else 1.0), rtol=0.1, atol=0)


def test_a_layer_called_twice_has_one_draw_for_a_pass() -> None:
    model, x = network("called twice")
    module = convert(model, Rank1(components=1, initial_scale=0.3))
    drawn = module.draw([(0, len(x))])
    first = module.run_with(x, [(0, len(x))], drawn, module.bias[:1].expand(len(x), -1))
    second = module.run_with(x, [(0, len(x))], drawn, module.bias[:1].expand(len(x), -1))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["conv2d", "attention", "lstm, deep", "embedding", "norms", "instance and rms norms"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    model, x = network(name)
    module = convert(model, Rank1(components=2), inputs=x)
    drawn = 1 + 0.3 * torch.randn(len(x), module.loc.shape[1], dtype=torch.float64)
    bias = torch.randn(len(x), module.bias.shape[1], dtype=torch.float64)

    def outputs(factors: Tensor, biases: Tensor) -> Tensor:
        return module.run_with(x, [(0, len(x))], factors, biases).sum()

    drawn.requires_grad_()
    bias.requires_grad_()
    assert torch.autograd.gradcheck(outputs, (drawn, bias), fast_mode=True)


class Positions(nn.Module):
    """Tokens and positions that all examples share, and a layer that is read but never called."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(3, 4)
        self.head, self.read = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head((x @ self.read.weight).mean(1))


def test_layers_without_the_examples_on_their_first_axis_are_left_out() -> None:
    model, tokens = Positions().eval(), torch.randint(7, (5, 3))
    with pytest.warns(UserWarning, match="The layers 'positions', 'read' get no rank-1 factors"):
        module = convert(model, Rank1(), inputs=tokens)
    assert [site.name for site in module.layout.sites] == ["tokens", "head"]
    assert module(tokens).shape == (4, 5, 3)
    blind = convert(model, Rank1())
    with pytest.raises(UnsupportedError, match="'positions' was given 3 rows for 20 examples"):
        blind(tokens)


def test_a_layer_of_the_users_own_joins_by_its_rule() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x @ self.weight.T

    @register(Twice)
    class TwiceRule(LayerRule[Twice]):
        def apply(self, layer: Twice, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return 2 * x @ weight.T

        def num_inputs(self, layer: Twice) -> int:
            return 4

        def num_outputs(self, layer: Twice) -> int:
            return 3

        def channel_axis(self, layer: Twice, ndim: int) -> int:
            return ndim - 1

    model = nn.Sequential(Twice())
    posterior = BatchEnsemble(members=2, spread=0.3).fit(model, (torch.randn(8, 4), torch.arange(8) % 3))
    assert not posterior.mixture.mergeable
    prediction = posterior.predict(torch.randn(5, 4))
    assert prediction.samples.shape[0] == 2
    with pytest.raises(UnsupportedError, match="no weights to draw"):
        posterior.sample(2)


def test_tied_weights_have_factors_at_every_place() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.tokens.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.tokens(x).mean(1))

    x = torch.randint(7, (12, 3))
    posterior = Rank1(components=2).fit(Tied(), (x, x[:, 0]), training=Training(epochs=1))
    assert not posterior.mixture.mergeable
    assert posterior.components == 2
    assert len(posterior.predict(x)) == 12


@pytest.mark.parametrize("normalization", ["shared", "component"])
def test_normalization_statistics(normalization: str) -> None:
    """In training, shared statistics are those of all rows, the components' those of their own rows."""
    model, x = network("norms")
    module = convert(model, Rank1(components=2, normalization=normalization, spread=0.5)).train()
    seen: list[Tensor] = []
    module.network[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    before = model[1].running_mean
    module(x)
    means = torch.stack([part.mean((0, 2, 3)) for part in seen[0].chunk(2)])
    expected = 0.9 * before + 0.1 * (means if normalization == "component" else means.mean(0))
    torch.testing.assert_close(module.network[1].running_mean, expected, **TIGHT)


def test_nothing_to_perturb_is_one_sentence() -> None:
    for model in (nn.Sequential(nn.LayerNorm(3)), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))):
        with pytest.raises(InputError, match="no layer for rank-1 factors"):
            convert(model)
    with pytest.raises(InputError, match=r"no layer for rank-1 factors.*factors='input'"):
        convert(nn.Embedding(3, 2), Rank1(factors="input"))


def test_the_call_on_two_and_three_examples_leaves_no_trace() -> None:
    model, x = network("conv2d")
    before = copy.deepcopy(model.state_dict())
    assert without_batch_axis(model, find_layout(model, "both"), x) == ()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("recipe", [Rank1(), Rank1(prior=priors.Cauchy(1.0, 0.1), family="cauchy"), BatchEnsemble()])
def test_a_component_of_resnet20_costs_less_than_one_percent(recipe: Rank1 | BatchEnsemble) -> None:
    model = models.resnet20()
    size = sum(p.numel() for p in model.parameters())
    module = convert(model, recipe)
    added = sum(p.numel() for p in module.parameters() if p.requires_grad) - size
    assert added / 4 <= 0.01 * size
    assert added > 0


def test_packed_sequences_and_rows_without_a_batch_are_one_sentence() -> None:
    model, x = network("lstm")
    module = convert(model)
    with pytest.raises(UnsupportedError, match="padded sequences"):
        module.run_with(x[0], [(0, 1)], module.loc[0], module.bias[0])
    attention = convert(network("attention")[0]).network.attention
    with pytest.raises(UnsupportedError, match="needs a batch axis"):
        attention(x[0], x[0], x[0])
