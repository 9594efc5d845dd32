"""Learn permuted digits one task after the other: each posterior is the prior of the next task.

    python examples/continual_digits.py [number of tasks]

Each task has its own permutation of the pixels. Plain fine-tuning forgets the earlier tasks; a variational posterior
that is updated (`posterior.update(data)`) keeps the weights that it has determined precisely (Nguyen et al. 2018,
https://arxiv.org/abs/1710.10628). The script prints the accuracy on each task so far, and its mean.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import dubito
from dubito import MAP, Posterior, Training, Variational, data, models

Pair = tuple[Tensor, Tensor]
TRAINING = Training(epochs=30, lr=3e-3)


def tasks(count: int) -> list[tuple[Pair, Pair]]:
    """Training and test data of each task; the first is digits as they are."""
    digits = data.load("digits")
    generator, orders = torch.Generator().manual_seed(0), [torch.arange(64)]
    orders += [torch.randperm(64, generator=generator) for _ in range(count - 1)]
    shuffled = lambda pair, order: (pair[0].flatten(1)[:, order], pair[1])  # noqa: E731
    return [(shuffled(digits.train, order), shuffled(digits.test, order)) for order in orders]


def learn(name: str, first: Posterior, learned: list[tuple[Pair, Pair]]) -> float:
    """Update a posterior with one task after the other and return the mean accuracy at the end."""
    posterior, accuracies = first, [0.0]
    for number, (train, _) in enumerate(learned):
        if number > 0:
            posterior = posterior.update(train, training=TRAINING, progress=False)
        accuracies = [dubito.evaluate(posterior, test).scores["accuracy"] for _, test in learned[: number + 1]]
        shown = " ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        print(f"{name:12} after task {number + 1}: {shown}   mean {sum(accuracies) / len(accuracies):.3f}", flush=True)
    return sum(accuracies) / len(accuracies)


def main(count: int = 5) -> dict[str, float]:
    """Compare fine-tuning with variational updates."""
    torch.manual_seed(0)
    learned, model = tasks(count), models.mlp(64, 10, hidden=(100, 100))
    point = MAP().fit(model, learned[0][0], training=TRAINING, progress=False)
    recipe = Variational(biases="random", initial_scale=0.01, optimizer="natural", temperature=0.1)
    spread = recipe.fit(point.model, learned[0][0], training=TRAINING, progress=False)
    return {"fine-tuning": learn("fine-tuning", point, learned), "variational": learn("variational", spread, learned)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
