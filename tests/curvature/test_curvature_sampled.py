"""Exact samples by block conjugate gradients, against the full posterior in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.likelihoods import Gaussian
from torch import Tensor, nn

import dubito
from dubito import Laplace, Training, select
from dubito.core import limits
from dubito.curvature import sampled, subset
from oracles import fixed_normal

LABELS = torch.randint(3, (40,), generator=torch.Generator().manual_seed(1))


def _network(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double(), fixed_normal(40, 3)
    if kind == "embedding":
        tokens = torch.randint(7, (40, 3), generator=torch.Generator().manual_seed(0))
        return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3)).double(), tokens
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*layers).double().eval(), fixed_normal(40, 2, 5, 5)


def _fit(model: nn.Module, inputs: Tensor, **options: Any) -> Any:
    return Laplace(**({"prior_precision": 0.5} | options)).fit(model, (inputs, LABELS), progress=False)


@pytest.mark.parametrize("kind", ["mlp", "embedding", "convolution"])
@pytest.mark.parametrize("some", [False, True])
def test_the_solver_solves(kind: str, some: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``P δ`` is the right-hand side, for P of the full structure; fewer samples than weights need several steps."""
    model, inputs = _network(kind)
    weights = select.random(30) if some else select.all()
    full = _fit(model, inputs, structure="full", weights=weights, temperature=0.5)
    kept: dict[str, Any] = {}
    finish = sampled.SampledAccumulator.finish

    def keeping(sums: Any) -> None:
        kept.update(sums)
        finish(sums)

    monkeypatch.setattr(sampled, "TOLERANCE", 1e-9)
    monkeypatch.setattr(sampled.SampledAccumulator, "finish", staticmethod(keeping))
    posterior = _fit(model, inputs, structure="sampled", weights=weights, temperature=0.5, draws=4, steps=90)
    assert posterior.sums["error"] <= 1e-9
    torch.testing.assert_close(full.precision_matmul(kept["draws"]), kept["right"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("prior", [torch.tensor(0.7), torch.linspace(0.5, 2.0, 30)], ids=["one", "each"])
def test_the_inverse_of_some_rows_is_exact(prior: Tensor) -> None:
    rows = fixed_normal(12, 30).bfloat16()
    kept = {"rows": rows, "used": 8, "seen": 24}  # each row stands for three
    with limits.using(chunk=4 * 8 * 7):  # seven columns at a time
        inverse = subset.SubsetInverse(kept, prior.double(), torch.tensor(0.5))
        found = inverse.solve(fixed_normal(4, 30))
    used = rows[:8].double()
    expected = torch.linalg.inv(0.5 * 3 * used.T @ used + prior.double().expand(30).diag())
    torch.testing.assert_close(found, fixed_normal(4, 30) @ expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("every", [1, 3])
def test_rows_of_the_same_examples_are_kept_in_any_batches(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _network("mlp")
    monkeypatch.setattr(subset, "MOST_ROWS", 120 // every)
    monkeypatch.setattr(subset, "FEWEST_ROWS", 1)
    kept: list[dict[str, Any]] = []
    begin = sampled.SampledAccumulator.begin

    def keeping(self: Any, sums: Any, *rest: Any) -> None:
        kept.append({key: sums["subset"][key] for key in ("rows", "used", "seen", "every")})
        begin(self, sums, *rest)

    monkeypatch.setattr(sampled.SampledAccumulator, "begin", keeping)
    for size in (40, 7):
        training = Training(epochs=1, batch_size=size, shuffle=False)
        recipe = Laplace(structure="sampled", prior_precision=0.5, draws=4)
        recipe.fit(model, (inputs, LABELS), training=training, progress=False)
    assert [(each["used"], each["seen"], each["every"]) for each in kept] == [
        (2 * len(range(0, 40, every)), 80, every)
    ] * 2
    grams = [each["rows"].double().T @ each["rows"].double() for each in kept]
    torch.testing.assert_close(grams[0], grams[1])  # the order of columns and examples differs
    if every == 1:
        full = _fit(model, inputs, structure="full").matrix
        exact = full.matmul(torch.eye(38, dtype=torch.float64))
        torch.testing.assert_close(grams[0], exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


def test_rows_of_some_examples_save_steps() -> None:
    model, inputs = _network("convolution")
    errors = []
    for size in (0, 2**20):
        with limits.using(subset_rows=size):
            posterior = _fit(model, inputs, structure="sampled", draws=4, steps=3, prior_precision=0.01)
        errors.append(posterior.sums["error"])
    assert errors[0] > 5 * sampled.TOLERANCE
    assert errors[1] <= sampled.TOLERANCE


def test_samples_have_the_covariance_of_the_full_structure() -> None:
    model, inputs = _network("mlp")
    full = _fit(model, inputs, structure="full")
    posterior = _fit(model, inputs, structure="sampled", draws=5000)
    assert posterior.sums["error"] < 1e-6  # more samples than weights: the first step is exact
    root = torch.linalg.cholesky(full.precision_matmul(torch.eye(38, dtype=torch.float64)))
    white = posterior.matrix.draws @ root  # of covariance one
    error = white.T @ white / 5000 - torch.eye(38, dtype=torch.float64)
    assert error.abs().max() < 5 * (2 / 5000) ** 0.5
    assert white.mean(0).abs().max() < 4.5 / 5000**0.5


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_64_samples_give_the_predictive_variances_within_their_error(task: str) -> None:
    """The ratio to the exact variance is χ²₆₄ / 64, of standard deviation √(2/64) = 0.18."""
    model, inputs = _network("mlp")
    targets = LABELS if task == "classification" else fixed_normal(40, 3)
    options: dict[str, Any] = {} if task == "classification" else {"likelihood": Gaussian(noise=0.5)}
    full, posterior = (
        Laplace(structure=structure, prior_precision=0.3, draws=64).fit(  # type: ignore[arg-type]
            model, (inputs, targets), progress=False, **options
        )
        for structure in ("full", "sampled")
    )
    x = 2 * fixed_normal(20, 3)
    exact, found = (each.functional(x)[1].diagonal(dim1=1, dim2=2) for each in (full, posterior))
    ratio = found / exact
    assert float((ratio - 1).abs().max()) < 4 * (2 / 64) ** 0.5
    assert float((ratio - 1).square().mean()) < 2 * (2 / 64)


def test_it_takes_prior_and_noise_from_the_kronecker_factors() -> None:
    model, inputs = _network("mlp")
    data = (inputs, fixed_normal(40, 3))
    kron, posterior = (
        Laplace(structure=name).fit(model, data, likelihood="gaussian", progress=False)  # type: ignore[arg-type]
        for name in ("kron", "sampled")
    )
    torch.testing.assert_close(posterior.prior_precision, kron.prior_precision)
    assert posterior.likelihood == kron.likelihood
    assert posterior.tuning == kron.tuning
    assert posterior.remaining_gain == kron.remaining_gain


@pytest.mark.slow
def test_uses_of_a_posterior(tmp_path: Path) -> None:
    model, inputs = _network("mlp")
    posterior = _fit(model, inputs, structure="sampled", draws=8)
    root = posterior.covariance.root
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, inputs))(dict(model.named_parameters()))
    rows = torch.cat([jacobian[name].flatten(2) for name in posterior.selection.names], dim=2).detach()
    expected = (rows @ root) @ (rows @ root).mT
    torch.testing.assert_close(posterior.functional(inputs)[1], expected)
    joint = (rows.flatten(0, 1) @ root) @ (rows.flatten(0, 1) @ root).mT
    torch.testing.assert_close(posterior.functional(inputs, joint=True)[1], joint)
    last = _fit(model, inputs, structure="sampled", draws=8, weights=select.last_layer())
    for each in (posterior, last):
        centred = each.predict(inputs)
        differentiable = each.predict(inputs, differentiable=True)
        torch.testing.assert_close(differentiable.probs.detach(), centred.probs)
        with each.working_copy() as own:  # as an exported file computes it
            form = next(own.forms(inputs, 8, torch.Generator().manual_seed(0)))
            torch.testing.assert_close(form.predict(inputs).probs, centred.probs)
    drawn = posterior.sample(8)["0.weight"] - model[0].weight.detach()
    stored = posterior.matrix.draws[:, :15].reshape(8, 5, 3)
    assert all(any(torch.allclose(sign * one, each) for sign in (1, -1) for one in stored) for each in drawn)
    assert len({float(each.abs().sum()) for each in drawn}) == 8  # each of them once
    assert posterior.functions(3)(inputs).shape == (3, 40, 3)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = dubito.load(tmp_path / "posterior.safetensors", model)
    assert torch.equal(loaded.predict(inputs).probs, posterior.predict(inputs).probs)
    assert dubito.compress(posterior, rule=dubito.rules.SignalToNoise(0.5)).model(inputs).shape == (40, 3)
    for refused in (posterior.log_evidence, lambda: posterior.log_prob(posterior.mean()), posterior.precision_diagonal):
        with pytest.raises(UnsupportedError, match="holds samples and no precision matrix"):
            refused()
    with pytest.raises(UnsupportedError, match="cannot be updated"):
        posterior.update((inputs, LABELS))


def test_a_resumed_fit_and_batches_that_arrive_in_another_form(tmp_path: Path) -> None:
    model, inputs = _network("mlp")
    whole = _fit(model, inputs, structure="sampled", draws=4)
    recipe = Laplace(structure="sampled", prior_precision=0.5, draws=4)
    training = Training(epochs=1, batch_size=1024, shuffle=False, checkpoint=tmp_path / "run", checkpoint_every=1)
    first = recipe.fit(model, (inputs, LABELS), training=training, progress=False)
    assert torch.equal(first.matrix.draws, whole.matrix.draws)
    small = Training(epochs=1, batch_size=7, shuffle=True)
    assert recipe.fit(model, (inputs, LABELS), training=small, progress=False).sums["error"] <= sampled.TOLERANCE


def test_what_has_not_converged_says_so() -> None:
    model, inputs = _network("convolution")
    posterior = _fit(model, inputs, structure="sampled", draws=2, steps=1, prior_precision=1e-3)
    assert posterior.sums["error"] > sampled.TOLERANCE
    assert "samples not converged" in [finding.name for finding in posterior.own_findings()]
    with pytest.raises(InputError, match="does not change between passes"):
        Laplace(structure="sampled", curvature="fisher-mc")


def test_gradients_that_are_kept_give_the_same_samples() -> None:
    """Explicit gradients of layers at many positions are formed once if they fit into memory, else once per product."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(4, 3, 2), nn.BatchNorm2d(3), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, 3)).double().eval()
    data, found = (fixed_normal(9, 2, 4, 4), torch.arange(9) % 3), []
    for size in (0, 2**28):
        with limits.using(kept_gradients=size):
            recipe = Laplace(structure="sampled", draws=6, prior_precision=1.0)
            found.append(recipe.fit(model, data, progress=False, generator=torch.Generator().manual_seed(1)))
    few, many = (posterior.sums["draws"] for posterior in found)
    assert torch.allclose(few, many, rtol=1e-9, atol=1e-12)
