"""Kronecker eigenbases with measured eigenvalues, against the full Gauss-Newton matrix in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn

import dubito
from dubito import Laplace, select
from dubito.core import limits
from dubito.curvature import ekfac
from dubito.curvature.matrices import Block, Dense
from oracles import fixed_normal


def _network(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double(), fixed_normal(30, 3)
    if kind == "attention":
        layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).double(), fixed_normal(30, 3, 4)
    if kind == "norm":
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3, bias=False))
        return model.double(), fixed_normal(30, 3)
    if kind == "embedding":
        tokens = torch.randint(7, (20, 3), generator=torch.Generator().manual_seed(0))
        return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)).double(), tokens
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(32, 3)]
    return nn.Sequential(*layers).double(), fixed_normal(12, 2, 5, 5)


# Bytes of a matrix over 12 weights: smaller parameters have exact blocks, larger ones Kronecker eigenbases.
SOME_EXACT = 8 * 12**2
LABELS = torch.randint(3, (30,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("most", [0, SOME_EXACT])
@pytest.mark.parametrize("kind", ["mlp", "norm", "embedding", "convolutions"])
def test_it_is_the_best_diagonal_in_the_eigenbasis(kind: str, most: int) -> None:
    """Its eigenvalues are (QᵀHQ)_dd of the exact block H, so it is never farther from H than the Kronecker product.

    The blocks of small parameters are exact.
    """
    model, inputs = _network(kind)
    data = (inputs, LABELS[: len(inputs)])
    with limits.using(exact_block=most):
        full, kron, ekfac = (
            Laplace(structure=structure, prior_precision=1.0).fit(model, data, progress=False)  # type: ignore[arg-type]
            for structure in ("full", "kron", "ekfac")
        )
    identity = torch.eye(full.selection.num_weights, dtype=torch.float64)
    exact, product, measured = (posterior.matrix.matmul(identity) for posterior in (full, kron, ekfac))
    for name, block in zip(ekfac.selection.names, ekfac.matrix.blocks, strict=True):
        span = ekfac.selection.slices[name]
        own, size = exact[span, span], span.stop - span.start
        assert torch.allclose(measured[span, span].trace(), own.trace(), rtol=1e-10)
        assert isinstance(block, Dense) == (8 * size**2 <= most)
        if isinstance(block, Dense):
            assert torch.allclose(measured[span, span], own, rtol=1e-10, atol=1e-12)
        if isinstance(block, Block):
            basis = block.rotate(block.to_matrix(torch.eye(size, dtype=torch.float64))).reshape(size, size)
            assert torch.allclose(block.values.flatten(), (basis.T @ own @ basis).diagonal(), rtol=1e-8, atol=1e-10)
        errors = [float((each[span, span] - own).norm()) for each in (measured, product)]
        assert errors[0] <= errors[1] + 1e-10


@pytest.mark.parametrize("kind", ["mlp", "norm", "embedding", "convolutions"])
def test_all_weights_of_a_small_network_have_one_exact_block(kind: str, tmp_path: Path) -> None:
    model, inputs = _network(kind)
    data = (inputs, LABELS[: len(inputs)])
    full, ekfac = (
        Laplace(structure=structure, prior_precision=1.0).fit(model, data, progress=False)  # type: ignore[arg-type]
        for structure in ("full", "ekfac")
    )
    assert ekfac.selection.num_weights <= 256
    assert torch.allclose(ekfac.matrix.matrix, full.matrix.matrix, rtol=1e-12)
    assert torch.allclose(ekfac.log_evidence(), full.log_evidence())
    ekfac.save(tmp_path / "posterior.safetensors")
    loaded = dubito.load(tmp_path / "posterior.safetensors", model)
    assert torch.equal(loaded.functional(inputs)[1], ekfac.functional(inputs)[1])


@pytest.mark.parametrize(("kind", "enough"), [("mlp", 1), ("mlp", 10), ("norm", 10), ("convolutions", 5)])
def test_many_data_give_the_basis_by_some_rows_and_exact_eigenvalues(
    kind: str, enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The basis comes from sampled targets of some rows and positions; all values are those of all rows in it."""
    model, inputs = _network(kind)
    data = (inputs, LABELS[: len(inputs)])
    with limits.using(exact_block=0):
        full, exact = (
            Laplace(structure=structure, prior_precision=1.0).fit(model, data, progress=False)  # type: ignore[arg-type]
            for structure in ("full", "ekfac")
        )
        monkeypatch.setattr(ekfac, "ENOUGH", enough)
        monkeypatch.setattr(ekfac, "POSITIONS", 3)
        posterior = Laplace(structure="ekfac", prior_precision=1.0).fit(model, data, progress=False)
    curvature = full.matrix.matrix
    assert torch.allclose(torch.tensor(posterior.fit.log_likelihood), torch.tensor(full.fit.log_likelihood))
    for name, block, other in zip(posterior.selection.names, posterior.matrix.blocks, exact.matrix.blocks, strict=True):
        span = posterior.selection.slices[name]
        size = span.stop - span.start
        basis = torch.eye(size, dtype=torch.float64)
        if isinstance(block, Block):
            basis = block.rotate(block.to_matrix(basis)).reshape(size, size)
            assert not torch.allclose(block.left, other.left)
        assert torch.allclose(basis.T @ basis, torch.eye(size, dtype=torch.float64), atol=1e-10)
        assert torch.allclose(block.values.flatten(), (basis.T @ curvature[span, span] @ basis).diagonal(), atol=1e-10)


