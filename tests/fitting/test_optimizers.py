"""Our optimizers take the steps of `torch.optim`, and their state can be written down at any step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito import Training
from dubito.core import io
from dubito.fitting.optimizers import Optimizer


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def peer(model: nn.Module, training: Training, groups: list[dict[str, Any]] | None = None) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
    chosen: Any = groups or model.parameters()
    if training.optimizer == "adam":
        return torch.optim.Adam(chosen, foreach=False, **settings)
    if training.optimizer == "adamw":
        return torch.optim.AdamW(chosen, foreach=False, **settings)
    nesterov = training.momentum > 0
    return torch.optim.SGD(chosen, momentum=training.momentum, nesterov=nesterov, foreach=False, **settings)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
    loss = (model(x) - y[:, :3] * 5).square().sum()
    names, values = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, values), strict=True))


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.1, 1e6])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam"},
        {"optimizer": "adamw"},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.0},
    ],
    ids=str,
)
def test_step_by_step_as_torch(settings: dict[str, Any], weight_decay: float, clip: float | None) -> None:
    training = Training(lr=0.05, weight_decay=weight_decay, clip=clip, **settings)
    ours = network()
    theirs = copy.deepcopy(ours)
    optimizer, reference = Optimizer(training, [n for n, _ in ours.named_parameters()]), peer(theirs, training)
    state = optimizer.init(dict(ours.named_parameters()))
    for step in range(12):
        lr = 0.05 / (1 + step)
        optimizer.step(dict(ours.named_parameters()), gradients(ours, step), state, lr)
        slopes = gradients(theirs, step)
        for name, value in theirs.named_parameters():
            value.grad = slopes[name]
        if clip is not None:
            norm = torch.cat([p.grad.flatten() for p in theirs.parameters() if p.grad is not None]).norm()
            for value in theirs.parameters():
                assert value.grad is not None
                value.grad *= min(1.0, clip / float(norm))
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        assert_same(ours, theirs)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_factors_of_the_rate_and_decay_by_name(optimizer: Any) -> None:
    training = Training(lr=0.05, weight_decay=0.1, optimizer=optimizer)
    ours = network()
    theirs = copy.deepcopy(ours)
    rates, decay = {"0.weight": 0.1, "2.bias": 0.0}, {"0.bias": 0.0, "0.weight": 0.7}
    groups = [
        {"params": [p], "lr": 0.05 * rates.get(n, 1.0), "weight_decay": decay.get(n, 0.1)}
        for n, p in theirs.named_parameters()
    ]
    names = [n for n, _ in ours.named_parameters()]
    own, reference = Optimizer(training, names, weight_decay=decay, rates=rates), peer(theirs, training, groups)
    state = own.init(dict(ours.named_parameters()))
    before = ours[2].bias.detach().clone()
    for step in range(6):
        own.step(dict(ours.named_parameters()), gradients(ours, step), state, 0.05)
        slopes = gradients(theirs, step)
        for name, value in theirs.named_parameters():
            value.grad = slopes[name]
        reference.step()
        assert_same(ours, theirs)
    assert torch.equal(ours[2].bias, before)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_a_gradient_in_another_memory_layout(optimizer: Any) -> None:
    """The fused kernels walk parameter and gradient as flat arrays: a transposed gradient must be laid out first."""
    training = Training(lr=0.1, optimizer=optimizer)
    start, slope = torch.zeros(3, 5, dtype=torch.float64), torch.arange(15.0).double().reshape(5, 3)
    results = []
    for gradient in (slope.t(), slope.t().contiguous()):
        weight = {"w": start.clone()}
        own = Optimizer(training, ["w"])
        state = own.init(weight)
        for _ in range(3):
            own.step(weight, {"w": gradient}, state, 0.1)
        results.append(weight["w"])
    assert torch.equal(*results)
    assert results[0].abs().sum() > 0


def test_a_parameter_in_another_memory_layout() -> None:
    training = Training(optimizer="adam")
    values = torch.arange(48.0).reshape(2, 3, 2, 4)
    weights = [{"w": values.clone()}, {"w": values.clone().to(memory_format=torch.channels_last)}]
    for weight in weights:
        own = Optimizer(training, ["w"])
        own.step(weight, {"w": values.sin()}, own.init(weight), 0.1)
    assert torch.equal(weights[0]["w"], weights[1]["w"])


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_gradients_stay_as_they_are(optimizer: Any, clip: float | None) -> None:
    """Autograd may give the same tensor as the gradient of two weights."""
    own = Optimizer(Training(optimizer=optimizer, clip=clip, weight_decay=0.1), ["a", "b"])
    slope = torch.arange(3.0)
    weights = {"a": torch.ones(3), "b": torch.ones(3)}
    state = own.init(weights)
    for _ in range(2):
        own.step(weights, {"a": slope, "b": slope}, state, 0.1)
    assert slope.tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(weights["a"], weights["b"])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_gradients_that_share_memory_are_clipped_once(optimizer: Any) -> None:
    a, b = (torch.zeros(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    slopes = torch.autograd.grad((a + b).sum() * 10, (a, b))  # one expanded tensor, twice
    assert slopes[0].data_ptr() == slopes[1].data_ptr()
    results = []
    for given in (slopes, [slope.clone() for slope in slopes]):
        own = Optimizer(Training(optimizer=optimizer, clip=1.0, momentum=0.0), ["a", "b"])
        weights = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}
        own.step(weights, dict(zip("ab", given, strict=True)), own.init(weights), 0.1)
        results.append(torch.stack(list(weights.values())))
    assert torch.equal(*results)
    assert slopes[0].tolist() == [10.0, 10.0, 10.0]
    if optimizer == "sgd":
        torch.testing.assert_close(results[0], torch.full((2, 3), -0.1 / 6**0.5, dtype=torch.float64))


def test_nothing_moves_where_every_gradient_is_zero() -> None:
    own = Optimizer(Training(clip=1.0), ["w"])
    weights = {"w": torch.ones(2)}
    own.step(weights, {"w": torch.zeros(2)}, own.init(weights), 0.1)
    assert weights["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_a_state_that_was_written_down_goes_on_exactly(optimizer: Any, tmp_path: Any) -> None:
    training = Training(lr=0.05, optimizer=optimizer, weight_decay=0.1, clip=0.5)
    model = network()
    own = Optimizer(training, [n for n, _ in model.named_parameters()])
    state = own.init(dict(model.named_parameters()))
    for step in range(3):
        own.step(dict(model.named_parameters()), gradients(model, step), state, 0.05)
    io.save(tmp_path / "state", "optimizer", state)
    other = copy.deepcopy(model)
    fresh = own.init(dict(other.named_parameters()))
    again = io.copy_into(fresh, io.load(tmp_path / "state", "optimizer"))
    for step in range(3, 6):
        own.step(dict(model.named_parameters()), gradients(model, step), state, 0.05)
        own.step(dict(other.named_parameters()), gradients(other, step), again, 0.05)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_mixed_precision_in_one_network() -> None:
    weights = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.float64)}
    grads = {name: value.clone() for name, value in weights.items()}
    for optimizer in ("adam", "sgd"):
        own = Optimizer(Training(optimizer=optimizer, clip=1.0), ["a", "b"])  # type: ignore[arg-type]
        own.step(weights, grads, own.init(weights), 0.1)
    assert weights["a"].dtype == torch.float32
    torch.testing.assert_close(weights["a"].double(), weights["b"], rtol=1e-6, atol=1e-6)
