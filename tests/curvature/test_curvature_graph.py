"""Parameters without a layer rule, as real networks have them: followed through autograd's graph, exactly."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from curvature.curvature_cases import (
    BATCH,
    Case,
    Net,
    accumulate,
    classes,
    dense,
    gauss_newton,
    jacobian_matrix,
    tokens,
)
from dubito import Laplace
from dubito.curvature import Engine, FallbackWarning, jacobian, output_columns
from dubito.curvature.graph_calls import GENERAL, entry_order
from dubito.networks.selection import Selection
from oracles import close, normal

WIDTH = 4


def vector(make: Callable[..., Tensor] = torch.rand, *shape: int) -> nn.Parameter:
    return nn.Parameter(make(*(shape or (WIDTH,))) + 0.5)


class Norm(nn.Module):
    """y = (offset + w) ⊙ x / rms(x), as in Llama and Gemma."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight, self.offset = vector(), offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.offset + self.weight) * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


class ChannelsFirst(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class GroupActivated(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight / weight.square().mean((1, 2, 3), keepdim=True).sqrt(), self.bias)


class Same(nn.Conv2d):
    """Pads by itself, as timm's `Conv2dSame` does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Transposed(nn.Module):
    """y = x W + b with W [I, O], by names that no layer rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.offset = vector(torch.randn, 3, WIDTH), vector(torch.randn)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x.reshape(-1, 3), self.kernel).view(*x.shape[:-1], WIDTH)


class ScaledWords(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Free(nn.Module):
    """Holds parameters that other code uses."""

    def __init__(self, **values: nn.Parameter) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, value)


def after(layer: nn.Module, *shape: int) -> Case:
    """A network that ends with a linear map of the means over positions."""

    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(net.layer(net.first(x))).flatten(2).mean(2))

    first = nn.Conv2d(3, WIDTH, 1)
    return classes(Net(use, first=first, layer=layer, out=nn.Linear(WIDTH, 3)), normal(BATCH, 3, *(shape or (3, 3))))


def on_rows(layer: nn.Module, width: int = WIDTH) -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(net.layer(x)).mean(1))

    return classes(Net(use, layer=layer, out=nn.Linear(WIDTH, 3)), normal(BATCH, 2, width))


def vision_transformer() -> Case:
    """A class token, positions, and scales of residual branches."""

    def use(net: Any, x: Tensor) -> Tensor:
        free = net.free
        x = torch.cat([free.token.expand(len(x), -1, -1), net.first(x)], dim=1) + free.places
        x = x + free.gamma * torch.tanh(net.second(x))
        return net.out(x[:, 0])

    free = Free(token=vector(torch.randn, 1, 1, WIDTH), places=vector(torch.randn, 1, 3, WIDTH), gamma=vector())
    parts = {"first": nn.Linear(3, WIDTH), "second": nn.Linear(WIDTH, WIDTH), "out": nn.Linear(WIDTH, 3)}
    return classes(Net(use, free=free, **parts), normal(BATCH, 2, 3))


def repeated_token() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(torch.cat([net.free.token.repeat(len(x), 1, 1), x], dim=1)).sum(1))

    return classes(
        Net(use, free=Free(token=vector(torch.randn, 1, 2, WIDTH)), out=nn.Linear(WIDTH, 3)), normal(BATCH, 2, WIDTH)
    )


def logit_scale() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.free.scale.exp() * net.out(x) / net.free.fixed

    free = Free(scale=nn.Parameter(torch.tensor(0.3)), fixed=nn.Parameter(torch.tensor(2.0), requires_grad=False))
    return classes(Net(use, free=free, out=nn.Linear(3, 3)), normal(BATCH, 3))


