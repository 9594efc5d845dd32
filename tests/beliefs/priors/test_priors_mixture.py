"""The learned mixture: its density, its components, and weights that share few values."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.priors import Mixture
from scipy import stats
from torch import Tensor, nn

import dubito
from dubito import MAP, Training, Variational, data, priors
from dubito.core import params
from dubito.core.settings import Setting
from dubito.uses.compression.sharing import Codes, share_weights, shared_network

pytestmark = pytest.mark.slow


def known() -> Mixture:
    """A mixture of three with numbers of its own: shares 0.5, 0.375 and 0.125."""
    values = ([-1.0, 2.0], [0.1, 0.3, 0.5], [0.75, 0.25])
    means, scales, shares = (torch.tensor(v, dtype=torch.float64) for v in values)
    mixture = Mixture(3, zero_share=0.5, zero_hyperprior=(3.0, 0.5), hyperprior=(2.0, 0.2))
    return mixture.replace(means=means, log_scales=scales.log(), logits=shares.log())


PARTS = [(0.5, 0.0, 0.1), (0.375, -1.0, 0.3), (0.125, 2.0, 0.5)]


def density(w: Tensor) -> Tensor:
    return torch.as_tensor(sum(share * stats.norm(mean, scale).pdf(w.numpy()) for share, mean, scale in PARTS))


def test_density_and_moments() -> None:
    w = torch.linspace(-3, 4, 50, dtype=torch.float64)
    torch.testing.assert_close(known().log_prob(w), density(w).log(), rtol=1e-12, atol=1e-12)
    mean = sum(share * center for share, center, _ in PARTS)
    assert known().mean().item() == pytest.approx(mean, rel=1e-12)
    second = sum(share * (center**2 + scale**2) for share, center, scale in PARTS)
    assert known().variance().item() == pytest.approx(second - mean**2, rel=1e-12)


def test_draws_follow_the_density(generator: torch.Generator) -> None:
    drawn = known().sample((5000,), dtype=torch.float64, generator=generator)
    cdf = lambda w: sum(share * stats.norm(mean, scale).cdf(w) for share, mean, scale in PARTS)  # noqa: E731
    assert stats.kstest(drawn.numpy(), cdf).pvalue > 1e-3


def test_the_penalty_is_the_hyperprior_of_the_precisions() -> None:
    expected = -stats.gamma(3.0, scale=1 / 0.5).logpdf(0.1**-2)
    expected -= sum(stats.gamma(2.0, scale=1 / 0.2).logpdf(scale**-2) for scale in (0.3, 0.5))
    assert known().penalty().item() == pytest.approx(expected, rel=1e-10)
    assert known().replace(zero_hyperprior=None, hyperprior=None).penalty().item() == 0.0


def test_the_divergence_is_unbiased_and_learns() -> None:
    """One draw per weight; quadrature of the same integral, plus the penalty."""
    mixture = known()
    leaves = {name: getattr(mixture, name).clone().requires_grad_() for name in mixture.learned_fields}
    mixture = mixture.replace(**leaves)
    mean, scale = torch.full((100_000,), -0.8, dtype=torch.float64), 0.2
    found = mixture.summed_kl(mean, torch.full_like(mean, math.log(scale)), generator=torch.Generator().manual_seed(0))
    grid = torch.linspace(-0.8 - 12 * scale, -0.8 + 12 * scale, 20_001, dtype=torch.float64)
    q = torch.distributions.Normal(torch.tensor(-0.8).double(), scale).log_prob(grid)
    expected = torch.trapezoid(q.exp() * (q - density(grid).log()), grid)
    assert ((found - mixture.penalty()) / len(mean)).item() == pytest.approx(expected.item(), abs=0.02)
    assert all(bool((slope != 0).any()) for slope in torch.autograd.grad(found, list(leaves.values())))


def test_the_start_covers_the_weights() -> None:
    weights = torch.tensor([[-0.7, 0.1], [0.3, 0.5]])
    mixture = Mixture(5, hyperprior=None).resolve("weight", weights)
    torch.testing.assert_close(mixture.codebook(), torch.tensor([0.0, -0.7, -0.7 / 3, 0.7 / 3, 0.7]))
    assert mixture.resolve("weight", 2 * weights) is mixture  # values it has are kept
    shares = mixture._numbers()[2].exp()
    torch.testing.assert_close(shares, torch.tensor([0.99, 0.0025, 0.0025, 0.0025, 0.0025]))
    with pytest.raises(InputError, match="call `resolve`"):
        Mixture().log_prob(weights)


def test_weights_go_to_the_component_that_is_most_probable() -> None:
    w = torch.tensor([[0.0, -0.9], [0.31, 1.8]], dtype=torch.float64)
    assert known().assign(w).dtype == torch.uint8
    joint = [[share * stats.norm(m, s).pdf(v) for share, m, s in PARTS] for v in w.flatten().tolist()]
    assert [row.index(max(row)) for row in joint] == known().assign(w).flatten().tolist()


def test_components_that_are_the_same_become_one() -> None:
    means = torch.tensor([0.5, -1.0, 0.5], dtype=torch.float64)
    scales = torch.tensor([0.1, 0.2, 0.3, 0.2], dtype=torch.float64)
    mixture = Mixture(4, zero_share=0.5, hyperprior=None, zero_hyperprior=None)
    mixture = mixture.replace(means=means, log_scales=scales.log(), logits=torch.zeros(3, dtype=torch.float64))
    merged = mixture.merged()
    assert merged.components == 3
    assert merged.codebook().tolist() == pytest.approx([0.0, -1.0, 0.5])
    w = torch.linspace(-2, 2, 30, dtype=torch.float64)
    torch.testing.assert_close(merged.log_prob(w), mixture.log_prob(w), rtol=1e-10, atol=1e-10)
    assert mixture.replace(means=means + torch.tensor([0.01, 0, 0])).merged().components == 4


def test_bad_settings_are_one_sentence() -> None:
    with pytest.raises(InputError, match="`components` must be a whole number from 2 to 256, got 1"):
        Mixture(1)
    with pytest.raises(InputError, match="a number above 0 and below 1, got"):
        Mixture(zero_share=1.0)
    with pytest.raises(InputError, match="a tuple of 2, each a positive number"):
        Mixture(hyperprior=(1.0, -1.0))
    with pytest.raises(InputError, match="a tuple of 2, each a positive number"):
        Mixture(zero_hyperprior=5.0)
    with pytest.raises(InputError, match="a number above 0 and below 1, got"):
        Mixture(zero_share="half")


def test_it_travels() -> None:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(known().to_json(tensors))
    assert Setting.from_json(json.loads(text), tensors) == known()


@cache
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    found = data.load("digits")
    return found.train, found.test


@cache
def point() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
    return MAP().fit(model, digits()[0], training=Training(epochs=15, lr=3e-3), progress=False).model


@torch.no_grad()
def accuracy(network: nn.Module) -> float:
    x, y = digits()[1]
    return (network(x).argmax(1) == y).double().mean().item()


def distortion(codes: dict[str, Codes], weights: dict[str, Tensor]) -> float:
    """The share of the squared weights that is lost when they are replaced by what their codes stand for."""
    lost = sum((code.weights - weights[name]).square().sum() for name, code in codes.items())
    return float(lost / sum(weights[name].square().sum() for name in codes))


class TestSharing:
    def test_retraining_makes_weights_share_values(self, tmp_path: Path) -> None:
        mixture = Mixture(8, zero_share=0.5, zero_hyperprior=(100.0, 0.01), hyperprior=(100.0, 0.01))
        recipe = MAP(prior=mixture, prior_weight=0.3)
        training = Training(epochs=40, lr=3e-3, schedule="linear")
        posterior = recipe.fit(point(), digits()[0], training=training, progress=False)
        codes = share_weights(posterior, tolerance=1e-2)
        assert codes.keys() == {"1.weight", "3.weight"}
        for name, code in codes.items():
            assert code.indices.dtype == torch.uint8
            assert code.indices.shape == posterior.mean()[name].shape
            assert code.bits <= 3
        zeros = torch.cat([(code.indices == 0).flatten() for code in codes.values()])
        assert float(zeros.double().mean()) > 0.3
        before = mixture.resolve("", torch.cat([p.flatten() for p in point().parameters()]).detach())
        plain = {n: Codes(before.assign(w), before.codebook()) for n, w in params.of(point()).items() if n in codes}
        assert distortion(codes, posterior.mean()) < 1e-3 < distortion(plain, params.of(point()))
        assert accuracy(shared_network(posterior, codes)) > accuracy(point()) - 0.02
        posterior.save(tmp_path / "point")
        again = dubito.load(tmp_path / "point", point())
        assert all(torch.equal(share_weights(again)[n].indices, share_weights(posterior)[n].indices) for n in codes)

    def test_under_a_variational_posterior_each_parameter_has_its_own(self) -> None:
        recipe = Variational(prior=Mixture(4, zero_share=0.9), temperature=0.1)
        posterior = recipe.fit(point(), digits()[0], training=Training(epochs=2), progress=False)
        codes = share_weights(posterior)
        assert not torch.equal(codes["1.weight"].codebook, codes["3.weight"].codebook)
        learned, start = posterior.priors["1.weight"], Mixture(4).resolve("", params.of(point())["1.weight"])  # type: ignore[attr-defined]
        assert not torch.equal(learned.means, start.means)
        assert all(not getattr(learned, name).requires_grad for name in Mixture.learned_fields)

    def test_without_a_mixture(self) -> None:
        posterior = MAP(train=False).fit(point(), digits()[0], progress=False)
        with pytest.raises(UnsupportedError, match="not trained under a mixture"):
            share_weights(posterior)


class TestAnyPriorOfAPoint:
    def test_the_most_probable_weight_under_a_laplace_prior(self) -> None:
        """One weight, Gaussian noise 1, y = w x: soft thresholding of the least-squares weight."""
        x, model = torch.ones(50, 1, dtype=torch.float64), nn.Linear(1, 1, bias=False).double()
        y = torch.full((50, 1), 0.8, dtype=torch.float64)
        recipe = MAP(prior=priors.Laplace(0.0, 0.1))
        training = Training(epochs=400, lr=3e-2, batch_size=50, schedule="cosine")
        likelihood = dubito.likelihoods.Gaussian(noise=1.0)
        found = recipe.fit(model, (x, y), likelihood=likelihood, training=training, progress=False)
        assert found.mean()["weight"].item() == pytest.approx(0.8 - 10 / 50, abs=2e-3)
        mean, variance = found.prior()
        assert mean["weight"].item() == 0.0
        assert variance["weight"].item() == pytest.approx(0.02)

    def test_refusals(self) -> None:
        with pytest.raises(InputError, match="either prior or prior_precision"):
            MAP(prior=priors.Normal(), prior_precision=1.0)
        with pytest.raises(InputError, match="improper"):
            MAP(prior=priors.LogUniform())
        with pytest.raises(InputError, match="`prior_weight` must be a positive number"):
            MAP(prior=priors.Normal(), prior_weight=0.0)
        with pytest.raises(InputError, match=r"one of dubito\.priors"):
            MAP(prior="laplace")  # type: ignore[arg-type]
        with pytest.raises(InputError, match="only positive"):
            MAP(prior=priors.HalfCauchy())

    def test_the_evidence_chooses_no_other_prior(self) -> None:
        data, training = (torch.randn(8, 2), torch.randint(2, (8,))), Training(epochs=1, evidence_every=1)
        with pytest.raises(InputError, match="evidence_every chooses the precision of a normal prior"):
            MAP(prior=priors.Laplace()).fit(nn.Linear(2, 2), data, training=training, progress=False)

    def test_biases_have_a_flat_prior(self) -> None:
        data = (torch.randn(8, 2), torch.randint(2, (8,)))
        posterior = MAP(prior=priors.Normal()).fit(nn.Linear(2, 2), data, training=Training(epochs=1), progress=False)
        with pytest.raises(UnsupportedError, match="flat prior"):
            posterior.prior()
