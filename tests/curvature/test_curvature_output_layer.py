"""The shortcut for the layer that gives the outputs says what all columns of the root would say."""

from __future__ import annotations

import pytest
import torch
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from torch import Tensor, nn

from curvature.curvature_cases import (
    Case,
    Net,
    accumulate,
    build,
    classes,
    dense,
    engine_of,
    output_hessian,
    outputs_of,
)
from dubito.core import limits
from dubito.curvature.output_columns import few_columns, hessian_diagonal, hessian_sum, is_direct, is_one_linear
from dubito.curvature.structures import make_accumulator
from dubito.networks.selection import Selection
from oracles import close, normal

LIKELIHOODS = [Categorical(), Categorical(ignore_index=1), Bernoulli(), Gaussian(noise=0.7), HeteroscedasticGaussian()]
every_likelihood = pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)


def linear_case(likelihood: Likelihood, batch: int) -> Case:
    torch.manual_seed(0)
    return classes(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 4)), normal(batch, 3), likelihood)


@every_likelihood
@pytest.mark.parametrize("batch", [3, 9])  # fewer examples than outputs, and more
@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("names", [["2.weight", "2.bias"], ["2.weight"], ["2.bias"]])
def test_few_columns_say_it_all(likelihood: Likelihood, batch: int, structure: str, names: list[str]) -> None:
    case = linear_case(likelihood, batch)
    whole = Selection.all_of(case.model, names)
    part = Selection(whole.shapes, {name: torch.tensor([0, 2, 3]) for name in names})
    for selection in (whole, part):
        engine = engine_of(case, selection.names)
        accumulator, tape = make_accumulator(structure, engine, selection), engine.run(case.inputs)
        assert is_one_linear(tape)
        sums = accumulator.zeros()
        accumulator.add(sums, tape, [few_columns(structure, likelihood, tape.outputs.detach(), case.targets)])
        close(dense(accumulator.matrix(sums)), dense(accumulate(case, selection, structure)), 1e-9)


@every_likelihood
def test_output_hessians(likelihood: Likelihood) -> None:
    case = linear_case(likelihood, 5)
    outputs, expected = outputs_of(case), output_hessian(case)
    for chunk in (2**24, 4):
        with limits.using(chunk=chunk):
            close(hessian_diagonal(likelihood, outputs, case.targets), expected.diagonal(dim1=1, dim2=2))
            close(hessian_sum(likelihood, outputs, case.targets), expected.sum(0))


def test_curvature_of_almost_certain_classes_does_not_vanish_by_rounding() -> None:
    outputs = torch.tensor([[40.0, 0.0]])
    found = hessian_diagonal(Categorical(), outputs, torch.tensor([0]))
    close(found.double(), torch.full((1, 2), 4.248354e-18, dtype=torch.float64), 1e-6)
    assert bool((found > 0).all())


def test_where_the_shortcuts_hold() -> None:
    def asked(name: str, names: list[str]) -> tuple[bool, bool]:
        case = build(name)
        tape = engine_of(case, names).run(case.inputs)
        return is_direct(tape), is_one_linear(tape)

    assert asked("mlp", ["2.weight", "2.bias"]) == (True, True)
    assert asked("mlp", ["0.weight", "2.weight"]) == (False, False)
    assert asked("mlp", ["0.weight"]) == (False, False)
    assert asked("output_map", ["2.weight"]) == (True, False)  # a convolution
    assert asked("output_per_position", ["2.weight"]) == (True, False)
    assert asked("norms", ["10.weight"]) == (True, False)
    assert asked("tied_embedding", ["encode.weight"]) == (False, False)
    assert asked("skip", ["out.weight"]) == (False, False)  # another layer is added to it
    assert asked("unused", ["never.weight"]) == (True, False)
    assert asked("unused", ["ignored.weight"]) == (False, False)


def test_no_shortcut_where_the_last_layer_is_used_twice() -> None:
    def use(net: Net, x: Tensor) -> Tensor:
        return net.out(x) + nn.functional.linear(x, net.out.weight)

    case = classes(Net(use, out=nn.Linear(3, 3)), normal(4, 3))
    tape = engine_of(case, ["out.weight"]).run(case.inputs)
    assert not is_direct(tape)
