"""Choose four training settings by Thompson sampling: a drawn function is the belief, and its minimum is tried next.

    python benchmarks/hyperparameters.py --seeds 5 --rows benchmarks/results/hyperparameters.jsonl

The objective is the validation loss of a small network on 1,000 images (Fashion-MNIST if installed, else MNIST) as a
function of learning rate, weight decay, width and batch size, all on logarithmic scales. The belief is a linearized
Laplace posterior of a network of these numbers, fitted again after every trial. Random search is the baseline, with
the same eight first trials. Test images are only used for the final accuracy.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dubito import MAP, Laplace, Training, data, errors, likelihoods, models

FIRST, TRIALS, ROWS, EPOCHS = 8, 20, 1000, 5
LOW, HIGH = torch.tensor([1e-4, 1e-5, 8.0, 16.0]), torch.tensor([1e-1, 1e-1, 256.0, 256.0])
Objective = Callable[[Tensor], tuple[float, float]]


def images(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return training, validation and test images."""
    try:
        found = data.load("fashion-mnist")
    except errors.MissingDataError:
        found = data.load("mnist")
    order = torch.randperm(len(found.train[1]), generator=torch.Generator().manual_seed(seed))
    parts = {"train": order[:ROWS], "validation": order[ROWS : 2 * ROWS]}
    taken = {name: (found.train[0][rows], found.train[1][rows]) for name, rows in parts.items()}
    return {**taken, "test": found.test}


def objective(parts: dict[str, tuple[Tensor, Tensor]]) -> Objective:
    """Return the function from settings in [0, 1]⁴ to validation loss and test accuracy."""

    def trial(u: Tensor) -> tuple[float, float]:
        lr, decay, width, batch = (LOW * (HIGH / LOW) ** u.float()).tolist()
        torch.manual_seed(0)
        model = models.mlp(784, 10, hidden=(round(width),))
        training = Training(epochs=EPOCHS, lr=lr, weight_decay=decay, batch_size=round(batch), optimizer="adamw")
        posterior = MAP().fit(model, parts["train"], training=training, progress=False)
        loss = -float(posterior.predict(parts["validation"][0]).log_prob(parts["validation"][1]).mean())
        probs: Any = posterior.predict(parts["test"][0])
        return min(loss, 5.0), float((probs.probs.argmax(-1) == parts["test"][1]).float().mean())

    return trial


def proposed(x: Tensor, y: Tensor, seed: int) -> Tensor:
    """Return the minimum of one function that is drawn from the posterior of trials so far."""
    torch.manual_seed(seed)
    pair = 2 * x - 1, ((y.log() - y.log().mean()) / y.log().std()).unsqueeze(-1)
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    options: dict[str, Any] = {"likelihood": likelihoods.Gaussian(0.1), "progress": False}
    training = Training(epochs=200, lr=1e-2, batch_size=len(x), weight_decay=1e-3)
    trained = MAP().fit(model, pair, training=training, **options).model
    posterior = Laplace(structure="full", prior_precision="evidence").fit(trained, pair, **options)
    drawn = posterior.functions(1, generator=torch.Generator().manual_seed(seed))[0]
    with torch.no_grad():
        tried = torch.rand(512, 4, dtype=torch.float64)
        start = tried[drawn(2 * tried - 1)[:, 0].argsort()[:4]]
    logits = start.clamp(1e-3, 1 - 1e-3).logit().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        drawn(2 * logits.sigmoid() - 1).sum().backward()
        optimizer.step()
    best = drawn(2 * logits.sigmoid() - 1)[:, 0].argmin()
    return logits.sigmoid()[best].detach()


def search(trial: Objective, seed: int, thompson: bool) -> dict[str, Any]:
    """Return the best validation loss after each trial, and the test accuracy of the best."""
    points = torch.quasirandom.SobolEngine(4, scramble=True, seed=seed).draw(TRIALS, dtype=torch.float64)
    x, found = points[:FIRST], [trial(u) for u in points[:FIRST]]
    for step in range(FIRST, TRIALS):
        losses = torch.tensor([loss for loss, _ in found], dtype=torch.float64)
        new = proposed(x, losses, 100 * seed + step) if thompson else points[step]
        x, found = torch.cat([x, new[None]]), [*found, trial(new)]
    best = [min(loss for loss, _ in found[: n + 1]) for n in range(TRIALS)]
    return {"best": best, "accuracy": min(found)[1]}


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the median of the best validation loss against the number of trials."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(5, 3.4))
    for method in ("thompson", "random"):
        curves = torch.tensor([row["best"] for row in rows if row["method"] == method])[:, FIRST - 1 :]
        steps = range(FIRST, TRIALS + 1)
        panel.plot(steps, curves.median(0).values, label=method)
        panel.fill_between(steps, curves.min(0).values, curves.max(0).values, alpha=0.15)
    panel.set_xlabel("trials")
    panel.set_ylabel("best validation loss")
    panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Search, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--picture", default="")
    parser.add_argument("--rows", default="", help="A file of JSON lines to which rows are added; known ones are kept.")
    given = parser.parse_args()
    path = Path(given.rows) if given.rows else None
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
    for seed in range(given.seeds):
        trial = objective(images(seed))
        for method in ("thompson", "random"):
            if any(row["seed"] == seed and row["method"] == method for row in rows):
                continue
            rows.append({"seed": seed, "method": method, **search(trial, seed, method == "thompson")})
            last = rows[-1]
            print(f"seed {seed} {method:9} loss {last['best'][-1]:.4f} accuracy {last['accuracy']:.4f}", flush=True)
            if path:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for method in ("thompson", "random"):
        losses = [row["best"][-1] for row in rows if row["method"] == method]
        print(f"{method}: mean loss {math.fsum(losses) / len(losses):.4f}")
    if given.picture:
        draw(rows, given.picture)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
