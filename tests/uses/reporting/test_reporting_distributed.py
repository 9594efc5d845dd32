"""Two processes that each evaluate their own rows both return what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reporting_cases import class_data, classifier, number_data, regressor

from dubito.uses.reporting import Evaluation, evaluate

SCRIPT = """
import json, sys
import torch.distributed as dist
from test_reporting_distributed import evaluations

store, rank, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
with open(out, "w") as file:
    json.dump([result.to_json() for result in evaluations()], file)
dist.destroy_process_group()
"""


def evaluations() -> list[Evaluation]:
    """Also with a last batch, and a whole set, of a single row, of which the second process has nothing."""
    x, y = class_data(21)
    first = evaluate(
        classifier(), (x, y), batch_size=4, ood={"far": 3 * x, "single": x[:1]}, shifts={"one": (x[:1], y[:1])}
    )
    second = evaluate(regressor(1), number_data(21, 1), batch_size=4, ood={"far": 3 * number_data(9, 1)[0]})
    return [first, second]


def approximately(value):
    if isinstance(value, dict):
        return {key: approximately(entry) for key, entry in value.items() if key != "seconds_per_1000"}
    if isinstance(value, list):
        return [approximately(entry) for entry in value]
    return pytest.approx(value, rel=1e-12, abs=1e-12) if isinstance(value, float) else value


def test_two_processes_equal_one(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    outputs = [tmp_path / f"{rank}.json" for rank in range(2)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(rank), str(output)], env=environment
        )
        for rank, output in enumerate(outputs)
    ]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    found = [json.loads(output.read_text()) for output in outputs]
    expected = [approximately(result.to_json()) for result in evaluations()]
    for results in found:
        for got, want in zip(results, expected, strict=True):
            assert got.pop("seconds_per_1000") > 0
            assert got == want
