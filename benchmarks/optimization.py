"""Bayesian optimization with networks, a Gaussian process and random search: simple regret over seeds.

    python benchmarks/optimization.py --function hartmann6 --seeds 10 --rows benchmarks/results/optimization.jsonl

Needs botorch. Every method starts from the same 20 Sobol points of its seed and adds 20 evaluations one by one. All
models are botorch models, and all acquisitions are qLogExpectedImprovement, maximized by `optimize_acqf` with the same
restarts: only the model differs. The Gaussian process is botorch's SingleTaskGP with its defaults. Targets of networks
are standardized anew after every evaluation. `--calibration` fits each model to 40 points of two other functions and
compares it with 200 others; networks were chosen by that. The network that is trained by the evidence was added after
the first two regrets of the other on Hartmann-6 had been seen, and the network of random features after all of theirs:
its settings were chosen by `--calibration` on the other functions.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Hartmann, Levy, Rosenbrock, StyblinskiTang
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

from dubito import MAP, Laplace, Training, likelihoods, optimization, select

INITIAL, STEPS = 20, 20
WIDTH = 300  # of random features
NOISE = 0.03  # of standardized targets; the functions have none, and it keeps the fits stable
OBJECTIVES: dict[str, Callable[[], Any]] = {
    "hartmann6": lambda: Hartmann(dim=6, negate=True),
    "rosenbrock6": lambda: Rosenbrock(dim=6, bounds=[(-2.0, 2.0)] * 6, negate=True),
    "styblinski6": lambda: StyblinskiTang(dim=6, negate=True),
    "levy6": lambda: Levy(dim=6, negate=True),
    "ackley6": lambda: Ackley(dim=6, bounds=[(-5.0, 5.0)] * 6, negate=True),
}


class Inputs(nn.Module):
    """A network of inputs in [0, 1], which are brought to [-√3, √3], of variance 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        return self.layers((2 * x - 1) * 3**0.5)


