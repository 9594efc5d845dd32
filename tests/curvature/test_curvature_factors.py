"""Every contraction of a factored gradient against the same contraction of the explicit one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from curvature.curvature_cases import CASES, build, engine_of
from dubito.core import limits, params
from dubito.curvature import Factor
from dubito.curvature.factors import CallsFactor, ConvolutionFactor
from dubito.curvature.layer_factors import layer_factors
from dubito.curvature.one_layer import one_layer
from dubito.networks.layers.rows import ElementwiseRows
from dubito.networks.selection import Selection
from oracles import close, normal

COLUMNS = 3
SOME_IN_CHUNKS = ("mlp", "conv2d", "conv_transpose", "embedding_called_twice", "norms", "called_often", "sequence")
AT_ONCE, IN_CHUNKS = [(name, 2**22) for name in CASES], [(name, 7) for name in SOME_IN_CHUNKS]


@pytest.fixture(params=AT_ONCE + IN_CHUNKS, ids=lambda param: f"{param[0]}-{param[1]}")
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a case, whose explicit gradients come in large or in tiny chunks."""
    with limits.using(chunk=4 * request.param[1]):
        yield request.param[0]


def pulled(name: str, shared: bool) -> dict[str, Factor]:
    """The factors of random columns, different for each example or the same for all."""
    case = build(name)
    tape = engine_of(case, params.trainable(case.model)).run(case.inputs)
    columns = normal(COLUMNS, *tape.outputs.shape)
    return tape.pull(columns[:, :1].expand_as(columns) if shared else columns)


def each(name: str) -> Iterator[tuple[Factor, Tensor]]:
    for shared in (False, True):
        for factor in pulled(name, shared).values():
            yield factor, factor.per_sample().flatten(2)


def test_sums(name: str) -> None:
    for factor, explicit in each(name):
        close(factor.summed().flatten(1), explicit.sum(1))
        close(factor.square_sum(), explicit.square().sum((0, 1)))


