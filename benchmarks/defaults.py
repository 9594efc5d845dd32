"""Every recipe with its default settings against the plain network and scikit-learn's models.

    python benchmarks/defaults.py run --splits 0 1 2 3 4     # resumable: cells that are done are skipped
    python benchmarks/defaults.py table

15 data sets; the split of training and test examples changes with its number. A tenth of the training part is the
validation data, which all methods are given. *Careful* is a network trained by hand: Adam at 3e-3, early stopping on
the validation data, whose residuals also give the noise of a regression; *tempered* is the same with a temperature.
Reported are the negative log-likelihood, its paired difference to the careful network's with the standard error over
test examples, the calibration error (or the coverage of 90 % intervals, and the CRPS), how well uncertainty tells test
inputs from scrambled ones (each feature permuted over the examples), and CPU seconds. The search for the number of
epochs is made once for all recipes that start from the same weights. `defaults_table.py` writes the tables.

Rows are kept in `results/defaults.jsonl`, each with the commit that made it, so that later runs go on. Sizes are cut
so that all of it fits on one CPU: at most 2,000 training and 1,000 test rows of each set.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets as sklearn_data
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import select
from dubito.fitting import automatic

RESULTS = Path(__file__).parent / "results" / "defaults.jsonl"
# Defaults were developed on the first half and are proved on the second.
DEVELOPED = ("digits", "wine", "diabetes", "uci/boston", "uci/energy", "uci/kin8nm", "fashion-mnist")
PROVED = (
    "breast_cancer", "uci/concrete", "uci/naval", "uci/power", "uci/wine", "uci/yacht", "mnist", "mr",
)  # fmt: skip
RECIPES: dict[str, dubito.fitting.recipe.Recipe] = {
    "MAP": dubito.MAP(),
    "Laplace": dubito.Laplace(),
    "Laplace, diagonal": dubito.Laplace(structure="diag"),
    "Laplace, last layer": dubito.Laplace(weights=select.last_layer()),
    "Laplace, subnetwork": dubito.Laplace(structure="full", weights=select.subnetwork(300)),
    "Auto": dubito.Auto(),
    "Ensemble": dubito.Ensemble(),
    "Rank1": dubito.Rank1(),
    "BatchEnsemble": dubito.BatchEnsemble(),
    "MCDropout": dubito.MCDropout(),
    "SWAG": dubito.SWAG(),
    "Snapshot": dubito.Snapshot(),
    "Variational": dubito.Variational(),
    "SGMCMC": dubito.SGMCMC(),
    "SGMCMC, last layer": dubito.SGMCMC(weights=select.last_layer()),
    "SVGD": dubito.SVGD(),
}
# Its cost is bounded: on small tables only, and only if it is named by `--methods`.
EXPENSIVE: dict[str, dubito.fitting.recipe.Recipe] = {"HMC": dubito.HMC()}
IMAGES = ("fashion-mnist", "mnist")
MOST_TRAINING, MOST_TEST = 2000, 1000


class Words(nn.Module):
    """A classifier of texts: the mean of the words' vectors, and one hidden layer."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(16, 50), nn.ReLU(), nn.Linear(50, classes))

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits; 0 is the padding."""
        there = (words != 0).unsqueeze(-1).to(self.embedding.weight.dtype)
        return self.layers((self.embedding(words) * there).sum(1) / there.sum(1).clamp_min(1.0))


def load(name: str, split: int) -> tuple[Any, Any, Any, bool]:
    """Return training, validation and test data, and whether it is a classification."""
    generator = torch.Generator().manual_seed(split)
    if name in ("wine", "breast_cancer"):
        x, y = getattr(sklearn_data, f"load_{name}")(return_X_y=True)
        near, far, labels, held = train_test_split(x, y, test_size=0.2, random_state=split, stratify=y)
        middle, scale = near.mean(0), near.std(0)
        train = torch.tensor((near - middle) / scale, dtype=torch.float32), torch.tensor(labels)
        test = torch.tensor((far - middle) / scale, dtype=torch.float32), torch.tensor(held)
        order = torch.randperm(len(near), generator=generator)
        cut = len(near) // 10
        parts = [tuple(value[rows] for value in train) for rows in (order[cut:], order[:cut])]
        return parts[0], parts[1], test, True
    number = 0 if name in IMAGES else split
    data = dubito.data.load(name, split=number, validation=0.1, generator=generator)
    limits = (MOST_TRAINING, MOST_TRAINING // 10, MOST_TEST)
    parts = [
        _some(part, most, generator)
        for part, most in zip((data.train, data.validation, data.test), limits, strict=True)
    ]
    return parts[0], parts[1], parts[2], data.task == "classification"


def _some(pair: Any, most: int, generator: torch.Generator) -> Any:
    """Return at most this many rows, drawn at random."""
    if len(pair[0]) <= most:
        return pair
    rows = torch.randperm(len(pair[0]), generator=generator)[:most]
    return tuple(part[rows] for part in pair)


def network(name: str, x: Tensor, y: Tensor, classes: bool, seed: int) -> nn.Module:
    """Return a new network for a data set."""
    torch.manual_seed(seed)
    outputs = int(y.max()) + 1 if classes else 1
    if name == "mr":
        return Words(int(x.max()) + 1 if x.max() > 20_000 else 20_000, outputs)
    if name in IMAGES:  # a fifth of the operations of LeNet-5
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, outputs),
        )  # fmt: skip
    return nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 50), nn.ReLU(), nn.Linear(50, outputs))


@contextmanager
def one_search_per_start(memory: dict[Any, Any]) -> Iterator[None]:
    """Let all recipes that start from the same weights share the search for the number of epochs."""
    search: Callable[..., Any] = automatic._search

    def remembered(runs: Any, problem: Any) -> Any:
        start = sum(float(value.detach().double().abs().sum()) for value in problem.model.parameters())
        key = (start, problem.training, len(runs), sum(run.problem.source.num_data for run in runs))
        if key not in memory:
            memory[key] = search(runs, problem)
        return memory[key]

    automatic._search = remembered
    try:
        yield
    finally:
        automatic._search = search


def careful(model: nn.Module, train: Any, validation: Any, classes: bool, seed: int) -> tuple[nn.Module, float]:
    """Return a network trained with early stopping, and the noise of its validation residuals."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    (x, y), best, since, step = train, (math.inf, copy.deepcopy(model.state_dict())), 0, 0
    size = min(128, max(16, 2 ** round(math.log2(len(x) / 16))))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        return F.cross_entropy(outputs, y) if classes else F.mse_loss(outputs, y)

    while step < 4000 and since < 20:
        for rows in torch.randperm(len(x), generator=generator).split(size):
            optimizer.zero_grad()
            loss(x[rows], y[rows]).backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                with torch.no_grad():
                    now = float(loss(*validation))
                since = 0 if now < best[0] else since + 1
                best = min(best, (now, copy.deepcopy(model.state_dict())), key=lambda pair: pair[0])
    model.load_state_dict(best[1])
    with torch.no_grad():
        noise = 1.0 if classes else float((model(validation[0]) - validation[1]).square().mean().sqrt())
    return model, noise


