"""Factors: draws, moments, and divergences against Monte Carlo in float64."""

from __future__ import annotations

import math

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.rank1 import Rank1
from torch import distributions as d

from dubito import priors
from dubito.methods.rank1 import families

LOC = torch.tensor([0.7, 1.0, 1.4, -0.5], dtype=torch.float64)
SCALE = torch.tensor([0.05, 0.2, 0.5, 0.1], dtype=torch.float64)
ONE = torch.ones((), dtype=torch.float64)
DRAWS = 400_000


def torch_version(family: str) -> d.Distribution:
    kind = {"normal": d.Normal, "cauchy": d.Cauchy, "log-normal": d.LogNormal}[family]
    return kind(LOC, SCALE)


PAIRS = [
    ("normal", priors.Normal(1.0, 0.1), d.Normal(ONE, 0.1 * ONE)),
    ("cauchy", priors.Cauchy(1.0, 0.1), d.Cauchy(ONE, 0.1 * ONE)),
    ("log-normal", priors.LogNormal(0.0, 0.3), d.LogNormal(0 * ONE, 0.3 * ONE)),
]


@pytest.mark.parametrize(("family", "prior", "reference"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_closed_forms_agree_with_monte_carlo(family: str, prior: priors.Prior, reference: d.Distribution) -> None:
    q = torch_version(family)
    torch.manual_seed(0)
    drawn = q.sample((DRAWS,))
    terms = q.log_prob(drawn) - reference.log_prob(drawn)
    for i in range(len(LOC)):
        exact = families.kl_divergence(family, prior, LOC[i : i + 1], SCALE[i : i + 1].log())
        error = terms[:, i].std() / math.sqrt(DRAWS)
        assert abs(float(exact - terms[:, i].mean())) < 5 * float(error)


@pytest.mark.parametrize(
    ("family", "prior", "reference"),
    [
        ("normal", priors.Cauchy(1.0, 0.5), d.Cauchy(1.0, 0.5)),
        ("log-normal", priors.HalfCauchy(2.0), d.HalfCauchy(2.0)),
        ("log-normal", priors.Normal(1.0, 1.0), d.Normal(1.0, 1.0)),
        ("cauchy", priors.StudentT(3.0), d.StudentT(3.0)),
    ],
)
def test_estimates_are_unbiased(family: str, prior: priors.Prior, reference: d.Distribution) -> None:
    loc, scale = LOC[:1].clamp_max(0.5), SCALE[:1]
    count = 200_000
    generator = torch.Generator().manual_seed(1)
    many = (
        families.kl_divergence(family, prior, loc.expand(count), scale.log().expand(count), generator=generator) / count
    )
    q = {"normal": d.Normal, "cauchy": d.Cauchy, "log-normal": d.LogNormal}[family](loc, scale)
    drawn = q.sample((count,))
    terms = q.log_prob(drawn) - reference.log_prob(drawn)
    assert float((many - terms.mean()).abs()) < 6 * float(terms.std()) / math.sqrt(count) * math.sqrt(2)


def test_log_uniform_has_the_right_sign() -> None:
    """Against quadrature: E_q log|w| − entropy, up to the constant that makes it 0 for infinite noise."""
    grid = torch.linspace(-12, 12, 240_001, dtype=torch.float64) + 1e-7

    def exact(mean: float, scale: float) -> float:
        log_q = d.Normal(0.0, 1.0).log_prob(grid)
        inside = log_q.exp() * (log_q - math.log(scale) + (mean + scale * grid).abs().log())
        return float(torch.trapezoid(inside, grid))

    at_infinity = exact(0.0, 1.0)
    found = []
    for mean, scale in ((1.0, 0.1), (1.0, 0.5), (1.0, 2.0)):
        one = torch.tensor([mean], dtype=torch.float64)
        found.append(
            float(families.kl_divergence("normal", priors.LogUniform(), one, torch.full_like(one, scale).log()))
        )
        assert abs(found[-1] - (exact(mean, scale) - at_infinity)) < 0.02
    assert found[0] > found[1] > found[2] > 0  # more noise costs less


def test_points_pay_the_density_of_the_prior() -> None:
    found = families.kl_divergence("delta", priors.Normal(1.0, 0.1), LOC, None)
    torch.testing.assert_close(found, -d.Normal(ONE, 0.1 * ONE).log_prob(LOC).sum(), rtol=1e-12, atol=0)
    assert float(families.kl_divergence("delta", None, LOC, None)) == 0


@pytest.mark.parametrize("family", ["normal", "log-normal"])
def test_draws_have_the_stated_moments(family: str) -> None:
    loc, scale = torch.tensor([0.2], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    drawn = families.draw(family, loc.expand(DRAWS), scale, generator=torch.Generator().manual_seed(0))
    mean, variance = families.moments(family, loc, scale)
    assert abs(float(drawn.mean() - mean)) < 5 * math.sqrt(float(variance) / DRAWS)
    torch.testing.assert_close(drawn.var(), variance[0], rtol=0.02, atol=0)


def test_cauchy_draws_have_the_stated_quantiles_and_are_clipped() -> None:
    loc, scale = torch.tensor([1.0], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    drawn = families.draw("cauchy", loc.expand(DRAWS), scale, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
    torch.testing.assert_close(drawn.quantile(levels), d.Cauchy(1.0, 0.3).icdf(levels), rtol=0.02, atol=0.01)
    assert float(drawn.min()) == -10
    assert float(drawn.max()) == 10
    assert float(families.draw("log-normal", loc * 20, scale)) == pytest.approx(10)
    with pytest.raises(UnsupportedError, match="neither mean nor variance"):
        families.moments("cauchy", loc, scale)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"prior": priors.HalfCauchy(), "family": "normal"}, "only positive factors"),
        ({"prior": priors.LogNormal(), "family": "cauchy"}, "only positive factors"),
        ({"prior": priors.LogNormal(), "family": "delta"}, "only positive factors"),
        ({"prior": priors.Normal(1.0, 0.1), "family": "cauchy"}, "infinite"),
        ({"prior": priors.LogUniform(), "family": "delta"}, "no highest density"),
        ({"prior": priors.ARD(), "family": "log-normal"}, "normal factors only"),
        ({"prior": None}, "needs a prior"),
        ({"prior": priors.Normal("model", 0.1)}, "is for weights"),
        ({"prior": "normal"}, "must be one of dubito.priors"),
        ({"components": 0}, "at least 1"),
        ({"components": True}, "at least 1"),
        ({"components": 2.5}, "at least 1"),
        ({"family": "gauss"}, "must be 'normal', 'cauchy'"),
        ({"factors": "none"}, "`factors` must be 'both'"),
        ({"bound": "mixture", "batch": "split"}, "needs every component"),
        ({"kl_warmup": 2.0}, "`kl_warmup` must be a number from 0 to 1, got 2.0"),
        ({"weight_decay": -1.0}, "`weight_decay` must be a number of at least 0, got -1.0"),
        ({"initial_scale": 0.0}, "`initial_scale` must be a positive number, got 0.0"),
        ({"start": "warm"}, "'model', 'fresh', 'head' or a posterior"),
    ],
)
def test_bad_settings_are_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as raised:
        Rank1(**settings)  # type: ignore[arg-type]
    assert str(raised.value).endswith(".")
    assert "\n" not in str(raised.value)
