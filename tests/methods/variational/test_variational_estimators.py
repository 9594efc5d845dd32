"""Moments of every estimator on every layer type, against the Jacobian of the layer in its weights; float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dubito.variational import VariationalModule
from scipy import stats
from torch import Tensor, nn
from variational_cases import LAYERS, NORMS, mlp

from dubito import priors
from dubito.core import params
from dubito.methods.variational import convert, fused
from dubito.methods.variational import layer as layer_module
from dubito.methods.variational.layer import StochasticLayer
from oracles import fixed_normal, seeded

pytestmark = pytest.mark.slow

DRAWS = 500
# Of a normal variable's estimated mean and variance: six standard errors.
MEAN_ERROR, VARIANCE_ERROR = 6 / math.sqrt(DRAWS), 6 * math.sqrt(2 / DRAWS)

each_layer = pytest.mark.parametrize("name", LAYERS)
each_estimator = pytest.mark.parametrize("estimator", ["local", "flipout", "weight"])


def converted(name: str, estimator: Any) -> tuple[nn.Module, VariationalModule, Tensor]:
    make, x = {**LAYERS, **NORMS}[name]
    layer = seeded(make)
    module = convert(layer, estimator=estimator, biases="random")
    with torch.no_grad():
        for seed, (_, part) in enumerate(module.parts()):
            part.log_scale.copy_(0.5 * fixed_normal(*part.log_scale.shape, seed=seed) - 1)
    return layer, module, x


def true_covariance(layer: nn.Module, module: VariationalModule, x: Tensor) -> Tensor:
    """J diag(σ²) Jᵀ between all outputs, exact because a layer is linear in its parameters."""
    weights = params.of(layer)
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(layer, w, (x,)))(weights)
    means = dict(layer.named_parameters())
    rows = torch.cat([
        (jacobian[n] * part.variance(means[n]).sqrt()).flatten(-means[n].ndim) for n, part in module.parts()
    ], dim=-1)  # fmt: skip
    flat = rows.reshape(-1, rows.shape[-1]).detach()
    return flat @ flat.mT


@torch.no_grad()
def drawn(module: nn.Module, x: Tensor, num: int = DRAWS) -> Tensor:
    torch.manual_seed(1)
    return torch.stack([module(x) for _ in range(num)])


@pytest.mark.parametrize("name", [*LAYERS, *NORMS])
@each_estimator
def test_means_and_variances(name: str, estimator: str) -> None:
    layer, module, x = converted(name, estimator)
    samples = drawn(module, x).flatten(1)
    variance = true_covariance(layer, module, x).diagonal()
    error = (samples.mean(0) - layer(x).flatten()).abs()
    assert bool((error <= MEAN_ERROR * variance.sqrt() + 1e-12).all())
    torch.testing.assert_close(samples.var(0), variance, rtol=VARIANCE_ERROR, atol=1e-12)


@each_layer
def test_local_moments_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the noise fixed to one the output is mean plus standard deviation, to the last digits."""
    layer, module, x = converted(name, "local")
    for module_with_noise in (layer_module, fused):
        monkeypatch.setattr(module_with_noise, "normal_like", torch.ones_like)
    expected = layer(x) + true_covariance(layer, module, x).diagonal().sqrt().reshape(layer(x).shape)
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [*LAYERS, *NORMS])
def test_weight_samples_are_joint(name: str) -> None:
    layer, module, x = converted(name, "weight")
    samples = drawn(module, x).flatten(1)
    expected = true_covariance(layer, module, x)
    spread = expected.diagonal().sqrt()
    error = (samples.T.cov() - expected).abs() / (spread[:, None] * spread).clamp_min(1e-12)
    assert float(error[spread > 0][:, spread > 0].max()) <= VARIANCE_ERROR


@pytest.mark.parametrize("name", [name for name in LAYERS if "without_batch" not in name])
def test_flipout_has_one_weight_per_example(name: str) -> None:
    """Within an example outputs covary as under one weight sample; between examples they do not."""
    layer, module, x = converted(name, "flipout")
    samples, expected = drawn(module, x), true_covariance(layer, module, x)
    size = layer(x)[0].numel()
    for example in range(len(x)):
        block = slice(example * size, (example + 1) * size)
        spread = expected.diagonal()[block].sqrt()
        error = (samples.flatten(1)[:, block].T.cov() - expected[block, block]).abs()
        limit = VARIANCE_ERROR * (spread[:, None] * spread) + 1e-12
        assert bool((error <= limit).all())
    across = torch.einsum("sa,sb->ab", *(samples[:, n].flatten(1) - layer(x)[n].flatten() for n in (0, 1))) / DRAWS
    scale = expected.diagonal().sqrt()
    assert bool((across.abs() <= MEAN_ERROR * torch.outer(scale[:size], scale[size : 2 * size]) * 1.5 + 1e-12).all())


