"""The noise of regressions that are trained for a given number of epochs, without validation data.

    DUBITO_DATA=... python benchmarks/noise.py --epochs 20 150

For each data set of `defaults.py` that is a regression, the default network is trained on its first split. Printed are
the root mean square residuals of training and test data, three estimates of the latter (leave-one-out residuals by the
last layer, by the whole linearized network, and the larger of both, which is what the library uses), and the negative
log-likelihood of test data: of the network with the noise of its training residuals, of `MAP()` and of `Laplace()`.
"""

from __future__ import annotations

import argparse
import math
import warnings
from typing import Any

import torch
from defaults import load, network
from torch import Tensor

import dubito
from dubito.core.batches import Source
from dubito.curvature.leave_one_out import LeaveOneOut, left_out_variance, linearized_variance

REGRESSIONS = (
    "diabetes",
    "uci/boston",
    "uci/energy",
    "uci/kin8nm",
    "uci/concrete",
    "uci/power",
    "uci/wine",
    "uci/yacht",
)


def size(residuals: Tensor) -> float:
    """Return the root mean square."""
    return float(residuals.double().square().mean().sqrt())


def row(name: str, epochs: int) -> list[str]:
    """Return the cells of one data set."""
    train, _, test, _ = load(name, 0)
    options: dict[str, Any] = {"likelihood": "gaussian", "progress": False}
    model = network(name, *train, False, 0)
    training = dubito.Training(epochs=epochs)
    point = dubito.MAP().fit(model, train, training=training, generator=torch.Generator().manual_seed(0), **options)
    with torch.no_grad():
        fitted, far = (size(point.model(x) - y) for x, y in (train, test))
    source = Source(train)
    last, whole = (
        math.sqrt(left_out_variance(LeaveOneOut(point.model, source), source)),
        linearized_variance(point.model, source),
    )
    plain = dubito.MAP(train=False).fit(
        point.model, train, **{**options, "likelihood": dubito.likelihoods.Gaussian(fitted)}
    )
    laplace = dubito.Laplace().fit(point.model, train, **options)
    scores = [-float(each.predict(test[0]).log_prob(test[1]).mean()) for each in (plain, point, laplace)]
    sizes = [fitted, far, last, math.nan if whole is None else math.sqrt(whole)]
    return [
        name,
        str(epochs),
        str(len(train[0])),
        *(f"{each:.3f}" for each in sizes),
        *(f"{each:.2f}" for each in scores),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", nargs="*", type=int, default=[20, 150])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    heads = (
        "data",
        "epochs",
        "rows",
        "training",
        "test",
        "last layer",
        "whole",
        "NLL, training noise",
        "MAP",
        "Laplace",
    )
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for name in REGRESSIONS:
        for epochs in arguments.epochs:
            print("| " + " | ".join(row(name, epochs)) + " |", flush=True)


if __name__ == "__main__":
    main()
