"""The image tables of `subnetwork_quality.py`: trained classifiers, clean, shifted and out of distribution.

All Laplace posteriors of one network are fitted and used together (`together.py`). Each cell (task, row, seed) is one
JSON file; existing cells are not computed again.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import together
import torch
from quality import Task, cell, mean_text, outside, trained_network
from torch import Tensor, nn

import dubito
from dubito import MAP, SWAG, Ensemble, Laplace, Training, metrics, models, select
from dubito.beliefs.prediction import ClassPrediction
from dubito.data import DataSet
from dubito.fitting.recipe import Recipe
from dubito.select.rule import SelectionRule

Predictor = Callable[[Tensor], dict[str, ClassPrediction]]

SHIFTS = ("rotation", "noise", "blur")
LAST, REST = select.last_layer(), ~select.last_layer()
CONSTANT = {"schedule": "constant"}  # without a decay to zero networks stay as overconfident as in common use
TASKS = {
    "fashion-mlp": Task(
        "fashion-mnist", models.lenet_300_100, Training(epochs=40, **CONSTANT), ("mnist", "kmnist"),
        limit=12_000, limit_test=1000,
    ),
    "fashion-lenet5": Task(
        "fashion-mnist", models.lenet5, Training(epochs=15, **CONSTANT), ("mnist", "kmnist"),
        limit=12_000, limit_test=1000,
    ),
    "mnist-lenet5": Task(
        "mnist", models.lenet5, Training(epochs=15, **CONSTANT), ("fashion-mnist", "kmnist", "notmnist"),
        limit=12_000, limit_test=1000,
    ),
    "cifar10-resnet20": Task(
        "cifar10", lambda: models.resnet20((3, 32, 32), 10, width=8), Training(epochs=12, batch_size=64, **CONSTANT),
        ("fashion-mnist",), limit=10_000, limit_test=1000,
    ),
}  # fmt: skip
# Training rows (a tenth of them for validation) and test images of a quick run.
QUICK = {
    "fashion-mlp": (6000, 600),
    "fashion-lenet5": (3000, 300),
    "mnist-lenet5": (3000, 300),
    "cifar10-resnet20": (2000, 200),
}


@dataclass(frozen=True)
class Scale:
    """How large a run is, and where its cells lie.

    Args:
        quick: Whether it is on fewer images.
        main_rows: Whether it is only of the rows that are fitted at both temperatures.
    """

    quick: bool
    main_rows: bool

    @property
    def folder(self) -> str:
        """The folder of the cells."""
        return "subnetwork-quick" if self.quick else "subnetwork"

    def task(self, name: str) -> Task:
        """A task in its size."""
        if not self.quick:
            return TASKS[name]
        limit, limit_test = QUICK[name]
        return dataclasses.replace(TASKS[name], limit=limit, limit_test=limit_test)

    def cell(self, task: str, row: str, seed: int) -> Path:
        """The file of one cell."""
        return cell(self.folder, task, row, seed)

    def has(self, task: str, seed: int, *rows: str) -> bool:
        """Whether all of these rows are there."""
        return all(self.cell(task, row, seed).is_file() for row in rows)


def full(weights: SelectionRule) -> Laplace:
    """A full covariance over some weights."""
    return Laplace(structure="full", weights=weights)


def laplace_rows(task_name: str, data: DataSet) -> dict[str, Laplace]:
    """The Laplace posteriors that are compared on a task."""
    # the last layer of LeNet-5 has 5,010 weights, whose full covariance costs more than all others together
    large_last = task_name.endswith("lenet5")
    some = select.subnetwork(500, candidates=LAST) if large_last else LAST
    rows = {
        "last layer": Laplace(structure="kron", weights=LAST) if large_last else full(LAST),
        "K-FAC": Laplace(structure="kron"),
        "diagonal": Laplace(structure="diag"),
        "output variance, 1000": full(select.subnetwork(1000)),
        "magnitude, 1000": full(select.subnetwork(1000, rule="magnitude")),
        "random, 1000": full(select.subnetwork(1000, rule="random")),
        "last layer + output variance, 500": full(some | select.subnetwork(500, candidates=REST)),
    }
    if task_name != "cifar10-resnet20":
        rows["sampled, 1000"] = full(select.subnetwork(1000, rule="sampled"))
        rows["weight variance, 1000"] = full(select.largest_variance(1000))
    return rows | (more_rows(data) if task_name == "fashion-mlp" else {})


def more_rows(data: DataSet) -> dict[str, Laplace]:
    """Further sizes, contexts, variances and unions, for the smallest of the networks."""
    swag = SWAG(burn_in=0.0)
    return {
        "output variance, rotated context, 1000": full(select.subnetwork(1000, context=rotated_context(data))),
        "output variance, 300": full(select.subnetwork(300)),
        "output variance, 2000": full(select.subnetwork(2000)),
        "output variance, Kronecker σ², 1000": full(select.subnetwork(1000, variance="kron")),
        "output variance, σ² of SWAG, 1000": full(select.subnetwork(1000, variance=swag)),
        "weight variance of SWAG, 1000": full(select.largest_variance(1000, of=swag)),
        "last layer + sampled, 500": full(LAST | select.subnetwork(500, rule="sampled", candidates=REST)),
    }


def main_rows(rows: dict[str, Laplace]) -> dict[str, Laplace]:
    """The baselines, and one row of each kind of choice."""
    kept = ("last layer", "K-FAC", "output variance, 1000", "magnitude, 1000", "random, 1000")
    return {key: rows[key] for key in kept}


def tempered_rows(rows: dict[str, Laplace]) -> dict[str, Laplace]:
    """The rows that are also fitted to the network with its logits divided by √T."""
    return {f"√T, {key}": row for key, row in main_rows(rows).items()}


def tempered(network: nn.Sequential, data: DataSet) -> nn.Sequential:
    """The network with its logits over √T, where T is the best temperature on validation data.

    Temperature takes one half of the overconfidence away (on a logarithmic scale), a posterior can take the rest; and
    its curvature is no longer that of probabilities which are all but 0 and 1.
    """
    recipe = MAP(train=False, temperature="validation")
    point = recipe.fit(network, data.train, validation=data.validation, progress=False)
    cooler = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in cooler[-1].parameters():
            parameter /= point.temperature**0.5
    return cooler


def rotated_context(data: DataSet, number: int = 1000) -> Tensor:
    """Training images, each rotated by its own angle."""
    angles = 360 * torch.rand(number, generator=torch.Generator().manual_seed(0))
    return dubito.data.rotate(data.train[0][:number], angles, standardizer=data.encoder)


def load(task: Task) -> tuple[DataSet, dict[str, Tensor]]:
    """The data of a task, and the inputs that are out of its distribution."""
    data = dubito.data.load(task.data, limit=task.limit, limit_test=task.limit_test)
    return data, {name: outside(name, data, task.limit_test) for name in task.ood}


def run(names: list[str], num_seeds: int, scale: Scale) -> None:
    """Fill in what is missing."""
    for seed in range(num_seeds):
        for name in names:
            data, ood = load(scale.task(name))
            predictors = list(missing(name, data, seed, scale))
            for row, scores in judge(predictors, data, ood).items():
                scale.cell(name, row, seed).write_text(json.dumps(scores))
                print(f"{name} seed {seed} {row}: {_brief(scores)}", flush=True)


def missing(name: str, data: DataSet, seed: int, scale: Scale) -> Iterator[Predictor]:
    """What predicts the rows that are not there yet."""
    task, rows = scale.task(name), laplace_rows(name, data)
    points = {key: point for key, point in POINTS.items() if not scale.has(name, seed, key)}
    points = {key: point for key, point in points.items() if isinstance(point, MAP) or not scale.main_rows}
    plain, cooler = (
        {key: row for key, row in some.items() if not scale.has(name, seed, *_tunings(key))}
        for some in (main_rows(rows) if scale.main_rows else rows, tempered_rows(rows))
    )
    if not (points or plain or cooler):
        return
    network = trained_network(scale.folder, name, task, data, seed)
    if points:
        yield point_predictor(points, network, data, task.training, seed)
    if plain:
        yield laplace_predictor(plain, network, data)
    if cooler:
        yield laplace_predictor(cooler, tempered(network, data), data)


# The network itself, and what else is one network or a few of them.
POINTS: dict[str, Recipe] = {
    "MAP": MAP(train=False),
    "MAP, temperature": MAP(train=False, temperature="validation"),
    "deep ensemble of 5": Ensemble(members=5),
}


def _tunings(row: str) -> list[str]:
    return [f"{row}, {by}" for by in ("evidence", "validation")]


def point_predictor(
    points: dict[str, Recipe], network: nn.Module, data: DataSet, training: Training, seed: int
) -> Predictor:
    """Networks as they are; those of an ensemble are trained like the first one, from other starts."""
    fitted = {
        key: recipe.fit(
            network, data.train, validation=data.validation, training=training,
            generator=torch.Generator().manual_seed(seed), progress=False,
        )
        for key, recipe in points.items()
    }  # fmt: skip
    return lambda inputs: {key: posterior.predict(inputs) for key, posterior in fitted.items()}


def laplace_predictor(rows: dict[str, Laplace], network: nn.Module, data: DataSet) -> Predictor:
    """All Laplace posteriors at once, each with both ways of choosing its precision."""
    together.check(network, data.train, data.validation)
    posteriors = {}
    for key, raw in together.fit(network, rows, data.train).items():
        for row, by in zip(_tunings(key), ("evidence", "validation"), strict=True):
            posteriors[row] = together.tuned(raw, by, data.validation)
    for row, posterior in posteriors.items():
        print(f"  {row}: {posterior.selection.num_weights} weights, λ = {float(posterior.prior_precision):.3g}")
    return lambda inputs: together.predict(posteriors, inputs)


def judge(predictors: list[Predictor], data: DataSet, ood: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The scores of every row: clean, by shift and severity, and out of distribution."""
    found: dict[str, dict[str, Any]] = {}
    shifts = dubito.data.shifts(data, kinds=SHIFTS)
    for predictor in predictors:
        clean = predictor(data.test[0])
        for row, prediction in clean.items():
            found[row] = {"clean": scores_of(prediction, data.test[1]), "ood": {}} | {kind: [] for kind in SHIFTS}
        for kind, (inputs, targets) in _shifted(shifts):
            for row, prediction in predictor(inputs).items():
                found[row][kind].append(scores_of(prediction, targets))
        for name, inputs in ood.items():
            for row, prediction in predictor(inputs).items():
                found[row]["ood"][name] = detection(clean[row], prediction)
    return found


