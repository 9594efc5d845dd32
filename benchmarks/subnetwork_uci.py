"""The UCI tables of `subnetwork_quality.py`: small regression sets, standard and gap splits, one hidden layer of 50.

Each cell (data set, split) is one JSON file with all rows; existing cells are not computed again.
"""

from __future__ import annotations

import json
import statistics
import warnings
from typing import Any

import torch
from quality import RESULTS, mean_text
from torch import Tensor, nn

import dubito
from dubito import MAP, Laplace, Training, likelihoods, models, select
from dubito.data import DataSet
from dubito.fitting.recipe import Recipe
from dubito.methods.laplace import LaplacePosterior

FOLDER = RESULTS / "subnetwork-uci"
SETS = ("boston", "concrete", "energy", "wine", "yacht")
KINDS = ("standard", "gap")
SHARE = 0.1
TRAINING = Training(epochs=300, batch_size=32, lr=1e-2)
LAST = select.last_layer()


def rules(context: Tensor) -> dict[str, Any]:
    """Every way of choosing a tenth of the weights; `context` are inputs spread over the range of each feature."""
    return {
        "output variance": select.subnetwork(SHARE),
        "output variance, half of the weights": select.subnetwork(0.5),
        "output variance, context": select.subnetwork(SHARE, context=context),
        "output variance, Kronecker σ²": select.subnetwork(SHARE, variance="kron"),
        "sampled": select.subnetwork(SHARE, rule="sampled"),
        "greedy": select.subnetwork(SHARE, rule="greedy"),
        "greedy, context": select.subnetwork(SHARE, rule="greedy", context=context),
        "weight variance": select.largest_variance(SHARE),
        "magnitude": select.subnetwork(SHARE, rule="magnitude"),
        "random": select.subnetwork(SHARE, rule="random"),
        "last layer + output variance": LAST | select.subnetwork(SHARE, candidates=~LAST),
    }


def spread_inputs(inputs: Tensor, number: int = 300) -> Tensor:
    """Inputs whose features are drawn on their own, uniformly over the range of the training data and 5 % beyond."""
    low, high = inputs.amin(0), inputs.amax(0)
    position = torch.rand(number, inputs.shape[1], generator=torch.Generator().manual_seed(0))
    return low + (1.1 * position - 0.05) * (high - low)


def run(num_splits: int) -> None:
    """Fill in what is missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split in range(num_splits):
        for name in SETS:
            for kind in KINDS:
                path = FOLDER / f"{name}-{kind}-{split}.json"
                if not path.is_file():
                    data = dubito.data.load(f"uci/{name}", split=split, gap=kind == "gap", validation=0.2)
                    rows = measure(data, seed=split)
                    path.write_text(json.dumps(rows))
                    print(f"{path.stem}: full {rows['full, evidence']['nll']:.3f}", flush=True)


def measure(data: DataSet, seed: int) -> dict[str, dict[str, float]]:
    """The scores of every row on one split."""
    torch.manual_seed(seed)
    model = models.mlp(data.input_shape[0], 1, hidden=50)
    options: dict[str, Any] = {"likelihood": likelihoods.Gaussian(), "validation": data.validation, "progress": False}
    generator = torch.Generator().manual_seed(seed)
    trained = MAP(prior_precision=1.0).fit(model, data.train, training=TRAINING, generator=generator, **options).model
    choices = rules(spread_inputs(data.train[0]))
    recipes = {"full": Laplace(structure="full"), "K-FAC": Laplace(structure="kron")}
    recipes |= {"diagonal": Laplace(structure="diag"), "last layer": Laplace(structure="full", weights=LAST)}
    recipes |= {key: Laplace(structure="full", weights=rule) for key, rule in choices.items()}
    plain = MAP(train=False)
    rows: dict[str, Recipe] = {"MAP": plain, "MAP, tuned noise": MAP(train=False, temperature="validation")}
    for key, recipe in recipes.items():
        rows |= {f"{key}, {by}": recipe.replace(prior_precision=by) for by in ("evidence", "validation")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", select.SelectionWarning)
        compared = dubito.compare(trained, data.train, rows, test=data.test, seeds=[seed], base=plain, **options)
        whole: Any = rows["full, evidence"].fit(trained, data.train, **options)
        found = {run.name: {"nll": run.evaluation.scores["nll"]} for run in compared.runs}
        return found | {"captured": captured(trained, data, whole, choices | {"last layer": LAST})}


def captured(model: nn.Module, data: DataSet, whole: LaplacePosterior, choices: dict[str, Any]) -> dict[str, float]:
    """The share of the full posterior's predictive variance at the test inputs, all at the full one's λ and noise."""
    prior, likelihood = float(whole.prior_precision), whole.likelihood
    total = whole.functional(data.test[0])[1].sum()
    found = {}
    for key, rule in choices.items():
        recipe = Laplace(structure="full", weights=rule, prior_precision=prior)
        part = recipe.fit(model, data.train, likelihood=likelihood, progress=False)
        found[key] = float(part.functional(data.test[0])[1].sum() / total)
    return found


def table(num_splits: int) -> str:
    """A Markdown table: NLL by set, its mean rank among all rows, and captured variance; standard and gap splits."""
    cells = {
        (name, kind): [
            json.loads(path.read_text())
            for split in range(num_splits)
            if (path := FOLDER / f"{name}-{kind}-{split}.json").is_file()
        ]
        for kind in KINDS
        for name in SETS
    }
    parts = []
    for kind in KINDS:
        mine = {name: cells[name, kind] for name in SETS if cells[name, kind]}
        if mine:
            parts.append(_kind_table(kind, mine))
    return "\n\n".join(parts)


def _kind_table(kind: str, cells: dict[str, list[dict[str, Any]]]) -> str:
    everything = [cell for some in cells.values() for cell in some]
    rows = [row for row in everything[0] if row != "captured"]
    ranks = {row: statistics.mean(_rank(row, cell, rows) for cell in everything) for row in rows}
    lines = [f"| {kind} splits | {' | '.join(cells)} | mean rank | captured |", f"|---|{'---|' * (len(cells) + 2)}"]
    for row in rows:
        scores = [mean_text([cell[row]["nll"] for cell in some]) for some in cells.values()]
        shares = [cell["captured"].get(row.rpartition(",")[0]) for cell in everything]
        share = f"{statistics.mean(shares):.2f}" if shares[0] is not None else ""
        lines.append(f"| {row} | {' | '.join(scores)} | {ranks[row]:.1f} | {share} |")
    return "\n".join(lines)


def _rank(row: str, cell: dict[str, Any], rows: list[str]) -> float:
    """1 for the lowest NLL; rows that tie share their ranks."""
    own = cell[row]["nll"]
    better = sum(cell[other]["nll"] < own for other in rows)
    return better + (sum(cell[other]["nll"] == own for other in rows) + 1) / 2
