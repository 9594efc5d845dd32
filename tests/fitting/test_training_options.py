"""Mixed precision, accumulation, compilation and logs of the fit loop."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito import MAP, SWAG, Ensemble, Rank1, Training, Variational, loggers
from dubito.core.errors import InputError, UnsupportedError

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
STEPS = {"epochs": 3, "batch_size": 10, "lr": 0.02}


class Network(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.seen: list[tuple[int, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if torch.is_grad_enabled():
            self.seen.append((len(x), found.dtype))
        return found


def fitted(recipe: Any, training: Training, **options: Any) -> Any:
    return recipe.fit(
        Network(), (X, Y), training=training, progress=False, generator=torch.Generator().manual_seed(0), **options
    )


@pytest.mark.parametrize("recipe", [MAP(), MAP(prior_precision=1.0), SWAG(collect_every=2), Ensemble(2)], ids=repr)
def test_the_gradient_of_a_batch_is_the_sum_over_its_parts(recipe: Any) -> None:
    whole, parts = (fitted(recipe, Training(accumulate=count, **STEPS)).predict(X).probs for count in (1, 4))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_parts_are_small() -> None:
    seen = fitted(MAP(), Training(accumulate=4, **STEPS)).model.seen
    assert {rows for rows, _ in seen} == {3, 1}


@pytest.mark.parametrize("recipe", [Variational(), Variational(optimizer="natural"), Rank1(components=2)], ids=repr)
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"precision": "bf16"}], ids=repr)
def test_random_weights(recipe: Any, options: dict[str, Any]) -> None:
    plain, found = (fitted(recipe, Training(**STEPS, **more)).predict(X).probs for more in ({}, options))
    assert float((plain - found).abs().max()) < 0.1


def test_half_precision_holds_for_the_network_in_training_steps() -> None:
    posterior = fitted(MAP(), Training(precision="bf16", **STEPS))
    assert {dtype for _, dtype in posterior.model.seen} == {torch.bfloat16}
    assert {value.dtype for value in posterior.model.parameters()} == {torch.float32}
    plain = fitted(MAP(), Training(**STEPS)).predict(X).probs
    assert 0 < float((posterior.predict(X).probs - plain).abs().max()) < 0.02


@pytest.mark.slow
def test_a_compiled_network() -> None:
    plain, found = (fitted(MAP(), Training(compile=how, **STEPS)) for how in (False, "eager"))
    torch.testing.assert_close(found.predict(X).probs, plain.predict(X).probs)
    with pytest.raises(UnsupportedError, match="train the network itself"):
        fitted(Variational(), Training(compile=True, **STEPS))
    with pytest.raises(InputError, match=r"torch.compile knows the backends"):
        fitted(MAP(), Training(compile="quickly", **STEPS))


def test_the_numbers_of_every_step_and_epoch() -> None:
    found: list[dict[str, float]] = []
    training = Training(log=found.append, **STEPS)
    posterior = fitted(MAP(), training, validation=(X, Y))
    assert posterior.digest() == fitted(MAP(), training.replace(log=None), validation=(X, Y)).digest()
    steps = [each for each in found if "loss" in each]
    assert [(each["epoch"], each["batch"]) for each in steps] == [(e, b) for e in range(3) for b in range(3)]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [each["epoch"] for each in found if "validation" in each] == [0, 1, 2]
    assert training.identity() == Training(**STEPS).identity()
    with pytest.raises(InputError, match="`log` must be a callable"):
        Training(log=3)


def test_ready_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    written = lambda values, step: seen.append((*values.items(), step))  # noqa: E731
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_metrics=written))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    run = SimpleNamespace(log=written, step=5)
    for log in (loggers.mlflow(), loggers.wandb(run)):
        for batch in range(2):
            log({"epoch": 0, "batch": batch, "loss": 0.5})
    assert seen == [(("loss", 0.5), step) for step in (1, 2, 6, 7)]
    with pytest.raises(InputError, match=r"call wandb.init\(\) first"):
        loggers.wandb()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UnsupportedError, match="needs the package tensorboard"):
        loggers.tensorboard()
