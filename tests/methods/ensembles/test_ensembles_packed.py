"""`Packed` and `MIMO`: members against narrow networks of their own, and what cannot be packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import UnsupportedError
from torch import Tensor, nn

import dubito
from dubito import MIMO, Ensemble, Packed, Training, models
from dubito.methods.ensembles.packed import MemberNetwork, _order
from dubito.networks.packing import PackedLayer, packed, roles_of, widened
from oracles import close

QUICK = Training(epochs=2, lr=1e-2, batch_size=16)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def conv() -> nn.Module:
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, groups=2)
    norms = nn.BatchNorm2d(8), nn.GroupNorm(4, 8)
    return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.Flatten(), nn.Linear(8 * 9, 3))


def inputs(make: Callable[[], nn.Module], rows: int = 5) -> Tensor:
    return torch.randn(rows, 4) if make is mlp else torch.randn(rows, 1, 8, 8)


def narrow(network: nn.Module, member: int, members: int) -> nn.Module:
    """Build one member as a plain network of its own, layer by layer."""
    layers: list[nn.Module] = []
    for layer in network:  # type: ignore[attr-defined]
        if isinstance(layer, PackedLayer):
            outputs, fan_in, *kernel = layer.weight.shape[1:]
            if layer.kind is nn.Linear:
                plain: Any = nn.Linear(fan_in, outputs)
            else:
                plain = layer.kind(fan_in * layer.groups, outputs, kernel, groups=layer.groups, **layer.options)
            plain.weight.data, plain.bias.data = layer.weight[member].data, layer.bias[member].data  # type: ignore
        elif hasattr(layer, "members"):
            plain = nn.LayerNorm(layer.weight.shape[1])
            plain.weight.data, plain.bias.data = layer.weight[member].data, layer.bias[member].data
        elif isinstance(layer, nn.GroupNorm):
            plain = nn.GroupNorm(layer.num_groups // members, layer.num_channels // members)
        elif isinstance(layer, nn.BatchNorm2d):
            plain = nn.BatchNorm2d(layer.num_features // members)
        else:
            plain = layer
        layers.append(plain)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("make", [mlp, conv])
@pytest.mark.parametrize(("members", "alpha"), [(2, 2.0), (4, 2.0), (2, 1.0), (1, 1.0)])
def test_every_member_is_a_narrow_network(make: Callable[[], nn.Module], members: int, alpha: float) -> None:
    torch.manual_seed(0)
    x = inputs(make)
    network, _ = packed(make(), x, members, alpha)
    together = MemberNetwork(network, members, [], joins=False).train()
    found = together.members(x)
    alone = torch.stack([narrow(network, m, members).train()(x) for m in range(members)])
    close(found, alone, 1e-5)
    close(together(x), alone.mean(0), 1e-5)
    assert network[0].weight.shape[1] == round(alpha * 8 / members)  # type: ignore[index, union-attr]
    weight = network[0].weight[0].detach()  # type: ignore[index, union-attr]
    assert 0 < float(weight.abs().max()) <= weight[0].numel() ** -0.5  # torch's initialization for this width


def test_packed_networks_have_about_alpha_squared_over_members_of_the_weights() -> None:
    model = models.mlp(64, 10, hidden=(256, 256))
    network, _ = packed(model, torch.randn(2, 64), 4, 2.0)
    hidden = network[3].weight.numel() / model[3].weight.numel()  # type: ignore[index, union-attr]
    assert hidden == pytest.approx(2.0**2 / 4)


@pytest.mark.parametrize("make", [mlp, conv])
def test_mimo_with_equal_parts_for_every_input_is_the_network(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), inputs(make)
    wide = widened(model, x, roles_of(model, x), 3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            other = wide.get_parameter(name)
            ratios = [own // old for own, old in zip(other.shape, value.shape, strict=True)]
            is_first = len(ratios) > 1 and ratios[1] == 3
            other.copy_(value.repeat(*ratios) / (3 if is_first else 1))
    found = MemberNetwork(wide, 3, [], joins=True).eval().members(x)
    for member in found:
        close(member, model(x), 1e-5)


def test_orders_keep_the_rows_that_are_repeated() -> None:
    torch.manual_seed(0)
    assert torch.equal(_order(20, 1.0), torch.arange(20))
    assert torch.equal(_order(20, 0.0).sort().values, torch.arange(20))
    kept = torch.stack([_order(100, 0.5) == torch.arange(100) for _ in range(20)]).double().mean()
    assert 0.45 < float(kept) < 0.6


@pytest.mark.parametrize("recipe", [Packed(members=2), MIMO(members=2)], ids=repr)
def test_images_are_learned_saved_and_loaded(recipe: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 1, 8, 8) + 2 * (y.float() - 1)[:, None, None, None]
    posterior: Any = recipe.fit(conv(), (x, y), training=Training(epochs=15, lr=1e-2, batch_size=16))
    prediction = posterior.predict(x)
    assert float((prediction.probs.argmax(1) == y).double().mean()) > 0.9
    assert prediction.samples.shape[0] == 2
    posterior.save(tmp_path / "file")
    again: Any = dubito.load(tmp_path / "file", conv())
    assert torch.equal(again.predict(x).probs, prediction.probs)


@pytest.mark.parametrize("recipe", [Packed(members=2), MIMO(members=2)], ids=repr)
def test_functions_are_the_members_at_every_input_and_differentiable(recipe: Any) -> None:
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    posterior: Any = recipe.fit(model, (x, y), likelihood="gaussian", training=Training(epochs=2), progress=False)
    drawn = posterior.functions(3)
    assert torch.equal(drawn(x)[:2], posterior.predict(x).means)
    assert torch.equal(drawn(x)[2], drawn(x)[0])
    assert not drawn(x).requires_grad
    torch.testing.assert_close(torch.cat([drawn[1](x[:5]), drawn[1](x[5:])]), drawn(x)[1])
    inputs = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(drawn[1](inputs).sum(), inputs)
    step = torch.tensor([1e-2, 0.0, 0.0])
    torch.testing.assert_close(slope[:, :1], (drawn[1](x + step) - drawn[1](x - step)) / 2e-2, rtol=1e-2, atol=1e-3)


def test_an_ensemble_of_packed_networks_is_saved_and_loaded(tmp_path: Path) -> None:
    data = (torch.randn(40, 4), torch.arange(40) % 3)
    posterior: Any = Ensemble(2, recipe=Packed(members=2)).fit(mlp(), data, training=QUICK)
    posterior.save(tmp_path / "file")
    again: Any = dubito.load(tmp_path / "file", mlp())
    assert torch.equal(again.predict(data[0]).probs, posterior.predict(data[0]).probs)


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(4, 4), nn.Linear(4, 3), kind
        self.scale = nn.Parameter(torch.ones(4)) if kind == "scale" else None

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        if self.kind == "skip":
            z = z + x
        if self.kind == "named":
            z = z.view(-1, 4)
        if self.kind == "mixed":
            z = z.flip(-1)
        if self.kind == "softmax":
            return self.last(z).log_softmax(-1)
        return self.last(z if self.scale is None else z * self.scale)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("skip", "cannot change the width"), ("named", "names no width"), ("mixed", "mixes them"),
        ("scale", "cannot change ''"), ("softmax", "what its last layer gives"),
    ],
)  # fmt: skip
def test_networks_that_cannot_be_packed_are_refused(kind: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        Packed(members=2).fit(Odd(kind), (torch.randn(20, 4), torch.arange(20) % 3), training=QUICK)


def test_one_layer_cannot_have_several_inputs() -> None:
    with pytest.raises(UnsupportedError, match="with a hidden layer"):
        MIMO(members=2).fit(nn.Linear(4, 3), (torch.randn(20, 4), torch.arange(20) % 3), training=QUICK)