def scrambled(x: Tensor, seed: int = 0) -> Tensor:
    """Return inputs whose features are each permuted over the examples."""
    flat = x.flatten(1)
    order = torch.rand(flat.shape, generator=torch.Generator().manual_seed(seed)).argsort(0)
    return flat.gather(0, order).reshape(x.shape)


def auroc(near: Tensor, far: Tensor) -> float:
    """Return the probability that a value of `far` is larger than one of `near`."""
    far = far.double().sort().values
    below, upto = (torch.searchsorted(far, near.double(), right=right) for right in (False, True))
    return float((1 - (below + upto) / (2 * len(far))).mean())


def measured(prediction: Any, strange: Any, y: Tensor, classes: bool, spread: bool) -> dict[str, Any]:
    """Return all scores of a prediction, and the log-probability of each test example."""
    total = (lambda p: p.entropy) if classes else (lambda p: p.stddev.flatten())
    doubt = (lambda p: p.epistemic.flatten()) if spread else total
    found: dict[str, Any] = {
        "log_prob": prediction.log_prob(y).double(),
        "ood": auroc(doubt(prediction), doubt(strange)),
    }
    if classes:
        found["ece"] = float(dubito.metrics.ece(prediction.probs, y))
    else:
        z = ((y - prediction.mean) / prediction.stddev).abs()
        found |= {"coverage": float((z < 1.6449).double().mean()), "crps": float(prediction.crps(y).double().mean())}
    return found


