"""Kronecker factors against their definition, written out layer by layer from autograd's own gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.errors import UnsupportedError
from dubito.likelihoods import Categorical, Gaussian
from torch import Tensor, nn

from curvature.curvature_cases import (
    BATCH,
    CASES,
    Case,
    Net,
    accumulate,
    build,
    classes,
    dense,
    gauss_newton,
    selections,
)
from curvature.kronecker_definition import definition
from dubito import Laplace
from dubito.curvature import Engine, output_columns
from dubito.curvature import matrices as linalg
from dubito.curvature.structures import make_accumulator
from dubito.networks.selection import Selection
from oracles import close, normal

# factors belong to layers: an overwritten output of one would make autograd's gradient another one
every_case = pytest.mark.parametrize("name", [name for name in CASES if name != "overwritten_data"])
every_mode = pytest.mark.parametrize("mode", ["expand", "reduce"])


@every_case
@every_mode
def test_blocks_are_those_of_the_definition(name: str, mode: str) -> None:
    case = build(name)
    blocks = definition(case, mode)
    for chosen, selection in selections(case.model).items():
        whole = torch.block_diag(*[blocks[n] for n in selection.names])
        sizes = [torch.Size(selection.shapes[n]).numel() for n in selection.names]
        offsets = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        where = torch.cat([o + selection.positions(n) for o, n in zip(offsets, selection.names, strict=True)])
        found = accumulate(case, selection, "kron", mode=mode)
        close(dense(found), whole[where][:, where], 1e-9)  # a part of the weights: the principal submatrix
        close(found.diagonal(), whole.diagonal()[where], 1e-9)
        if chosen == "all":
            kinds = {type(block) for block in found.blocks}
            assert linalg.Block in kinds


@pytest.mark.parametrize("likelihood", [Gaussian(noise=0.5), Categorical()])
def test_one_linear_layer_with_one_datum_is_exact(likelihood: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    case = Case(model, normal(1, 3), likelihood, likelihood.sample(normal(1, 4)))
    for name in ("weight", "bias"):  # each is exact; between them there is nothing
        selection = Selection.all_of(model, [name])
        close(dense(accumulate(case, selection, "kron")), gauss_newton(case, selection))


def test_a_linear_model_with_constant_hessian_is_exact() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False).double()
    case = Case(model, normal(20, 3), Gaussian(noise=0.5), normal(20, 4))
    selection = Selection.all_of(model)
    close(dense(accumulate(case, selection, "kron")), gauss_newton(case, selection))


def test_weight_and_bias_share_one_decomposition() -> None:
    case = build("mlp")
    found = accumulate(case, selections(case.model)["all"], "kron")
    weight, bias, *_ = found.blocks
    assert bias.left is weight.left


class Folding(nn.Module):
    """Positions are rows of their own axis or, once told so, more examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.folds = nn.Linear(3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        if self.folds:
            return (x @ self.layer.weight.mT.sin()).sum(1)
        return self.layer(x).sum(1)


def test_a_layer_that_is_used_in_two_ways_has_no_factors() -> None:
    model, likelihood = Folding().double(), Categorical()
    selection = Selection.all_of(model)
    engine = Engine(model, selection.names)
    accumulator = make_accumulator("kron", engine, selection)
    sums = accumulator.zeros()

    def add() -> None:
        tape = engine.run(normal(4, 2, 3))
        columns = output_columns.columns("ggn", likelihood, tape.outputs, torch.zeros(4, dtype=torch.long))
        accumulator.add(sums, tape, columns)

    add()
    engine.model.folds = True
    engine._tried = 0  # as another engine that goes on with the sums
    with pytest.raises(UnsupportedError, match="'diag'"):
        add()


@pytest.mark.filterwarnings("ignore::dubito.curvature.FallbackWarning")
def test_a_bias_keeps_its_curvature_where_its_weight_has_no_factors() -> None:
    """The weight is read beside its layer, so no rule covers it; the bias is used as the rule says."""

    def use(net: Any, x: Tensor) -> Tensor:
        return net.first(x) + x @ net.first.weight.mT.sin()

    case = classes(Net(use, first=nn.Linear(3, 4)), normal(BATCH, 3))
    selection = Selection.all_of(case.model)
    posterior = Laplace(structure="kron", prior_precision=1.0).fit(
        case.model, (case.inputs, case.targets), likelihood=case.likelihood, progress=False
    )
    truth = gauss_newton(case, selection)[selection.slices["first.bias"], selection.slices["first.bias"]]
    found = posterior.matrix.matmul(torch.eye(selection.num_weights).double())
    close(found[selection.slices["first.bias"], selection.slices["first.bias"]], truth)
