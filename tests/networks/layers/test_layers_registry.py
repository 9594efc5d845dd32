"""A rule is found only where the module computes what the rule says."""

from __future__ import annotations

import pytest
import torch
from dubito.errors import UnsupportedError
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from curvature.curvature_cases import Transposed
from dubito.networks.layers import LayerRule, register, require_rule, rule_for
from dubito.networks.layers.linear import LinearRule
from dubito.networks.layers.transposed_linear import TransposedLinearRule


class SameForward(nn.Linear):
    pass


class LowRankAdapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


class StandardisedConv(nn.Conv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


def patched() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: 2 * x
    return layer


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return weight_norm(nn.Linear(2, 2))


def parametrized_bias() -> nn.Module:
    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    return layer


@pytest.mark.parametrize("layer", [SameForward(2, 2), nn.MultiheadAttention(4, 2).out_proj])
def test_a_subclass_with_the_same_forward_has_the_rule(layer: nn.Module) -> None:
    assert type(layer) is not nn.Linear
    assert isinstance(rule_for(layer), LinearRule)
    assert require_rule(layer) is rule_for(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: LowRankAdapted(2, 2),
            r"forward is not that of Linear; describe it by a LayerRule",
        ),
        (lambda: StandardisedConv(2, 2, 1), "_conv_forward is overridden; describe it"),
        (patched, "forward is not that of Linear"),
        (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "remove_parametrizations"),
        (lambda: parametrizations.spectral_norm(nn.Linear(2, 2)), "remove_parametrizations"),
        (parametrized_bias, "remove_parametrizations"),
        (old_weight_norm, "weight is not a parameter of its own"),
        (lambda: spectral_norm(nn.Conv2d(2, 2, 1)), "weight is not a parameter of its own"),
        (lambda: prune.random_unstructured(nn.Linear(2, 2), "bias", 1), "bias is not a parameter of its own"),
        (lambda: nn.Embedding(3, 2, max_norm=1.0), "max_norm"),
        (lambda: nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (lambda: nn.LazyLinear(2), "run one batch"),
        (lambda: nn.LSTM(2, 2), r"needs a layer rule for LSTM.*@dubito.networks.layers.register\(LSTM\)"),
        (lambda: nn.SyncBatchNorm(2), "over several processes"),
        (nn.ReLU, "none is registered"),
    ],
)
def test_no_rule_and_why(make, reason: str) -> None:
    layer = make()
    assert rule_for(layer) is None
    with pytest.raises(UnsupportedError, match=reason) as error:
        require_rule(layer, "flipout")
    assert str(error.value).startswith("flipout needs a layer rule for ")


def test_a_weight_made_its_own_again_has_a_rule() -> None:
    layer = parametrizations.weight_norm(nn.Linear(2, 2))
    parametrize.remove_parametrizations(layer, "weight")
    assert isinstance(rule_for(layer), LinearRule)


def test_a_rule_of_ones_own_holds_for_its_class_and_not_its_base() -> None:
    class Adapted(LowRankAdapted):
        pass

    @register(Adapted)
    class AdaptedRule(LayerRule[Adapted]):
        def apply(self, layer: Adapted, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return nn.functional.linear(x, weight, bias) + x.sum(-1, keepdim=True)

    layer = Adapted(2, 2)
    rule = require_rule(layer)
    assert isinstance(rule, AdaptedRule)
    assert rule_for(LowRankAdapted(2, 2)) is None
    assert isinstance(rule_for(nn.Linear(2, 2)), LinearRule)
    x = torch.randn(3, 2)
    assert torch.equal(rule.apply(layer, x, layer.weight, layer.bias), layer(x))


def test_what_a_rule_leaves_out_names_the_rule_and_the_method() -> None:
    class Minimal(LayerRule[nn.Identity]):
        linear_in_input = False

        def apply(self, layer: nn.Identity, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return x

    rule, layer, x = Minimal(), nn.Identity(), torch.ones(1)
    calls = {
        "apply_variance": (x, x, None),
        "inputs_as_rows": (x,),
        "grads_as_rows": (x,),
        "bias_grads": (x,),
        "num_inputs": (),
        "num_outputs": (),
        "channel_axis": (1,),
        "weight_factors": (x, "input"),
        "keep_inputs": (x,),
        "keep_outputs": (x,),
    }
    for method, arguments in calls.items():
        with pytest.raises(
            UnsupportedError, match=rf"rule for Identity lacks `{method}`; add it to .*Minimal in {__name__}"
        ):
            getattr(rule, method)(layer, *arguments)


class Noisy(Transposed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.1 if self.training else 0.0)


class Gate(nn.Module):
    """As the router of a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(3, 3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.weight.T


def test_a_layer_of_an_unknown_class_is_asked_what_it_computes() -> None:
    zero = Transposed(3, 3)
    nn.init.zeros_(zero.weight)  # which is its own transpose
    assert isinstance(rule_for(zero), TransposedLinearRule)
    assert isinstance(rule_for(Transposed(4, 2, bias=False).bfloat16()), TransposedLinearRule)
    gate = Gate()
    for other in (gate, Noisy(3, 3), nn.Bilinear(2, 2, 2)):
        assert rule_for(other) is None
    assert gate.calls == 0
    replaced = Transposed(3, 3)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert rule_for(replaced) is None
