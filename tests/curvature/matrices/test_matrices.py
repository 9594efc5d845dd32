"""Every structured matrix against the dense one that it stands for: one suite for all structures, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dubito.errors import InputError, NonFiniteError
from torch import Tensor

from dubito.core import io
from dubito.curvature import matrices as linalg
from dubito.curvature.matrices import low_rank
from dubito.curvature.matrices.kronecker import kronecker_block
from oracles import close, normal

SCALE = torch.tensor(0.7, dtype=torch.float64)


def semidefinite(*lead: int, size: int, rank: int | None = None) -> Tensor:
    root = normal(*lead, size, rank or size)
    return root @ root.mT


def diagonal() -> tuple[linalg.Matrix, Tensor]:
    values = torch.rand(6, dtype=torch.float64)
    values[2] = 0.0
    return linalg.Diagonal(values), torch.diag(values)


def full() -> tuple[linalg.Matrix, Tensor]:
    matrix = semidefinite(size=6)
    return linalg.Dense(matrix), matrix


def full_singular() -> tuple[linalg.Matrix, Tensor]:
    matrix = semidefinite(size=6, rank=3)
    return linalg.Dense(matrix), matrix


def full_decomposed() -> tuple[linalg.Matrix, Tensor]:
    """Once the eigenvectors are known they are used."""
    matrix = semidefinite(size=6)
    made = linalg.Dense(matrix)
    _ = made.eigen
    return made, matrix


def low_rank_matrix() -> tuple[linalg.Matrix, Tensor]:
    vectors, values = torch.linalg.qr(normal(8, 3)).Q, torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64)
    return linalg.LowRank(vectors, values), (vectors * values) @ vectors.mT


def kronecker() -> tuple[linalg.Matrix, Tensor]:
    """A weight, its bias, a grouped and a reordered weight, an embedding, a part of a layer and a norm."""
    count = torch.tensor(5.0, dtype=torch.float64)
    left, right = semidefinite(1, size=3), semidefinite(1, size=2)
    grouped = semidefinite(2, size=2), semidefinite(2, size=3)
    order, counts = torch.randperm(6), torch.tensor([2.0, 0.0, 3.0], dtype=torch.float64)
    weight = kronecker_block(left, right, count)
    blocks: list[linalg.Block | linalg.Dense | linalg.Diagonal] = [
        weight,
        linalg.Block(weight.left_values[..., None], weight.left, None),
        kronecker_block(left, None, torch.ones(())),
        kronecker_block(*grouped, count),
        kronecker_block(left, right, count, order),
        kronecker_block(semidefinite(1, size=2), counts, count),
        linalg.Dense(semidefinite(size=3)),
        linalg.Diagonal(torch.rand(4, dtype=torch.float64)),
    ]
    plain = torch.kron(left[0], right[0]) / 5
    back = order.argsort()
    embedding = blocks[5]
    over_dimensions = (embedding.right[0] * embedding.values[0, 0] / 2) @ embedding.right[0].mT  # of one occurrence
    dense = [
        plain,
        left[0],
        left[0],
        torch.block_diag(*[torch.kron(x, y) / 5 for x, y in zip(*grouped, strict=True)]),
        plain[back][:, back],
        torch.kron(torch.diag(counts), over_dimensions),
        blocks[6].matrix,
        torch.diag(blocks[7].values),
    ]
    return linalg.Kronecker(blocks), torch.block_diag(*dense)


MATRICES: dict[str, Callable[[], tuple[linalg.Matrix, Tensor]]] = {
    make.__name__: make for make in (diagonal, full, full_singular, full_decomposed, low_rank_matrix, kronecker)
}


@pytest.fixture(params=MATRICES)
def matrices(request: pytest.FixtureRequest) -> tuple[linalg.Matrix, Tensor]:
    torch.manual_seed(0)
    return MATRICES[request.param]()


def priors(matrix: linalg.Matrix) -> list[Tensor]:
    """One λ for all weights, and one each (one per block where a block needs it)."""
    each = 0.2 + torch.rand(matrix.size, dtype=torch.float64)
    if isinstance(matrix, linalg.Kronecker):
        for block, span in zip(matrix.blocks, matrix.slices, strict=True):
            if isinstance(block, linalg.Block):
                each[span] = each[span.start].clone()
    return [torch.tensor(0.4, dtype=torch.float64), each]


def precision(dense: Tensor, prior: Tensor, scale: Tensor = SCALE) -> Tensor:
    return scale * dense + torch.diag(prior.expand(len(dense)))


def test_products_and_the_diagonal(matrices: tuple[linalg.Matrix, Tensor]) -> None:
    matrix, dense = matrices
    assert matrix.size == len(dense)
    vectors = normal(2, 3, matrix.size)
    close(matrix.matmul(vectors), vectors @ dense)
    close(matrix.matmul(vectors[0, 0]), vectors[0, 0] @ dense)
    close(matrix.diagonal(), dense.diagonal())
    for prior in priors(matrix):
        close(matrix.precision_matmul(vectors, prior, SCALE), vectors @ precision(dense, prior))


def test_log_determinant(matrices: tuple[linalg.Matrix, Tensor]) -> None:
    matrix, dense = matrices
    for prior in priors(matrix):
        close(matrix.log_det(prior, SCALE), torch.logdet(precision(dense, prior)))


def test_gradients_of_the_log_determinant(matrices: tuple[linalg.Matrix, Tensor]) -> None:
    matrix, _ = matrices
    one, each = (prior.requires_grad_() for prior in priors(matrix))
    scale = SCALE.clone().requires_grad_()
    assert torch.autograd.gradcheck(matrix.log_det, (one, scale))
    if not isinstance(matrix, linalg.Kronecker):
        assert torch.autograd.gradcheck(matrix.log_det, (each, scale))
        return
    sizes = torch.tensor([span.stop - span.start for span in matrix.slices])
    per_block = torch.rand(len(sizes), dtype=torch.float64).add(0.2).requires_grad_()
    spread = lambda values, scale: matrix.log_det(values.repeat_interleave(sizes), scale)  # noqa: E731
    assert torch.autograd.gradcheck(spread, (per_block, scale))


def test_covariance(matrices: tuple[linalg.Matrix, Tensor]) -> None:
    matrix, dense = matrices
    for prior in priors(matrix):
        covariance, expected = matrix.covariance(prior, SCALE), torch.linalg.inv(precision(dense, prior))
        vectors = normal(2, 3, matrix.size)
        close(covariance.solve(vectors), vectors @ expected)
        close(covariance.variance(), expected.diagonal())
        # the map from noise to draws is linear: its matrix is a square root of the covariance
        root = covariance.color(torch.eye(matrix.size, dtype=torch.float64))
        close(root.mT @ root, expected)


def test_covariances_of_several_priors(matrices: tuple[linalg.Matrix, Tensor]) -> None:
    matrix, _ = matrices
    grid, vectors = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64), normal(2, matrix.size)
    for prior, covariance in zip(grid, matrix.covariances(grid, SCALE), strict=True):
        close(covariance.solve(vectors), matrix.covariance(prior, SCALE).solve(vectors))


def test_covariances_of_a_dense_block_share_one_basis() -> None:
    """Otherwise a grid of 45 prior precisions takes 45 times the memory of the block, and as many decompositions."""
    matrix = kronecker()[0]
    assert isinstance(matrix, linalg.Kronecker)
    found: Any = matrix.covariances(torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64), SCALE)
    dense = [k for k, block in enumerate(matrix.blocks) if isinstance(block, linalg.Dense)]
    assert dense
    assert all(each.parts[k].basis is found[0].parts[k].basis for k in dense for each in found)


def test_samples(matrices: tuple[linalg.Matrix, Tensor]) -> None:
    matrix, _ = matrices
    covariance = matrix.covariance(priors(matrix)[0], SCALE)
    like = torch.zeros((), dtype=torch.float32)
    draws = [covariance.sample(4, matrix.size, torch.Generator().manual_seed(5), like) for _ in range(2)]
    assert draws[0].shape == (4, matrix.size)
    assert draws[0].dtype == torch.float32
    assert torch.equal(*draws)
    noise = torch.randn(4, matrix.size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    close(draws[0], covariance.color(noise).float(), 1e-6)


def test_state_round_trip(matrices: tuple[linalg.Matrix, Tensor], tmp_path: pytest.TempPathFactory) -> None:
    matrix, dense = matrices
    path = tmp_path / "matrix.safetensors"
    io.save(path, "matrix", matrix.state())
    again = type(matrix).from_state(io.load(path, "matrix"))
    assert torch.equal(again.matmul(torch.eye(matrix.size).double()), matrix.matmul(torch.eye(matrix.size).double()))
    for prior in priors(matrix):
        assert torch.equal(again.log_det(prior, SCALE), matrix.log_det(prior, SCALE))
    close(again.diagonal(), dense.diagonal())


@pytest.mark.parametrize("per_weight", [False, True])
def test_a_singular_precision_is_said_to_be_so(per_weight: bool) -> None:
    nothing = torch.zeros((), dtype=torch.float64)
    known = linalg.Dense(torch.zeros(3, 3))
    _ = known.eigen
    block = kronecker_block(torch.zeros(1, 3, 3), torch.zeros(1, 1, 1), torch.ones(()))
    matrices = [
        linalg.Diagonal(torch.zeros(3)),
        linalg.Dense(torch.zeros(3, 3)),
        known,
        linalg.LowRank(torch.eye(3)[:, :1], torch.ones(1)),
        linalg.Kronecker([block]),
    ]
    for matrix in matrices:
        with pytest.raises(InputError, match=r"singular.*raise prior_precision"):
            matrix.covariance(nothing.expand(3) if per_weight else nothing, SCALE)


def test_directions_that_rounding_made_negative_count_as_none() -> None:
    """A sum of outer products in float32 is not quite positive semi-definite; it need not be refused."""
    torch.manual_seed(0)
    exact = 1e4 * semidefinite(size=6, rank=2)
    rounded = exact - 1e-3 * torch.eye(6, dtype=torch.float64)
    for prior in (torch.tensor(1e-4, dtype=torch.float64), torch.full((6,), 1e-4, dtype=torch.float64)):
        found = linalg.Dense(rounded).covariance(prior, torch.ones(()))
        close(found.variance(), torch.linalg.inv(exact + 1e-4 * torch.eye(6)).diagonal(), 1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_curvature_that_is_not_finite_is_said_to_be_so(bad: float) -> None:
    prior = torch.ones((), dtype=torch.float64)
    broken = torch.full((3, 3), bad, dtype=torch.float64)
    for matrix in (linalg.Diagonal(broken[0]), linalg.Dense(broken)):
        with pytest.raises(NonFiniteError, match="curvature is not finite"):
            matrix.covariance(prior, SCALE)
    with pytest.raises(NonFiniteError, match="curvature is not finite"):
        linalg.Dense(broken).log_det(prior, SCALE)
    with pytest.raises(NonFiniteError, match="curvature is not finite"):
        kronecker_block(broken[None], None, torch.ones(()))
    with pytest.raises(NonFiniteError, match="curvature is not finite"):
        linalg.LowRank(torch.eye(3), broken[0])


def test_a_kronecker_block_needs_one_prior_precision() -> None:
    torch.manual_seed(0)
    matrix = linalg.Kronecker([kronecker_block(semidefinite(1, size=2), semidefinite(1, size=3), torch.ones(()))])
    each = torch.arange(1.0, 7.0, dtype=torch.float64)
    for ask in (matrix.log_det, matrix.covariance):
        with pytest.raises(InputError, match="one prior precision for all of its weights"):
            ask(each, SCALE)


def test_adding_low_rank_matrices() -> None:
    torch.manual_seed(0)
    first, second = (linalg.LowRank(torch.linalg.qr(normal(8, 2)).Q, torch.rand(2).double()) for _ in range(2))
    identity = torch.eye(8, dtype=torch.float64)
    dense = first.matmul(identity) + second.matmul(identity)
    close(low_rank.add(first, second, 4).matmul(identity), dense)
    values, vectors = torch.linalg.eigh(dense)
    best = (vectors[:, -3:] * values[-3:]) @ vectors[:, -3:].mT
    close(low_rank.add(first, second, 3).matmul(identity), best)


def test_a_dense_covariance_and_its_root() -> None:
    torch.manual_seed(0)
    matrix = semidefinite(size=4)
    covariance = linalg.Dense(matrix).covariance(torch.ones((), dtype=torch.float64), SCALE)
    close(covariance.matrix, torch.linalg.inv(SCALE * matrix + torch.eye(4)))


@pytest.mark.parametrize("size", [3, 200, 1100])
def test_products_with_a_triangular_root_leave_out_zeros_only(size: int) -> None:
    rows = torch.randn(5, 2, size, dtype=torch.float64)
    root = torch.randn(size, size, dtype=torch.float64)
    for known in (root.triu(), root):
        covariance = linalg.DenseCovariance(known, is_triangular=known is not root)
        close(covariance.times_root(rows), rows @ known)
        close(covariance.variance_along(rows), (rows @ known).square().sum(-1))


@pytest.mark.parametrize("size", [1, 300, 701])
def test_the_root_of_a_covariance_is_triangular_and_inverts_the_precision(size: int) -> None:
    rows = torch.randn(400, size, dtype=torch.float64)
    matrix, one = linalg.Dense(rows.mT @ rows), torch.ones((), dtype=torch.float64)
    before = matrix.matrix.clone()
    covariance = matrix.covariance(one, one)
    assert covariance.is_triangular
    assert not covariance.root.tril(-1).any()
    precision = before + torch.eye(size, dtype=torch.float64)
    close(covariance.root.mT @ precision @ covariance.root, torch.eye(size, dtype=torch.float64))
    assert torch.equal(matrix.matrix, before)  # the factor has memory of its own


def halved(matrix: Tensor) -> Tensor:
    """A matrix whose lower half is nonsense."""
    return matrix.triu() + 7 * torch.ones_like(matrix).tril(-1)


class TestHalf:
    """The root of a covariance in the lower half of the matrix."""

    @pytest.fixture(params=[1, 3, 8, 9, 30])
    def matrix(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tensor:
        torch.manual_seed(0)
        monkeypatch.setattr("dubito.curvature.matrices.dense.BLOCK", 4)
        monkeypatch.setattr("dubito.curvature.matrices.dense.AT_ONCE", 4)
        return semidefinite(size=request.param)

    def test_equals_a_root_of_its_own(self, matrix: Tensor) -> None:
        size = len(matrix)
        for prior in (torch.tensor(0.3, dtype=torch.float64), 0.1 + torch.rand(size, dtype=torch.float64)):
            memory = halved(matrix)
            lending = linalg.Dense(memory, lends=True)
            found, expected = lending.covariance(prior, SCALE), linalg.Dense(matrix).covariance(prior, SCALE)
            assert found.basis.matrix.data_ptr() == memory.data_ptr()
            assert torch.equal(memory.triu(), matrix.triu())
            close(found.root, expected.root)
            close(found.variance(), expected.variance())
            rows = torch.randn(3, size, dtype=torch.float64)
            close(found.times_root(rows), expected.times_root(rows))
            close(found.variance_along(rows), expected.variance_along(rows))
            columns = [torch.nn.functional.pad(c, (0, 0, 0, size - len(c))) for c in found.root_columns()]
            close(torch.cat(columns, dim=1), expected.root)
            columns = [torch.nn.functional.pad(c, (0, 0, 0, size - len(c))) for c in expected.root_columns()]
            close(torch.cat(columns, dim=1), expected.root)

    def test_a_second_covariance_leaves_the_first_alone(self, matrix: Tensor) -> None:
        lending = linalg.Dense(halved(matrix), lends=True)
        first = lending.covariance(torch.tensor(0.3, dtype=torch.float64), SCALE)
        second = lending.covariance(torch.tensor(3.0, dtype=torch.float64), SCALE)
        for found, prior in ((first, 0.3), (second, 3.0)):
            identity = torch.eye(len(matrix), dtype=torch.float64)
            close(found.matrix, torch.linalg.inv(SCALE * matrix + prior * identity))

    def test_the_matrix_is_read_above_the_diagonal_only(self, matrix: Tensor) -> None:
        known, half = linalg.Dense(matrix), linalg.Dense(halved(matrix))
        prior, vectors = torch.tensor(0.3, dtype=torch.float64), torch.randn(2, len(matrix), dtype=torch.float64)
        each = prior.expand(len(matrix)).clone().requires_grad_()
        close(half.matrix, matrix)
        close(half.diagonal(), matrix.diagonal())
        close(half.matmul(vectors), known.matmul(vectors))
        close(half.log_det(prior, SCALE), known.log_det(prior, SCALE))
        close(half.log_det(each.detach(), SCALE), known.log_det(prior, SCALE))
        close(*(torch.autograd.grad(one.log_det(each, SCALE), each)[0] for one in (half, known)))
        close(half.state()["matrix"], matrix)
        for found, expected in zip(*(one.covariances(prior[None], SCALE) for one in (half, known)), strict=True):
            close(found.matrix, expected.matrix)

    def test_a_matrix_that_is_not_quite_positive_takes_the_long_way(self) -> None:
        torch.manual_seed(0)
        exact = 1e4 * semidefinite(size=6, rank=2)
        rounded = exact - 1e-3 * torch.eye(6, dtype=torch.float64)
        prior = torch.tensor(1e-4, dtype=torch.float64)
        found = linalg.Dense(halved(rounded), lends=True).covariance(prior, torch.ones(()))
        close(found.variance(), torch.linalg.inv(exact + 1e-4 * torch.eye(6)).diagonal(), 1e-4)
