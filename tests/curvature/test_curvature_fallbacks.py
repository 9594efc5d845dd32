"""What no layer rule describes is still exact, and is announced: one sentence per cause, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from dubito.errors import InputError, UnsupportedError
from dubito.models import transformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvature.curvature_cases import (
    BATCH,
    Case,
    Net,
    accumulate,
    build,
    classes,
    dense,
    fresh,
    gauss_newton,
    jacobian_matrix,
    outputs_of,
    selections,
    tokens,
)
from curvature.kronecker_definition import definition
from dubito.curvature import Engine, FallbackWarning, jacobian, output_columns
from dubito.networks import layers
from dubito.networks.selection import Selection
from oracles import close, normal

pytestmark = pytest.mark.slow


class Awkward(NamedTuple):
    case: Case
    sentences: list[str]  # a piece of each sentence that is expected
    followed: set[str]  # the parameters without a rule that are followed through the graph
    fallback: frozenset[str] = frozenset()  # those that fall back


def recurrent(kind: type[nn.Module]) -> Awkward:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(net.states(x)[0].mean(1))

    model = Net(use, states=kind(2, 2, batch_first=True), out=nn.Linear(2, 3))
    names = {name for name, _ in model.named_parameters() if name.startswith("states")}
    return Awkward(classes(model, normal(BATCH, 3, 2)), [], names)


def lstm() -> Awkward:
    return recurrent(nn.LSTM)


def gru() -> Awkward:
    return recurrent(nn.GRU)


def attention() -> Awkward:
    def use(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.out(net.mix(x, x, x, need_weights=False)[0].mean(1))

    model = Net(use, first=nn.Linear(3, 2), mix=nn.MultiheadAttention(2, 1, batch_first=True), out=nn.Linear(2, 3))
    names = {"mix.in_proj_weight", "mix.in_proj_bias", "mix.out_proj.weight", "mix.out_proj.bias"}
    return Awkward(classes(model, normal(BATCH, 3, 3)), [], names)


def encoder_layer() -> Awkward:
    """In evaluation mode and without gradients it computes everything at once and calls no module."""

    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(net.block(x).mean(1))

    model = Net(use, block=nn.TransformerEncoderLayer(2, 1, 3, batch_first=True), out=nn.Linear(2, 3))
    names = {f"block.self_attn.{n}" for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")}
    return Awkward(classes(model, normal(BATCH, 3, 2)), [], names)


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def own_parameter() -> Awkward:
    model = nn.Sequential(nn.Linear(3, 4), Scale(4), nn.Tanh(), nn.Linear(4, 3))
    return Awkward(classes(model, normal(BATCH, 3)), [], {"1.factor"})


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def overridden_forward() -> Awkward:
    model = nn.Sequential(Doubled(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return Awkward(classes(model, normal(BATCH, 3)), [], {"0.weight", "0.bias"})


def parametrized() -> Awkward:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 3))
    names = {"0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"}
    return Awkward(classes(model, normal(BATCH, 3)), [], names)


class Numpy(torch.autograd.Function):
    """An activation whose derivative leaves torch, as custom kernels do: it cannot be batched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.numpy() ** 2 * grad.numpy())


def custom_function() -> Awkward:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(Numpy.apply(net.first(x)))

    model = Net(use, first=nn.Linear(3, 4), out=nn.Linear(4, 3))
    return Awkward(classes(model, normal(BATCH, 3)), ["are computed one by one"], set())


def custom_function_and_own_parameter() -> Awkward:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(Numpy.apply(net.scale(net.first(x))))

    model = Net(use, first=nn.Linear(3, 4), scale=Scale(4), out=nn.Linear(4, 3))
    return Awkward(classes(model, normal(BATCH, 3)), ["are computed one by one"], {"scale.factor"})


def checkpointed(reentrant: bool) -> Case:
    def use(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.first(x))
        block = nn.Sequential(net.second, nn.Tanh(), net.third)
        # autograd.grad forbids reentrant checkpoints, so the oracle must do without
        return net.out(checkpoint(block, h, use_reentrant=reentrant) if net.saves else block(h))

    model = Net(use, first=nn.Linear(3, 3), second=nn.Linear(3, 4), third=nn.Linear(4, 3), out=nn.Linear(3, 3))
    model.saves = False
    return classes(model, normal(BATCH, 3))


