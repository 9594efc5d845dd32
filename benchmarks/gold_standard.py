"""Distance of approximations from the true posterior: Hamiltonian Monte Carlo on a small network is the reference.

    python benchmarks/gold_standard.py [--seeds 1] [--scale 1] [--only NAME]

Two moons with 100 points, an MLP 2-30-2 (152 weights), the same normal prior on every weight for all methods. Each
method's predictive distribution is compared with that of a long run of NUTS, on test points and on a grid around the
data (where a posterior must be uncertain): the total variation ½ Σ_c |p_c − q_c| averaged over inputs, and the fraction
of inputs on which both have the same most probable class (Izmailov et al. 2021, https://arxiv.org/abs/2104.14421). A
shorter run of NUTS with another seed shows the Monte Carlo error. Each cell is one JSON file in
`benchmarks/results/gold_standard`; a stopped run continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dubito import HMC, MAP, SGMCMC, SVGD, Laplace, Training, Variational, priors, select
from dubito.data import toys
from dubito.fitting.recipe import Recipe

RESULTS = Path(__file__).parent / "results" / "gold_standard"
POINT_TRAINING = Training(epochs=1000, lr=1e-2, batch_size=100)
BATCHES = Training(batch_size=25)
LONG_TRAINING = Training(epochs=1000, lr=1e-2, batch_size=100)
PART, LAST, LINES = select.subnetwork(50), select.last_layer(), select.subspace(10, epochs=200)


def reference(scale: float) -> HMC:
    """Return the reference recipe, NUTS."""
    return HMC(prior=priors.Normal(0.0, scale), chains=2, burn_in=200, num_samples=250)


def methods(scale: float) -> dict[str, tuple[Recipe, Training | None]]:
    """Every method under the prior N(0, scale²), and how it is trained."""
    prior, precision = priors.Normal(0.0, scale), scale**-2
    long: dict[str, Any] = {"burn_in": 1000, "thinning": 15, "num_samples": 100, "prior": prior}
    short = HMC(prior=prior, chains=2, burn_in=120, num_samples=120, max_depth=7)
    variational = Variational(prior=prior, biases="random")
    laplace = Laplace(structure="full", prior_precision=precision)
    return {
        "map": (MAP(train=False), None),
        "laplace, full": (laplace, None),
        "laplace, kron": (laplace.replace(structure="kron"), None),
        "laplace, diag": (laplace.replace(structure="diag"), None),
        "laplace, last layer": (laplace.replace(weights=LAST), None),
        "laplace, subnetwork of 50": (laplace.replace(weights=PART), None),
        "laplace, 10 directions of a trajectory": (laplace.replace(weights=LINES), None),
        "variational": (variational, LONG_TRAINING),
        "variational, last layer": (variational.replace(weights=LAST), LONG_TRAINING),
        "variational, subnetwork of 50": (variational.replace(weights=PART), LONG_TRAINING),
        "variational, 10 directions of a trajectory": (variational.replace(weights=LINES), LONG_TRAINING),
        "sgld": (SGMCMC("sgld", **long), BATCHES),
        "psgld": (SGMCMC("psgld", **long), BATCHES),
        "sghmc": (SGMCMC("sghmc", **long), BATCHES),
        "sgnht": (SGMCMC("sgnht", **long), BATCHES),
        "sghmc, cyclical": (SGMCMC("sghmc", "cyclical", **{**long, "thinning": 10}), BATCHES),
        "sghmc, last layer": (SGMCMC("sghmc", weights=LAST, **long), BATCHES),
        "sghmc, subnetwork of 50": (SGMCMC("sghmc", weights=PART, **long), BATCHES),
        "sghmc, 10 directions of a trajectory": (SGMCMC("sghmc", weights=LINES, **long), BATCHES),
        "svgd, 50 particles": (SVGD(50, prior=prior), Training(epochs=300, lr=3e-2, batch_size=100)),
        "hmc, last layer": (short.replace(weights=LAST), None),
        "hmc, subnetwork of 50": (short.replace(weights=PART), None),
        "hmc, 10 directions of a trajectory": (short.replace(weights=LINES), None),
        "hmc, another seed": (short, None),
    }


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2))


def inputs() -> dict[str, Tensor]:
    """Test points, and a grid that reaches far beyond the data."""
    test, _ = toys.two_moons(500, noise=0.25, generator=torch.Generator().manual_seed(1))
    axis = torch.linspace(-4, 5, 20)
    return {"test": test, "grid": torch.cartesian_prod(axis, axis - 0.25)}


def predict(recipe: Recipe, training: Training | None, model: nn.Module, data: Any, seed: int) -> dict[str, Any]:
    """Fit and return class probabilities on test points and grid, and the CPU seconds of the fit."""
    began = time.process_time()
    generator = torch.Generator().manual_seed(seed)
    posterior = recipe.fit(model, data, training=training, generator=generator, progress=False)
    seconds = time.process_time() - began
    probs = {}
    for name, x in inputs().items():  # four digits: files that are compared in review should be small
        table = posterior.predict(x, num_samples=500).probs.tolist()
        probs[name] = [[round(value, 4) for value in row] for row in table]
    verdict = posterior.diagnose() if isinstance(recipe, HMC | SGMCMC) else None
    mixing = verdict.function if verdict else None
    return {"seconds": seconds, "probs": probs, "rhat": mixing.rhat if mixing else None,
            "ess": mixing.ess_bulk if mixing else None}  # fmt: skip


def cell(name: str, scale: float, seed: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a stored result, or make and store it."""
    path = RESULTS / f"scale-{scale:g}" / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(work()))
        print("done", path.name, flush=True)
    return json.loads(path.read_text())


def distances(found: dict[str, Any], gold: dict[str, Any]) -> dict[str, float]:
    result = {}
    for where in ("test", "grid"):
        p, q = torch.tensor(found["probs"][where]), torch.tensor(gold["probs"][where])
        result[f"tv {where}"] = float(0.5 * (p - q).abs().sum(1).mean())
        result[f"agreement {where}"] = float((p.argmax(1) == q.argmax(1)).double().mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="the standard deviation of the prior")
    parser.add_argument("--only", default="", help="only methods whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        data = toys.two_moons(100, noise=0.25, generator=torch.Generator().manual_seed(10 + seed))
        point = MAP(prior_precision=options.scale**-2)
        trained = point.fit(network(), data, training=POINT_TRAINING, progress=False).model
        long = reference(options.scale)
        gold = cell("reference", options.scale, seed, lambda d=data, m=trained, r=long: predict(r, None, m, d, 0))
        print(f"seed {seed}: reference R-hat {gold['rhat']:.3f}, effective samples {gold['ess']:.0f}", flush=True)
        for name, (recipe, training) in methods(options.scale).items():
            if options.only in name:
                work = lambda r=recipe, t=training, d=data, m=trained: predict(r, t, m, d, 100)  # noqa: E731
                found = cell(name, options.scale, seed, work)
                rows.setdefault(name, []).append({**distances(found, gold), "seconds": found["seconds"]})
    columns = list(next(iter(rows.values()))[0])
    print("| method | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(summary([value[column] for value in values]) for column in columns) + " |")


def summary(values: list[float]) -> str:
    """The mean, and over several seeds their standard deviation."""
    digits = 3 if statistics.mean(values) < 10 else 0
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


if __name__ == "__main__":
    main()