def gaussian_process(x: Tensor, y: Tensor, seed: int) -> Any:
    """Fit botorch's default Gaussian process."""
    model = SingleTaskGP(x, y, outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def network(recipe: Any, width: int, epochs: int, functions: int) -> Callable[[Tensor, Tensor, int], Any]:
    """Return the model of a posterior over a network's weights."""

    def fit(x: Tensor, y: Tensor, seed: int) -> Any:
        torch.manual_seed(seed)
        loc, scale = float(y.mean()), float(y.std())
        pair, model = (x, (y - loc) / scale), Inputs(width).double()
        training = Training(epochs=epochs, lr=1e-2, batch_size=len(x), weight_decay=1e-4, schedule="cosine")
        options: dict[str, Any] = {"likelihood": likelihoods.Gaussian(NOISE), "progress": False}
        generator = torch.Generator().manual_seed(seed)
        if recipe.needs_trained_model:
            model = MAP().fit(model, pair, training=training, **options).model  # type: ignore[assignment]
        given = {} if recipe.needs_trained_model else {"training": training}
        posterior = recipe.fit(model, pair, generator=generator, **given, **options)
        return optimization.botorch_model(posterior, functions, loc=loc, scale=scale, generator=generator)

    return fit


def by_evidence(x: Tensor, y: Tensor, seed: int) -> Any:
    """Train with the prior precision of each layer and the noise that maximize the evidence, then full Laplace."""
    torch.manual_seed(seed)
    loc, scale = float(y.mean()), float(y.std())
    pair, generator = (x, (y - loc) / scale), torch.Generator().manual_seed(seed)
    training = Training(
        epochs=200, lr=1e-2, batch_size=len(x), schedule="cosine", evidence_every=20, evidence_burn_in=20
    )
    point = MAP().fit(
        Inputs(20).double(), pair, likelihood=likelihoods.Gaussian("evidence"), training=training, progress=False
    )
    posterior = Laplace(structure="full", prior_precision="evidence").fit(
        point.model, pair, likelihood=point.likelihood, progress=False
    )
    return optimization.botorch_model(posterior, 16, loc=loc, scale=scale, generator=generator)


class RandomFeatures(nn.Module):
    """A network with a scale per input, one fixed layer of random cosines and a linear one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_lengthscale = nn.Parameter(torch.zeros(6))
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 1, bias=False)
        nn.init.normal_(self.first.weight)
        nn.init.uniform_(self.first.bias, 0, 2 * math.pi)

    def features(self, x: Tensor) -> Tensor:
        """Return the hidden layer, of mean square 1."""
        return 2**0.5 * torch.cos(self.first(x * (-self.log_lengthscale).exp()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the value."""
        return self.last(self.features(x))


def trained_features(network: RandomFeatures, x: Tensor, targets: Tensor) -> tuple[float, float]:
    """Train the scales of the inputs by the evidence, which is exact here; return the prior precision and the noise.

    The priors of the lengthscales and of the noise are those of botorch's Gaussian process (Hvarfner et al. 2024,
    https://arxiv.org/abs/2402.02229). Without that of the noise, most of the function is taken for noise.
    """
    log_spread, log_noise = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.0, -2.0))
    network.log_lengthscale.data += 1.0
    optimizer = torch.optim.Adam([network.log_lengthscale, log_spread, log_noise], lr=0.1)
    likely, little = torch.distributions.Normal(2**0.5 + math.log(6) / 2, 3**0.5), torch.distributions.Normal(-4, 1)
    for _ in range(100):
        hidden, identity = network.features(x), torch.eye(len(x), dtype=torch.float64)
        covariance = (2 * log_spread).exp() / WIDTH * hidden @ hidden.T + ((2 * log_noise).exp() + NOISE**2) * identity
        evidence = torch.distributions.MultivariateNormal(torch.zeros_like(targets), covariance).log_prob(targets)
        optimizer.zero_grad()
        prior = likely.log_prob(network.log_lengthscale).sum() + little.log_prob(2 * log_noise)
        (-evidence - prior).backward()
        optimizer.step()
    noise = math.sqrt(math.exp(2 * float(log_noise.detach())) + NOISE**2)
    return WIDTH * math.exp(-2 * float(log_spread.detach())), noise


def random_features(x: Tensor, y: Tensor, seed: int) -> Any:
    """Full Laplace over the last layer of `RandomFeatures`, in which the network is linear: the posterior is exact."""
    torch.manual_seed(seed)
    loc, scale = float(y.mean()), float(y.std())
    targets, network, generator = (y - loc) / scale, RandomFeatures(WIDTH).double(), torch.Generator().manual_seed(seed)
    prior, noise = trained_features(network, x, targets[:, 0])
    hidden = network.features(x).detach()
    precision = hidden.T @ hidden / noise**2 + prior * torch.eye(WIDTH, dtype=torch.float64)
    network.last.weight.data = torch.linalg.solve(precision, hidden.T @ targets / noise**2).T
    recipe = Laplace(structure="full", weights=select.last_layer(), prior_precision=prior)
    posterior = recipe.fit(network, (x, targets), likelihood=likelihoods.Gaussian(noise), progress=False)
    return optimization.botorch_model(posterior, 64, loc=loc, scale=scale, generator=generator)


MODELS: dict[str, Callable[[Tensor, Tensor, int], Any] | None] = {
    "random": None,
    "gaussian process": gaussian_process,
    "laplace": network(Laplace(structure="full", prior_precision="evidence"), 20, 200, 12),
    "laplace, trained by evidence": by_evidence,
    "laplace, random features": random_features,
}