def sklearn_models(train: Any, test: Any, strange: Tensor, classes: bool, seed: int) -> Iterator[tuple[str, dict]]:
    """Yield the scores of scikit-learn's models; the noise of a regression comes from a tenth of the training data."""
    (x, y), (far, held) = (
        [np.asarray(part.flatten(1) if k == 0 else part) for k, part in enumerate(pair)] for pair in (train, test)
    )
    odd = strange.flatten(1).numpy()
    if classes:
        models = {
            "Random forest": RandomForestClassifier(200, random_state=seed),
            "Gradient boosting": HistGradientBoostingClassifier(early_stopping=True, random_state=seed),
            "Gaussian process": GaussianProcessClassifier(
                ConstantKernel() * RBF(math.sqrt(x.shape[1])), random_state=seed
            ),
        }
    else:
        y, held = y.ravel(), held.ravel()
        models = {
            "Random forest": RandomForestRegressor(200, oob_score=True, random_state=seed),
            "Gradient boosting": HistGradientBoostingRegressor(early_stopping=True, random_state=seed),
            "Gaussian process": GaussianProcessRegressor(
                ConstantKernel() * RBF(np.full(x.shape[1], 3.0)) + WhiteKernel(), normalize_y=True, random_state=seed
            ),
        }
    for name, model in models.items():
        if name == "Gaussian process" and len(x) > (600 if classes else 1000):
            continue
        start = time.process_time()
        if classes:
            model.fit(x, y)
            probs, odds = (np.clip(model.predict_proba(part), 1e-3, None) for part in (far, odd))
            probs, odds = (torch.tensor(each / each.sum(1, keepdims=True)) for each in (probs, odds))
            log_prob = probs.log()[torch.arange(len(held)), torch.tensor(held)]
            entropies = [-(each * each.log()).sum(1) for each in (probs, odds)]
            rest = {"ece": float(dubito.metrics.ece(probs, torch.tensor(held))), "ood": auroc(*entropies)}
        else:
            model.fit(x, y)
            if name == "Gaussian process":
                (mean, scale), (_, wide) = (model.predict(part, return_std=True) for part in (far, odd))
                rest = {"ood": auroc(torch.tensor(scale), torch.tensor(wide))}
            else:
                fitted = getattr(model, "oob_prediction_", None)
                if fitted is None:  # residuals of a tenth of the rows, held out once more
                    cut = len(x) // 10
                    again = HistGradientBoostingRegressor(early_stopping=True, random_state=seed).fit(x[cut:], y[cut:])
                    residuals = y[:cut] - again.predict(x[:cut])
                else:
                    residuals = y - fitted
                mean, scale, rest = model.predict(far), np.sqrt((residuals**2).mean()), {}
            z = torch.tensor((held - mean) / scale)
            log_prob = -0.5 * z.square() - torch.as_tensor(np.log(scale)) - 0.5 * math.log(2 * math.pi)
            rest["coverage"] = float((z.abs() < 1.6449).double().mean())
            density, below = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi), torch.special.ndtr(z)
            crps = torch.as_tensor(scale) * (z * (2 * below - 1) + 2 * density - 1 / math.sqrt(math.pi))
            rest["crps"] = float(crps.mean())
        yield name, {"log_prob": log_prob, **rest, "seconds": time.process_time() - start}


