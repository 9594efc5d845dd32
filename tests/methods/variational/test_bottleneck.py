"""The information bottleneck: its divergence and its loss in closed form, and the order of its two bounds."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from torch import nn

from dubito import MAP, Ensemble, Laplace, Packed, Training, Variational, objectives, variational
from oracles import fixed_normal

X, Y = fixed_normal(60, 4).float(), torch.arange(60) % 3
MEANS = torch.tensor([[2.0, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]])
X = X + MEANS[Y]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), variational.Bottleneck(8, 2), nn.Linear(2, 3))


def test_the_divergence_is_that_of_normals() -> None:
    layer = variational.Bottleneck(4, 3)
    layer(X)
    mean, raw = layer.encoder(X).chunk(2, dim=-1)
    code = torch.distributions.Normal(mean, nn.functional.softplus(raw - 5) + 1e-6)
    expected = torch.distributions.kl_divergence(code, torch.distributions.Normal(0.0, 1.0)).sum(-1)
    torch.testing.assert_close(layer.divergence, expected, rtol=1e-5, atol=1e-5)


def test_the_loss_is_alemis() -> None:
    model = network()
    torch.manual_seed(1)
    found = objectives.ELBO()(model, X, Y, num_data=1000, temperature=0.3)
    torch.manual_seed(1)
    expected = nn.functional.cross_entropy(model(X), Y) + 0.3 * model[2].divergence.mean()
    torch.testing.assert_close(found, expected)
    several = objectives.ELBO(num_samples=3)(model, X, Y, num_data=1000, temperature=1e6)
    torch.testing.assert_close(several / 1e6, model[2].divergence.mean(), rtol=1e-4, atol=1e-4)


def test_codes_and_weights_can_both_be_random() -> None:
    converted = variational.convert(network())
    torch.manual_seed(1)
    found = objectives.ELBO()(converted, X, Y, num_data=100)
    codes = next(part for part in converted.modules() if isinstance(part, variational.Bottleneck))
    parts = found - codes.divergence.mean() - converted.kl() / 100
    assert 0 < float(parts.detach()) < 20
    with pytest.raises(InputError, match="no random weights"):
        objectives.ELBO()(nn.Linear(4, 3), X, Y, num_data=100)


def with_beta(beta: float | None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), variational.Bottleneck(8, 2, beta=beta), nn.Linear(2, 3))


def test_recipes_add_beta_times_the_divergence() -> None:
    """β is so large that a step of gradient descent is that on the divergence alone, which does not depend on draws."""
    model = with_beta(1e6)
    step = Training(epochs=1, lr=1e-9, batch_size=60, optimizer="sgd", momentum=0.0, schedule="constant", accumulate=3)
    found = MAP().fit(model, (X, Y), training=step, progress=False).model[2].encoder.weight
    model(X)
    gradient = torch.autograd.grad(model[2].divergence.mean(), model[2].encoder.weight)[0]
    torch.testing.assert_close((model[2].encoder.weight - found) / 1e-3, gradient, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    "recipe", [MAP(), Ensemble(members=2), Variational(), Variational(optimizer="natural")], ids=repr
)
def test_a_larger_beta_keeps_less_in_every_recipe(recipe: MAP) -> None:
    kept = []
    for beta in (1e-4, 10.0):
        model = with_beta(beta)
        posterior = recipe.fit(model, (X, Y), training=Training(epochs=60, lr=0.02, batch_size=60), progress=False)
        network = (posterior.members or (posterior,))[0].model
        network(X)
        kept.append(network[2].divergence.mean().item())
    assert kept[1] < 0.3 * kept[0]


def test_the_default_beta_is_that_of_the_paper() -> None:
    step = Training(epochs=3, batch_size=60)
    fits = [
        MAP().fit(with_beta(beta), (X, Y), training=step, generator=torch.Generator().manual_seed(0), progress=False)
        for beta in (None, 1e-3, 2e-3)
    ]
    weights = [fit.model[2].encoder.weight for fit in fits]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_network_can_be_copied_after_a_call() -> None:
    model = network()
    model(X)
    copied = copy.deepcopy(model).eval()
    torch.testing.assert_close(copied(X), model.eval()(X))
    assert float(Laplace().fit(model, (X, Y), progress=False).predict(X).epistemic.mean()) > 0


class Twice(nn.Module):
    """Calls its bottleneck as often as it is told."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.code, self.out, self.calls = variational.Bottleneck(4, 2, beta=1e6), nn.Linear(2, 3), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = x[:, :2]
        for k in range(self.calls):
            code = code + self.code((k + 1) * x)
        return self.out(code)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_every_call_of_a_bottleneck_counts(calls: int) -> None:
    torch.manual_seed(0)
    model = Twice(calls)
    found = objectives.ELBO()(model, X, Y, num_data=60, temperature=1.0)
    expected = torch.zeros(())
    for k in range(calls):
        model.code((k + 1) * X)
        expected = expected + 1e6 * model.code.divergence.mean()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=20.0)
    posterior = MAP().fit(model, (X, Y), training=Training(epochs=1), progress=False)
    assert posterior.model.code.pass_divergence is None


def test_renyi_bounds_have_no_codes() -> None:
    with pytest.raises(UnsupportedError, match="ELBO"):
        Variational(objective=objectives.Renyi(0.5, 2), estimator="weight").fit(
            network(), (X, Y), training=Training(epochs=1), progress=False
        )


def test_packed_members_cannot_share_codes() -> None:
    with pytest.raises(UnsupportedError, match="mixes"):
        Packed(members=2).fit(network(), (X, Y), training=Training(epochs=1), progress=False)


@pytest.mark.slow
def test_what_is_told_is_less_than_what_is_kept() -> None:
    """log 3 − E[−log p(y|z)] ≤ I(Z; Y) ≤ I(X; Z) ≤ rate; a larger β keeps less."""
    rates = []
    for beta in (0.001, 0.3):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            objectives.ELBO()(model, X, Y, num_data=60, temperature=beta).backward()
            optimizer.step()
        with torch.no_grad():
            losses = torch.stack([nn.functional.cross_entropy(model(X), Y) for _ in range(50)])
        told = math.log(3) - float(losses.mean())
        rates.append(float(model[2].divergence.mean()))
        assert 0.2 < told <= rates[-1]
    assert rates[1] < 0.7 * rates[0]
    posterior = Laplace().fit(model.eval(), (X, Y), progress=False)
    assert float(posterior.predict(X).epistemic.mean()) > 0
