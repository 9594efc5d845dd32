"""Log-probabilities against torch and scipy, predictions, tempering, settings, and the errors of every likelihood."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Ordinal, resolve
from scipy import stats
from torch import Tensor
from torch.nn import functional

from dubito.core.grammar import parse
from dubito.core.settings import Setting
from oracles import fixed_normal


def _labels(num_classes: int, *shape: int) -> Tensor:
    labels = torch.randint(num_classes, shape, generator=torch.Generator().manual_seed(1))
    return torch.where(torch.arange(labels.numel()).reshape(shape) % 4 == 2, -100, labels)


# Values


@pytest.mark.parametrize(
    ("shape", "class_axis"), [((6, 5), 1), ((3, 4, 5), 2), ((2, 5, 3, 4), 1), ((2, 5, 2, 3, 2), 1)]
)
def test_categorical_equals_cross_entropy(shape: tuple[int, ...], class_axis: int) -> None:
    logits = fixed_normal(*shape)
    targets = _labels(5, *(size for axis, size in enumerate(shape) if axis != class_axis))
    losses = functional.cross_entropy(logits.movedim(class_axis, 1), targets, reduction="none")
    values = Categorical().log_prob(logits, targets)
    torch.testing.assert_close(values, -losses.reshape(shape[0], -1).sum(1), rtol=1e-13, atol=1e-13)
    assert Categorical().canonical(logits).shape == (*targets.shape, 5)


def test_ignored_positions_give_nothing_even_where_they_are_nan() -> None:
    targets = torch.tensor([[0, -100], [1, 2]])
    logits = fixed_normal(2, 2, 3)
    logits[0, 1] = math.nan
    likelihood = Categorical()
    generator = torch.Generator().manual_seed(0)
    assert likelihood.log_prob(logits, targets)[0] == likelihood.log_prob(logits[:1, :1], targets[:1, :1])[0]
    assert (likelihood.gradient(logits, targets)[0, 1] == 0).all()
    assert (likelihood.hessian(logits, targets)[0, 1] == 0).all()
    assert (likelihood.hessian_root(logits, targets)[:, 0, 1] == 0).all()
    assert (likelihood.fisher_columns(logits, 2, targets, generator=generator)[:, 0, 1] == 0).all()
    assert likelihood.observed(targets).tolist() == [[True, False], [True, True]]


def test_labels_of_small_integer_types() -> None:
    logits, targets = fixed_normal(3, 4), torch.tensor([0, 3, 2])
    expected = Categorical().log_prob(logits, targets)
    for dtype in (torch.uint8, torch.int8, torch.int32):
        Categorical().check(logits, targets.to(dtype))
        assert torch.equal(Categorical().log_prob(logits, targets.to(dtype)), expected)
        assert torch.equal(Categorical().gradient(logits, targets.to(dtype)), Categorical().gradient(logits, targets))


def test_bernoulli_equals_binary_cross_entropy_and_two_classes() -> None:
    logits, targets = 3 * fixed_normal(5, 3), (fixed_normal(5, 3, seed=2) > 0).double()
    expected = -functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
    torch.testing.assert_close(Bernoulli().log_prob(logits, targets), expected, rtol=1e-13, atol=1e-13)
    two = torch.stack([torch.zeros_like(logits), logits], -1)
    torch.testing.assert_close(Categorical().log_prob(two, targets.long()), expected, rtol=1e-13, atol=1e-13)


def test_gaussians_equal_scipy() -> None:
    outputs, targets = fixed_normal(5, 2), fixed_normal(5, 2, seed=3)
    expected = stats.norm.logpdf(targets, outputs, 0.3).sum(1)
    torch.testing.assert_close(
        Gaussian(noise=0.3).log_prob(outputs, targets), torch.as_tensor(expected), rtol=1e-12, atol=0
    )
    log_variances = fixed_normal(5, 2, seed=4)
    expected = stats.norm.logpdf(targets, outputs, (0.5 * log_variances).exp()).sum(1)
    joined = torch.cat([outputs, log_variances], 1)
    torch.testing.assert_close(
        HeteroscedasticGaussian().log_prob(joined, targets), torch.as_tensor(expected), rtol=1e-12, atol=0
    )


def test_a_column_never_broadcasts_against_a_row() -> None:
    outputs, targets = fixed_normal(6), fixed_normal(6, seed=1)
    expected = Gaussian(noise=1).log_prob(outputs, targets)
    assert expected.shape == (6,)
    for f, y in ((outputs[:, None], targets), (outputs, targets[:, None]), (outputs[:, None], targets[:, None])):
        assert torch.equal(Gaussian(noise=1).log_prob(f, y), expected)
        assert torch.equal(Bernoulli().log_prob(f, (y > 0)), Bernoulli().log_prob(outputs, targets > 0))


def test_samples_have_the_models_moments() -> None:
    num, generator = 40_000, torch.Generator().manual_seed(0)
    probs = torch.tensor([0.7, 0.2, 0.1])
    drawn = Categorical().sample(probs.log().expand(num, 3), generator=generator)
    error = (probs * (1 - probs) / num).sqrt()
    assert ((drawn.bincount(minlength=3) / num - probs).abs() < 5 * error).all()
    yes = Bernoulli().sample(torch.full((num,), math.log(0.2 / 0.8)), generator=generator)
    assert abs(yes.mean().item() - 0.2) < 5 * math.sqrt(0.16 / num)
    images = Categorical().sample(fixed_normal(2, 3, 4, 5), generator=generator)
    assert images.shape == (2, 4, 5)
    for likelihood, outputs in (
        (Gaussian(noise=0.5), torch.full((num,), 3.0)),
        (HeteroscedasticGaussian(), torch.tensor([3.0, math.log(0.25)]).expand(num, 2)),
    ):
        values = likelihood.sample(outputs, generator=generator)
        assert abs(values.mean().item() - 3) < 5 * 0.5 / math.sqrt(num)
        assert abs(values.var().item() - 0.25) < 5 * 0.25 * math.sqrt(2 / num)


# Predictions


POINT_CASES = {
    "categorical": (Categorical(), fixed_normal(4, 5), torch.tensor([0, 4, 2, 1])),
    "sequence": (Categorical(), fixed_normal(3, 2, 5), torch.tensor([[0, 4], [2, 1], [3, 3]])),
    "image": (Categorical(), fixed_normal(2, 5, 3, 4), _labels(5, 2, 3, 4).abs() % 5),
    "bernoulli": (Bernoulli(), fixed_normal(4), torch.tensor([0.0, 1.0, 1.0, 0.0])),
    "labels": (Bernoulli(), fixed_normal(2, 3), torch.tensor([[0, 1, 1], [0, 0, 1]])),
    "gaussian": (Gaussian(noise=0.4), fixed_normal(4, 2), fixed_normal(4, 2, seed=1)),
    "gaussian-flat": (Gaussian(noise=0.4), fixed_normal(4), fixed_normal(4, seed=1)),
    "heteroscedastic": (HeteroscedasticGaussian(), fixed_normal(4, 4), fixed_normal(4, 2, seed=1)),
}


@pytest.mark.parametrize("name", POINT_CASES)
def test_prediction_of_a_point_has_the_likelihoods_log_prob(name: str) -> None:
    likelihood, outputs, targets = POINT_CASES[name]
    prediction: Any = likelihood.predict(outputs)
    expected = likelihood.log_prob(outputs, targets)
    torch.testing.assert_close(prediction.log_prob(targets), expected, rtol=1e-12, atol=1e-12)
    assert (prediction.epistemic == 0).all()
    assert prediction.samples is None


@pytest.mark.parametrize("name", POINT_CASES)
def test_prediction_of_samples_is_their_mixture(name: str) -> None:
    likelihood, outputs, targets = POINT_CASES[name]
    stacked = torch.stack([outputs, -outputs, 0.3 * outputs])
    prediction: Any = likelihood.predict_samples(stacked)
    assert len(prediction.samples) == 3
    assert (prediction.epistemic > 0).all()
    if name in ("sequence", "image", "labels"):  # positions are mixed one by one
        mixed = torch.stack([likelihood.predict(one).log_probs for one in stacked]).exp().mean(0).log()
        torch.testing.assert_close(prediction.log_probs, mixed, rtol=1e-12, atol=1e-12)
    else:
        each = torch.stack([likelihood.log_prob(one, targets) for one in stacked])
        torch.testing.assert_close(
            prediction.log_prob(targets), each.logsumexp(0) - math.log(3), rtol=1e-12, atol=1e-12
        )


def test_another_link_changes_the_probabilities_but_not_the_entropies() -> None:
    stacked, link = fixed_normal(3, 4, 5), fixed_normal(4, 5, seed=9).log_softmax(-1)
    plain: Any = Categorical().predict_samples(stacked)
    linked: Any = Categorical().predict_samples(stacked, log_probs=link, keep_samples=False)
    assert torch.equal(linked.log_probs, link)
    assert torch.equal(linked.entropy, plain.entropy)
    assert torch.equal(linked.epistemic, plain.epistemic)
    assert linked.samples is None
    with pytest.raises(InputError, match="no class probabilities"):
        Gaussian(noise=1).predict_samples(fixed_normal(3, 4, 1), log_probs=link)
    with pytest.raises(InputError, match="need entropies of shape"):
        Categorical().predict_samples(stacked, log_probs=link[:2])


def test_bernoulli_predicts_two_columns() -> None:
    logits = fixed_normal(4, 3)
    torch.testing.assert_close(Bernoulli().predict(logits).probs[..., 1], logits.sigmoid(), rtol=1e-13, atol=0)
    assert Bernoulli().predict(logits[:, :1]).probs.shape == (4, 2)
    assert Bernoulli().predict(logits[:, 0]).probs.shape == (4, 2)
    assert Bernoulli().predict_samples(logits[None, :, 0]).probs.shape == (4, 2)


def test_linearised_outputs_give_one_gaussian() -> None:
    mean, variance = fixed_normal(4, 2), fixed_normal(4, 2, seed=1).exp()
    covariance = torch.diag_embed(variance)
    prediction: Any = Gaussian(noise=0.5).predict_gaussian(mean, variance, covariance=covariance)
    assert torch.equal(prediction.mean, mean)
    torch.testing.assert_close(prediction.epistemic, variance, rtol=1e-15, atol=0)
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(mean, 0.25), rtol=1e-14, atol=0)
    assert torch.equal(prediction.covariance, covariance)
    flat: Any = Gaussian(noise=0.5).predict_gaussian(mean[:, 0], variance[:, 0])
    assert flat.mean.shape == (4, 1)
    pair: Any = HeteroscedasticGaussian().predict_gaussian(mean, variance, covariance=covariance)
    assert torch.equal(pair.mean, mean[:, :1])
    assert torch.equal(pair.epistemic, variance[:, :1])
    torch.testing.assert_close(pair.aleatoric, mean[:, 1:].exp(), rtol=1e-14, atol=0)
    assert torch.equal(pair.covariance, covariance[:, :1, :1])
    with pytest.raises(UnsupportedError, match="use a link or samples"):
        Categorical().predict_gaussian(mean, variance)


def test_members_may_have_learned_their_own_noise() -> None:
    hyper = {"log_noise": torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64).log()}
    prediction: Any = Gaussian().predict_samples(fixed_normal(3, 5, 2), hyper)
    torch.testing.assert_close(prediction.noise_variance[:, 0, 0], hyper["log_noise"].exp() ** 2, rtol=1e-13, atol=0)


# Tempering


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_tempered_ordered_classes_keep_their_ranking(temperature: float) -> None:
    steps = fixed_normal(2, 50, 3) * 3  # two samples
    tempered, likelihood = Ordinal().temper(steps, temperature)
    for cold, warm in zip(steps, tempered, strict=True):
        expected = (Ordinal().logits(cold) / temperature).softmax(-1)
        assert torch.allclose(likelihood.logits(warm).exp(), expected, rtol=0, atol=1e-12)


def test_tempering() -> None:
    logits, targets = fixed_normal(4, 5), torch.tensor([0, 1, 2, 3])
    cooled, likelihood = Categorical(3).temper(logits, 2.0)
    assert torch.equal(cooled, logits / 2)
    assert likelihood == Categorical(3)
    assert torch.equal(Bernoulli().temper(logits, 4.0)[0], logits / 4)
    same, noisier = Gaussian(noise=0.5).temper(logits, 3.0)
    assert torch.equal(same, logits)
    assert noisier == Gaussian(noise=1.5)
    pairs = fixed_normal(4, 4)
    hotter, heteroscedastic = HeteroscedasticGaussian().temper(pairs, 3.0)
    before, after = HeteroscedasticGaussian().predict(pairs), heteroscedastic.predict(hotter)
    torch.testing.assert_close(after.stddev, 3 * before.stddev, rtol=1e-13, atol=0)
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(HeteroscedasticGaussian().temper(torch.stack([pairs, pairs]), 3.0)[0][1], hotter)
    assert likelihood.log_prob(cooled, targets).shape == (4,)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="`temperature` must be a positive number"):
            Categorical().temper(logits, wrong)
    with pytest.raises(InputError, match="not known yet"):
        Gaussian().temper(logits, 2.0)


# Settings


def test_noise_is_learned_or_given() -> None:
    assert set(Gaussian().hyper()) == set(Gaussian("evidence").hyper()) == {"log_noise"}
    assert Gaussian().hyper()["log_noise"].item() == 0.0
    assert Gaussian(0.1).hyper() == Categorical().hyper() == {}
    log_noise = torch.tensor(math.log(0.3), dtype=torch.float64)
    resolved = Gaussian("evidence").resolved({"log_noise": log_noise})
    assert resolved.noise == pytest.approx(0.3, rel=1e-15)
    assert resolved.resolved({}) is resolved
    outputs, targets = fixed_normal(4, 2), fixed_normal(4, 2, seed=1)
    torch.testing.assert_close(
        resolved.log_prob(outputs, targets),
        Gaussian().log_prob(outputs, targets, {"log_noise": log_noise}),
        rtol=1e-13,
        atol=0,
    )
    for call in (
        lambda: Gaussian().log_prob(outputs, targets),
        lambda: Gaussian().predict(outputs, {}),
        lambda: Gaussian("evidence").resolved({}),
    ):
        with pytest.raises(InputError, match=r"noise of likelihoods.Gaussian\(.*\) is not known yet"):
            call()


@pytest.mark.parametrize("noise", [0, -1.0, math.inf, math.nan, True, "guess", None, torch.tensor(1.0)])
def test_wrong_noise(noise: Any) -> None:
    with pytest.raises(InputError, match="standard deviation"):
        Gaussian(noise=noise)


ALL = [Categorical(), Categorical(-1), Bernoulli(), Gaussian(), Gaussian(0.2), HeteroscedasticGaussian()]


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_likelihoods_are_settings(likelihood: Likelihood) -> None:
    assert Setting.from_json(likelihood.to_json()) == likelihood
    assert parse(repr(likelihood)) == likelihood
    assert hash(likelihood) == hash(likelihood.replace())
    assert sum(likelihood == other for other in ALL) == 1
    with pytest.raises(AttributeError):
        likelihood.noise = 3  # type: ignore[attr-defined]


def test_resolve() -> None:
    names = {"categorical": Categorical(), "Bernoulli": Bernoulli(), "gaussian": Gaussian()}
    names["heteroscedastic"] = HeteroscedasticGaussian()
    for name, likelihood in names.items():
        assert resolve(name) == likelihood
        assert resolve(likelihood) is likelihood
    assert Gaussian(noise=1) == Gaussian(noise=1.0)
    for wrong in ("weibull", 3, None):
        with pytest.raises(InputError, match=r"categorical, bernoulli, gaussian, heteroscedastic|`likelihood` must be"):
            resolve(wrong)  # type: ignore[arg-type]


# Errors


def _ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


WRONG = {
    "one output": (Categorical(), torch.zeros(4, 1), _ints(4), "use likelihood='bernoulli'"),
    "no class axis": (Categorical(), torch.zeros(4), _ints(4), "use likelihood='bernoulli'"),
    "one channel": (Categorical(), torch.zeros(4, 1, 2, 2), _ints(4, 2, 2), "use likelihood='bernoulli'"),
    "batch": (Categorical(), torch.zeros(4, 3), _ints(5), r"need labels of shape \(4,\), got \(5,\)"),
    "column": (Categorical(), torch.zeros(4, 3), _ints(4, 1), r"need labels of shape \(4,\), got \(4, 1\)"),
    "class axis second": (Categorical(), torch.zeros(4, 3, 7), _ints(4, 7), "class axis last, so transpose"),
    "float labels": (Categorical(), torch.zeros(4, 3), torch.zeros(4), r"use targets.long\(\)"),
    "label too large": (Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), "label 3 is not one of .* 0 to 2"),
    "negative label": (Categorical(), torch.zeros(2, 3), torch.tensor([-1, 0]), "label -1 is not one of"),
    "not 0 or 1": (Bernoulli(), torch.zeros(2), torch.tensor([0.0, 0.5]), "must be 0 or 1, got 0.5"),
    "labels missing": (Bernoulli(), torch.zeros(2, 3), _ints(2), r"shape \(2, 3\) for these outputs, got \(2,\)"),
    "bernoulli nan": (Bernoulli(), torch.zeros(2), torch.tensor([0.0, math.nan]), "NaN or infinite"),
    "bernoulli image": (Bernoulli(), torch.zeros(2, 1, 3, 3), _ints(2, 1, 3, 3), "flatten everything"),
    "gaussian batch": (Gaussian(), torch.zeros(4, 1), torch.zeros(3), r"\(4,\) or \(4, 1\) for these outputs"),
    "gaussian outputs": (Gaussian(), torch.zeros(4, 2), torch.zeros(4), r"shape \(4, 2\) for these outputs"),
    "gaussian inf": (Gaussian(), torch.zeros(2), torch.tensor([0.0, math.inf]), "NaN or infinite"),
    "gaussian complex": (Gaussian(), torch.zeros(2), torch.zeros(2, dtype=torch.complex64), "real numbers"),
    "gaussian image": (Gaussian(), torch.zeros(2, 1, 3), torch.zeros(2, 1, 3), r"\[B\] or \[B, O\]"),
    "odd outputs": (HeteroscedasticGaussian(), torch.zeros(4, 3), torch.zeros(4, 3), r"needs outputs \[B, 2·O\]"),
    "flat outputs": (HeteroscedasticGaussian(), torch.zeros(4), torch.zeros(4), r"needs outputs \[B, 2·O\]"),
    "pairs": (HeteroscedasticGaussian(), torch.zeros(4, 4), torch.zeros(4, 4), r"shape \(4, 2\) for these outputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_targets_give_one_sentence(name: str) -> None:
    likelihood, outputs, targets, words = WRONG[name]
    with pytest.raises(InputError, match=words) as caught:
        likelihood.check(outputs, targets)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message


def test_one_output_is_never_a_silent_certainty() -> None:
    """One logit under a softmax is p = 1 for everything: every method refuses it, not only `check`."""
    outputs, targets = torch.zeros(4, 1), _ints(4)
    calls = [Categorical().predict, Categorical().hessian, Categorical().hessian_root, Categorical().sample]
    for call in [*calls, lambda f: Categorical().log_prob(f, targets)]:
        with pytest.raises(InputError, match="use likelihood='bernoulli'"):
            call(outputs)


def test_right_targets_pass() -> None:
    Categorical().check(torch.zeros(2, 3), torch.tensor([-100, 2]))
    Categorical().check(torch.zeros(2, 2), torch.tensor([True, False]))
    Bernoulli().check(torch.zeros(2, 1), torch.tensor([True, False]))
    Gaussian().check(torch.zeros(2), torch.tensor([1, 2]))
    HeteroscedasticGaussian().check(torch.zeros(2, 2), torch.zeros(2))


@pytest.mark.parametrize("name", ["gaussian", "heteroscedastic", "student-t", "poisson", "mixture-density"])
def test_truth_values_are_no_numbers(name: str) -> None:
    likelihood = resolve(name)
    outputs = torch.zeros(2, likelihood.outputs_for(1))
    with pytest.raises(InputError, match=r"not torch.bool: use targets.float\(\), or 'bernoulli'"):
        likelihood.check(outputs, torch.tensor([True, False]))
    resolve("bernoulli").check(torch.zeros(2, 1), torch.tensor([True, False]))
