"""Many threads ask one posterior at once: each gets what it would get alone, and the posterior stays as it is."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dubito.ensembles import BatchNormNoise, Ensemble, MCDropout
from test_posterior_contract import RECIPES, fitted, quantities
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import MAP, SGMCMC, BatchEnsemble, Laplace, Posterior, Rank1, Training, Variational, select
from dubito.fitting.recipe import Recipe

pytestmark = pytest.mark.slow

THREADS = 8


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    """Let threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Call every function in a thread of its own, all from the same moment on."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait(timeout=60)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions))


def check_threads(posterior: Posterior, inputs: list[Any], rounds: int = 2, **options: Any) -> None:
    """Compare predictions from several threads with those from one, while others save."""
    expected = [quantities(posterior.predict(x, **options)) for x in inputs]
    digest, state = posterior.digest(), torch.get_rng_state()

    def ask(x: Any) -> list[dict[str, Tensor]]:
        return [quantities(posterior.predict(x, **options)) for _ in range(rounds)]

    asked = [lambda x=x: ask(x) for x in inputs]
    *found, digests = at_once(*asked, lambda: [posterior.digest() for _ in range(3)])
    for each, wanted in zip(found, expected, strict=True):
        for prediction in each:
            assert prediction.keys() == wanted.keys()
            assert all(torch.equal(prediction[name], wanted[name]) for name in wanted)
    assert {*digests, posterior.digest()} == {digest}
    assert torch.equal(torch.get_rng_state(), state)


def batches_of(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3 + k, *shape, generator=generator) for k in range(THREADS)]


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_threads_get_what_one_thread_gets(recipe: Recipe) -> None:
    check_threads(fitted(recipe, "classification").posterior, batches_of(4))


@pytest.mark.parametrize("recipe", [Laplace(), Variational(), Rank1(), Ensemble(members=2)], ids=repr)
def test_threads_get_the_same_numbers_in_regression(recipe: Recipe) -> None:
    check_threads(fitted(recipe, "regression").posterior, batches_of(4))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (Variational(), {"method": "local"}),
        (Variational(), {"method": "mean"}),
        (Laplace(), {"method": "weights"}),
        (Laplace(), {"link": "mc"}),
        (MCDropout(0.5), {"method": "mean"}),
    ],
    ids=repr,
)
def test_every_way_to_predict_may_be_used_by_threads(recipe: Recipe, options: dict[str, Any]) -> None:
    check_threads(fitted(recipe, "classification").posterior, batches_of(4), **options)


class Attentive(nn.Module):
    """An encoder layer, of which torch has a fast path that reads weights instead of calling layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Drawing(nn.Module):
    """A network that drops in evaluation mode too, by torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x.mean(1)), 0.5, training=True)
        return self.second(hidden + 0.1 * torch.randn_like(hidden))


class Libraries(nn.Module):
    """A network that draws from numpy and `random`, and keeps a result of its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.first(x.mean(1)) + random.random() + float(np.random.standard_normal())  # noqa: NPY002
        return self.second(self.last)


class Counting(nn.Module):
    """A network that writes into one of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x.mean(1))


def hooked() -> nn.Module:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(40, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=False), nn.Linear(6, 3))
    layers[1].register_forward_hook(lambda module, given, output: 2 * output)
    return layers


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attentive, "lstm": Recurrent, "hooks and BatchNorm": hooked, "draws by itself": Drawing,
}  # fmt: skip


def fit(recipe: Recipe, model: nn.Module) -> Posterior:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(24, 5, 8, generator=generator), torch.arange(24) % 3
    return recipe.fit(model, data, training=Training(epochs=1, batch_size=12), progress=False)


def made(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[kind]()


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize(
    "recipe",
    [
        MAP(),
        Variational(),
        MCDropout(0.3),
        Laplace(structure="diag", weights=select.last_layer(), prior_precision=1.0),
        BatchEnsemble(),
        SGMCMC(burn_in=1, thinning=1, num_samples=4),
        BatchNormNoise(num_samples=4),
    ],
    ids=repr,
)
def test_threads_on_networks_of_all_kinds(kind: str, recipe: Recipe) -> None:
    if isinstance(recipe, BatchNormNoise) and "BatchNorm" not in kind:
        pytest.skip("has no BatchNorm layer")
    check_threads(fit(recipe, made(kind)), batches_of(5, 8), rounds=1)


@pytest.mark.parametrize("kind", NETWORKS)
def test_noise_on_outputs_may_be_drawn_by_threads(kind: str) -> None:
    check_threads(fit(Variational(), made(kind)), batches_of(5, 8), method="local")
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    "recipe", [Variational(), Laplace(prior_precision=1.0), SGMCMC(burn_in=1, thinning=1, num_samples=4)], ids=repr
)
def test_a_network_that_draws_from_numpy_and_random(recipe: Recipe) -> None:
    model, states = Libraries(), (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    posterior = fit(recipe, model)
    check_threads(posterior, batches_of(5, 8), rounds=1)
    assert states == (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    random.random()
    assert fit(recipe, model).digest() == posterior.digest()


def test_a_network_that_writes_into_its_buffers_does_not_change_the_posterior() -> None:
    posterior = fit(MAP(), Counting())
    check_threads(posterior, batches_of(5, 8))
    calls = float(posterior.model.calls)
    posterior.predict(batches_of(5, 8)[0])
    assert float(posterior.model.calls) == calls


def test_threads_may_predict_on_loaders() -> None:
    posterior = fitted(Variational(), "classification").posterior
    loaders = [DataLoader(TensorDataset(x, x[:, 0]), batch_size=2, shuffle=k % 2 == 0)
               for k, x in enumerate(batches_of(4))]  # fmt: skip
    check_threads(posterior, loaders)


def test_threads_share_what_is_computed_once_and_the_weights() -> None:
    posterior = fit(Laplace(prior_precision=1.0), made("hooks and BatchNorm"))
    found = at_once(*[lambda: posterior.covariance] * THREADS)
    assert all(each is found[0] for each in found)
    with posterior.working_copy() as one, posterior.working_copy() as other:
        assert one.model is not other.model
        assert one.covariance is found[0]
        first, second = next(one.model.parameters()), next(other.model.parameters())
        assert first.data_ptr() == second.data_ptr() == next(posterior.model.parameters()).data_ptr()


def test_a_posterior_is_saved_whole_while_others_predict(tmp_path: Path) -> None:
    posterior = fitted(Variational(), "classification").posterior
    model = fitted(Variational(), "classification").model
    x, path = batches_of(4)[0], tmp_path / "posterior.safetensors"
    at_once(*[lambda: [posterior.predict(x) for _ in range(4)]] * 4, lambda: [posterior.save(path) for _ in range(4)])
    assert dubito.load(path, model).digest() == posterior.digest()


def test_a_failed_prediction_leaves_nothing_behind() -> None:
    posterior = fitted(Variational(), "classification").posterior
    x = batches_of(4)[0]
    expected = quantities(posterior.predict(x))
    with pytest.raises(dubito.errors.InputError):
        posterior.predict(x[:, :2])
    found = quantities(posterior.predict(x))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
