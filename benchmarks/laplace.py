"""Speed of Laplace, in units of one training epoch on the same 6,000 Fashion-MNIST points.

    python benchmarks/laplace.py [--rounds 5] [--model A] [--memory] [--peers]

Model A is the MLP 784-300-100-10, model B LeNet-5 (Caffe). Fit: 6,000 points; predict: 10,000. One thread, process CPU
time, each ratio against an epoch measured right before it. With --peers laplace-torch is measured too (if
installed), on fewer points and scaled up if it would take hours; --memory prints the peak above model and data. Fits
include eigendecompositions, and the check at their end, for which a full matrix is factorized; the factorization alone
has its own line.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import peak_memory, ratios, summary, train_epoch
from laplace_peer import peer_works
from torch import nn

import dubito
from dubito import Laplace, models, select

LIMITS = {
    "A": {"diag fit": 2, "diag predict": 5, "kron fit": 4, "kron predict": 6, "last-layer full fit": 2,
          "last-layer full predict": 1.5, "kron evidence": 0.5, "last-layer full evidence": 0.5},
    "B": {"diag fit": 7, "kron fit": 6, "kron predict": 12, "last-layer full fit": 1.5,
          "diag mc fit": 2.5, "kron mc fit": 2.5},
}  # fmt: skip
RECIPES = {
    "diag": Laplace(structure="diag", prior_precision=35.0),
    "kron": Laplace(structure="kron", prior_precision=35.0),
    "diag mc": Laplace(structure="diag", curvature="fisher-mc", prior_precision=35.0),
    "kron mc": Laplace(structure="kron", curvature="fisher-mc", prior_precision=35.0),
    "last-layer full": Laplace(structure="full", weights=select.last_layer(), prior_precision=35.0),
}


def setting(name: str) -> tuple[nn.Module, Any, Any]:
    """Return a network trained for three epochs, the 6,000 training points and the test inputs."""
    torch.manual_seed(0)
    data = dubito.data.load("fashion-mnist", limit=6000, validation=0.0)
    model = models.lenet_300_100() if name == "A" else models.lenet5()
    inputs, targets = data.train
    for _ in range(3):
        train_epoch(model, inputs, targets)
    return model, (inputs, targets), data.test[0]


def works(model: nn.Module, train: Any, test: Any) -> dict[str, Callable[[], Any]]:
    """Return everything that is measured, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for name, recipe in RECIPES.items():
        posterior = recipe.fit(model, train, progress=False)
        if recipe.structure == "full":
            found[f"{name} fit"] = lambda recipe=recipe: recipe.fit(model, train, progress=False)
            found[f"{name} factorize"] = lambda posterior=posterior: _factorize(posterior)
        else:
            found[f"{name} fit"] = lambda recipe=recipe: recipe.fit(model, train, progress=False).covariance
        found[f"{name} predict"] = lambda posterior=posterior: posterior.predict(test)
        if "mc" not in name:
            posterior.log_evidence()
            found[f"{name} evidence"] = lambda posterior=posterior: _tune(posterior)
    return found


def _factorize(posterior: Any) -> None:
    posterior.matrix.covariance(posterior.prior_precision, posterior.evidence.scale(posterior.noise))


def _tune(posterior: Any) -> None:
    from dubito.curvature.evidence import maximize

    maximize(posterior.evidence, posterior.selection, "all", posterior.noise, False)


def fit_and_predict(name: str, recipe: str, start: Callable[[], None]) -> None:
    """The work whose memory is measured."""
    model, train, test = setting(name)
    start()
    RECIPES[recipe].fit(model, train, progress=False).predict(test)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="AB")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.model:
        model, train, test = setting(name)
        chosen = {key: work for key, work in works(model, train, test).items() if options.only in key}
        peers = peer_works(model, train, test) if options.peers else {}
        epoch = partial(train_epoch, copy.deepcopy(model), *train)
        print(f"model {name}: in training epochs, median (range) of {options.rounds} rounds")
        for key, values in ratios(epoch, chosen | {k: work for k, (work, _) in peers.items()}, options.rounds).items():
            limit, factor = LIMITS[name].get(key), peers[key][1] if key in peers else 1.0
            aim = f"   aim {limit}" if limit else ""
            print(f"  {key:<32} {summary([value * factor for value in values])}{aim}", flush=True)
        if options.memory:
            for key in RECIPES:
                print(f"  {key:<28} {peak_memory(fit_and_predict, name, key):7.0f} MB above model and data")


if __name__ == "__main__":
    main()
