"""`evaluate`, batch by batch, gives what the metrics give for everything at once, to 1e-10."""

from __future__ import annotations

import json
import math
import time
from typing import ClassVar

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from reporting_cases import KnownPosterior, class_data, classifier, number_data, regressor
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dubito
from dubito import likelihoods, metrics
from dubito.uses.reporting import Evaluation, evaluate


def assert_close(got: dict[str, float], expected: dict[str, float]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-10, abs=1e-10), name


def class_scores(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Everything at once, from rows [N, C] that all count."""
    probs = log_probs.exp()
    confidence, mode = probs.max(-1)
    values = {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": metrics.nll(log_probs, labels),
        "brier": metrics.brier(probs, labels),
        "ece": metrics.ece(probs, labels),
        "mce": metrics.mce(probs, labels),
        "aurc": metrics.aurc(1 - confidence, mode != labels),
    }
    return {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize("form", ["pair", "loader", "dataset", "list", "stream", "big batches"])
def test_classification_equals_the_metrics_at_once(form: str) -> None:
    posterior, (x, y) = classifier(), class_data()

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    data = {
        "pair": (x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True),
        "dataset": TensorDataset(x, y),
        "list": [(x[:50], y[:50]), (x[50:51], y[50:51]), (x[51:], y[51:])],
        "stream": Stream(),
        "big batches": DataLoader(TensorDataset(x, y), batch_size=60),
    }[form]
    result = evaluate(posterior, data, batch_size=7 if form != "list" else 1024)
    assert result.task == "classification"
    assert result.count == 101
    assert_close(result.scores, class_scores(posterior.predict(x).log_probs, y))
    losses = -posterior.predict(x).log_probs.double().gather(1, y[:, None])[:, 0]
    parts = torch.stack([losses[start::50].mean() for start in range(50)])
    if form != "loader":  # which shuffles
        assert result.curves.nll_parts == pytest.approx(parts.tolist(), abs=1e-6)


def test_memory_is_bounded_by_the_batch() -> None:
    posterior = classifier()
    evaluate(posterior, class_data(), batch_size=7, ood={"other": class_data()[0]})
    assert max(posterior.sizes) == 7
    assert sum(posterior.sizes) == 202


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_regression_equals_the_metrics_at_once(num_samples: int, num_outputs: int) -> None:
    posterior = regressor(num_outputs=num_outputs, num_samples=num_samples)
    x, y = number_data(num_outputs=num_outputs)
    result = evaluate(posterior, (x, y), batch_size=8)
    prediction = posterior.predict(x)
    gaussians = (prediction.means, torch.full_like(prediction.means, 0.5))
    uncertainty = prediction.stddev.square().mean(-1).sqrt()
    values = {
        "rmse": metrics.rmse(prediction.mean, y),
        "nll": metrics.gaussian_nll(*gaussians, y),
        "crps": metrics.crps(*gaussians, y),
    }
    intervals = {level: prediction.interval(level) for level in (0.5, 0.9, 0.95)}
    values |= {f"coverage@{level}": metrics.interval_coverage(*ends, y) for level, ends in intervals.items()}
    values |= {f"width@{level}": metrics.interval_width(*ends) for level, ends in intervals.items()}
    values["quantile_error"] = metrics.quantile_calibration_error(metrics.pit(*gaussians, y))
    values["aurc"] = metrics.aurc(uncertainty, (prediction.mean - y).square().mean(-1))
    assert result.task == "regression"
    assert result.count == 101 * num_outputs
    assert_close(result.scores, {name: float(value) for name, value in values.items()})
    sizes = [len(range(start, 101, 50)) for start in range(50)]
    total = sum(size * part for size, part in zip(sizes, result.curves.nll_parts, strict=True))
    assert total / 101 == pytest.approx(result.scores["nll"], abs=1e-9)


def test_targets_of_one_output_may_lack_its_axis() -> None:
    posterior, (x, y) = regressor(), number_data()
    assert evaluate(posterior, (x, y[:, 0])) == evaluate(posterior, (x, y))


def test_positions_count_one_by_one_and_ignored_ones_do_not() -> None:
    posterior = classifier(likelihoods.Categorical(ignore_index=-1), logits=(4, 5))  # four positions, five classes
    x, _ = class_data(30)
    y = torch.randint(-1, 5, (30, 4), generator=torch.Generator().manual_seed(0))
    y[6:9] = -1  # at a batch size of three: a batch of nothing but padding
    result = evaluate(posterior, (x, y), batch_size=3)
    kept = y != -1
    prediction = posterior.predict(x)
    assert result.count == int(kept.sum())
    assert_close(result.scores, class_scores(prediction.log_probs[kept], y[kept]))
    assert sum(result.curves.reliability.counts) == int(kept.sum())


def test_images_of_labels() -> None:
    posterior = classifier(logits=(5, 2, 3))  # segmentation: the class axis is the second
    x, _ = class_data(20)
    y = torch.randint(5, (20, 2, 3), generator=torch.Generator().manual_seed(0))
    log_probs = posterior.predict(x).log_probs
    assert log_probs.shape == (20, 2, 3, 5)
    assert_close(evaluate(posterior, (x, y), batch_size=3).scores, class_scores(log_probs.flatten(0, 2), y.flatten()))


@pytest.mark.parametrize("labels", ["integers", "floats", "a column of floats"])
def test_two_classes_by_a_bernoulli(labels: str) -> None:
    posterior = classifier(likelihoods.Bernoulli(), logits=(1,))
    x, y = class_data(40)
    y = y % 2
    given = {"integers": y, "floats": y.double(), "a column of floats": y.double()[:, None]}[labels]
    assert_close(evaluate(posterior, (x, given), batch_size=9).scores, class_scores(posterior.predict(x).log_probs, y))


def test_dict_batches() -> None:
    posterior, (x, y) = classifier(), class_data()
    inner = posterior.outputs
    posterior.outputs = lambda inputs, generator: inner(inputs["features"], generator)
    batches = [{"features": x[:60], "labels": y[:60]}, {"features": x[60:], "labels": y[60:]}]
    assert_close(evaluate(posterior, batches).scores, evaluate(classifier(), (x, y)).scores)


# ---------------------------------------------------------------------- out of distribution


def doubts_of(posterior: KnownPosterior, x: Tensor) -> dict[str, Tensor]:
    prediction = posterior.predict(x)
    if isinstance(prediction, dubito.beliefs.prediction.ClassPrediction):
        return {
            "max-probability": 1 - prediction.probs.max(-1).values,
            "entropy": prediction.entropy,
            "epistemic": prediction.epistemic,
        }
    return {"stddev": prediction.stddev[:, 0], "epistemic": prediction.epistemic.sqrt()[:, 0]}


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_detection_equals_the_metrics(task: str) -> None:
    posterior, (x, y) = (classifier(), class_data()) if task == "classification" else (regressor(), number_data())
    other = 0.3 * x[:37].flip(-1)
    sets = {
        "a tensor": other,
        "an array": other.numpy(),
        "a pair": (other, torch.zeros(37)),
        "a loader without targets": DataLoader(other, batch_size=5),
        "one tensor of a dataset": TensorDataset(other),
    }
    result = evaluate(posterior, (x, y), ood=sets, batch_size=10)
    inside, outside = doubts_of(posterior, x), doubts_of(posterior, other)
    assert list(result.ood) == list(sets)
    for found in result.ood.values():
        assert list(found) == list(inside)
        for doubt, values in found.items():
            scores = torch.cat([inside[doubt], outside[doubt]])
            labels = torch.tensor([0] * 101 + [1] * 37)
            functions = {"auroc": metrics.auroc, "aupr": metrics.aupr, "fpr95": metrics.fpr95}
            assert_close(values, {name: float(function(scores, labels)) for name, function in functions.items()})


def test_a_point_estimate_has_no_epistemic_signal_and_that_is_shown() -> None:
    maps = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    point = KnownPosterior(likelihoods.Categorical(), lambda x, _: torch.einsum("bi,sio->sbo", x, maps))
    result = evaluate(point, class_data(), ood={"far": 3 * class_data()[0]})
    assert result.ood["far"]["epistemic"] == {"auroc": 0.5, "aupr": 0.5, "fpr95": 1.0}
    assert sum(result.curves.histograms["epistemic"].inside) == 101


def test_equal_uncertainty_is_a_tie_in_single_precision() -> None:
    """Known noise is the same everywhere, so it detects nothing; a rounding apart would make it all or nothing."""
    x, y = (part.float() for part in number_data())
    model = torch.nn.Linear(4, 1)
    posterior = dubito.MAP(train=False).fit(model, (x, y), likelihood=likelihoods.Gaussian(noise=0.3), progress=False)
    result = evaluate(posterior, (x, y), ood={"far": 5 * x}, batch_size=10)
    assert {values["auroc"] for values in result.ood["far"].values()} == {0.5}
    scaled = evaluate(posterior, (x, y), ood={"far": 5 * x}, target_scale=(1000.0, 7.0))
    assert {values["auroc"] for values in scaled.ood["far"].values()} == {0.5}
    wide = posterior.predict(x).to(torch.float64).rescale(1000.0, 7.0)
    assert scaled.scores["rmse"] == pytest.approx(float(metrics.rmse(wide.mean, 1000 + 7 * y.double())), rel=1e-12)


def test_histograms_share_bins_and_lose_nothing() -> None:
    posterior, (x, y) = classifier(), class_data(400)
    sets = {"near": 0.5 * x[:150], "far": 2 * x[:80]}
    result = evaluate(posterior, (x, y), ood=sets, batch_size=64)
    inside = doubts_of(posterior, x)
    outside = {name: doubts_of(posterior, value) for name, value in sets.items()}
    assert len(result.curves.histograms) > 1
    for doubt, histogram in result.curves.histograms.items():
        edges = np.asarray(histogram.edges)
        assert edges[0] == 0
        assert np.diff(edges) == pytest.approx(edges[-1] / 40)
        clipped = {name: values[doubt].clamp(max=edges[-1]) for name, values in outside.items()}
        assert histogram.inside == tuple(np.histogram(inside[doubt].clamp(max=edges[-1]), edges)[0])
        assert histogram.outside == {name: tuple(np.histogram(values, edges)[0]) for name, values in clipped.items()}
        above = torch.cat([inside[doubt], *(values[doubt] for values in outside.values())]) > edges[-1]
        assert 0 < int(above.sum()) <= math.ceil(0.005 * 630)


# ---------------------------------------------------------------------- shifts and units


def test_shifts_are_evaluations_of_their_own() -> None:
    posterior, (x, y) = classifier(), class_data()
    shifts = {"scaling": {2: (2 * x, y), 0.5: (0.5 * x, y)}, "reversed": DataLoader(TensorDataset(-x, y), batch_size=9)}
    result = evaluate(posterior, (x, y), shifts=shifts)
    assert result.shifts == {
        "scaling": {
            0.5: evaluate(posterior, (0.5 * x, y)).scores,
            2: evaluate(posterior, (2 * x, y)).scores,
        },
        "reversed": pytest.approx(evaluate(posterior, (-x, y)).scores, rel=1e-12),
    }
    assert list(result.shifts["scaling"]) == [0.5, 2]
    assert [(kind, severity) for kind, severity, _ in result.shift_rows()] == [
        ("scaling", 0.5), ("scaling", 2), ("reversed", None)
    ]  # fmt: skip


def test_original_units() -> None:
    posterior, (x, y) = regressor(num_outputs=2), number_data(num_outputs=2)
    loc, scale = torch.tensor([10.0, -3.0]), torch.tensor([4.0, 0.5])
    result = evaluate(posterior, (x, y), target_scale=(loc, scale), ood={"far": 9 * x}, batch_size=10)
    prediction = posterior.predict(x).rescale(loc, scale)
    truth = loc + scale * y
    gaussians = (prediction.means, (0.5 * scale).expand_as(prediction.means))
    assert result.scores["rmse"] == pytest.approx(float(metrics.rmse(prediction.mean, truth)), rel=1e-10)
    assert result.scores["nll"] == pytest.approx(float(metrics.gaussian_nll(*gaussians, truth)), rel=1e-10)
    assert result.scores["crps"] == pytest.approx(float(metrics.crps(*gaussians, truth)), rel=1e-10)
    spreads = [posterior.predict(z).rescale(loc, scale).variance.mean(-1) for z in (x, 9 * x)]
    expected = metrics.auroc(torch.cat(spreads), torch.arange(202) >= 101)
    assert result.ood["far"]["stddev"]["auroc"] == pytest.approx(float(expected), rel=1e-10)
    # One common scale s divides the density by s and multiplies lengths by s; what has no unit stays.
    plain = evaluate(posterior, (x, y)).scores
    scaled = evaluate(posterior, (x, y), target_scale=(7.0, 3.0)).scores
    for name, power in {
        "rmse": 1,
        "crps": 1,
        "width@0.9": 1,
        "coverage@0.9": 0,
        "quantile_error": 0,
        "aurc": 2,
    }.items():
        assert scaled[name] == pytest.approx(plain[name] * 3.0**power, rel=1e-9), name
    assert scaled["nll"] == pytest.approx(plain["nll"] + math.log(3.0), rel=1e-9)


# ---------------------------------------------------------------------- curves


def test_reliability_and_risk_coverage() -> None:
    posterior, (x, y) = classifier(), class_data(1000)
    curves = evaluate(posterior, (x, y), batch_size=64).curves
    probs = posterior.predict(x).probs
    bins = metrics.reliability(probs, y)
    assert curves.reliability.counts == tuple(bins.counts.tolist())
    assert curves.reliability.correct_sums == tuple(bins.correct_sums.tolist())
    assert curves.reliability.confidence_sums == pytest.approx(bins.confidence_sums.tolist(), rel=1e-12)
    confidence, mode = probs.max(-1)
    whole = metrics.risk_coverage(1 - confidence, mode != y)
    full = dict(zip(whole.coverage.tolist(), whole.risk.tolist(), strict=True))
    points = dict(zip(curves.risk_coverage.coverage, curves.risk_coverage.risk, strict=True))
    assert len(points) == 200
    assert (min(points), max(points)) == (0.001, 1.0)
    assert all(full[coverage] == pytest.approx(risk, abs=1e-12) for coverage, risk in points.items())


def test_quantiles_and_band() -> None:
    posterior, (x, y) = regressor(num_inputs=1), number_data(rows=901, num_inputs=1)
    curves = evaluate(posterior, (x, y), batch_size=100).curves
    prediction = posterior.predict(x)
    pit = metrics.pit(prediction.means, torch.full_like(prediction.means, 0.5), y)
    assert curves.quantiles.observed == pytest.approx(metrics.quantile_calibration(pit).observed.tolist(), abs=1e-12)
    low, high = prediction.interval(0.95)
    rows = {
        value: (mean, lower, upper, target)
        for value, mean, lower, upper, target in torch.cat([x, prediction.mean, low, high, y], 1).tolist()
    }
    band = curves.band
    assert len(band.x) == 200
    assert list(band.x) == sorted(band.x)
    assert (band.x[0], band.x[-1]) == (float(x.min()), float(x.max()))
    for value, *found in zip(band.x, band.mean, band.low, band.high, band.targets, strict=True):
        assert found == pytest.approx(rows[value], abs=1e-10)
    flat = evaluate(KnownPosterior(posterior.likelihood, lambda z, g: posterior.outputs(z[:, None], g)), (x[:, 0], y))
    assert flat.curves.band == evaluate(posterior, (x, y)).curves.band
    assert evaluate(regressor(num_inputs=2), number_data(num_inputs=2)).curves.band is None


@pytest.mark.slow
def test_it_is_small() -> None:
    x, y = class_data(5000)
    shifts = {kind: dict.fromkeys(range(1, 6), (x, y)) for kind in ("rotation", "noise", "blur")}
    result = evaluate(classifier(), (x, y), ood={"a": x, "b": x, "c": x}, shifts=shifts)
    assert len(json.dumps(result.to_json())) < 25_000
    assert len(json.dumps(evaluate(regressor(1), number_data(5000, 1)).to_json())) < 35_000


# ---------------------------------------------------------------------- randomness and time


def random_classifier() -> KnownPosterior:
    def outputs(x: Tensor, generator: torch.Generator) -> Tensor:
        maps = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
        return torch.einsum("bi,sio->sbo", x, maps)

    return KnownPosterior(likelihoods.Categorical(), outputs)


@pytest.mark.parametrize("seed", [None, 5])
def test_every_batch_sees_the_same_weights(seed: int | None) -> None:
    posterior, (x, y) = random_classifier(), class_data()

    def fresh() -> torch.Generator | None:
        return None if seed is None else torch.Generator().manual_seed(seed)

    expected = class_scores(posterior.predict(x, generator=fresh()).log_probs, y)
    for batch_size in (7, 1000):
        assert_close(evaluate(posterior, (x, y), batch_size=batch_size, generator=fresh()).scores, expected)


def test_a_generator_moves_on() -> None:
    generator = torch.Generator().manual_seed(5)
    first, second = (evaluate(random_classifier(), class_data(), generator=generator) for _ in range(2))
    assert first != second
    assert first == evaluate(random_classifier(), class_data(), generator=torch.Generator().manual_seed(5))


def test_the_number_of_samples_reaches_the_posterior() -> None:
    class Counting(KnownPosterior):
        asked: ClassVar[list[int]] = []  # a prediction works on a copy of the posterior

        def predictor(self, num_samples, generator, **options):
            self.asked.append(num_samples)
            return super().predictor(num_samples, generator, **options)

    posterior = Counting(likelihoods.Categorical(), classifier().outputs)
    evaluate(posterior, class_data(), num_samples=17)
    assert Counting.asked
    assert set(Counting.asked) == {17}


def test_time_is_that_of_predicting_a_thousand() -> None:
    posterior, (x, y) = classifier(), class_data(100)
    inner = posterior.outputs

    def slow(inputs: Tensor, generator: torch.Generator) -> Tensor:
        time.sleep(0.02)
        return inner(inputs, generator)

    posterior.outputs = slow
    result = evaluate(posterior, (x, y), batch_size=25, shifts={"same": (x, y)})
    assert 0.8 <= result.seconds_per_1000 < 8  # four batches of 20 ms for a hundred rows, times ten


# ---------------------------------------------------------------------- a real posterior


def test_end_to_end_with_a_trained_network() -> None:
    x, y = class_data(200)
    model = torch.nn.Linear(6, 5).double()
    posterior = dubito.MAP().fit(model, (x, y), training=dubito.Training(epochs=2), progress=False)
    result = dubito.evaluate(posterior, (x, y), ood={"far": 5 * x}, batch_size=33)
    assert result.name == "MAP()"
    assert isinstance(result, Evaluation)
    assert_close(result.scores, class_scores(posterior.predict(x).log_probs, y))
    assert dubito.evaluate(posterior, (x, y), name="mine").name == "mine"


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "empty",
    [[], (torch.zeros(0, 6), torch.zeros(0).long()), TensorDataset(torch.zeros(0, 6), torch.zeros(0).long()),
     DataLoader(TensorDataset(torch.zeros(0, 6), torch.zeros(0).long()))],
    ids=["list", "pair", "dataset", "loader"],
)  # fmt: skip
def test_empty_data(empty: object) -> None:
    with pytest.raises(InputError, match=r"^The data is empty: give at least one example\.$"):
        evaluate(classifier(), empty)
    with pytest.raises(InputError, match=r"^The ood set 'void' is empty: give at least one example\.$"):
        evaluate(classifier(), class_data(), ood={"void": empty})
    with pytest.raises(InputError, match=r"^The shift 'fog' of severity 2 is empty"):
        evaluate(classifier(), class_data(), shifts={"fog": {1: class_data(), 2: empty}})


def test_an_empty_tensor_and_an_empty_stream() -> None:
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(InputError, match=r"^The ood set 'void' is empty"):
        evaluate(classifier(), class_data(), ood={"void": torch.zeros(0, 6)})
    with pytest.raises(InputError, match=r"^The ood set 'void' is empty"):
        evaluate(classifier(), class_data(), ood={"void": DataLoader(Nothing())})


def test_nothing_but_padding() -> None:
    with pytest.raises(InputError, match="every target is to be ignored"):
        evaluate(classifier(), (class_data()[0], torch.full((101,), -100)))


def test_missing_targets() -> None:
    x, _ = class_data()
    with pytest.raises(InputError, match=r"^The data has no targets to score against"):
        evaluate(classifier(), DataLoader(x, batch_size=10))
    with pytest.raises(InputError, match=r"^The shift 'noise' has no targets"):
        evaluate(classifier(), class_data(), shifts={"noise": DataLoader(x)})


def test_an_ood_set_of_another_shape() -> None:
    model = torch.nn.Linear(6, 5)
    posterior = dubito.MAP(train=False).fit(model, class_data(), progress=False)
    with pytest.raises(InputError, match=r"^The ood set 'big' has inputs of shape \(2, 7\), .* has \(6,\)"):
        evaluate(posterior, class_data(), ood={"big": torch.zeros(8, 2, 7)})


def test_another_shape_that_the_network_can_take_is_fine() -> None:
    posterior, (x, y) = classifier(), class_data()
    pictures = evaluate(posterior, (x, y), ood={"as images": x.reshape(-1, 1, 2, 3)})
    assert pictures.ood["as images"]["entropy"]["auroc"] == 0.5


def test_faults_of_the_network_itself_are_not_hidden() -> None:
    def broken(x: Tensor, _: torch.Generator) -> Tensor:
        raise RuntimeError("out of cheese")

    with pytest.raises(RuntimeError, match="out of cheese"):
        evaluate(KnownPosterior(likelihoods.Categorical(), broken), class_data(), ood={"far": class_data()})


def test_wrong_settings() -> None:
    with pytest.raises(InputError, match="`target_scale` is for regression"):
        evaluate(classifier(), class_data(), target_scale=(0.0, 1.0))
    with pytest.raises(InputError, match="severities, which are numbers"):
        evaluate(classifier(), class_data(), shifts={"fog": {"strong": class_data()}})
    with pytest.raises(InputError, match="Labels of shape"):
        evaluate(classifier(), (class_data()[0], torch.zeros(101, 2).long()))