def checkpoint_not_reentrant() -> Awkward:
    return Awkward(checkpointed(reentrant=False), [], set())


def checkpoint_reentrant() -> Awkward:
    case = checkpointed(reentrant=True)
    return Awkward(case, ["use_reentrant=True"], set(), {name for name, _ in case.model.named_parameters()})


def weight_read_beside_the_call() -> Awkward:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(net.first(x)) + F.linear(x, net.first.weight))

    model = Net(use, first=nn.Linear(3, 4), out=nn.Linear(4, 3))
    return Awkward(classes(model, normal(BATCH, 3)), [], {"first.weight"})


def positions_without_batch() -> Awkward:
    def use(net: Any, ids: Tensor) -> Tensor:
        return net.out(torch.tanh(net.table(ids) + net.places(torch.arange(ids.shape[1]))).sum(1))

    model = Net(use, table=nn.Embedding(4, 3), places=nn.Embedding(5, 3), out=nn.Linear(3, 3))
    return Awkward(classes(model, tokens(3)), [], {"places.weight"})


def as_many_positions_as_examples() -> Awkward:
    """The shapes alone would not show it."""

    def use(net: Any, ids: Tensor) -> Tensor:
        return net.out(torch.tanh(net.table(ids) + net.places(torch.arange(ids.shape[1]))).sum(1))

    model = Net(use, table=nn.Embedding(4, 3), places=nn.Embedding(5, 3), out=nn.Linear(3, 3))
    return Awkward(classes(model, tokens(BATCH)), [], {"places.weight"})


def batch_second(length: int) -> Awkward:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(net.each(x.transpose(0, 1))).sum(0))

    model = Net(use, each=nn.Linear(3, 4), out=nn.Linear(4, 3))
    return Awkward(classes(model, normal(BATCH, length, 3)), [], {"each.weight", "each.bias"})


def batch_on_second_axis() -> Awkward:
    return batch_second(3)


def batch_on_second_axis_of_equal_length() -> Awkward:
    return batch_second(BATCH)


def positions_folded_into_the_batch() -> Awkward:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(net.each(x.flatten(0, 1))).unflatten(0, x.shape[:2]).sum(1))

    model = Net(use, each=nn.Linear(3, 4), out=nn.Linear(4, 3))
    return Awkward(classes(model, normal(BATCH, 2, 3)), [], {"each.weight", "each.bias"})


def output_size_given() -> Awkward:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(net.up(x, output_size=[6]).flatten(1))

    model = Net(use, up=nn.ConvTranspose1d(2, 1, 2, stride=2), out=nn.Linear(6, 2))
    case = classes(model, normal(BATCH, 2, 3))
    return Awkward(case, ["a ConvTranspose1d is not called on one tensor"], {"up.bias"}, {"up.weight"})


def hooked_output() -> Awkward:
    """A hook of the user's own that changes what a layer returns is respected."""
    case = fresh("mlp")
    case.model[0].register_forward_hook(lambda layer, args, output: 3 * output)
    return Awkward(case, [], set())


def one_position_alone() -> Awkward:
    """A batch of one is a batch, too."""
    awkward = positions_without_batch()
    case = awkward.case._replace(inputs=awkward.case.inputs[:1], targets=awkward.case.targets[:1])
    return awkward._replace(case=case)


AWKWARD: dict[str, Callable[[], Awkward]] = {
    make.__name__: make
    for make in (
        lstm, gru, attention, encoder_layer, own_parameter, overridden_forward, parametrized, custom_function,
        custom_function_and_own_parameter, checkpoint_not_reentrant, checkpoint_reentrant, weight_read_beside_the_call,
        positions_without_batch, as_many_positions_as_examples, batch_on_second_axis,
        batch_on_second_axis_of_equal_length, positions_folded_into_the_batch, output_size_given, hooked_output,
        one_position_alone,
    )
}  # fmt: skip
every_case = pytest.mark.parametrize("name", AWKWARD)


