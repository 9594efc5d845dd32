"""Every recipe with its default settings against the plain network and scikit-learn's models.

    python benchmarks/defaults.py run --splits 0 1 2 3 4     # resumable: cells that are done are skipped
    python benchmarks/defaults.py table

15 data sets; the split of training and test examples changes with its number. A tenth of the training part is the
validation data, which all methods are given. *Careful* is a network trained by hand: Adam at 3e-3, early stopping on
the validation data, whose residuals also give the noise of a regression; *tempered* is the same with a temperature.
Reported are the negative log-likelihood, the calibration error (or the coverage of 90 % intervals), how well
uncertainty tells test inputs from scrambled ones (each feature permuted over the examples), and CPU seconds.
The search for the number of epochs is made once for all recipes that start from the same weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
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
LARGE = {"fashion-mnist", "mnist", "mr"}


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
    if name in ("wine", "breast_cancer"):
        x, y = getattr(sklearn_data, f"load_{name}")(return_X_y=True)
        near, far, labels, held = train_test_split(x, y, test_size=0.2, random_state=split, stratify=y)
        middle, scale = near.mean(0), near.std(0)
        train = torch.tensor((near - middle) / scale, dtype=torch.float32), torch.tensor(labels)
        test = torch.tensor((far - middle) / scale, dtype=torch.float32), torch.tensor(held)
        order = torch.randperm(len(near), generator=torch.Generator().manual_seed(split))
        cut = len(near) // 10
        parts = [tuple(value[rows] for value in train) for rows in (order[cut:], order[:cut])]
        return parts[0], parts[1], test, True
    generator = torch.Generator().manual_seed(split)
    limits = {"limit": 2500, "limit_test": 1500} if name in LARGE else {}
    data = dubito.data.load(
        name, split=0 if name in ("fashion-mnist", "mnist") else split, validation=0.1, generator=generator, **limits
    )
    return data.train, data.validation, data.test, data.task == "classification"


def network(name: str, x: Tensor, y: Tensor, classes: bool, seed: int) -> nn.Module:
    """Return a new network for a data set."""
    torch.manual_seed(seed)
    outputs = int(y.max()) + 1 if classes else 1
    if name == "mr":
        return Words(int(x.max()) + 1 if x.max() > 20_000 else 20_000, outputs)
    if name in LARGE:
        return dubito.models.build("lenet5", tuple(x.shape[1:]), outputs)
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


def measured(prediction: Any, strange: Any, y: Tensor, classes: bool, spread: bool) -> dict[str, float]:
    """Return all scores of a prediction."""
    total = (lambda p: p.entropy) if classes else (lambda p: p.stddev.flatten())
    doubt = (lambda p: p.epistemic.flatten()) if spread else total
    log_prob = prediction.log_prob(y).double()
    if classes:
        second = float(dubito.metrics.ece(prediction.probs, y))
    else:
        z = ((y - prediction.mean) / prediction.stddev).abs()
        second = float((z < 1.6449).double().mean())
    return {
        "nll": -float(log_prob.mean()), "error": float(log_prob.std() / math.sqrt(len(y))),
        "ece" if classes else "coverage": second, "ood": auroc(doubt(prediction), doubt(strange)),
    }  # fmt: skip


def sklearn_models(train: Any, test: Any, strange: Tensor, classes: bool, seed: int) -> Iterator[tuple[str, dict]]:
    """Yield the scores of scikit-learn's models; the noise of a regression comes from a tenth of the training data."""
    (x, y), (far, held) = (
        [np.asarray(part.flatten(1) if k == 0 else part) for k, part in enumerate(pair)] for pair in (train, test)
    )
    odd = strange.flatten(1).numpy()
    if classes:
        models = {
            "Random forest": RandomForestClassifier(500, random_state=seed),
            "Gradient boosting": HistGradientBoostingClassifier(early_stopping=True, random_state=seed),
            "Gaussian process": GaussianProcessClassifier(
                ConstantKernel() * RBF(math.sqrt(x.shape[1])), random_state=seed
            ),
        }
    else:
        y, held = y.ravel(), held.ravel()
        models = {
            "Random forest": RandomForestRegressor(500, oob_score=True, random_state=seed),
            "Gradient boosting": HistGradientBoostingRegressor(early_stopping=True, random_state=seed),
            "Gaussian process": GaussianProcessRegressor(
                ConstantKernel() * RBF(np.full(x.shape[1], 3.0)) + WhiteKernel(), normalize_y=True, random_state=seed
            ),
        }
    for name, model in models.items():
        if name == "Gaussian process" and len(x) > (800 if classes else 1500):
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
        spent = time.process_time() - start
        error = float(log_prob.std() / math.sqrt(len(held)))
        yield name, {"nll": -float(log_prob.mean()), "error": error, "seconds": spent, **rest}


