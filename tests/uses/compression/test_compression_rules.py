"""Pruning rules against their closed forms, and what each refuses."""

from __future__ import annotations

import math

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.rules import (
    LogAlpha,
    Magnitude,
    ModelReduction,
    PosteriorDamage,
    Random,
    SignalToNoise,
    WeightStatistics,
    ZeroDensity,
)
from scipy import stats

from dubito import parse, rules
from dubito.core.settings import Setting

MEAN = {"a.weight": torch.tensor([[0.5, -0.01], [2.0, 0.3]]), "b.weight": torch.tensor([[-1.0, 0.02]])}
SCALE = {"a.weight": torch.tensor([[0.1, 0.2], [1.0, 0.3]]), "b.weight": torch.tensor([[0.5, 0.4]])}
VARIANCE = {name: value.square() for name, value in SCALE.items()}
PRIOR = ({n: torch.full_like(m, 0.1) for n, m in MEAN.items()}, {n: torch.full_like(m, 0.49) for n, m in MEAN.items()})
STATISTICS = WeightStatistics(MEAN, VARIANCE, {n: 1 / v for n, v in VARIANCE.items()}, PRIOR)


def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in values.values()])


def test_the_signal_to_noise_is_mean_over_standard_deviation() -> None:
    assert torch.allclose(flat(SignalToNoise().scores(STATISTICS)), flat(MEAN).abs() / flat(SCALE), rtol=1e-6)


def test_the_signal_to_noise_uses_no_variance_for_a_deviation() -> None:
    """The seed's rule, log|μ| − log σ², keeps this weight although its mean is 18 times smaller than its deviation."""
    mean, scale = torch.tensor([1e-3]), torch.tensor([0.0183])
    assert mean.log() - scale.square().log() > 0  # "keep", by variance
    statistics = WeightStatistics({"w": mean}, {"w": scale.square()}, {})
    assert not SignalToNoise(1.0).keep(SignalToNoise(1.0).relevance(statistics))["w"].any()


@pytest.mark.parametrize("rule", [SignalToNoise(1.0), LogAlpha(1.0), ModelReduction(), PosteriorDamage(0.5)])
def test_rules_do_not_depend_on_the_unit_of_the_weights(rule: rules.Rule) -> None:
    unit = 1000.0
    scaled = WeightStatistics(
        {n: unit * v for n, v in MEAN.items()},
        {n: unit**2 * v for n, v in VARIANCE.items()},
        {n: v / unit**2 for n, v in STATISTICS.precision.items()},
        ({n: unit * v for n, v in PRIOR[0].items()}, {n: unit**2 * v for n, v in PRIOR[1].items()}),
    )
    expected, found = (rule.keep(rule.relevance(statistics)) for statistics in (STATISTICS, scaled))
    assert all(torch.equal(expected[name], found[name]) for name in MEAN)


def test_zero_density_is_the_log_density_at_zero() -> None:
    expected = stats.norm.logpdf(0.0, flat(MEAN).numpy(), flat(SCALE).numpy())
    assert torch.allclose(flat(ZeroDensity().scores(STATISTICS)), torch.from_numpy(expected), rtol=1e-5)


def test_log_alpha() -> None:
    assert torch.allclose(flat(LogAlpha().scores(STATISTICS)), 2 * (flat(SCALE) / flat(MEAN).abs()).log(), atol=1e-6)
    zero = WeightStatistics({"w": torch.zeros(1)}, {"w": torch.ones(1)}, {})
    assert not LogAlpha(3).keep(LogAlpha(3).relevance(zero))["w"].any()  # a mean of zero has an infinite α


def test_model_reduction_is_the_savage_dickey_ratio() -> None:
    posterior = stats.norm.logpdf(0.0, flat(MEAN).numpy(), flat(SCALE).numpy())
    prior = stats.norm.logpdf(0.0, 0.1, 0.7)
    found = flat(ModelReduction().scores(STATISTICS)).numpy()
    clear = (flat(VARIANCE) < 0.49).numpy()
    assert abs(found - (posterior - prior))[clear].max() < 1e-5


def test_model_reduction_is_the_change_of_the_exact_evidence() -> None:
    """Linear regression with one weight: evidence of y = 0 + noise minus that of y = wx + noise."""
    x, y = torch.tensor([1.0, -0.5, 2.0]).double(), torch.tensor([0.3, 0.1, 0.2]).double()
    precision = 1 / 4.0 + x.dot(x)
    mean, variance = x.dot(y) / precision, 1 / precision
    whole = torch.distributions.MultivariateNormal(
        torch.zeros(3).double(), torch.eye(3).double() + 4 * torch.outer(x, x)
    )
    without = torch.distributions.Normal(0.0, 1.0).log_prob(y).sum()
    statistics = WeightStatistics(
        {"w": mean[None]}, {"w": variance[None]}, {}, ({"w": torch.zeros(1)}, {"w": torch.tensor([4.0])})
    )
    assert float(ModelReduction().scores(statistics)["w"]) == pytest.approx(
        float(without - whole.log_prob(y)), abs=1e-12
    )


