"""Are rank-1 mixtures worth it? Beside BatchEnsemble, dropout, SWAG, snapshots and a deep ensemble, three seeds.

    DUBITO_DATA=... python benchmarks/rank1.py [--tasks mlp lenet5-small] [--seeds 3] [--methods ...] [--table]

Every method trains from the same untrained network for the same number of epochs, with the same optimizer and weight
decay; what an epoch costs differs, and the table says by how much. Clean test data, three corruptions in five
severities (means), out-of-distribution detection by entropy. Resumable: cells that are done are kept in
benchmarks/results/rank1. The tasks lenet5 and cifar10 are the full ones: 11 to 12 methods take hours on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import cpu_seconds
from quality import RESULTS, Task, mean_text
from torch import nn

import dubito
from dubito import MAP, BatchEnsemble, Posterior, Rank1, Training, models, priors
from dubito.ensembles import SWAG, Ensemble, MCDropout, Snapshot

KINDS = ("noise", "blur", "rotation")
TRAINING = Training(epochs=15, lr=2e-3, batch_size=64, weight_decay=1e-4)
FASHION: dict[str, Any] = {"data": "fashion-mnist", "ood": ("mnist", "kmnist")}
TASKS = {
    "mlp": Task(model=models.lenet_300_100, training=TRAINING, limit=4000, limit_test=1000, **FASHION),
    "lenet5-small": Task(
        model=models.lenet5, training=TRAINING.replace(epochs=12), limit=1200, limit_test=300, **FASHION
    ),
    "lenet5": Task(model=models.lenet5, training=TRAINING, limit=10_000, limit_test=2000, **FASHION),
    "cifar10": Task(
        "cifar10", lambda: models.resnet20(width=8), TRAINING.replace(epochs=30, batch_size=128), ("fashion-mnist",),
        limit=10_000, limit_test=1000,
    ),
}  # fmt: skip


class Method(NamedTuple):
    """A recipe, and how many networks' worth of numbers its posterior keeps (Rank1 counts its own)."""

    recipe: Any
    copies: float = 1.0


# All mixtures start alike, around 1 by 0.5; the training settings have the weight decay of all methods.
OWN: dict[str, Any] = {"weight_decay": 0.0, "spread": 0.5}
NORMAL: dict[str, Any] = {"initial_scale": 0.1, **OWN}
WIDE: dict[str, Any] = {"prior": priors.Normal(1.0, 0.5), "initial_scale": 0.3, **OWN}
CAUCHY: dict[str, Any] = {"posterior": "cauchy", "prior": priors.Cauchy(1.0, 0.1), **OWN}
METHODS: dict[str, Method] = {
    "MAP": Method(MAP()),
    "MAP, temperature": Method(MAP(train=False, temperature="validation")),
    "BatchEnsemble, split": Method(BatchEnsemble(**OWN)),
    "rank-1 normal, split": Method(Rank1(batch="split", **NORMAL)),
    "MC dropout": Method(MCDropout(rate=0.1, filterwise=False)),
    "MC dropout, filterwise, repeated": Method(MCDropout(rate=0.1, filterwise=True, repeats=4)),
    "SWAG": Method(SWAG(rank=20), copies=22.0),
    "Snapshot of 4": Method(Snapshot(cycles=4), copies=4.0),
    "deep ensemble of 4": Method(Ensemble(members=4), copies=4.0),
    "BatchEnsemble, repeat": Method(BatchEnsemble(batch="repeat", **OWN)),
    "rank-1 normal, repeat": Method(Rank1(**NORMAL)),
    "rank-1 normal, wide prior, repeat": Method(Rank1(**WIDE)),
    "rank-1 Cauchy, repeat": Method(Rank1(**CAUCHY)),
}


def cell(task: str, method: str, seed: int) -> Path:
    """Return the file of one cell."""
    name = "".join(c if c.isalnum() else "-" for c in method)
    return RESULTS / "rank1" / f"{task}-{name}-{seed}.json"


