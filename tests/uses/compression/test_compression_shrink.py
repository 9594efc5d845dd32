"""Removing units: the smaller network is the masked one, and what cannot be removed is said."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from compression_cases import CHAINS, GRAPHS, build, needs_graph, point
from dubito.compression import compress
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn

import dubito
from dubito import rules
from dubito.uses.compression.shrink import largest_difference, require_same, shrink, silenced
from dubito.uses.compression.units_by_fx import trace
from dubito.uses.compression.units_by_torch_pruning import depend


@pytest.mark.parametrize("kind", [*CHAINS, *GRAPHS])
@pytest.mark.parametrize("target", [0.3, 0.7])
def test_masked_is_shrunk(kind: str, target: float) -> None:
    needs_graph(kind)
    model, x = build(kind)
    before = copy.deepcopy(model.state_dict())
    made = compress(point(model), rules.Random(target, scope="layer"), structure="units", example=x)
    # not equal to the last bit: in torch 2.6 a call of InstanceNorm in evaluation mode rounds its running variance
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=1e-14, atol=0.0)
    smaller, whole = (sum(p.numel() for p in m.parameters()) for m in (made.model, model))
    assert smaller < whole
    groups = trace(model, x)
    groups = depend(model, x) if groups is None else groups
    kept = {name: mask for name, mask in made.plan.units.items() if name in {group.name for group in groups}}
    quiet = silenced(model, groups, kept, x)[0]
    fresh = torch.randn(50, *x.shape[1:], dtype=x.dtype)
    assert largest_difference(quiet, made.model, fresh) < 1e-12  # in float64; 1e-5 is what users are promised


@pytest.mark.parametrize("kind", list(CHAINS))
def test_every_inner_layer_of_a_chain_is_a_group(kind: str) -> None:
    model, x = build(kind)
    groups = trace(model, x)
    assert groups is not None
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)]
    assert [group.name for group in groups] == layers[:-1]
    assert [group.consumers[0].layer for group in groups] == layers[1:]


@pytest.mark.parametrize("kind", ["mlp", "lenet", "circular", "functional", "sequence"])
def test_only_the_rows_are_masked_where_constants_can_be_folded(kind: str) -> None:
    """The smaller network equals plain masking of the incoming weights: relu(bias) of a removed unit is not lost."""
    model, x = build(kind)
    made = compress(point(model), rules.Magnitude(0.5, scope="layer"), structure="units", example=x)
    masked = copy.deepcopy(model)
    with torch.no_grad():
        for name, stays in made.plan.units.items():
            masked.get_submodule(name).weight[~stays] = 0.0
    assert largest_difference(masked, made.model, torch.randn_like(x)) < 1e-12


def test_the_bias_of_a_removed_unit_is_folded_by_hand() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [0.1]]))
        model[0].bias.copy_(torch.tensor([0.0, 3.0]))
        model[2].weight.copy_(torch.tensor([[1.0, 2.0]]))
    made = compress(point(model), rules.Magnitude(0.5, reduce="max"), structure="units", example=torch.ones(2, 1))
    assert made.model[0].weight.tolist() == [[1.0]]
    assert made.model[2].bias.tolist() == [6.0]


def test_flatten_removes_every_position_of_a_channel() -> None:
    model, x = build("lenet")
    made = compress(point(model), rules.Magnitude({"3": 0.5}), structure="units", example=x)
    assert made.model[3].out_channels == 4
    assert made.model[6].in_features == 16


def test_skip_connections_lose_the_same_units_everywhere() -> None:
    needs_graph("skip")
    model, x = build("skip")
    made = compress(point(model), rules.Random(0.5, scope="layer"), structure="units", example=x)
    assert made.model.first.out_features == made.model.outer.out_features == made.model.head.in_features < 8


def test_residual_and_transformer_models() -> None:
    needs_graph("skip")
    x = torch.randn(3, 1, 8, 8)
    made = compress(
        point(dubito.models.resnet20((1, 8, 8), 10, width=4)), rules.Magnitude(0.4, scope="layer"),
        structure="units", example=x,
    )  # fmt: skip
    assert made.plan.sparsity > 0.3
    tokens = torch.randint(1, 20, (3, 6))
    model = dubito.models.transformer(20, 3, 6)
    made = compress(point(model), rules.Magnitude(0.4, scope="layer"), structure="units", example=tokens)
    assert {"blocks.0.mlp.0", "blocks.1.mlp.0", "blocks.0.attention.query"} <= set(made.plan.units)
    torch.testing.assert_close(made.plan.masked(made.dense)(tokens), made.model(tokens), rtol=0, atol=1e-5)


def test_a_whole_layer_is_refused() -> None:
    model, x = build("mlp")
    with pytest.raises(InputError, match="would remove every unit of '0'"):
        compress(point(model), rules.Magnitude({"0": 1.0}), structure="units", example=x)
    with pytest.raises(InputError, match=r"would remove every weight of '0\.weight'"):
        compress(point(model), rules.Magnitude({"0": 1.0}))
    empty = compress(point(model), rules.Magnitude({"0": 1.0}), allow_empty=True)
    assert not empty.model[0].weight.any()


def test_a_parameter_that_is_zero_already_may_go() -> None:
    """Such as the mask token of DINOv2, or a table of biases that was never trained."""
    model, _ = build("mlp")
    model.register_parameter("token", nn.Parameter(torch.zeros(1, 1, 4)))
    made = compress(point(model), rules.Magnitude(0.3))
    assert not made.plan.keep["token"].any()
    assert made.plan.sparsity == pytest.approx(0.3, abs=0.02)


def test_nothing_to_remove() -> None:
    one = point(nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(UnsupportedError, match="No layer of this network can lose units"):
        compress(one, rules.Magnitude(0.5), structure="units", example=torch.ones(2, 4))
    with pytest.raises(InputError, match="no parameter with two or more axes"):
        compress(point(nn.BatchNorm1d(3)), rules.Magnitude(0.5))


class Awkward(nn.Module):
    """Its path depends on the data, and it does not work with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if float(h.detach().sum()) > 0 and torch.is_grad_enabled():
            raise ValueError("no way through")
        return self.second(h)


