"""Calibration of Laplace on networks trained until they are overconfident on Fashion-MNIST, beside strong baselines.

    python benchmarks/calibration.py [--seeds 3] [--tasks mlp lenet5]

Clean test data, rotation and noise in five severities (their mean), out-of-distribution detection against MNIST and
KMNIST. Resumable: finished cells are kept in benchmarks/results/calibration.
"""

from __future__ import annotations

import argparse

import torch
from quality import Task, run, table

from dubito import MAP, Laplace, Training, models, select

TASKS = {
    "mlp": Task(
        "fashion-mnist", models.lenet_300_100, Training(epochs=40, schedule="constant"), ("mnist", "kmnist"),
        limit_test=4000,
    ),
    "lenet5": Task(
        "fashion-mnist", models.lenet5, Training(epochs=20, schedule="constant"), ("mnist", "kmnist"),
        limit=20_000, limit_test=1000,
    ),
}  # fmt: skip
LAST = select.last_layer()
METHODS = {
    "MAP": MAP(train=False),
    "MAP, temperature": MAP(train=False, temperature="validation"),
    "kron, evidence": Laplace(prior_precision="evidence"),
    "kron, evidence per layer": Laplace(prior_precision="evidence", prior_groups="layer"),
    "kron, validation": Laplace(prior_precision="validation"),
    "diag, evidence": Laplace(structure="diag", prior_precision="evidence"),
    "diag, validation": Laplace(structure="diag", prior_precision="validation"),
    "last layer full, evidence": Laplace(structure="full", weights=LAST, prior_precision="evidence"),
    "last layer full, validation": Laplace(structure="full", weights=LAST, prior_precision="validation"),
}


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {name: TASKS[name] for name in options.tasks}
    run("calibration", chosen, METHODS, options.seeds, ("rotation", "noise"))
    for name in chosen:
        print(f"\n{name}\n\n{table('calibration', name, METHODS, options.seeds)}")


if __name__ == "__main__":
    main()
