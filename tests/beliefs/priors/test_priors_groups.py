"""Priors of groups: the divergences and moments of their scales against quadrature."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from scipy import integrate, stats
from torch import Tensor

from dubito import priors
from dubito.beliefs.priors.group import log_normal_kl_gamma, log_normal_kl_inverse_gamma

GROUP_PRIORS = [priors.NormalJeffreys(), priors.Horseshoe(0.1), priors.TruncatedLogUniform()]
NORMALS = [(0.0, 1.0), (-3.0, 0.3), (1.5, 2.0), (-12.0, 0.05)]  # mean and variance of log z
GATES = [(-0.01, 0.0067), (-0.3, 0.05), (-1.0, 0.5), (-10.0, 3.0), (-20.0, 140.0), (0.0, 1.0)]
GATE = priors.TruncatedLogUniform()


def double(*values: float) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def log_normal_divergence(mean: float, variance: float, log_density: Any) -> float:
    """KL of log z ~ N(mean, variance) from a density of z, by quadrature over log z."""
    q = stats.norm(mean, math.sqrt(variance))
    ends = (mean - 12 * math.sqrt(variance), mean + 12 * math.sqrt(variance))
    # the density of log z is that of z times z
    integrand = lambda t: q.pdf(t) * (q.logpdf(t) - log_density(math.exp(t)) - t)  # noqa: E731
    return float(integrate.quad(integrand, *ends, epsabs=1e-12, epsrel=1e-12, limit=200)[0])


@pytest.mark.parametrize(("mean", "variance"), NORMALS)
@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_divergence_of_a_log_normal_from_a_gamma(mean: float, variance: float, scale: float) -> None:
    expected = log_normal_divergence(mean, variance, stats.gamma(0.5, scale=scale**2).logpdf)
    exact = log_normal_kl_gamma(*double(mean, variance), scale)
    assert exact.item() == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize(("mean", "variance"), NORMALS)
def test_divergence_of_a_log_normal_from_an_inverse_gamma(mean: float, variance: float) -> None:
    expected = log_normal_divergence(mean, variance, stats.invgamma(0.5).logpdf)
    exact = log_normal_kl_inverse_gamma(*double(mean, variance))
    assert exact.item() == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_the_root_of_gamma_times_inverse_gamma_is_half_cauchy(generator: torch.Generator) -> None:
    """What makes the divergences above those of the horseshoe; the scale of the gamma is τ², not τ."""
    scale, count = 0.3, 20_000
    seeds = torch.randint(2**31, (2,), generator=generator).tolist()
    a = stats.gamma(0.5, scale=scale**2).rvs(count, random_state=seeds[0])
    b = stats.invgamma(0.5).rvs(count, random_state=seeds[1])
    assert stats.kstest((a * b) ** 0.5, stats.halfcauchy(scale=scale).cdf).pvalue > 1e-3


def gate_density(mean: float, scale: float) -> Any:
    return stats.truncnorm((GATE.low - mean) / scale, (GATE.high - mean) / scale, loc=mean, scale=scale)


def gate_expectation(function: Any, mean: float, scale: float) -> float:
    q = gate_density(mean, scale)
    ends = max(GATE.low, mean - 12 * scale), min(GATE.high, mean + 12 * scale)
    return float(integrate.quad(lambda t: q.pdf(t) * function(t), *ends, epsabs=1e-13, epsrel=1e-11, limit=300)[0])


@pytest.mark.parametrize(("mean", "scale"), GATES)
def test_divergence_of_a_gate(mean: float, scale: float) -> None:
    q = gate_density(mean, scale)
    expected = gate_expectation(lambda t: q.logpdf(t) + math.log(20), mean, scale)
    assert GATE.scale_kl(*double(mean, scale)).item() == pytest.approx(expected, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(("mean", "scale"), GATES)
def test_moments_of_a_gate(mean: float, scale: float, order: int) -> None:
    expected = gate_expectation(lambda t: math.exp(order * t), mean, scale)
    assert GATE.moment(*double(mean, scale), order).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("mean", "scale"), GATES)
def test_quantiles_of_a_gate(mean: float, scale: float) -> None:
    levels = torch.linspace(0.01, 0.99, 9, dtype=torch.float64)
    expected = torch.as_tensor(gate_density(mean, scale).ppf(levels.numpy())).exp()
    torch.testing.assert_close(GATE.quantile(*double(mean, scale), levels), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("mean", "scale"), [(-1.0, 0.5), (-6.0, 2.0), (-10.0, 3.0), (-20.0, 140.0)])
def test_evidence_gain_is_model_reduction(mean: float, scale: float) -> None:
    """log E_q[p̃ / p], where the reduced prior p̃ is uniform below the cut."""
    for bits in (4, 8):
        cut = -bits * math.log(2)
        share = gate_density(mean, scale).cdf(cut)
        expected = math.log(share * 20 / (cut + 20)) if share > 0 else -math.inf
        gain = GATE.evidence_gain(*double(mean, scale), bits).item()
        assert gain == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_gate_at_its_prior_may_be_closed_and_an_open_one_not() -> None:
    mean, scale = double(-10.0, 140.0)
    assert GATE.scale_kl(mean, scale).item() == pytest.approx(0.0, abs=1e-4)  # the widest posterior is the prior
    assert GATE.evidence_gain(mean, scale).item() == pytest.approx(0.0, abs=1e-2)
    assert GATE.evidence_gain(*double(-1.0, 0.1)).item() < -100
    with pytest.raises(InputError, match=r"would cut log z at .* outside of"):
        GATE.evidence_gain(mean, scale, bits=40)


def test_gradients_of_a_gate_are_finite_where_it_is_certain() -> None:
    mean, scale = (value.requires_grad_() for value in double(-0.001, 1e-6))
    half = torch.tensor(0.5, dtype=torch.float64)
    value = GATE.scale_kl(mean, scale) + GATE.moment(mean, scale) + GATE.quantile(mean, scale, half)
    assert all(bool(slope.isfinite()) for slope in torch.autograd.grad(value, (mean, scale)))


def test_normal_jeffreys_is_log_uniform_in_the_scale() -> None:
    mean, scale = double(0.7, 0.4)
    assert torch.equal(priors.NormalJeffreys().scale_kl(mean, scale), priors.LogUniform().kl(mean, scale))


@pytest.mark.parametrize("prior", GROUP_PRIORS, ids=repr)
def test_a_single_weight_has_no_density(prior: priors.GroupPrior) -> None:
    for method in (lambda: prior.log_prob(torch.ones(2)), prior.mean, prior.variance, lambda: prior.sample((2,))):
        with pytest.raises(UnsupportedError):
            method()
    with pytest.raises(InputError, match="without any other prior"):
        prior.resolve("weight", torch.ones(2))


def test_bad_settings_are_one_sentence() -> None:
    with pytest.raises(InputError, match="`groups` must be 'auto', 'inputs' or 'outputs', got 'layers'"):
        priors.NormalJeffreys(groups="layers")
    with pytest.raises(InputError, match="`scale` must be a positive number, got 0"):
        priors.Horseshoe(scale=0.0)
    with pytest.raises(InputError, match="`low` must be below `high`"):
        priors.TruncatedLogUniform(low=1.0, high=-1.0)
