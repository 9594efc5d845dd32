"""Cost of a step of variational training, in units of a plain step, beside other libraries in the same run.

    python benchmarks/variational.py [--model mlp lenet5] [--rounds 15] [--memory]

One thread, process CPU time, batch 128, fused Adam on both sides if a library allows it; each ratio is
against a plain step measured right before it. Libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import variational_peers
from common import ratios, summary
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import Training, Variational, likelihoods, models, variational
from dubito.core import params
from dubito.core.batches import Source
from dubito.fitting.inference import Problem

NUM_DATA, BATCH, SAMPLES = 60_000, 128, 32
STEPS = 10  # of one measurement
NETWORKS: dict[str, Callable[[], nn.Module]] = {"mlp": models.lenet_300_100, "lenet5": models.lenet5}
RECIPES = {
    "local": Variational(estimator="local"),
    "weight": Variational(estimator="weight"),
    "flipout": Variational(estimator="flipout"),
    "natural": Variational(optimizer="natural"),
}


def plain(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> variational_peers.Step:
    """A step of plain training, as a user without any library would write it."""
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()

    return step


def ours(recipe: Variational) -> Callable[..., variational_peers.Step]:
    """A step as the fit loop takes it."""

    def make(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> variational_peers.Step:
        source, generator = Source((x, y), batch_size=len(x), shuffle=False), torch.Generator().manual_seed(0)
        training = Training(epochs=num_data // len(x), lr=1e-3)
        problem = Problem(network, likelihoods.Categorical(), source, None, training, generator, progress=False)
        method, batch = recipe.build(problem), source.first()
        state = method.init(params.of(network), params.buffers_of(network), generator)
        return lambda: method.update(state, batch, generator)

    return make


def own_loop(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> variational_peers.Step:
    """A step in a user's own loop, with `module.kl()`."""
    module = variational.convert(network).train()
    optimizer = torch.optim.Adam(module.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        (F.cross_entropy(module(x), y) + module.kl() / num_data).backward()
        optimizer.step()

    return step


def own_natural_loop(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> variational_peers.Step:
    """A step in a user's own loop, by `NaturalOptimizer`."""
    module = variational.convert(network, estimator="weight", biases="random").train()
    optimizer = variational.NaturalOptimizer(module, num_data=num_data, total_steps=num_data)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def makers() -> dict[str, Callable[..., variational_peers.Step]]:
    """All ways of taking a step."""
    own = {"Dubito local, own loop": own_loop, "Dubito natural, own loop": own_natural_loop}
    fits = {f"Dubito {name}": ours(recipe) for name, recipe in RECIPES.items()}
    return {**fits, **own, **variational_peers.installed()}


def times(network: nn.Module, rounds: int) -> None:
    """Print the cost of a step of each kind."""
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    step = plain(copy.deepcopy(network), x, y, NUM_DATA)
    steps = {name: make(copy.deepcopy(network), x, y, NUM_DATA) for name, make in makers().items()}
    for each in (step, *steps.values()):
        _repeat(each, 3)
    works = {name: lambda each=each: _repeat(each, STEPS) for name, each in steps.items()}
    for name, found in ratios(lambda: _repeat(step, STEPS), works, rounds).items():
        print(f"{name:36}{summary(found)}", flush=True)


def predictions(network: nn.Module, rounds: int) -> None:
    """Print the cost of a prediction from 32 samples, in passes of the plain network over the same inputs."""
    x, y = torch.randn(4096, 1, 28, 28), torch.randint(10, (256,))
    posterior: Any = Variational().fit(network, (x[:256], y), training=Training(epochs=1), progress=False)

    def passes() -> None:
        with torch.no_grad():
            for rows in x.split(1024):
                posterior.model(rows)

    works = {
        f"{SAMPLES} samples, {method}": lambda m=method: posterior.predict(x, method=m, num_samples=SAMPLES)
        for method in ("weights", "local")
    }
    for name, found in ratios(passes, works, rounds).items():
        print(f"{name:36}{summary(found)}", flush=True)


def memory(network: nn.Module) -> None:
    """Print what a method keeps between steps (weights, optimizer state) and the most that one step takes on top."""
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    for name, make in {"plain": plain, **makers()}.items():
        before = _held()
        step = make(copy.deepcopy(network), x, y, NUM_DATA)
        _repeat(step, 3)
        kept = _held() - before
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            step()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        peak = held = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            peak = max(peak, held)
        print(f"{name:36} keeps {kept / 2**20:6.1f} MB, a step {peak / 2**20:6.1f} MB on top", flush=True)
        del step


def _held() -> int:
    """The bytes of all tensors that are alive, each piece of memory once."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if isinstance(each, Tensor))
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def _repeat(step: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        step()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # those of the peers
    for name in options.model:
        network = NETWORKS[name]()
        print(f"\n{name}: {'memory' if options.memory else 'time over a plain step'}")
        if options.memory:
            memory(network)
        else:
            times(network, options.rounds)
            predictions(network, max(options.rounds // 3, 1))


if __name__ == "__main__":
    main()
