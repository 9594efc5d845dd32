"""Choose the defaults of `VBLL`, `SNGP` and `DKL` on validation data of development sets; no test data are read.

    python benchmarks/heads.py run
    python benchmarks/heads.py show

One setting is changed at a time. The score is the mean negative log-probability of validation rows of the sets on which
other defaults were developed too (see `benchmarks/defaults.py`). Rows are kept in `benchmarks/results/heads.jsonl`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import dubito
from dubito import DKL, MAP, SNGP, VBLL, Training, models
from dubito.methods.heads import trainer

ROWS = Path(__file__).parent / "results" / "heads.jsonl"
SETS = ("digits", "uci/boston", "uci/energy")
TRAINING = {"digits": Training(epochs=20, lr=3e-3, batch_size=64)}
OTHERS = Training(epochs=100, lr=3e-3, batch_size=64)


def cases() -> dict[str, tuple[Any, float]]:
    """Return the recipes and the learning rate factors of the layer behind a feature map."""
    found: dict[str, tuple[Any, float]] = {"MAP": (MAP(), 10.0)}
    for scale in (0.3, 1.0, 3.0, 10.0):
        found[f"VBLL prior_scale={scale:g}"] = VBLL(prior_scale=scale), 10.0
    for name, kind in (("SNGP", SNGP), ("DKL", DKL)):
        for rate in (1.0, 3.0, 10.0, 30.0):
            found[f"{name} rate={rate:g}"] = kind(), rate
        for bound in (1.0, 6.0, None):
            found[f"{name} spectral_norm={bound}"] = kind(spectral_norm=bound), 10.0
    return found


def run(seeds: int) -> None:
    """Fill in what is missing."""
    ROWS.parent.mkdir(exist_ok=True)
    done = {(row["data"], row["seed"], row["case"]) for row in rows()}
    for seed, name in itertools.product(range(seeds), SETS):
        data = dubito.data.load(name, validation=0.2, generator=torch.Generator().manual_seed(seed))
        sizes = data.train[0][0].numel(), data.num_outputs
        likelihood = "categorical" if data.task == "classification" else "gaussian"
        for rate in sorted({rate for _, rate in cases().values()}):
            own = {case: recipe for case, (recipe, its) in cases().items() if its == rate}
            missing = {case: recipe for case, recipe in own.items() if (name, seed, case) not in done}
            if not missing:
                continue
            with mock.patch.object(trainer, "HEAD_RATE", rate):
                found = dubito.compare(
                    lambda seed, sizes=sizes: models.mlp(*sizes, hidden=50), data.train, missing, test=data.validation,
                    seeds=[seed], likelihood=likelihood, training=TRAINING.get(name, OTHERS), progress=False,
                )  # fmt: skip
            with ROWS.open("a") as file:
                for run in found.runs:
                    nll = run.evaluation.scores["nll"]
                    file.write(json.dumps({"data": name, "seed": seed, "case": run.name, "nll": nll}) + "\n")


def rows() -> list[dict[str, Any]]:
    """Return the results so far."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.is_file() else []


def show() -> None:
    """Print the mean score of every case on every set."""
    print("| case | " + " | ".join(SETS) + " |\n|---|" + "---|" * len(SETS))
    for case in cases():
        cells = []
        for name in SETS:
            own = [row["nll"] for row in rows() if row["data"] == name and row["case"] == case]
            cells.append(f"{statistics.mean(own):.3f} ({len(own)})" if own else "")
        print(f"| {case} | " + " | ".join(cells) + " |")


def main() -> None:
    """Run or show."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run(options.seeds) if options.what == "run" else show()


if __name__ == "__main__":
    main()
