"""``J Σ Jᵀ`` of every structure, selection and layer type against dense matrices and brute-force Jacobians."""

from __future__ import annotations

import pytest
import torch
from dubito.errors import UnsupportedError
from dubito.likelihoods import Categorical
from torch import Tensor, nn

from curvature.curvature_cases import CASES, Case, accumulate, build, dense, engine_of, jacobian_matrix, selections
from dubito.core import limits
from dubito.curvature import Engine, output_columns
from dubito.curvature import matrices as linalg
from dubito.curvature.factor import Factor
from dubito.curvature.functional import FunctionalTerms, joint_covariance
from dubito.curvature.matrices.kronecker import kronecker_block
from dubito.networks.selection import Selection
from oracles import close, normal

SCALE = torch.tensor(0.7, dtype=torch.float64)
every_case = pytest.mark.parametrize("name", CASES)
every_structure = pytest.mark.parametrize("structure", ["diag", "full", "kron", "low-rank"])


def priors(selection: Selection, structure: str) -> list[Tensor]:
    """One precision for all weights, and one per weight; a Kronecker block allows one per parameter only."""
    draws = torch.Generator().manual_seed(2)
    each = 0.2 + torch.rand(selection.num_weights, generator=draws, dtype=torch.float64)
    if structure == "kron":
        for span in selection.slices.values():
            each[span] = each[span.start].clone()
    return [torch.tensor(0.4, dtype=torch.float64), each]


def inverse(matrix: linalg.Matrix, prior: Tensor) -> Tensor:
    return torch.linalg.inv(SCALE * dense(matrix) + torch.diag(prior.expand(matrix.size)))


def pulled(case: Case, selection: Selection, centred: bool = False) -> dict[str, Factor]:
    tape = engine_of(case, selection.names).run(case.inputs)
    columns = output_columns.identity(case.likelihood, tape.outputs, 1000, centred=centred)
    return tape.pull(next(columns))


@every_case
@every_structure
def test_variance_and_covariance(name: str, structure: str) -> None:
    case = build(name)
    for selection in selections(case.model).values():
        matrix = accumulate(case, selection, structure, rank=3)
        jacobian = jacobian_matrix(case, selection)
        terms = FunctionalTerms(matrix, selection, pulled(case, selection))
        for prior in priors(selection, structure):
            covariance = matrix.covariance(prior, SCALE)
            expected = torch.einsum("vbd,de,ube->bvu", jacobian, inverse(matrix, prior), jacobian)
            close(terms.gram(covariance), expected, 1e-8)
            close(terms.variance(covariance), expected.diagonal(dim1=1, dim2=2).mT, 1e-8)
            if structure in ("diag", "kron"):  # with the column that makes all of them add up to zero
                last = expected.sum((1, 2))[None]
                found = terms.variance(covariance, closing=True)
                close(found, torch.cat([expected.diagonal(dim1=1, dim2=2).mT, last]), 1e-8)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "embedding", "norms", "tied_linear", "skip", "linear_alone"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_parts_of_a_batch_may_share_memory(name: str, structure: str) -> None:
    case = build(name)
    selection = selections(case.model)["all"]
    matrix = accumulate(case, selection, structure)
    prior = priors(selection, structure)[1]
    jacobian, covariance = jacobian_matrix(case, selection), matrix.covariance(prior, SCALE)
    expected = torch.einsum("vbd,de,vbe->vb", jacobian, inverse(matrix, prior), jacobian)
    engine, parts = engine_of(case, selection.names), 0
    with limits.using(gradients=1):
        for rows, tape in engine.chunks(case.inputs, 1000):
            for columns in output_columns.identity(case.likelihood, tape.outputs, 2):
                start = parts % len(expected)
                with tape.lend() as memory:
                    terms = FunctionalTerms(matrix, selection, tape.pull(columns, memory), memory)
                    close(terms.variance(covariance), expected[start : start + len(columns), rows], 1e-8)
                parts += len(columns)
    assert parts > len(expected)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "embedding", "norms", "output_per_position", "output_map"])
@every_structure
def test_columns_that_are_centred_over_the_classes(name: str, structure: str) -> None:
    case = build(name)
    selection = selections(case.model)["all"]
    matrix = accumulate(case, selection, structure, rank=3)
    jacobian = jacobian_matrix(case, selection)
    per_class = jacobian.unflatten(0, (-1, case.likelihood.canonical(case.model(case.inputs)).shape[-1]))
    centred = (per_class - per_class.mean(1, keepdim=True)).flatten(0, 1)
    prior = priors(selection, structure)[0]
    expected = torch.einsum("vbd,de,vbe->vb", centred, inverse(matrix, prior), centred)
    found = FunctionalTerms(matrix, selection, pulled(case, selection, centred=True))
    close(found.variance(matrix.covariance(prior, SCALE)), expected, 1e-8)


