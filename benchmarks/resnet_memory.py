"""Laplace with Kronecker factors on a resnet18 (11 million weights): does it fit, and how long does it take?

    python benchmarks/resnet_memory.py [--fit 2000] [--predict 500] [--curvature fisher-mc]

Fits on CIFAR-10 images (random ones if the data set is missing: memory and time do not depend on them),
predicts, and prints seconds and the peak memory of the whole process.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

import dubito
from dubito import Laplace, models


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
    options = parser.parse_args()
    torch.manual_seed(0)
    model = models.resnet18((3, 32, 32), 10)
    inputs, targets = images(options.fit)
    start = time.time()
    recipe = Laplace(structure="kron", curvature=options.curvature, prior_precision=100.0)
    posterior = recipe.fit(model, (inputs, targets), progress=False)
    print(f"fit of {options.fit} images: {time.time() - start:.0f} s, peak {_peak():.2f} GB", flush=True)
    start = time.time()
    posterior.predict(inputs[: options.predict])
    print(f"predict of {options.predict} images: {time.time() - start:.0f} s, peak {_peak():.2f} GB")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
