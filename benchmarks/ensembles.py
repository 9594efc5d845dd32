"""What ensembles cost: CPU time on one thread, each ratio against plain training measured right before it.

    python benchmarks/ensembles.py [--rounds 5] [--epochs 5] [--limit 6000] [--table ensemble|MLP|LeNet-5]

The unit of the first table is an epoch of a single network as a user without any library would train it (torch's own
Adam with its defaults, batches of 128); that of the others is `MAP` with the same training settings.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from common import ratios, summary, train_epoch
from torch import nn

import dubito
from dubito import MAP, SWAG, Ensemble, MCDropout, Snapshot, Training, models

LIMITS = {"deep ensemble of 5, together": 3.0, "SWAG": 1.1}


def report(title: str, unit: Callable[[], Any], works: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Print one table."""
    for work in (unit, *works.values()):
        work()  # what is imported or allocated once is not counted
    print(f"{title}: median (range) of {rounds} rounds")
    for name, values in ratios(unit, works, rounds).items():
        aim = f"   aim {LIMITS[name]}" if name in LIMITS else ""
        print(f"  {name:<36} {summary(values)}{aim}", flush=True)


def products(model: nn.Module, inputs: Any, targets: Any, members: int) -> Callable[[], None]:
    """The forward and backward passes of several networks, without an optimizer: a lower bound for training them."""

    def work() -> None:
        for start in range(0, len(inputs), 128):
            for _ in range(members):
                loss = nn.functional.cross_entropy(model(inputs[start : start + 128]), targets[start : start + 128])
                torch.autograd.grad(loss, list(model.parameters()))

    return work


def bare_products(widths: tuple[int, ...], members: int, steps: int) -> Callable[[], None]:
    """Only the matrix products of the training steps, batch 128, all members at once, into preallocated memory."""
    operands = []
    for i, o in pairwise(widths):
        x, weight, gradients = torch.randn(members, 128, i), torch.randn(members, o, i), torch.randn(members, 128, o)
        operands += [(x, weight.mT), (gradients.mT, x)]
        if operands[2:]:  # data has no gradients
            operands.append((gradients, weight))
    triples = [(a, b, torch.bmm(a, b)) for a, b in operands]

    def work() -> None:
        for _ in range(steps):
            for a, b, out in triples:
                torch.bmm(a, b, out=out)

    return work


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=6000)
    parser.add_argument("--table", choices=["ensemble", "MLP", "LeNet-5"], action="append")
    options = parser.parse_args()
    tables = options.table or ["ensemble", "MLP", "LeNet-5"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train = dubito.data.load("fashion-mnist", limit=options.limit, validation=0.0).train
    adam = Training(epochs=options.epochs)
    sgd = adam.replace(optimizer="sgd", lr=0.05)

    def fit(model: nn.Module, recipe: Any, training: Training) -> Callable[[], Any]:
        return lambda: recipe.fit(model, train, training=training, progress=False)

    model = models.lenet_300_100()
    plain = copy.deepcopy(model)
    passes = products(plain, *train, 5)
    steps = -(-len(train[0]) // 128)
    if "ensemble" in tables:
        works = {
            "deep ensemble of 5, together": fit(model, Ensemble(), adam),
            "deep ensemble of 5, one by one": fit(model, Ensemble(together=False), adam),
            "five networks without an optimizer": lambda: [passes() for _ in range(options.epochs)],
            "matrix products of five, alone": bare_products((784, 300, 100, 10), 5, options.epochs * steps),
            "MAP": fit(model, MAP(), adam),
        }
        epochs = lambda: [train_epoch(plain, *train) for _ in range(options.epochs)]  # noqa: E731
        report("MLP 784-300-100-10, in plain epochs with torch's Adam", epochs, works, options.rounds)
    for name, network in {"MLP": model, "LeNet-5": models.lenet5()}.items():
        if name in tables:
            works = {
                "SWAG": fit(network, SWAG(), sgd),
                "SWAG, every 10 steps": fit(network, SWAG(collect_every=10), sgd),
                "Snapshot": fit(network, Snapshot(5), sgd),
                "MCDropout": fit(network, MCDropout(0.1), sgd),
            }
            report(f"{name}, in fits of MAP", fit(network, MAP(), sgd), works, options.rounds)


if __name__ == "__main__":
    main()
