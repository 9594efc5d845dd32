"""What a Kronecker posterior of timm's resnet18 computes once, before its first prediction, over its decompositions.

    python benchmarks/first_prediction.py [--width 64] [--images 16] [--size 64] [--rounds 1] [--threads 1]

It needs the extra `ecosystem`. `--width 64` is resnet18 itself, `--width 16` a quarter of its channels. In each round a
posterior is made from its sums and predicts four images twice. What is computed once is the difference of the CPU
seconds of the two predictions; those of the eigendecompositions are measured within the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from dubito import Laplace
from dubito.curvature.matrices import kronecker
from dubito.curvature.matrices.base import eigh

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from extras import allow_torchvision


def measure(width: int, images: int, size: int, rounds: int) -> None:
    allow_torchvision()
    import timm

    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=10, channels=tuple(width * k for k in (1, 2, 4, 8))).eval()
    x, y = torch.randn(images, 3, size, size), torch.arange(images) % 10
    start = time.process_time()
    posterior = Laplace(prior_precision=1.0).fit(model, (x, y), progress=False)
    print(f"fit: {time.process_time() - start:.1f} s, its check at the end included", flush=True)
    ratios, alone = [], [0.0]

    def timed(matrix: Tensor) -> tuple[Tensor, Tensor]:
        begin = time.process_time()
        found = eigh(matrix)
        alone[0] += time.process_time() - begin
        return found

    kronecker.eigh = timed
    for _ in range(rounds):
        fresh = type(posterior).from_state(
            posterior.model, posterior.likelihood, posterior.recipe, posterior.num_data, posterior.state()
        )
        alone[0], times = 0.0, [time.process_time()]
        for _ in range(2):
            fresh.predict(x[:4])
            times.append(time.process_time())
        first, second = (after - before for before, after in pairwise(times))
        ratios.append((first - second) / alone[0])
        print(
            f"decompositions {alone[0]:.2f} s, first prediction {first:.2f}, second {second:.2f}; once "
            f"{first - second:.2f} s, {ratios[-1]:.2f} times the decompositions",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 64), ("images", 16), ("size", 64), ("rounds", 1), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    measure(given.width, given.images, given.size, given.rounds)


if __name__ == "__main__":
    main()
