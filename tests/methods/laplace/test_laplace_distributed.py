"""Two processes that each see their own rows find the posterior that one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from laplace_cases import STRUCTURES, case

from dubito import Laplace, Training

SCRIPT = """
import sys, torch
import torch.distributed as dist
from test_laplace_distributed import results

store, rank, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.save(results(), out)
dist.destroy_process_group()
"""


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


def test_two_processes_equal_one(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"}
    outputs = [tmp_path / f"{rank}.pt" for rank in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(rank), str(output)], env=environment
        )
        for rank, output in enumerate(outputs)
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    expected = results()
    for output in outputs:
        for ours, one in zip(torch.load(output), expected, strict=True):
            torch.testing.assert_close(ours, one, rtol=1e-6, atol=1e-8)


def test_one_process_is_the_oracle_here() -> None:
    """The results above differ between structures, so their agreement says something."""
    found = results()
    evidences = {round(found[6 * position].item(), 6) for position in range(len(STRUCTURES))}
    assert len(evidences) == len(STRUCTURES)
