"""`Evaluation` prints as an aligned table and survives strict JSON; `tables` mark what is best."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from dubito.errors import FileFormatError
from reporting_cases import class_data, classifier, number_data, regressor

from dubito.uses.reporting import Evaluation, evaluate
from dubito.uses.reporting.tables import align, column_texts, describe, goal, score_column, spans


@pytest.fixture(scope="module")
def result() -> Evaluation:
    x, y = class_data()
    shifts = {"scaling": {1: (x, y), 2.5: (2 * x, y)}, "data": (-x, y)}
    return evaluate(classifier(), (x, y), name="known", ood={"far": 3 * x, "near": x}, shifts=shifts)


def through_json(value: Evaluation) -> Evaluation:
    return Evaluation.from_json(json.loads(json.dumps(value.to_json(), allow_nan=False)))


def test_json_round_trip(result: Evaluation) -> None:
    again = through_json(result)
    assert again == result
    assert again.seconds_per_1000 == result.seconds_per_1000
    assert list(again.shifts["scaling"]) == [1, 2.5]
    assert again.to_json() == result.to_json()
    band = evaluate(regressor(1), number_data(num_inputs=1))
    assert through_json(band) == band
    assert band.curves.band is not None


def test_infinite_scores_survive_strict_json(result: Evaluation) -> None:
    hopeless = dataclasses.replace(
        result, scores={**result.scores, "nll": math.inf}, shifts={"fog": {1: {**result.scores, "nll": math.inf}}}
    )
    assert hopeless.to_json()["scores"]["nll"] == "inf"
    assert through_json(hopeless) == hopeless
    assert "inf" in str(hopeless)


def test_the_time_is_no_part_of_the_result(result: Evaluation) -> None:
    assert dataclasses.replace(result, seconds_per_1000=1e6) == result
    assert dataclasses.replace(result, count=7) != result
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.count = 7


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "does not hold an evaluation"),
        ({"$setting": "MAP"}, "does not hold an evaluation"),
        ({"format": 99}, "format 99"),
        ({"format": 1, "name": "cut"}, "altered or cut"),
    ],
)
def test_foreign_json(broken: object, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        Evaluation.from_json(broken)


def test_json_that_was_altered(result: Evaluation) -> None:
    value = result.to_json()
    value["scores"]["nll"] = "much"
    with pytest.raises(FileFormatError, match="altered or cut"):
        Evaluation.from_json(value)


def test_it_prints_as_an_aligned_table(result: Evaluation) -> None:
    head, scores, ood, trust, seconds = str(result).split("\n\n")
    assert head == "known: classification, 101 targets"
    rows = scores.splitlines()
    assert rows[0].split() == ["Accuracy", "NLL", "Brier", "ECE", "MCE", "AURC"]
    assert [row[:11].strip() for row in rows[1:]] == ["data", "scaling 1", "scaling 2.5", "data"]
    assert len({len(row) for row in rows}) == 1
    assert float(rows[1].split()[2]) == pytest.approx(result.scores["nll"], abs=5e-5)
    assert len(ood.splitlines()) == 1 + 2 * 3
    assert ood.splitlines()[-1].split()[:3] == ["near", "epistemic", "0.5000"]
    assert trust.startswith("Can it be trusted? ")
    assert seconds.endswith("seconds per 1,000 predictions (wall clock, this machine)")
    assert repr(result).startswith("<Evaluation of known: accuracy=0.2178, nll=2.241, ")


# ---------------------------------------------------------------------- tables


def marks(name: str, *runs: list[float] | None) -> list[bool]:
    return [cell.best for cell in score_column(name, runs).cells]


def test_the_best_of_each_column() -> None:
    assert marks("accuracy", [0.9], [0.8]) == [True, False]
    assert marks("nll", [0.9], [0.8], None) == [False, True, False]
    assert marks("coverage@0.9", [0.99], [0.5], [0.88]) == [False, False, True]
    assert marks("width@0.9", [3.0], [1.0]) == [False, False]
    assert marks("nll", [math.inf], [5.0]) == [False, True]
    assert marks("auroc", [0.2, 0.8], [0.6, 0.6]) == [False, True]


def test_what_reads_the_same_is_equally_good() -> None:
    assert marks("nll", [0.123401], [0.123399], [0.5]) == [True, True, False]
    assert marks("nll", [0.123401], [0.123399]) == [False, False]
    assert marks("nll", [0.1]) == [False]


def test_columns_say_which_way_is_better() -> None:
    hints = {name: score_column(name, [[0.1], [0.2]]).hint for name in ("accuracy", "ece", "coverage@0.9", "width@0.9")}
    assert hints == {"accuracy": "↑", "ece": "↓", "coverage@0.9": "", "width@0.9": ""}
    assert (goal("coverage@0.9"), goal("width@0.9"), describe("width@0.9")) == (0.9, None, "90 % width")


def test_mean_and_deviation_over_seeds() -> None:
    cell = score_column("nll", [[0.1, 0.2, 0.6], [0.5]]).cells[0]
    assert (cell.text, cell.spread) == ("0.3000", "0.2646")  # √(((0.2)² + (0.1)² + (0.3)²) / 2)
    assert score_column("nll", [[0.1, math.inf], [0.5]]).cells[0].text == "inf"


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.97123, 0.5], ["0.9712", "0.5000"]),
        ([1234.5, 2.0], ["1234", "2"]),
        ([12.345, -0.5], ["12.35", "-0.50"]),
        ([0.00051234, 0.0001], ["0.0005123", "0.0001000"]),
        ([0.0, 0.0], ["0.0000", "0.0000"]),
        ([math.inf, 3.25], ["inf", "3.2500"]),
    ],
)
def test_one_number_of_decimals_per_column(values: list[float], texts: list[str]) -> None:
    assert column_texts([[value] for value in values]) == texts


def test_groups_over_neighbouring_columns() -> None:
    columns = [score_column("nll", [[1.0]], group=group) for group in ("", "", "A", "A", "B", "")]
    assert spans(columns) == [("", 2), ("A", 2), ("B", 1), ("", 1)]


def test_align() -> None:
    assert align({"set": ["a", "long one"]}, {"n": ["1", "22"]}) == "set         n\na           1\nlong one   22"
