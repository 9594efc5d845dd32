"""Two processes find what one finds, and stop and go on together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_cases import ROWS, everything

from two_processes import started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """Return what one process found, and what each of two found."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "alone").mkdir()
    with started(str(Path(__file__).with_name("distributed_cases.py")), "everything", folder) as wait:
        alone = everything(folder / "alone")
        return alone, *wait()


def compare(found: Any, expected: Any, tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


FITS = (
    "adam", "sgd", "fresh", "loader", "batches", "stopped", "one row of validation", "regression", "scores",
    "weight samples", "natural", "correlated", "scales", "auto",
)  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_that_of_one_process(results: Any, name: str) -> None:
    alone, first, second = (each["fits"][name] for each in results)
    compare(first, alone, 1e-10)
    compare(second, first, 0.0)


def test_in_single_precision_too(results: Any) -> None:
    alone, first, _ = (each["fits"]["single"] for each in results)
    compare(first, alone, 1e-6)


def test_noise_and_temperature(results: Any) -> None:
    alone, first, second = (each["fits"]["numbers"] for each in results)
    torch.testing.assert_close(first, alone, rtol=1e-6, atol=0.0)
    assert torch.equal(first, second)


def test_a_prediction_is_of_all_rows_in_every_process(results: Any) -> None:
    alone, first, second = (each["fits"]["predicted"] for each in results)
    assert len(first) == len(second) == ROWS
    torch.testing.assert_close(first, alone, rtol=1e-10, atol=1e-10)


def test_networks_stay_the_same_though_their_noise_differs(results: Any) -> None:
    _, first, second = (each["noisy"] for each in results)
    for part in ("params", "buffers"):
        compare(second[part], first[part], 0.0)
    assert len(first["masks"]) == len(second["masks"]) == 15
    assert not any(torch.equal(a, b) for a, b in zip(first["masks"], second["masks"], strict=True))


@pytest.mark.parametrize("name", ["map", "sum"])
def test_a_crashed_run_goes_on(results: Any, name: str) -> None:
    alone, first, second = (each["resumed"] for each in results)
    compare(alone[f"{name}-broken"], alone[f"{name}-whole"], 0.0)
    for each in (first, second):  # a sum over processes is added up in another order
        compare(each[f"{name}-broken"], each[f"{name}-whole"], 1e-13 if name == "sum" else 0.0)
    compare(first[f"{name}-broken"], alone[f"{name}-broken"], 1e-10)
    compare(second[f"{name}-broken"], first[f"{name}-broken"], 0.0)


def test_primitives(results: Any) -> None:
    alone, first, second = (each["primitives"] for each in results)
    for each in (first, second):
        assert [part.tolist() for part in each["sum"]] == [[3.0, 4.0], [[6], [1]], 1.0]
        assert each["mean"][0].tolist() == [0.5]
        assert each["first"] == [True, False]
        assert each["sizes"] == alone["sizes"] == [8, 8, 8, 8, 8, 1]
        assert each["first look"] == 8
    assert [part.tolist() for part in alone["sum"]] == [[1.0, 2.0], [[3], [0]], 0.5]
    assert alone["first"] == [True, False]
    assert (first["rows"], second["rows"]) == ([4, 4, 4, 4, 4, 1], [4, 4, 4, 4, 4, 0])
    assert (first["whole"], second["whole"], alone["whole"]) == (21, 20, 41)
    assert torch.equal(first["shared"], second["shared"])
    assert torch.equal(first["shared"], alone["shared"])
    assert not torch.equal(first["local"], second["local"])