def _shifted(shifts: Any) -> Iterator[tuple[str, Any]]:
    return ((kind, pair) for kind, by_severity in shifts.items() for pair in by_severity.values())


def scores_of(prediction: ClassPrediction, targets: Tensor) -> dict[str, float]:
    """Likelihood, calibration and accuracy."""
    return {
        "nll": -float(prediction.log_prob(targets).double().mean()),
        "ece": float(metrics.ece(prediction.probs, targets)),
        "accuracy": float(metrics.accuracy(prediction.probs, targets)),
    }


def detection(inside: ClassPrediction, outside: ClassPrediction) -> dict[str, float]:
    """The AUROC of out-of-distribution images, by entropy and by epistemic uncertainty."""
    labels = torch.cat([torch.zeros(len(inside.entropy)), torch.ones(len(outside.entropy))])
    both = {"entropy": (inside.entropy, outside.entropy), "epistemic": (inside.epistemic, outside.epistemic)}
    return {key: float(metrics.auroc(torch.cat(pair), labels)) for key, pair in both.items()}


def _brief(scores: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.3f}" for key, value in columns(scores).items())


def columns(scores: dict[str, Any]) -> dict[str, float]:
    """What the tables show: shifts as means over their severities."""
    found = {"NLL": scores["clean"]["nll"], "ECE": scores["clean"]["ece"], "accuracy": scores["clean"]["accuracy"]}
    for kind in SHIFTS:
        found[f"{kind} NLL"] = statistics.mean(each["nll"] for each in scores[kind])
    found["shifted ECE"] = statistics.mean(each["ece"] for kind in SHIFTS for each in scores[kind])
    for name, by_score in scores["ood"].items():
        # a point has no epistemic part; its entropy is the best it has
        found[f"AUROC {name}"] = max(by_score["entropy"], by_score["epistemic"])
    return found


def table(task: str, num_seeds: int, scale: Scale) -> str:
    """A Markdown table of what is there, mean ± standard deviation over seeds."""
    data, _ = load(scale.task(task))
    laplace = laplace_rows(task, data)
    rows = [*POINTS, *(row for key in laplace | tempered_rows(laplace) for row in _tunings(key))]
    lines: list[str] = []
    for row in rows:
        paths = [scale.cell(task, row, seed) for seed in range(num_seeds)]
        found = [columns(json.loads(path.read_text())) for path in paths if path.is_file()]
        if found and not lines:
            lines = [f"| {task} | {' | '.join(found[0])} |", f"|---|{'---|' * len(found[0])}"]
        if found:
            lines.append(f"| {row} | {' | '.join(mean_text([each[key] for each in found]) for key in found[0])} |")
    return "\n".join(lines)