@pytest.mark.parametrize("names", [["2.weight"], ["2.weight", "2.bias"], ["0.weight", "0.bias"]])
@every_structure
def test_one_whole_layer(names: list[str], structure: str) -> None:
    """The last layer, whose columns are the same for all examples, and another one."""
    case = build("mlp")
    selection = Selection.all_of(case.model, names)
    matrix = accumulate(case, selection, structure, rank=3)
    jacobian = jacobian_matrix(case, selection)
    factors = pulled(case, selection)
    for prior in priors(selection, structure):
        covariance = matrix.covariance(prior, SCALE)
        expected = torch.einsum("vbd,de,ube->bvu", jacobian, inverse(matrix, prior), jacobian)
        for part in (slice(0, 2), slice(1, 3), slice(0, 4)):  # other columns under the same covariance
            some = engine_of(case, names).run(case.inputs)
            columns = next(output_columns.identity(case.likelihood, some.outputs, 4))[part]
            terms = FunctionalTerms(matrix, selection, some.pull(columns))
            close(terms.variance(covariance), expected.diagonal(dim1=1, dim2=2).mT[part], 1e-8)
        terms = FunctionalTerms(matrix, selection, factors)
        close(terms.gram(covariance), expected, 1e-8)
        for rows in (slice(0, 1), slice(1, 4)):  # other examples under the same covariance
            tape = engine_of(case, names).run(case.inputs[rows])
            columns = next(output_columns.identity(case.likelihood, tape.outputs, 4))
            terms = FunctionalTerms(matrix, selection, tape.pull(columns))
            close(terms.variance(covariance), expected.diagonal(dim1=1, dim2=2).mT[:, rows], 1e-8)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "embedding"])
@every_structure
def test_many_priors_share_one_contraction(name: str, structure: str) -> None:
    case = build(name)
    for selection in (selections(case.model)[key] for key in ("all", "half")):
        matrix = accumulate(case, selection, structure, rank=3)
        shared = FunctionalTerms(matrix, selection, pulled(case, selection))
        grid = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
        for prior, covariance in zip(grid, matrix.covariances(grid, SCALE), strict=True):
            alone = FunctionalTerms(matrix, selection, pulled(case, selection))
            close(shared.variance(covariance), alone.variance(matrix.covariance(prior, SCALE)), 1e-8)
            close(shared.gram(covariance), alone.gram(matrix.covariance(prior, SCALE)), 1e-8)


@pytest.mark.parametrize("name", ["mlp", "conv_transpose", "embedding"])
@every_structure
def test_joint_covariance(name: str, structure: str) -> None:
    case = build(name)
    for selection in (selections(case.model)[key] for key in ("all", "half")):
        matrix = accumulate(case, selection, structure, rank=3)
        prior = priors(selection, structure)[1]
        rows = jacobian_matrix(case, selection).transpose(0, 1).flatten(0, 1)
        found = joint_covariance(matrix.covariance(prior, SCALE), selection, pulled(case, selection))
        close(found, rows @ inverse(matrix, prior) @ rows.mT, 1e-8)


def test_a_bias_with_a_basis_of_its_own() -> None:
    case = build("mlp")
    selection = Selection.all_of(case.model)
    matrix = accumulate(case, selection, "kron")
    root = normal(1, 5, 5)
    own = kronecker_block(root @ root.mT, None, torch.ones(()))
    other = linalg.Kronecker([matrix.blocks[0], own, *matrix.blocks[2:]])
    jacobian, prior = jacobian_matrix(case, selection), torch.tensor(0.4, dtype=torch.float64)
    expected = torch.einsum("vbd,de,vbe->vb", jacobian, inverse(other, prior), jacobian)
    found = FunctionalTerms(other, selection, pulled(case, selection)).variance(other.covariance(prior, SCALE))
    close(found, expected)


class Switch(nn.Module):
    """A convolution that is read, not called, once it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.reads = nn.Conv1d(2, 3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        if self.reads:
            return nn.functional.conv1d(x, self.conv.weight.acos().cos(), self.conv.bias).sum(-1)
        return self.conv(x).sum(-1)


def test_a_parameter_that_has_factors_but_no_rows_any_more() -> None:
    """The engine that predicts is another one than that which was fitted, and may find another way."""
    torch.manual_seed(0)
    model, inputs = Switch().double(), normal(4, 2, 3)
    case = Case(model, inputs, Categorical(), torch.tensor([0, 1, 2, 0]))
    selection = Selection.all_of(model)
    matrix = accumulate(case, selection, "kron")
    prior = torch.tensor(0.4, dtype=torch.float64)
    expected = FunctionalTerms(matrix, selection, pulled(case, selection)).gram(matrix.covariance(prior, SCALE))
    engine = Engine(model, selection.names)
    engine.model.reads = True
    tape = engine.run(inputs)
    assert engine.followed == ["conv.weight", "conv.bias"]
    factors = tape.pull(next(output_columns.identity(case.likelihood, tape.outputs, 9)))
    close(FunctionalTerms(matrix, selection, factors).gram(matrix.covariance(prior, SCALE)), expected)


def test_low_rank_variance_is_never_negative() -> None:
    """In float32 the part that data explain away can exceed the whole by rounding."""
    torch.manual_seed(0)
    model, one = nn.Linear(300, 1, bias=False), torch.ones((), dtype=torch.float64)
    selection = Selection.all_of(model)
    engine = Engine(model, selection.names)
    for x in torch.randn(30, 1, 300):
        direction = torch.nn.functional.normalize(x.double(), dim=1).mT
        matrix = linalg.LowRank(direction, torch.tensor([1e12], dtype=torch.float64))
        terms = FunctionalTerms(matrix, selection, engine.run(x).pull(torch.ones(1, 1, 1)))
        assert float(terms.variance(matrix.covariance(one, one))) >= 0.0


def test_an_unknown_covariance_is_refused() -> None:
    class Other(linalg.Covariance):
        def variance(self) -> Tensor:
            return torch.ones(1)

        def solve(self, vectors: Tensor) -> Tensor:
            return vectors

        def color(self, noise: Tensor) -> Tensor:
            return noise

    case = build("mlp")
    selection = selections(case.model)["all"]
    terms = FunctionalTerms(linalg.Diagonal(torch.ones(selection.num_weights)), selection, pulled(case, selection))
    with pytest.raises(UnsupportedError, match="Other"):
        terms.variance(Other())
