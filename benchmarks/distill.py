"""Distillation: one network, its distilled student and the ensemble it learned from, on Fashion-MNIST.

Every cell (method, seed) is one JSON file, so a run that is stopped goes on where it was:

    DUBITO_DATA=... python benchmarks/distill.py --seeds 3

The network is the MLP 784-200-200-10 in all rows. Students learn from the training images and from mixtures of two,
without any label; their answers take one pass, the ensemble's five.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dubito
from dubito import Ensemble, Training, models

RESULTS = Path(__file__).parent / "results" / "distill"
TRAINING = Training(epochs=15, lr=1e-3, batch_size=128)
LESSONS = Training(epochs=20, lr=1e-3, batch_size=128)
METHODS = ("single network", "distilled, mean", "distilled, distribution", "ensemble of 5")
COLUMNS = ("NLL", "accuracy", "ECE", "OOD mnist (entropy)", "OOD mnist (epistemic)", "rotation NLL")


def network() -> torch.nn.Module:
    return models.mlp(784, 10, hidden=(200, 200))


def mixtures(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Return the inputs and as many mixtures of two of them."""
    partners = inputs[torch.randperm(len(inputs), generator=generator)]
    share = torch.rand(len(inputs), 1, 1, 1, generator=generator)
    return torch.cat([inputs, share * inputs + (1 - share) * partners])


def teacher_of(seed: int, data: Any) -> Any:
    path = RESULTS / f"teacher-{seed}.safetensors"
    if path.is_file():
        return dubito.load(path, network())
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    teacher = Ensemble(members=5).fit(network(), data.train, training=TRAINING, generator=generator, progress=False)
    teacher.save(path)
    return teacher


def fit(method: str, seed: int, data: Any, teacher: Any) -> Any:
    generator = torch.Generator().manual_seed(100 + seed)
    torch.manual_seed(seed)
    if method == "single network":
        return teacher.members[0]
    if method == "ensemble of 5":
        return teacher
    keep = "distribution" if "distribution" in method else "mean"
    lessons = mixtures(data.train[0], generator)
    return dubito.distill(teacher, network(), lessons, keep, training=LESSONS, generator=generator, progress=False)


def run(seeds: int, limit: int) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        missing = [method for method in METHODS if not _cell(method, seed).is_file()]
        if not missing:
            continue
        data = dubito.data.load("fashion-mnist", limit=limit, limit_test=10_000)
        ood = {"mnist": dubito.data.load("mnist", like=data, limit_test=4000).test}
        teacher = teacher_of(seed, data)
        for method in missing:
            posterior = fit(method, seed, data, teacher)
            shifts = dubito.data.shifts(data, kinds=("rotation",))
            result = dubito.evaluate(posterior, data.test, ood=ood, shifts=shifts, name=method)
            row = columns(result)
            _cell(method, seed).write_text(json.dumps(row))
            print(seed, method, {name: round(value, 4) for name, value in row.items()}, flush=True)


def columns(result: Any) -> dict[str, float]:
    ood, rotation = result.ood["mnist"], result.shifts["rotation"]
    values = (
        result.scores["nll"], result.scores["accuracy"], result.scores["ece"], ood["entropy"]["auroc"],
        ood["epistemic"]["auroc"], statistics.mean(scores["nll"] for scores in rotation.values()),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def table(seeds: int) -> str:
    """Return a Markdown table: mean ± standard deviation over seeds."""
    lines = [f"| | passes | {' | '.join(COLUMNS)} |", f"|---|---|{'---|' * len(COLUMNS)}"]
    for method in METHODS:
        rows = [json.loads(_cell(method, seed).read_text()) for seed in range(seeds)]
        cells = [f"{_mean([row[name] for row in rows])}" for name in COLUMNS]
        lines.append(f"| {method} | {5 if 'ensemble' in method else 1} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def _cell(method: str, seed: int) -> Path:
    return RESULTS / f"{''.join(c if c.isalnum() else '-' for c in method)}-{seed}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=20_000, help="training images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run(arguments.seeds, arguments.limit)
    print(table(arguments.seeds))


if __name__ == "__main__":
    main()
