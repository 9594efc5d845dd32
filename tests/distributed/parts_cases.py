"""What each of two processes does with data of which it may hold a part, and with networks that differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from dubito.errors import DubitoError, ShardsWarning
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import dubito
from dubito import (
    DKL,
    MAP,
    MIMO,
    SGMCMC,
    SNGP,
    SVGD,
    SWAG,
    VBLL,
    BatchEnsemble,
    Ensemble,
    Laplace,
    MCDropout,
    Packed,
    Posterior,
    Rank1,
    Snapshot,
    Training,
    select,
)
from dubito.core import distributed, limits, params
from dubito.core.randomness import Stream
from dubito.fitting.recipe import Recipe
from dubito.methods.ensembles import BatchNormNoise

ROWS = 36


def network(seed: int = 1, *extra: nn.Module) -> nn.Module:
    with Stream(seed).active():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *extra, nn.Linear(6, 3)).double()


def rows(count: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1)


def part(count: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Every other row, as each process's own; alone all of them."""
    x, y = rows(count, seed)
    mine = distributed.rows(count)
    return x[mine], y[mine]


def uneven() -> tuple[Tensor, Tensor]:
    """The first process has 5 rows, the second the rest: in batches of 4, two against eight."""
    x, y = rows()
    if not distributed.is_active():
        return x, y
    return (x[:5], y[:5]) if distributed.rank() == 0 else (x[5:], y[5:])


@contextmanager
def told() -> Iterator[list[str]]:
    """Collect the warnings about parts; any other is an error."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardsWarning)
        yield said
    said.extend(str(each.message) for each in caught)


def fit(recipe: Recipe, data: Any, model: nn.Module | None = None, **options: Any) -> Posterior:
    training = {"epochs": 3, "lr": 1e-2, "batch_size": 8, "shuffle": False, **options.pop("training", {})}
    return recipe.fit(model or network(), data, training=Training(**training), progress=False, **options)


def weights(posterior: Posterior) -> dict[str, Tensor]:
    return {**params.of(posterior.model), **params.buffers_of(posterior.model)}


def batch_size() -> int:
    """Of one process: what two of them take together."""
    return 8 // distributed.world_size()


def later() -> tuple[Tensor, Tensor]:
    """Data of which only the first rows are the same in all processes."""
    x, y = rows()
    own, targets = rows(seed=5 + distributed.rank())
    return torch.cat([x[:8], own]), torch.cat([y[:8], targets])


def sampled(shuffle: bool = False) -> Any:
    """A loader that gives each process its own rows, as scripts for DistributedDataParallel have it."""
    if not distributed.is_active():
        return DataLoader(TensorDataset(*rows()), batch_size=8)
    data = TensorDataset(*rows())
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=shuffle))


def shards(folder: Path) -> dict[str, Any]:
    """Fits on parts, which together are what one process finds on the whole."""
    small = {"training": {"batch_size": batch_size()}}
    with told() as said, limits.using(exact_block=0):  # so that "ekfac" has eigenbases
        found = {
            "map": fit(MAP(), part(), validation=part(12, seed=2), **small),
            "stopped": fit(
                MAP(temperature="validation"), part(), validation=part(12, seed=2),
                training={"batch_size": batch_size(), "early_stopping": 1, "lr": 0.1},
            ),
            "sampler": fit(MAP(), sampled()),
            "checkpoint": fit(MAP(), part(), training={**small["training"], "checkpoint": str(folder / "run")}),
            "resumed": fit(MAP(), part(), training={**small["training"], "checkpoint": str(folder / "run")}),
            "kron": fit(Laplace(), part()),
            "full": fit(Laplace(structure="full"), uneven()),
            "low rank": fit(Laplace(structure="low-rank", rank=3), uneven()),
            "ekfac": fit(Laplace(structure="ekfac"), uneven()),
            "subnetwork": fit(Laplace(structure="full", weights=select.subnetwork(9)), part()),
        }  # fmt: skip
        evaluation = dubito.evaluate(found["map"], uneven(), batch_size=4)
    results: dict[str, Any] = {name: weights(posterior) for name, posterior in found.items()}
    results["num_data"] = [posterior.num_data for posterior in found.values()]
    results["scores"] = {key: torch.tensor(value, dtype=torch.float64) for key, value in evaluation.scores.items()}
    results["evidence"] = {
        name: found[name].log_evidence().reshape(()) for name in ("kron", "full", "low rank", "ekfac", "subnetwork")
    }
    results["updated"] = {}
    with told():
        moved = found["full"].update(part(10, seed=5), progress=False)
    results["updated"] = {"evidence": moved.log_evidence().reshape(()), **weights(moved)}
    results["said"] = said
    return results


def unequal(folder: Path) -> dict[str, Any]:
    """Parts of very different lengths end together, and an order that is drawn anew in each epoch is one."""
    with told():
        trained = fit(MAP(), uneven(), training={"batch_size": 4})
        shuffled = fit(MAP(), sampled(shuffle=True))
        members = fit(Ensemble(2), part(), training={"batch_size": 4})
        normal = fit(MAP(), part(), network(1, nn.BatchNorm1d(6)), training={"batch_size": 4})
    return {
        "trained": weights(trained),
        "shuffled": weights(shuffled),
        "members": [weights(member) for member in members.members],  # type: ignore[attr-defined]
        "counts": [trained.num_data, shuffled.num_data, members.members[0].num_data],  # type: ignore[attr-defined]
        "normal": weights(normal),
    }


class Augmented(Dataset[Any]):
    """Examples with noise that no seed of ours reaches."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data
        self.noise = torch.Generator()
        self.noise.seed()

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = (each[i] for each in self.data)
        return x + 0.01 * torch.randn(4, generator=self.noise, dtype=torch.float64), y