def relative_positions() -> Case:
    """A table of biases by distance, the same for all examples, in the scores of attention (T5)."""

    def use(net: Any, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = net.table((places[:, None] - places).abs()).permute(2, 0, 1)[None]
        scores = torch.einsum("bqc,bkc->bqk", x, x)[:, None] + bias
        return net.out(torch.einsum("bhqk,bkc->bhc", scores.softmax(-1), x).flatten(1))

    return classes(Net(use, table=nn.Embedding(3, 2), out=nn.Linear(2 * WIDTH, 3)), normal(BATCH, 3, WIDTH))


def masked() -> Case:
    """A mask of each example chooses between the scores' biases and a number (T5), places and a learned token."""

    def use(net: Any, x: Tensor) -> Tensor:
        free, shown = net.free, x[..., 0] > 0
        scores = torch.einsum("bqc,bkc->bqk", x, x) + torch.where(shown[:, None], free.bias, -30.0)
        mixed = scores.softmax(-1) @ torch.where(shown[..., None], x, free.token)
        return net.out(mixed.sum(1) + free.places.masked_fill(~shown[..., None], 0.5).sum(1))

    free = Free(bias=vector(torch.randn, 3, 3), token=vector(torch.randn, WIDTH), places=vector(torch.randn, 3, WIDTH))
    return classes(Net(use, free=free, out=nn.Linear(WIDTH, 3)), normal(BATCH, 3, WIDTH))


def indexed_table() -> Case:
    """The same by indexing a free parameter (Swin)."""

    def use(net: Any, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = net.free.table[(places[:, None] - places).abs().flatten()].view(3, 3, 2).permute(2, 0, 1)
        scores = torch.einsum("bqc,bkc->bqk", x, x)[:, None] + bias
        return net.out(torch.einsum("bhqk,bkc->bhc", scores.softmax(-1), x).flatten(1))

    return classes(
        Net(use, free=Free(table=vector(torch.randn, 3, 2)), out=nn.Linear(2 * WIDTH, 3)), normal(BATCH, 3, WIDTH)
    )


def windows() -> Case:
    """Several windows of each example go through a layer as if they were examples (Swin), and a scale beside it."""

    def use(net: Any, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (2, 2)).flatten(0, 1)
        return net.out((torch.tanh(net.each(parts)) * net.free.gamma).unflatten(0, (len(x), 2)).mean((1, 2)))

    return classes(
        Net(use, each=nn.Linear(3, WIDTH), free=Free(gamma=vector()), out=nn.Linear(WIDTH, 3)), normal(BATCH, 4, 3)
    )


def cross_attention() -> Case:
    """Queries and keys differ, so the packed projection is used in parts."""

    def use(net: Any, x: Tensor) -> Tensor:
        other = torch.tanh(net.first(x))
        return net.out(net.mix(x, other, other, need_weights=False)[0].mean(1))

    mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    return classes(Net(use, first=nn.Linear(WIDTH, WIDTH), mix=mix, out=nn.Linear(WIDTH, 3)), normal(BATCH, 3, WIDTH))


def positions() -> Case:
    def use(net: Any, ids: Tensor) -> Tensor:
        places = net.places(torch.arange(ids.shape[1])[None])
        return net.out(torch.tanh(net.norm(net.words(ids) + places)).sum(1))

    parts = {"words": ScaledWords(4, WIDTH), "places": nn.Embedding(6, WIDTH), "norm": Norm(0.0)}
    return classes(Net(use, **parts, out=nn.Linear(WIDTH, 3)), tokens(3))


def fixed_part_of_positions() -> Case:
    """Only the first places are used, and those of `padding_idx` get no gradient."""

    def use(net: Any, x: Tensor) -> Tensor:
        y = x + net.free.places[:, : x.shape[1]] + net.table(torch.tensor([2, 0]))
        return net.out(torch.tanh(y).sum(1))

    free = Free(places=vector(torch.randn, 1, 5, WIDTH))
    parts = {"table": nn.Embedding(3, WIDTH, padding_idx=0), "out": nn.Linear(WIDTH, 3)}
    return classes(Net(use, free=free, **parts), normal(BATCH, 2, WIDTH))


CASES: dict[str, Callable[[], Case]] = {
    "rms norm": lambda: on_rows(Norm(0.0)),
    "rms norm around one": lambda: on_rows(Norm(1.0)),
    "layer norm of channels": lambda: after(ChannelsFirst(WIDTH)),
    "batch norm and activation": lambda: after(Activated(WIDTH)),
    "group norm and activation": lambda: after(GroupActivated(2, WIDTH)),
    "prelu": lambda: after(nn.PReLU(WIDTH)),
    "standardised weights": lambda: after(Standardised(WIDTH, WIDTH, 2)),
    "own padding": lambda: after(Same(WIDTH, WIDTH, 2)),
    "own padding in groups": lambda: after(Same(WIDTH, WIDTH, 2, groups=2)),
    "weight norm": lambda: after(parametrizations.weight_norm(nn.Conv2d(WIDTH, WIDTH, 2))),
    "transposed linear": lambda: on_rows(Transposed(), 3),
    "vision transformer": vision_transformer,
    "repeated token": repeated_token,
    "logit scale": logit_scale,
    "relative positions": relative_positions,
    "masked": masked,
    "indexed table": indexed_table,
    "windows": windows,
    "cross attention": cross_attention,
    "positions": positions,
    "part of positions": fixed_part_of_positions,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [BATCH, 1])
def test_gradients_are_exact_and_nothing_falls_back(name: str, rows: int) -> None:
    torch.manual_seed(2)
    case = CASES[name]()
    case = case._replace(inputs=case.inputs[:rows], targets=case.targets[:rows])
    selection = Selection.all_of(case.model)
    engine = Engine(case.model, selection.names)
    tape = engine.run(case.inputs)
    columns = torch.cat(list(output_columns.identity(case.likelihood, tape.outputs, 3)))
    close(jacobian(tape.pull(columns), selection), jacobian_matrix(case, selection))
    assert engine.followed
    assert engine.fallback == []


@pytest.mark.parametrize("name", CASES)
def test_structures(name: str) -> None:
    torch.manual_seed(2)
    case = CASES[name]()
    selection = Selection.all_of(case.model)
    truth = gauss_newton(case, selection)
    close(accumulate(case, selection, "diag").diagonal(), truth.diagonal())
    close(dense(accumulate(case, selection, "full")), truth)
    kron = accumulate(case, selection, "kron")
    assert float(kron.diagonal().min()) >= 0
    for each, block in zip(selection.names, kron.blocks, strict=True):
        if "free" in each or each.endswith(("gamma", "norm.weight")):  # where no matrix is multiplied it is diagonal
            close(block.diagonal(), truth.diagonal()[selection.slices[each]])


class Power(nn.Module):
    """A parameter whose use nothing here understands."""

    def __init__(self) -> None:
        super().__init__()
        self.power, self.calls = nn.Parameter(torch.full((WIDTH,), 1.5)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x.abs() + 1).pow(self.power)


def with_power() -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        net.count.calls += 1
        return net.out(net.power(torch.tanh(net.first(x))))

    parts = {"first": nn.Linear(3, WIDTH), "power": Power(), "out": nn.Linear(WIDTH, 3), "count": Power()}
    model = Net(use, **parts)
    model.count.requires_grad_(False)
    return classes(model, normal(BATCH, 3))


def test_only_the_module_that_is_not_understood_is_differentiated_alone() -> None:
    case = with_power()
    selection = Selection.all_of(case.model)
    engine = Engine(case.model, selection.names)
    with pytest.warns(FallbackWarning, match="power.power are computed example by example"):
        tape = engine.run(case.inputs)
    columns = torch.cat(list(output_columns.identity(case.likelihood, tape.outputs, 3)))
    before, inside = engine.model.count.calls, engine.model.power.calls
    close(jacobian(tape.pull(columns), selection), jacobian_matrix(case, selection))
    assert engine.model.count.calls == before  # the network is not run again
    assert engine.model.power.calls > inside
    assert engine.fallback == ["power.power"]


def test_recurrent_kernels_are_differentiated_alone() -> None:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(net.states(net.first(x))[0].mean(1))

    torch.manual_seed(0)
    parts = {"first": nn.Linear(2, 2), "states": nn.LSTM(2, 2, batch_first=True), "out": nn.Linear(2, 3)}
    case = classes(Net(use, **parts), normal(BATCH, 3, 2))
    case = case._replace(model=case.model.float(), inputs=case.inputs.float())
    selection = Selection.all_of(case.model)
    engine = Engine(case.model, selection.names)
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        tape = engine.run(case.inputs)
    columns = torch.cat(list(output_columns.identity(case.likelihood, tape.outputs, 3)))
    close(jacobian(tape.pull(columns), selection), jacobian_matrix(case, selection), 1e-5)


def test_a_network_that_takes_another_way_is_studied_again() -> None:
    """A mask that is needed only for some batches changes the graph."""

    def use(net: Any, x: Tensor) -> Tensor:
        y = torch.tanh(net.first(x))
        y = y * net.free.gamma if bool((x > 3).any()) else net.free.gamma * y.sin() * 2.0
        return net.out(y)

    case = classes(
        Net(use, first=nn.Linear(3, WIDTH), free=Free(gamma=vector()), out=nn.Linear(WIDTH, 3)), normal(BATCH, 3)
    )
    selection = Selection.all_of(case.model)
    engine = Engine(case.model, selection.names)
    for inputs in (case.inputs, case.inputs + 10.0, case.inputs):
        other = case._replace(model=copy.deepcopy(case.model), inputs=inputs)  # the oracle remembers by the model
        tape = engine.run(inputs)
        columns = torch.cat(list(output_columns.identity(case.likelihood, tape.outputs, 3)))
        close(jacobian(tape.pull(columns), selection), jacobian_matrix(other, selection))
    assert len(engine.graphs) == 2


def test_the_engine_keeps_no_batch_in_memory() -> None:
    import gc
    import weakref

    case = vision_transformer()
    engine = Engine(case.model, Selection.all_of(case.model).names)
    tape = engine.run(case.inputs)
    outputs = weakref.ref(tape.outputs)
    del tape
    gc.collect()
    assert outputs() is None


class TestOrder:
    def of(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Any:
        leaf = torch.randn(3, 200, dtype=dtype, requires_grad=True)
        top = change(leaf)
        found = entry_order(top.grad_fn, 0, leaf)
        if isinstance(found, Tensor):
            assert torch.equal(leaf.flatten()[found], top.flatten())
        return found

    def test_rearranged(self) -> None:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            assert isinstance(self.of(lambda w: w.mT, dtype), Tensor)
            assert isinstance(self.of(lambda w: w[1:, ::3].flip(0), dtype), Tensor)
            assert self.of(lambda w: w.view(6, 100) + 0, dtype) is None

    def test_more_than_that(self) -> None:
        for change in (
            lambda w: w * 2,
            lambda w: w.sin(),
            lambda w: w[[0, 0]],
            lambda w: w.softmax(0),
            lambda w: w - w.mean(),
        ):
            assert self.of(change) == GENERAL


def test_a_whole_recipe_without_a_warning() -> None:
    case = vision_transformer()
    posterior = Laplace().fit(case.model, (case.inputs, case.targets), likelihood=case.likelihood, progress=False)
    assert float(posterior.predict(case.inputs).epistemic.mean()) > 0
