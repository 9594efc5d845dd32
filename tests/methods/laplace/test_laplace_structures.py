"""Every structure over every selection and likelihood, against brute force in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.likelihoods import Gaussian
from laplace_cases import CASES, SELECTIONS, STRUCTURES, case, dense, dense_curvature
from torch import nn

from dubito import MAP, Laplace, Training, select
from dubito.core import limits
from dubito.methods.laplace.collect import Collector
from oracles import Case, curvature, fixed_normal, jacobian

pytestmark = pytest.mark.slow

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_all_quantities_agree_with_the_dense_covariance(structure: str, name: str, selection: str) -> None:
    problem = case(name)
    posterior = problem.fit(structure=structure, weights=SELECTIONS[selection], prior_precision=2.0, rank=200)
    precision = dense_curvature(posterior) + 2.0 * torch.eye(posterior.selection.num_weights, dtype=torch.float64)
    covariance = torch.linalg.inv(precision)
    torch.testing.assert_close(dense(posterior), covariance, **CLOSE)
    variance = posterior.selection.ravel(posterior.marginals()[1])
    torch.testing.assert_close(variance, covariance.diagonal(), **CLOSE)
    diagonal = posterior.precision_diagonal()
    torch.testing.assert_close(posterior.selection.ravel(diagonal), precision.diagonal(), **CLOSE)
    assert not any(bool(diagonal[name][~mask].any()) for name, mask in posterior.selection.masks().items())

    inputs = 1.5 * problem.inputs[:3]
    rows = jacobian(problem, inputs, posterior.selection).flatten(1, -2)
    expected = rows @ covariance @ rows.mT
    mean, found = posterior.functional(inputs)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(mean, problem.likelihood.canonical(problem.model(inputs)).detach().flatten(1), **CLOSE)
    _, (variances,) = posterior.linearized.variances(inputs, [posterior.covariance], centred=False)
    torch.testing.assert_close(variances.flatten(1), expected.diagonal(dim1=1, dim2=2), **CLOSE)
    whole = rows.flatten(0, 1)
    torch.testing.assert_close(posterior.functional(inputs, joint=True)[1], whole @ covariance @ whole.mT, **CLOSE)

    log_det = torch.logdet(precision) - posterior.selection.num_weights * math.log(2.0)
    scatter = 2.0 * posterior.selection.ravel(posterior.mean()).square().sum()
    log_likelihood = problem.likelihood.log_prob(problem.model(problem.inputs), problem.targets).sum().detach()
    torch.testing.assert_close(posterior.log_evidence(), log_likelihood - 0.5 * (log_det + scatter), **CLOSE)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_curvature_is_that_of_the_likelihood(name: str, selection: str) -> None:
    problem = case(name)
    fits = {s: problem.fit(structure=s, weights=SELECTIONS[selection], rank=200) for s in ("full", "low-rank", "diag")}
    expected = curvature(problem, fits["full"].selection)
    torch.testing.assert_close(dense_curvature(fits["full"]), expected, **CLOSE)
    torch.testing.assert_close(dense_curvature(fits["low-rank"]), expected, **CLOSE)
    torch.testing.assert_close(dense_curvature(fits["diag"]), torch.diag(expected.diagonal()), **CLOSE)


def test_kron_is_the_product_of_its_factors() -> None:
    """For the first layer of an MLP: mean over inputs ``Σaaᵀ/N`` times the sum over output gradients ``Σggᵀ``."""
    problem = case("categorical")
    posterior = problem.fit(structure="kron", prior_precision=1.0)
    x, first = problem.inputs, problem.model[0]
    hidden = first(x).detach().requires_grad_()
    outputs = problem.model[1:](hidden)
    grads = [torch.autograd.grad(outputs[:, c].sum(), hidden, retain_graph=True)[0] for c in range(3)]
    rows = torch.stack(grads, dim=1)  # [B, C, 4]
    output_factor = torch.einsum("nco,ncd,ndp->op", rows, problem.likelihood.hessian(outputs.detach()), rows)
    expected = torch.kron(output_factor, x.mT @ x / len(x))
    found = dense_curvature(posterior)
    torch.testing.assert_close(found[:12, :12], expected, **CLOSE)
    torch.testing.assert_close(found[12:16, 12:16], output_factor, **CLOSE)
    off_diagonal = found[:12, 12:]
    torch.testing.assert_close(off_diagonal, torch.zeros_like(off_diagonal))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_diagonal_of_the_precision_at_a_temperature_and_noise_in_single_precision(structure: str) -> None:
    problem = case("gaussian")
    model, data = problem.model.float(), tuple(part.float() for part in problem.data)
    recipe = Laplace(structure=structure, weights=select.layers("0"), temperature=0.5, prior_precision=0.3)
    posterior = recipe.fit(model, data, likelihood=problem.likelihood)
    whole = posterior.precision_matmul(torch.eye(16, dtype=torch.float64))
    found = posterior.precision_diagonal()
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(posterior.mean(), torch.float64)
    torch.testing.assert_close(posterior.selection.ravel(found), whole.diagonal(), **CLOSE)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_mask_of_everything_is_everything(structure: str) -> None:
    problem = case("norm")
    everything = {name: torch.ones_like(value, dtype=torch.bool) for name, value in problem.model.named_parameters()}
    whole = problem.fit(structure=structure, prior_precision=0.5)
    masked = problem.fit(structure=structure, prior_precision=0.5, weights=select.mask(everything))
    torch.testing.assert_close(masked.log_evidence(), whole.log_evidence(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        masked.functional(problem.inputs), whole.functional(problem.inputs), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_a_subnetwork_has_the_submatrix_of_the_whole(structure: str) -> None:
    """Also by gathering: nine of ten weights are selected, none of the layers is whole."""
    problem = case("image")
    whole = problem.fit(structure=structure)
    part = problem.fit(structure=structure, weights=select.random(0.9))
    assert not any(part.selection.is_whole(name) for name in ("0.weight", "2.weight"))
    flat = torch.cat([mask.flatten() for mask in part.selection.masks().values()])
    torch.testing.assert_close(dense_curvature(part), dense_curvature(whole)[flat][:, flat], **CLOSE)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["categorical", "gaussian", "bernoulli"])
def test_an_infinite_precision_gives_the_network_itself(structure: str, name: str) -> None:
    problem = case(name)
    posterior = problem.fit(structure=structure, prior_precision=1e14)
    point = MAP(train=False).fit(problem.model, problem.data, likelihood=problem.likelihood).predict(problem.inputs)
    sure = posterior.predict(problem.inputs)
    for field in ("log_probs",) if name != "gaussian" else ("mean", "stddev"):
        torch.testing.assert_close(getattr(sure, field), getattr(point, field), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_subnetwork_never_has_more_variance_than_the_whole(seed: int) -> None:
    """In the order of positive semi-definite matrices, and monotone as weights are added."""
    problem = case("categorical")
    scores = torch.rand(31, generator=torch.Generator().manual_seed(seed))
    before = None
    for size in (3, 10, 20, 31):
        kept, masks = scores.argsort() < size, {}
        for name, value in problem.model.named_parameters():
            masks[name], kept = kept[: value.numel()].reshape(value.shape), kept[value.numel() :]
        posterior = problem.fit(structure="full", weights=select.mask(masks), prior_precision=1.0)
        _, covariance = posterior.functional(problem.inputs, joint=True)
        if before is not None:
            assert torch.linalg.eigvalsh(covariance - before).min() > -1e-10
        before = covariance


def test_low_rank_keeps_the_largest_directions() -> None:
    problem = case("norm")
    posterior = problem.fit(structure="low-rank", rank=6)
    expected = torch.linalg.eigvalsh(curvature(problem, posterior.selection)).flip(0)[:6]
    torch.testing.assert_close(posterior.matrix.values, expected, rtol=5e-3, atol=0)
    whole = problem.fit(structure="full", prior_precision=posterior.prior_precision.item())
    low, full = (p.functional(problem.inputs)[1].diagonal(dim1=1, dim2=2) for p in (posterior, whole))
    assert (low > full - 1e-10).all()  # curvature that is left out is uncertainty that is kept


@pytest.mark.parametrize("kind", ["fisher-mc", "fisher-empirical"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_fisher_curvatures(structure: str, kind: str) -> None:
    """The empirical Fisher is the sum of outer products of gradients; the sampled one converges to Gauss-Newton."""
    problem = case("categorical")
    posterior = problem.fit(structure=structure, curvature=kind, fisher_samples=2000, rank=200)
    rows = jacobian(problem, problem.inputs, posterior.selection)
    if kind == "fisher-empirical":
        grads = torch.einsum(
            "nc,ncd->nd", problem.likelihood.gradient(problem.model(problem.inputs).detach(), problem.targets), rows
        )
        expected, tolerance = grads.mT @ grads, 1e-10
    else:
        expected, tolerance = curvature(problem, posterior.selection), 0.08
    found = dense_curvature(posterior)
    if structure == "kron":  # exact only for biases, whose gradient has one factor
        found, expected = found[12:16, 12:16], expected[12:16, 12:16]
    elif structure == "diag":
        expected = torch.diag(expected.diagonal())
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("structure", ["full", "diag", "ekfac"])
def test_the_empirical_fisher_of_a_gaussian_has_the_gradients_at_its_noise(structure: str) -> None:
    """They are those of the log-density, (f − y)/σ²: so the matrix has the fourth power of the noise."""
    inputs, targets = fixed_normal(20, 3), fixed_normal(20, 1, seed=1)
    model = nn.Linear(3, 1).double()
    likelihood = Gaussian(noise=0.3)
    posterior: Any = Laplace(structure=structure, curvature="fisher-empirical", prior_precision=2.0).fit(
        model, (inputs, targets), likelihood=likelihood, progress=False
    )
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        gradients = torch.autograd.grad(likelihood.log_prob(model(x[None]), y[None]).sum(), list(model.parameters()))
        rows.append(torch.cat([each.flatten() for each in gradients]))
    each = torch.stack(rows)
    fisher = each.mT @ each
    precision = (fisher.diagonal().diag() if structure == "diag" else fisher) + 2 * torch.eye(4).double()
    found = posterior.precision_matmul(torch.eye(4).double())
    torch.testing.assert_close(found, precision, rtol=1e-10, atol=1e-10)
    flat = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    fit = likelihood.log_prob(model(inputs), targets).sum()
    expected = fit - 0.5 * (precision.logdet() - 4 * math.log(2) + 2 * flat.square().sum())
    torch.testing.assert_close(posterior.log_evidence(), expected.detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["categorical", "gaussian", "heteroscedastic"])
def test_exact_hessian(name: str) -> None:
    problem = case(name)
    posterior = problem.fit(
        structure="full", curvature="hessian", weights=SELECTIONS["last layer"], prior_precision=50.0
    )
    selection, base = posterior.selection, dict(problem.model.named_parameters())

    def loss(flat: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(problem.model, selection.merge(base, flat), problem.inputs)
        return -problem.likelihood.log_prob(outputs, problem.targets).sum()

    values, vectors = torch.linalg.eigh(torch.func.jacrev(torch.func.jacrev(loss))(selection.ravel(base).detach()))
    positive = (vectors * values.clamp_min(0)) @ vectors.mT  # a Gaussian cannot have the other directions
    torch.testing.assert_close(dense_curvature(posterior), positive, **CLOSE)


def test_positions_in_expand_and_reduce() -> None:
    """On a linear layer shared over positions whose outputs are summed, `reduce` is exact and `expand` is not."""

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2, bias=False), Sum()).double()
    problem = Case(model, torch.randn(10, 4, 3).double(), torch.randn(10, 2).double(), Gaussian(noise=1.0))
    exact = problem.fit(structure="full", prior_precision=1.0)
    torch.testing.assert_close(
        dense(problem.fit(structure="kron", kron_mode="reduce", prior_precision=1.0)), dense(exact), **CLOSE
    )
    expand = dense(problem.fit(structure="kron", kron_mode="expand", prior_precision=1.0))
    assert (expand - dense(exact)).abs().max() > 1e-3


def test_temperature_divides_the_curvature() -> None:
    problem = case("categorical")
    for structure in STRUCTURES:
        cold, plain = (problem.fit(structure=structure, temperature=t, prior_precision=1.0) for t in (0.1, 1.0))
        torch.testing.assert_close(dense_curvature(cold), 10 * dense_curvature(plain), **CLOSE)


def test_results_do_not_depend_on_how_data_is_batched() -> None:
    problem = case("sequence")
    for structure in STRUCTURES:
        recipe = Laplace(structure=structure, prior_precision=1.0)
        split = [(problem.inputs[rows], problem.targets[rows]) for rows in torch.arange(12).split(5)]
        one, many = (recipe.fit(problem.model, data, likelihood=problem.likelihood) for data in (problem.data, split))
        torch.testing.assert_close(many.log_evidence(), one.log_evidence(), rtol=1e-9, atol=1e-9)
        whole, parts = one.predict(problem.inputs), one.predict(problem.inputs, batch_size=5)
        torch.testing.assert_close(parts.log_probs, whole.log_probs)
        torch.testing.assert_close(parts.epistemic, whole.epistemic)


@pytest.mark.parametrize(("structure", "batch"), [("low-rank", 10), ("ekfac", 5), ("sampled", 5), ("sampled", 60)])
def test_a_later_pass_is_resumed(structure: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, done = case("categorical"), 0

    def fit(**options: Any) -> str:
        recipe = Laplace(structure=structure, rank=3, draws=2)
        generator, training = torch.Generator().manual_seed(1), Training(batch_size=4, **options)
        with limits.using(exact_block=0):  # small networks need no second pass
            return recipe.fit(problem.model, problem.data, training=training, generator=generator).digest()

    def interrupted(self: Collector, *args: Any, own: Any = Collector.update) -> Any:
        nonlocal done
        done += 1
        if done == batch:
            raise KeyboardInterrupt
        return own(self, *args)

    expected = fit()
    monkeypatch.setattr(Collector, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(checkpoint=str(tmp_path / "run"))
    assert fit(checkpoint=str(tmp_path / "run")) == expected
    assert done > batch
