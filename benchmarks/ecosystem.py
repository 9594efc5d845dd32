"""Networks of timm, Hugging Face and peft × recipes: do they work, how long do they take, and how much memory?

    python benchmarks/ecosystem.py [--rounds 5] [--models BERT ...] [--file benchmarks/results/ecosystem.jsonl]
    python benchmarks/ecosystem.py --table

It needs the extra `ecosystem`. The networks are tiny and have random weights (`tests/ecosystem/tiny_models.py`). Each
cell is fitted, predicts all examples, and is saved, loaded and compared, in a process of its own. Times are CPU seconds
over those of one plain training epoch on the same examples, measured before and after in that process. Memory is by how
much the peak rises. Every measurement is a line of the file; a run that is started again adds what is missing.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from common import cpu_seconds
from torch import nn
from torch.nn import functional as F

import dubito
from dubito import (
    MAP,
    SGMCMC,
    SWAG,
    BatchEnsemble,
    Ensemble,
    Laplace,
    MCDropout,
    Rank1,
    Training,
    Variational,
    select,
)  # fmt: skip
from dubito.core import batches, params
from dubito.curvature import Engine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ecosystem"))
import tiny_models

EXAMPLES, BATCH, EPOCHS = 16, 8, 2
FILE = Path(__file__).parent / "results" / "ecosystem.jsonl"
LAST = select.last_layer()
RECIPES: dict[str, Any] = {
    "MAP": MAP(),
    "last layer": Laplace(weights=LAST),
    "diag": Laplace("diag"),
    "kron": Laplace("kron"),
    "Variational": Variational(),
    "natural": Variational(optimizer="natural"),
    "Rank1": Rank1(components=2),
    "BatchEnsemble": BatchEnsemble(2),
    "SWAG": SWAG(collect_every=1),
    "Ensemble": Ensemble(2),
    "MCDropout": MCDropout(),
    "SGMCMC last": SGMCMC("sghmc", weights=LAST, num_samples=4, burn_in=4),
}


def make(name: str) -> tuple[nn.Module, Any]:
    """Return a network and its examples; LoRA is that on BERT, with a trainable head."""
    if name == "BERT + LoRA":
        torch.manual_seed(0)
        return tiny_models.lora(tiny_models.bert()).eval(), tiny_models.sentences(EXAMPLES)
    model, _ = tiny_models.make(name)
    return model, tiny_models.MODELS[name][1](count=EXAMPLES)


NAMES = [*tiny_models.MODELS, "BERT + LoRA"]


def epoch(model: nn.Module, inputs: Any, targets: torch.Tensor) -> None:
    """Train for one epoch, as a user would without this library."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad])
    for start in range(0, EXAMPLES, BATCH):
        rows = slice(start, start + BATCH)
        outputs = params.call(model, batches.take(inputs, rows))
        optimizer.zero_grad()
        F.cross_entropy(outputs.flatten(0, -2), targets[rows].flatten()).backward()
        optimizer.step()


def weights(name: str) -> dict[str, float]:
    """Return the number of trainable weights, and the shares with a layer rule, in the graph, and falling back."""
    model, (inputs, _) = make(name)
    engine = Engine(model, [key for key, value in model.named_parameters() if value.requires_grad])
    engine.run(batches.take(inputs, slice(0, 4)))
    size = {key: value.numel() for key, value in engine.parameters.items()}
    total, back = sum(size.values()), sum(size[key] for key in engine.fallback)
    unruled = sum(size[key] for key in engine.unruled)
    return {"weights": total, "rule": 1 - unruled / total, "graph": (unruled - back) / total, "fallback": back / total}


