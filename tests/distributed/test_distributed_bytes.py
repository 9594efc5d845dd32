"""The cost model of `docs/many-machines.md` gives the bytes that are counted in a run of two processes."""

from __future__ import annotations

from typing import Any

import bytes_cases
import pytest
from bytes_cases import BATCHES, DIRECTIONS, FACTORS, WEIGHTS

from dubito.core import distributed
from two_processes import run

pytestmark = pytest.mark.slow

FLAG = 8 * distributed.BLOCK  # the message with which each exchange begins


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    first, second = run(bytes_cases.__file__, "everything", tmp_path_factory.mktemp("bytes"))
    assert first == second
    return first


def test_the_start_of_a_fit_sends_the_weights_and_little_else(counts: Any) -> None:
    assert 8 * WEIGHTS < counts["start"] < 8 * WEIGHTS + 12_000


def test_each_step_sends_the_gradient(counts: Any) -> None:
    assert counts["an epoch"] == BATCHES * (FLAG + 8 * (WEIGHTS + 1))


@pytest.mark.parametrize(("structure", "numbers"), [("diag", WEIGHTS), ("kron", FACTORS), ("full", WEIGHTS**2)])
def test_curvature_is_sent_once(counts: Any, structure: str, numbers: int) -> None:
    tuning = FLAG  # the scores of the prior precisions and the number of rows travel with it
    optimality = FLAG + 8 * (WEIGHTS + 1)  # a gradient and the number of rows
    assert counts[structure] - counts["start"] == FLAG + 8 * (numbers + 2) + tuning + optimality


def test_low_rank_sends_its_directions_with_each_batch_of_four_passes(counts: Any) -> None:
    assert counts["a batch of low rank"] == 4 * (FLAG + 8 * (WEIGHTS * DIRECTIONS + 2))


def test_an_evaluation_sends_seven_numbers_for_each_row(counts: Any) -> None:
    assert counts["100 rows"] == 100 * 7 * 8


def test_a_member_of_an_ensemble_is_sent_as_its_file(counts: Any) -> None:
    digits = 64  # the numbers of a fit's record have more or fewer of them
    assert abs(counts["a member"] - FLAG - counts["its file"]) < digits


def test_samples_are_sent_once(counts: Any) -> None:
    samples = 5 * 2
    assert 8 * samples * WEIGHTS <= counts["5 samples of 2 chains"] <= 8 * samples * (WEIGHTS + 4)