@pytest.mark.parametrize(("prior", "most"), [(0.01, 0), (1.0, 0), (30.0, 0), (1.0, SOME_EXACT)])
@pytest.mark.parametrize("kind", ["mlp", "norm", "embedding", "convolutions"])
def test_its_evidence_is_the_highest_bound_in_its_basis_and_its_variances_bound_the_exact_ones(
    kind: str, prior: float, most: int
) -> None:
    """The evidence is log p(D) - KL(q || full posterior), never above log p(D), and K-FAC's q has a lower bound.

    The variances of the outputs at the training inputs, weighted by the output Hessians, sum to tr HΣ: never below.
    """
    model, inputs = _network(kind)
    data = (inputs, LABELS[: len(inputs)])
    with limits.using(exact_block=most):
        full, kron, posterior = (
            Laplace(structure=name, prior_precision=prior).fit(model, data, progress=False)  # type: ignore[arg-type]
            for name in ("full", "kron", "ekfac")
        )
    identity = torch.eye(full.selection.num_weights, dtype=torch.float64)
    precision, log_evidence = full.precision_matmul(identity), float(full.log_evidence())

    def bound(other: Any) -> float:
        own = other.precision_matmul(identity)
        log_dets = torch.linalg.slogdet(own)[1] - torch.linalg.slogdet(precision)[1]
        divergence = 0.5 * ((precision * torch.linalg.inv(own)).sum() - len(own) + log_dets)
        return log_evidence - float(divergence)

    assert bound(posterior) == pytest.approx(float(posterior.log_evidence()), abs=1e-8)
    assert bound(kron) <= float(posterior.log_evidence()) + 1e-9
    assert float(posterior.log_evidence()) <= log_evidence + 1e-9
    curvature = full.matrix.matmul(identity)
    exact, measured = (float((curvature * each.covariance.solve(identity)).sum()) for each in (full, posterior))
    assert measured >= exact - 1e-9


def test_a_layer_with_one_example_is_exact() -> None:
    """Of one example with one output, the curvature of a layer is a Kronecker product, and both structures have it."""
    model, x = nn.Linear(3, 1).double(), fixed_normal(1, 3)
    data, options = (x, fixed_normal(1, 1)), {"likelihood": dubito.likelihoods.Gaussian(noise=1.0), "progress": False}
    with limits.using(exact_block=0):
        kron, ekfac = (
            Laplace(structure=name, prior_precision=1.0).fit(model, data, **options)  # type: ignore[arg-type]
            for name in ("kron", "ekfac")
        )
    for posterior in (kron, ekfac):
        assert torch.allclose(posterior.matrix.matmul(torch.eye(4).double())[:3, :3], x.T @ x)
    assert torch.allclose(kron.log_evidence(), ekfac.log_evidence())


@pytest.mark.parametrize("centred", [False, True])
def test_variances_for_many_prior_precisions_are_those_of_each(centred: bool) -> None:
    model, inputs = _network("mlp")
    with limits.using(exact_block=SOME_EXACT):
        posterior = Laplace(structure="ekfac", prior_precision=1.0).fit(model, (inputs, LABELS), progress=False)
    assert {type(block) for block in posterior.matrix.blocks} == {Dense, Block}
    grid = torch.tensor([0.1, 1.0, 20.0], dtype=torch.float64)
    covariances = posterior.matrix.covariances(grid, posterior.scale)
    together = posterior.linearized.variances(inputs, covariances, centred=centred)[1]
    for found, *each in zip(together, grid, covariances, strict=True):
        prior, shared = each
        alone = posterior.matrix.covariance(prior, posterior.scale)
        for covariance in (alone, shared):
            (expected,) = posterior.linearized.variances(inputs, [covariance], centred=centred)[1]
            assert torch.allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("task", ["classes", "numbers"])
