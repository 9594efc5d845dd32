"""One transition of a stochastic-gradient sampler, against one plain SGD step on the same batch.

    python benchmarks/mcmc.py [--rounds 5] [--steps 60] [--peer FOLDER]

The network is the MLP 784-300-100-10 with batches of 128. Goals: 1.75 for all weights, 0.6 for 1,000 weights of the
last two layers. With `--peer FOLDER` the package `posteriors` in that folder is measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import ratios, summary
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import SGMCMC, Training, likelihoods, select
from dubito.core.batches import Source
from dubito.fitting.inference import Problem

BATCH, ROWS = 128, 1280


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(ROWS, 784, generator=generator), torch.randint(10, (ROWS,), generator=generator)


def sgd_steps(steps: int) -> Callable[[], None]:
    """Plain steps, as a user without any library would write them."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run() -> None:
        for step in range(steps):
            rows = slice(step % 10 * BATCH, step % 10 * BATCH + BATCH)
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()

    return run


def our_steps(recipe: SGMCMC, steps: int) -> Callable[[], None]:
    """The transitions that the fit loop drives."""
    training = Training(batch_size=BATCH, shuffle=False)
    source = Source(data(), batch_size=BATCH, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    model = copy.deepcopy(network())
    problem = Problem(model, likelihoods.Categorical(), source, None, training, generator, progress=False)
    inference = recipe.build(problem)
    state = inference.init({}, {}, generator)
    batches = list(source.epoch())

    def run() -> None:
        nonlocal state
        for step in range(steps):
            state, _ = inference.update(state, batches[step % 10], generator)

    return run


def peer_steps(kernel: str, steps: int) -> Callable[[], None]:
    """The same transitions by `posteriors`."""
    import posteriors

    model, (x, y) = network(), data()

    def log_posterior(weights: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = torch.func.functional_call(model, weights, batch[0])
        prior = sum((value**2).sum() for value in weights.values()) / 2
        return -F.cross_entropy(logits, batch[1]) - prior / ROWS, logits

    build = posteriors.sgmcmc.sgld.build if kernel == "sgld" else posteriors.sgmcmc.sghmc.build
    transform = build(log_posterior, lr=1e-3, temperature=1 / ROWS)
    state = transform.init(dict(model.named_parameters()))

    def run() -> None:
        nonlocal state
        for step in range(steps):
            rows = slice(step % 10 * BATCH, step % 10 * BATCH + BATCH)
            state, _ = transform.update(state, (x[rows], y[rows]))

    return run


def part(size: int) -> dict[str, Tensor]:
    """`size` weights of the last two layers, at random."""
    shapes = {name: value.shape for name, value in network().named_parameters() if name[0] in "24"}
    total = sum(shape.numel() for shape in shapes.values())
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.randperm(total, generator=torch.Generator().manual_seed(3))[:size]] = True
    parts = chosen.split([shape.numel() for shape in shapes.values()])
    return {name: mask.reshape(shapes[name]) for name, mask in zip(shapes, parts, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--peer", help="a folder with the package `posteriors`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    endless = {"burn_in": 10**6, "thinning": 1, "num_samples": 4, "step_size": 1e-3}
    few = select.mask(part(1000))
    works: dict[str, Callable[[], Any]] = {}
    for kernel in ("sgld", "psgld", "sghmc", "sgnht"):
        works[f"{kernel}, all 266,610 weights"] = our_steps(SGMCMC(kernel, **endless), options.steps)
        works[f"{kernel}, 1,000 of the last two layers"] = our_steps(
            SGMCMC(kernel, weights=few, **endless), options.steps
        )
    if options.peer:
        sys.path.append(options.peer)
        works |= {f"posteriors {kernel}": peer_steps(kernel, options.steps) for kernel in ("sgld", "sghmc")}
    unit = sgd_steps(options.steps)
    for work in (unit, *works.values()):
        work()
    print("CPU time of one transition over that of a plain SGD step (median of", options.rounds, "rounds; range):")
    for name, values in ratios(unit, works, options.rounds).items():
        print(f"  {name:<44} {summary(values)}")


if __name__ == "__main__":
    main()
