"""Diagonal, full, low-rank and exact-Hessian curvature against matrices made of brute-force Jacobians."""

from __future__ import annotations

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor

from curvature.curvature_cases import (
    CASES,
    Case,
    accumulate,
    build,
    copied,
    dense,
    gauss_newton,
    jacobian_matrix,
    outputs_of,
    selections,
)
from dubito.core import limits, params
from dubito.curvature import Engine, output_columns, products
from dubito.curvature import matrices as linalg
from dubito.curvature.structures import FullAccumulator, make_accumulator
from dubito.networks.selection import Selection
from oracles import close

pytestmark = pytest.mark.slow

every_case = pytest.mark.parametrize("name", CASES)
every_selection = pytest.mark.parametrize("chosen", ["all", "some", "half", "few"])


@every_case
@every_selection
def test_full_gauss_newton(name: str, chosen: str) -> None:
    case = build(name)
    selection = selections(case.model)[chosen]
    close(dense(accumulate(case, selection, "full")), gauss_newton(case, selection))


@pytest.mark.parametrize("name", ["mlp", "conv2d", "linear_alone"])
def test_full_gauss_newton_in_blocks_of_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg.base, "NARROWEST", 3)
    monkeypatch.setattr(products, "NARROWEST", 3)
    case = build(name)
    for selection in selections(case.model).values():
        close(dense(accumulate(case, selection, "full")), gauss_newton(case, selection))


@pytest.mark.parametrize(("chunk", "waits"), [(1, False), (2**24, True)])
def test_parts_of_one_layer_are_added_together(chunk: int, waits: bool) -> None:
    case = build("mlp")
    selection = Selection.all_of(case.model, ["2.weight", "2.bias"])
    engine = Engine(case.model, selection.names)
    accumulator = make_accumulator("full", engine, selection)
    sums = accumulator.zeros()
    with limits.using(chunk=chunk), accumulator.gathered(sums):
        for part in (slice(0, 2), slice(2, None)):
            tape = engine.run(case.inputs[part])
            columns = output_columns.columns("ggn", case.likelihood, tape.outputs, case.targets[part], most=3)
            accumulator.add(sums, tape, columns)
            assert bool(sums["full"].any()) != waits
    close(dense(accumulator.matrix(sums)), gauss_newton(case, selection))