def test_gather(name: str) -> None:
    for factor, explicit in each(name):
        size = explicit.shape[-1]
        close(factor.gather(None), explicit)
        for positions in (torch.arange(0, size, 2), torch.tensor([size // 3]), torch.randperm(size)):
            close(factor.gather(positions), explicit[..., positions])


@pytest.mark.parametrize("case", ["conv2d", "conv_transpose"])
def test_few_entries_are_gathered_before_the_sum_over_positions(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = pulled(case, shared=False)["0.weight"]
    expected = factor.per_sample().flatten(2)[..., [5]]
    monkeypatch.setattr(ConvolutionFactor, "chunks", lambda self: pytest.fail("the whole gradient was formed"))
    close(factor.gather(torch.tensor([5])), expected)
    with pytest.raises(pytest.fail.Exception, match="the whole gradient"):
        factor.gather(torch.arange(18))


def closed(columns: Tensor) -> Tensor:
    """With the column that makes all of them add up to zero."""
    return torch.cat([columns, -columns.sum(0, keepdim=True)])


def test_weighted_squares(name: str) -> None:
    for factor, explicit in each(name):
        weight = torch.rand(explicit.shape[-1], dtype=torch.float64)
        close(factor.weighted_square(weight.reshape(factor.shape)), explicit.square() @ weight)
        close(factor.weighted_square(weight.reshape(factor.shape), closing=True), closed(explicit).square() @ weight)
        gram = torch.einsum("vbd,d,ubd->bvu", explicit, weight, explicit)
        close(factor.weighted_gram(weight.reshape(factor.shape)), gram)


def test_dots(name: str) -> None:
    for factor, explicit in each(name):
        directions, weights = normal(2, *factor.shape), normal(*explicit.shape[:2], 2)
        close(factor.dot(directions), explicit @ directions.flatten(1).mT)
        close(factor.backward_dot(weights), torch.einsum("vbk,vbd->kd", weights, explicit))


def test_rotations(name: str) -> None:
    checked = 0
    for factor, _ in each(name):
        if not isinstance(factor, CallsFactor) or not factor.calls:
            continue
        if any(isinstance(call.rows, ElementwiseRows) for call in factor.calls):
            continue
        kinds = {(type(call.rule), type(call.rows)) for call in factor.calls}
        if len(kinds) > 1:
            continue
        matrices = torch.stack([as_matrix(factor, one) for one in factor.per_sample().flatten(0, 1)])
        over_outputs, over_inputs = (normal(*matrices.shape[1:-2], size, size) for size in matrices.shape[-2:])
        if factor.is_embedding:
            left, right, turned = None, over_inputs, matrices @ over_inputs
        elif factor.calls[0].rows is None:
            left, right, turned = over_outputs, None, over_outputs.mT @ matrices
        else:
            left, right, turned = over_outputs, over_inputs, over_outputs.mT @ matrices @ over_inputs
        found = factor.rotated(left, right)
        explicit = turned.reshape(*found.per_sample().shape[:2], -1)
        close(found.per_sample().flatten(2), explicit)
        weight = torch.rand(turned.shape[1:], dtype=torch.float64)
        close(found.weighted_square(weight), explicit.square() @ weight.flatten())
        close(found.weighted_square(weight, closing=True), closed(explicit).square() @ weight.flatten())
        close(found.weighted_gram(weight), torch.einsum("vbd,d,ubd->bvu", explicit, weight.flatten(), explicit))
        checked += 1
    assert checked > 0


def as_matrix(factor: CallsFactor, gradient: Tensor) -> Tensor:
    """``[O, I]`` or ``[Gr, O, I]``; a bias is one column, an embedding's gradient dimensions are its last axis."""
    call = factor.calls[0]
    if call.rows is None:
        return gradient.reshape(-1, 1)
    return call.rule.to_matrix(call.layer, gradient)


def test_groups_put_a_weight_and_its_bias_together(name: str) -> None:
    case = build(name)
    found = pulled(name, shared=False)
    selection = Selection.all_of(case.model)
    groups = layer_factors(found, selection)
    assert sorted(n for one in groups for n in one.names) == sorted(found)
    for one in groups:
        values = {n: found[n].square_sum() for n in one.names}
        for n, split in one.split(one.factor.square_sum()).items():
            close(split, values[n])
        weights = {n: torch.rand(found[n].shape, dtype=torch.float64) for n in one.names}
        expected = sum(found[n].weighted_square(weights[n]) for n in one.names)
        close(one.factor.weighted_square(one.join(weights)), expected)


def test_pairs_are_found_where_they_can_be() -> None:
    found = {one.names for one in layer_factors(pulled("mlp", shared=False), Selection.all_of(build("mlp").model))}
    assert found == {("0.weight", "0.bias"), ("2.weight", "2.bias")}


@pytest.mark.parametrize("names", [["2.weight"], ["2.weight", "2.bias"]])
@pytest.mark.parametrize("shared", [False, True])
def test_one_layer(names: list[str], shared: bool) -> None:
    case = build("mlp")
    selection = Selection.all_of(case.model, names)
    chosen = {n: f for n, f in pulled("mlp", shared).items() if n in names}
    layer = one_layer(chosen, selection)
    rows = torch.cat([chosen[n].per_sample().flatten(2) for n in names], dim=-1)
    assert layer is not None
    found = torch.zeros(selection.num_weights, selection.num_weights, dtype=rows.dtype)
    layer.curvature.add_to(found)
    close(found.triu(), torch.einsum("vbd,vbe->de", rows, rows).triu())


@pytest.mark.parametrize("names", [["2.bias"], ["0.weight", "2.bias"], ["0.weight", "2.weight"]])
def test_what_is_not_one_layer(names: list[str]) -> None:
    case = build("mlp")
    assert one_layer(pulled("mlp", shared=False), Selection.all_of(case.model, names)) is None


def test_a_part_of_a_layer_is_not_one_layer() -> None:
    case = build("mlp")
    whole = Selection.all_of(case.model)
    part = Selection(whole.shapes, {"2.weight": torch.tensor([0, 3]), "2.bias": None})
    assert one_layer(pulled("mlp", shared=False), part) is None
