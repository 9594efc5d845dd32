"""The choices inside a rank-1 mixture, one at a time: the ablations of Dusenberry et al. 2020, in small.

    DUBITO_DATA=... python benchmarks/rank1_ablations.py [--seeds 3] [--data digits] [--table]

An MLP 784-100-10 on 2,000 images of Fashion-MNIST, or with --data digits 64-100-10 on 400; clean test data and two
corruptions in five severities. Each row changes the first one as named. Resumable: cells that are done are kept
in benchmarks/results/rank1-ablations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from quality import RESULTS, mean_text

import dubito
from dubito import MAP, BatchEnsemble, Rank1, Training, models, priors
from dubito.uses.comparison import Failure, Run

FOLDER = RESULTS / "rank1-ablations"
KINDS = ("noise", "rotation")
TRAINING = Training(epochs=80, lr=2e-3, batch_size=64)
GROUPS: dict[str, dict[str, Any]] = {
    "reference": {"rank-1 normal, K = 4": Rank1(), "MAP": MAP(prior_precision=0.0)},
    "hierarchy": {"factors on inputs only": Rank1(factors="input"), "factors on outputs only": Rank1(factors="output")},
    "real or positive, tails": {
        "Cauchy": Rank1(prior=priors.Cauchy(1.0, 0.1), family="cauchy"),
        "normal under a Cauchy prior": Rank1(prior=priors.Cauchy(1.0, 0.1)),
        "log-normal": Rank1(prior=priors.LogNormal(0.0, 0.1), family="log-normal"),
        "log-normal under a half-Cauchy prior": Rank1(prior=priors.HalfCauchy(), family="log-normal"),
        "normal under a log-uniform prior": Rank1(prior=priors.LogUniform()),
    },
    "objective": {
        "mixture log-likelihood": Rank1(bound="mixture"),
        "KL divergences summed": Rank1(mixture_kl="sum"),
        "KL divergence warmed up over 70 %": Rank1(kl_warmup=0.7),
        "prior scale 1": Rank1(prior=priors.Normal(1.0, 1.0)),
    },
    "points": {
        "points with the prior": Rank1(family="delta"),
        "BatchEnsemble, repeated batch": BatchEnsemble(batch="repeat"),
        "BatchEnsemble, split batch": BatchEnsemble(),
        "BatchEnsemble, split batch, 2 x epochs": BatchEnsemble(),
    },
    "components": {f"K = {k}": Rank1(components=k) for k in (1, 2, 8)},
    "start": {
        "components spread by 0.5": Rank1(spread=0.5),
        "random signs": Rank1(start="fresh"),
        "random signs, prior scale 1": Rank1(start="fresh", prior=priors.Normal(1.0, 1.0)),
    },
    "sampling": {
        "one draw per batch": Rank1(sample="batch"),
        "split batch": Rank1(batch="split"),
        "split batch, 2 x epochs": Rank1(batch="split"),
        "additive": Rank1(perturbation="additive"),
        "scales of each component": Rank1(scales="component"),
    },
}


def cell_file(name: str, row: str, seed: int) -> Path:
    """Return the file of one cell."""
    return FOLDER / f"{name}-{''.join(c if c.isalnum() else '-' for c in row)}-{seed}.json"


def run(name: str, seeds: int) -> None:
    """Fill in every cell that is missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    data = dubito.data.load(name, limit=400 if name == "digits" else 2000, limit_test=1000)
    inputs, shifts = data.train[0][0].numel(), dubito.data.shifts(data, kinds=KINDS)

    def keep(run: Any) -> None:
        if isinstance(run, Failure):
            raise run.error
        cell_file(name, run.name, run.seed).write_text(json.dumps(columns(run)))

    rows = {row: recipe for some in GROUPS.values() for row, recipe in some.items()}
    for seed, times in itertools.product(range(seeds), (1, 2)):
        missing = {
            row: recipe for row, recipe in rows.items()
            if ("2 x epochs" in row) == (times == 2) and not cell_file(name, row, seed).is_file()
        }  # fmt: skip
        if missing:
            dubito.compare(
                lambda seed: models.mlp(inputs, 10, hidden=(100,)), data.train, missing, test=data.test, seeds=[seed],
                training=TRAINING.replace(epochs=times * TRAINING.epochs), shifts=shifts, progress=keep,
            )  # fmt: skip


def columns(run: Run) -> dict[str, float]:
    """Return what the table shows of one fit."""
    shifted = [scores for _, _, scores in run.evaluation.shift_rows()]
    return {
        **{key: run.evaluation.scores[key.lower()] for key in ("accuracy", "NLL", "ECE")},
        **{f"c{key}": statistics.mean(scores[key.lower()] for scores in shifted) for key in ("NLL", "ECE")},
        "training": run.fit_seconds,
    }


def table(name: str, seeds: int) -> str:
    """Return a Markdown table: mean ± standard deviation over the seeds that are there."""
    lines: list[str] = []
    base = 0.0
    for group, rows in GROUPS.items():
        for row in rows:
            paths = [cell_file(name, row, seed) for seed in range(seeds)]
            found = [json.loads(path.read_text()) for path in paths if path.is_file()]
            if not found:
                continue
            cost = statistics.median(cell.pop("training") for cell in found)
            base = base or cost
            if not lines:
                titles = [*found[0], "training time", "seeds"]
                lines += [f"| | | {' | '.join(titles)} |", f"|---|---|{'---|' * len(titles)}"]
            texts = [mean_text([cell[key] for cell in found]) for key in found[0]]
            lines.append(f"| {group} | {row} | {' | '.join(texts)} | {cost / base:.2f} | {len(found)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.table:
        run(options.data, options.seeds)
    print(table(options.data, options.seeds))


if __name__ == "__main__":
    main()
