"""Do the aleatoric and the epistemic part measure what their names say? Label noise is added, and data is taken away.

    python benchmarks/disentanglement.py --seeds 3 --rows benchmarks/results/disentanglement.jsonl

Aleatoric uncertainty should grow with the noise of the labels and not with fewer data; epistemic uncertainty should
grow with fewer data and not with noise (see Mucsányi et al. 2024, https://arxiv.org/abs/2402.19460). Digits: a share of
the training and validation labels is drawn at random. Regression: a smooth function of five inputs with Gaussian noise
of a known size. Each recipe is fitted to every noise level with all data, and to every amount of data without added
noise. The parts are means over clean test inputs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dubito import MAP, SGMCMC, Ensemble, Laplace, MCDropout, Training, Variational, data, models

NOISES = {"digits": (0.0, 0.1, 0.2, 0.4), "regression": (0.1, 0.2, 0.4, 0.8)}
SHARES = (1.0, 0.5, 0.2, 0.1)
RECIPES: dict[str, Any] = {
    "Ensemble": Ensemble(members=5),
    "Laplace": Laplace(),
    "Variational": Variational(),
    "MCDropout": MCDropout(),
    "SGMCMC": SGMCMC(burn_in=200, num_samples=30, thinning=10, chains=1),
}
TRAINING = {
    "digits": Training(epochs=30, lr=3e-3, batch_size=64, restore_best=True),
    "regression": Training(epochs=120, lr=1e-2, batch_size=64, restore_best=True),
}


def parts(task: str, noise: float, share: float, seed: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return training, validation and test data."""
    generator = torch.Generator().manual_seed(seed)
    if task == "digits":
        digits = data.load("digits", generator=generator)
        x, y = (torch.cat([digits.train[i], *([digits.validation[i]] if digits.validation else [])]) for i in (0, 1))
        test = digits.test
        wrong = torch.rand(len(y), generator=generator) < noise
        y = torch.where(wrong, torch.randint(10, y.shape, generator=generator), y)
    else:
        x = torch.rand(1600, 5, generator=generator) * 2 - 1
        clean = (3 * x[:, 0]).sin() + x[:, 1] * x[:, 2] + x[:, 3] ** 2
        y = clean + noise * torch.randn(1600, generator=generator)
        test = x[1200:], y[1200:].unsqueeze(-1)
        x, y = x[:1200], y[:1200].unsqueeze(-1)
    order = torch.randperm(len(x), generator=generator)[: int(share * len(x))]
    cut = max(len(order) // 6, 10)
    return (x[order[cut:]], y[order[cut:]]), (x[order[:cut]], y[order[:cut]]), test


def measure(task: str, name: str, noise: float, share: float, seed: int) -> dict[str, float]:
    """Fit one recipe and return the means of both parts, and how the two agree over test inputs."""
    train, validation, test = parts(task, noise, share, seed)
    torch.manual_seed(seed)
    model: Any = models.mlp(train[0][0].numel(), 10 if task == "digits" else 1, hidden=(50,))
    likelihood: Any = "categorical" if task == "digits" else "gaussian"
    recipe = RECIPES[name]
    options: dict[str, Any] = {"likelihood": likelihood, "validation": validation, "progress": False}
    if recipe.needs_trained_model:
        model = MAP().fit(model, train, training=TRAINING[task], **options).model
    trains = not recipe.needs_trained_model
    posterior = recipe.fit(model, train, **({"training": TRAINING[task]} if trains else {}), **options)
    prediction: Any = posterior.predict(test[0], num_samples=50)
    aleatoric, epistemic = (part.double().flatten() for part in (prediction.aleatoric, prediction.epistemic))
    found = {"aleatoric": aleatoric.mean(), "epistemic": epistemic.mean(), "nll": -prediction.log_prob(test[1]).mean()}
    if task == "digits":  # the noise of a regression is the same for all inputs
        found["together"] = torch.tensor(_rank_correlation(aleatoric, epistemic))
    return {name: float(value) for name, value in found.items()}


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    ranks = torch.stack([part.argsort().argsort().double() for part in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def table(rows: list[dict[str, Any]]) -> str:
    """Return, for each recipe, by which factor either part grows from the first to the last level, as Markdown."""
    lines = [
        "| task | recipe | aleatoric, more noise | epistemic, more noise | aleatoric, fewer data "
        "| epistemic, fewer data | both parts over test inputs |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in NOISES:
        for name in RECIPES:
            own = [row for row in rows if row["task"] == task and row["recipe"] == name]
            if not own:
                continue
            pairs = [(axis, part) for axis in ("noise", "share") for part in ("aleatoric", "epistemic")]
            cells = [_growth(own, task, axis, part) for axis, part in pairs]
            plain = [row for row in own if row["noise"] == NOISES[task][0] and row["share"] == 1]
            shown = f"{statistics.mean(row['together'] for row in plain):.2f}" if task == "digits" else "–"
            lines.append(f"| {task} | `{name}` | {' | '.join(cells)} | {shown} |")
    return "\n".join(lines)


def _growth(rows: list[dict[str, Any]], task: str, axis: str, part: str) -> str:
    """Return the factor from the first to the last level (median over seeds), and the correlation with the level."""
    other, first = ("share", 1.0) if axis == "noise" else ("noise", NOISES[task][0])
    levels = NOISES[task] if axis == "noise" else SHARES
    factors, correlations = [], []
    for seed in sorted({row["seed"] for row in rows}):
        found = {row[axis]: row[part] for row in rows if row["seed"] == seed and row[other] == first}
        if set(levels) <= set(found):
            values = torch.tensor([found[level] for level in levels], dtype=torch.float64)
            factors.append(float(values[-1] / values[0]))
            correlations.append(_rank_correlation(torch.arange(len(levels)), values))
    return f"×{statistics.median(factors):.2f} ({statistics.mean(correlations):+.1f})" if factors else ""


def main() -> None:
    """Measure what is missing, one JSON line each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", default="benchmarks/results/disentanglement.jsonl")
    given = parser.parse_args()
    path = Path(given.rows)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    keys = ("task", "recipe", "noise", "share", "seed")
    done = {tuple(row[key] for key in keys) for row in rows}
    warnings.simplefilter("ignore")
    for seed in range(given.seeds):
        for task, noises in NOISES.items():
            levels = [(noise, 1.0) for noise in noises] + [(noises[0], share) for share in SHARES[1:]]
            for name in RECIPES:
                for noise, share in levels:
                    if (task, name, noise, share, seed) in done:
                        continue
                    row = dict(zip(keys, (task, name, noise, share, seed), strict=True))
                    rows.append({**row, **measure(task, name, noise, share, seed)})
                    print(json.dumps(rows[-1]), flush=True)
                    with path.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
