"""Half and mixed precision: networks may compute in it; posteriors and predictions are close to those in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito import (
    DKL,
    HMC,
    MAP,
    SGMCMC,
    SWAG,
    VBLL,
    BatchEnsemble,
    Ensemble,
    Laplace,
    MCDropout,
    Rank1,
    Training,
    Variational,
    select,
)
from dubito.core.params import call, functional_call
from dubito.curvature import Engine, jacobian
from dubito.networks.selection import Selection

pytestmark = pytest.mark.slow

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)).bfloat16().float()
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()

RECIPES: dict[str, Callable[[], Any]] = {
    "kron": Laplace,
    "diag": lambda: Laplace(structure="diag"),
    "full": lambda: Laplace(structure="full"),
    "low-rank": lambda: Laplace(structure="low-rank"),
    "last layer": lambda: Laplace(weights=select.last_layer()),
    "variational": Variational,
    "natural": lambda: Variational(optimizer="natural"),
    "swag": SWAG,
    "sgmcmc": lambda: SGMCMC("sghmc", num_samples=4, burn_in=4, thinning=2, chains=2),
    "sgmcmc of the last layer": lambda: SGMCMC(
        "sgld", num_samples=4, burn_in=4, thinning=2, weights=select.last_layer()
    ),
    "hmc": lambda: HMC(num_samples=2, burn_in=2, chains=1, num_steps=2, method="hmc"),
    "rank1": lambda: Rank1(components=2),
    "batch ensemble": BatchEnsemble,
    "last layer of VBLL": VBLL,
    "deep kernel": lambda: DKL(inducing=4),
    "ensemble": lambda: Ensemble(2),
    "dropout": MCDropout,
    "map": MAP,
}


class Casting(nn.Module):
    """A network that asks for autocast itself."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.network(x)


class Adapted(nn.Module):
    """A frozen base in bfloat16 with a trainable low-rank part in float32, as peft makes it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 6).to(dtype), nn.Linear(6, 3).to(dtype)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        below = self.base(x.to(self.base.weight.dtype))
        return self.head(torch.tanh(below + self.up(self.down(x.to(self.down.weight.dtype))).to(below.dtype)))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3))


def fitted(name: str, model: nn.Module, around: AbstractContextManager[Any] | None = None, x: Tensor = X) -> Tensor:
    recipe = RECIPES[name]()
    settings = {} if isinstance(recipe, Laplace | SGMCMC | HMC) else {"training": Training(epochs=4, batch_size=12)}
    with around or nullcontext():
        posterior = recipe.fit(model, (x, Y), progress=False, generator=torch.Generator().manual_seed(0), **settings)
        prediction = posterior.predict(x)
    assert prediction.probs.dtype == torch.float32
    assert torch.allclose(prediction.entropy, prediction.aleatoric + prediction.epistemic, atol=1e-5)
    return prediction.probs


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
def test_predictions_are_close_to_those_in_single_precision(name: str) -> None:
    sampled = name in ("sgmcmc", "sgmcmc of the last layer", "hmc")  # whose paths rounding changes
    expected = fitted(name, network())
    for found in (
        fitted(name, Casting(network())),
        fitted(name, network(), autocast()),
        fitted(name, network().bfloat16(), x=X.bfloat16()),
    ):
        assert sampled or float((found - expected).abs().max()) < 0.05


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("rank1", "batch ensemble", "dropout")])
def test_adapters_in_single_precision_on_a_base_in_half_precision(name: str) -> None:
    torch.manual_seed(1)
    model = Adapted(torch.bfloat16)
    other = copy.deepcopy(model).float()
    found, expected = fitted(name, model), fitted(name, other)
    if name not in ("sgmcmc", "sgmcmc of the last layer", "hmc", "ensemble"):
        assert float((found - expected).abs().max()) < 0.05


def test_jacobians_of_mixed_precision_are_those_of_the_values() -> None:
    torch.manual_seed(1)
    model = Adapted(torch.bfloat16)
    other = copy.deepcopy(model).double()
    found = []
    for each, x in ((model, X), (other, X.double())):
        selection = Selection.all_of(each)
        engine = Engine(each, selection.names)
        tape = engine.run(x)
        columns = torch.eye(3, dtype=tape.outputs.dtype)[:, None].expand(3, len(x), 3)
        found.append(jacobian(tape.pull(columns), selection).double())
        assert engine.fallback == []
    assert found[0].shape == found[1].shape
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.01


def test_autocast_holds_for_the_network_and_for_nothing_else() -> None:
    seen = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            seen.append(found.dtype)
            return found

    with autocast():
        posterior = Laplace(structure="full").fit(Looking(4, 3), (X, Y), progress=False)
        assert (X @ X.mT).dtype == torch.bfloat16  # it is on again
        (part,) = posterior.predict_batches(X)
        assert (X @ X.mT).dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}
    assert part.probs.dtype == torch.float32


def test_outputs_and_swapped_weights() -> None:
    model = nn.Linear(4, 3).bfloat16()
    assert call(model, X.bfloat16()).dtype == torch.float32
    finer = {name: value.detach().float() for name, value in model.named_parameters()}
    torch.testing.assert_close(functional_call(model, finer, X.bfloat16()), call(model, X.bfloat16()))


def test_targets_of_a_half_precision_regression_keep_their_digits() -> None:
    target = 100 + torch.arange(24.0)[:, None] / 100
    posterior = Laplace(structure="full").fit(
        nn.Linear(4, 1).bfloat16(), (X, target), likelihood="gaussian", progress=False
    )
    assert posterior.predict(X).mean.dtype == torch.float32
