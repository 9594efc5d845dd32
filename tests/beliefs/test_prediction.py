"""Predictions against scipy, quadrature and Monte Carlo; their identities, indexing, frames and errors."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from scipy import integrate, stats
from torch import Tensor

from dubito.beliefs.prediction import ClassPrediction, Prediction, RegressionPrediction
from oracles import fixed_normal


def _classes(
    num_samples: int = 6, *positions: int, batch: int = 8, dtype: torch.dtype = torch.float64
) -> ClassPrediction:
    return ClassPrediction.from_logit_samples(2 * fixed_normal(num_samples, batch, *positions, 4).to(dtype))


def _mixture(components: int = 5, batch: int = 7, outputs: int = 2) -> RegressionPrediction:
    shape = (components, batch, outputs)
    noise, function = (0.3 + fixed_normal(*shape, seed=seed).square() for seed in (1, 2))
    return RegressionPrediction(2 * fixed_normal(*shape), noise, function)


def _weighted_scipy(prediction: RegressionPrediction, b: int, o: int) -> tuple[np.ndarray, np.ndarray]:
    scales = (prediction.noise_variance + prediction.function_variance).sqrt()
    return prediction.means[:, b, o].numpy(), scales[:, b, o].numpy()


# Classification


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0, 1e4])
def test_entropy_is_exactly_the_sum_of_its_parts(scale: float, dtype: torch.dtype) -> None:
    logits = (scale * fixed_normal(6, 500, 4)).to(dtype)
    prediction = ClassPrediction.from_logit_samples(logits)
    for moved in (prediction, prediction.to(torch.float32), prediction[10:90]):
        assert torch.equal(moved.entropy, moved.aleatoric + moved.epistemic)
        assert (moved.epistemic >= 0).all()
        assert (moved.aleatoric >= 0).all()
    arrays = prediction.numpy()
    assert np.array_equal(arrays["entropy"], arrays["aleatoric"] + arrays["epistemic"])


def test_entropies_equal_scipy() -> None:
    logits = 2 * fixed_normal(6, 8, 3, 4)
    prediction, probs = ClassPrediction.from_logit_samples(logits), logits.softmax(-1)
    total = torch.as_tensor(stats.entropy(probs.mean(0), axis=-1))
    aleatoric = torch.as_tensor(stats.entropy(probs, axis=-1).mean(0))
    torch.testing.assert_close(prediction.entropy, total, rtol=1e-12, atol=0)
    torch.testing.assert_close(prediction.aleatoric, aleatoric, rtol=1e-12, atol=0)
    torch.testing.assert_close(prediction.epistemic, total - aleatoric, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(prediction.probs, probs.mean(0), rtol=1e-13, atol=0)
    assert torch.equal(prediction.mode, probs.mean(0).argmax(-1))
    torch.testing.assert_close(prediction.confidence, probs.mean(0).amax(-1), rtol=1e-13, atol=0)
    torch.testing.assert_close(prediction.samples.exp(), probs, rtol=1e-12, atol=1e-15)
    assert prediction.num_classes == 4


def test_a_point_has_no_epistemic_part() -> None:
    logits = fixed_normal(5, 3)
    prediction = ClassPrediction.from_logits(logits)
    assert (prediction.epistemic == 0).all()
    torch.testing.assert_close(prediction.entropy, torch.as_tensor(stats.entropy(logits.softmax(-1), axis=-1)))
    assert prediction.samples is None
    assert torch.equal(prediction.log_probs, logits.log_softmax(-1))


def test_overconfident_float32_has_an_exact_nll() -> None:
    logits = torch.tensor([[200.0, 0.0]])
    assert ClassPrediction.from_logits(logits).log_prob(torch.tensor([1])).item() == -200.0
    both_wrong = ClassPrediction.from_logit_samples(torch.stack([logits, logits + torch.tensor([0.0, 1.0])]))
    expected = math.log((math.exp(-200) + math.exp(-199)) / 2)
    assert both_wrong.log_prob(torch.tensor([1])).item() == pytest.approx(expected, rel=1e-6)


def test_impossible_classes_add_nothing() -> None:
    prediction = ClassPrediction.from_logits(torch.tensor([[0.0, 0.0, -math.inf]]))
    assert prediction.entropy.item() == pytest.approx(math.log(2))


def test_class_log_prob_sums_over_positions() -> None:
    prediction = _classes(3, 2, 5)
    labels = torch.randint(4, (8, 2, 5), generator=torch.Generator().manual_seed(0))
    picked = torch.stack(
        [prediction.log_probs[b, i, j, labels[b, i, j]] for b in range(8) for i in range(2) for j in range(5)]
    )
    torch.testing.assert_close(prediction.log_prob(labels), picked.reshape(8, -1).sum(1), rtol=1e-13, atol=0)
    ignored = labels.clone()
    ignored[:, 0] = -100
    kept = picked.reshape(8, 2, 5)[:, 1].sum(1)
    torch.testing.assert_close(prediction.log_prob(ignored, ignore_index=-100), kept, rtol=1e-13, atol=0)
    assert (prediction.log_prob(torch.full_like(labels, 9), ignore_index=9) == 0).all()


def test_two_class_labels_may_be_floats_bools_or_columns() -> None:
    prediction = ClassPrediction.from_logits(fixed_normal(4, 2))
    expected = prediction.log_prob(torch.tensor([0, 1, 1, 0]))
    for labels in (torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor([False, True, True, False])):
        assert torch.equal(prediction.log_prob(labels), expected)
        assert torch.equal(prediction.log_prob(labels[:, None]), expected)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.zeros(7, dtype=torch.long), r"Labels of shape \(7,\) do not fit .* \(8,\)"),
        (torch.zeros(8), "whole numbers from 0 to 3, not torch.float32"),
        (torch.full((8,), 4), "label 4 is not one of the classes, which are 0 to 3"),
        (torch.full((8,), -100), "label -100 is not one of"),
    ],
)
def test_wrong_labels(labels: Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        _classes().log_prob(labels)
    with pytest.raises(InputError, match="from 0 to 1"):
        ClassPrediction.from_logits(fixed_normal(1, 2)).log_prob(torch.tensor([0.5]))


def test_wrong_class_shapes() -> None:
    log_probs = torch.zeros(3, 4)
    with pytest.raises(InputError, match="need entropies of shape"):
        ClassPrediction(log_probs, torch.zeros(3), torch.zeros(4))
    with pytest.raises(InputError, match="Samples of shape"):
        ClassPrediction(log_probs, torch.zeros(3), torch.zeros(3), torch.zeros(2, 3, 5))


# Regression


def test_variance_splits() -> None:
    prediction = _mixture()
    total = prediction.noise_variance + prediction.function_variance
    # The law of total variance, from the raw second moments of the mixture.
    second = (total + prediction.means.square()).mean(0) - prediction.mean.square()
    torch.testing.assert_close(prediction.variance, second, rtol=1e-12, atol=0)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.stddev**2, rtol=1e-15, atol=0)
    torch.testing.assert_close(prediction.aleatoric, prediction.noise_variance.mean(0), rtol=0, atol=0)
    assert prediction.samples is prediction.means
    assert _mixture(components=1).samples is None


def test_moments_match_monte_carlo() -> None:
    prediction = _mixture(batch=3)
    generator = torch.Generator().manual_seed(0)
    scales = (prediction.noise_variance + prediction.function_variance).sqrt()
    num = 40_000
    drawn = prediction.means + scales * torch.randn(num, *scales.shape, dtype=torch.float64, generator=generator)
    drawn = drawn.flatten(0, 1)  # every component equally often: less noisy than drawing them, so the bound is safe
    error = prediction.stddev / math.sqrt(num)
    assert ((drawn.mean(0) - prediction.mean).abs() < 5 * error).all()
    kurtosis = ((drawn - prediction.mean) ** 4).mean(0) - prediction.variance**2
    assert ((drawn.var(0) - prediction.variance).abs() < 5 * (kurtosis / num).sqrt()).all()


def test_mixture_density_equals_scipy() -> None:
    prediction, y = _mixture(), fixed_normal(7, 2, seed=5)
    scales = (prediction.noise_variance + prediction.function_variance).sqrt()
    densities = stats.norm.pdf(y, prediction.means, scales).prod(-1).mean(0)
    torch.testing.assert_close(prediction.log_prob(y), torch.as_tensor(np.log(densities)), rtol=1e-12, atol=0)


def test_density_far_in_the_tail_is_finite() -> None:
    prediction = _mixture(outputs=1).to(torch.float32)
    values = prediction.log_prob(torch.full((7,), 1e6))
    assert values.isfinite().all()
    assert (values < -1e9).all()


def test_cdf_is_the_integral_of_the_density() -> None:
    prediction, y = _mixture(batch=3, outputs=1), fixed_normal(3, 1, seed=5)
    values = prediction.cdf(y)
    for b in range(3):
        one = prediction[b]
        area, _ = integrate.quad(
            lambda t, p=one: p.log_prob(torch.tensor([t])).exp().item(), -60, y[b].item(), limit=200
        )
        assert values[b].item() == pytest.approx(area, abs=1e-8)


@pytest.mark.parametrize("q", [1e-6, 0.025, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("components", [1, 5])
def test_quantile_undoes_cdf(components: int, q: float) -> None:
    prediction = _mixture(components)
    torch.testing.assert_close(
        prediction.cdf(prediction.quantile(q)), torch.full((7, 2), q, dtype=torch.float64), rtol=1e-9, atol=1e-13
    )


def test_quantile_of_one_gaussian_is_closed_form() -> None:
    prediction = _mixture(components=1)
    expected = stats.norm.ppf(0.9, prediction.mean, prediction.stddev)
    torch.testing.assert_close(prediction.quantile(0.9), torch.as_tensor(expected), rtol=1e-13, atol=1e-14)


def test_quantile_of_separated_modes() -> None:
    """Components a million scales apart: q = 1/4 is the median of the lower one."""
    means = torch.tensor([-1.0, 1.0], dtype=torch.float64).reshape(2, 1, 1)
    prediction = RegressionPrediction(means, torch.tensor(1e-12), torch.tensor(0.0))
    assert prediction.quantile(0.25).item() == pytest.approx(-1.0, abs=1e-9)
    assert prediction.quantile(0.75).item() == pytest.approx(1.0, abs=1e-9)


def test_interval_holds_its_level() -> None:
    prediction = _mixture()
    for level in (0.5, 0.95):
        low, high = prediction.interval(level)
        held = prediction.cdf(high) - prediction.cdf(low)
        torch.testing.assert_close(held, torch.full_like(held, level), rtol=1e-9, atol=0)
        assert (low < high).all()
    for wrong in (0.0, 1.0, 1.5, math.nan):
        with pytest.raises(InputError, match=r"strictly between 0 and 1|must be a number, got nan"):
            prediction.interval(wrong)
        with pytest.raises(InputError, match=r"strictly between 0 and 1|must be a number, got nan"):
            prediction.quantile(wrong)


@pytest.mark.parametrize("components", [1, 2, 6])
def test_crps_equals_its_integral(components: int) -> None:
    r"""CRPS = ∫ (F(t) − 1[t ≥ y])² dt, by adaptive quadrature split at y."""
    prediction, y = _mixture(components, batch=3), fixed_normal(3, 2, seed=5)
    values = prediction.crps(y)
    for b in range(3):
        for o in range(2):
            means, scales = _weighted_scipy(prediction, b, o)
            cdf = lambda t, m=means, s=scales: stats.norm.cdf(t, m, s).mean()  # noqa: E731
            at = y[b, o].item()
            left, _ = integrate.quad(lambda t, cdf=cdf: cdf(t) ** 2, -40, at, limit=200)
            right, _ = integrate.quad(lambda t, cdf=cdf: (1 - cdf(t)) ** 2, at, 40, limit=200)
            assert values[b, o].item() == pytest.approx(left + right, abs=1e-7)


def test_crps_of_a_far_target_is_its_distance() -> None:
    prediction = RegressionPrediction(torch.zeros(1, 1, 1), torch.tensor(1.0), torch.tensor(0.0))
    assert prediction.crps(torch.tensor([1e4])).item() == pytest.approx(1e4 - 1 / math.sqrt(math.pi), rel=1e-6)


def test_rescale_is_a_change_of_units() -> None:
    loc, scale = torch.tensor([3.0, -1.0], dtype=torch.float64), torch.tensor([2.0, 0.5], dtype=torch.float64)
    covariance = torch.eye(2, dtype=torch.float64) + 0.3
    prediction = dataclasses.replace(_mixture(), covariance=covariance.expand(7, 2, 2))
    rescaled, y = prediction.rescale(loc, scale), fixed_normal(7, 2, seed=3)
    torch.testing.assert_close(rescaled.mean, loc + scale * prediction.mean, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(rescaled.stddev, scale * prediction.stddev, rtol=1e-13, atol=0)
    torch.testing.assert_close(rescaled.epistemic, scale**2 * prediction.epistemic, rtol=1e-12, atol=0)
    expected = prediction.log_prob(y) - scale.log().sum()
    torch.testing.assert_close(rescaled.log_prob(loc + scale * y), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rescaled.crps(loc + scale * y), scale * prediction.crps(y), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(
        rescaled.covariance[0], torch.diag(scale) @ covariance @ torch.diag(scale), rtol=1e-14, atol=0
    )
    torch.testing.assert_close(prediction.rescale(0.0, 10.0).quantile(0.2), 10 * prediction.quantile(0.2))
    with pytest.raises(InputError, match="must be positive"):
        prediction.rescale(0.0, -1.0)


def test_a_vector_of_targets_is_a_column() -> None:
    prediction, y = _mixture(outputs=1), fixed_normal(7)
    assert torch.equal(prediction.log_prob(y), prediction.log_prob(y[:, None]))
    assert prediction.log_prob(y).shape == (7,)
    assert prediction.crps(y).shape == prediction.cdf(y).shape == (7, 1)
    for targets in (y[:5], y[None], fixed_normal(7, 2)):
        with pytest.raises(InputError, match=r"must have shape \(7, 1\)"):
            prediction.log_prob(targets)
    with pytest.raises(InputError, match="NaN or infinite"):
        prediction.crps(torch.full((7,), math.nan))


def test_wrong_regression_shapes() -> None:
    with pytest.raises(InputError, match=r"must be \[K, B, O\]"):
        RegressionPrediction(torch.zeros(3, 2), torch.tensor(1.0), torch.tensor(0.0))
    with pytest.raises(InputError, match=r"noise_variance of shape \(3,\) does not fit"):
        RegressionPrediction(torch.zeros(1, 3, 2), torch.ones(3), torch.tensor(0.0))
    with pytest.raises(InputError, match=r"covariance must be \[B, O, O\] = \(3, 2, 2\), got \(2, 2\)"):
        RegressionPrediction(torch.zeros(1, 3, 2), torch.tensor(1.0), torch.tensor(0.0), torch.eye(2))


# Both


def _both() -> list[Any]:
    covariance = torch.eye(2, dtype=torch.float64).expand(8, 2, 2)
    return [
        _classes(),
        _classes(3, 2, 5),
        ClassPrediction.from_logits(fixed_normal(8, 3)),
        dataclasses.replace(_mixture(batch=8), covariance=covariance * torch.arange(8).reshape(8, 1, 1)),
        _mixture(components=1, batch=8),
    ]


def _assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    for field in dataclasses.fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("prediction", _both(), ids=repr)
def test_indexing_and_concatenation(prediction: Any) -> None:
    assert len(prediction) == 8
    parts = [prediction[:3], prediction[3:7], prediction[7]]
    assert [len(part) for part in parts] == [3, 4, 1]
    _assert_same(type(prediction).cat(parts), prediction)
    _assert_same(Prediction.cat(list(prediction)), prediction)
    mask = torch.arange(8) % 3 == 0
    for index in (mask, mask.numpy(), mask.nonzero().squeeze(1), np.array([0, 3, 6]), [0, 3, 6], slice(0, 8, 3)):
        _assert_same(prediction[index], Prediction.cat([prediction[i] for i in (0, 3, 6)]))
    _assert_same(prediction[-1], prediction[7:])
    _assert_same(prediction[np.int64(2)], prediction[2:3])
    assert len(prediction[torch.zeros(8, dtype=torch.bool)]) == 0
    with pytest.raises(IndexError):
        prediction[8]
    for wrong in (torch.zeros(5, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.long), [0.5]):
        with pytest.raises(InputError, match="indexed by whole numbers or 8 booleans"):
            prediction[wrong]


@pytest.mark.parametrize("prediction", _both(), ids=repr)
def test_moving_and_freezing(prediction: Any) -> None:
    moved = prediction.to(torch.float32).cpu()
    tensors = [getattr(moved, field.name) for field in dataclasses.fields(moved)]
    assert {tensor.dtype for tensor in tensors if tensor is not None} == {torch.float32}
    with pytest.raises(dataclasses.FrozenInstanceError):
        prediction.samples = None
    for name, array in prediction.numpy().items():
        assert isinstance(array, np.ndarray)
        assert np.array_equal(array, getattr(prediction, name).numpy())


def test_numpy_drops_the_gradient() -> None:
    logits = fixed_normal(3, 2).requires_grad_()
    prediction = ClassPrediction.from_logits(logits)
    assert prediction.log_probs.requires_grad
    assert prediction.numpy()["probs"].shape == (3, 2)


def test_what_cannot_be_concatenated() -> None:
    point = ClassPrediction.from_logits(fixed_normal(8, 4))
    for others, words in (
        ([], "no prediction"),
        ([_classes(6), _classes(5)], r"differ in their samples \(per datum: \(5, 4\) and \(6, 4\)\)"),
        ([_classes(6), point], r"differ in their samples \(per datum: \(6, 4\) and none\)"),
        ([point, ClassPrediction.from_logits(fixed_normal(8, 3))], "differ in their log_probs"),
        ([_mixture(2), _mixture(3)], "differ in their means"),
        ([_mixture(), point], "different kinds .* ClassPrediction, RegressionPrediction"),
    ):
        with pytest.raises(InputError, match=words):
            Prediction.cat(others)


def test_class_frame() -> None:
    prediction = _classes()
    frame = prediction.to_frame()
    assert list(frame.columns) == ["p_0", "p_1", "p_2", "p_3", "mode", "entropy", "aleatoric", "epistemic"]
    assert len(frame) == 8
    np.testing.assert_array_equal(frame[["p_0", "p_1", "p_2", "p_3"]].to_numpy(), prediction.probs.numpy())
    np.testing.assert_array_equal(frame["mode"], prediction.mode.numpy())
    names = ["cat", "dog", "owl", "fox"]
    named = prediction.to_frame(classes=names)
    assert named.columns[2] == "p_owl"
    assert named["mode"].tolist() == [names[c] for c in prediction.mode]
    with pytest.raises(InputError, match="4 classes but 2 names"):
        prediction.to_frame(classes=["a", "b"])
    with pytest.raises(UnsupportedError, match=r"positions \(2, 5\): use numpy"):
        _classes(3, 2, 5).to_frame()


def test_regression_frame() -> None:
    prediction = _mixture(outputs=1)
    frame = prediction.to_frame()
    assert list(frame.columns) == ["mean", "stddev", "low", "high"]
    np.testing.assert_array_equal(frame["low"], prediction.interval(0.95)[0][:, 0].numpy())
    np.testing.assert_array_equal(prediction.to_frame(0.5)["high"], prediction.quantile(0.75)[:, 0].numpy())
    many = _mixture(outputs=2)
    assert list(many.to_frame().columns) == [
        f"{name}_{o}" for o in (0, 1) for name in ("mean", "stddev", "low", "high")
    ]
    np.testing.assert_array_equal(many.to_frame()["stddev_1"], many.stddev[:, 1].numpy())


def test_frame_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'dubito\[tables\]'"):
        _mixture().to_frame()


def test_repr_is_short() -> None:
    uniform = ClassPrediction.from_logit_samples(torch.zeros(3, 5, 4))
    assert repr(uniform) == "ClassPrediction(5 data, 4 classes, mean entropy 1.39, mean epistemic 0, 3 samples)"
    assert repr(ClassPrediction.from_logits(torch.zeros(5, 2, 4))).startswith("ClassPrediction(5 x 2, 4 classes")
    gaussian = RegressionPrediction(torch.zeros(2, 5, 1), torch.tensor(4.0), torch.tensor(0.0))
    assert repr(gaussian) == "RegressionPrediction(5 data, 1 output, mean stddev 2, 2 components)"
