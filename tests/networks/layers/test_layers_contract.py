"""The contract of a layer rule, for every family of layers: one suite, checked in float64 against autograd."""

from __future__ import annotations

import copy

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layer_cases import FAMILIES, cases
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from dubito.networks.layers import (
    LayerRule,
    is_norm,
    per_sample_gradient,
    require_rule,
    summed_gradient,
    weight_axis,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),  # torch's own, for forward
]
every_family = pytest.mark.parametrize("family", FAMILIES)
FIXED_WIDTH = ("layer_norm", "rms_norm")  # norms, whose weights have no axis of channels
every_shrinkable_family = pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f not in (*FIXED_WIDTH, "transposed_linear")]
)
drawn = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
COLUMNS = 2


def tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in layer.named_parameters()}


def weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    own = tensors(layer)
    return own["weight"], own.get("bias")


def like(tensor: Tensor | None, lead: tuple[int, ...] = ()) -> Tensor | None:
    return None if tensor is None else torch.randn(*lead, *tensor.shape, dtype=tensor.dtype)


def assert_equal(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """The gradient of ⟨g, layer(x)⟩ by autograd."""
    grads = torch.autograd.grad((layer(x) * g).sum(), list(layer.parameters()))
    return {n: d.to_dense() for (n, _), d in zip(layer.named_parameters(), grads, strict=True)}


@every_family
@drawn
@given(st.data())
def test_apply_is_forward(family: str, data: st.DataObject) -> None:
    layer, x, *_ = data.draw(cases(family))
    y = require_rule(layer).apply(layer, x, *weight_and_bias(layer))
    assert_equal(y, layer(x), 1e-12)


@every_family
@drawn
@given(st.data())
def test_apply_is_linear_in_the_weight_and_takes_a_sample_axis(family: str, data: st.DataObject) -> None:
    layer, x, *_ = data.draw(cases(family))
    rule, (weight, bias) = require_rule(layer), weight_and_bias(layer)
    weights, biases = like(weight, (2,)), like(bias, (2,))
    y = vmap(lambda w, b: rule.apply(layer, x, w, b), in_dims=(0, None if bias is None else 0))(weights, biases)
    assert_equal(y[1], rule.apply(layer, x, weights[1], None if bias is None else biases[1]), 1e-12)
    both = vmap(lambda x, w: rule.apply(layer, x, w, None))(torch.stack([x.flip(-1), x]), weights)
    assert_equal(both[1], rule.apply(layer, x, weights[1], None), 1e-12)
    mixed = 0.3 * weights[0] - 2.0 * weights[1], None if bias is None else 0.3 * biases[0] - 2.0 * biases[1]
    assert_equal(rule.apply(layer, x, *mixed), 0.3 * y[0] - 2.0 * y[1], 1e-12)
    if bias is not None:
        parts = rule.apply(layer, x, weights[0], None) + rule.apply(layer, x, 0 * weight, biases[0])
        assert_equal(parts, y[0], 1e-12)


@every_family
@drawn
@given(st.data())
def test_variance_is_the_sum_of_squared_derivatives(family: str, data: st.DataObject) -> None:
    layer, x, *_ = data.draw(cases(family))
    variances = {name: p.square() for name, p in tensors(layer).items()}
    seen = copy.deepcopy(layer)
    if isinstance(seen, nn.Embedding):
        seen.padding_idx, seen.sparse = (
            None,
            False,
        )  # the padding row has no gradient, but a variance if it is given one
    # one output at a time: not every layer of torch has batching rules
    jacobian = jacrev(lambda p: functional_call(seen, p, x), chunk_size=1)(tensors(seen))
    y_dims = next(iter(jacobian.values())).ndim - variances["weight"].ndim
    expected = sum((j.square() * variances[n]).flatten(y_dims).sum(-1) for n, j in jacobian.items())
    actual = require_rule(layer).apply_variance(layer, x, variances["weight"], variances.get("bias"))
    assert_equal(actual, expected, 1e-12)


@every_family
@drawn
@given(st.data())
def test_contracted_rows_are_the_gradients(family: str, data: st.DataObject) -> None:
    layer, x, _, batch_axis = data.draw(cases(family))
    rule, y = require_rule(layer), layer(x)
    g = torch.randn(COLUMNS, *y.shape, dtype=y.dtype)
    rows, grads = rule.inputs_as_rows(layer, x), rule.grads_as_rows(layer, g)

    summed = rule.from_matrix(layer, summed_gradient(rows, grads))
    each = rule.from_matrix(layer, per_sample_gradient(rows, grads))
    bias = rule.bias_grads(layer, g)
    for v in range(COLUMNS):
        whole = gradients(layer, x, g[v])
        assert_equal(summed[v], whole["weight"], 1e-10)
        for n in range(len(x) if batch_axis else 1):
            own = gradients(layer, x[n : n + 1], g[v, n : n + 1]) if batch_axis else whole
            assert_equal(each[v, n], own["weight"], 1e-10)
            if "bias" in own:
                assert_equal(bias[v, n], own["bias"].flatten(), 1e-10)


@every_family
@drawn
@given(st.data())
def test_an_empty_batch_has_no_gradient(family: str, data: st.DataObject) -> None:
    layer, x, _, batch_axis = data.draw(cases(family))
    assume(batch_axis)
    rule, g = require_rule(layer), torch.zeros(COLUMNS, 0, *layer(x).shape[1:], dtype=torch.float64)
    rows, grads = rule.inputs_as_rows(layer, x[:0]), rule.grads_as_rows(layer, g)
    assert not rule.from_matrix(layer, summed_gradient(rows, grads)).any()
    assert rule.from_matrix(layer, per_sample_gradient(rows, grads)).shape == (COLUMNS, 0, *layer.weight.shape)


@every_family
@drawn
@given(st.data())
def test_matrix_and_weight_are_inverse(family: str, data: st.DataObject) -> None:
    layer = data.draw(cases(family)).layer
    rule, weight = require_rule(layer), like(layer.weight, (2, 3))
    matrix = rule.to_matrix(layer, weight)
    assert matrix.shape[:2] == (2, 3)
    assert torch.equal(rule.from_matrix(layer, matrix), weight)
    assert torch.equal(rule.to_matrix(layer, weight[1, 2]), matrix[1, 2])


@every_family
@drawn
@given(st.data())
def test_scaling_touches_each_channel_by_its_factor(family: str, data: st.DataObject) -> None:
    layer, x, axis, batch_axis = data.draw(cases(family))
    rule = require_rule(layer)
    sides = {"input": (x, rule.num_inputs(layer)), "output": (layer(x), rule.num_outputs(layer))}
    if not rule.linear_in_input:
        with pytest.raises(UnsupportedError, match="scale its output"):
            rule.scale_channels(layer, torch.ones(sides["input"][1]), "input", x.ndim)
        del sides["input"]
    for side, (activation, channels) in sides.items():
        per_example = (len(x),) if batch_axis and axis > 0 else ()
        for lead in {(), per_example}:
            v = torch.randn(*lead, channels, dtype=torch.float64)
            scaled = activation * rule.scale_channels(layer, v, side, activation.ndim)
            assert scaled.shape == activation.shape
            features = getattr(layer, "normalized_shape", (channels,))
            flat = activation.flatten(axis, axis + len(features) - 1).movedim(axis, -1)
            expected = flat * v.view(*lead, *[1] * (flat.ndim - 1 - len(lead)), channels)
            assert torch.equal(scaled.flatten(axis, axis + len(features) - 1).movedim(axis, -1), expected)
        with pytest.raises(InputError, match=f"{channels} {side} channels"):
            rule.scale_channels(layer, torch.ones(channels + 1), side, activation.ndim)
        with pytest.raises(InputError, match="too many axes"):
            rule.scale_channels(layer, torch.ones(*[1] * (axis + 1), channels), side, activation.ndim)


def channels_to_keep(data: st.DataObject, rule: LayerRule, layer: nn.Module, channels: int) -> Tensor:
    """As many channels of each group of a convolution, whole groups of a GroupNorm; in random order."""
    if isinstance(layer, nn.GroupNorm):
        width = channels // layer.num_groups
        kept = torch.randperm(layer.num_groups)[: data.draw(st.integers(1, layer.num_groups))]
        return (kept[:, None] * width + torch.randperm(width)).flatten()
    groups = 1 if rule.channelwise(layer) else getattr(layer, "groups", 1)
    width = channels // groups
    keep = data.draw(st.integers(1, width))
    return torch.cat([g * width + torch.randperm(width)[:keep] for g in range(groups)])


@every_shrinkable_family
@drawn
@given(st.data())
def test_kept_outputs_are_the_same_outputs(family: str, data: st.DataObject) -> None:
    layer, x, axis, _ = data.draw(cases(family))
    rule = require_rule(layer)
    index = channels_to_keep(data, rule, layer, rule.num_outputs(layer))
    before = copy.deepcopy(layer.state_dict())
    small = rule.keep_outputs(layer, index)
    inputs = x.index_select(axis, index) if rule.channelwise(layer) else x
    assert_equal(small(inputs), layer(x).index_select(axis, index), 1e-12)
    assert type(small) is type(layer)
    assert require_rule(small).num_outputs(small) == len(index)
    assert small.extra_repr() == rebuilt(small).extra_repr()
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


@every_shrinkable_family
@drawn
@given(st.data())
def test_kept_inputs_are_as_if_the_others_were_zero(family: str, data: st.DataObject) -> None:
    layer, x, axis, _ = data.draw(cases(family))
    rule = require_rule(layer)
    index = channels_to_keep(data, rule, layer, rule.num_inputs(layer))
    small = rule.keep_inputs(layer, index)
    assert require_rule(small).num_inputs(small) == len(index)
    if not x.is_floating_point():  # inputs are numbers of rows, which are renumbered
        new = torch.randint(len(index), x.shape)
        assert torch.equal(small(new), layer(index[new]))
        padding = index.tolist().index(layer.padding_idx) if layer.padding_idx in index.tolist() else None
        assert small.padding_idx == padding
    elif rule.channelwise(layer):
        assert_equal(small(x.index_select(axis, index)), layer(x).index_select(axis, index), 1e-12)
    else:
        zeroed = torch.zeros_like(x).index_copy(axis, index, x.index_select(axis, index))
        assert_equal(small(x.index_select(axis, index)), layer(zeroed), 1e-12)


def rebuilt(layer: nn.Module) -> nn.Module:
    """The layer that the constructor makes from the tensors' shapes and the layer's settings."""
    weight = layer.weight
    if isinstance(layer, nn.Linear):
        return nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None)
    if isinstance(layer, nn.Embedding):
        return nn.Embedding(*weight.shape, padding_idx=layer.padding_idx, sparse=layer.sparse)
    if isinstance(layer, nn.GroupNorm):
        return nn.GroupNorm(layer.num_groups, len(weight), layer.eps)
    if hasattr(layer, "num_features"):
        tracks = layer.track_running_stats
        return type(layer)(len(weight), layer.eps, layer.momentum, affine=True, track_running_stats=tracks)
    sides = (weight.shape[0], weight.shape[1] * layer.groups)
    inputs, outputs = sides if layer.transposed else reversed(sides)
    names = ("stride", "padding", "dilation", "groups", "padding_mode", *["output_padding"] * layer.transposed)
    kept = {name: getattr(layer, name) for name in names}
    return type(layer)(inputs, outputs, layer.kernel_size, bias=layer.bias is not None, **kept)


