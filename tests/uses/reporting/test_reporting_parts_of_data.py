"""Groups, examples and thresholds under shift are those that a loop over the data finds; figures say their values."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from reporting_cases import class_data, classifier, number_data, regressor
from torch.utils.data import DataLoader, TensorDataset

from dubito.uses.reporting import Evaluation, bars, evaluate, plots, readings
from dubito.uses.reporting.evaluation import Histogram, RiskCoverageCurve
from dubito.uses.reporting.page import _svg

NAMES = ("zero", "one", "two", "three", "four")


def test_groups_of_a_regression() -> None:
    x, y = number_data()
    posterior = regressor()
    labels = ["a" if value > 0 else "b" for value in x[:, 0].tolist()]
    found = evaluate(posterior, (x, y), groups={"sign": labels}, batch_size=7).curves.groups
    low, high = posterior.predict(x).interval(0.9)
    covered = ((low <= y) & (y <= high))[:, 0]
    for place, label in enumerate("ab"):
        inside = torch.tensor([each == label for each in labels])
        assert found["sign"].counts[place] == inside.sum()
        assert found["sign"].observed[place] == pytest.approx(float(covered[inside].double().mean()))
    assert found["sign"].labels == ("a", "b")
    assert found["sign"].claimed == pytest.approx((0.9, 0.9))
    own = found["Predicted uncertainty"]
    assert own.counts == (25.0, 25.0, 25.0, 26.0)
    order = posterior.predict(x).stddev[:, 0].argsort()
    assert own.observed[0] == pytest.approx(float(covered[order[:25]].double().mean()))


def test_groups_of_a_classification() -> None:
    x, y = class_data()
    found = evaluate(classifier(), (x, y), groups={"number": torch.arange(len(y)) % 14}).curves.groups["number"]
    assert found.labels[-1] == "all others"  # of many groups the rarest are one
    assert len(found.labels) == 12
    assert sum(found.counts) == len(y)
    confidence, answer = classifier().predict(x).probs.max(dim=-1)
    assert sum(n * share for n, share in zip(found.counts, found.observed, strict=True)) == (answer == y).sum()
    total = sum(n * share for n, share in zip(found.counts, found.claimed, strict=True))
    assert total == pytest.approx(float(confidence.sum()))


def test_groups_that_cannot_be_matched() -> None:
    x, y = class_data()
    with pytest.raises(InputError, match=r"^The groups 'sex' are 3 labels for 101 examples"):
        evaluate(classifier(), (x, y), groups={"sex": ["a", "b", "a"]})
    with pytest.raises(InputError, match="fixed order"):
        evaluate(classifier(), DataLoader(TensorDataset(x, y)), groups={"sex": ["a"] * 101})


def test_examples_are_the_extremes() -> None:
    x, y = class_data()
    found = evaluate(classifier(), (x, y), batch_size=7, class_names=NAMES).curves.examples
    probs = classifier().predict(x).probs
    confidence, answer = probs.max(dim=-1)
    unsure = [each.index for each in found if each.kind == "uncertain"]
    assert unsure == confidence.argsort()[:5].tolist()
    wrong = [i for i in confidence.argsort(descending=True).tolist() if answer[i] != y[i]][:5]
    assert [each.index for each in found if each.kind == "wrong"] == wrong
    first = next(each for each in found if each.kind == "wrong")
    assert (first.truth, first.answer) == (NAMES[y[wrong[0]]], NAMES[answer[wrong[0]]])
    assert first.sure == f"{confidence[wrong[0]]:.0%} sure"
    assert first.cells["input 1"] == f"{x[wrong[0], 0]:.6g}"


def test_examples_of_a_regression() -> None:
    x, y = number_data()
    posterior = regressor()
    found = evaluate(posterior, (x, y), decode=lambda rows: {"size": rows[:, 0].tolist()}).curves.examples
    prediction = posterior.predict(x)
    distance = ((y - prediction.mean).abs() / prediction.stddev)[:, 0]
    order = distance.argsort(descending=True)[:5].tolist()
    wrong = [each for each in found if each.kind == "wrong"]
    assert [each.index for each in wrong] == order
    assert wrong[0].cells == {"size": f"{x[order[0], 0]:.6g}"}
    constant = evaluate(regressor(num_samples=1), (x, y)).curves
    assert "uncertain" not in {each.kind for each in constant.examples}  # all are equally uncertain
    assert constant.groups == {}


def test_pictures_and_texts() -> None:
    x = torch.randn(40, 3, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, posterior = torch.arange(40) % 5, classifier(inputs=(3, 8, 6))
    pictures = [each for each in evaluate(posterior, (x, y)).curves.examples if each.kind == "uncertain"]
    image, row = np.frombuffer(base64.b64decode(pictures[0].pixels), dtype=np.uint8), x[pictures[0].index]
    assert pictures[0].shape == (8, 6, 3)
    expected = 255 * (row - row.min()) / (row.max() - row.min())
    assert np.abs(image.reshape(8, 6, 3) - expected.permute(1, 2, 0).numpy()).max() <= 0.5
    large = evaluate(classifier(inputs=(1, 130, 65)), (torch.rand(9, 1, 130, 65).double(), y[:9])).curves.examples
    assert large[0].shape == (64, 32, 1)
    texts = evaluate(posterior, (x, y), decode=lambda rows: ["word " * 100] * len(rows)).curves.examples
    assert texts[0].cells["text"] == "word " * 80 + "…"
    with pytest.raises(InputError, match="`decode` must return"):
        evaluate(posterior, (x, y), decode=lambda rows: 3)
    assert bars.pictures([np.zeros((3, 3))] * 6, ["$a_b"] * 6).axes[5].get_title() == "$a_b"


def test_thresholds_under_shift() -> None:
    x, y = class_data(200)
    confidence, answer = classifier().predict(x).probs.max(dim=-1)
    y = answer.where(torch.arange(200) % 5 > 0, y)
    misled = answer.clone()
    misled[confidence.argsort()[:120]] += 1
    misled[confidence.argsort()[150:155]] += 1
    found = evaluate(classifier(), (x, y), shifts={"dark": {1: (x, misled % 5)}}).curves.shifted["dark of severity 1"]
    right = (answer == misled % 5).double()
    base = float((answer == y).double().mean())
    assert found.claimed == pytest.approx(float(confidence.mean()))
    assert found.observed == pytest.approx(float(right.mean()))
    kept = [float(right[confidence >= limit].mean()) >= base for limit in confidence.sort().values]
    expected = confidence.sort().values[kept.index(True)]
    assert found.threshold == pytest.approx(float(expected))
    assert found.answered == pytest.approx(float((confidence >= expected).double().mean()))
    reversed_labels = evaluate(classifier(), (x, y), shifts={"all": (x, (answer + 1) % 5)}).curves.shifted["all"]
    assert reversed_labels.threshold is None


def test_all_of_it_survives_json() -> None:
    x, y = class_data()
    found = evaluate(classifier(), (x, y), groups={"n": ["a"] * 101}, shifts={"far": (3 * x, y)})
    again = Evaluation.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert again.curves.examples


def test_readings_are_where_the_figure_draws() -> None:
    curve = RiskCoverageCurve((0.0, 0.5, 1.0), (0.0, 0.1, 0.4))
    figure = plots.risk_coverage({"a": [curve]}, look_of=plots.looks(["a"]), legend=False)
    axes = figure.axes[0]
    found = readings.along(axes, readings.marked_lines(axes, ["a"]), str)
    _svg(figure, "key", "alt")
    drawn = found.to_json(259.2, 201.6)
    left, top, right, bottom = drawn["box"]
    assert [stop[0] for stop in drawn["stops"]] == pytest.approx([left, (left + right) / 2, right], abs=0.1)
    assert drawn["stops"][0][2][0][1] == pytest.approx(bottom, abs=0.1)
    scale = axes.get_ylim()[1]
    assert drawn["stops"][2][2] == [["a", pytest.approx(bottom - (bottom - top) * 0.4 / scale, abs=0.1), "0.4"]]


def test_readings_of_a_histogram_and_of_rows() -> None:
    curve = Histogram((0.0, 1.0, 2.0), (3.0, 0.0), {"mnist": (0.0, 5.0)})
    figure = plots.histogram(curve, xlabel="Entropy", legend=False)
    (found,) = readings.histogram(figure, curve, 2.0)
    assert [stop.title for stop in found.stops] == ["0 to 1", "1 or more"]
    assert found.stops[1].values == (("evaluated data", None, "0 %"), ("mnist", 1.0, "100 %"))
    figure = bars.shares(["a", "b"], [0.5, 0.25], xlabel="Share", errors=[(0.4, 0.6), (0.1, 0.4)], marks=[0.9, 0.9])
    (found,) = readings.rows(figure, ["a", "b"], [[("x", 0.5, "50 %")], [("x", 0.25, "25 %")]])
    drawn = found.to_json(100, 100)
    assert drawn["by"] == "y"
    assert drawn["stops"][0][0] < drawn["stops"][1][0]  # the first is on top
    assert drawn["stops"][0][2][0][1] > drawn["stops"][1][2][0][1]
