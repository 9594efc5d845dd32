"""New weights are drawn as the network itself draws them; a new head leaves the rest alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import dubito
from dubito import (
    HMC,
    MAP,
    SGMCMC,
    SVGD,
    SWAG,
    Ensemble,
    Laplace,
    MCDropout,
    Rank1,
    Snapshot,
    Training,
    Variational,
    select,
)
from dubito.beliefs import priors
from dubito.core import params
from dubito.fitting.initialization import reset_parameters

DATA = (torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2)
STILL = Training(epochs=2, lr=1e-12)


class Own(nn.Module):
    """A network with a free parameter and an initialization of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((8,), 7.0))
        self.body = nn.Linear(3, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).relu() + self.token))


class ByWhole(Own):
    def init_weights(self, mode: str = "") -> None:
        nn.init.constant_(self.body.weight, 2.0)
        nn.init.zeros_(self.token)


class ByPart(Own):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(3.0)
        if isinstance(module, Own):
            module.token.data.fill_(1.0)


def test_the_networks_own_functions_have_the_last_word() -> None:
    whole, part = ByWhole(), ByPart()
    reset_parameters(whole)
    reset_parameters(part)
    assert bool((whole.body.weight == 2).all())
    assert bool((whole.token == 0).all())
    assert bool((part.body.weight == 3).all())
    assert bool((part.head.weight == 3).all())
    assert bool((part.token == 1).all())
    assert bool((part.norm.weight == 1).all())


def test_frozen_weights_are_kept() -> None:
    model = ByPart()
    model.body.requires_grad_(False)
    before = params.of(model)
    reset_parameters(model)
    assert torch.equal(model.body.weight, before["body.weight"])
    assert bool((model.head.weight == 3).all())


def test_few_weights_that_nobody_redraws_are_kept_and_named() -> None:
    model = Own()
    model.body = nn.Sequential(nn.Linear(3, 200), nn.Linear(200, 8))
    with pytest.warns(UserWarning, match="keeps the model's values of token: their modules have no"):
        reset_parameters(model)
    assert bool((model.token == 7).all())
    with pytest.raises(InputError, match="cannot reset 'token'"):  # many of them
        reset_parameters(Own())


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_layers_are_redrawn(wrap) -> None:
    model = nn.Sequential(nn.Linear(3, 8), wrap(nn.Linear(8, 4)))
    before, weight = params.of(model), model[1].weight.detach().clone()
    reset_parameters(model)
    assert not any(torch.equal(before[name], model.get_parameter(name)) for name in ("0.weight", "0.bias", "1.bias"))
    assert not torch.allclose(model[1].weight, weight)
    if wrap is parametrizations.orthogonal:
        torch.testing.assert_close(model[1].weight @ model[1].weight.T, torch.eye(4))


HEAD = ("head.weight", "head.bias")
RECIPES = [
    MAP(start="head"), Variational(start="head"), SWAG(start="head", burn_in=0.0, collect_every=1),
    MCDropout(0.1, start="head"), Rank1(start="head"), SVGD(1, start="head"),
    Snapshot(start="head", cycles=1), SGMCMC(start="head", burn_in=0, num_samples=2, thinning=1, step_size=1e-12),
    HMC("hmc", start="head", burn_in=0, num_samples=1, chains=1, num_steps=1),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.setting_name)
def test_a_new_head_on_the_models_other_weights(recipe) -> None:
    model = ByPart()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.5)
    before = params.of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samplers that hardly move
        posterior = recipe.fit(model, DATA, training=STILL)
    after = {name: value.mean(0) for name, value in posterior.sample(1).items()}
    if isinstance(recipe, (SGMCMC, SVGD, HMC, Variational, Rank1)):  # random around the start
        assert float((after["head.weight"] - 3.0).abs().mean()) < 1.0
        assert float((before["head.weight"] - 3.0).abs().mean()) > 2.0
        return
    for name, value in before.items():
        assert torch.allclose(after[name], value, atol=1e-5) == (name not in HEAD), name


def test_an_ensemble_of_new_heads() -> None:
    model = Own()
    posterior = Ensemble(2, start="head", together=False).fit(model, DATA, training=STILL)
    one, two = (params.of(member.model) for member in posterior.members)
    for name, value in params.of(model).items():
        assert torch.allclose(one[name], two[name], atol=1e-5) == (name not in HEAD), name
        assert torch.allclose(one[name], value, atol=1e-5) == (name not in HEAD), name


def test_what_cannot_start_with_a_new_head() -> None:
    with pytest.raises(InputError, match="start='head' needs a linear layer"):
        MAP(start="head").fit(nn.Sequential(nn.LayerNorm(3), nn.Flatten()), (DATA[0], DATA[1]), training=STILL)
    with pytest.raises(InputError, match="start='head' discards weights this prior is centred on"):
        Variational(prior=priors.Normal("model"), start="head")
    with pytest.raises(InputError, match=r"MAP\(start='head', train=False\)"):
        MAP(start="head", train=False)
    with pytest.raises(InputError, match="starts head, but the ensemble starts from the model"):
        Ensemble(recipe=MAP(start="head"), start="model")


class TestGivenMembers:
    def test_networks(self) -> None:
        models = [Own(), Own()]
        before = [copy.deepcopy(model.state_dict()) for model in models]
        posterior = Ensemble.of(models)
        expected = torch.stack([model.eval()(DATA[0]).softmax(-1) for model in models]).mean(0)
        torch.testing.assert_close(posterior.predict(DATA[0]).probs, expected)
        assert posterior.predict(DATA[0]).epistemic.mean() > 0
        for model, state in zip(models, before, strict=True):
            assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    def test_posteriors_and_files(self, tmp_path) -> None:
        posterior = Ensemble.of([Laplace(weights=select.last_layer()).fit(Own(), DATA) for _ in range(2)])
        posterior.save(tmp_path / "members")
        again = dubito.load(tmp_path / "members", Own())
        assert torch.equal(again.predict(DATA[0]).probs, posterior.predict(DATA[0]).probs)

    def test_regression_needs_its_noise(self) -> None:
        data = (DATA[0], torch.randn(12, 2))
        with pytest.raises(InputError, match="noise that must be found from data"):
            Ensemble.of([Own(), Own()], likelihood="gaussian")
        assert Ensemble.of([Own(), Own()], likelihood="gaussian", data=data).predict(data[0]).aleatoric.min() > 0

    @pytest.mark.parametrize(
        ("members", "message"),
        [([], "at least one"), ([Own(), 3], "at least one"), ([Own(), nn.Linear(3, 2)], "Member 1 is another network")],
    )
    def test_other_members(self, members, message: str) -> None:
        with pytest.raises(InputError, match=message):
            Ensemble.of(members)
