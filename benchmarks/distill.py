"""Distillation: one network, its distilled student and the ensemble it learned from, on Fashion-MNIST.

Every cell (method, seed) is one JSON file, so a stopped run continues:

    DUBITO_DATA=... python benchmarks/distill.py --seeds 3

The network is the MLP 784-200-200-10 in all rows. Students learn from the training images and from mixtures of two,
without labels. A prediction of a student takes one pass, that of the ensemble five.

The weight λ of a Dirichlet student's concentration is chosen from `WEIGHTS` on validation images, which neither teacher
nor student has seen: the largest one whose NLL lies within one standard error of the lowest. So the student keeps as
much of the epistemic uncertainty as possible without a measurable loss in NLL.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from typing import Any

import torch
from quality import RESULTS, cell, mean_text
from torch import Tensor

import dubito
from dubito import Ensemble, Training, models
from dubito.uses.transfer.distillation_losses import CONCENTRATION_WEIGHT

FOLDER, TASK = "distill", "fashion-mnist"
TRAINING = Training(epochs=15, lr=1e-3, batch_size=128)
LESSONS = Training(epochs=20, lr=1e-3, batch_size=128)
WEIGHTS = (0.01, 0.02, 0.05, 0.1)
SINGLE, MEAN, DISTRIBUTION, ENSEMBLE = "single network", "distilled, mean", "distilled, distribution", "ensemble of 5"
METHODS = (SINGLE, MEAN, DISTRIBUTION, ENSEMBLE)
COLUMNS = ("NLL", "accuracy", "ECE", "OOD mnist (entropy)", "OOD mnist (epistemic)", "rotation NLL")


def network() -> torch.nn.Module:
    return models.mlp(784, 10, hidden=(200, 200))


def mixtures(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """Return the inputs and as many mixtures of two of them."""
    partners = inputs[torch.randperm(len(inputs), generator=generator)]
    share = torch.rand(len(inputs), 1, 1, 1, generator=generator)
    return torch.cat([inputs, share * inputs + (1 - share) * partners])


def teacher_of(seed: int, data: Any) -> Any:
    path = RESULTS / FOLDER / f"teacher-{seed}.safetensors"
    if path.is_file():
        return dubito.load(path, network())
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    teacher = Ensemble(members=5).fit(network(), data.train, training=TRAINING, generator=generator, progress=False)
    teacher.save(path)
    return teacher


def student_of(seed: int, data: Any, keep: Any, weight: float = CONCENTRATION_WEIGHT) -> Any:
    """Return the student of a seed's teacher, taught now or before."""
    path = RESULTS / FOLDER / f"student-{keep}-{weight:g}-{seed}.safetensors"
    if path.is_file():
        return dubito.load(path, network())
    generator = torch.Generator().manual_seed(100 + seed)
    torch.manual_seed(seed)
    inputs, options = mixtures(data.train[0], generator), {"training": LESSONS, "progress": False}
    if keep == "distribution":
        options["concentration_weight"] = weight
    student = dubito.distill(teacher_of(seed, data), network(), inputs, keep, generator=generator, **options)
    student.save(path)
    return student


def choose_weight(seeds: int, data: Any) -> float:
    """Return the largest λ whose validation NLL is within one standard error of the lowest."""
    images, labels = data.validation
    losses = {}
    for weight in WEIGHTS:
        students = [student_of(seed, data, "distribution", weight) for seed in range(seeds)]
        losses[weight] = -torch.stack([each.predict(images).log_prob(labels).double() for each in students]).mean(0)
        print(f"λ = {weight:g}: validation NLL {float(losses[weight].mean()):.4f}", flush=True)
    lowest = min(losses.values(), key=lambda loss: float(loss.mean()))
    chosen = max(w for w, loss in losses.items() if _is_as_good(loss, lowest))
    print(f"chosen: λ = {chosen:g}", flush=True)
    return chosen


def _is_as_good(loss: Tensor, lowest: Tensor) -> bool:
    """Whether the mean difference of paired losses is at most its standard error."""
    more = loss - lowest
    return float(more.mean()) <= float(more.std()) / math.sqrt(len(more))


def posterior_of(method: str, seed: int, data: Any, weight: float) -> Any:
    if method == SINGLE:
        return teacher_of(seed, data).members[0]
    if method == ENSEMBLE:
        return teacher_of(seed, data)
    return student_of(seed, data, "mean") if method == MEAN else student_of(seed, data, "distribution", weight)


def run(seeds: int, limit: int) -> None:
    (RESULTS / FOLDER).mkdir(parents=True, exist_ok=True)
    missing = [(m, seed) for seed in range(seeds) for m in METHODS if not cell(FOLDER, TASK, m, seed).is_file()]
    if not missing:
        return
    data = dubito.data.load("fashion-mnist", limit=limit, limit_test=10_000)
    ood = {"mnist": dubito.data.load("mnist", like=data, limit_test=4000).test}
    weight = choose_weight(seeds, data)
    for method, seed in missing:
        posterior = posterior_of(method, seed, data, weight)
        shifts = dubito.data.shifts(data, kinds=("rotation",))
        row = columns(dubito.evaluate(posterior, data.test, ood=ood, shifts=shifts, name=method))
        cell(FOLDER, TASK, method, seed).write_text(json.dumps(row))
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
        rows = [json.loads(cell(FOLDER, TASK, method, seed).read_text()) for seed in range(seeds)]
        cells = [mean_text([row[name] for row in rows]) for name in COLUMNS]
        lines.append(f"| {method} | {5 if method == ENSEMBLE else 1} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=20_000, help="training and validation images")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run(arguments.seeds, arguments.limit)
    print(table(arguments.seeds))


if __name__ == "__main__":
    main()
