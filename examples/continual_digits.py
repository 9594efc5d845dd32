"""Learn permuted digits one task after the other: each posterior is the prior of the next task.

    python examples/continual_digits.py [--tasks 5] [--picture docs/img/continual.png]

Each task has its own permutation of the pixels. Plain fine-tuning forgets the earlier tasks; a variational posterior
that is updated (`posterior.update(data)`) keeps the weights that it has determined precisely (Nguyen et al. 2018,
https://arxiv.org/abs/1710.10628). The script prints the accuracy on each task so far, and its mean.
"""

from __future__ import annotations

import argparse

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


def learn(name: str, first: Posterior, learned: list[tuple[Pair, Pair]]) -> list[float]:
    """Update a posterior with one task after the other and return the mean accuracy on the tasks so far, after each."""
    posterior, means = first, []
    for number, (train, _) in enumerate(learned):
        if number > 0:
            posterior = posterior.update(train, training=TRAINING, progress=False)
        accuracies = [dubito.evaluate(posterior, test).scores["accuracy"] for _, test in learned[: number + 1]]
        shown = " ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        means.append(sum(accuracies) / len(accuracies))
        print(f"{name:12} after task {number + 1}: {shown}   mean {means[-1]:.3f}", flush=True)
    return means


def draw(means: dict[str, list[float]], path: str) -> None:
    """Draw the mean accuracy against the number of tasks."""
    from dubito.uses.reporting import plots

    curves = {name: [dict(enumerate(values, start=1))] for name, values in means.items()}
    figure = plots.shift(curves, score="Mean accuracy on all tasks so far")
    figure.axes[0].set_xlabel("Tasks learned")
    figure.set_facecolor("white")
    figure.savefig(path, dpi=110)


def main(count: int = 5) -> dict[str, list[float]]:
    """Compare fine-tuning with variational updates."""
    torch.manual_seed(0)
    learned, model = tasks(count), models.mlp(64, 10, hidden=(100, 100))
    point = MAP().fit(model, learned[0][0], training=TRAINING, progress=False)
    recipe = Variational(biases="random", initial_scale=0.01, optimizer="natural", temperature=0.1)
    spread = recipe.fit(point.model, learned[0][0], training=TRAINING, progress=False)
    return {"fine-tuning": learn("fine-tuning", point, learned), "variational": learn("variational", spread, learned)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--picture", default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = main(arguments.tasks)
    if arguments.picture:
        draw(found, arguments.picture)