def run(task_name: str, seeds: int, names: list[str]) -> None:
    """Fill in every cell that is missing; all methods of a seed before the next seed."""
    task = TASKS[task_name]
    for seed in range(seeds):
        missing = [name for name in names if not cell(task_name, name, seed).is_file()]
        if not missing:
            continue
        data = dubito.data.load(task.data, limit=task.limit, limit_test=task.limit_test)
        ood = {name: dubito.data.load(name, like=data, limit_test=task.limit_test).test for name in task.ood}
        for name in missing:
            found = one_cell(task_name, task, METHODS[name], seed, data, ood)
            cell(task_name, name, seed).write_text(json.dumps(found))
            print(f"{task_name} seed {seed} {name}: {found}", flush=True)


def one_cell(task_name: str, task: Task, method: Method, seed: int, data: Any, ood: Any) -> dict[str, float]:
    """Train and measure one method."""
    point = RESULTS / "rank1" / f"{task_name}-{seed}.safetensors"
    point.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = task.model()
    if getattr(method.recipe, "train", True) is False:
        model = dubito.load(point, model).model  # the network of the MAP cell, which comes first
    kept: list[Posterior] = []
    generator = torch.Generator().manual_seed(seed)

    def fit() -> None:
        options: dict[str, Any] = {"training": task.training, "validation": data.validation, "progress": False}
        kept.append(method.recipe.fit(model, data.train, generator=generator, **options))

    training = cpu_seconds(fit)
    posterior = kept[0]
    if isinstance(method.recipe, MAP) and method.recipe.train:
        posterior.save(point)
    passes = passes_of(posterior, model, data.test[0])
    result = dubito.evaluate(posterior, data.test, ood=ood, shifts=dubito.data.shifts(data, kinds=KINDS))
    shifted = [scores for by_severity in result.shifts.values() for scores in by_severity.values()]
    size = getattr(posterior, "num_parameters", method.copies * sum(p.numel() for p in model.parameters()))
    return {
        "accuracy": result.scores["accuracy"], "NLL": result.scores["nll"], "ECE": result.scores["ece"],
        **{f"c{key}": statistics.mean(s[key.lower()] for s in shifted) for key in ("accuracy", "NLL", "ECE")},
        **{f"OOD {name}": scores["entropy"]["auroc"] for name, scores in result.ood.items()},
        "parameters": size, "training": training, "passes": passes,
    }  # fmt: skip


@torch.no_grad()
def passes_of(posterior: Posterior, model: nn.Module, inputs: Any) -> float:
    """Return what a prediction costs in passes of the network, the least of three measurements of each."""
    model.eval()

    def least(work: Callable[[], Any]) -> float:
        return min(cpu_seconds(work) for _ in range(3))

    return least(lambda: posterior.predict(inputs)) / least(lambda: model(inputs).softmax(-1))


def table(task_name: str, seeds: int) -> str:
    """Return a Markdown table: mean ± standard deviation over the seeds that are there, costs in units of MAP."""
    lines: list[str] = []
    cells = {
        name: [json.loads(path.read_text()) for seed in range(seeds) if (path := cell(task_name, name, seed)).is_file()]
        for name in METHODS
    }
    base = cells["MAP"]
    for name, found in cells.items():
        if not found:
            continue
        scores = [key for key in found[0] if key not in ("parameters", "training", "passes")]
        if not lines:
            titles = [*scores, "parameters (MAP = 1)", "training CPU (MAP = 1)", "prediction (passes)", "seeds"]
            lines += [f"| method | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
        texts = [mean_text([row[key] for row in found]) for key in scores]
        texts.append(f"{found[0]['parameters'] / base[0]['parameters']:.3g}")
        unit = statistics.median(row["training"] for row in base)
        texts.append(f"{statistics.median(row['training'] for row in found) / unit:.2g}")
        texts.append(f"{statistics.median(row['passes'] for row in found):.2g}")
        lines.append(f"| {name} | {' | '.join(texts)} | {len(found)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="*", default=["mlp", "lenet5-small"], choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.tasks:
        if not options.table:
            run(name, options.seeds, options.methods)
        print(f"\n{name}\n\n{table(name, options.seeds)}")


if __name__ == "__main__":
    main()
