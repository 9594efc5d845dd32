"""The same steps as ivon-opt, where nothing holds them back, and the same posterior on the same task."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from dubito import Training, Variational, likelihoods, priors
from dubito.methods.variational import convert
from dubito.methods.variational.natural import MOMENTUM, NaturalStep, Weights
from extras import needs
from oracles import fixed_normal

ivon = needs("ivon")
NOISE, NUM_DATA = 0.5, 200


def test_the_same_steps() -> None:
    """Twenty steps with the same gradients and draws; the prior is its weight decay."""
    module = convert(nn.Linear(4, 3, dtype=torch.float64), estimator="weight", initial_scale=128**-0.5)
    _, part = next(module.parts())
    start = module.network.weight.detach().clone()
    state = {"mean": start.clone(), "precision": torch.full_like(start, 128.0)}
    state |= {"momentum": torch.zeros_like(start), "noise": torch.zeros_like(start)}
    ours = Weights(part, module.network.weight, state, 128.0)

    ess, decay = 64.0, 1 / 64  # N, and p₀ / N for p₀ = 1; in binary, for it starts in single precision
    peer = nn.Parameter(start.flatten())
    theirs = ivon.IVON([peer], lr=0.05, ess=ess, weight_decay=decay, hess_init=128.0 / ess - decay, beta2=0.99)
    for t in range(20):
        gradient, noise = fixed_normal(3, 4, seed=t), 0.1 * fixed_normal(3, 4, seed=100 + t)
        theirs.state |= {"avg_grad": gradient.flatten(), "avg_nxg": (noise * gradient).flatten()}
        theirs._update()
        # its rate is over the first curvature plus decay, which is P₀ / N
        step = NaturalStep(rate=0.05, turnover=1 - 0.99, num_data=ess, debias=1 - MOMENTUM ** (t + 1))
        ours.move(gradient, step, noise * gradient)
    group = theirs.param_groups[0]
    precision = ess * (group["hess"] + decay)
    torch.testing.assert_close(state["precision"].flatten(), precision, rtol=1e-9, atol=0)
    torch.testing.assert_close(state["momentum"].flatten(), group["momentum"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(state["mean"].flatten(), peer.data, rtol=1e-9, atol=1e-12)


def test_the_same_posterior() -> None:
    """A linear regression, whose posterior is known: both find its mean and its scales."""
    x = fixed_normal(NUM_DATA, 4)
    y = x @ fixed_normal(4, 1, seed=1) + NOISE * fixed_normal(NUM_DATA, 1, seed=2)
    precision = x.mT @ x / NOISE**2 + torch.eye(4, dtype=torch.float64)
    mean, scale = torch.linalg.solve(precision, x.mT @ y / NOISE**2).flatten(), precision.diagonal() ** -0.5
    likelihood = likelihoods.Gaussian(NOISE)

    layer = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    recipe = Variational(prior=priors.Normal(), optimizer="natural", initial_scale=0.05, temperature=1.0)
    training = Training(epochs=1500, batch_size=NUM_DATA)
    found = recipe.fit(layer, (x, y), likelihood=likelihood, training=training)

    torch.manual_seed(0)
    settings = {"lr": 0.02, "ess": NUM_DATA, "weight_decay": 1 / NUM_DATA, "hess_init": 400 / NUM_DATA, "beta2": 0.995}
    optimizer = ivon.IVON(layer.parameters(), **settings)
    for _ in range(3000):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            (F.mse_loss(layer(x), y) / (2 * NOISE**2)).backward()
        optimizer.step()
    theirs = (NUM_DATA * (optimizer.param_groups[0]["hess"] + 1 / NUM_DATA)) ** -0.5
    for center, spread in ((found.mean()["weight"], found.scale), (layer.weight.detach(), theirs)):
        assert float(((center.flatten() - mean) / scale).abs().max()) < 0.3
        torch.testing.assert_close(spread, scale, rtol=0.2, atol=0)
