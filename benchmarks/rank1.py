"""Compare rank-1 mixtures with BatchEnsemble, dropout, SWAG, random last layers and other ensembles, three seeds.

    DUBITO_DATA=... python benchmarks/rank1.py [--tasks mlp lenet5] [--seeds 3] [--methods ...] [--table]

Every method trains from the same untrained network for the same number of epochs, with the same optimizer and weight
decay; the cost of an epoch differs and is in the table. Methods with a setting to choose have a few
candidates, fitted with a separate seed and compared by their NLL on validation data (a tenth of the training data),
never on test data. Clean test data, three corruptions in five severities (means), out-of-distribution
detection by entropy. Resumable: choices and cells that are done are kept in benchmarks/results/rank1. On one core the
task mlp takes minutes, lenet5 about an hour, cifar10 (fewer epochs where settings are chosen) about two and a half.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import channels_last, cpu_seconds
from dubito.decisions import Detector
from dubito.ensembles import SWAG, Ensemble, MCDropout, Snapshot
from quality import RESULTS, Task, mean_text, outside
from torch import nn

import dubito
from dubito import (
    DKL,
    HMC,
    MAP,
    MIMO,
    SGMCMC,
    SNGP,
    VBLL,
    BatchEnsemble,
    Laplace,
    Packed,
    Posterior,
    Rank1,
    Training,
    Variational,
    kernels,
    metrics,
    models,
    priors,
    variational,
)
from dubito.fitting.recipe import Recipe

KINDS = ("noise", "blur", "rotation")
TRAINING = Training(epochs=15, lr=2e-3, batch_size=64, weight_decay=1e-4)
FASHION: dict[str, Any] = {"data": "fashion-mnist", "ood": ("mnist", "kmnist"), "limit_test": 1000}
TASKS = {
    "mlp": Task(model=models.lenet_300_100, training=TRAINING, limit=4000, **FASHION),
    "lenet5": Task(model=models.lenet5, training=TRAINING, limit=10_000, **FASHION),
    "cifar10": Task(
        "cifar10", lambda: models.resnet20(width=8), TRAINING.replace(epochs=10, batch_size=128), ("fashion-mnist",),
        limit=10_000, limit_test=1000,
    ),
}  # fmt: skip
CHOOSING = 99  # the seed of the fits that choose
SHORTER = {"cifar10": 4}  # epochs of the fits that choose, where the table would take too long otherwise
DETECTORS = ("feature-density", "mahalanobis", "nearest-neighbours", "lanczos")
FEWER = {"cifar10": 16}  # draws of a prediction that has 32 of them by default, for the same reason


class Fit(NamedTuple):
    """How a method is fitted: a recipe, or a function that makes one of what `base` fitted to the untrained network.

    `recipe` is given the network that `base` trained; if that is the default, the network of the row MAP. `network`
    makes another network than the task's.
    """

    recipe: Any
    base: Any = MAP()
    network: Callable[[], nn.Module] | None = None


def coded(beta: float) -> Fit:
    """The information bottleneck: LeNet-300-100 with a code of 32 numbers before its last layer."""

    def network() -> nn.Module:
        layers = list(models.lenet_300_100())
        return nn.Sequential(*layers[:-1], variational.Bottleneck(100, 32, beta=beta), nn.Linear(32, 10))

    return Fit(MAP(), network=network)


def from_ensemble(scale: float) -> Fit:
    """MILE: microcanonical chains of ten samples from each member of a deep ensemble of four."""

    def chains(ensemble: Posterior) -> HMC:
        prior = priors.Normal(0.0, scale)
        return HMC(
            "microcanonical", start=ensemble, prior=prior, chains=4, burn_in=60, num_samples=10, thinning=5,
            num_steps=5, memory=512.0,
        )  # fmt: skip

    return Fit(chains, base=Ensemble(members=4))


def over_functions(scale: float) -> Fit:
    """A prior over functions, of which `MAP` and `Laplace` take the same; the lengthscale is the median distance."""
    prior = priors.FunctionSpace(kernels.Matern(scale=scale), num_context=20)
    return Fit(Laplace(prior=prior), base=MAP(prior=prior))


class Method(NamedTuple):
    """Candidates by the name of their setting, and how many networks' worth of numbers the posterior keeps.

    Rank1 counts its own. `draws` says that a prediction draws networks.
    """

    candidates: dict[str, Any]
    copies: float = 1.0
    draws: bool = False


def dropout(filterwise: bool, repeats: int) -> Method:
    """Dropout at several rates."""
    rates = {f"rate {r}": MCDropout(rate=r, filterwise=filterwise, repeats=repeats) for r in (0.05, 0.1, 0.2)}
    return Method(rates, draws=True)


def mixture(recipe: Any, **settings: Any) -> Any:
    """A mixture whose batch is divided among its components; the training settings hold the weight decay of all."""
    return recipe(batch="split", weight_decay=0.0, **settings)


def normal(prior: float, spread: float) -> Any:
    """Rank-1 factors with a normal posterior, whose scales start below those of the prior."""
    return mixture(Rank1, prior=priors.Normal(1.0, prior), spread=spread, initial_scale=min(prior, 0.3))


def signs(prior: float) -> Any:
    """The same from random signs, which a narrow prior would forbid."""
    return mixture(Rank1, prior=priors.Normal(1.0, prior), start="fresh", initial="sign", initial_scale=0.1)


def cauchy(prior: float) -> Any:
    """Rank-1 factors with heavy tails."""
    return mixture(Rank1, family="cauchy", prior=priors.Cauchy(1.0, prior), spread=0.5, initial_scale=prior / 3)


class Detect(NamedTuple):
    """A detector over the features of the trained network; its predictions are those of the network."""

    score: Any


METHODS: dict[str, Method] = {
    "MAP": Method({"": MAP()}),
    "MAP, temperature": Method({"": MAP(train=False, temperature="validation")}),
    "MC dropout": dropout(filterwise=False, repeats=1),
    "MC dropout, filterwise, repeated": dropout(filterwise=True, repeats=4),
    "SWAG": Method({"": SWAG(rank=20)}, copies=22.0, draws=True),
    "Snapshot of 4": Method({"": Snapshot(cycles=4)}, copies=4.0),
    "deep ensemble of 4": Method({"": Ensemble(members=4)}, copies=4.0),
    "BatchEnsemble": Method({
        "spread 0.1": mixture(BatchEnsemble, spread=0.1),
        "spread 0.5": mixture(BatchEnsemble, spread=0.5),
        "random signs": mixture(BatchEnsemble, start="fresh", initial="sign"),
    }),
    "rank-1 normal": Method({
        "prior scale 0.1, spread 0.1": normal(0.1, 0.1),
        "prior scale 0.1, spread 0.5": normal(0.1, 0.5),
        "prior scale 0.5, spread 0.5": normal(0.5, 0.5),
        "prior scale 1, random signs": signs(1.0),
    }),
    "VBLL": Method({f"prior scale {scale}": VBLL(prior_scale=scale) for scale in (1.0, 3.0, 10.0)}),
    "SNGP": Method({f"bound {bound}": SNGP(spectral_norm=bound) for bound in (1.0, 3.0)}),
    "DKL": Method({f"bound {bound}": DKL(spectral_norm=bound) for bound in (1.0, 3.0)}),
    "Packed of 4": Method({f"alpha {alpha}": Packed(members=4, alpha=alpha) for alpha in (1.0, 2.0)}),
    "MIMO of 3": Method({f"repetition {share}": MIMO(members=3, repetition=share) for share in (0.0, 0.5)}),
    "rank-1 Cauchy": Method({f"prior scale {scale}": cauchy(scale) for scale in (0.003, 0.01, 0.1)}),
    "Variational": Method({"": Variational()}, copies=2.0, draws=True),
    "SGMCMC": Method({"": SGMCMC()}, copies=100.0, draws=True),
    "Laplace, kron": Method({"": Laplace()}),
    "Laplace, EKFAC": Method({"": Laplace(structure="ekfac")}),
    "Laplace, 16 samples": Method({"": Laplace(structure="sampled", draws=16)}),
    "Laplace, prior over functions": Method({f"scale {scale:g}": over_functions(scale) for scale in (1.0, 3.0, 10.0)}),
    "information bottleneck": Method({f"β = {beta:g}": coded(beta) for beta in (1e-4, 1e-3, 1e-2)}),
    "MILE from 4 members": Method({f"prior scale {s:g}": from_ensemble(s) for s in (0.05, 0.1, 0.3)}, copies=40.0),
    "multi-Laplace of 4": Method({"": Ensemble(members=4, recipe=Laplace())}, copies=4.0),
    "multi-SWAG of 4": Method({"": Ensemble(members=4, recipe=SWAG(rank=20))}, copies=88.0, draws=True),
    **{f"MAP, {score}": Method({"": Detect(score)}) for score in DETECTORS},
}  # fmt: skip


def slug(name: str) -> str:
    """Return a name as part of a file's name."""
    return "".join(c if c.isalnum() else "-" for c in name)


