"""EKFAC beside K-FAC in float64 on small trained networks: evidence, its bound, and the share of the full variance.

    python benchmarks/eigenvalues.py                                          # at most 256 weights: one exact block
    python benchmarks/eigenvalues.py --exact 0                                # Kronecker eigenbases
    python benchmarks/eigenvalues.py --kinds wider deeper convolutions heads  # 363 to 599 weights
    python benchmarks/eigenvalues.py --kinds attention --examples 6 20 80 300

The reference is the full Gauss-Newton matrix. `bound` is the evidence lower bound of the Gaussian of each structure,
log p(D) - KL(q || full posterior). The reported evidence of EKFAC is its bound; that of K-FAC is not.
"""

from __future__ import annotations

import argparse
import math
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import Laplace, likelihoods
from dubito.core import limits

LIKELIHOODS = {
    "classes": likelihoods.Categorical(),
    "numbers": likelihoods.Gaussian(noise=0.3),
    "counts": likelihoods.Poisson(),
}
GRID = torch.logspace(-3, 3, 25, dtype=torch.float64)


class Case(NamedTuple):
    """A trained network with its data, and inputs of the same kind that it has not seen."""

    model: nn.Module
    data: tuple[Tensor, Tensor]
    new: Tensor
    likelihood: Any


class Attention(nn.Module):
    """One block of attention over five positions, with a norm."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.enter, self.leave, self.norm = nn.Linear(3, width), nn.Linear(width, outputs), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the mean over positions."""
        x = self.enter(x)
        seen = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.leave(self.norm(x + self.mix(seen)).mean(1))


def network(kind: str, outputs: int) -> nn.Module:
    """Return an untrained network; the first four kinds have at most 256 weights."""
    match kind:
        case "conv":
            layers = [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Flatten()]
            return nn.Sequential(*layers, nn.Linear(36, outputs))
        case "convolutions":
            layers = [nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten()]
            return nn.Sequential(*layers, nn.Linear(32, outputs))
        case "attention" | "heads":
            return Attention(4 if kind == "attention" else 8, outputs)
        case "deep" | "deeper":
            width = 8 if kind == "deep" else 20
            layers = [nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(width, outputs))
    width = 16 if kind == "wide" else 60
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs))


KINDS = ("wide", "deep", "conv", "attention", "wider", "deeper", "convolutions", "heads")
SHAPES = {"conv": (1, 6, 6), "convolutions": (1, 6, 6), "attention": (5, 3), "heads": (5, 3)}


def case(kind: str, task: str, seed: int, examples: int) -> Case:
    """Train a network on examples of a random network of its own kind, with noise."""
    torch.manual_seed(seed)
    outputs = 3 if task == "classes" else 1
    x = torch.randn(examples + 100, *SHAPES.get(kind, (4,)))
    model, teacher = network(kind, outputs).double(), network(kind, outputs).double()
    x = x.double()
    signal = 4 * teacher(x).detach()
    if task == "classes":
        y = torch.distributions.Categorical(logits=signal).sample()
        loss: Any = F.cross_entropy
    elif task == "counts":
        y, loss = torch.poisson(signal.clamp(-4, 3).exp()), F.poisson_nll_loss
    else:
        y, loss = signal + 0.3 * torch.randn_like(signal), lambda f, t: F.mse_loss(f, t) / (2 * 0.3**2)
    x, new, y = x[:examples], x[examples:], y[:examples]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        decay = sum(value.square().sum() for value in model.parameters()) / (2 * len(x))
        (loss(model(x), y) + decay).backward()
        optimizer.step()
    return Case(model.eval(), (x, y), new, LIKELIHOODS[task])


def jacobian(model: nn.Module, names: list[str], x: Tensor) -> Tensor:
    """Return ``[B·C, D]``."""
    weights = {name: value.detach() for name, value in model.named_parameters()}
    rows = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, x))(weights)
    return torch.cat([rows[name].flatten(2) for name in names], dim=2).flatten(0, 1)


class Structure(NamedTuple):
    """What is compared, at one prior precision."""

    evidence: float  # up to what all structures share
    bound: float
    share_new: float
    share_train: float
    captured: float  # at new inputs, of each variance at most the full one


