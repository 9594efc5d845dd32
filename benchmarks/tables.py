"""Compare the estimators with other learners on tables: NLL, coverage and width of 90 % intervals, seconds.

    python benchmarks/tables.py --seeds 3 --out tables.json     # resumes if it was stopped
    python benchmarks/tables.py --out tables.json --print       # the tables as Markdown

All methods get the same rows, without tuning on them beyond what each does inside. The first seed is 100: smaller ones
were used while the settings were chosen. MAPIE is optional.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import cross_val_predict, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dubito import Ensemble, Laplace, Training, data
from dubito.core.errors import MissingDataError
from dubito.sklearn import DubitoClassifier, DubitoRegressor

NORMAL_90 = 1.6448536
# A Gaussian process takes time with the cube of the rows.
MOST_ROWS_OF_A_PROCESS = 1000
FIRST_SEED = 100
# Fixed, so that the numbers do not change with the defaults; training stops by the validation rows of the estimator.
NETWORK, TRAINING = "mlp(hidden=[50, 50])", Training(epochs=300, lr=3e-3, batch_size=64, early_stopping=30)
NUMBERS = ("diabetes", "uci/boston", "uci/concrete", "uci/energy", "uci/wine", "uci/yacht")
CLASSES = ("breast cancer", "wine", "digits")


class TooLargeError(Exception):
    """A table that a method would take too long for."""


# Means, standard deviations or None, and ends of intervals.
Numbers = tuple[Any, Any, Any, Any]


def numbers(name: str) -> tuple[Any, Any]:
    """Return inputs and targets in original units."""
    if name == "diabetes":
        return load_diabetes(return_X_y=True)
    found = data.load(name, validation=0)
    parts = [found.train, found.test]
    inputs, targets = (torch.cat([part[place] for part in parts]).double() for place in (0, 1))
    assert found.target_scale is not None
    return inputs.numpy(), found.target_scale.decode(targets)[:, 0].numpy()


def classes(name: str) -> tuple[Any, Any]:
    return {"breast cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits}[name](return_X_y=True)


def normal(mean: Any, std: Any) -> Numbers:
    return mean, std, mean - NORMAL_90 * std, mean + NORMAL_90 * std


def dubito_regression(recipe: Any) -> Callable[..., Numbers]:
    def run(X: Any, y: Any, X_new: Any, seed: int) -> Numbers:
        model = DubitoRegressor(recipe, NETWORK, training=TRAINING, random_state=seed).fit(X, y)
        mean, std = model.predict(X_new, return_std=True)
        return mean, std, *model.predict_interval(X_new, 0.9).T

    return run


def forest(X: Any, y: Any, X_new: Any, seed: int) -> Numbers:
    model = RandomForestRegressor(300, oob_score=True, random_state=seed, min_samples_leaf=2).fit(X, y)
    std = np.sqrt(np.mean((y - model.oob_prediction_) ** 2))
    return normal(model.predict(X_new), np.full(len(X_new), std))


def boosting(X: Any, y: Any, X_new: Any, seed: int) -> Numbers:
    model = HistGradientBoostingRegressor(random_state=seed)
    std = np.sqrt(np.mean((y - cross_val_predict(model, X, y, cv=5)) ** 2))
    ends = [
        HistGradientBoostingRegressor(loss="quantile", quantile=q, random_state=seed).fit(X, y).predict(X_new)
        for q in (0.05, 0.95)
    ]
    return model.fit(X, y).predict(X_new), np.full(len(X_new), std), *ends


def mapie_boosting(X: Any, y: Any, X_new: Any, seed: int) -> Numbers:
    from mapie.regression import CrossConformalRegressor

    model = CrossConformalRegressor(
        HistGradientBoostingRegressor(random_state=seed), confidence_level=0.9, method="plus", cv=5, random_state=seed
    )
    mean, ends = model.fit_conformalize(X, y).predict_interval(X_new)
    return mean, None, ends[:, 0, 0], ends[:, 1, 0]


def process(X: Any, y: Any, X_new: Any, seed: int) -> Numbers:
    kernel = ConstantKernel(1.0) * RBF(np.ones(X.shape[1])) + WhiteKernel(0.1)
    model = make_pipeline(StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed))
    return normal(*model.fit(X, y).predict(X_new, return_std=True))


REGRESSIONS: dict[str, Callable[..., Numbers]] = {
    "Dubito, Laplace": dubito_regression(Laplace(structure="kron")),
    "Dubito, ensemble of 5": dubito_regression(Ensemble(5)),
    "random forest": forest,
    "gradient boosting": boosting,
    "gradient boosting + MAPIE (CV+)": mapie_boosting,
    "Gaussian process": process,
}
CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    "Dubito, Laplace": lambda s: DubitoClassifier(Laplace(), NETWORK, training=TRAINING, random_state=s),
    "Dubito, ensemble of 5": lambda s: DubitoClassifier(Ensemble(5), NETWORK, training=TRAINING, random_state=s),
    "random forest": lambda s: RandomForestClassifier(300, random_state=s),
    "gradient boosting": lambda s: HistGradientBoostingClassifier(random_state=s),
    "Gaussian process": lambda s: make_pipeline(StandardScaler(), GaussianProcessClassifier(random_state=s)),
}


def check_size(method: str, num_rows: int) -> None:
    if method == "Gaussian process" and num_rows > MOST_ROWS_OF_A_PROCESS:
        raise TooLargeError(f"{num_rows} rows are too many")


def score_numbers(name: str, method: str, seed: int) -> dict[str, float]:
    X, X_new, y, y_new = train_test_split(*numbers(name), test_size=0.2, random_state=seed)
    check_size(method, len(y))
    start = time.process_time()
    mean, std, low, high = REGRESSIONS[method](X, y, X_new, seed)
    seconds = time.process_time() - start
    found = {"rmse": float(np.sqrt(np.mean((mean - y_new) ** 2))), "seconds": seconds}
    if std is not None:
        log = -0.5 * ((y_new - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
        found["nll"] = -float(log.mean())
    return found | {
        "coverage": float(np.mean((low <= y_new) & (y_new <= high))),
        "width": float(np.mean(high - low) / np.std(y)),
    }


def score_classes(name: str, method: str, seed: int) -> dict[str, float]:
    inputs, labels = classes(name)
    X, X_new, y, y_new = train_test_split(inputs, labels, test_size=0.3, random_state=seed, stratify=labels)
    check_size(method, len(y))
    start = time.process_time()
    model = CLASSIFIERS[method](seed).fit(X, y)
    probs = model.predict_proba(X_new)
    seconds = time.process_time() - start
    own = np.clip(probs[np.arange(len(y_new)), np.searchsorted(np.unique(y), y_new)], 1e-12, 1)
    right = probs.argmax(1) == np.searchsorted(np.unique(y), y_new)
    return {"nll": -float(np.log(own).mean()), "accuracy": float(right.mean()), "seconds": seconds}


def measure(seeds: int, path: Path) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    plan = [("numbers", score_numbers, NUMBERS, REGRESSIONS), ("classes", score_classes, CLASSES, CLASSIFIERS)]
    for task, score, names, methods in plan:
        for name in names:
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                for method in methods:
                    key = f"{task}|{name}|{method}|{seed}"
                    if key in found:
                        continue
                    try:
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            found[key] = score(name, method, seed)  # type: ignore[operator]
                    except (ImportError, MissingDataError, TooLargeError) as error:
                        print(f"{key}: left out ({error})", flush=True)
                        continue
                    print(key, found[key], flush=True)
                    path.write_text(json.dumps(found, indent=1))


def print_tables(path: Path) -> None:
    found = json.loads(path.read_text())
    for task, shown in (
        ("numbers", ("rmse", "nll", "coverage", "width", "seconds")),
        ("classes", ("nll", "accuracy", "seconds")),
    ):
        print(f"| table | method | {' | '.join(shown)} |\n|---|---|{'---|' * len(shown)}")
        rows: dict[tuple[str, str], list[dict[str, float]]] = {}
        for key, scores in found.items():
            kind, name, method, _ = key.split("|")
            if kind == task:
                rows.setdefault((name, method), []).append(scores)
        for (name, method), each in rows.items():
            cells = [[one[score] for one in each if score in one] for score in shown]
            texts = [f"{np.mean(c):.3g} ± {np.std(c, ddof=1):.2g}" if len(c) > 1 else "" for c in cells]
            print(f"| {name} | {method} | {' | '.join(texts)} |")
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("tables.json"))
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print_tables(given.out) if given.print else measure(given.seeds, given.out)