def test_a_network_that_cannot_be_traced_is_probed() -> None:
    model, x = Awkward(), torch.zeros(2, 4)
    nn.init.constant_(model.first.bias, 100.0)
    made = compress(point(model), rules.Magnitude(0.5), structure="units", example=x)
    assert made.model.get_submodule("first").out_features == 3  # type: ignore[comparison-overlap]
    with torch.no_grad():
        torch.testing.assert_close(made.plan.masked(made.dense)(x), made.model(x), rtol=0, atol=1e-5)
    assert compress(point(model), rules.Magnitude(0.5)).plan.sparsity == 0.5


def test_torch_pruning_is_asked_for_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("joined")
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(UnsupportedError, match=r"dubito\[shrink\]"):
        compress(point(model), rules.Magnitude(0.5), structure="units", example=x)


def test_a_wrong_shrink_is_noticed() -> None:
    first, second = (nn.Linear(3, 2) for _ in range(2))
    with pytest.raises(UnsupportedError, match="differs from the masked one"):
        require_same(first, second, torch.ones(1, 3))
    assert require_same(first, copy.deepcopy(first), torch.ones(1, 3)) == 0.0


def test_layers_of_which_nothing_goes_are_untouched() -> None:
    model, x = build("mlp")
    groups = trace(model, x)
    assert groups is not None
    same = shrink(silenced(model, groups, {}, x)[0], groups, {}, x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_over_channels_keep_the_width_before_them(norm: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), norm(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    groups = trace(model.eval(), torch.randn(2, 4))
    assert groups is not None
    assert [group.name for group in groups] == ["3"]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("padding", [0, 1])
def test_units_pass_through_instance_norms(affine: bool, padding: int) -> None:
    layers = nn.Conv2d(1, 6, 3), nn.InstanceNorm2d(6, affine=affine), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=padding)
    posterior, x = point(nn.Sequential(*layers)), torch.randn(3, 1, 8, 8)
    made = compress(posterior, rules.Magnitude(0.5), structure="units", example=x)
    assert made.model[1].num_features == made.model[3].in_channels == 3


class Decoder(nn.Module):
    """A skip connection between layers that only their rules describe as linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.ConvTranspose2d(1, 6, 2), nn.InstanceNorm2d(6)
        self.second, self.head = nn.ConvTranspose2d(6, 6, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.head(x + self.second(x).relu())


def test_the_graph_takes_every_layer_whose_rule_can_lose_units() -> None:
    needs_graph("skip")
    made = compress(
        point(Decoder()), rules.Magnitude(0.5, scope="layer"), structure="units", example=torch.randn(3, 1, 4, 4)
    )
    assert made.model.first.out_channels == made.model.second.out_channels == made.model.head.in_channels == 3


def test_a_layer_that_is_called_twice_is_no_chain() -> None:
    twice = nn.Linear(4, 4)
    assert trace(nn.Sequential(twice, nn.ReLU(), twice), torch.randn(2, 4)) is None
