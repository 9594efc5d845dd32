"""Which weights the rules choose."""

from __future__ import annotations

import copy

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn

import dubito
from dubito import select
from dubito.networks.selection import Selection
from dubito.select.ranking import count_of


class HeadFirst(nn.Module):
    """The layer that gives the outputs is registered first; an unused one is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.spare = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return HeadFirst()


DATA = (torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))


def test_all(model: nn.Module) -> None:
    assert select.all().resolve(model).num_weights == sum(p.numel() for p in model.parameters())
    model.spare.requires_grad_(False)
    assert set(select.all().resolve(model).names) == {
        "head.weight", "head.bias", "body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"
    }  # fmt: skip
    with pytest.raises(InputError, match="frozen"):
        select.all().resolve(model.requires_grad_(False))


def test_last_layer_is_the_last_one_called(model: nn.Module) -> None:
    before = copy.deepcopy(model.state_dict())
    for data in (DATA, [DATA], torch.utils.data.TensorDataset(*DATA), (DATA[0].double(), DATA[1])):
        assert select.last_layer().resolve(model, data).names == ["head.weight", "head.bias"]
    assert select.last_layer().resolve(model).names == ["spare.weight", "spare.bias"]  # no data: the last registered
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.head.requires_grad_(False)
    assert select.last_layer().resolve(model, DATA).names == ["body.0.weight", "body.0.bias"]  # no linear map between
    with pytest.raises(InputError, match="no trainable parameters"):
        select.last_layer().resolve(model.requires_grad_(False), DATA)


def test_last_layer_of_a_sequence_model() -> None:
    model = dubito.models.transformer(vocabulary=10, outputs=3)
    tokens = torch.randint(10, (2, 6))
    chosen = select.last_layer().resolve(model, (tokens, torch.zeros(2, dtype=torch.long)))
    weight = dict(model.named_parameters())[chosen.names[0]]
    assert weight.shape[0] == model.eval()(tokens).shape[-1]


def test_layers_by_name_pattern_and_type(model: nn.Module) -> None:
    assert select.layers("body").resolve(model).names == [
        "body.0.weight",
        "body.0.bias",
        "body.1.weight",
        "body.1.bias",
    ]
    assert select.layers("body.0").resolve(model).names == ["body.0.weight", "body.0.bias"]
    assert select.layers("*.weight").resolve(model).names == [
        "head.weight",
        "body.0.weight",
        "body.1.weight",
        "spare.weight",
    ]
    assert select.layers(nn.BatchNorm1d).resolve(model).names == ["body.1.weight", "body.1.bias"]
    both = select.layers(("head", nn.BatchNorm1d)).resolve(model)
    assert both.names == ["head.weight", "head.bias", "body.1.weight", "body.1.bias"]
    with pytest.raises(InputError, match=r"No trainable parameter matches 'bod': the model has head.weight"):
        select.layers("bod").resolve(model)


def test_masks(model: nn.Module) -> None:
    mask = torch.tensor([True, False, True, False])
    chosen = select.mask({"body.0.bias": mask}).resolve(model)
    assert chosen.num_weights == 2
    torch.testing.assert_close(chosen.ravel(dict(model.named_parameters())), model.body[0].bias[mask])
    for params, message in {
        "other": ({"tail.bias": mask}, "no parameter 'tail.bias'"),
        "shape": ({"body.0.bias": mask[:2]}, r"has shape \(2,\), the weight \(4,\)"),
        "empty": ({"body.0.bias": ~mask & mask}, "selects no weight"),
    }.values():
        with pytest.raises(InputError, match=message):
            select.mask(params).resolve(model)


def test_largest_magnitude(model: nn.Module) -> None:
    chosen = select.largest_magnitude(7).resolve(model)
    everything = torch.cat([p.detach().abs().flatten() for p in model.parameters()])
    kept = chosen.ravel({name: p.detach().abs() for name, p in model.named_parameters()})
    assert sorted(kept.tolist()) == sorted(everything.topk(7).values.tolist())


def test_random_follows_the_generator(model: nn.Module) -> None:
    def draw(seed: int) -> Selection:
        return select.random(6).resolve(model, generator=torch.Generator().manual_seed(seed))

    assert draw(0) == draw(0) != draw(1)
    hits = sum(torch.cat([mask.flatten() for mask in draw(seed).masks().values()]) for seed in range(400))
    size = sum(p.numel() for p in model.parameters())
    assert hits.sum() == 6 * 400
    assert hits.min() > 0.5 * 2400 / size
    assert hits.max() < 1.7 * 2400 / size


def test_frozen_weights_are_never_chosen(model: nn.Module) -> None:
    model.head.requires_grad_(False)
    for rule in (select.random(0.9), select.largest_magnitude(0.9), ~select.layers("body"), select.layers("*")):
        assert not any("head" in name for name in rule.resolve(model).names)


def test_sizes() -> None:
    assert [count_of(size, 40) for size in (1, 40, 0.5, 0.03, 3.0)] == [1, 40, 20, 1, 3]
    for size in (0, 41, -1, 1.5, 0.001, float("nan"), 41.0):
        with pytest.raises(
            InputError, match=r"choose a whole number up to the 40 candidates|`size` must be a number of weights"
        ):
            count_of(size, 40)


def test_ties_go_to_the_earlier_weight(model: nn.Module) -> None:
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(1.0)
    chosen = select.largest_magnitude(3).resolve(model)
    assert chosen.names == ["head.weight"]
    assert chosen.positions("head.weight").tolist() == [0, 1, 2]


def test_rules_combine(model: nn.Module) -> None:
    body, weights = select.layers("body"), select.layers("*.weight")
    assert (body & weights).resolve(model).names == ["body.0.weight", "body.1.weight"]
    assert (body | select.layers("head")).resolve(model).num_weights == 16 + 8 + 10
    assert (~body & weights).resolve(model).names == ["head.weight", "spare.weight"]
    mixed = (select.last_layer() | select.random(5)).resolve(model, DATA, generator=torch.Generator().manual_seed(0))
    assert mixed.is_whole("head.weight")
    assert 10 <= mixed.num_weights <= 15


def test_tied_weights_are_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    model = Tied()
    tokens = torch.zeros(2, 1, dtype=torch.long)
    for rule in (select.all(), select.last_layer(), select.layers("head"), select.layers(nn.Linear)):
        chosen = rule.resolve(model, (tokens, tokens))
        assert chosen.names == ["embed.weight"]
        assert chosen.num_weights == 15


def test_rules_are_settings() -> None:
    rule = select.last_layer() | ~select.layers(nn.Conv2d) & select.random(0.1)
    assert repr(rule) == "select.last_layer() | ~select.layers(nn.Conv2d) & select.random(0.1)"
    assert rule == select.last_layer() | (~select.layers(nn.Conv2d) & select.random(0.1))
    assert rule != select.last_layer() | ~select.layers(nn.Conv2d) & select.random(0.2)
    tensors: dict[str, Tensor] = {}
    mask = select.mask({"w": torch.tensor([True, False])})
    assert type(mask).from_json(mask.to_json(tensors), tensors) == mask