def test_flipout_signs_are_per_channel_not_per_pixel() -> None:
    layer = seeded(lambda: nn.Conv2d(1, 3, 1, bias=False))
    module = convert(layer, estimator="flipout", initial_scale=1.0)
    x = torch.ones(5, 1, 4, 4, dtype=torch.float64)
    noise = (module(x) - layer(x)).detach()
    torch.testing.assert_close(noise, noise[:, :, :1, :1].expand_as(noise), rtol=1e-12, atol=0)
    sizes = noise[:, :, 0, 0].abs()
    torch.testing.assert_close(sizes, sizes[:1].expand_as(sizes), rtol=1e-12, atol=0)  # one draw, but for its sign
    assert len(set(map(tuple, noise[:, :, 0, 0].sign().tolist()))) > 1


def test_local_and_weight_agree_in_distribution() -> None:
    """A network of single positions: each output has the same law under both, here by a two-sample test."""
    network, x = seeded(mlp), fixed_normal(1, 3)
    samples = {e: drawn(convert(network, estimator=e, initial_scale=0.4), x, 2000)[:, 0] for e in ("local", "weight")}
    for output in range(2):
        parts = [samples[e][:, output].numpy() for e in samples]
        assert stats.ks_2samp(*parts).pvalue > 1e-3
        assert abs(parts[0].mean() - parts[1].mean()) < 5 * parts[0].std() * math.sqrt(2 / 2000)


def test_the_estimators_differ_in_the_noise_of_their_gradients() -> None:
    """Local reparameterization has the least, flipout less than weight sampling: what they are for."""
    network, x, y = seeded(mlp), fixed_normal(64, 3), fixed_normal(64, 2, seed=1)
    noise = {}
    for estimator in ("local", "flipout", "weight"):
        module = convert(network, estimator=estimator, initial_scale=0.3)
        torch.manual_seed(0)
        grads = []
        for _ in range(100):
            slopes = torch.autograd.grad((module(x) - y).square().mean(), list(module.parameters()))
            grads.append(torch.cat([slope.flatten() for slope in slopes]))
        noise[estimator] = float(torch.stack(grads).var(0).sum())
    assert noise["local"] < noise["flipout"] < noise["weight"]
    assert noise["local"] < noise["weight"] / 4


@each_estimator
def test_gradients_are_those_of_the_expected_loss(estimator: str) -> None:
    """For a linear layer and a squared loss the expected gradient is known."""
    layer, x, y = seeded(lambda: nn.Linear(3, 1)), fixed_normal(20, 3), fixed_normal(20, 1, seed=1)
    module = convert(layer, estimator=estimator, initial_scale=0.5)
    mean, log_scale = module.network._parameters["weight"], dict(module.parts())["weight"].log_scale
    torch.manual_seed(0)
    slopes = torch.stack([
        torch.cat([s.flatten() for s in torch.autograd.grad((module(x) - y).square().sum(), (mean, log_scale))])
        for _ in range(1000)
    ])  # fmt: skip
    residual = (layer(x) - y).detach()
    expected = torch.cat([(2 * residual * x).sum(0), 2 * x.square().sum(0) * 0.25])
    error = (slopes.mean(0) - expected).abs() / (slopes.std(0) / math.sqrt(1000))
    assert float(error.max()) < 5


def test_no_gradient_is_lost_where_no_input_reaches() -> None:
    layer = seeded(lambda: nn.Linear(3, 2, bias=False))
    module = convert(layer, estimator="local")
    module(torch.zeros(4, 3, dtype=torch.float64)).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters())


def test_extra_arguments_of_a_layer_still_work() -> None:
    layer = seeded(lambda: nn.ConvTranspose1d(1, 1, 2, stride=2))
    module = convert(layer, estimator="local", prior=priors.Normal())
    x = fixed_normal(2, 1, 3)
    assert module(x, output_size=[7]).shape == (2, 1, 7)
    assert isinstance(module.network, StochasticLayer)
    assert not torch.equal(module(x, output_size=[7]), module(x, output_size=[7]))
