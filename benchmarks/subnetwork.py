"""Speed of subnetwork inference, in units of one training epoch on the same 6,000 Fashion-MNIST points.

    python benchmarks/subnetwork.py [--rounds 5] [--model A] [--size 1000] [--rules] [--peers]
    python benchmarks/subnetwork.py --resnet [--curvature fisher-mc] [--images 2000]

Model A is the MLP 784-300-100-10, model B LeNet-5 (Caffe). Select and fit: 6,000 points; predict: 10,000. One thread,
process CPU time, each ratio against an epoch measured right before it. The S × S product of a fit is also given as a
fraction of this machine's rate for square matrix products. --rules also measures the other selection rules; --peers
also measures laplace-torch (if installed), on fewer points and scaled up if it would take hours. With --resnet 2,000
weights of a resnet18 (11 million) are selected, fitted on 2,000 images and used for 500, and the peak memory of the
whole process is printed; with one sampled target per image (--curvature fisher-mc) selecting and fitting take a tenth
of the time and the same memory.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import cpu_seconds, ratios, summary, train_epoch
from laplace import setting
from resnet_memory import images
from torch import Tensor, nn

from dubito import Laplace, models, select
from dubito.curvature.structures import add_gram
from dubito.networks.selection import Selection

PRIOR = 35.0
LIMITS = {
    "A": {"select": 2, "fit": 12, "predict": 16},
    "B": {"select": 7, "fit": 8, "predict": 12},
}


def works(model: nn.Module, train: Any, test: Tensor, size: int) -> dict[str, Callable[[], Any]]:
    """Return the three steps of the method."""
    rule = select.subnetwork(size)
    chosen = rule.resolve(model, train, "categorical", PRIOR)
    recipe = Laplace(structure="full", weights=select.mask(chosen.masks()), prior_precision=PRIOR)
    posterior = recipe.fit(model, train, progress=False)
    return {
        "select": lambda: rule.resolve(model, train, "categorical", PRIOR),
        "fit": lambda: recipe.fit(model, train, progress=False).covariance,
        "predict": lambda: posterior.predict(test),
    }


def other_rules(model: nn.Module, train: Any, size: int) -> dict[str, Callable[[], Any]]:
    """Return the other ways of choosing."""
    rules = {
        "select, weight variance": select.largest_variance(size),
        "select, Kronecker marginals": select.subnetwork(size, variance="kron"),
        "select, one sampled output": select.subnetwork(size, num_samples=1),
        "select, greedy of 2,000": select.subnetwork(size // 2, rule="greedy", prefilter=2000),
    }

    def resolve(rule: Any) -> Selection:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", select.SelectionWarning)
            return rule.resolve(model, train, "categorical", PRIOR)

    return {name: lambda rule=rule: resolve(rule) for name, rule in rules.items()}


def print_product_rate(size: int, rows: int = 2000) -> None:
    """Print the rate of the S × S product as a share of that of a product of square matrices."""
    square, tall = torch.randn(2048, 2048), torch.randn(rows, size)
    total = torch.zeros(size, size, dtype=torch.float64)
    best = {
        "square": min(cpu_seconds(lambda: square @ square) for _ in range(5)) / 2048**3,
        "product": min(cpu_seconds(lambda: add_gram(total, tall)) for _ in range(5)) / (rows * size**2),
    }
    rates = {name: 1e-9 / seconds for name, seconds in best.items()}
    share = rates["product"] / rates["square"]
    print(
        f"  {size} × {size} product of {rows} rows: {rates['product']:.1f} billion multiplications a second, "
        f"{share:.0%} of the machine's {rates['square']:.1f} (above 100 % because one half mirrors the other)"
    )


@contextmanager
def the_package_named_laplace() -> Iterator[None]:
    """Make `import laplace` find the peer and not the benchmark of that name beside this file."""
    ours, here = sys.modules.pop("laplace"), sys.path.pop(0)
    try:
        yield
    finally:
        sys.path.insert(0, here)
        for name in [name for name in sys.modules if name.split(".")[0] == "laplace"]:
            del sys.modules[name]
        sys.modules["laplace"] = ours


def print_peer(model: nn.Module, train: Any, test: Tensor, size: int) -> None:
    """Print the times of laplace-torch with its fastest backend, scaled up from fewer points."""
    warnings.simplefilter("ignore")
    with the_package_named_laplace():
        try:
            peer, utils = importlib.import_module("laplace"), importlib.import_module("laplace.utils")
            backend = importlib.import_module("laplace.curvature").BackPackGGN
        except ImportError as error:
            print(f"  laplace-torch is not installed ({error}): pip install laplace-torch")
            return
        chosen = torch.cat([m.flatten() for m in works_selection(model, train, size).masks().values()]).nonzero()
        few, seen = 200, 100
        subset = torch.utils.data.TensorDataset(train[0][:few], train[1][:few])
        loader = torch.utils.data.DataLoader(subset, batch_size=100)
        everything = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), batch_size=256)
        options = {"likelihood": "classification", "prior_precision": PRIOR, "backend": backend}
        which = {"subset_of_weights": "subnetwork", "subnetwork_indices": chosen.squeeze(1)}
        unit = cpu_seconds(lambda: train_epoch(model, *train))
        mine, other = copy.deepcopy(model), copy.deepcopy(model)  # its backend leaves hooks on the network
        posterior = peer.Laplace(mine, hessian_structure="full", **which, **options)
        mask = utils.LargestVarianceDiagLaplaceSubnetMask(other, size, peer.DiagLaplace(other, **options))
        times = {
            "select, weight variance": cpu_seconds(lambda: mask.select(everything)),
            "fit": cpu_seconds(lambda: posterior.fit(loader)) * len(train[0]) / few,
            "predict": cpu_seconds(lambda: posterior(test[:seen], link_approx="probit")) * len(test) / seen,
        }
    for name, seconds in times.items():
        print(f"  laplace-torch {name:<26} {seconds / unit:9.1f}")


def works_selection(model: nn.Module, train: Any, size: int) -> Selection:
    """The weights of the default rule."""
    return select.subnetwork(size).resolve(model, train, "categorical", PRIOR)


def print_resnet(curvature: str, number: int, size: int = 2000) -> None:
    """Print time and peak memory on a resnet18."""
    torch.manual_seed(0)
    model, (inputs, targets) = models.resnet18((3, 32, 32), 10), images(max(number, 500))
    train = inputs[:number], targets[:number]
    start = time.process_time()

    def said(what: str) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        seconds = time.process_time() - start
        print(f"resnet18 {what}: {seconds:.0f} CPU seconds since the start, peak {peak:.2f} GB", flush=True)

    samples = None if curvature == "ggn" else 1
    chosen = select.subnetwork(size, num_samples=samples).resolve(model, train, "categorical", 100.0)
    said(f"select {size:,} of {chosen.total:,}")
    weights = select.mask(chosen.masks())
    recipe = Laplace(structure="full", weights=weights, curvature=curvature, prior_precision=100.0)
    posterior = recipe.fit(model, train, progress=False)
    said(f"fit of {number:,} images")
    posterior.predict(inputs[:500])
    said("predict of 500 images")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="AB")
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--resnet", action="store_true")
    parser.add_argument("--curvature", default="ggn", choices=["ggn", "fisher-mc"], help="for --resnet")
    parser.add_argument("--images", type=int, default=2000, help="to select and fit with, for --resnet")
    options = parser.parse_args()
    if options.resnet:
        print_resnet(options.curvature, options.images)
        return
    torch.set_num_threads(1)
    for size in (options.size, 2 * options.size, 4 * options.size):
        print_product_rate(size)
    for name in options.model:
        model, train, test = setting(name)
        measured = works(model, train, test, options.size)
        measured |= other_rules(model, train, options.size) if options.rules else {}
        print(f"model {name}, {options.size} weights: in training epochs, median (range) of {options.rounds} rounds")
        for key, values in ratios(lambda m=model, t=train: train_epoch(m, *t), measured, options.rounds).items():
            limit = LIMITS[name].get(key)
            print(f"  {key:<28} {summary(values)}" + (f"   aim {limit}" if limit else ""), flush=True)
        if options.peers:
            print_peer(model, train, test, options.size)


if __name__ == "__main__":
    main()
