"""A prior over functions beside a prior of weights, where the data have a gap: a toy and UCI gap splits.

    python benchmarks/function_space.py run [--sets boston concrete energy yacht] [--splits 3]
    python benchmarks/function_space.py show

The same network (50 units) is trained by `MAP` and given a Laplace posterior: with the default prior of the weights,
and with `priors.FunctionSpace`, whose Matérn lengthscale is the one of the highest evidence on the training data, out
of three multiples of the median distance. In a gap split the middle third of the rows, by one feature, is the test
set. Rows of results are kept in `benchmarks/results/function_space.jsonl`; existing ones are not computed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import dubito
from dubito import MAP, Laplace, Training, kernels, models, priors

ROWS = Path(__file__).parent / "results" / "function_space.jsonl"
FACTORS = (0.5, 1.0, 2.0)
TRAINING = Training(epochs=150, batch_size=64, lr=1e-2)
PICTURE = Path(__file__).parent.parent / "docs" / "img" / "function-space.png"


def fit(prior: priors.FunctionSpace | None, data: Any, seed: int) -> Any:
    """Train the network and return its Laplace posterior."""
    torch.manual_seed(seed)
    network = models.mlp(data[0].shape[1], 1, hidden=50)
    options: dict[str, Any] = {"likelihood": "gaussian", "progress": False}
    point = MAP(prior=prior).fit(network, data, training=TRAINING, **options)
    recipe = Laplace() if prior is None else Laplace(prior=prior)
    return recipe.fit(point.model, data, **options)


def scores(posterior: Any, test: Any) -> dict[str, float]:
    """Return negative log-probability and error on the test rows."""
    predicted = posterior.predict(test[0])
    error = (predicted.mean - test[1]).square().mean().sqrt()
    return {"nll": -float(predicted.log_prob(test[1]).mean()), "rmse": float(error)}


def by_evidence(data: Any, seed: int) -> tuple[Any, float]:
    """Return the posterior of the lengthscale with the highest evidence, and its factor of the median distance."""
    found = []
    distance = float(torch.pdist(data[0][:1000]).median())
    for factor in FACTORS:
        posterior = fit(priors.FunctionSpace(kernels.Matern(factor * distance)), data, seed)
        found.append((float(posterior.log_evidence()), factor, posterior))
    _, factor, best = max(found, key=lambda each: each[0])
    return best, factor


def run(sets: list[str], splits: int) -> None:
    """Fill in what is missing."""
    ROWS.parent.mkdir(exist_ok=True)
    done = {(row["data"], row["split"]) for row in rows()}
    for split in range(splits):
        for name in sets:
            if (name, split) in done:
                continue
            data = dubito.data.load(f"uci/{name}", split=split, gap=True, validation=0.0)
            start = time.process_time()
            found = {"weights": scores(fit(None, data.train, split), data.test)}
            middle = time.process_time()
            posterior, factor = by_evidence(data.train, split)
            found["functions"] = scores(posterior, data.test)
            cost = [middle - start, (time.process_time() - middle) / len(FACTORS)]
            row = {"data": name, "split": split, "factor": factor, "seconds": cost, **found}
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


def rows() -> list[dict[str, Any]]:
    """Return the results so far."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.is_file() else []


def show() -> None:
    """Print the table and draw the toy."""
    print("| data | NLL, weights | NLL, functions | difference | RMSE, weights | RMSE, functions | splits |")
    print("|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["data"] for row in rows()):
        own = [row for row in rows() if row["data"] == name]
        nll, rmse = ([[row[kind][key] for row in own] for kind in ("weights", "functions")] for key in ("nll", "rmse"))
        gaps = [ours - theirs for theirs, ours in zip(*nll, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        shown = [f"{statistics.mean(values):.2f}" for values in (*nll, *rmse)]
        difference = f"{statistics.mean(gaps):+.2f} ± {error:.2f}"
        print("| " + " | ".join([name, *shown[:2], difference, *shown[2:], str(len(own))]) + " |")
    draw()


def draw() -> None:
    """Draw mean and two standard deviations of three priors on data with a gap."""
    import matplotlib.pyplot as plt

    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.rand(40, 1, generator=generator) * 2 - 3, torch.rand(40, 1, generator=generator) * 2 + 1])
    y = (2 * x).sin() + 0.1 * torch.randn(80, 1, generator=generator)
    context, grid = torch.linspace(-6, 6, 60).unsqueeze(1), torch.linspace(-6, 6, 241).unsqueeze(1)
    options: dict[str, Any] = {"likelihood": "gaussian", "progress": False}
    drawn = {
        "weights, isotropic": None,
        "functions, RBF(1.0)": priors.FunctionSpace(kernels.RBF(1.0), context),
        "functions, Periodic(π)": priors.FunctionSpace(kernels.Periodic(torch.pi), context),
    }
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True)
    for panel, (title, prior) in zip(panels, drawn.items(), strict=True):
        torch.manual_seed(0)
        network = models.mlp(1, 1, hidden=(50, 50), activation="tanh")
        training = Training(epochs=2000, lr=0.01, batch_size=80)
        point = MAP(prior=prior).fit(network, (x, y), training=training, **options)
        recipe = Laplace() if prior is None else Laplace(prior=prior)
        predicted = recipe.fit(point.model, (x, y), **options).predict(grid)
        mean, spread = predicted.mean.flatten(), 2 * predicted.stddev.flatten()
        panel.fill_between(grid.flatten(), mean - spread, mean + spread, alpha=0.3)
        panel.plot(grid, mean)
        panel.plot(grid, (2 * grid).sin(), "k:", linewidth=1)
        panel.plot(x, y, "k.", markersize=3)
        panel.set_title(title)
        panel.set_ylim(-3, 3)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Run or show."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("--sets", nargs="+", default=["yacht", "boston", "energy", "concrete"])
    parser.add_argument("--splits", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run(options.sets, options.splits) if options.what == "run" else show()


if __name__ == "__main__":
    main()