def test_sums_take_more_data_after_a_covariance_took_their_lower_half() -> None:
    case = build("mlp")
    selection = selections(case.model)["all"]
    engine = Engine(case.model, selection.names)
    accumulator = make_accumulator("full", engine, selection)
    sums = accumulator.zeros()
    for part in (slice(0, 2), slice(2, None)):
        tape = engine.run(case.inputs[part])
        accumulator.add(
            sums, tape, output_columns.columns("ggn", case.likelihood, tape.outputs, case.targets[part], most=3)
        )
        matrix = accumulator.matrix(sums)
        matrix.lends = True
        covariance = matrix.covariance(torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
        assert covariance.basis.matrix.data_ptr() == sums["full"].data_ptr()
    close(dense(accumulator.matrix(sums)), gauss_newton(case, selection))
    close(covariance.matrix, torch.linalg.inv(gauss_newton(case, selection) + torch.eye(len(sums["full"]))))


@every_case
@every_selection
def test_diagonal_gauss_newton(name: str, chosen: str) -> None:
    case = build(name)
    selection = selections(case.model)[chosen]
    close(accumulate(case, selection, "diag").diagonal(), gauss_newton(case, selection).diagonal())


def gradients(case: Case, selection: Selection) -> Tensor:
    """The gradient of each example's negative log-likelihood, ``[B, D]``, by autograd."""
    gradient = case.likelihood.gradient(outputs_of(case), case.targets).flatten(1)
    return torch.einsum("nc,cnd->nd", gradient, jacobian_matrix(case, selection))


@every_case
def test_empirical_fisher(name: str) -> None:
    case = build(name)
    selection = selections(case.model)["half"]
    each = gradients(case, selection)
    close(dense(accumulate(case, selection, "full", "fisher-empirical")), each.mT @ each)
    close(accumulate(case, selection, "diag", "fisher-empirical").diagonal(), each.square().sum(0))


@pytest.mark.parametrize("name", ["mlp", "output_per_position", "output_map", "labels", "regression", "noise_too"])
def test_sampled_fisher_is_made_of_the_likelihoods_columns(name: str) -> None:
    case = build(name)
    selection = selections(case.model)["half"]
    draws = torch.Generator().manual_seed(8)
    columns = case.likelihood.fisher_columns(outputs_of(case), 4, case.targets, generator=draws).flatten(2)
    rows = torch.einsum("snc,cnd->snd", columns, jacobian_matrix(case, selection)).flatten(0, 1)
    engine = Engine(case.model, selection.names)
    accumulator = make_accumulator("full", engine, selection)
    sums, tape = accumulator.zeros(), engine.run(case.inputs)
    options = {"num_samples": 4, "most": 3, "generator": torch.Generator().manual_seed(8)}
    accumulator.add(
        sums, tape, output_columns.columns("fisher-mc", case.likelihood, tape.outputs, case.targets, **options)
    )
    close(dense(accumulator.matrix(sums)), rows.mT @ rows)


@pytest.mark.parametrize("name", ["mlp", "output_per_position", "noise_too"])
def test_sampled_fisher_is_the_gauss_newton_matrix_on_average(name: str) -> None:
    case = build(name)
    selection = selections(case.model)["few"]
    tape = Engine(case.model, selection.names).run(case.inputs)
    draws, count = torch.Generator().manual_seed(1), 5000
    about = case.likelihood, tape.outputs, case.targets
    columns = torch.cat(list(output_columns.columns("fisher-mc", *about, num_samples=count, generator=draws)))
    flat = case.likelihood.canonical(tape.outputs.detach()).flatten(1).shape
    found = torch.stack([case.likelihood.canonical(one).reshape(flat) for one in columns])
    rows = torch.einsum("snc,cnd->snd", found, jacobian_matrix(case, selection))
    expected = gauss_newton(case, selection)
    # a mean of `count` outer products: five standard errors, from the fourth moments of the draws themselves
    each = torch.einsum("snd,sne->sde", rows[:1000], rows[:1000]) * count
    error = 5 * each.std(0) / count**0.5
    average = torch.einsum("snd,sne->de", rows, rows)
    assert bool(((average - expected).abs() <= error + 1e-12).all())
    assert float(error.max()) < 0.5 * float(expected.abs().max())


@pytest.mark.parametrize("name", [
    "mlp", "conv2d", "embedding", "in_place", "tied_embedding", "overwritten_data", "labels", "regression", "noise_too",
    "attention",
])  # fmt: skip
def test_exact_hessian(name: str) -> None:
    case = build(name)
    selection = selections(case.model)["half"]
    base = params.of(case.model)

    def loss(flat: Tensor) -> Tensor:
        outputs = params.functional_call(case.model, selection.merge(base, flat), copied(case.inputs))
        return -case.likelihood.log_prob(outputs, case.targets).sum()

    expected = torch.autograd.functional.hessian(loss, selection.ravel(base))
    engine = Engine(case.model, selection.names)
    accumulator = make_accumulator("full", engine, selection, hessian_of=case.likelihood)
    sums = accumulator.zeros()
    for rows, tape in engine.chunks(case.inputs, 2, accumulator.extra):
        accumulator.add(sums, tape, [], case.targets[rows])
    (found,) = sums.values()
    close(found, expected)
    values, vectors = torch.linalg.eigh(expected)
    close(dense(accumulator.matrix(sums)), (vectors * values.clamp_min(0)) @ vectors.mT)


@pytest.mark.parametrize("name", CASES)
def test_chunks_change_nothing(name: str) -> None:
    case = build(name)
    for chosen, selection in selections(case.model).items():
        if chosen == "half":  # as "few", and slower
            continue
        whole = {s: dense(accumulate(case, selection, s)) for s in ("diag", "kron", "full")}
        with limits.using(gradients=1, chunk=4):
            for structure, expected in whole.items():
                if structure == "kron":  # its factors are sums over examples, whatever the chunks
                    close(dense(accumulate(case, selection, structure, most=100)), expected, 1e-9)
                else:
                    close(dense(accumulate(case, selection, structure, most=1)), expected)


@every_case
def test_low_rank_is_exact_where_the_rank_suffices(name: str) -> None:
    case = build(name)
    selection = selections(case.model)["half"]
    expected = gauss_newton(case, selection)
    values = torch.linalg.eigvalsh(expected)
    rank = min(int((values > 1e-9 * values[-1]).sum()), selection.num_weights)
    found = accumulate(case, selection, "low-rank", rank=rank)
    close(dense(found), expected, 1e-8)
    close(found.values, values.flip(0)[:rank], 1e-8)
    close(found.vectors.mT @ found.vectors, torch.eye(rank, dtype=torch.float64))


def test_low_rank_finds_the_leading_eigenpairs() -> None:
    case = build("mlp")
    selection = selections(case.model)["all"]
    values, vectors = torch.linalg.eigh(gauss_newton(case, selection))
    found = accumulate(case, selection, "low-rank", rank=2)
    close(found.values, values.flip(0)[:2], 1e-4)
    close((found.vectors * vectors.flip(1)[:, :2]).sum(0).abs(), torch.ones(2, dtype=torch.float64), 1e-3)


def test_full_over_too_many_weights_is_refused() -> None:
    size = 20_000
    model = torch.nn.Linear(size, 1, bias=False)
    selection = Selection.all_of(model)
    FullAccumulator(Engine(model, selection.names), selection)
    wider = torch.nn.Linear(size + 1, 1, bias=False)
    selection = Selection.all_of(wider)
    with pytest.raises(InputError, match="select fewer weights"):
        FullAccumulator(Engine(wider, selection.names), selection)


def test_unknown_names_are_refused() -> None:
    case = build("mlp")
    selection = selections(case.model)["all"]
    engine = Engine(case.model, selection.names)
    with pytest.raises(InputError, match="no structure 'round'"):
        make_accumulator("round", engine, selection)
    with pytest.raises(InputError, match="no curvature 'round'"):
        list(output_columns.columns("round", case.likelihood, outputs_of(case), case.targets))
    with pytest.raises(InputError, match="'expand' or 'reduce'"):
        make_accumulator("kron", engine, selection, mode="round")
