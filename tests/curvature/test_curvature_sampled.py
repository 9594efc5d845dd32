"""Exact samples by block conjugate gradients, against the full posterior in float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from dubito.likelihoods import Categorical, Gaussian
from torch import Tensor, nn

import dubito
from dubito import Laplace, Training, select
from dubito.core import limits
from dubito.core.batches import Batch
from dubito.curvature import sampled, subset
from dubito.curvature.curvature_pass import CurvaturePass
from dubito.curvature.engine import Engine
from dubito.curvature.factors import keep_gradients
from dubito.networks.selection import Selection
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

    monkeypatch.setattr(sampled, "tolerance", lambda num_draws: 1e-9)
    monkeypatch.setattr(sampled.SampledAccumulator, "finish", staticmethod(keeping))
    posterior = _fit(model, inputs, structure="sampled", weights=weights, temperature=0.5, draws=4, steps=90)
    assert posterior.sums["error"] <= 1e-9
    torch.testing.assert_close(full.precision_matmul(kept["draws"]), kept["right"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("prior", [torch.tensor(0.7), torch.linspace(0.5, 2.0, 30)], ids=["one", "each"])
def test_the_inverse_of_some_rows_is_exact(prior: Tensor) -> None:
    rows = fixed_normal(12, 30).bfloat16()
    kept = {"rows": rows, "used": 8, "examples": 12, "each": 2}  # two rows for every third example
    with limits.using(chunk=4 * 8 * 7):  # seven columns at a time
        inverse = subset.SubsetInverse(kept, prior.double(), torch.tensor(0.5))
        found = inverse.solve(fixed_normal(4, 30))
    used = rows[:8].double()
    expected = torch.linalg.inv(0.5 * 3 * used.T @ used + prior.double().expand(30).diag())
    torch.testing.assert_close(found, fixed_normal(4, 30) @ expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inverse.log_det, -expected.logdet(), rtol=1e-6, atol=0)


def _kept_rows(monkeypatch: pytest.MonkeyPatch, fits: Any, **sizes: int) -> list[dict[str, Any]]:
    """Return what fits keep for their preconditioner."""
    kept: list[dict[str, Any]] = []
    begin = sampled.SampledAccumulator.begin

    def keeping(self: Any, sums: Any, *rest: Any) -> None:
        kept.append({key: value.clone() if key == "rows" else value for key, value in sums["subset"].items()})
        begin(self, sums, *rest)

    monkeypatch.setattr(subset, "FEWEST_ROWS", 1)
    monkeypatch.setattr(sampled.SampledAccumulator, "begin", keeping)
    with limits.using(**sizes):
        fits()
    return kept


@pytest.mark.parametrize(
    ("most", "each", "every", "used"), [(120, 2, 1, 80), (70, 1, 1, 40), (39, 1, 2, 20), (15, 1, 3, 14)]
)
def test_rows_are_mixtures_of_the_columns_of_every_nth_example(
    most: int, each: int, every: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = _network("convolution")
    recipe = Laplace(structure="sampled", prior_precision=0.5, draws=4)
    size = sum(parameter.numel() for parameter in model.parameters())

    def fits() -> None:
        for batch_size in (40, 7):
            training = Training(epochs=1, batch_size=batch_size, shuffle=False)
            recipe.fit(model, (inputs, LABELS), training=training, progress=False)

    kept = _kept_rows(monkeypatch, fits, subset_rows=2 * size * most)
    found = [[int(rows[key]) for key in ("each", "every", "examples", "used")] for rows in kept]
    assert found == [[each, every, 40, used]] * 2
    assert all(len(rows["rows"]) == used and bool(rows["rows"].any(1).all()) for rows in kept)
    if each == 2:  # all columns of all examples, in another basis
        full = _fit(model, inputs, structure="full").matrix
        exact = full.matmul(torch.eye(size, dtype=torch.float64))
        for rows in kept:
            curvature = rows["rows"].double().T @ rows["rows"].double()
            torch.testing.assert_close(curvature, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_mixtures_have_the_curvature_of_all_columns_on_average(count: int) -> None:
    columns, weights = fixed_normal(3, 4), subset.mixing_weights(20_000, 3, count, seed=0).double()
    mixed = torch.einsum("bvp,vo->bpo", weights, columns)
    curvature, exact = torch.einsum("bpo,bpq->oq", mixed, mixed) / 20_000, columns.mT @ columns
    torch.testing.assert_close(curvature, exact, rtol=0, atol=1e-5 if count == 3 else 0.03 * float(exact.trace()))


@pytest.mark.parametrize("kind", ["mlp", "embedding", "convolution"])
@pytest.mark.parametrize("keeps", [False, True])
def test_factors_mix_their_columns(kind: str, keeps: bool) -> None:
    """Every form of a factor gives the mixtures of explicit gradients."""
    model, inputs = _network(kind)
    engine = Engine(model, [name for name, _ in model.named_parameters()])
    factors = engine.run(inputs[:6]).pull(fixed_normal(3, 6, 3))
    explicit = {name: factor.per_sample().flatten(2) for name, factor in factors.items()}
    if keeps:
        keep_gradients(factors.values())
    weights, rows = fixed_normal(6, 3, 2), slice(1, 6, 2)
    for name, factor in factors.items():
        expected = torch.einsum("bvp,vbs->bps", weights, explicit[name])[rows]
        torch.testing.assert_close(factor.mixed(weights, rows), expected)


def test_columns_that_come_in_parts_are_one_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of an example is the sum of the mixtures of all its parts."""
    torch.manual_seed(0)
    model, data = nn.Linear(2, 5).double(), (fixed_normal(30, 2), fixed_normal(30, 5))
    monkeypatch.setattr("dubito.curvature.curvature_pass.MOST_COLUMNS", 2)
    monkeypatch.setattr(subset, "PASSES", 1000)
    recipe = Laplace(structure="sampled", prior_precision=0.5, draws=4)
    kept = _kept_rows(
        monkeypatch, lambda: recipe.fit(model, data, likelihood=Gaussian(1.0), progress=False), subset_rows=2 * 15 * 30
    )[0]
    rows, every = kept["rows"].double(), kept["every"]
    assert (kept["each"], len(rows)) == (1, -(-30 // every))
    signs = rows[:, 10:]  # the gradient of the bias is the mixture itself: a sign for every output
    torch.testing.assert_close(signs.abs(), torch.ones_like(signs), rtol=0.01, atol=0)
    expected = (signs[:, :, None] * data[0][::every, None]).flatten(1)
    torch.testing.assert_close(rows[:, :10], expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("case", ["rows", "factors"])
def test_the_preconditioner_nearer_to_the_precision_is_used(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kronecker factors are exact for one linear layer with Gaussian noise, rows for all columns of all examples."""
    torch.manual_seed(0)
    used: list[bool] = []
    step = sampled.SampledAccumulator.next_pass

    def noting(self: Any, sums: Any) -> None:
        used.append("subset" in sums)
        step(self, sums)

    monkeypatch.setattr(subset, "FEWEST_ROWS", 1)
    monkeypatch.setattr(sampled.SampledAccumulator, "next_pass", noting)
    model, inputs = _network("convolution")
    likelihood: Any
    targets, likelihood = LABELS, "categorical"
    if case == "factors":
        model, inputs, targets, likelihood = (
            nn.Linear(3, 2).double(),
            fixed_normal(40, 3),
            fixed_normal(40, 2),
            Gaussian(1.0),
        )
    recipe = Laplace(structure="sampled", prior_precision=0.5, draws=4)
    posterior: Any = recipe.fit(model, (inputs, targets), likelihood=likelihood, progress=False)
    assert used[0] == (case == "rows")
    assert posterior.sums["error"] <= sampled.tolerance(4)


def test_rows_of_some_examples_save_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "tolerance", lambda num_draws: 0.01)
    model, inputs = _network("convolution")
    errors = []
    for size in (0, 2**20):
        with limits.using(subset_rows=size):
            posterior = _fit(model, inputs, structure="sampled", draws=4, steps=3, prior_precision=0.01)
        errors.append(posterior.sums["error"])
    assert errors[0] > 0.1
    assert errors[1] <= 0.01


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


@pytest.mark.parametrize("kind", ["mlp", "embedding", "convolution"])
def test_estimated_factors_are_right_on_average(kind: str) -> None:
    """With a given prior the Kronecker factors come from a mixture of the columns of some examples."""
    model, inputs = _network(kind)
    inputs, labels, sums = inputs.repeat(150, *[1] * (inputs.ndim - 1)), LABELS.repeat(150), []
    for given in (True, False):
        source = SimpleNamespace(num_data=6000, first=lambda: Batch(inputs[:8], labels[:8], 8))
        curvature: Any = CurvaturePass("sampled", model, Selection.all_of(model), Categorical(), tunes=not given)
        found = curvature.zeros(source)
        for start in range(0, 6000, 200):
            curvature.add(found, Batch(inputs[start : start + 200], labels[start : start + 200], 200))
        curvature.accumulator.complete_factors(found)
        assert 0 < found["used"] < 3000 or not given
        size = curvature.accumulator.selection.num_weights
        sums.append(curvature.accumulator.factors.matrix(found["factors"]).matmul(torch.eye(size).double()))
    assert 0 < float((sums[0] - sums[1]).norm() / sums[1].norm()) < 0.05


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
    assert recipe.fit(model, (inputs, LABELS), training=small, progress=False).sums["error"] <= sampled.tolerance(4)


def test_what_has_not_converged_says_so() -> None:
    model, inputs = _network("convolution")
    with limits.using(subset_rows=0):
        posterior = _fit(model, inputs, structure="sampled", draws=2, steps=1, prior_precision=1e-3)
    assert posterior.sums["error"] > sampled.tolerance(2)
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
