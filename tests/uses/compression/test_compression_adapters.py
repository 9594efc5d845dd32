"""Ranks of LoRA adapters are removed as units, beside a base that stays as it is."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito import Laplace, rules, select
from dubito.networks.adapters import low_rank_pairs


class BaseTunerLayer:
    """Stands for the class by which peft's adapters are recognized."""


class LoraLayer(BaseTunerLayer):
    """Stands for the class by which peft's LoRA layers are recognized."""


BaseTunerLayer.__module__ = LoraLayer.__module__ = "peft.tuners.lora.layer"
RANK, X = 4, torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


class Lora(nn.Module, LoraLayer):
    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, base_layer.out_features, bias=False)})
        self.r, self.lora_alpha, self.scaling = {"default": RANK}, {"default": 2.0 * RANK}, {"default": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


def network(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [Lora(nn.Linear(inputs, outputs)), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def posterior_of(model: nn.Module) -> Any:
    return Laplace(weights=select.adapters(), prior_precision=1.0).fit(model, (X, Y), progress=False)


def test_the_network_without_ranks_equals_the_masked_one() -> None:
    model = network(6, 8, 2)
    assert low_rank_pairs(model) == [(f"{k}.lora_A.default", f"{k}.lora_B.default") for k in (0, 2)]
    posterior = posterior_of(model)
    damage = rules.PosteriorDamage(2 / 3, kind="obs", update=True)  # of the six, as one rank of each product stays
    for rule in (damage, rules.Magnitude(0.5)):
        small = dubito.compress(posterior, rule, structure="units", data=(X, Y))
        assert set(small.plan.keep) == {f"{name}.weight" for pair in low_rank_pairs(model) for name in pair}
        ranks = [(layer.lora_A["default"].out_features, layer.lora_B["default"].in_features) for layer in
                 (small.model[0], small.model[2])]  # fmt: skip
        assert sum(first for first, _ in ranks) == 4
        assert all(first == second for first, second in ranks)
        assert [layer.r["default"] for layer in (small.model[0], small.model[2])] == [first for first, _ in ranks]
        assert small.model[0].lora_B["default"].bias is None
        if isinstance(rule, rules.Magnitude):
            torch.testing.assert_close(small.model(X), small.plan.masked(small.dense)(X))
        for k in (0, 2):
            torch.testing.assert_close(small.model[k].base_layer.weight, model[k].base_layer.weight, rtol=0, atol=0)


def test_the_ranks_with_the_least_damage_go() -> None:
    """One linear layer: the loss is quadratic, so all pairs of ranks can be tried, each with the best other columns."""
    model = network(6, 2)
    a, b = (model[0].lora_A["default"].weight.detach(), model[0].lora_B["default"].weight.detach())
    inputs = X @ a.mT
    outputs = inputs @ b.mT

    def lost(stays: tuple[int, ...]) -> float:
        kept = inputs[:, list(stays)]
        return float((kept @ torch.linalg.lstsq(kept, outputs).solution - outputs).square().sum())

    best = min(lost(stays) for stays in combinations(range(RANK), 2))
    rule = rules.PosteriorDamage(2 / 3, kind="obs", update=True)
    small = dubito.compress(posterior_of(model), rule, structure="units", data=(X, Y))
    with torch.no_grad():
        found = float(((small.model(X) - model(X)) / 2.0).square().sum())
    assert small.model[0].lora_A["default"].out_features == 2
    assert best <= found * (1 + 1e-5)
    assert found <= 1.1 * best
