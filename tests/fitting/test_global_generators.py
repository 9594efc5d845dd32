"""The global generators of torch, numpy and `random` stay where the user left them, however a fit ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dubito.ensembles import SWAG, Ensemble, MCDropout, Snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from dubito import HMC, MAP, SGMCMC, SVGD, BatchEnsemble, Laplace, Rank1, Training, Variational, select
from dubito.core import randomness
from dubito.fitting.recipe import Recipe

RECIPES: list[Recipe] = [
    MAP(), MAP(start="fresh"), Laplace(), Laplace(structure="low-rank", rank=3), Variational(), MCDropout(0.2),
    SGMCMC(burn_in=2, thinning=1, num_samples=2), HMC(burn_in=2, num_samples=2, chains=1), SVGD(num_particles=2),
    Ensemble(members=2), Snapshot(cycles=2), SWAG(collect_every=1), Rank1(components=2), BatchEnsemble(),
    MAP(temperature="validation"), Laplace(weights=select.subnetwork(5), structure="full"),
    Laplace(prior_precision="validation"),
]  # fmt: skip


class Fuse:
    """Burns down by one in every call, in whatever copy of the network, and raises at its end."""

    def __init__(self, calls: int | None, error: type[BaseException]) -> None:
        self.calls, self.error = calls, error

    def __deepcopy__(self, memo: Any) -> Fuse:
        return self

    def burn(self) -> None:
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                raise self.error("Stop here.")


class Drawing(nn.Module):
    """A network that draws in every call, and fails in one of them."""

    def __init__(self, fails_at: int | None, error: type[BaseException]) -> None:
        super().__init__()
        self.first, self.second, self.fuse = nn.Linear(4, 5), nn.Linear(5, 3), Fuse(fails_at, error)

    def forward(self, x: Tensor) -> Tensor:
        self.fuse.burn()
        return self.second(F.dropout(self.first(x), 0.5, training=True))


class Examples(Dataset[tuple[Tensor, Tensor]]):
    """Examples that are drawn from all three libraries, and of which one fails."""

    def __init__(self, fails_at: int | None, error: type[BaseException] = RuntimeError) -> None:
        self.fuse = Fuse(fails_at, error)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.fuse.burn()
        noise = torch.rand(4) + random.random() + float(np.random.rand())  # noqa: NPY002 (what users write)
        return noise, torch.tensor(index % 3)


def states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return hash(tuple(torch.get_rng_state().tolist())), hash(random.getstate()), hash((name, *keys.tolist(), *rest))


def network(fails_at: int | None = None, error: type[BaseException] = RuntimeError) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Drawing(fails_at, error)


def check_kept(fit: Callable[[], Any], ends: tuple[type[BaseException], ...]) -> bool:
    """Whether the fit failed; in any case the generators must be where they were."""
    before, failed = states(), False
    try:
        fit()
    except ends:
        failed = True
    assert states() == before
    return failed


def options(recipe: Recipe) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    validation = torch.randn(6, 4, generator=generator), torch.arange(6) % 3
    training = None if isinstance(recipe, Laplace) else Training(epochs=2, batch_size=6)
    return {"training": training, "validation": validation, "progress": False}


DATA = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_a_fit_that_ends_well(recipe: Recipe) -> None:
    assert not check_kept(lambda: recipe.fit(network(), DATA, **options(recipe)), ())


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_a_network_that_fails(recipe: Recipe, error: type[BaseException]) -> None:
    for call in (0, 1, 2, 4, 7):
        check_kept(lambda call=call: recipe.fit(network(call, error), DATA, **options(recipe)), (Exception, error))


@pytest.mark.parametrize("recipe", [MAP(), Variational(), Ensemble(members=2), SWAG(collect_every=1)], ids=repr)
def test_data_that_fail(recipe: Recipe) -> None:
    for error in (RuntimeError, KeyboardInterrupt):
        for item in (0, 5, 13, 22, 25):
            data = Examples(item, error)
            check_kept(lambda data=data: recipe.fit(network(), data, **options(recipe)), (Exception, error))


def test_an_interrupt_while_generators_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]

    def interrupted(change: Callable[..., None], *given: Any) -> None:
        change(*given)
        count[0] -= 1
        if count[0] == 0:
            raise KeyboardInterrupt

    for name in ("_seed_generators", "_write"):
        change = getattr(randomness.Stream, name)
        monkeypatch.setattr(randomness.Stream, name, lambda *given, change=change: interrupted(change, *given))
    for number in range(1, 12):
        count[0] = number
        assert check_kept(lambda: MAP().fit(network(), DATA, **options(MAP())), (KeyboardInterrupt,))
