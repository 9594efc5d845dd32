"""Cost of a step and a prediction of Rank1 and BatchEnsemble, in units of a plain network.

    python benchmarks/rank1_speed.py [--rounds 15] [--networks mlp lenet5]

One thread, process CPU time, each ratio against a unit measured right before it, medians of rounds. The unit of a
training step is one step of the plain network with the default torch.optim.Adam (not fused), batch 128; a second column
uses fused Adam. The unit of a prediction is one pass over the same inputs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import ratios, summary
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import BatchEnsemble, Rank1, Training, likelihoods, models, priors
from dubito.core.batches import Batch, Source
from dubito.fitting.inference import Problem

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (models.lenet_300_100, (784,)),
    "lenet5": (models.lenet5, (1, 28, 28)),
}
CAUCHY: dict[str, Any] = {"family": "cauchy", "prior": priors.Cauchy(1.0, 0.1)}
STEPS: dict[str, Any] = {
    "BatchEnsemble, split": BatchEnsemble(batch="split"),
    "Rank1 normal, split": Rank1(batch="split"),
    "Rank1 Cauchy, split": Rank1(batch="split", **CAUCHY),
    "BatchEnsemble, repeat": BatchEnsemble(batch="repeat"),
    "Rank1 normal, repeat": Rank1(batch="repeat"),
}
BATCH, MANY, REPEATS = 128, 2000, 10


def plain_step(model: nn.Module, x: Tensor, y: Tensor, fused: bool) -> Callable[[], None]:
    """A few training steps as a user without any library would write them."""
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)

    def steps() -> None:
        for _ in range(REPEATS):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return steps


def recipe_step(recipe: Any, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """As many updates of a recipe."""
    generator = torch.Generator().manual_seed(0)
    source = Source((x, y), batch_size=BATCH)
    training = Training(epochs=1000, lr=1e-3)
    problem = Problem(model, likelihoods.Categorical(), source, None, training, generator, progress=False)
    inference = recipe.build(problem)
    state, batch = inference.init({}, {}, generator), Batch(x, y, len(x))

    def steps() -> None:
        nonlocal state
        for _ in range(REPEATS):
            state, _ = inference.update(state, batch, generator)

    return steps


def main() -> None:
    """Print one table for each network."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.networks:
        make, shape = NETWORKS[name]
        x, y = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))
        works = {key: recipe_step(recipe, make(), x, y) for key, recipe in STEPS.items()}
        units = {kind: plain_step(make(), x, y, fused=kind == "fused Adam") for kind in ("Adam", "fused Adam")}
        for work in (*units.values(), *works.values()):
            work()
        print(f"\n{name}: a training step, batch {BATCH}, over a plain one; median (range)")
        for kind, unit in units.items():
            for key, values in ratios(unit, works, options.rounds).items():
                print(f"  {key:24s} over {kind:10s} {summary(values)}")
        predictions(name, make, shape, options.rounds)


@torch.no_grad()
def predictions(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], rounds: int) -> None:
    """Print what a prediction by four components costs in passes."""
    model, x, y = make().eval(), torch.randn(MANY, *shape), torch.randint(10, (MANY,))
    posteriors = {
        key: recipe.fit(model, (x[:BATCH], y[:BATCH]), training=Training(epochs=0))
        for key, recipe in (("BatchEnsemble", BatchEnsemble()), ("Rank1 normal", Rank1()))
    }

    def unit() -> None:
        for part in x.split(1024):
            model(part).softmax(-1)

    works = {key: lambda p=posterior: p.predict(x) for key, posterior in posteriors.items()}
    for work in (unit, *works.values()):
        work()
    print(f"{name}: a prediction of {MANY} inputs by four components, in passes")
    for key, values in ratios(unit, works, rounds).items():
        print(f"  {key:24s} {summary(values)}", "" if statistics.median(values) <= 5 else "  more than 5")


if __name__ == "__main__":
    main()