def cell(name: str, recipe: str) -> dict[str, Any]:
    """Fit, predict, save and load; raise an error if anything is wrong."""
    model, (inputs, targets) = make(name)
    own = {} if "Laplace" in repr(RECIPES[recipe]) or recipe.startswith("SGMCMC") else {
        "training": Training(epochs=EPOCHS, batch_size=BATCH)
    }  # fmt: skip
    before = cpu_seconds(lambda: epoch(model, inputs, targets))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    resting = _peak()
    found: dict[str, Any] = {}

    def fit() -> None:
        found["posterior"] = RECIPES[recipe].fit(model, (inputs, targets), progress=False, **own)

    fitting = cpu_seconds(fit)
    posterior = found["posterior"]
    predicting = cpu_seconds(lambda: found.update(prediction=posterior.predict(inputs)))
    peak = _peak() - resting
    unit = (before + cpu_seconds(lambda: epoch(model, inputs, targets))) / 2
    prediction = found["prediction"]
    assert prediction.probs.isfinite().all(), "probabilities are not finite"
    assert recipe == "MAP" or bool((prediction.epistemic > 0).any()), "there is no epistemic uncertainty"
    with tempfile.TemporaryDirectory() as folder:
        posterior.save(Path(folder) / "posterior")
        again = dubito.load(Path(folder) / "posterior", make(name)[0]).predict(inputs)
    assert torch.equal(again.probs, prediction.probs), "the loaded posterior predicts something else"
    return {"fit": fitting / unit, "predict": predicting / unit, "memory": peak, "epoch": unit}


def _peak() -> float:
    """Return the peak memory of this process in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def alone(work: Any, *args: str) -> dict[str, Any]:
    """Run in a process of its own, which has all libraries loaded already."""
    receive, send = os.pipe()
    if not (child := os.fork()):
        warnings.simplefilter("ignore")
        try:
            result = work(*args)
        except Exception as error:  # noqa: BLE001 - a failure is a result
            result = {"error": f"{type(error).__name__}: {error}"}
        os.write(send, json.dumps(result).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process died"}


def warm_up(names: list[str]) -> None:
    """Import everything that cells use, so that the processes that are forked for them do not import it each."""
    warnings.simplefilter("ignore")
    for name in names:
        make(name)
    data = torch.randn(8, 2), torch.arange(8) % 2
    for recipe in RECIPES.values():
        own = {} if recipe.needs_trained_model else {"training": Training(epochs=EPOCHS, batch_size=2)}
        network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
        recipe.fit(network, data, progress=False, **own).predict(data[0])


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(file: Path) -> None:
    """Print the table of the docs."""
    rows = rows_of(file)
    about = {row["model"]: row for row in rows if "recipe" not in row}
    print("| network | weights | layer rule | graph | falls back |", *(f" {recipe} |" for recipe in RECIPES), sep="")
    print("|---" * (5 + len(RECIPES)) + "|")
    for name, row in about.items():
        shares = " | ".join(f"{row[key]:.1%}" for key in ("rule", "graph", "fallback"))
        cells = []
        for recipe in RECIPES:
            own = [row for row in rows if row["model"] == name and row.get("recipe") == recipe]
            if errors := [row["error"] for row in own if "error" in row]:
                cells.append(f"fails: {errors[0]}")
            elif own:
                middle = {key: statistics.median(row[key] for row in own) for key in ("fit", "predict", "memory")}
                cells.append(f"{middle['fit']:.1f} / {middle['predict']:.2f} / {math.ceil(middle['memory'])}")
            else:
                cells.append("not run")
        print(f"| {name} | {row['weights']:,} | {shares} | {' | '.join(cells)} |")
    fewest = min(len([1 for r in rows if r["model"] == name and r.get("recipe") == recipe])
                 for name in about for recipe in RECIPES)  # fmt: skip
    print(f"\nRounds per cell: at least {fewest}.")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=NAMES)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table(options.file)
        return
    torch.set_num_threads(1)
    warm_up(options.models)
    for turn in range(options.rounds):
        for name in options.models:
            for recipe in (None, *RECIPES):
                done = [r for r in rows_of(options.file) if (r["model"], r.get("recipe")) == (name, recipe)]
                if len(done) > (turn if recipe else 0):
                    continue
                result = alone(cell, name, recipe) if recipe else alone(weights, name)
                row = {"model": name, **({"recipe": recipe} if recipe else {}), **result}
                with options.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
