"""Permuted MNIST over five tasks: updates of a posterior against plain fine-tuning.

Each task has the same digits with another permutation of the pixels, and no old image is kept. A row shows the accuracy
on all five test sets after the last task, and how much accuracy each task has lost since it was learned.

    DUBITO_DATA=... python benchmarks/continual.py --seeds 3

The settings of every method are chosen from its `CHOICES`: the highest mean accuracy after three tasks of another
stream with other permutations, on held-out training images. Test images choose nothing. Every cell is one JSON file, so
a stopped run continues.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from quality import cell, mean_text
from torch import Tensor

import dubito
from dubito import MAP, SGMCMC, Laplace, Training, Variational, models, priors

FOLDER = "continual"
NUM_TASKS, NUM_CHOICE_TASKS = 5, 3
CHOICE_SEED = 99  # of the permutations and the network on which settings are chosen
TRAINING = Training(epochs=10, lr=1e-3, batch_size=128)

Pair = tuple[Tensor, Tensor]
Settings = dict[str, float]


def tasks(seed: int, limit: int, limit_test: int, num_tasks: int, held_out: float) -> list[tuple[Pair, Pair]]:
    """Return the training and evaluation pairs of each task; the first has its pixels in their own order.

    Args:
        seed: Of the permutations.
        limit: Training images, those held out among them.
        limit_test: Test images.
        num_tasks: How many tasks.
        held_out: The share of training images to evaluate on; 0 evaluates on test images.
    """
    mnist = dubito.data.load("mnist", limit=limit, limit_test=limit_test, validation=held_out)
    generator = torch.Generator().manual_seed(1000 + seed)
    orders = [torch.arange(784)] + [torch.randperm(784, generator=generator) for _ in range(num_tasks - 1)]
    pairs: Any = (mnist.train, mnist.validation if held_out else mnist.test)
    return [tuple((images.flatten(1)[:, order], labels) for images, labels in pairs) for order in orders]  # type: ignore[misc]


def fine_tuning(first: Any, data: Pair, training: Training, settings: Settings) -> Any:
    return first


def laplace(first: Any, data: Pair, training: Training, settings: Settings) -> Any:
    recipe = Laplace(structure="kron", prior_precision=settings["prior_precision"])
    return recipe.fit(first.model, data, progress=False)


def variational(first: Any, data: Pair, training: Training, settings: Settings) -> Any:
    recipe = Variational(biases="random", initial_scale=settings["initial_scale"])
    return recipe.fit(first.model, data, training=training, progress=False)


def sghmc(first: Any, data: Pair, training: Training, settings: Settings) -> Any:
    prior = priors.Normal(0.0, settings["prior_scale"])
    recipe = SGMCMC("sghmc", prior=prior, temperature=settings["temperature"], burn_in=500, thinning=20, num_samples=50)
    return recipe.fit(first.model, data, training=training, progress=False)


METHODS: dict[str, Callable[[Any, Pair, Training, Settings], Any]] = {
    "fine-tuning": fine_tuning,
    "Laplace, Kronecker": laplace,
    "Variational": variational,
    "SGHMC, warm-started": sghmc,
}
CHOICES: dict[str, dict[str, tuple[float, ...]]] = {
    "fine-tuning": {"lr": (1e-4, 3e-4, 1e-3)},
    "Laplace, Kronecker": {"prior_precision": (0.1, 1.0, 10.0, 100.0)},
    "Variational": {"initial_scale": (0.02, 0.05, 0.1), "lr": (2e-3, 5e-3, 1e-2)},
    "SGHMC, warm-started": {"prior_scale": (0.1, 1.0), "temperature": (0.01, 0.03, 0.1, 0.3)},
}


def accuracy(posterior: Any, test: Pair) -> float:
    return float((posterior.predict(test[0]).mode == test[1]).double().mean())


def learn(method: str, settings: Settings, stream: list[tuple[Pair, Pair]], seed: int) -> list[list[float]]:
    """Return the accuracies on the tasks seen so far, after each task."""
    training = TRAINING.replace(lr=settings.get("lr", TRAINING.lr))
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = models.mlp(784, 10, hidden=(100, 100))
    first = MAP().fit(model, stream[0][0], training=TRAINING, generator=generator, progress=False)
    posterior = METHODS[method](first, stream[0][0], training, settings)
    history = [[accuracy(posterior, stream[0][1])]]
    for task in range(1, len(stream)):
        posterior = posterior.update(stream[task][0], training=training, generator=generator, progress=False)
        history.append([accuracy(posterior, test) for _, test in stream[: task + 1]])
        print(method, _text(settings), seed, task, " ".join(f"{value:.3f}" for value in history[-1]), flush=True)
    return history


def stored(kind: str, method: str, settings: Settings, seed: int, stream: Callable[[], Any]) -> list[list[float]]:
    """Return the history of a cell, learned now or before."""
    path = cell(FOLDER, kind, f"{method} {_text(settings)}", seed)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(learn(method, settings, stream(), seed)))
    return json.loads(path.read_text())


def choose(method: str, limit: int) -> Settings:
    """Return the settings with the highest mean accuracy on held-out images of a stream of its own."""
    names, values = CHOICES[method].keys(), CHOICES[method].values()
    found: dict[str, tuple[float, Settings]] = {}
    for chosen in itertools.product(*values):
        settings = dict(zip(names, chosen, strict=True))
        stream = lambda: tasks(CHOICE_SEED, limit, 1, NUM_CHOICE_TASKS, held_out=0.2)  # noqa: E731
        history = stored("choice", method, settings, CHOICE_SEED, stream)
        found[_text(settings)] = statistics.mean(history[-1]), settings
    best = max(found, key=lambda key: found[key][0])
    print(f"{method}: {best} of", {key: round(score, 3) for key, (score, _) in found.items()}, flush=True)
    return found[best][1]


def summary(history: list[list[float]]) -> dict[str, float]:
    """Return the accuracies after the last task, and the mean of what each earlier task lost since its own."""
    last = history[-1]
    lost = [history[task][task] - last[task] for task in range(len(last) - 1)]
    return {
        "all tasks": statistics.mean(last), "first task": last[0], "last task": last[-1],
        "forgotten": statistics.mean(lost),
    }  # fmt: skip


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    columns = list(next(iter(rows.values()))[0])
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for method, found in rows.items():
        lines.append(f"| {method} | {' | '.join(mean_text([row[name] for row in found]) for name in columns)} |")
    return "\n".join(lines)


def _text(settings: Settings) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in settings.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=3000, help="training images of each task")
    parser.add_argument("--limit-test", type=int, default=2000, help="test images of each task")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {}
    for method in METHODS:
        settings = choose(method, options.limit)
        for seed in range(options.seeds):
            stream = lambda s=seed: tasks(s, options.limit, options.limit_test, NUM_TASKS, held_out=0.0)  # noqa: E731
            rows.setdefault(method, []).append(summary(stored("rows", method, settings, seed, stream)))
    print(table(rows))


if __name__ == "__main__":
    main()
