"""`posterior.functions`: consistent over inputs, with the posterior's moments, and differentiable."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dubito
from dubito import (
    MAP,
    SGMCMC,
    SWAG,
    Ensemble,
    Laplace,
    MCDropout,
    Packed,
    Rank1,
    Training,
    Variational,
    likelihoods,
    select,
)
from dubito.fitting.functions import Functions
from oracles import fixed_normal

X, Y = fixed_normal(30, 2), fixed_normal(30, 1, seed=1)
OPTIONS: dict[str, Any] = {"likelihood": likelihoods.Gaussian(noise=0.5), "progress": False}


def _network(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(4)] if norm else []
    return nn.Sequential(nn.Linear(2, 4), *middle, nn.Tanh(), nn.Linear(4, 1)).double()


class _Attends(nn.Module):
    """Attention and a hard sigmoid: torch differentiates its usual implementations of both only once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.gate = nn.Linear(1, 4), nn.Linear(4, 1), nn.Hardsigmoid(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.first(x[:, None, :, None])  # two tokens of one head
        mixed = nn.functional.scaled_dot_product_attention(parts, parts, parts)
        return self.last(self.gate(mixed + 0.1).mean((1, 2)))


def _attends() -> nn.Module:
    torch.manual_seed(0)
    return _Attends().double()


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_network, _attends])
def test_laplace_functions_are_the_linearized_network(make: Callable[[], nn.Module]) -> None:
    """f_s(x) = f(x) + J(x)(w_s − ŵ), by brute force; the moments of many are those of `functional`."""
    model = make()
    posterior = Laplace(structure="full", prior_precision=1.0).fit(model, (X, Y), **OPTIONS)
    drawn = posterior.functions(3, generator=_seeded())
    samples = posterior.sample(3, generator=_seeded())
    weights = {name: value.detach() for name, value in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):
        rows = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, X[:5]))(weights)
    expected = torch.stack(
        [
            model(X[:5]) + sum((rows[n].flatten(2) @ (samples[n][s] - weights[n]).flatten()) for n in weights)
            for s in range(3)
        ]
    )
    assert torch.allclose(drawn(X[:5]), expected, rtol=1e-10)
    assert torch.allclose(drawn[1](X[:5]), expected[1])
    many = posterior.functions(1000, generator=_seeded())(X[:3])[..., 0].detach()
    mean, covariance = posterior.functional(X[:3], joint=True)
    errors = (many.var(0) * 2 / 1000).sqrt()
    assert ((many.mean(0) - mean[:, 0]).abs() < 5 * (covariance.diagonal() / 1000).sqrt()).all()
    assert (
        (torch.cov(many.T).diagonal() - covariance.diagonal()).abs() < 5 * errors * covariance.diagonal().sqrt()
    ).all()
    correlation = torch.corrcoef(many.T)[0, 1]
    exact = covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt()
    assert abs(correlation - exact) < 5 * (1 - exact**2) / 1000**0.5 + 1e-3


RECIPES = {
    "map": MAP(),
    "laplace": Laplace(prior_precision=1.0),
    "last": Laplace(weights=select.last_layer(), structure="full", prior_precision=1.0),
    "variational": Variational(),
    "rank1": Rank1(components=2),
    "ensemble": Ensemble(members=2),
    "swag": SWAG(),
    "sgmcmc": SGMCMC(burn_in=20, thinning=1, num_samples=20, temperature=0.01),
    "dropout": MCDropout(rate=0.5),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_family_gives_one_function_at_all_inputs(name: str) -> None:
    recipe = RECIPES[name]
    training = None if recipe.needs_trained_model else Training(epochs=4, batch_size=10)
    posterior = recipe.fit(_network(), (X, Y), training=training, **OPTIONS)
    drawn = posterior.functions(2, generator=_seeded())
    together = drawn(X)
    apart = torch.cat([drawn(X[i : i + 7]) for i in range(0, 30, 7)], dim=1)
    assert together.shape == (2, 30, 1)
    assert torch.allclose(together, apart, rtol=1e-10)
    assert torch.equal(together, posterior.functions(2, generator=_seeded())(X))
    if name != "map":
        assert not torch.allclose(together[0], together[1])
    x = X[:2].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(drawn[0](x).sum(), x)
    step = 1e-6 * torch.ones_like(x)
    numeric = (drawn[0](X[:2] + step) - drawn[0](X[:2] - step))[:, 0] / 2e-6
    assert torch.allclose(gradient.sum(1), numeric.detach(), rtol=1e-4, atol=1e-7)


def test_members_keep_their_own_statistics() -> None:
    ensemble: Any = Ensemble(members=2).fit(_network(norm=True), (X, Y), training=Training(epochs=2), **OPTIONS)
    expected = torch.stack([member.model(X) for member in ensemble.members])
    assert torch.allclose(ensemble.functions(2)(X), expected)
    swag = SWAG(num_samples=4).fit(_network(norm=True), (X, Y), training=Training(epochs=3), **OPTIONS)
    means = swag.predict(X, num_samples=4).means
    assert torch.allclose(swag.functions(4)(X).detach(), means, rtol=1e-6, atol=1e-8)


def test_threads_and_slices() -> None:
    drawn = Laplace(prior_precision=1.0).fit(_network(), (X, Y), **OPTIONS).functions(4, generator=_seeded())
    expected = drawn(X)
    with ThreadPoolExecutor(8) as pool:
        found: list[Tensor] = list(pool.map(lambda _: drawn(X), range(16)))
    assert all(torch.equal(each, expected) for each in found)
    assert isinstance(drawn[1:3], Functions)
    assert torch.equal(drawn[1:3](X), expected[1:3])
    assert len(list(drawn)) == 4
    with pytest.raises(InputError, match="num_functions"):
        MAP(train=False).fit(_network(), (X, Y), **OPTIONS).functions(0)
    tempered = dubito.decisions.TemperedPosterior(MAP(train=False).fit(_network(), (X, Y), **OPTIONS), 2.0)
    assert tempered.functions(1)(X).shape == (1, 30, 1)


@pytest.mark.parametrize("recipe", [Laplace(prior_precision=1.0), MAP(train=False)], ids=["expanded", "at weights"])
def test_inputs_of_another_width_are_refused(recipe: Any) -> None:
    drawn = recipe.fit(_network(), (X, Y), **OPTIONS).functions(2)
    with pytest.raises(InputError, match=r"cannot be called on inputs of shape \(4, 3\)"):
        drawn(fixed_normal(4, 3))


def test_inputs_with_nan_are_refused() -> None:
    point = MAP(train=False).fit(_network(), (X, Y), **OPTIONS)
    packed = Packed(members=2).fit(_network(), (X, Y), training=Training(epochs=1), **OPTIONS)
    for drawn in (
        point.functions(2),
        Laplace(prior_precision=1.0).fit(_network(), (X, Y), **OPTIONS).functions(2),
        packed.functions(2),
        point.functions(3)[1:],
    ):
        for function in (drawn, drawn[0]):
            with pytest.raises(InputError, match="The inputs hold NaN"):
                function(torch.full_like(X, torch.nan))
    one = point.functions(1)[0]
    gradients = torch.func.vmap(torch.func.grad(lambda x: one(x[None]).sum()))(X)  # where values cannot be read
    assert gradients.shape == X.shape
