"""Rows as JSON, answers to several requests at once, and batches; none of it needs a server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from serving_cases import HOUSE, run_of

from dubito.core.errors import DubitoError, InputError
from dubito.uses.serving import service
from dubito.uses.serving.limits import ServingLimits
from dubito.uses.serving.rows import read_json, table_of
from dubito.uses.serving.service import Answer, Service

NAMES = ("size", "town")


def tables(*rows: Any) -> Any:
    return table_of({"rows": list(rows)}, NAMES, ServingLimits())


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"rows": [{"size": NaN}]}', "NaN is not JSON"),
        (b'{"rows": [{"size": -Infinity}]}', "-Infinity is not JSON"),
        (b'{"rows": [{"size": 1' + b"0" * 5000 + b"}]}", "not JSON"),
        (b"[]", "must be an object with rows"),
        (b'{"rows": {"size": 1}}', "must be an object with rows"),
        (b'{"rows": [], "coverage": 0.5}', "unknown entry 'coverage'"),
        (b'{"rows": []}', "no rows"),
        (b'{"rows": [3]}', "Row 0 is a number"),
        (b'{"rows": [null]}', "Row 0 is a null"),
        (b'{"rows": [[1, "Ulm"], [1]]}', "Row 1 has 1 cells for 2 columns"),
        (b'{"rows": [{"size": 1}]}', "Row 0 lacks the column 'town'"),
        (b'{"rows": [{"size": [1], "town": "Ulm"}]}', "holds an array in the column 'size'"),
        (b'{"rows": [{"size": 1, "town": "' + b"U" * 2000 + b'"}]}', "2,000 characters"),
        (b'{"rows": [[1, 2]], "columns": ["size", "size"]}', "twice"),
        (b'{"rows": [[1, 2]], "columns": "size"}', "list of names"),
        (b'{"rows": [[1]], "columns": ["size"]}', "Row 0 lacks the column 'town'"),
        (b'{"rows": [' + b",".join([b"[1, 2]"] * 1001) + b"]}", "1,001 rows"),
    ],
)
def test_what_is_no_table_is_said_in_a_sentence(body: bytes, told: str) -> None:
    with pytest.raises(InputError, match=told) as found:
        table_of(read_json(body), NAMES, ServingLimits())
    assert str(found.value).endswith(".")


def test_objects_and_arrays_are_the_same_rows() -> None:
    limits = ServingLimits()
    objects = table_of({"rows": [{**HOUSE, "id": 3}, {"town": None, "size": None}]}, NAMES, limits)
    arrays = table_of({"rows": [[120.0, "Ulm"], [None, None]]}, NAMES, limits)
    other = table_of({"columns": ["id", "town", "size"], "rows": [[3, "Ulm", 120.0], [4, None, None]]}, NAMES, limits)
    assert str(objects.rows()) == str(arrays.rows()) == str(other.rows())


def test_whole_numbers_that_are_too_large_for_float64_are_not_rounded() -> None:
    assert tables([2**53, 2**60]).rows() == [(str(2**53), str(2**60))]
    assert tables([10**400, True]).rows() == [(str(10**400), True)]


@pytest.mark.parametrize("target", ["price", "cheap"])
def test_answers_are_those_of_predict(target: str) -> None:
    run = run_of(target)
    service = Service(run)
    sizes, towns = [50.0, 120.0, 190.0, 900.0], ["Ulm", "Bern", "Rom", "Wien"]
    expected, rows = run.predict({"size": sizes, "town": towns}), [list(row) for row in zip(sizes, towns, strict=True)]
    answers = service.answer([tables(*rows[:1]), tables(*rows[1:])])
    found_rows = [row for answer in answers for row in answer.predictions]  # type: ignore[union-attr]
    assert list(found_rows[0]) == list(run.columns)
    for name in run.columns:
        found = [row[name] for row in found_rows]
        exact = isinstance(found[0], str)
        assert found == (
            expected[name].tolist() if exact else pytest.approx(expected[name].tolist(), rel=1e-6, abs=1e-9)
        )
    json.dumps(found_rows, allow_nan=False)
    assert answers[0].to_json()["notes"] == []  # type: ignore[union-attr]
    assert "'Rom' in row 1" in answers[1].to_json()["notes"][0]  # type: ignore[union-attr]


def test_a_bad_request_does_not_touch_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(run_of())
    bad, infinite = tables(["large", "Ulm"]), tables([1e99, "Ulm"])
    first, second, third, fourth = service.answer([tables([50.0, "Ulm"]), bad, infinite, tables([90.0, "Bern"])])
    assert isinstance(second, DubitoError)
    assert str(second) == "The column 'size' holds numbers, but row 0 has 'large'."
    assert isinstance(third, DubitoError)
    alone = [service.answer([tables(row)])[0].predictions[0]["prediction"] for row in ([50.0, "Ulm"], [90.0, "Bern"])]  # type: ignore[union-attr]
    assert [each.predictions[0]["prediction"] for each in (first, fourth)] == pytest.approx(alone)  # type: ignore[union-attr]

    predict = service.predict

    def picky(inputs: Any) -> Any:  # an error that only the prediction finds, in one of the requests
        if (inputs[:, 0] > 3).any():
            raise InputError("Too large.")
        return predict(inputs)

    monkeypatch.setattr(service, "predict", picky)
    good, odd = service.answer([tables([90.0, "Bern"]), tables([5000.0, "Ulm"])])
    assert isinstance(good, Answer)
    assert str(odd) == "Too large."


def test_batches_grow_while_one_is_computed() -> None:
    batches: list[list[int]] = []
    go = threading.Event()

    def answer(questions: Sequence[int]) -> list[int | Exception]:
        batches.append(list(questions))
        go.wait(10)
        return [InputError("Two.") if question == 2 else 10 * question for question in questions]

    async def work() -> list[Any]:
        batcher = service.Batcher(answer, together=4, waiting=7)
        first = asyncio.create_task(batcher.ask(0, 1))
        while not batches:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(batcher.ask(question, 1)) for question in (1, 2, 3)]
        large, gone = asyncio.create_task(batcher.ask(4, 3)), asyncio.create_task(batcher.ask(5, 1))
        await asyncio.sleep(0)
        with pytest.raises(service.FullError):
            await batcher.ask(6, 1)
        gone.cancel()
        await asyncio.sleep(0)
        go.set()
        found = await asyncio.gather(first, *others, large, return_exceptions=True)
        await batcher.close()
        return found

    assert [str(each) for each in asyncio.run(work())] == ["0", "10", "Two.", "30", "40"]
    assert batches == [[0], [1, 2, 3], [4]]


def test_a_failure_is_told_to_all_who_wait_and_ends_nothing() -> None:
    def answer(questions: Sequence[int]) -> list[int]:
        if 1 in questions:
            raise ArithmeticError("no")
        return list(questions)

    async def work() -> list[Any]:
        batcher = service.Batcher(answer, together=4, waiting=8)
        found = await asyncio.gather(batcher.ask(1, 1), batcher.ask(1, 1), return_exceptions=True)
        found.append(await batcher.ask(7, 1))
        await batcher.close()
        return found

    assert [str(each) for each in asyncio.run(work())] == ["no", "no", "7"]
