"""A resumable table of methods on trained image classifiers: clean, shifted and out of distribution, several seeds.

Each cell (task, method, seed) is one JSON file; a stopped run continues. Networks are trained once
per task and seed and shared by all methods. Hyper-parameters are chosen on validation data or by evidence, never on the
test data.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito import MAP, Training
from dubito.data import DataSet
from dubito.fitting.recipe import Recipe
from dubito.uses.comparison import Failure
from dubito.uses.reporting import Evaluation

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Task:
    """One data set and network.

    Args:
        data: The name of the data set.
        model: Makes the untrained network.
        training: How it is trained.
        ood: Data sets that are out of distribution.
        limit: How many training points are used, or None.
        limit_test: How many test points are used, or None.
    """

    data: str
    model: Callable[[], nn.Module]
    training: Training
    ood: tuple[str, ...]
    limit: int | None = None
    limit_test: int | None = None


def outside(name: str, data: DataSet, number: int | None) -> Tensor:
    """Inputs of another data set, prepared as those of `data`; grey ones become colour images with a black border."""
    if data.input_shape[0] == 1:
        return dubito.data.load(name, like=data, limit_test=number).test[0]
    other = dubito.data.load(name, limit_test=number)
    pixels = nn.functional.pad(other.encoder.decode(other.test[0]), (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return data.encoder.encode(pixels)


def run(
    folder: str,
    tasks: dict[str, Task],
    methods: dict[str, Recipe],
    seeds: int,
    kinds: tuple[str, ...],
    training: Any = None,
) -> None:
    """Fill in every cell that is missing; `training` is that of `dubito.compare`."""
    for task_name, task in tasks.items():
        for seed in range(seeds):
            if not missing(folder, task_name, methods, seed):
                continue
            data, ood = load(task)
            network = trained_network(folder, task_name, task, data, seed)
            fill(folder, task_name, methods, seed, network, data, ood, kinds, training)


def missing(folder: str, task: str, methods: Mapping[str, Recipe], seed: int) -> dict[str, Recipe]:
    """Return the methods whose cell is not there yet."""
    return {name: recipe for name, recipe in methods.items() if not cell(folder, task, name, seed).is_file()}


def load(task: Task) -> tuple[DataSet, dict[str, Tensor]]:
    """Return the data of a task, and the inputs that are out of its distribution."""
    data = dubito.data.load(task.data, limit=task.limit, limit_test=task.limit_test)
    return data, {name: outside(name, data, task.limit_test) for name in task.ood}


def fill(
    folder: str,
    task: str,
    methods: Mapping[str, Recipe],
    seed: int,
    network: nn.Module,
    data: DataSet,
    ood: dict[str, Tensor],
    kinds: tuple[str, ...],
    training: Any = None,
) -> None:
    """Fill in the missing cells of one trained network."""

    def keep(run: Any) -> None:
        if isinstance(run, Failure):
            raise run.error
        cell(folder, task, run.name, run.seed).write_text(json.dumps(run.evaluation.to_json()))
        print(f"{task} seed {run.seed} {run.name}: NLL {run.evaluation.scores['nll']:.4f}", flush=True)

    if recipes := missing(folder, task, methods, seed):
        dubito.compare(
            network, data.train, recipes, test=data.test, seeds=[seed], validation=data.validation, ood=ood,
            shifts=dubito.data.shifts(data, kinds=kinds), base=MAP(train=False), training=training, progress=keep,
        )  # fmt: skip


def trained_network(folder: str, task_name: str, task: Task, data: Any, seed: int) -> nn.Module:
    """Return the network of a task and seed, trained now or before."""
    path = RESULTS / folder / f"{task_name}-{seed}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = task.model()
    if path.is_file():
        return dubito.load(path, model).model
    generator = torch.Generator().manual_seed(seed)
    posterior = MAP().fit(model, data.train, training=task.training, generator=generator, progress=False)
    posterior.save(path)
    return posterior.model


def cell(folder: str, task: str, method: str, seed: int) -> Path:
    """Return the file of one cell."""
    name = "".join(c if c.isalnum() else "-" for c in method)
    return RESULTS / folder / f"{task}-{name}-{seed}.json"


def table(
    folder: str,
    task_name: str,
    methods: Iterable[str],
    seeds: int,
    columns: Callable[[Evaluation], dict[str, float]] | None = None,
) -> str:
    """Return a Markdown table: mean ± standard deviation over the seeds that are there."""
    lines: list[str] = []
    for method in methods:
        paths = [cell(folder, task_name, method, seed) for seed in range(seeds)]
        found = [Evaluation.from_json(json.loads(p.read_text())) for p in paths if p.is_file()]
        if not found:
            continue
        rows = [(columns or _columns)(result) for result in found]
        if not lines:
            lines += [f"| method | {' | '.join(rows[0])} |", f"|---|{'---|' * len(rows[0])}"]
        cells = [mean_text([row[key] for row in rows]) for key in rows[0]]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _columns(result: Any) -> dict[str, float]:
    columns = {key: result.scores[key.lower()] for key in ("NLL", "ECE", "accuracy")}
    for kind, by_severity in result.shifts.items():
        for key in ("nll", "ece"):
            columns[f"{kind} {key.upper()}"] = statistics.mean(scores[key] for scores in by_severity.values())
    for name, scores in result.ood.items():
        columns[f"OOD {name} (entropy)"] = scores["entropy"]["auroc"]
        columns[f"OOD {name} (epistemic)"] = scores["epistemic"]["auroc"]
    return columns


def mean_text(values: list[float]) -> str:
    """Return mean ± standard deviation."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"