def test_model_reduction_removes_weights_without_curvature() -> None:
    """Their posterior is the prior; a mean left over from the start of training is no evidence."""
    prior = ({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    statistics = WeightStatistics({"w": torch.tensor([0.5, 0.5])}, {"w": torch.tensor([1.0, 0.01])}, {}, prior)
    assert ModelReduction().keep(ModelReduction().relevance(statistics))["w"].tolist() == [False, True]


def test_model_reduction_says_that_it_needs_a_proper_prior() -> None:
    statistics = WeightStatistics(MEAN, VARIANCE, {}, None, "A log-uniform prior is improper and has no mean.")
    with pytest.raises(UnsupportedError, match=r"proper prior.*improper.*LogAlpha"):
        ModelReduction().relevance(statistics)


def test_the_three_damages() -> None:
    mean, precision = flat(MEAN), flat(STATISTICS.precision)
    assert torch.allclose(flat(PosteriorDamage(0.5).scores(STATISTICS)), precision * mean**2, rtol=1e-5)
    assert torch.allclose(
        flat(PosteriorDamage(0.5, kind="obs").scores(STATISTICS)), mean**2 / flat(VARIANCE) / 2, rtol=1e-5
    )
    data = (precision - 1 / 0.49).clamp_min(0)
    assert torch.allclose(flat(PosteriorDamage(0.5, kind="obd").scores(STATISTICS)), data * mean**2 / 2, rtol=1e-4)


def test_magnitude_and_random() -> None:
    assert torch.equal(flat(Magnitude(0.5).scores(STATISTICS)), flat(MEAN).abs())
    draws = [flat(Random(0.5).scores(STATISTICS, generator=torch.Generator().manual_seed(s))) for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("target", [0.0, 1 / 6, 0.5, 1.0])
def test_a_target_removes_exactly_that_many(target: float) -> None:
    tied = {"a": torch.ones(4), "b": torch.ones(2)}
    masks = Magnitude(target).keep(tied)
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(6 * target)


def test_a_target_by_layer() -> None:
    relevance = {"a.weight": torch.tensor([1.0, 2.0]), "b.weight": torch.tensor([10.0, 20.0])}
    together = Magnitude(0.5).keep(relevance)
    assert [together[n].tolist() for n in relevance] == [[False, False], [True, True]]
    each = Magnitude(0.5, scope="layer").keep(relevance)
    assert [each[n].tolist() for n in relevance] == [[False, True], [False, True]]
    named = Magnitude({"b": 0.5}).keep(relevance)
    assert [named[n].tolist() for n in relevance] == [[True, True], [False, True]]
    pattern = SignalToNoise({"*.weight": 15.0}).keep(relevance)
    assert [pattern[n].tolist() for n in relevance] == [[False, False], [False, True]]


def test_weights_that_are_not_random_stay() -> None:
    statistics = WeightStatistics({"w": torch.tensor([1e-9, 1e-9])}, {"w": torch.tensor([0.0, 1.0])}, {})
    for rule in (SignalToNoise(1.0), LogAlpha(3), SignalToNoise(target=1.0)):
        assert rule.keep(rule.relevance(statistics))["w"].tolist() == [True, False]


def test_a_point_has_no_signal_to_noise() -> None:
    statistics = WeightStatistics(MEAN, {n: torch.zeros_like(v) for n, v in MEAN.items()}, {})
    with pytest.raises(UnsupportedError, match="needs a posterior with variances above 0"):
        SignalToNoise(1.0).relevance(statistics)
    assert Magnitude(0.5).relevance(statistics)


def test_groups_are_reduced() -> None:
    rows = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    expected = {"max": [3.0, 2.0], "mean": [2.0, 2.0], "sum": [4.0, 4.0], "norm": [math.sqrt(10), math.sqrt(8)]}
    for reduce, values in expected.items():
        assert Magnitude(0.5, reduce=reduce).reduced(rows).tolist() == pytest.approx(values)  # type: ignore[arg-type]
    assert LogAlpha(3).reduced(rows).tolist() == [3.0, 2.0]
    assert ModelReduction().reduced(rows).tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Magnitude(1.5), "fraction from 0 to 1"),
        (lambda: Magnitude({"a": -0.1}), "fraction from 0 to 1"),
        (lambda: SignalToNoise("high"), "must be a number"),
        (lambda: SignalToNoise(math.nan), "must be a number"),
        (lambda: SignalToNoise(1.0, target=0.5), "one of threshold, target and max_drop"),
        (lambda: LogAlpha(scope="all"), "'global' or 'layer'"),
        (lambda: LogAlpha(reduce="median"), "Did you mean 'mean'"),
        (lambda: LogAlpha(reduce="norm"), "one of max, mean, sum, got"),
        (lambda: Magnitude(max_drop={"a": 0.1}), "fraction from 0 to 1"),
        (lambda: PosteriorDamage(0.5, kind="hessian"), "must be 'opd', 'obd' or 'obs', got 'hessian'"),
        (lambda: Magnitude().keep(MEAN), "does not say how much to remove"),
        (lambda: ZeroDensity().keep(MEAN), "does not say how much to remove"),
        (lambda: Magnitude({"c": 0.5}).keep(MEAN), "names 'c'"),
        (lambda: SignalToNoise(max_drop=0.01).keep(MEAN), "held-out data"),
    ],
)
def test_bad_settings_are_one_sentence(make, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    "rule",
    [LogAlpha(3), SignalToNoise({"a": 1.0}), PosteriorDamage(0.9, kind="obs", update=True), Random(max_drop=0.1)],
)
def test_rules_travel(rule: rules.Rule) -> None:
    assert Setting.from_json(rule.to_json()) == rule
    assert hash(rule) == hash(rule.replace())


def test_rules_are_read_from_text() -> None:
    assert parse("rules.LogAlpha(3)") == LogAlpha(3)
    assert parse("rules.magnitude(0.9)") == Magnitude(0.9)


def test_the_old_name_of_weight_statistics_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match=r"rules\.WeightStatistics"):
        assert rules.Belief is rules.WeightStatistics
