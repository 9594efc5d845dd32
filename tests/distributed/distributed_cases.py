"""What one process, and each of two, works through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import MAP, Auto, Posterior, Training, Variational
from dubito.core import distributed, params
from dubito.core.batches import Batch, Source
from dubito.core.randomness import Stream
from dubito.core.settings import setting
from dubito.fitting.inference import Inference, Problem, State
from dubito.fitting.recipe import Recipe
from dubito.methods.map.posterior import PointPosterior

ROWS = 41  # in batches of 8 the last one is a single row: with two processes, one of them has nothing to do


class NeverEmpty(nn.Sequential):
    """A network that, like many, does not take an empty batch."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) > 0
        return super().forward(x)


def network(outputs: int = 3, *extra: nn.Module) -> nn.Module:
    with Stream(1).active():
        return NeverEmpty(nn.Linear(4, 6), nn.Tanh(), *extra, nn.Linear(6, outputs)).double()


def classes(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1)


def numbers(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, _ = classes(seed)
    return x, x[:, :2].sin() + 0.1 * x[:, 2:]


def loader(seed: int = 3) -> DataLoader[Any]:
    """With a generator that starts differently in each process: the first one's is what counts."""
    generator = torch.Generator().manual_seed(seed + distributed.rank())
    return DataLoader(TensorDataset(*classes()), batch_size=8, shuffle=True, generator=generator)


def fit(recipe: Recipe, data: Any, model: nn.Module | None = None, **options: Any) -> Posterior:
    settings = {"epochs": 3, "lr": 1e-2, "batch_size": 8, **options.pop("training", {})}
    generator = torch.Generator().manual_seed(5 + distributed.rank())
    training = Training(**settings)
    return recipe.fit(model or network(), data, training=training, generator=generator, **options)


def weights(posterior: Posterior) -> dict[str, Any]:
    return {"params": params.of(posterior.model), "buffers": params.buffers_of(posterior.model)}


def fits() -> dict[str, Any]:
    """Fits whose result does not depend on how many processes there are."""
    regression = fit(MAP(temperature="validation"), numbers(), network(2), likelihood="gaussian", validation=numbers(1))
    stopped = {"early_stopping": 1, "lr": 0.1}
    results = {
        "adam": fit(MAP(prior_precision=0.5), classes()),
        "sgd": fit(MAP(), classes(), training={"optimizer": "sgd", "clip": 0.05, "weight_decay": 0.1}),
        "fresh": fit(MAP(start="fresh"), classes()),
        "loader": fit(MAP(), loader()),
        "batches": fit(MAP(), [tuple(part[:3] for part in classes()), tuple(part[3:] for part in classes())]),
        "single": fit(MAP(), classes(), network().float()),
        "stopped": fit(MAP(temperature="validation"), classes(), validation=classes(2), training=stopped),
        "one row of validation": fit(MAP(temperature="validation"), classes(), validation=classes(2, rows=1)),
        "regression": regression,
        "weight samples": fit(Variational(estimator="weight", initial_scale=0.2), classes()),
        "natural": fit(Variational(optimizer="natural"), classes()),
        "correlated": fit(Variational(family="low-rank", rank=2, initial_scale=0.2), classes()),
        "auto": fit(Auto(budget=0), classes()),
    }
    found: dict[str, Any] = {name: weights(posterior)["params"] for name, posterior in results.items()}
    found["scales"] = {name: results[name].scale for name in ("weight samples", "natural", "correlated")}
    scores = [each.score for each in results["auto"].explanation.candidates if each.score is not None]
    temperatures = [regression.temperature, results["stopped"].temperature]
    found["numbers"] = torch.tensor([regression.likelihood.noise, *temperatures, *scores], dtype=torch.float64)
    evaluation = dubito.evaluate(results["adam"], classes(4), batch_size=8)
    found["scores"] = {name: torch.tensor(value, dtype=torch.float64) for name, value in evaluation.scores.items()}
    found["predicted"] = results["adam"].predict(loader()).log_probs.sort(0).values
    return found


class Recording(nn.Dropout):
    """Dropout that remembers what it dropped."""

    masks: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(torch.ones_like(x))
        if self.training:
            Recording.masks.append(out == 0)
        return x * out


def noisy() -> dict[str, Any]:
    """What each process draws for its own rows differs; the network stays the same in all of them."""
    Recording.masks = []
    model = network(3, nn.BatchNorm1d(6), Recording(0.5))
    posterior = fit(MAP(), classes(rows=40), model)  # BatchNorm needs two rows in each process
    return {**weights(posterior), "masks": [mask.clone() for mask in Recording.masks]}


@setting
class Sum(Recipe):
    """A toy method whose state is the sum of this process's rows."""

    setting_name = "testing.Sum"

    def build(self, problem: Problem) -> Inference:
        def update(state: State, batch: Batch, generator: torch.Generator) -> Any:
            crash_if_due()
            state["total"] += batch.inputs.sum(0)
            return state, {}

        def posterior(state: State) -> Posterior:
            total = state["total"].clone()
            distributed.sum_([total])
            problem.model[2].bias.data = total[:3]  # type: ignore[index]
            return PointPosterior(problem.model, problem.likelihood, MAP(), problem.num_data)

        init = {"total": torch.zeros(4, dtype=torch.float64)}
        return Inference(lambda *_: init, update, posterior, epochs=1, additive=True)


class Fragile(NeverEmpty):
    """A network that crashes once, on command."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            crash_if_due()
        return super().forward(x)


steps_left = -1


def crash_if_due() -> None:
    global steps_left
    steps_left -= 1
    if steps_left == 0:
        raise RuntimeError("crash")


def resumed(folder: Path) -> dict[str, Any]:
    """A run that crashes in all processes and is started again."""
    global steps_left
    found: dict[str, Any] = {}
    for name, recipe in {"map": MAP(), "sum": Sum()}.items():
        for kind in ("whole", "broken"):
            training = {"checkpoint": str(folder / f"{name}-{kind}"), "checkpoint_every": 0.0}
            if kind == "broken":
                steps_left = 4
                with pytest.raises(RuntimeError, match="crash"):
                    fit(recipe, loader(), Fragile(*network()), training=training)
            found[f"{name}-{kind}"] = weights(fit(recipe, loader(), Fragile(*network()), training=training))["params"]
    return found


def primitives() -> dict[str, Any]:
    """The few functions that know of other processes."""
    rank = distributed.rank()
    parts = [torch.tensor([1.0 + rank, 2.0]), torch.tensor([[3], [rank]]), torch.tensor(0.5)]
    means = [torch.tensor([float(rank)])]
    distributed.sum_(parts)
    distributed.mean_(means)
    generator = torch.Generator().manual_seed(rank)
    distributed.share_generator(generator)
    local = distributed.local_generator(generator)
    source = Source(classes(), batch_size=8)
    return {
        "sum": parts,
        "mean": means,
        "shared": generator.get_state(),
        "local": local.get_state(),
        "first": [distributed.from_first(rank == 0), distributed.from_first(rank == 1)],
        "rows": [batch.num_rows for batch in source.epoch()],
        "sizes": [batch.size for batch in source.epoch()],
        "whole": source.full().num_rows,
        "first look": source.first().num_rows,
    }


def everything(folder: Path) -> dict[str, Any]:
    """Run all cases."""
    torch.set_num_threads(1)
    torch.manual_seed(100 + distributed.rank())  # the user's own generator does not matter
    return {
        "fits": fits(),
        "noisy": noisy(),
        "resumed": resumed(folder),
        "primitives": primitives(),
    }