@every_case
def test_the_jacobian_is_exact_and_each_cause_is_said_once(name: str) -> None:
    torch.manual_seed(3)
    case, sentences, followed, fallback = AWKWARD[name]()
    selection = Selection.all_of(case.model)
    expected = jacobian_matrix(case, selection)
    case.model.saves = True
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = Engine(case.model, selection.names)
        for _ in range(2):
            tape = engine.run(case.inputs)
            columns = torch.cat(list(output_columns.identity(case.likelihood, tape.outputs, 2)))
            found = jacobian(tape.pull(columns), selection)
    close(found, expected)
    assert set(engine.fallback) == fallback
    assert set(engine.followed) == followed
    assert [str(one.message) for one in said if one.category is not FallbackWarning] == []
    assert len(said) == len(sentences)
    for one, piece in zip(said, sentences, strict=True):
        assert piece in str(one.message)


@pytest.mark.filterwarnings("ignore::dubito.curvature.FallbackWarning")
@every_case
def test_every_structure_works(name: str) -> None:
    torch.manual_seed(3)
    case, _, followed, fallback = AWKWARD[name]()
    chosen = {key: selections(case.model)[key] for key in ("all", "half")}
    expected = {key: gauss_newton(case, selection) for key, selection in chosen.items()}
    kron = None if followed or fallback else definition(case, "expand")
    case.model.saves = True
    for key, selection in chosen.items():
        truth = expected[key]
        close(dense(accumulate(case, selection, "full")), truth)
        close(accumulate(case, selection, "diag").diagonal(), truth.diagonal())
        rank = min(selection.num_weights, 12)
        close(dense(accumulate(case, selection, "low-rank", rank=rank)), truth, 1e-8)
        blocks = accumulate(case, selection, "kron")
        if kron is not None:
            whole = Selection.all_of(case.model, selection.names)
            where = whole.ravel({n: mask.double() for n, mask in selection.masks().items()}).nonzero().squeeze(1)
            close(dense(blocks), torch.block_diag(*(kron[n] for n in selection.names))[where][:, where], 1e-9)
        spans = [selection.slices[each] for each in fallback if each in selection.slices]
        assert bool(spans) == bool(fallback)
        for span in spans:
            close(blocks.diagonal()[span], truth.diagonal()[span])


@pytest.mark.filterwarnings("ignore::dubito.curvature.FallbackWarning")
@pytest.mark.parametrize("name", ["lstm", "gru", "attention", "encoder_layer"])
def test_recurrent_and_attention_kernels_in_float32(name: str) -> None:
    """These have other kernels than in float64, which differentiate by other means."""
    torch.manual_seed(3)
    case = AWKWARD[name]().case
    selection = Selection.all_of(case.model)
    expected = jacobian_matrix(case, selection)
    engine = Engine(case.model.float(), selection.names)
    tape = engine.run(case.inputs.float())
    columns = torch.cat(list(output_columns.identity(case.likelihood, tape.outputs, 9)))
    close(jacobian(tape.pull(columns), selection).double(), expected, 1e-5)


