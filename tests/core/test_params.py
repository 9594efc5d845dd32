"""The algebra of parameter sets, and calling a network with other weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn

from dubito.core import params


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.norm(self.encode(x)))


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied().double().eval()


def test_parameters_are_copies_and_tied_ones_appear_once(model: Tied) -> None:
    weights = params.of(model)
    assert list(weights) == ["encode.weight", "norm.weight", "norm.bias"]
    assert not any(value.requires_grad for value in weights.values())
    weights["encode.weight"].zero_()
    assert model.encode.weight.abs().min() > 0
    assert params.num_weights(weights) == 9 + 3 + 3


def test_buffers_are_copies(model: Tied) -> None:
    buffers = params.buffers_of(model)
    assert list(buffers) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    buffers["norm.running_var"].zero_()
    assert torch.equal(model.norm.running_var, torch.ones(3, dtype=torch.float64))


def test_trainable_leaves_out_what_is_frozen(model: Tied) -> None:
    model.norm.weight.requires_grad_(False)
    assert params.trainable(model) == ["encode.weight", "norm.bias"]


class TestLoad:
    def test_values_are_copied_in(self, model: Tied) -> None:
        weights = {name: torch.randn_like(value) for name, value in params.of(model).items()}
        buffers = {"norm.running_mean": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
        assert params.load_(model, weights, buffers) is model
        for name, value in params.of(model).items():
            assert torch.equal(value, weights[name])
        assert model.decode.weight is model.encode.weight
        assert torch.equal(model.norm.running_mean, buffers["norm.running_mean"])

    def test_what_was_not_named_stays(self, model: Tied) -> None:
        before = params.of(model)
        params.load_(model, {"norm.bias": torch.ones(3)})
        assert torch.equal(model.encode.weight, before["encode.weight"])

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("norm.bias", (1,), r"'norm.bias' has shape \(1,\) here but is \(3,\) in the model"),
            ("nothing", (1,), r"'nothing' has shape \(1,\) here but is absent in the model"),
        ],
    )
    def test_no_silent_broadcast(self, model: Tied, name: str, shape: tuple[int, ...], message: str) -> None:
        with pytest.raises(InputError, match=message):
            params.load_(model, {name: torch.zeros(shape)})


class Flexible(nn.Module):
    def __init__(self, wrap: Any = lambda y: y) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.wrap = wrap

    def forward(self, a: Tensor, b: Tensor | float = 0.0) -> Any:
        return self.wrap(self.scale * a + b)


class TestCall:
    @pytest.mark.parametrize(
        ("inputs", "value"),
        [
            (torch.tensor(3.0), 6.0),
            ((torch.tensor(3.0), torch.tensor(1.0)), 7.0),
            ([torch.tensor(3.0), torch.tensor(1.0)], 7.0),
            ({"b": torch.tensor(1.0), "a": torch.tensor(3.0)}, 7.0),
        ],
    )
    def test_tuples_are_spread_and_mappings_named(self, inputs: Any, value: float) -> None:
        assert params.call(Flexible(), inputs).item() == value

    @pytest.mark.parametrize(
        "wrap", [lambda y: {"logits": y, "out": None}, lambda y: {"out": y}, lambda y: SimpleNamespace(logits=y)]
    )
    def test_outputs_with_logits(self, wrap: Any) -> None:
        assert params.call(Flexible(wrap), torch.tensor(3.0)).item() == 6.0

    @pytest.mark.parametrize("wrap", [lambda y: (y, y), lambda y: {"aux": y}, lambda y: y.item()])
    def test_anything_else_is_refused(self, wrap: Any) -> None:
        with pytest.raises(InputError, match=r"must return a tensor or have `\.logits`"):
            params.call(Flexible(wrap), torch.tensor(3.0))


class TestFunctionalCall:
    def test_equals_a_network_that_holds_the_weights(self, model: Tied) -> None:
        x = torch.randn(4, 3, dtype=torch.float64)
        weights = {name: torch.randn_like(value) for name, value in params.of(model).items()}
        before = params.of(model)
        outputs = params.functional_call(model, weights, x)
        for name, value in params.of(model).items():
            assert torch.equal(value, before[name])
        params.load_(model, weights)
        assert torch.equal(outputs, model(x))

    def test_gradients_flow_to_the_lent_weights(self, model: Tied) -> None:
        x = torch.randn(4, 3, dtype=torch.float64)
        leaf = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
        params.functional_call(model, {"encode.weight": 2 * leaf}, x).sum().backward()
        lent = leaf.grad
        model.encode.weight.data.copy_(2 * leaf.detach())
        model(x).sum().backward()
        assert model.encode.weight.grad is not None
        torch.testing.assert_close(lent, 2 * model.encode.weight.grad, rtol=1e-12, atol=1e-12)

    def test_the_weights_come_back_after_an_error(self, model: Tied) -> None:
        before = model.encode.weight
        with pytest.raises(RuntimeError):
            params.functional_call(model, {"encode.weight": torch.zeros(3, 3).double()}, torch.zeros(4, 5).double())
        assert model.encode.weight is before
        assert model.decode.weight is before
        assert dict(model.named_parameters())["encode.weight"] is before


class TestAlgebra:
    a = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([[3.0]])}  # noqa: RUF012
    b = {"x": torch.tensor([10.0, 20.0]), "y": torch.tensor([[30.0]])}  # noqa: RUF012

    def test_linear_operations(self) -> None:
        assert params.add(self.a, self.b, scale=0.5)["x"].tolist() == [6.0, 12.0]
        assert params.zeros_like(self.a)["x"].tolist() == [0.0, 0.0]
        assert params.dot(self.a, self.b).item() == 10 + 40 + 90

    def test_the_inner_product_is_summed_in_double_precision(self) -> None:
        wide = {"x": torch.tensor([4096.0, 0.5, -4096.0])}
        assert params.dot(wide, {"x": torch.tensor([4096.0, 0.25, 4096.0])}).item() == 0.125

    def test_a_clone_is_detached_and_has_its_own_memory(self) -> None:
        leaf = torch.ones(2, requires_grad=True)
        copied = params.clone({"x": leaf})["x"]
        copied += 1
        assert not copied.requires_grad
        assert leaf.tolist() == [1.0, 1.0]

    def test_stack_and_unstack(self) -> None:
        stacked = params.stack([self.a, self.b])
        assert stacked["x"].shape == (2, 2)
        assert stacked["y"].shape == (2, 1, 1)
        for one, again in zip([self.a, self.b], params.unstack(stacked), strict=True):
            assert all(torch.equal(one[name], again[name]) for name in one)

    def test_sets_that_do_not_fit(self) -> None:
        with pytest.raises(InputError, match="differ in their names: y, z"):
            params.add(self.a, {"x": self.a["x"], "z": self.a["y"]})
        with pytest.raises(InputError, match=r"'y' has shape \(1, 1\) in one set and \(2,\) in another"):
            params.dot(self.a, {"x": self.a["x"], "y": self.a["x"]})


def test_a_module_with_several_names_gets_its_own_weights_back() -> None:
    one = nn.Linear(2, 2)
    model = nn.Sequential(one, nn.Tanh(), one, nn.Sequential(one))
    own, x = one.weight, torch.ones(1, 2)
    before = model(x)
    other = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    assert not params.functional_call(model, other, x).any()
    assert one.weight is own
    assert torch.equal(model(x), before)