def run(names: list[str], splits: list[int], only: list[str] | None) -> None:
    """Measure all cells that are not in the file yet."""
    RESULTS.parent.mkdir(exist_ok=True)
    done = {(row["data"], row["split"], row["method"]) for row in rows()}

    def write(name: str, split: int, method: str, scores: dict[str, Any]) -> None:
        with RESULTS.open("a") as file:
            file.write(json.dumps({"data": name, "split": split, "method": method, **scores}) + "\n")
        print(
            name,
            split,
            method,
            {key: value if isinstance(value, str) else round(value, 4) for key, value in scores.items()},
            flush=True,
        )

    for split in splits:
        for name in names:
            missing = [m for m in ("Careful", *RECIPES) if (name, split, m) not in done and (not only or m in only)]
            if missing:
                _one_data_set(name, split, missing, done, write)


def _one_data_set(name: str, split: int, missing: list[str], done: set[Any], write: Callable[..., None]) -> None:
    train, validation, test, classes = load(name, split)
    strange, model = scrambled(test[0]), network(name, *train, classes, split)
    options: dict[str, Any] = {
        "likelihood": "categorical" if classes else "gaussian",
        "validation": validation,
        "progress": False,
    }

    def scores(posterior: Any, spread: bool = True) -> dict[str, float]:
        first, second = (posterior.predict(x, generator=torch.Generator().manual_seed(1)) for x in (test[0], strange))
        return measured(first, second, test[1], classes, spread)

    if "Careful" in missing:
        start = time.process_time()
        trained, noise = careful(model, train, validation, classes, split)
        spent = time.process_time() - start
        likelihood = "categorical" if classes else dubito.likelihoods.Gaussian(noise=noise)
        own = {**options, "likelihood": likelihood}
        write(
            name,
            split,
            "Careful",
            {**scores(dubito.MAP(train=False).fit(trained, train, **own), False), "seconds": spent},
        )
        tempered = dubito.MAP(train=False, temperature="validation").fit(trained, train, **own)
        write(name, split, "Tempered", {**scores(tempered, False), "seconds": spent})
        if name != "mr":
            both = tuple(torch.cat([a, b]) for a, b in zip(train, validation, strict=True))
            for method, found in sklearn_models(both, test, strange, classes, split):
                write(name, split, method, found)
    memory: dict[Any, Any] = {}
    with one_search_per_start(memory):
        plain: Any = None
        for method in (each for each in missing if each != "Careful"):
            recipe, start = RECIPES[method], time.process_time()
            own = {**options, "generator": torch.Generator().manual_seed(split)}
            try:
                if recipe.needs_trained_model and plain is None:
                    plain = dubito.MAP().fit(model, train, **{**own, "generator": torch.Generator().manual_seed(split)})
                posterior = recipe.fit(plain.model if recipe.needs_trained_model else model, train, **own)
                plain = posterior if method == "MAP" else plain
                found = {**scores(posterior, posterior.has_spread), "verdict": posterior.diagnose().verdict}
                if posterior.explanation is not None:
                    found["chosen"] = posterior.explanation.chosen
            except dubito.errors.DubitoError as error:
                found = {"nll": math.nan, "verdict": f"refused: {error}"}
            write(name, split, method, {**found, "seconds": time.process_time() - start})


def rows() -> list[dict[str, Any]]:
    """Return all measured cells."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table() -> None:
    """Print, for every method, its differences of the negative log-likelihood to the careful network's."""
    found = {(row["data"], row["split"], row["method"]): row for row in rows()}
    names = [name for name in (*DEVELOPED, *PROVED) if any(key[0] == name for key in found)]
    splits = {name: sorted({key[1] for key in found if key[0] == name}) for name in names}
    print("splits:", {name: len(numbers) for name, numbers in splits.items()})
    methods = list(dict.fromkeys(key[2] for key in found))
    print(f"{'method':22}" + "".join(f"{name.split('/')[-1][:9]:>10}" for name in names) + "   worse better   rank")
    ranks: dict[str, list[float]] = {method: [] for method in methods}
    for name in names:
        for split in splits[name]:
            own = {m: found[name, split, m]["nll"] for m in methods if (name, split, m) in found}
            order = sorted((value, m) for m, value in own.items() if math.isfinite(value))
            for place, (_, m) in enumerate(order, 1):
                ranks[m].append(place)
    for method in methods:
        line, worse, better = f"{method:22}", 0, 0
        for name in names:
            pairs = [
                (found[name, s, method]["nll"], found[name, s, "Careful"]["nll"])
                for s in splits[name]
                if (name, s, method) in found
            ]
            if not pairs:
                line += f"{'':>10}"
                continue
            gaps = np.array([a - b for a, b in pairs])
            error = gaps.std(ddof=1) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
            mark = ""
            if method != "Careful" and len(gaps) > 2 and abs(gaps.mean()) > 2 * error:
                mark, worse, better = ("!", worse + 1, better) if gaps.mean() > 0 else ("*", worse, better + 1)
            line += f"{gaps.mean():+9.3f}{mark or ' '}"
        mean = np.mean(ranks[method]) if ranks[method] else math.nan
        print(f"{line}  {worse:5} {better:6}  {mean:5.1f}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--data", nargs="*", default=[*DEVELOPED, *PROVED])
    parser.add_argument("--splits", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--methods", nargs="*", help="only these, and the careful network")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", dubito.errors.TrustWarning)
    if arguments.what == "run":
        run(arguments.data, arguments.splits, arguments.methods)
    table()


if __name__ == "__main__":
    main()