@pytest.mark.parametrize(
    ("kind", "whole"),
    [("mlp", False), ("mlp", True), ("convolutions", False), ("convolutions", True), ("attention", True)],
)
def test_small_networks_have_a_higher_evidence_and_more_of_the_variance_than_by_kronecker_factors(
    kind: str, whole: bool, task: str
) -> None:
    """Of trained networks, at new inputs, where a variance above that of the full covariance counts as all of it.

    Also with a block for each parameter instead of one for all weights. That is no theorem: of attention, or of very
    few examples, Kronecker factors can have a higher evidence than exact blocks of single parameters.
    """
    model, inputs = _network(kind)
    inputs = fixed_normal(80, *inputs.shape[1:])
    model = model if task == "classes" else nn.Sequential(model, nn.Linear(3, 1).double())
    with torch.no_grad():
        outputs = model(inputs)  # of a network of its own kind, which is trained from other weights
        signal = 3 * (outputs - outputs.mean(0))
    targets = signal.argmax(1) if task == "classes" else signal + 0.3 * fixed_normal(len(inputs), 1)
    for value in model.parameters():
        nn.init.normal_(value, std=0.5)
    half = len(inputs) // 2
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=1 / half)
    loss = nn.CrossEntropyLoss() if task == "classes" else lambda f, y: (f - y).square().mean() / 0.18
    for _ in range(150):
        optimizer.zero_grad()
        loss(model(inputs[:half]), targets[:half]).backward()
        optimizer.step()
    likelihood = "categorical" if task == "classes" else dubito.likelihoods.Gaussian(noise=0.3)
    size = sum(value.numel() for value in model.parameters())
    with limits.using(exact_block=8 * (size if whole else size - 1) ** 2):
        full, kron, posterior = (
            Laplace(structure=name, prior_precision=1.0).fit(  # type: ignore[arg-type]
                model, (inputs[:half], targets[:half]), likelihood=likelihood, progress=False
            )
            for name in ("full", "kron", "ekfac")
        )
    assert isinstance(posterior.matrix, Dense) == whole
    assert float(posterior.log_evidence()) > float(kron.log_evidence())
    whole, factored, own = (
        each.functional(inputs[half:])[1].diagonal(dim1=-2, dim2=-1) for each in (full, kron, posterior)
    )
    captured, of_factors = (float(each.minimum(whole).sum() / whole.sum()) for each in (own, factored))
    assert captured > of_factors


@pytest.mark.slow
def test_uses_of_a_posterior(tmp_path: Path) -> None:
    model, inputs = _network("mlp")
    posterior = Laplace(structure="ekfac").fit(model, (inputs, LABELS), progress=False)
    prediction: Any = posterior.predict(inputs, generator=torch.Generator().manual_seed(0))
    variance = posterior.functional(inputs)[1].diagonal(dim1=-2, dim2=-1)
    rows = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, inputs))(dict(model.named_parameters()))
    flat = torch.cat([rows[name].flatten(2) for name in posterior.selection.names], dim=2).detach()
    covariance = torch.linalg.inv(posterior.precision_matmul(torch.eye(flat.shape[2]).double()))
    expected = torch.einsum("bod,de,boe->bo", flat, covariance, flat)
    assert torch.allclose(variance, expected, rtol=1e-8)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = dubito.load(tmp_path / "posterior.safetensors", model)
    again: Any = loaded.predict(inputs, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(again.probs, prediction.probs, atol=1e-12)
    assert torch.allclose(loaded.log_evidence(), posterior.log_evidence())
    assert posterior.diagnose().verdict in ("yes", "with care", "no")
    assert posterior.sample(3)["0.weight"].shape == (3, 5, 3)
    assert dubito.compress(posterior, rule=dubito.rules.SignalToNoise(0.5)).model(inputs).shape == (30, 3)
    with pytest.raises(UnsupportedError, match="cannot be updated"):
        posterior.update((inputs, LABELS))
    with pytest.raises(InputError, match="one prior precision for all of"):
        Laplace(structure="ekfac", prior_precision=torch.arange(1.0, 39.0)).fit(model, (inputs, LABELS), progress=False)


def test_part_of_a_layer_and_several_batches() -> None:
    model, inputs = _network("mlp")
    whole = Laplace(structure="ekfac", prior_precision=1.0).fit(model, (inputs, LABELS), progress=False)
    batches = [(inputs[:7], LABELS[:7]), (inputs[7:], LABELS[7:])]
    parts = Laplace(structure="ekfac", prior_precision=1.0).fit(model, batches, progress=False)
    assert torch.allclose(whole.matrix.diagonal(), parts.matrix.diagonal(), rtol=1e-10)
    some = Laplace(structure="ekfac", weights=select.random(10), prior_precision=1.0)
    assert some.fit(model, (inputs, LABELS), progress=False).predict(inputs).probs.isfinite().all()
