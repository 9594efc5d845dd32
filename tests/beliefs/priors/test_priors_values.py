"""Densities, draws and moments against scipy; divergences against quadrature and torch.distributions, in float64."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.priors import Prior
from scipy import integrate, stats
from torch import Tensor, distributions

from dubito import priors

pytestmark = pytest.mark.slow

MIXTURE = priors.ScaleMixture((1.5, 0.1), (0.3, 0.7), 0.2)


class _Mixture:
    """What scipy has no class for."""

    def logpdf(self, w: Any) -> Any:
        import numpy as np

        return np.log(0.3 * stats.norm(0.2, 1.5).pdf(w) + 0.7 * stats.norm(0.2, 0.1).pdf(w))

    def cdf(self, w: Any) -> Any:
        return 0.3 * stats.norm(0.2, 1.5).cdf(w) + 0.7 * stats.norm(0.2, 0.1).cdf(w)

    def mean(self) -> float:
        return 0.2

    def var(self) -> float:
        return 0.3 * 1.5**2 + 0.7 * 0.1**2


CASES: list[tuple[Prior, Any]] = [
    (priors.Normal(0.3, 2.0), stats.norm(0.3, 2.0)),
    (priors.Laplace(0.3, 0.7), stats.laplace(0.3, 0.7)),
    (priors.StudentT(4.0, 0.3, 0.7), stats.t(4.0, 0.3, 0.7)),
    (priors.Cauchy(0.3, 0.7), stats.cauchy(0.3, 0.7)),
    (MIXTURE, _Mixture()),
    (priors.LogNormal(0.3, 0.7), stats.lognorm(0.7, scale=math.exp(0.3))),
    (priors.HalfCauchy(0.7), stats.halfcauchy(scale=0.7)),
]
each_case = pytest.mark.parametrize(("prior", "oracle"), CASES, ids=lambda case: getattr(case, "setting_name", ""))
REAL = [prior for prior, _ in CASES if not prior.positive]


def expectation(function: Any, mean: float, scale: float, breaks: tuple[float, ...] = ()) -> float:
    """E[function(w)] for w ~ N(mean, scale²), split where the function is not smooth."""
    density = stats.norm(mean, scale).pdf
    edges = sorted({mean - 12 * scale, *(b for b in (mean, *breaks) if abs(b - mean) < 12 * scale), mean + 12 * scale})
    weighted = lambda w: function(w) * density(w)  # noqa: E731
    return sum(integrate.quad(weighted, *ends, epsabs=1e-11, limit=200)[0] for ends in pairwise(edges))


def divergence(prior: Prior, mean: float, scale: float) -> float:
    def integrand(w: float) -> float:
        return float(stats.norm(mean, scale).logpdf(w) - prior.log_prob(torch.tensor(w, dtype=torch.float64)))

    return expectation(integrand, mean, scale, breaks=(0.3, 0.2))


@each_case
def test_log_densities(prior: Prior, oracle: Any) -> None:
    w = torch.linspace(-3, 3, 61, dtype=torch.float64)
    expected = torch.as_tensor(oracle.logpdf(w.numpy()), dtype=torch.float64)
    torch.testing.assert_close(prior.log_prob(w), expected, rtol=1e-12, atol=1e-12)


@each_case
def test_draws_follow_the_density(prior: Prior, oracle: Any, generator: torch.Generator) -> None:
    drawn = prior.sample((100, 50), dtype=torch.float64, generator=generator)
    assert drawn.shape == (100, 50)
    assert stats.kstest(drawn.flatten().numpy(), oracle.cdf).pvalue > 1e-3
    again = prior.sample((100, 50), dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    assert torch.equal(drawn, again)


@each_case
def test_moments_or_a_clear_sentence(prior: Prior, oracle: Any) -> None:
    if isinstance(prior, priors.Cauchy | priors.HalfCauchy):
        with pytest.raises(UnsupportedError, match="has no mean"):
            prior.mean()
        with pytest.raises(UnsupportedError, match="has no variance"):
            prior.variance()
    else:
        assert prior.mean() == pytest.approx(oracle.mean(), rel=1e-12)
        assert prior.variance() == pytest.approx(oracle.var(), rel=1e-12)


def test_student_t_has_moments_only_for_enough_degrees_of_freedom() -> None:
    assert priors.StudentT(1.5).mean() == 0.0
    for undefined in (priors.StudentT(1.0).mean, priors.StudentT(2.0).variance):
        with pytest.raises(UnsupportedError):
            undefined()


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (0.3, 0.05), (-1.2, 0.4), (2.0, 1.5)])
@pytest.mark.parametrize("prior", REAL, ids=lambda prior: prior.setting_name)
def test_divergence_of_a_normal_posterior(prior: Prior, mean: float, scale: float) -> None:
    expected = divergence(prior, mean, scale)
    q_mean, q_scale = (torch.tensor(v, dtype=torch.float64) for v in (mean, scale))
    exact = prior.kl(q_mean, q_scale)
    if exact is not None:
        assert exact.item() == pytest.approx(expected, rel=1e-8, abs=1e-8)
        return
    estimates = torch.stack([
        prior.summed_kl(q_mean.expand(50_000), q_scale.log().expand(50_000), generator=torch.Generator().manual_seed(s))
        for s in range(4)
    ]) / 50_000  # fmt: skip
    drawn = prior.log_prob(q_mean + q_scale * torch.randn(50_000, dtype=torch.float64))
    assert estimates.mean().item() == pytest.approx(expected, abs=5 * drawn.std().item() / math.sqrt(200_000))


def test_which_divergences_are_exact() -> None:
    one = torch.ones(())
    exact = {prior.setting_name for prior in REAL if prior.kl(one, one) is not None}
    assert exact == {"priors.Normal", "priors.Laplace"}


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0])
def test_the_three_constants_are_within_a_hundredth(ratio: float) -> None:
    """KL up to the constant that makes it 0 without signal: E log|t + ε| − E log|ε|."""
    euler = 0.5772156649015329
    exact = expectation(lambda w: math.log(abs(w)) if w else 0.0, ratio, 1.0, breaks=(0.0,)) + (euler + math.log(2)) / 2
    approximate = priors.LogUniform().kl(torch.tensor(0.3 * ratio), torch.tensor(0.3)).item()
    assert approximate == pytest.approx(exact, abs=0.01)


def test_log_uniform_rewards_noise() -> None:
    """Its divergence falls with α: the sign that one peer has the wrong way round."""
    scale = torch.linspace(0.1, 10, 50)
    assert bool((priors.LogUniform().kl(torch.ones(50), scale).diff() < 0).all())


def test_ard_is_the_best_normal_prior_of_each_weight() -> None:
    mean, scale = torch.tensor([[0.0, 0.5, -2.0], [0.1, 0.5, 0.2]], dtype=torch.float64)
    log_alpha = 2 * scale.log() - 2 * mean.abs().log()
    ard = priors.ARD().kl(mean, scale)
    torch.testing.assert_close(ard, 0.5 * torch.nn.functional.softplus(-log_alpha), rtol=1e-12, atol=0)
    fitted = priors.ARD().fitted(mean, scale)
    torch.testing.assert_close(fitted.kl(mean, scale), ard, rtol=1e-12, atol=1e-12)
    for factor in (0.9, 1.1):
        worse = priors.Normal(0.0, fitted.scale * factor)
        assert bool((worse.kl(mean, scale) > ard).all())


@pytest.mark.parametrize("prior", [priors.LogUniform(), priors.ARD()], ids=repr)
def test_sparse_priors_have_finite_gradients_everywhere(prior: Prior) -> None:
    mean = torch.tensor([0.0, 1e-30, 1e-8, 1.0, 100.0], requires_grad=True)
    log_scale = torch.tensor([-20.0, -3.0, 0.0, 3.0, -10.0], requires_grad=True)
    prior.summed_kl(mean, log_scale).backward()
    assert bool(mean.grad.isfinite().all())
    assert bool(log_scale.grad.isfinite().all())


def posterior_of(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(), 0.3 * draw() - 1


@pytest.mark.parametrize("loc", [0.0, 0.4, "tensor"])
@pytest.mark.parametrize("scale", [0.8, "tensor"])
def test_summed_divergence_is_that_of_torch(loc: Any, scale: Any) -> None:
    mean, log_scale = posterior_of(5, 4)
    loc = mean + 1 if loc == "tensor" else loc
    scale = torch.linspace(0.1, 2, 20, dtype=torch.float64).reshape(5, 4) if scale == "tensor" else scale
    wide = [torch.as_tensor(part, dtype=torch.float64) for part in (loc, scale)]
    theirs = distributions.kl_divergence(distributions.Normal(mean, log_scale.exp()), distributions.Normal(*wide))
    prior = priors.Normal(loc, scale)
    torch.testing.assert_close(prior.summed_kl(mean, log_scale), theirs.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(prior.kl(mean, log_scale.exp()), theirs, rtol=1e-10, atol=1e-12)


class TestEmpiricalBayes:
    def test_the_scale_is_the_best_one(self) -> None:
        mean, log_scale = posterior_of(6, 5)
        learned = priors.Normal(0.2, "learn")
        fitted = learned.fitted(mean, log_scale.exp())
        second_moment = ((mean - 0.2).square() + (2 * log_scale).exp()).mean()
        assert fitted.scale.item() == pytest.approx(second_moment.sqrt().item(), rel=1e-12)
        best = learned.summed_kl(mean, log_scale)
        torch.testing.assert_close(best, priors.Normal(0.2, fitted.scale.item()).summed_kl(mean, log_scale))
        torch.testing.assert_close(best, learned.kl(mean, log_scale.exp()).sum())
        for factor in (0.9, 1.1):
            assert best < priors.Normal(0.2, fitted.scale.item() * factor).summed_kl(mean, log_scale)

    def test_a_hyperprior_holds_it_back(self) -> None:
        mean, log_scale = posterior_of(3, 2)
        shape, rate = 2.01, 0.101
        prior = priors.Normal(0.0, "learn", (shape, rate))

        def objective(variance: Tensor) -> Tensor:
            hyper = stats.invgamma(shape, scale=rate).logpdf(float(variance))
            return priors.Normal(0.0, variance.sqrt().item()).summed_kl(mean, log_scale) - hyper

        learned = prior.fitted(mean, log_scale.exp()).scale ** 2
        total = (mean.square() + (2 * log_scale).exp()).sum()
        torch.testing.assert_close(learned, (total + 2 * rate) / (6 + 2 * shape + 2), rtol=1e-12, atol=0)
        torch.testing.assert_close(prior.summed_kl(mean, log_scale), objective(learned), rtol=1e-12, atol=0)
        assert all(objective(learned) < objective(learned * factor) for factor in (0.9, 1.1))

    @pytest.mark.parametrize("hyperprior", [None, (2.01, 0.101)])
    def test_the_gradient_does_not_see_the_scale_move(self, hyperprior: Any) -> None:
        """At its best value the scale has no gradient of its own, so a fixed scale gives the same gradients."""
        mean, log_scale = (part.requires_grad_() for part in posterior_of(4, 3))
        prior = priors.Normal(0.0, "learn", hyperprior)
        fixed = priors.Normal(0.0, prior.fitted(mean, log_scale.exp()).scale.item())
        slopes = torch.autograd.grad(prior.summed_kl(mean, log_scale), (mean, log_scale))
        expected = torch.autograd.grad(fixed.summed_kl(mean, log_scale), (mean, log_scale))
        torch.testing.assert_close(slopes, expected, rtol=1e-10, atol=1e-12)


def test_cauchy_divergence_of_a_cauchy_posterior() -> None:
    prior = priors.Cauchy(1.0, 0.1)
    for loc, scale in ((1.0, 0.1), (1.3, 0.4), (-2.0, 0.05)):
        q = stats.cauchy(loc, scale)
        expected = integrate.quad(
            lambda u, q=q: float(q.logpdf(q.ppf(u)) - stats.cauchy(1.0, 0.1).logpdf(q.ppf(u))), 0, 1, limit=500
        )[0]
        closed = prior.kl_from_cauchy(*(torch.tensor(v, dtype=torch.float64) for v in (loc, scale)))
        assert closed.item() == pytest.approx(expected, abs=1e-6)


class TestReferences:
    def test_centred_on_the_model(self) -> None:
        weights = torch.randn(3, 2)
        prior = priors.Normal("model", 0.1)
        with pytest.raises(InputError, match="call `resolve`"):
            prior.log_prob(weights)
        resolved = prior.resolve("fc.weight", weights)
        assert torch.equal(resolved.mean(), weights)
        assert resolved.kl(weights, torch.full_like(weights, 0.1)).abs().max() < 1e-6
        weights.zero_()  # the prior has its own copy
        assert bool((resolved.mean() != 0).any())

    def test_by_name(self) -> None:
        prior = priors.ByName({"head.*": priors.Normal(0, 2), "*": priors.Normal("model", 0.1)})
        weights = torch.ones(2)
        assert prior.resolve("head.weight", weights) == priors.Normal(0, 2)
        assert torch.equal(prior.resolve("body.weight", weights).mean(), weights)
        with pytest.raises(InputError, match="No pattern"):
            priors.ByName({"head.*": priors.Normal()}).resolve("body.weight", weights)
        with pytest.raises(InputError, match="call `resolve` with a name"):
            prior.log_prob(weights)

    def test_a_learned_scale_must_be_fitted_first(self) -> None:
        with pytest.raises(InputError, match="learns its scale"):
            priors.Normal(0.0, "learn").log_prob(torch.ones(2))
        for unknown in (priors.ARD().variance, lambda: priors.ARD().log_prob(torch.ones(2))):
            with pytest.raises(UnsupportedError, match="learns a variance"):
                unknown()


@pytest.mark.parametrize("prior", [priors.HalfCauchy(), priors.LogNormal()], ids=repr)
def test_a_positive_prior_is_refused_under_a_real_posterior(prior: Prior) -> None:
    with pytest.raises(InputError, match="only positive weights"):
        prior.summed_kl(torch.zeros(2), torch.zeros(2))
    with pytest.raises(InputError, match="only positive weights"):
        priors.ByName({"*": prior})
    assert prior.log_prob(torch.tensor(-1.0)).item() == -math.inf


def test_the_improper_prior_says_what_it_lacks() -> None:
    prior = priors.LogUniform()
    assert not prior.proper
    for lacking in (prior.mean, prior.variance, lambda: prior.sample((2,))):
        with pytest.raises(UnsupportedError):
            lacking()


@pytest.mark.parametrize(
    "make",
    [
        lambda: priors.Normal(0.0, 0.0),
        lambda: priors.Normal(0.0, "narrow"),
        lambda: priors.Normal("elsewhere"),
        lambda: priors.Normal(math.nan),
        lambda: priors.Normal(0.0, torch.tensor([1.0, -1.0])),
        lambda: priors.Normal(0.0, 1.0, hyperprior=(2.0, 1.0)),
        lambda: priors.Normal(0.0, "learn", hyperprior=(2.0, -1.0)),
        lambda: priors.Laplace(scale=-1.0),
        lambda: priors.Laplace(scale=True),
        lambda: priors.StudentT(df=0.0),
        lambda: priors.ScaleMixture(()),
        lambda: priors.ScaleMixture((1.0, 0.1), (0.5, 0.4)),
        lambda: priors.Cauchy(math.inf),
        lambda: priors.HalfCauchy("wide"),
        lambda: priors.ByName({}),
        lambda: priors.ByName("narrow"),
        lambda: priors.Normal(0.0, "learn", hyperprior=3.0),
        lambda: priors.ScaleMixture(1.0),
        lambda: priors.ScaleMixture((1.0, 0.1), 0.5),
    ],
)
def test_bad_settings_are_one_sentence(make: Any) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "prior",
    [*(prior for prior, _ in CASES), priors.Normal("model", "learn", (2.0, 0.1)), priors.ARD(), priors.LogUniform()],
    ids=repr,
)
def test_settings_travel(prior: Prior) -> None:
    from dubito import parse
    from dubito.core.settings import Setting

    assert parse(repr(prior)) == prior
    assert Setting.from_json(prior.to_json()) == prior


def test_tensors_travel_beside_the_json() -> None:
    from dubito.core.settings import Setting

    prior = priors.ByName({"w": priors.Normal(torch.randn(3), torch.rand(3) + 0.1)})
    tensors: dict[str, Tensor] = {}
    assert Setting.from_json(prior.to_json(tensors), tensors) == prior
