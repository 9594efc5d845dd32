"""Data that is cut among processes counts in full; networks that differ become the first process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parts_cases
import pytest
import torch

from dubito.core import distributed
from two_processes import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    first, second = run(parts_cases.__file__, "everything", tmp_path_factory.mktemp("parts"))
    return lambda case: (first[case], second[case])


def compare(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_parts_are_what_one_process_finds_on_the_whole(results: Any, tmp_path: Path) -> None:
    first, second = results("shards")
    alone = parts_cases.shards(tmp_path)
    assert not distributed.is_active()
    assert first["num_data"] == second["num_data"] == alone["num_data"] == [parts_cases.ROWS] * 10
    for name in set(alone) - {"num_data", "said"}:
        compare(first[name], alone[name], 1e-8)
        compare(second[name], first[name], 0.0)
    compare(first["resumed"], first["checkpoint"], 0.0)
    assert second["said"] == alone["said"] == []
    assert set(first["said"]) == {
        "Each of the 2 processes holds different data, which is treated as its shard of one data set of "
        f"{count} examples: to have one data set divided among them, give every process the same data."
        for count in (12, 36)
    }


def test_parts_of_different_lengths_end_together(results: Any) -> None:
    first, second = results("unequal")
    compare(second, first, 0.0)
    assert first["counts"] == [36, 36, 36]
    assert int(first["normal"]["2.num_batches_tracked"]) == 3 * 5


def test_what_is_divided_and_what_is_refused(results: Any) -> None:
    first, second = results("recognised")
    assert first["counts"] == second["counts"] == {
        "jittered": 36, "augmented": 36, "dataset": 36, "stream": 36, "stream of parts": 36, "batches": 46,
    }  # fmt: skip
    assert first["refused"] == second["refused"]
    begins = {
        "later batches": "InputError: The loaders of the processes give the same first batch, but different ones later",
        "same inputs": "InputError: The processes hold the same inputs with different targets",
        "random parts": "InputError: The loaders of the processes give different batches, and different ones",
        "constant targets": "InputError: The loaders of the processes give different batches, and different ones",
        "chains": "UnsupportedError: SGMCMC needs all the data in every process",
        "statistics": "UnsupportedError: BatchNormNoise needs all the data in every process",
        "settings": "InputError: The processes were given different recipes, training settings or likelihoods",
        "shapes": "InputError: The processes were given different networks",
        "warning as an error": "ShardsWarning: Each of the 2 processes holds different data",
    }
    assert {name: text[: len(begins[name])] for name, text in first["refused"].items()} == begins


def test_networks_are_the_first_process_s(results: Any, tmp_path: Path) -> None:
    first, second = results("networks")
    alone = parts_cases.networks(tmp_path)
    compare(second, first, 0.0)
    for name in ("laplace", "distilled", "wrapped", "loaded"):
        compare(first[name], alone[name], 1e-8)
    assert list(first["wrapped"]) == list(alone["wrapped"])


def test_every_kind_of_recipe_finds_one_posterior(results: Any) -> None:
    first, second = results("recipes")
    assert first == second
    assert {num_data for _, num_data in first.values()} == {parts_cases.ROWS}