def chosen(task_name: str, name: str, data: Any) -> str:
    """Return the candidate of a method with the lowest NLL on validation data."""
    candidates = METHODS[name].candidates
    if len(candidates) == 1:
        return next(iter(candidates))
    path = RESULTS / "rank1" / f"choice-{task_name}-{slug(name)}.json"
    found: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
    task = TASKS[task_name]
    shorter = dataclasses.replace(
        task, training=task.training.replace(epochs=SHORTER.get(task_name, task.training.epochs))
    )
    for key in [key for key in candidates if key not in found]:
        posterior = fitted(shorter, candidates[key], CHOOSING, data)
        found[key] = dubito.evaluate(posterior, data.validation).scores["nll"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
        print(f"{task_name}, {name}, {key}: validation NLL {found[key]:.4f}", flush=True)
    return min(candidates, key=lambda key: found[key])


def make(task: Task, how: Any, seed: int) -> nn.Module:
    """Return an untrained network."""
    torch.manual_seed(seed)
    return (getattr(how, "network", None) or task.model)()


def detected(posterior: Posterior, score: Any, data: Any, ood: Any) -> dict[str, Any]:
    """Measure how well the distance of features (or gradients) from those of training data detects other data."""
    kept: list[Any] = []
    seconds = cpu_seconds(
        lambda: kept.append(Detector(posterior, data.validation[0], score=score, training=data.train))
    )
    own = kept[0].scores(data.test[0])
    found: dict[str, Any] = {}
    for name, inputs in ood.items():
        scores = torch.cat([own, kept[0].scores(inputs)])
        found[f"OOD {name}"] = float(metrics.auroc(scores, torch.arange(len(scores)) >= len(own)))
    size = sum(p.numel() for p in posterior.model.parameters())
    return {**found, "parameters": size, "training": seconds, "passes": math.nan, "setting": ""}


def fitted(task: Task, how: Any, seed: int, data: Any, point: Posterior | None = None) -> Posterior:
    """Fit a recipe or a `Fit`; `point` is the row MAP of this seed, if it is known."""
    how = how if isinstance(how, Fit) else Fit(how)
    options: dict[str, Any] = {"validation": data.validation, "progress": False}

    def fit(recipe: Any, model: nn.Module) -> Posterior:
        trains = isinstance(recipe, MAP) or not (recipe.needs_trained_model or isinstance(recipe, HMC))
        training = task.training if trains else None
        generator = torch.Generator().manual_seed(seed)
        found: Posterior = recipe.fit(model, data.train, training=training, generator=generator, **options)
        return found

    model, recipe = make(task, how, seed), how.recipe
    if how.base != MAP() or _needs_trained(recipe):
        before = point if point is not None and how.base == MAP() else fit(how.base, model)
        recipe = recipe if isinstance(recipe, Recipe) else recipe(before)
        model = before.model if isinstance(how.recipe, Recipe) else model
    return fit(recipe, model)


def _needs_trained(recipe: Any) -> bool:
    return recipe.needs_trained_model or getattr(recipe, "train", True) is False


def cell(task: str, method: str, seed: int) -> Path:
    """Return the file of one cell."""
    return RESULTS / "rank1" / f"chosen-{task}-{slug(method)}-{seed}.json"


def run(task_name: str, seeds: int, names: list[str]) -> None:
    """Fill in every cell that is missing; all methods of a seed before the next seed."""
    task = TASKS[task_name]
    data = dubito.data.load(task.data, limit=task.limit, limit_test=task.limit_test)
    data = channels_last(data) if task.data == "cifar10" else data
    ood = {name: outside(name, data, task.limit_test) for name in task.ood}
    for seed in range(seeds):
        for name in names:
            if cell(task_name, name, seed).is_file():  # looked at here, because another process may fill in cells, too
                continue
            found = one_cell(task_name, name, seed, data, ood)
            cell(task_name, name, seed).write_text(json.dumps(found))
            print(f"{task_name} seed {seed} {name}: {found}", flush=True)


def one_cell(task_name: str, name: str, seed: int, data: Any, ood: Any) -> dict[str, Any]:
    """Train and measure one method, in its chosen setting."""
    task, setting = TASKS[task_name], chosen(task_name, name, data)
    how, path = METHODS[name].candidates[setting], RESULTS / "rank1" / f"chosen-{task_name}-{seed}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    point = dubito.load(path, task.model()) if path.is_file() else None  # of the row MAP, which comes first
    if isinstance(how, Detect):
        assert point is not None
        return detected(point, how.score, data, ood)
    kept: list[Posterior] = []
    training = cpu_seconds(lambda: kept.append(fitted(task, how, seed, data, point)))
    posterior, model = kept[0], make(task, how, seed)
    if name == "MAP":
        posterior.save(path)
    draws = FEWER.get(task_name) if METHODS[name].draws else None
    passes = passes_of(posterior, model, data.test[0], draws)
    shifts = dubito.data.shifts(data, kinds=KINDS)
    result = dubito.evaluate(posterior, data.test, ood=ood, shifts=shifts, num_samples=draws)
    shifted = [scores for by_severity in result.shifts.values() for scores in by_severity.values()]
    copies = METHODS[name].copies * sum(p.numel() for p in posterior.model.parameters())
    size = getattr(posterior, "num_parameters", copies + getattr(posterior, "roots", torch.empty(0)).numel())
    return {
        "accuracy": result.scores["accuracy"], "NLL": result.scores["nll"], "ECE": result.scores["ece"],
        **{f"c{key}": statistics.mean(s[key.lower()] for s in shifted) for key in ("accuracy", "NLL", "ECE")},
        **{f"OOD {name}": scores["entropy"]["auroc"] for name, scores in result.ood.items()},
        "parameters": size, "training": training, "passes": passes, "setting": setting,
    }  # fmt: skip


@torch.no_grad()
def passes_of(posterior: Posterior, model: nn.Module, inputs: Any, draws: int | None) -> float:
    """Return what a prediction costs in passes of the network, the least of three measurements of each."""
    model.eval()

    def least(work: Callable[[], Any]) -> float:
        return min(cpu_seconds(work) for _ in range(3))

    return least(lambda: posterior.predict(inputs, num_samples=draws)) / least(lambda: model(inputs).softmax(-1))


def collect() -> None:
    """Write all cells into one file, which is kept with the source."""
    names = {slug(name): name for name in METHODS}
    lines = []
    for path in sorted((RESULTS / "rank1").glob("chosen-*-*-*.json")):
        task, rest = path.stem.removeprefix("chosen-").split("-", 1)
        method, seed = rest.rsplit("-", 1)
        if method in names:
            about = {"task": task, "method": names[method], "seed": int(seed)}
            lines.append(json.dumps({**about, **json.loads(path.read_text())}))
    (RESULTS / "rank1.jsonl").write_text("".join(line + "\n" for line in lines))


def table(task_name: str, seeds: int) -> str:
    """Return a Markdown table: mean ± standard deviation over the seeds that are there, costs in units of MAP."""
    lines: list[str] = []
    cells = {
        name: [json.loads(path.read_text()) for seed in range(seeds) if (path := cell(task_name, name, seed)).is_file()]
        for name in METHODS
    }
    base = cells["MAP"]
    for name, found in cells.items():
        if not found:
            continue
        if not lines:
            scores = [key for key in found[0] if key not in ("parameters", "training", "passes", "setting")]
            titles = [*scores, "parameters (MAP = 1)", "training CPU (MAP = 1)", "prediction (passes)", "seeds"]
            lines += [f"| method | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
        texts = [mean_text([row[key] for row in found]) if key in found[0] else "" for key in scores]
        texts.append(f"{found[0]['parameters'] / base[0]['parameters']:.3g}")
        unit = statistics.median(row["training"] for row in base)
        texts.append(f"{statistics.median(row['training'] for row in found) / unit:.2g}")
        texts.append(f"{statistics.median(row['passes'] for row in found):.2g}")
        label = f"{name} ({found[0]['setting']})" if found[0]["setting"] else name
        lines.append(f"| {label} | {' | '.join(texts)} | {len(found)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", nargs="*", default=["mlp", "lenet5"], choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.tasks:
        if not options.table:
            run(name, options.seeds, options.methods)
        collect()
        print(f"\n{name}\n\n{table(name, options.seeds)}")


if __name__ == "__main__":
    main()