def commit() -> str:
    """Return the short name of the commit that is checked out, with a plus if files were changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=RESULTS.parent.parent, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


class Cell:
    """One split of one data set: its data, its network, and the file to which scores are added."""

    def __init__(self, name: str, split: int, made_by: str) -> None:
        self.name, self.split, self.made_by = name, split, made_by
        self.train, self.validation, self.test, self.classes = load(name, split)
        self.strange = scrambled(self.test[0])
        self.model = network(name, *self.train, self.classes, split)
        self.options: dict[str, Any] = {
            "likelihood": "categorical" if self.classes else "gaussian",
            "validation": self.validation,
            "progress": False,
        }
        start = time.process_time()
        self.careful, noise = careful(self.model, self.train, self.validation, self.classes, split)
        self.spent = time.process_time() - start
        likelihood = "categorical" if self.classes else dubito.likelihoods.Gaussian(noise=noise)
        self.own = {**self.options, "likelihood": likelihood}
        self.base = self.scores(dubito.MAP(train=False).fit(self.careful, self.train, **self.own), False)

    def scores(self, posterior: Any, spread: bool = True) -> dict[str, Any]:
        """Return the scores of a posterior on test data."""
        first, second = (
            posterior.predict(x, generator=torch.Generator().manual_seed(1)) for x in (self.test[0], self.strange)
        )
        return measured(first, second, self.test[1], self.classes, spread)

    def write(self, method: str, scores: dict[str, Any]) -> None:
        """Add a line to the file."""
        if (log_prob := scores.pop("log_prob", None)) is not None:
            lost, root = (self.base["log_prob"] - log_prob).flatten(), math.sqrt(len(log_prob))
            nll, error = -float(log_prob.mean()), float(log_prob.std()) / root
            gap = {"gap": float(lost.mean()), "gap_error": float(lost.std()) / root}
            scores = {"nll": nll, "error": error, **gap, "rows": len(log_prob), **scores}
        scores = {key: round(value, 6) if isinstance(value, float) else value for key, value in scores.items()}
        line = {"data": self.name, "split": self.split, "method": method, **scores, "commit": self.made_by}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def baselines(self) -> None:
        """Measure the careful network, its temperature and scikit-learn's models."""
        self.write("Careful", {**self.base, "seconds": self.spent})
        tempered = dubito.MAP(train=False, temperature="validation").fit(self.careful, self.train, **self.own)
        self.write("Tempered", {**self.scores(tempered, False), "seconds": self.spent})
        if self.name == "mr":
            return  # its inputs are numbers of words
        both = tuple(torch.cat([a, b]) for a, b in zip(self.train, self.validation, strict=True))
        for method, found in sklearn_models(both, self.test, self.strange, self.classes, self.split):
            self.write(method, found)

    def recipes(self, missing: list[str]) -> None:
        """Measure some recipes."""
        plain: Any = None
        with one_search_per_start({}):
            for method in missing:
                recipe, start = {**RECIPES, **EXPENSIVE}[method], time.process_time()
                try:
                    if recipe.needs_trained_model and plain is None:
                        plain = dubito.MAP().fit(self.model, self.train, **self.options, generator=self._generator())
                    network = plain.model if recipe.needs_trained_model else self.model
                    posterior = recipe.fit(network, self.train, **self.options, generator=self._generator())
                    plain = posterior if method == "MAP" else plain
                    found = {**self.scores(posterior, posterior.has_spread), "verdict": posterior.diagnose().verdict}
                    if posterior.explanation is not None:
                        found["chosen"] = posterior.explanation.chosen
                except dubito.errors.DubitoError as error:
                    found = {"verdict": f"refused: {error}"}
                self.write(method, {**found, "seconds": time.process_time() - start})

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.split)


def run(names: list[str], splits: list[int], only: list[str] | None) -> None:
    """Measure all cells that are not in the file yet."""
    RESULTS.parent.mkdir(exist_ok=True)
    done = {(row["data"], row["split"], row["method"]) for row in rows()}
    made_by = commit()
    for split in splits:
        for name in names:
            wanted = ["Careful", *(only or RECIPES)]
            missing = [method for method in wanted if (name, split, method) not in done]
            if missing:
                cell = Cell(name, split, made_by)
                if "Careful" in missing:
                    cell.baselines()
                cell.recipes([method for method in missing if method != "Careful"])


def rows() -> list[dict[str, Any]]:
    """Return all measured cells."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--data", nargs="*", default=[*PROVED, *DEVELOPED])
    parser.add_argument("--splits", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--methods", nargs="*", help="only these, and the careful network")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", dubito.errors.TrustWarning)
    if arguments.what == "run":
        run(arguments.data, arguments.splits, arguments.methods)
    else:
        from defaults_table import tables

        print(tables(rows(), PROVED, DEVELOPED))


if __name__ == "__main__":
    main()
