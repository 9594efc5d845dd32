"""Two processes that each evaluate their own rows both return what one process does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reporting_cases import class_data, classifier, number_data, regressor

from dubito.uses.reporting import Evaluation, evaluate
from two_processes import started

pytestmark = pytest.mark.slow


def evaluations() -> list[Evaluation]:
    """Also with a last batch, and a whole set, of a single row, of which the second process has nothing."""
    x, y = class_data(21)
    first = evaluate(
        classifier(), (x, y), batch_size=4, ood={"far": 3 * x, "single": x[:1]}, shifts={"one": (x[:1], y[:1])}
    )
    second = evaluate(regressor(1), number_data(21, 1), batch_size=4, ood={"far": 3 * number_data(9, 1)[0]})
    return [first, second]


def in_json() -> list[dict[str, Any]]:
    found = [result.to_json() for result in evaluations()]
    for each in found:  # here each row is a part of its own, and those of the second process come last
        each["curves"]["nll_parts"] = sorted(each["curves"]["nll_parts"])
    return found


def shared(_: Path) -> str:
    return json.dumps(in_json())


def approximately(value):
    if isinstance(value, dict):
        return {key: approximately(entry) for key, entry in value.items() if key != "seconds_per_1000"}
    if isinstance(value, list):
        return [approximately(entry) for entry in value]
    return pytest.approx(value, rel=1e-12, abs=1e-12) if isinstance(value, float) else value


def test_two_processes_equal_one(tmp_path: Path) -> None:
    with started(__file__, "shared", tmp_path) as wait:
        expected = [approximately(result) for result in in_json()]
        found = [json.loads(text) for text in wait()]
    for results in found:
        for got, want in zip(results, expected, strict=True):
            assert got.pop("seconds_per_1000") > 0
            assert got.pop("trust")["verdict"] in ("yes", "with care", "no")  # of the rows that each process has
            want.pop("trust", None)
            assert got["curves"].pop("examples") == []  # which are shown for one process alone
            want["curves"].pop("examples", None)
            assert got == want