class Jittered(Augmented):
    """Examples with noise from the global generator, as usual."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = (each[i] for each in self.data)
        return x + 0.01 * torch.randn(4, dtype=torch.float64), y


class Endless(IterableDataset[Any]):
    """A stream whose length must be said."""

    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*self.data, strict=True))


def words(call: Any) -> str:
    try:
        call()
    except (DubitoError, ShardsWarning) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def recognised(folder: Path) -> dict[str, Any]:
    """Which data is divided, which is taken as parts, and which is refused."""
    same_inputs = (rows()[0], rows()[1].roll(distributed.rank()))
    constant = (rows()[0], torch.zeros(ROWS, dtype=torch.int64))
    with told():
        counts = {
            "jittered": fit(MAP(), DataLoader(Jittered(rows()), batch_size=8, shuffle=True)).num_data,
            "augmented": fit(MAP(), DataLoader(Augmented(rows()), batch_size=8, shuffle=True)).num_data,
            "dataset": fit(MAP(), Jittered(rows())).num_data,
            "stream": fit(MAP(), Endless(rows()), num_data=ROWS).num_data,
            "stream of parts": fit(MAP(), Endless(part()), num_data=ROWS // 2).num_data,
            "batches": fit(MAP(), [part(), part(10)]).num_data,
        }
        refused = {
            "later batches": words(lambda: fit(MAP(), DataLoader(TensorDataset(*later()), batch_size=8))),
            "same inputs": words(lambda: fit(MAP(), same_inputs)),
            "random parts": words(lambda: fit(MAP(), DataLoader(Augmented(part()), batch_size=8))),
            "constant targets": words(lambda: fit(MAP(), DataLoader(Augmented(constant), batch_size=8))),
            "chains": words(lambda: fit(SGMCMC(), part())),
            "statistics": words(lambda: fit(BatchNormNoise(), part(), network(1, nn.BatchNorm1d(6)))),
            "settings": words(lambda: fit(MAP(), rows(), training={"lr": 1e-3 * (1 + distributed.rank())})),
            "shapes": words(lambda: fit(MAP(), rows(), network(1, *[nn.Linear(6, 6)] * distributed.rank()).double())),
        }
    refused["warning as an error"] = words(lambda: fit(MAP(), part()))
    return {"counts": counts, "refused": refused}


def networks(folder: Path) -> dict[str, Any]:
    """Networks that start differently in each process, wrapped or not."""
    own = network(7 + distributed.rank(), nn.BatchNorm1d(6))
    own[2].running_mean += distributed.rank()  # type: ignore[operator,index]
    wrapped = nn.parallel.DistributedDataParallel(network(3)) if distributed.is_active() else network(3)
    path = folder / f"wrapped-{distributed.rank()}"
    posterior = fit(MAP(), rows(), wrapped)
    posterior.save(path)
    student, few = network(9 + distributed.rank()), Training(epochs=3, batch_size=8)
    return {
        "map": weights(fit(MAP(), rows(40), own)),
        "laplace": weights(fit(Laplace(), rows(), own)),
        "ensemble": [weights(m) for m in fit(Ensemble(2, start="model"), rows(40), own).members],  # type: ignore
        "distilled": weights(dubito.distill(posterior, student, rows()[0], training=few, progress=False)),
        "wrapped": weights(posterior),
        "loaded": weights(dubito.load(path, wrapped)),
    }


def recipes(folder: Path) -> dict[str, Any]:
    """Recipes of every kind, on shards and from networks that start differently."""
    chosen = (
        SVGD(num_particles=4), SWAG(), Snapshot(cycles=2), MCDropout(0.5), Rank1(components=2), BatchEnsemble(2),
        VBLL(), SNGP(num_features=8), DKL(inducing=4), Packed(members=2), MIMO(members=2), Laplace(structure="sampled"),
    )  # fmt: skip
    with told():
        found = [fit(recipe, part(), network(3 + distributed.rank())) for recipe in chosen]
    return {repr(each.recipe): [each.digest(), each.num_data] for each in found}


def everything(folder: Path) -> dict[str, Any]:
    """Run all cases."""
    return {case.__name__: case(folder) for case in (shards, unequal, recognised, networks, recipes)}
