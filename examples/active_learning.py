"""Active learning on digits: choose the next ten images to label.

A network is trained on the labels so far, its posterior chooses ten more images, and so on. Run it as

    python examples/active_learning.py                                # prints accuracies, one minute
    python examples/active_learning.py --seeds 5 --picture docs/img/active_learning.png
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor

import dubito
from dubito import Ensemble, Training, data, models

STRATEGIES = ("random", "entropy", "bald", "batchbald")
START, STEP, ROUNDS = 20, 10, 9
TRAINING = Training(epochs=60, lr=1e-2, batch_size=32)


def learn(strategy: str, seed: int, rounds: int) -> list[float]:
    """Return the test accuracy after each round of labels."""
    digits = data.load("digits", validation=0)
    images, labels = digits.train
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    known, pool = order[:START], order[START:]
    accuracies = []
    for _ in range(rounds):
        posterior = fit(images[known], labels[known], generator)
        accuracies.append(float((posterior.predict(digits.test[0]).mode == digits.test[1]).double().mean()))
        chosen = dubito.acquire(posterior, images[pool], STEP, strategy, generator=generator)
        known = torch.cat([known, pool[chosen]])  # here somebody would label pool[chosen]
        left = torch.ones(len(pool), dtype=torch.bool)
        left[chosen] = False
        pool = pool[left]
    return accuracies


def fit(images: Tensor, labels: Tensor, generator: torch.Generator) -> dubito.Posterior:
    recipe = Ensemble(members=10)
    model = models.mlp(64, 10, hidden=(50,))
    return recipe.fit(model, (images, labels), training=TRAINING, generator=generator, progress=False)


def draw(curves: dict[str, list[list[float]]], path: str) -> None:
    from dubito.uses.reporting import plots

    sizes = [START + STEP * i for i in range(len(next(iter(curves.values()))[0]))]
    runs = {name: [dict(zip(sizes, run, strict=True)) for run in runs] for name, runs in curves.items()}
    figure = plots.shift(runs, score="Test accuracy")
    figure.axes[0].set_xlabel("Labels")
    figure.set_facecolor("white")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--picture", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    curves: dict[str, list[list[float]]] = {}
    for strategy in STRATEGIES:
        curves[strategy] = [learn(strategy, seed, arguments.rounds) for seed in range(arguments.seeds)]
        rounds = [f"{statistics.mean(column):.3f}" for column in zip(*curves[strategy], strict=True)]
        print(f"{strategy:10s} {' '.join(rounds)}", flush=True)
    if arguments.picture:
        draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
