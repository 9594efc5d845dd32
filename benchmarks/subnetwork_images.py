"""The image tables of `subnetwork_quality.py`: trained classifiers, clean, shifted and out of distribution.

Each cell (task, row, seed) is one JSON file; existing cells are not computed again.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from dataclasses import dataclass

import quality
import torch
from quality import Task, fill, load, missing, trained_network
from torch import Tensor, nn

import dubito
from dubito import MAP, SWAG, Ensemble, Laplace, Training, models, select
from dubito.data import DataSet
from dubito.fitting.recipe import Recipe
from dubito.select.rule import SelectionRule
from dubito.uses.reporting import Evaluation

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
    """How large a run is.

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


# The network itself, and what else is one network or a few of them.
POINTS: dict[str, Recipe] = {
    "MAP": MAP(train=False),
    "MAP, temperature": MAP(train=False, temperature="validation"),
    "deep ensemble of 5": Ensemble(members=5),
}


def tuned(rows: dict[str, Laplace]) -> dict[str, Recipe]:
    """Both ways of choosing the precision of every row."""
    ways = ("evidence", "validation")
    return {f"{key}, {by}": recipe.replace(prior_precision=by) for key, recipe in rows.items() for by in ways}


def plain_rows(name: str, data: DataSet, scale: Scale) -> dict[str, Recipe]:
    """The rows of the network as it is."""
    rows = laplace_rows(name, data)
    if not scale.main_rows:
        return POINTS | tuned(rows)
    return {key: point for key, point in POINTS.items() if isinstance(point, MAP)} | tuned(main_rows(rows))


def run(names: list[str], num_seeds: int, scale: Scale) -> None:
    """Fill in what is missing."""
    for seed in range(num_seeds):
        for name in names:
            task = scale.task(name)
            data, ood = load(task)
            network = trained_network(scale.folder, name, task, data, seed)
            # the networks of an ensemble are trained like the first one, from other starts
            how = lambda recipe, task=task: task.training if isinstance(recipe, Ensemble) else None  # noqa: E731
            plain, cooler = plain_rows(name, data, scale), tuned(tempered_rows(laplace_rows(name, data)))
            fill(scale.folder, name, plain, seed, network, data, ood, SHIFTS, how)
            if missing(scale.folder, name, cooler, seed):
                fill(scale.folder, name, cooler, seed, tempered(network, data), data, ood, SHIFTS)


def columns(result: Evaluation) -> dict[str, float]:
    """What the tables show: shifts as means over their severities."""
    found = {key: result.scores[key.lower()] for key in ("NLL", "ECE", "accuracy")}
    for kind in SHIFTS:
        found[f"{kind} NLL"] = statistics.mean(scores["nll"] for scores in result.shifts[kind].values())
    found["shifted ECE"] = statistics.mean(scores["ece"] for _, _, scores in result.shift_rows())
    for name, by_score in result.ood.items():
        # a point has no epistemic part; its entropy is the best it has
        found[f"AUROC {name}"] = max(
            by_score[score]["auroc"] for score in ("entropy", "epistemic") if score in by_score
        )
    return found


def table(task: str, num_seeds: int, scale: Scale) -> str:
    """A Markdown table of what is there, mean ± standard deviation over seeds."""
    laplace = laplace_rows(task, load(scale.task(task))[0])
    rows = [*POINTS, *tuned(laplace | tempered_rows(laplace))]
    return quality.table(scale.folder, task, rows, num_seeds, columns)