def measure(matrix: Tensor, full: Tensor, new: Tensor, prior: float, fit: float) -> Structure:
    """Return evidence, bound and shares of a curvature matrix, all by dense float64 algebra."""
    identity = torch.eye(len(full), dtype=torch.float64)
    own, exact = matrix + prior * identity, full + prior * identity
    covariance, reference = torch.linalg.inv(own), torch.linalg.inv(exact)
    evidence = fit - 0.5 * float(torch.linalg.slogdet(own)[1] - len(full) * math.log(prior))
    bound = evidence - 0.5 * (float((exact * covariance).sum()) - len(full))
    variances, exact_variances = (((new @ each) * new).sum(1) for each in (covariance, reference))
    ahead, captured = (
        float(each.sum() / exact_variances.sum()) for each in (variances, variances.minimum(exact_variances))
    )
    seen = float((full * covariance).sum() / (full * reference).sum())
    return Structure(evidence, bound, ahead, seen, captured)


def compare(given: Case, prior: float | None) -> dict[str, Structure]:
    """Return what each structure gives, at one prior precision or at the one that its own evidence chooses."""
    found, fits = {}, {}
    for name in ("full", "kron", "ekfac"):
        recipe = Laplace(structure=name, prior_precision=1.0)  # type: ignore[arg-type]
        fits[name] = recipe.fit(given.model, given.data, likelihood=given.likelihood, progress=False)
    size = fits["full"].selection.num_weights
    identity = torch.eye(size, dtype=torch.float64)
    precisions = {name: each.precision_matmul(identity) - identity for name, each in fits.items()}
    new = jacobian(given.model, fits["full"].selection.names, given.new)
    norm = float(sum(value.detach().square().sum() for value in given.model.parameters()))
    for name, matrix in precisions.items():
        grid = [prior] if prior else GRID.tolist()
        tried = [measure(matrix, precisions["full"], new, each, -0.5 * each * norm) for each in grid]
        found[name] = max(tried, key=lambda each: each.evidence)
    return found


def summarize(label: str, runs: list[dict[str, Structure]]) -> None:
    """Print on how many networks EKFAC is below K-FAC, and by how much."""
    cells = []
    for pick in Structure._fields:
        gaps = torch.tensor([getattr(run["ekfac"], pick) - getattr(run["kron"], pick) for run in runs])
        cells.append(f"{int((gaps < -1e-9).sum())} ({gaps.median():+.2f}, {gaps.min():+.2f} to {gaps.max():+.2f})")
    cells.append(str(sum(run["kron"].evidence > run["full"].evidence + 1e-9 for run in runs)))
    for name in ("kron", "ekfac"):
        cells.append(str(sum(run[name].share_train < 1 - 1e-9 for run in runs)))
        cells.append(f"{sum(run[name].share_new for run in runs) / len(runs):.2f}")
        cells.append(f"{sum(abs(math.log(run[name].share_new)) for run in runs) / len(runs):.3f}")
    print(f"| {label} | {len(runs)} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print one row per task and choice of the prior precision."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=["wide", "deep", "conv"])
    parser.add_argument("--tasks", nargs="*", choices=list(LIKELIHOODS), default=["classes", "numbers"])
    parser.add_argument("--examples", nargs="*", type=int, default=[80])
    parser.add_argument("--exact", type=int, default=256, help="The largest exact block.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    below = " | ".join(
        f"{name} below K-FAC" for name in ("evidence", "bound", "share, new", "share, training", "captured")
    )
    shares = " | ".join(f"{name}: below 1 in training, mean, error" for name in ("K-FAC", "EKFAC"))
    print(f"| task | networks | {below} | K-FAC's evidence above the full one | {shares} |")
    for task in options.tasks:
        chosen = product(options.kinds, range(options.seeds), options.examples)
        cases = [case(kind, task, seed, examples) for kind, seed, examples in chosen]
        for label, prior in (("prior precision 1", 1.0), ("by evidence", None)):
            with limits.using(exact_block=8 * options.exact**2):
                summarize(f"{task}, {label}", [compare(given, prior) for given in cases])


if __name__ == "__main__":
    main()
