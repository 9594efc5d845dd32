"""Permuted MNIST over five tasks: learning on with a posterior, against plain fine-tuning.

Each task shows the same digits with the pixels in another order, one after another, and no old image is kept. A row is
the accuracy on all five test sets after the last task, and how much of the accuracy after its own task lost by then.

    DUBITO_DATA=... python benchmarks/continual.py --seeds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dubito
from dubito import MAP, Laplace, Training, Variational, models

RESULTS = Path(__file__).parent / "results" / "continual"
NUM_TASKS = 5
TRAINING = Training(epochs=10, lr=1e-3, batch_size=128)
VARIATIONAL = Training(epochs=10, lr=5e-3, batch_size=128)

Pair = tuple[Tensor, Tensor]


def tasks(seed: int, limit: int, limit_test: int) -> list[tuple[Pair, Pair]]:
    """Return the training and test pairs of each task; the first has its pixels in their own order."""
    mnist = dubito.data.load("mnist", limit=limit, limit_test=limit_test, validation=0)
    generator = torch.Generator().manual_seed(1000 + seed)
    found = []
    for task in range(NUM_TASKS):
        order = torch.arange(784) if task == 0 else torch.randperm(784, generator=generator)
        train, test = ((images.flatten(1)[:, order], labels) for images, labels in (mnist.train, mnist.test))
        found.append((train, test))
    return found


def fine_tuning(first: Any, data: Pair) -> Any:
    return first


def laplace(first: Any, data: Pair) -> Any:
    return Laplace(structure="kron", prior_precision=1.0).fit(first.model, data, progress=False)


def variational(first: Any, data: Pair) -> Any:
    recipe = Variational(biases="random", initial_scale=0.05)
    return recipe.fit(first.model, data, training=VARIATIONAL, progress=False)


METHODS: dict[str, tuple[Callable[[Any, Pair], Any], Training]] = {
    "fine-tuning": (fine_tuning, TRAINING),
    "Laplace, Kronecker": (laplace, TRAINING),
    "Variational": (variational, VARIATIONAL),
}


def accuracy(posterior: Any, test: Pair) -> float:
    return float((posterior.predict(test[0]).mode == test[1]).double().mean())


def learn(method: str, seed: int, limit: int, limit_test: int) -> list[list[float]]:
    """Return the accuracies on the tasks seen so far, after each task."""
    make, training = METHODS[method]
    stream = tasks(seed, limit, limit_test)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = models.mlp(784, 10, hidden=(100, 100))
    first = MAP().fit(model, stream[0][0], training=TRAINING, generator=generator, progress=False)
    posterior = make(first, stream[0][0])
    history = [[accuracy(posterior, stream[0][1])]]
    for task in range(1, NUM_TASKS):
        posterior = posterior.update(stream[task][0], training=training, generator=generator, progress=False)
        history.append([accuracy(posterior, test) for _, test in stream[: task + 1]])
        print(method, seed, task, " ".join(f"{value:.3f}" for value in history[-1]), flush=True)
    return history


def summary(history: list[list[float]]) -> dict[str, float]:
    """Return the accuracies after the last task, and the mean of what each earlier task lost since its own."""
    last = history[-1]
    lost = [history[task][task] - last[task] for task in range(NUM_TASKS - 1)]
    return {
        "all tasks": statistics.mean(last), "first task": last[0], "last task": last[-1],
        "forgotten": statistics.mean(lost),
    }  # fmt: skip


def table(seeds: int) -> str:
    lines: list[str] = []
    for method in METHODS:
        rows = [summary(json.loads(_cell(method, seed).read_text())) for seed in range(seeds)]
        if not lines:
            lines = [f"| | {' | '.join(rows[0])} |", f"|---|{'---|' * len(rows[0])}"]
        lines.append(f"| {method} | {' | '.join(_mean([row[name] for row in rows]) for name in rows[0])} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def _cell(method: str, seed: int) -> Path:
    return RESULTS / f"{''.join(c if c.isalnum() else '-' for c in method)}-{seed}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=3000, help="training images of each task")
    parser.add_argument("--limit-test", type=int, default=2000, help="test images of each task")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for seed in range(arguments.seeds):
        for method in METHODS:
            if not _cell(method, seed).is_file():
                history = learn(method, seed, arguments.limit, arguments.limit_test)
                _cell(method, seed).write_text(json.dumps(history))
    print(table(arguments.seeds))


if __name__ == "__main__":
    main()
