"""Every likelihood beside temperature scaling and a deep ensemble: NLL on test data, three splits.

    DUBITO_DATA=... python benchmarks/likelihoods.py run
    python benchmarks/likelihoods.py show

A network with 50 hidden units is trained by `MAP`, with a temperature chosen on validation rows, as an ensemble of five
and with a `Laplace` posterior; all until validation rows get no better. Likelihoods of the same targets have comparable
NLLs, but for that of `Quantile`, which describes no data. Counts and shares are drawn from a random function, because
no data set here has them. Rows are kept in `benchmarks/results/likelihoods.jsonl`; a run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from quality import mean_text
from torch import Tensor, nn

import dubito
from dubito import MAP, Ensemble, Laplace, Training, likelihoods

ROWS = Path(__file__).parent / "results" / "likelihoods.jsonl"
RECIPES = {
    "MAP": MAP(), "temperature": MAP(temperature="validation"), "ensemble of 5": Ensemble(members=5),
    "Laplace": Laplace(),
}  # fmt: skip
TRAINING = Training(epochs=100, lr=3e-3, batch_size=32, early_stopping=10)
Pair = tuple[Tensor, Tensor]
Parts = tuple[Pair, Pair, Pair]  # training, validation and test rows


class Case(NamedTuple):
    """A likelihood, the data it is for, and its outputs per target."""

    likelihood: Any
    data: Callable[[int], Parts]
    outputs: int


def table(name: str, split: int) -> Parts:
    """Return standardized numbers of a UCI data set."""
    found = dubito.data.load(f"uci/{name}", split=split, validation=0.2)
    return found.train, found.validation, found.test


def grades(split: int) -> Parts:
    """Return the quality of red wines as classes in their order."""
    found = dubito.data.load("uci/wine", split=split, validation=0.2)

    def classes(part: Pair) -> Pair:
        return part[0], (found.target_scale.decode(part[1]).round().long() - 3).flatten()  # grades 3 to 8

    return classes(found.train), classes(found.validation), classes(found.test)


def pairs(split: int) -> Parts:
    """Return pairs of houses of Boston, and which of them is dearer."""

    def paired(part: Pair, number: int) -> Pair:
        generator = torch.Generator().manual_seed(split)
        rows = torch.randint(len(part[0]), (2, number), generator=generator)
        rows = rows[:, (part[1][rows[0]] != part[1][rows[1]]).flatten()]
        return part[0][rows].transpose(0, 1), (part[1][rows[1]] > part[1][rows[0]]).long().flatten()

    train, validation, test = table("boston", split)
    return paired(train, 400), paired(validation, 200), paired(test, 400)


def drawn(kind: str, split: int) -> Parts:
    """Return counts (whose mean varies more than a network explains) or shares from a random function of 5 inputs."""
    torch.manual_seed(split)
    x, function = torch.randn(1600, 5), nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 3))
    with torch.no_grad():
        level = 3 * function(x)
    if kind == "counts":
        rate = (1 + level[:, 0]).exp() * torch.distributions.Gamma(2.0, 2.0).sample((1600,))
        y = torch.poisson(rate)
    else:
        y = torch.distributions.Dirichlet((1 + level).exp()).sample().clamp(1e-4, 1 - 1e-4)
        y = y / y.sum(1, keepdim=True)
    return tuple((x[some], y[some]) for some in (slice(0, 400), slice(400, 600), slice(600, 1600)))  # type: ignore[return-value]


def _of(name: str) -> Callable[[int], Parts]:
    return lambda split: table(name, split)


NUMBERS: dict[str, tuple[Any, int]] = {
    "Gaussian": (likelihoods.Gaussian(), 1),
    "HeteroscedasticGaussian": (likelihoods.HeteroscedasticGaussian(), 2),
    "StudentT": (likelihoods.StudentT("learn"), 2),
    "MixtureDensity": (likelihoods.MixtureDensity(3), 9),
}
CASES: dict[tuple[str, str], Case] = {
    **{(name, kind): Case(each, _of(name), outputs)
       for name in ("boston", "concrete", "yacht") for kind, (each, outputs) in NUMBERS.items()},
    ("boston", "Quantile, 0.9"): Case(likelihoods.Quantile(0.9), _of("boston"), 2),
    ("wine grades", "Categorical"): Case(likelihoods.Categorical(), grades, 6),
    ("wine grades", "Ordinal"): Case(likelihoods.Ordinal(), grades, 5),
    ("dearer house", "BradleyTerry"): Case(likelihoods.BradleyTerry(), pairs, 1),
    ("counts", "Gaussian"): Case(likelihoods.Gaussian(), lambda split: drawn("counts", split), 1),
    ("counts", "Poisson"): Case(likelihoods.Poisson(), lambda split: drawn("counts", split), 1),
    ("counts", "NegativeBinomial"): Case(likelihoods.NegativeBinomial(), lambda split: drawn("counts", split), 1),
    ("shares", "Dirichlet"): Case(likelihoods.Dirichlet(), lambda split: drawn("shares", split), 3),
}  # fmt: skip


def run(splits: int) -> None:
    """Fill in what is missing."""
    done = {(row["data"], row["likelihood"], row["split"]) for row in rows()}
    for split in range(splits):
        for (data, name), case in CASES.items():
            if (data, name, split) in done:
                continue
            found = scores(case, split)
            row = {"data": data, "likelihood": name, "split": split, **found}
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


def scores(case: Case, split: int) -> dict[str, float]:
    """Return the NLL of the recipes."""
    train, validation, test = case.data(split)

    def network(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(train[0].shape[-1], 50), nn.ReLU(), nn.Linear(50, case.outputs))

    found = dubito.compare(
        network, train, RECIPES, test=test, seeds=[split], likelihood=case.likelihood, validation=validation,
        training=TRAINING, progress=False,
    )  # fmt: skip
    return {run.name: run.evaluation.scores["nll"] for run in found.runs}


def rows() -> list[dict[str, Any]]:
    """Return the results so far."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.is_file() else []


def show() -> None:
    """Print the table: mean and standard deviation over splits; a likelihood without a temperature has none."""
    print(f"| data | likelihood | {' | '.join(RECIPES)} | splits |\n|---|---|{'---|' * (len(RECIPES) + 1)}")
    for data, name in CASES:
        own = [row for row in rows() if (row["data"], row["likelihood"]) == (data, name)]
        columns = {key: [row[key] for row in own] for key in RECIPES}
        cells = ["–" if key != "MAP" and each == columns["MAP"] else mean_text(each) for key, each in columns.items()]
        print(f"| {data} | `{name}` | {' | '.join(cells)} | {len(own)} |")


def main() -> None:
    """Run or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("--splits", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run(options.splits) if options.what == "run" else show()


if __name__ == "__main__":
    main()
