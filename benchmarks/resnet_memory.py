"""Laplace with Kronecker factors on a resnet18 (11 million weights): does it fit, and how long does it take?

    python benchmarks/resnet_memory.py [--fit 2000] [--predict 500] [--curvature fisher-mc] [--width 64] [--tuned]

Fits on CIFAR-10 images (random ones if the data set is missing: memory and time do not depend on them),
predicts, and prints seconds and the peak memory of the whole process. With `--tuned` the prior precision is chosen,
as by default; the last line is the one-off work (all of the fit but its pass over the data, and what the first
prediction takes longer than the second) in units of the eigendecompositions alone, both in CPU seconds.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import dubito
from dubito import Laplace, models
from dubito.methods.laplace import collect


def images(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels."""
    try:
        inputs, targets = dubito.data.load("cifar10", validation=0.0).train
    except dubito.errors.MissingDataError:
        print("CIFAR-10 is not here: random images.")
        return torch.randn(number, 3, 32, 32), torch.randint(10, (number,))
    return inputs[:number].clone(), targets[:number].clone()


def main() -> None:
    """Print time and memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit", type=int, default=2000)
    parser.add_argument("--predict", type=int, default=500)
    parser.add_argument("--curvature", default="ggn")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tuned", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = models.resnet18((3, 32, 32), 10, options.width)
    inputs, targets = images(options.fit)
    start = time.time()
    prior = "training" if options.tuned else 100.0
    recipe = Laplace(structure="kron", curvature=options.curvature, prior_precision=prior)
    counted = _Counted()
    with counted.patched():
        posterior = recipe.fit(model, (inputs, targets), progress=False)
    print(f"fit of {options.fit} images: {time.time() - start:.0f} s, peak {_peak():.2f} GB", flush=True)
    start = time.time()
    with counted.patched():
        first = _cpu(lambda: posterior.predict(inputs[: options.predict]))
    print(f"predict of {options.predict} images: {time.time() - start:.0f} s, peak {_peak():.2f} GB")
    second = _cpu(lambda: posterior.predict(inputs[: options.predict]))
    once = counted.tuning + first - second
    print(
        f"one-off work {once:.1f} CPU s, eigendecompositions {counted.eigh:.1f} CPU s: ratio {once / counted.eigh:.2f}"
    )


class _Counted:
    """Counts CPU seconds of eigendecompositions, and of what follows the pass over the data."""

    def __init__(self) -> None:
        self.eigh = self.tuning = 0.0

    @contextmanager
    def patched(self) -> Iterator[None]:
        eigh, tune = torch.linalg.eigh, collect.tune

        def counted_eigh(matrix: torch.Tensor) -> Any:
            start = time.thread_time()
            found = eigh(matrix)
            self.eigh += time.thread_time() - start
            return found

        def counted_tune(*args: Any) -> Any:
            start = time.process_time()
            found = tune(*args)
            self.tuning += time.process_time() - start
            return found

        torch.linalg.eigh, collect.tune = counted_eigh, counted_tune
        try:
            yield
        finally:
            torch.linalg.eigh, collect.tune = eigh, tune


def _cpu(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
