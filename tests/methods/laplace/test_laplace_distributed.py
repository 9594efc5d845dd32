"""Two processes that each see their own rows find the posterior that one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from laplace_cases import STRUCTURES, case

from dubito import Laplace, Training
from two_processes import started

pytestmark = pytest.mark.slow


def results() -> list[torch.Tensor]:
    """Evidence and predictions of every structure, tuned on validation, and after an update.

    The last batch has one row, of which the second process has nothing.
    """
    problem, found = case("norm"), []
    first, second = (problem.inputs[:7], problem.targets[:7]), (problem.inputs[7:], problem.targets[7:])
    for structure in STRUCTURES:
        recipe = Laplace(structure=structure, rank=6, prior_precision="validation")
        posterior = recipe.fit(problem.model, first, validation=second, training=Training(epochs=1, batch_size=3))
        updated = posterior.update(second)
        for each in (posterior, updated):
            found += [each.log_evidence(), each.prior_precision, each.predict(problem.inputs).log_probs]
    return found


def shared(_: Path) -> list[torch.Tensor]:
    return results()


def test_two_processes_equal_one(tmp_path: Path) -> None:
    with started(__file__, "shared", tmp_path) as wait:
        expected = results()
        both = wait()
    for found in both:
        for ours, one in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, one, rtol=1e-6, atol=1e-8)


def test_one_process_is_the_oracle_here() -> None:
    """The results above differ between structures, so their agreement says something."""
    found = results()
    evidences = {round(found[6 * position].item(), 6) for position in range(len(STRUCTURES))}
    assert len(evidences) == len(STRUCTURES)
