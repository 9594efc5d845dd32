"""Throughput of two predicting threads against one: LeNet-5, batches of 512, one torch thread each, one posterior.

    python benchmarks/threads.py [--rounds 7] [--batches 8]

Every round measures one thread and two threads right after each other, so that other load affects both.
The number is the median over rounds of the ratio of their throughputs; on two free cores it should be at least 1.6.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import torch
from dubito.ensembles import Ensemble

import dubito
from dubito import MAP, Laplace, Posterior, Training, Variational

BATCH = 512


def posteriors() -> dict[str, Posterior]:
    """Fit some families on random pictures: how fast they predict does not depend on what they learned."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(1024, 1, 28, 28, generator=generator), torch.arange(1024) % 10
    model, once = dubito.models.lenet5(), Training(epochs=1)
    recipes = {
        "MAP": MAP(),
        "Laplace (kron)": Laplace(prior_precision=1.0),
        "Variational": Variational(),
        "Ensemble of 4": Ensemble(members=4),
    }
    training = {name: None if isinstance(recipe, Laplace) else once for name, recipe in recipes.items()}
    return {name: r.fit(model, data, training=training[name], progress=False) for name, r in recipes.items()}


def seconds(posterior: Posterior, x: torch.Tensor, threads: int, calls: int) -> float:
    """Return how long `threads` threads take that make `calls` calls each."""
    barrier = threading.Barrier(threads + 1)

    def work() -> None:
        barrier.wait()
        for _ in range(calls):
            posterior.predict(x, num_samples=8)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(BATCH, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    print(f"{'posterior':<16} {'rows/s, 1 thread':>17} {'2 threads':>11} {'ratio':>7}")
    for name, posterior in posteriors().items():
        seconds(posterior, x, 2, 1)  # both working copies are made here
        rates = []
        for _ in range(options.rounds):
            rows = options.batches * BATCH
            rates.append((rows / seconds(posterior, x, 1, options.batches),
                          2 * rows / seconds(posterior, x, 2, options.batches)))  # fmt: skip
        one, two = (statistics.median(column) for column in zip(*rates, strict=True))
        ratio = statistics.median(second / first for first, second in rates)
        print(f"{name:<16} {one:>17,.0f} {two:>11,.0f} {ratio:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
