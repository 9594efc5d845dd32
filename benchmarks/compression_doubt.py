"""Uncertainty of networks that lost units, each with a posterior over its own weights, beside the large one's.

    python benchmarks/compression_doubt.py lenet300 --seeds 1
    python benchmarks/compression_doubt.py budget --networks lenet5 vgg  # those of compression_budget.py, seed 0

All are resumable. `budget` fits a Kronecker posterior over the last layer of every network on the 2,000 training images
that chose what to remove; coverage is that of conformal sets for 90 %, calibrated on 1,000 test examples (at most half
of them) that the scores leave out. Out of distribution: KMNIST for MNIST, MNIST in three channels for CIFAR-10, random
words for reviews.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from compression_budget import NETWORKS, SHARES, Pair, eliminated, load, measured, trained
from compression_cells import RESULTS, cell
from dubito.compression import explore
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import MAP, Laplace, Training, decisions, select
from dubito.core.errors import InputError
from dubito.uses.compression.report import num_macs

DOUBTS = ("accuracy", "nll", "ece", "auroc kmnist", "auroc notmnist")


def lenet300(args: argparse.Namespace) -> None:
    """Uncertainty of LeNet-300-100 and of what is left of it, each with a Kronecker posterior over its own weights."""
    for seed in range(args.seeds):
        cell("doubt", seed, lambda seed=seed: _doubts(seed))
    cells = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("doubt-[0-9].json"))]
    print(f"| units removed | MACs left | file, kB | {' | '.join(DOUBTS)} |\n|---|---|---|{'---|' * len(DOUBTS)}")
    for name in cells[0]:
        if isinstance(cells[0][name], dict):
            rows = [found[name] for found in cells]
            columns = [torch.tensor([row[key] for row in rows]) for key in ("macs", "kB", *DOUBTS)]
            shown = [f"{c.mean():.3g}" + (f" ± {c.std():.2g}" if len(rows) > 1 else "") for c in columns]
            print(f"| {name} | {' | '.join(shown)} |")


def _doubts(seed: int) -> dict[str, Any]:
    data = dubito.data.load("mnist", limit=6000, limit_test=2000, validation=1 / 6)
    others = {name: dubito.data.load(name, limit_test=2000, like=data).test[0] for name in ("kmnist", "notmnist")}
    torch.manual_seed(seed)
    how = Training(epochs=10, lr=1e-3, batch_size=100)
    generator = torch.Generator().manual_seed(seed)
    model = dubito.models.lenet_300_100()
    model = MAP().fit(model, data.train, training=how, generator=generator, progress=False).model
    recipe = Laplace(structure="kron")
    posterior = recipe.fit(model, data.train, validation=data.validation, progress=False)
    found = explore(
        posterior, data=data.test, train=data.train, recipe=recipe, validation=data.validation, ood=others,
        progress=False,
    )  # fmt: skip
    chosen = [each for each in (found.before, *found.candidates) if each.number in (0, 3, 5, 7, 8, 10)]
    return {
        f"{each.target:.0%}": {"macs": each.macs, "kB": each.num_bytes / 1000} | {n: each.scores[n] for n in DOUBTS}
        for each in chosen
    }


SCORES = ("accuracy", "nll", "ece", "auroc", "coverage", "set size")


def budget(args: argparse.Namespace) -> None:
    """Uncertainty of the networks of `compression_budget.py`."""
    for name in args.networks:
        cell(f"doubts-{name}-{args.epochs}", 0, lambda name=name: _of_network(name, args.epochs))
        found = json.loads((RESULTS / f"doubts-{name}-{args.epochs}-0.json").read_text())
        print(f"\n| {name}, {args.epochs} epochs | MACs left | {' | '.join(SCORES)} |\n|---|---|{'---|' * len(SCORES)}")
        for share, row in found.items():
            if isinstance(row, dict):
                print(f"| {share} | {row['macs']:.1%} | {' | '.join(f'{row[key]:.3f}' for key in SCORES)} |")


def _of_network(name: str, epochs: int) -> dict[str, Any]:
    train, (x, y) = load(name)
    few, other = measured(train), unfamiliar(NETWORKS[name][0], x)
    cut = min(1000, len(x) // 2)
    held_out, test = (x[:cut], y[:cut]), (x[cut:3000], y[cut:3000])
    dense = trained(name, 0, train)
    whole = num_macs(dense, x[:1])
    networks = {"large": dense}
    for share in SHARES:
        try:
            networks[f"{share:.0%}"] = eliminated(name, 0, share, epochs)
        except InputError as error:  # a twentieth of the units always stays
            print(f"{name}, {share:.0%}: {error}")
    return {
        share: _scores(small, few, held_out, test, other) | {"macs": num_macs(small, x[:1]) / whole}
        for share, small in networks.items()
    }


def _scores(model: nn.Module, few: Pair, held_out: Pair, test: Pair, other: Tensor) -> dict[str, float]:
    posterior = Laplace(weights=select.last_layer()).fit(model, few, progress=False)
    found = dubito.evaluate(posterior, test, ood={"other": other})
    sets = decisions.ConformalSets(posterior, held_out, coverage=0.9).predict(test[0])
    covered = float(sets.gather(1, test[1][:, None]).double().mean())
    return {key: found.scores[key] for key in ("accuracy", "nll", "ece")} | {
        "auroc": found.ood["other"]["entropy"]["auroc"], "coverage": covered,
        "set size": float(sets.double().sum(1).mean()),
    }  # fmt: skip


def unfamiliar(data: str, like: Tensor, count: int = 2000) -> Tensor:
    """Inputs from elsewhere, in the shape of known ones."""
    if data == "mnist":
        return dubito.data.load("kmnist", limit_test=count, like=dubito.data.load("mnist")).test[0]
    if data == "cifar10":
        pictures = dubito.data.load("mnist", limit_test=count).test[0]
        pictures = F.interpolate(pictures, size=like.shape[2:]).expand(-1, 3, -1, -1)
        pictures = (pictures - pictures.mean()) / pictures.std()
        return pictures * like[:count].std() + like[:count].mean()
    words = torch.randint(2, int(like.max()) + 1, like[:count].shape, generator=torch.Generator().manual_seed(0))
    return torch.where(like[:count] == 0, like[:count], words.to(like))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lenet300", "budget"])
    parser.add_argument("--networks", nargs="*", default=["lenet5"], choices=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    {"lenet300": lenet300, "budget": budget}[args.what](args)


if __name__ == "__main__":
    main()
