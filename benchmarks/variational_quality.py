"""Quality of variational inference: Fashion-MNIST beside strong baselines, UCI log-likelihoods, and underfitting.

    python benchmarks/variational_quality.py uci [--splits 20]     # beside the corrected values of MC dropout (2018)
    python benchmarks/variational_quality.py fashion [--seeds 3]   # beside MAP, temperature scaling and Laplace
    python benchmarks/variational_quality.py wide [--seeds 3]      # mean-field at T = 1 underfits; the remedies

Resumable: finished cells are kept in benchmarks/results. Networks of `fashion` are those of calibration.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from calibration import TASKS
from quality import RESULTS, run, table
from torch import nn

import dubito
from dubito import MAP, Laplace, Posterior, Training, Variational, models, priors, select
from dubito.fitting.recipe import Recipe

LEARNED = priors.Normal(0, "learn", hyperprior=(2.01, 0.101))
FASHION = {
    "MAP": MAP(train=False),
    "MAP, temperature": MAP(train=False, temperature="validation"),
    "kron, validation": Laplace(prior_precision="validation"),
    "variational, T = 1": Variational(),
    "variational, T = 0.1": Variational(temperature=0.1),
    "variational, natural, T = 1": Variational(optimizer="natural"),
    "variational, natural, T = 0.1": Variational(optimizer="natural", temperature=0.1),
    "variational, last layer, T = 1": Variational(weights=select.last_layer()),
}


def short_training(recipe: Recipe) -> Training:
    """Train variational posteriors for ten epochs, since they start from a trained network."""
    return Training(epochs=10) if isinstance(recipe, Variational) else recipe.default_training()


# Gal's corrected values of 2018 (https://github.com/yaringal/DropoutUncertaintyExps) for the experiments of
# Gal and Ghahramani 2016 (https://arxiv.org/abs/1506.02142); they replace table 1, because of how that was tuned.
MC_DROPOUT = {
    "boston": -2.40, "concrete": -2.93, "energy": -1.21, "kin8nm": 1.14, "naval": 4.45, "power": -2.80, "wine": -0.93,
    "yacht": -1.25,
}  # fmt: skip
TEMPERATURES = (1.0, 0.3, 0.1)
UCI_STEPS = 4000
UCI = Variational(prior=LEARNED, start="fresh", kl_warmup=0.3)


def uci(splits: int) -> None:
    """Fill in the missing cells of the UCI table and print it."""
    for split in range(splits):  # outermost, so that a run that is stopped has all data sets
        for name in MC_DROPOUT:
            for kind, work in UCI_CELLS.items():
                path = _uci_path(name, split, kind)
                if not path.is_file():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(json.dumps(work(name, split)))
                    print(f"{name} {split}: {path.read_text()}", flush=True)
    print(uci_table(splits))


def uci_data(name: str, split: int) -> tuple[Any, Training]:
    """Return one split, and training settings with about as many steps for all data sets."""
    data = dubito.data.load(f"uci/{name}", split=split)
    count = len(data.train[0])
    batch_size = min(128, max(32, count // 10))
    epochs = max(20, UCI_STEPS // math.ceil(count / batch_size))
    return data, Training(epochs=epochs, lr=1e-2, batch_size=batch_size)


def uci_network(data: Any, split: int, outputs: int = 1) -> nn.Module:
    """One hidden layer of 50 units."""
    torch.manual_seed(split)
    return models.mlp(data.input_shape[0], outputs, hidden=50)


def everything(data: Any) -> Any:
    """Training and validation data, for what chooses nothing, or has chosen."""
    return tuple(torch.cat(parts) for parts in zip(data.train, data.validation, strict=True))


def uci_cell(name: str, split: int) -> dict[str, float]:
    """Return the test log-likelihood per point, in original units, of each method that needs validation data."""
    data, training = uci_data(name, split)
    model = uci_network(data, split)
    fit: dict[str, Any] = {"likelihood": "gaussian", "validation": data.validation, "progress": False}
    point = MAP().fit(model, data.train, training=training.replace(restore_best=True), **fit)
    found: dict[str, Posterior] = {
        "MAP": point,
        "MAP, temperature": MAP(train=False, temperature="validation").fit(point.model, data.train, **fit),
        "Laplace": Laplace(prior_precision="validation").fit(point.model, data.train, **fit),
    }
    fits = {t: UCI.replace(temperature=t).fit(model, data.train, training=training, **fit) for t in TEMPERATURES}
    best = max(TEMPERATURES, key=lambda t: log_likelihood(fits[t], data, "validation"))
    found["variational, T by validation"] = UCI.replace(temperature=best).fit(
        model, everything(data), training=training, likelihood="gaussian", progress=False
    )
    return {method: log_likelihood(posterior, data, "test") for method, posterior in found.items()}


def uci_all_cell(name: str, split: int) -> dict[str, float]:
    """The same of methods that choose nothing, and learn from all of the training data."""
    data, training = uci_data(name, split)
    fit: dict[str, Any] = {"training": training, "progress": False}
    plain = UCI.fit(uci_network(data, split), everything(data), likelihood="gaussian", **fit)
    noisy = UCI.fit(uci_network(data, split, outputs=2), everything(data), likelihood="heteroscedastic", **fit)
    found = {"variational, T = 1": plain, "variational, T = 1, noise from the input": noisy}
    return {method: log_likelihood(posterior, data, "test") for method, posterior in found.items()}


UCI_CELLS = {"chosen": uci_cell, "all": uci_all_cell}


def _uci_path(name: str, split: int, kind: str) -> Path:
    return RESULTS / "uci-splits" / f"{name}-{split}-{kind}.json"


def log_likelihood(posterior: Posterior, data: Any, part: str) -> float:
    """The mean log-density of the targets of one part, in their original units."""
    inputs, targets = data.parts[part]
    standardized = posterior.predict(inputs, num_samples=200).log_prob(targets).mean()
    return float(standardized - data.target_scale.scale.log().sum())


def uci_table(splits: int) -> str:
    """Return a Markdown table: mean ± standard error over the splits that are there."""
    lines: list[str] = []
    for name, published in MC_DROPOUT.items():
        cells = []
        for split in range(splits):
            paths = [_uci_path(name, split, kind) for kind in UCI_CELLS]
            if all(path.is_file() for path in paths):
                cells.append({key: value for path in paths for key, value in json.loads(path.read_text()).items()})
        if not cells:
            continue
        if not lines:
            lines += [f"| data | splits | MC dropout | {' | '.join(cells[0])} |", f"|{'---|' * (len(cells[0]) + 3)}"]
        columns = (_mean_and_error([cell[method] for cell in cells]) for method in cells[0])
        lines.append(f"| {name} | {len(cells)} | {published:.2f} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _mean_and_error(values: list[float]) -> str:
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{error}"


def fashion(seeds: int) -> None:
    """Fill in the missing cells of the Fashion-MNIST table and print it."""
    run("calibration", {"mlp": TASKS["mlp"]}, FASHION, seeds, ("rotation", "noise"), short_training)
    print(table("calibration", "mlp", FASHION, seeds))


WIDE = {
    "MAP": MAP(train=False),
    "T = 1": Variational(),
    "T = 0.1": Variational(temperature=0.1),
    "T = 0.01": Variational(temperature=0.01),
    "last layer, T = 1": Variational(weights=select.last_layer()),
    "1,000 weights, T = 1": Variational(weights=select.largest_magnitude(1000)),
}


def wide(seeds: int) -> None:
    """Print the scores of a wide network on digits near the optimum of the bound, reached by natural steps."""
    digits = dubito.data.load("digits")
    training = Training(epochs=100)
    print("| | bound per datum | expected train NLL | test NLL | accuracy |\n|---|---|---|---|---|")
    for name, recipe in WIDE.items():
        rows = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            point = MAP().fit(
                models.mlp(64, 10, hidden=400), digits.train, training=Training(epochs=30), progress=False
            )
            natural = recipe.replace(optimizer="natural") if isinstance(recipe, Variational) else recipe
            posterior: Any = natural.fit(point.model, digits.train, training=training, progress=False)
            scores = dubito.evaluate(posterior, digits.test).scores
            count = posterior.num_data
            fit = getattr(posterior, "record", None)
            seen = (float(posterior.log_evidence()) / count, -fit.log_likelihood / count) if fit else (math.nan,) * 2
            rows.append([*seen, scores["nll"], scores["accuracy"]])
        means = [statistics.mean(column) for column in zip(*rows, strict=True)]
        print(f"| {name} | {' | '.join('' if math.isnan(mean) else f'{mean:.3f}' for mean in means)} |", flush=True)


def main() -> None:
    """Run what is missing of one part and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("uci", "fashion", "wide"))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "uci":
        uci(options.splits)
    elif options.part == "fashion":
        fashion(options.seeds)
    else:
        wide(options.seeds)


if __name__ == "__main__":
    main()
