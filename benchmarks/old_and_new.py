"""Speed of two checkouts side by side: the works of the benchmarks of both, one after the other in the same run.

    python benchmarks/old_and_new.py OLD [--new .] [--tables laplace first_use ...] [--only "diag mc"] [--rounds 7]

Each checkout runs in a process of its own with its own `src` and `benchmarks`. For each piece of work the two processes
take turns, one thread, process CPU time. Printed is new over old: the median of the rounds, their range, and the ratio
of the fastest rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Works = dict[str, Callable[[], Any]]
TABLES = ("laplace", "first_use", "variational", "rank1", "subnetwork")
MODELS = {"A": "mlp", "B": "lenet5"}
REPEATS = 10  # training steps of one measurement


def laplace_works(model: str, points: int) -> Works:
    """Return the fits and predictions of Laplace."""
    import laplace

    network, (x, y), test = laplace.setting(model)
    return laplace.works(network, (x[:points], y[:points]), test[:points])


def first_use_works(model: str, points: int) -> Works:
    """Return fits of Laplace with a first prediction: what a fit computes already for its record counts in both."""
    import laplace

    network, (x, y), test = laplace.setting(model)
    train, few = (x[:points], y[:points]), test[:128]
    fits = {name: lambda recipe=recipe: recipe.fit(network, train, progress=False).predict(few)
            for name, recipe in laplace.RECIPES.items()}  # fmt: skip
    return {f"{name} fit, first predict": work for name, work in fits.items()}


def subnetwork_works(model: str, points: int) -> Works:
    """Return the selection, the fit and the prediction of a subnetwork of 1,000 weights."""
    import laplace
    import subnetwork

    network, (x, y), test = laplace.setting(model)
    return subnetwork.works(network, (x[:points], y[:points]), test[:points], 1000)


def variational_works(model: str, points: int) -> Works:
    """Return the training steps of each estimator, and predictions."""
    import torch
    import variational

    from dubito import Training, Variational

    network = variational.NETWORKS[MODELS[model]]()
    x, y = torch.randn(max(points, 256), 1, 28, 28), torch.randint(10, (max(points, 256),))
    few, labels = x[: variational.BATCH], y[: variational.BATCH]
    steps = {n: variational.ours(recipe)(network, few, labels, 60_000) for n, recipe in variational.RECIPES.items()}
    posterior: Any = Variational().fit(network, (x[:256], y[:256]), training=Training(epochs=1), progress=False)
    found = {f"step, {name}": lambda step=step: [step() for _ in range(REPEATS)] for name, step in steps.items()}
    for how in ("weights", "local"):
        found[f"predict, {how}"] = lambda how=how: posterior.predict(x, method=how, num_samples=32)
    return found


def rank1_works(model: str, points: int) -> Works:
    """Return the training steps of Rank1 and BatchEnsemble, and their predictions."""
    import rank1_speed
    import torch

    from dubito import BatchEnsemble, Rank1, Training

    make, shape = rank1_speed.NETWORKS[MODELS[model]]
    x, y = torch.randn(points, *shape), torch.randint(10, (points,))
    few = x[: rank1_speed.BATCH], y[: rank1_speed.BATCH]
    found: Works = {f"step, {n}": rank1_speed.recipe_step(r, make(), *few) for n, r in rank1_speed.STEPS.items()}
    for name, recipe in (("BatchEnsemble", BatchEnsemble()), ("Rank1 normal", Rank1())):
        posterior = recipe.fit(make(), few, training=Training(epochs=0), progress=False)
        found[f"predict, {name}"] = lambda posterior=posterior: posterior.predict(x)
    return found


def serve(table: str, model: str, points: int) -> None:
    """Print the names of the works, then the seconds of each one that is asked for by a line of input."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    works: Works = globals()[f"{table}_works"](model, points)
    print(json.dumps(list(works)), flush=True)
    for line in sys.stdin:
        start = time.process_time()
        works[line.strip()]()
        print(time.process_time() - start, flush=True)


class Checkout:
    """A process that runs the works of one checkout when asked."""

    def __init__(self, folder: Path, table: str, model: str, points: int) -> None:
        paths = [str(folder.resolve() / part) for part in ("src", "benchmarks")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", __file__, "--serve", table, model, str(points)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.names: list[str] = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a process has ended: its error is above")
        return line

    def seconds(self, name: str) -> float:
        """Return the CPU time of one piece of work."""
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(old: Path, new: Path, table: str, model: str, rounds: int, points: int, only: str) -> None:
    """Print the ratios of one table, or of its rows whose names begin with `only`."""
    both = [Checkout(folder, table, model, points) for folder in (old, new)]
    for name in [name for name in both[0].names if name in both[1].names and name.startswith(only)]:
        for each in both:
            each.seconds(name)  # the first call is slower
        times = [[each.seconds(name) for each in (both if number % 2 else both[::-1])] for number in range(rounds)]
        pairs = [pair if number % 2 else pair[::-1] for number, pair in enumerate(times)]
        found = [after / before for before, after in pairs]
        best = min(after for _, after in pairs) / min(before for before, _ in pairs)
        middle = f"{statistics.median(found):5.2f}  ({min(found):.2f} to {max(found):.2f})"
        print(f"{table} {MODELS[model]:8}{name:28}{middle}  fastest {best:.2f}", flush=True)
    for each in both:
        each.close()


def main() -> None:
    """Compare two checkouts."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("old", type=Path)
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=TABLES)
    parser.add_argument("--model", default="AB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--points", type=int, default=6000, help="As in the tables of benchmarks/laplace.py.")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for table in options.tables:
        for model in options.model:
            compare(options.old, options.new, table, model, options.rounds, options.points, options.only)


if __name__ == "__main__":
    main()