def optimize(objective: Any, model: Callable[..., Any] | None, seed: int) -> list[float]:
    """Return the simple regret after each evaluation, from the last initial point on."""
    dim, bounds = objective.dim, objective.bounds.double()
    unit = torch.stack([torch.zeros(dim), torch.ones(dim)]).double()
    x = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed).draw(INITIAL + STEPS, dtype=torch.float64)

    def value(points: Tensor) -> Tensor:
        return objective(bounds[0] + points * (bounds[1] - bounds[0])).unsqueeze(-1)

    if model is not None:
        x = x[:INITIAL]
    y = value(x)
    for step in range(STEPS if model is not None else 0):
        torch.manual_seed(1000 * seed + step)
        acquisition = qLogExpectedImprovement(model(x, y, 1000 * seed + step), best_f=float(y.max()))
        point, _ = optimize_acqf(acquisition, unit, q=1, num_restarts=3, raw_samples=128, options={"maxiter": 30})
        x, y = torch.cat([x, point.detach()]), torch.cat([y, value(point.detach())])
    best = y[:, 0].cummax(0).values[INITIAL - 1 :]
    return (objective.optimal_value - best).tolist()


def calibration(model: Callable[..., Any], function: str, seed: int = 0) -> tuple[float, float]:
    """Return the error over the targets' standard deviation, and over the predicted one, at new points."""
    objective = OBJECTIVES[function]()
    low, high = objective.bounds.double()
    x = torch.quasirandom.SobolEngine(6, scramble=True, seed=seed).draw(256, dtype=torch.float64)[:240]
    y = objective(low + x * (high - low)).unsqueeze(-1)
    fitted = model(x[:40], y[:40], seed)
    with torch.no_grad():
        found = fitted.posterior(x[40:].unsqueeze(1))
    error, spread = y[40:] - found.mean[:, 0], found.variance[:, 0].sqrt()
    return float(error.square().mean().sqrt() / y[:40].std()), float((error / spread).square().mean().sqrt())


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the median and the quartiles of the simple regret against the number of evaluations."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(5.4, 3.6))
    for name in MODELS:
        curves = [row["regret"] for row in rows if row["model"] == name]
        if curves:
            values, steps = torch.tensor(curves), range(INITIAL, INITIAL + len(curves[0]))
            low, middle, high = (values.quantile(q, dim=0) for q in (0.25, 0.5, 0.75))
            panel.plot(steps, middle, label=f"{name} ({len(curves)} seeds)")
            panel.fill_between(steps, low, high, alpha=0.12)
            print(f"{name:17} median {middle[-1]:.2f}, quartiles {low[-1]:.2f} and {high[-1]:.2f}, {len(curves)} seeds")
    panel.set_xlabel("evaluations")
    panel.set_ylabel("simple regret")
    panel.set_yscale("log")
    panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Measure, one JSON line per method and seed; lines that are there already are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--function", choices=OBJECTIVES, default="hartmann6")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rows", default="benchmarks/results/optimization.jsonl")
    parser.add_argument("--picture", default="", help="Draw the rows into this file, and measure nothing.")
    parser.add_argument("--calibration", action="store_true")
    given = parser.parse_args()
    if given.calibration:
        for name, model in MODELS.items():
            if model is not None and name in given.models:
                for function in ("rosenbrock6", "styblinski6", "levy6", "ackley6"):
                    print(name, function, *(f"{value:.2f}" for value in calibration(model, function)), flush=True)
        return
    path = Path(given.rows)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if given.picture:
        draw([row for row in rows if row["function"] == given.function], given.picture)
        return
    done = {(row["function"], row["model"], row["seed"]) for row in rows}
    warnings.simplefilter("ignore")
    for seed in range(given.seeds):
        for name in given.models:
            if (given.function, name, seed) in done:
                continue
            start = time.process_time()
            regret = optimize(OBJECTIVES[given.function](), MODELS[name], seed)
            row = {"function": given.function, "model": name, "seed": seed, "seconds": time.process_time() - start}
            print(f"{name:17} seed {seed} regret {regret[-1]:.3f} after {row['seconds']:.0f} s", flush=True)
            with path.open("a") as file:
                file.write(json.dumps({**row, "regret": [round(value, 5) for value in regret]}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