@every_family
@drawn
@given(st.data())
def test_factors_on_the_weight_are_factors_on_the_channels(family: str, data: st.DataObject) -> None:
    layer, x, *_ = data.draw(cases(family))
    rule, weight = require_rule(layer), layer.weight.detach()
    sizes = {"input": rule.num_inputs(layer), "output": rule.num_outputs(layer)}
    for side in ("input", "output") if rule.linear_in_input else ("output",):
        v = torch.randn(2, sizes[side], dtype=torch.float64)
        if family in FIXED_WIDTH:
            with pytest.raises(UnsupportedError, match="weight_factors"):
                rule.weight_factors(layer, v, side)
            continue
        scaled = [rule.apply(layer, x, each, None) for each in weight * rule.weight_factors(layer, v, side)]
        for y, factors in zip(scaled, v, strict=True):
            if side == "input":
                expected = rule.apply(layer, x * rule.scale_channels(layer, factors, side, x.ndim), weight, None)
            else:
                plain = rule.apply(layer, x, weight, None)
                expected = plain * rule.scale_channels(layer, factors, side, plain.ndim)
            assert_equal(y, expected, 1e-12)


@every_family
@drawn
@given(st.data())
def test_the_axes_of_the_weight_have_one_entry_per_channel(family: str, data: st.DataObject) -> None:
    layer = data.draw(cases(family)).layer
    rule = require_rule(layer)
    sizes = {"input": rule.num_inputs(layer), "output": rule.num_outputs(layer)}
    for side, size in sizes.items():
        axis = rule.weight_axis(layer, side)
        assert axis is None or layer.weight.shape[axis] == size
        assert weight_axis(layer, side) == axis
    assert is_norm(layer) == family.endswith("norm")
