"""Layers and inputs drawn by hypothesis: every family of layers that has a rule, in all its settings, float64, tiny."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

from curvature.curvature_cases import Transposed


class Case(NamedTuple):
    layer: nn.Module
    x: Tensor
    channel_axis: int  # of the input and the output
    batch_axis: bool = True


def small(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


def randomised(layer: nn.Module) -> nn.Module:
    """No parameter or statistic at a value (0, 1) that could hide a mistake."""
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
                tensor.mul_(torch.randn_like(tensor).sign())
        if getattr(layer, "running_var", None) is not None:
            layer.running_var.abs_()
    return layer.double().eval()


@st.composite
def linear(draw: st.DrawFn) -> Case:
    layer = nn.Linear(draw(small(1, 4)), draw(small(1, 4)), bias=draw(st.booleans()))
    lead = draw(st.lists(small(1, 3), max_size=3))
    return Case(layer, torch.randn(*lead, layer.in_features), len(lead), batch_axis=len(lead) > 0)


@st.composite
def transposed_linear(draw: st.DrawFn) -> Case:
    inputs, outputs = draw(small(2, 4)), draw(small(2, 4))
    lead = draw(st.lists(small(1, 3), max_size=3))
    layer = Transposed(inputs, outputs, bias=draw(st.booleans()))
    return Case(layer, torch.randn(*lead, inputs), len(lead), batch_axis=len(lead) > 0)


def same_for_all_or_each(draw: st.DrawFn, dims: int, low: int, high: int) -> int | tuple[int, ...]:
    values = small(low, high)
    return draw(st.one_of(values, st.tuples(*[values] * dims)))


def as_tuple(value: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else value


@st.composite
def conv(draw: st.DrawFn, padding: str, padding_mode: str) -> Case:
    dims = draw(small(1, 3))
    groups = draw(small(1, 3))
    kernel, dilation = (same_for_all_or_each(draw, dims, 1, high) for high in (3 if dims < 3 else 2, 2))
    stride = 1 if padding == "same" else same_for_all_or_each(draw, dims, 1, 3)
    layer = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](
        groups * draw(small(1, 2)),
        groups * draw(small(1, 2)),
        kernel,
        stride=stride,
        padding=same_for_all_or_each(draw, dims, 0, 2) if padding == "number" else padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=padding_mode,
    )
    spans = [d * (k - 1) + 1 for d, k in zip(as_tuple(dilation, dims), as_tuple(kernel, dims), strict=True)]
    # padding is at most 2, or half a span, and reflection needs a longer input
    size = [max(span, 3) + draw(small(0, 2)) for span in spans]
    return channels_first(draw, layer, layer.in_channels, size)


@st.composite
def conv_transpose(draw: st.DrawFn) -> Case:
    dims = draw(small(1, 3))
    groups = draw(small(1, 3))
    kernel = as_tuple(same_for_all_or_each(draw, dims, 1, 3 if dims < 3 else 2), dims)
    stride, dilation = (as_tuple(same_for_all_or_each(draw, dims, 1, 3), dims) for _ in range(2))
    padding = as_tuple(same_for_all_or_each(draw, dims, 0, 2), dims)
    extra = tuple(draw(small(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    size = [draw(small(1, 3)) for _ in range(dims)]
    settings = zip(size, kernel, stride, dilation, padding, extra, strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + e + 1 > 0 for n, k, s, d, p, e in settings))
    layer = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][dims - 1](
        groups * draw(small(1, 2)),
        groups * draw(small(1, 2)),
        kernel,
        stride=stride,
        padding=padding,
        output_padding=extra,
        groups=groups,
        bias=draw(st.booleans()),
        dilation=dilation,
    )
    return channels_first(draw, layer, layer.in_channels, size)


def channels_first(draw: st.DrawFn, layer: nn.Module, channels: int, size: list[int]) -> Case:
    batch = draw(st.lists(small(1, 3), max_size=1))
    return Case(layer, torch.randn(*batch, channels, *size), len(batch), batch_axis=len(batch) > 0)


@st.composite
def embedding(draw: st.DrawFn) -> Case:
    rows = draw(small(2, 5))
    padding = draw(st.one_of(st.none(), small(-rows, rows - 1)))
    layer = nn.Embedding(rows, draw(small(1, 3)), padding_idx=padding, sparse=draw(st.booleans()))
    shape = draw(st.lists(small(1, 4), min_size=1, max_size=3))
    return Case(layer, torch.randint(rows, shape), len(shape))


@st.composite
def layer_norm(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(small(2, 3), min_size=1, max_size=2))
    layer = nn.LayerNorm(shape, bias=draw(st.booleans()))
    lead = draw(st.lists(small(1, 3), max_size=3))
    return Case(layer, torch.randn(*lead, *shape), len(lead), batch_axis=len(lead) > 0)


@st.composite
def group_norm(draw: st.DrawFn) -> Case:
    groups, width = draw(small(1, 3)), draw(small(1, 3))
    positions = draw(st.lists(small(2, 3), min_size=1, max_size=2))
    return Case(nn.GroupNorm(groups, groups * width), torch.randn(draw(small(1, 3)), groups * width, *positions), 1)


@st.composite
def batch_norm(draw: st.DrawFn) -> Case:
    dims, channels = draw(small(0, 3)), draw(small(1, 4))
    layer = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dims](channels)
    return Case(layer, torch.randn(draw(small(1, 3)), channels, *[draw(small(1, 3)) for _ in range(dims)]), 1)


@st.composite
def rms_norm(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(small(2, 3), min_size=1, max_size=2))
    layer = nn.RMSNorm(shape, eps=draw(st.sampled_from([None, 1e-3])))
    lead = draw(st.lists(small(1, 3), max_size=3))
    return Case(layer, torch.randn(*lead, *shape), len(lead), batch_axis=len(lead) > 0)


@st.composite
def instance_norm(draw: st.DrawFn) -> Case:
    dims, channels = draw(small(1, 3)), draw(small(1, 4))
    kind = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d][dims - 1]
    layer = kind(channels, affine=True, track_running_stats=draw(st.booleans()))
    return channels_first(draw, layer, channels, [draw(small(2, 3)) for _ in range(dims)])


FAMILIES: dict[str, st.SearchStrategy[Case]] = {
    "linear": linear(),
    "transposed_linear": transposed_linear(),
    "conv_zeros": conv("number", "zeros"),
    "conv_circular": conv("number", "circular"),
    "conv_reflect": conv("number", "reflect"),
    "conv_replicate": conv("number", "replicate"),
    "conv_same": conv("same", "zeros"),
    "conv_same_circular": conv("same", "circular"),
    "conv_valid": conv("valid", "zeros"),
    "conv_transpose": conv_transpose(),
    "embedding": embedding(),
    "layer_norm": layer_norm(),
    "group_norm": group_norm(),
    "batch_norm": batch_norm(),
    "rms_norm": rms_norm(),
    "instance_norm": instance_norm(),
}


@st.composite
def cases(draw: st.DrawFn, family: str) -> Case:
    torch.manual_seed(draw(small(0, 99)))
    case = draw(FAMILIES[family])
    x = case.x.double() if case.x.is_floating_point() else case.x
    return case._replace(layer=randomised(case.layer), x=x)