@pytest.mark.parametrize("name", [
    "mlp", "conv2d", "conv_transpose", "embedding", "norms", "tied_embedding", "attention", "called_often",
    "output_map", "regression",
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_reason_to_fall_back(name: str, dtype: torch.dtype) -> None:
    case = fresh(name)
    model = case.model.to(dtype)
    inputs = case.inputs.to(dtype) if case.inputs.is_floating_point() else case.inputs
    engine = Engine(model, [n for n, _ in model.named_parameters()])
    engine.run(inputs)
    assert engine.fallback == []


def test_gradients_that_cancel_are_no_reason_to_fall_back() -> None:
    """The bias of the keys changes nothing: both its gradients are rounding errors, and not the same ones."""
    torch.manual_seed(0)
    model = transformer(50, 3, length=40, width=32, depth=2, heads=4).eval()
    engine = Engine(model, [n for n, _ in model.named_parameters()])
    engine.run(torch.randint(1, 50, (8, 40)))
    assert engine.fallback == []


def test_many_parameters_make_one_sentence() -> None:
    class Powers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.powers = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([(x.abs() + 1).pow(power) for power in self.powers]).sum(0)

    model = Powers()
    names = [name for name, _ in model.named_parameters()]
    with pytest.warns(FallbackWarning, match="powers.0, powers.1, powers.2 and 9 more") as said:
        Engine(model, names).run(torch.randn(4, 3))
    assert len(said) == 1


def test_a_rule_that_cannot_make_rows_is_no_rule() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    @layers.register(Weighted)
    class Rule(layers.LayerRule[Weighted]):
        def apply(self, layer: Weighted, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return x * weight

    case = classes(nn.Sequential(nn.Linear(3, 4), Weighted(), nn.Tanh(), nn.Linear(4, 3)), normal(BATCH, 3))
    selection = Selection.all_of(case.model)
    engine = Engine(case.model, selection.names)
    tape = engine.run(case.inputs)
    assert engine.followed == ["1.weight"]
    assert "lacks `inputs_as_rows`" in engine.unruled["1.weight"]
    columns = next(output_columns.identity(case.likelihood, tape.outputs, 3))
    close(jacobian(tape.pull(columns), selection), jacobian_matrix(case, selection))


def test_a_second_look_at_the_first_real_batch() -> None:
    """One example alone cannot show that a layer takes the positions of its one sequence for a batch."""

    def use(net: Any, x: Tensor) -> Tensor:
        return net.out(torch.tanh(net.each(x.transpose(0, 1))).sum(0))

    case = classes(Net(use, each=nn.Linear(3, 4), out=nn.Linear(4, 3)), normal(BATCH, BATCH, 3))
    selection = Selection.all_of(case.model)
    engine = Engine(case.model, selection.names)
    engine.run(case.inputs[:1, :1])
    tape = engine.run(case.inputs)
    columns = next(output_columns.identity(case.likelihood, tape.outputs, 3))
    close(jacobian(tape.pull(columns), selection), jacobian_matrix(case, selection))


def test_batch_statistics_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    with pytest.raises(UnsupportedError, match="track_running_stats=True"):
        Engine(model, ["2.weight"])


@pytest.mark.filterwarnings("ignore::dubito.curvature.FallbackWarning")
def test_examples_that_depend_on_each_other_are_refused() -> None:
    def use(net: Any, x: Tensor) -> Tensor:
        h = torch.tanh(net.first(x))
        return net.out(h - h.mean(0))

    case = classes(Net(use, first=nn.Linear(3, 4), out=nn.Linear(4, 3)), normal(BATCH, 3))
    with pytest.raises(UnsupportedError, match="depend on the other examples"):
        Engine(case.model, ["first.weight"]).run(case.inputs)


@pytest.mark.parametrize("change", [torch.sum, lambda outputs: outputs.mT])
def test_outputs_without_a_batch_axis_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    def use(net: Any, x: Tensor) -> Tensor:
        return change(net.out(x))

    model = Net(use, out=nn.Linear(3, 2))
    with pytest.raises(InputError, match="the first axis must be the batch"):
        Engine(model, ["out.weight"]).run(torch.randn(BATCH, 3))


def test_an_error_of_the_model_is_not_swallowed() -> None:
    case = build("mlp")
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        Engine(case.model, ["0.weight"]).run(normal(BATCH, 5))
    assert outputs_of(case).shape == (BATCH, 4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("name", ["first.weight", "inner.weight"])
def test_a_scripted_layer_keeps_the_gradients_of_the_others(name: str) -> None:
    def use(net: Any, x: Tensor) -> Tensor:
        return net.inner(torch.tanh(net.first(x)))

    inner = nn.Linear(4, 3)
    plain = classes(Net(use, first=nn.Linear(3, 4), inner=inner), normal(BATCH, 3))
    scripted = Net(use, first=plain.model.first, inner=torch.jit.script(plain.model.inner))
    selection = Selection.all_of(plain.model, [name])
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        tape = Engine(scripted, [name]).run(plain.inputs)
        columns = next(output_columns.identity(plain.likelihood, tape.outputs, 3))
        close(jacobian(tape.pull(columns), selection), jacobian_matrix(plain, selection))
    assert all(value.requires_grad for value in scripted.parameters())
