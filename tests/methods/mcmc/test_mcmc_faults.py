"""What a sampler says where it cannot go on or has not moved, and what it does not do: pass through frozen layers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from dubito.errors import NonFiniteError
from mcmc_cases import classes, network
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dubito import HMC, SGMCMC, SVGD, Training, select

SHORT = {"burn_in": 10, "thinning": 2, "num_samples": 12}


def fit(recipe: Any, model: nn.Module, data: Any = None) -> Any:
    training = Training(batch_size=20, epochs=2)
    return recipe.fit(model, classes() if data is None else data, training=training, progress=False)


class RootAtZero(nn.Linear):
    """The loss is finite; its gradient is 0 · ∞."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs + (0 * outputs).sqrt()


@pytest.mark.parametrize(("recipe", "words"), [
    (SGMCMC(**SHORT), "^The gradient at the start is not finite: check the network for a square root"),
    (SGMCMC(step_size=0.1, chains=2, **SHORT), "^Chain 1 of 2 stopped in step 1 of 34: the loss is finite but its"),
    (HMC(), "^Chain 1 of 2 cannot start its transition 1: the gradient of the potential there is not finite"),
    (SVGD(3), r"^The potential became [\d.]+ with a gradient that is not finite in epoch 1, batch 1: "),
], ids=["auto", "step", "hmc", "svgd"])  # fmt: skip
def test_a_gradient_that_is_no_number(recipe: Any, words: str) -> None:
    with pytest.raises(NonFiniteError, match=words):
        fit(recipe, RootAtZero(4, 3).double())


class Failing(nn.Linear):
    """Gives NaN from some call on."""

    calls, last = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (torch.nan if self.calls > self.last else 1.0)


def test_hmc_hands_out_the_samples_from_before() -> None:
    model = Failing(4, 3).double()
    model.last = 300
    recipe = HMC(burn_in=5, num_samples=200, chains=2, max_depth=3)
    with pytest.raises(NonFiniteError, match=r"the potential there is not finite; .* error's `.posterior`") as caught:
        fit(recipe, model)
    kept: Any = caught.value.posterior
    transition = int(str(caught.value).split("transition ")[1].split(":")[0])
    assert kept.samples.shape[:2] == (2, transition - 1 - 5)
    assert bool(kept.flat.isfinite().all())


def test_chains_that_stand_still_are_not_trusted() -> None:
    posterior = fit(HMC("hmc", adapt=False, step_size=1e4, burn_in=0, num_samples=20, num_steps=2), network())
    verdict = posterior.diagnose()
    assert verdict.divergent == 1.0
    assert not verdict.trustworthy
    assert "100% of the transitions diverged" in str(verdict)
    assert "the chains have not moved" in str(verdict)
    assert "too few" not in str(verdict)


class Wall(torch.autograd.Function):
    """What gradients must not pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("a gradient went further back than the first random layer")


class Walled(nn.Module):
    """A layer in front of all random ones."""

    calls: ClassVar[list[int]] = []  # of all copies

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return Wall.apply(self.layer(x))


@pytest.mark.parametrize("recipe", [SGMCMC(**SHORT), HMC(burn_in=5, num_samples=5, max_depth=3), SVGD(5)], ids=repr)
@pytest.mark.parametrize("rule", [select.last_layer(), select.layers("2.weight"), ~select.layers("0")], ids=repr)
@pytest.mark.parametrize("kind", ["tensors", "loader"])
def test_gradients_stop_at_the_first_random_layer(recipe: Any, rule: Any, kind: str) -> None:
    model, data = nn.Sequential(Walled(), *network()[1:]), classes()
    with pytest.raises(AssertionError, match="further back"):
        fit(SGMCMC(**SHORT), model)  # the wall is there
    given = data if kind == "tensors" else DataLoader(TensorDataset(*data), batch_size=20)
    fit(recipe.replace(weights=rule), model, given)


def test_what_comes_before_is_run_once() -> None:
    """As often as it takes to try it, to cache it and to trace the samples, however many steps there are."""
    counts = []
    for thinning in (1, 20):
        Walled.calls.clear()
        recipe = SGMCMC(weights=select.last_layer(), burn_in=10, thinning=thinning, num_samples=5)
        fit(recipe, nn.Sequential(Walled(), *network()[1:]))
        counts.append(len(Walled.calls))
    assert counts[0] == counts[1] < 40
