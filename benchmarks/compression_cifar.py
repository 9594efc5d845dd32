"""The rows of `compression.py` on CIFAR-10: a VGG-like network at several widths, and labels drawn at random.

Both are sized for minutes on one core: 10,000 training images (2,000 with random labels), narrow networks, few epochs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compression_cells import RESULTS, accuracy, cell, error, fitted, train_sparse
from dubito.compression import Compression, GradualMagnitude, compress, load
from torch import nn

import dubito
from dubito import MAP, Training, rules
from dubito.data import DataSet, Pair
from dubito.fitting.posterior import Posterior

WIDTHS = (4, 8, 12, 16)  # channels of the first convolution
BATCH_SIZE = 100


def vgg_like(width: int, seed: int, dropout: float = 0.0) -> nn.Sequential:
    """A VGG-like network: four 3 x 3 convolutions with BatchNorm, three poolings, one hidden layer."""
    torch.manual_seed(seed)

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    hidden = [nn.Linear(4 * 4 * 4 * width, 8 * width), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(
        *convolution(3, width), nn.MaxPool2d(2), *convolution(width, 2 * width), nn.MaxPool2d(2),
        *convolution(2 * width, 4 * width), *convolution(4 * width, 4 * width), nn.MaxPool2d(2),
        nn.Flatten(), *hidden, nn.Linear(8 * width, 10),
    )  # fmt: skip


def dense(model: nn.Module, train: Pair, seed: int, epochs: int, checkpoint: str | None = None) -> Posterior:
    """The same network trained as it is."""
    training = Training(epochs=epochs, lr=2e-3, batch_size=BATCH_SIZE, schedule="linear", checkpoint=checkpoint)
    generator = torch.Generator().manual_seed(seed)
    return MAP().fit(model, train, training=training, generator=generator, progress=False)


def run_widths(args: argparse.Namespace) -> None:
    """Sparse variational dropout from a trained network, at several widths: how sparse, and how accurate?

    Beside it gradual magnitude pruning of the same trained network to the same sparsity in the same epochs.
    """
    data = dubito.data.load("cifar10", validation=2_000 / 12_000, limit=12_000)
    for seed in range(args.seeds):
        for width in WIDTHS:
            cell(f"widths-{width}", seed, partial(_sparse, width, seed, data, args.epochs))
        for width in WIDTHS:
            cell(f"widths-{width}-gradual", seed, partial(_gradual, width, seed, data, args.epochs))


def _trained(width: int, seed: int, data: DataSet) -> Posterior:
    def fit(model: nn.Module, path: str) -> Posterior:
        return dense(model, data.train, seed, 10, path)

    return fitted(f"widths-{width}-map", seed, vgg_like(width, seed), fit)


def _sparse(width: int, seed: int, data: DataSet, epochs: int) -> dict[str, Any]:
    start = _trained(width, seed, data)

    def fit(model: nn.Module, path: str) -> Posterior:
        return train_sparse(model, data.train, seed, epochs, path, batch_size=BATCH_SIZE, ramp=(0, 7))

    # it is in evaluation mode: norms keep the statistics of the trained network, which noise on weights would blur
    made = compress(fitted(f"widths-{width}", seed, start.model, fit), rules.LogAlpha(3))
    found = {"error_dense": error(start.model, data), "train_accuracy_dense": 100 * accuracy(start.model, data.train)}
    return {**_numbers(made, start.model, data), **found, "error_mean": error(made.dense, data)}


def _gradual(width: int, seed: int, data: DataSet, epochs: int) -> dict[str, Any]:
    start = _trained(width, seed, data)
    gone = json.loads((RESULTS / f"widths-{width}-{seed}.json").read_text())["gone"] / 100
    training = Training(epochs=epochs, lr=2e-3, batch_size=BATCH_SIZE, schedule="linear")
    how: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "progress": False}
    posterior = GradualMagnitude(gone).fit(start.model, data.train, training=training, **how)
    return _numbers(compress(posterior, rules.Magnitude(gone)), start.model, data)


def _numbers(made: Compression, model: nn.Module, data: DataSet) -> dict[str, Any]:
    """What the table says of a compression; the error in the file is that of a network loaded from it."""
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = made.save(Path(folder) / "coded")
        coded = load(Path(folder) / "coded", model)
    return {
        "weights": made.plan.num_weights,
        "left": made.plan.num_kept,
        "gone": 100 * made.plan.sparsity,
        "gone_by_layer": {name: round(100 * share, 1) for name, share in made.plan.layer_sparsity().items()},
        "error": error(made.model, data),
        "error_coded": error(coded, data),
        "error_validation": 100 * (1 - accuracy(made.model, data.validation)),
        "train_accuracy": 100 * accuracy(made.model, data.train),
        "bytes": num_bytes,
    }


def run_random_labels(args: argparse.Namespace) -> None:
    """Labels drawn at random: the same network, images and epochs with and without sparse variational dropout."""
    x = dubito.data.load("cifar10", validation=0.0, limit=2_000).train[0]
    for seed in range(args.seeds):
        train = (x, torch.randint(10, (len(x),), generator=torch.Generator().manual_seed(seed)))

        def sparse(seed: int = seed, train: Pair = train) -> dict[str, float]:
            def fit(model: nn.Module, path: str) -> Posterior:
                return train_sparse(model, train, seed, args.epochs, path, batch_size=BATCH_SIZE, ramp=(0, 5))

            posterior = fitted("cifar-random-labels-sparse", seed, vgg_like(8, seed), fit)
            made = compress(posterior, rules.LogAlpha(3), allow_empty=True)
            return {"train_accuracy": 100 * accuracy(made.model, train), "gone": 100 * made.plan.sparsity}

        def memorize(dropout: float, seed: int = seed, train: Pair = train) -> dict[str, float]:
            posterior = dense(vgg_like(8, seed, dropout), train, seed, args.epochs)
            return {"train_accuracy": 100 * accuracy(posterior.model, train)}

        methods: dict[str, Callable[[], dict[str, float]]] = {
            "sparse": sparse, "none": partial(memorize, 0.0), "dropout": partial(memorize, 0.1),
        }  # fmt: skip
        for method, work in methods.items():
            cell(f"cifar-random-labels-{method}", seed, work)
