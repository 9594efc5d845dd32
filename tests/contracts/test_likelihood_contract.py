"""Every likelihood with the main recipes: fit, predict, evaluate, save and load; then tables, estimators and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn

import dubito
from dubito import (
    DKL,
    HMC,
    MAP,
    SGMCMC,
    SNGP,
    SVGD,
    SWAG,
    VBLL,
    BatchEnsemble,
    Ensemble,
    Laplace,
    MCDropout,
    Posterior,
    Rank1,
    Snapshot,
    Training,
    Variational,
    likelihoods,
    models,
    priors,
)

pytestmark = pytest.mark.slow

ROWS, TRAINING = 16, Training(epochs=2, lr=1e-2, batch_size=8)
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
NUMBERS = torch.stack([X[:, 0].sin(), X[:, 1]], 1)
COUNTS = (3 * X[:, 0].sigmoid()).round()
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0)
PAIRS = torch.stack([X, X.flip(0)], 1)
# name: likelihood, inputs, targets, number of outputs
CASES: dict[str, tuple[likelihoods.Likelihood, Any, Tensor, int]] = {
    "categorical": (likelihoods.Categorical(), X, LABELS, 3),
    "bernoulli": (likelihoods.Bernoulli(), X, LABELS.clamp(max=1), 1),
    "ordinal": (likelihoods.Ordinal(), X, LABELS, 2),
    "bradley-terry": (likelihoods.BradleyTerry(), PAIRS, LABELS % 2, 1),
    "gaussian": (likelihoods.Gaussian(), X, NUMBERS, 2),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian(), X, NUMBERS, 4),
    "known-noise": (likelihoods.HeteroscedasticGaussian(), (X, 0.1 + COUNTS), NUMBERS, 2),
    "learned-noise": (likelihoods.HeteroscedasticGaussian(), X, NUMBERS, 2),
    "multivariate": (likelihoods.MultivariateGaussian((0.2, 0.3)), X, NUMBERS, 2),
    "student-t": (likelihoods.StudentT("learn"), X, NUMBERS, 4),
    "quantile": (likelihoods.Quantile(0.8), X, NUMBERS, 4),
    "mixture-density": (likelihoods.MixtureDensity(2), X, NUMBERS[:, 0], 6),
    "poisson": (likelihoods.Poisson(), X, COUNTS, 1),
    "negative-binomial": (likelihoods.NegativeBinomial(), X, COUNTS, 1),
    "dirichlet": (likelihoods.Dirichlet(), X, X.softmax(1), 3),
}
MAIN: list[Any] = [
    Laplace(),
    Variational(),
    Ensemble(members=2),
    MCDropout(0.2),
    SGMCMC(burn_in=2, thinning=1, num_samples=4, step_size=0.01, prior=priors.Normal()),
]
# what else treats a learned number
OTHERS: list[Any] = [Laplace(structure="full", prior_precision=1.0), SWAG(collect_every=1), Rank1(components=2)]
LEARNED = ("gaussian", "student-t", "negative-binomial")
FITS = [(name, recipe) for name in CASES for recipe in (*MAIN, *(OTHERS if name in LEARNED else ()))]
# fitted and asked; what is saved does not depend on the likelihood
OTHER_KINDS: list[Any] = [
    HMC("hmc", num_samples=2, burn_in=2, chains=1, num_steps=2, step_size=0.01, prior=priors.Normal()),
    SVGD(num_particles=2), BatchEnsemble(members=2), Snapshot(cycles=2), VBLL(), SNGP(num_features=8), DKL(inducing=4),
]  # fmt: skip


def network(name: str) -> nn.Module:
    outputs = CASES[name][3]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))
    if name == "learned-noise":
        return models.LearnedNoise(plain, outputs)
    return models.KnownNoise(plain) if name == "known-noise" else plain


def fitted(name: str, recipe: Any) -> Posterior:
    likelihood, inputs, targets, _ = CASES[name]
    options: dict[str, Any] = {"likelihood": likelihood, "progress": False}
    model, training = network(name), TRAINING
    if recipe.needs_trained_model:
        model = MAP().fit(model, (inputs, targets), training=training, **options).model
        training = None  # type: ignore[assignment]
    return recipe.fit(model, (inputs, targets), training=training, **options)


def test_every_likelihood_is_here() -> None:
    known = {getattr(likelihoods, name) for name in likelihoods.__all__ if name[0].isupper()}
    assert {type(case[0]) for case in CASES.values()} == known - {likelihoods.Likelihood}


@pytest.mark.parametrize(("name", "recipe"), FITS, ids=repr)
def test_a_posterior_is_asked_scored_and_loaded(name: str, recipe: Any, tmp_path: Path) -> None:
    _, inputs, targets, _ = CASES[name]
    posterior = fitted(name, recipe)
    assert not posterior.likelihood.hyper()  # what was learned is a number now
    prediction: Any = posterior.predict(inputs)
    total = prediction.entropy if hasattr(prediction, "probs") else prediction.stddev.square()
    torch.testing.assert_close(total, prediction.aleatoric + prediction.epistemic, rtol=1e-4, atol=1e-6)
    assert float(prediction.epistemic.min()) >= -1e-6
    assert bool(prediction.log_prob(targets).isfinite().all())
    few = tuple(part[:5] for part in inputs) if isinstance(inputs, tuple) else inputs[:5]
    scores = dubito.evaluate(posterior, (few, targets[:5])).scores
    assert all(np.isfinite(value) for value in scores.values()), scores
    posterior.save(tmp_path / "saved")
    again = dubito.load(tmp_path / "saved", network(name))
    assert again.likelihood == posterior.likelihood
    assert torch.equal(again.predict(inputs).log_prob(targets), prediction.log_prob(targets))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recipe", OTHER_KINDS, ids=lambda recipe: type(recipe).__name__)
def test_other_recipes_take_it(name: str, recipe: Any) -> None:
    _, inputs, targets, _ = CASES[name]
    if isinstance(recipe, VBLL | SNGP | DKL) and name in ("known-noise", "learned-noise"):
        pytest.skip("the outputs are not those of the last layer, and it says so")
    if isinstance(recipe, DKL) and name == "bradley-terry":
        pytest.skip("refused in a sentence")
    posterior = fitted(name, recipe)
    prediction: Any = posterior.predict(inputs)
    total = prediction.entropy if hasattr(prediction, "probs") else prediction.stddev.square()
    torch.testing.assert_close(total, prediction.aleatoric + prediction.epistemic, rtol=1e-4, atol=1e-6)
    assert bool(prediction.log_prob(targets).isfinite().all())


def test_a_learned_dispersion_and_learned_tails_are_found() -> None:
    """The best number by scipy's density, at the network that was trained."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(400, 1, generator=generator)
    rates = torch._standard_gamma(torch.full((400, 1), 2.0), generator=generator) / 2 * (1 + x).exp()
    counts = torch.poisson(rates, generator=generator)
    training = Training(epochs=60, lr=0.05)
    point = MAP().fit(nn.Linear(1, 1), (x, counts), likelihood="negative-binomial", training=training, progress=False)
    assert isinstance(point.likelihood, likelihoods.NegativeBinomial)
    found = float(point.likelihood.dispersion)
    assert 0.35 < found < 0.7  # 1/2, within three standard errors

    @torch.no_grad()
    def loss(dispersion: float) -> float:
        return -float(likelihoods.NegativeBinomial(dispersion).log_prob(point.model(x), counts).sum())

    assert loss(found) <= min(loss(found * 1.02), loss(found / 1.02))
    laplace = Laplace(structure="full").fit(
        point.model, (x, counts), likelihood=likelihoods.NegativeBinomial(), progress=False
    )
    assert laplace.likelihood.dispersion == pytest.approx(found, rel=1e-4)  # type: ignore[attr-defined]


def test_a_learned_noise_per_output_is_that_of_the_residuals() -> None:
    """At the optimum each noise is the root mean square of its output's residuals."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(300, 1, generator=generator)
    y = torch.cat([x, -x], 1) + torch.tensor([0.1, 0.6]) * torch.randn(300, 2, generator=generator)
    point = MAP().fit(
        models.LearnedNoise(nn.Linear(1, 2), 2), (x, y), likelihood="heteroscedastic", progress=False,
        training=Training(epochs=300, lr=0.1, batch_size=300, schedule="cosine"),
    )  # fmt: skip
    found: Any = point.predict(x)
    torch.testing.assert_close(found.aleatoric[0], (y - found.mean).square().mean(0), rtol=0.03, atol=0.0)
    with pytest.raises(InputError, match="has 3 noises, but the network gives outputs of shape"):
        models.LearnedNoise(nn.Linear(1, 2), 3)(x)
    with pytest.raises(InputError, match="`num_outputs` must be a whole number"):
        models.LearnedNoise(nn.Linear(1, 2), "two")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="LearnedNoise learns them"):
        likelihoods.MultivariateGaussian("learn")  # type: ignore[arg-type]
    for wrong in (0.0, -0.5):
        noise = torch.ones(300)
        noise[-1] = wrong
        known = (models.KnownNoise(nn.Linear(1, 1)), ((x, noise), y[:, :1]))
        with pytest.raises(InputError, match=f"must be above 0, got {wrong:g}: remove those rows"):
            MAP().fit(*known, likelihood="heteroscedastic", progress=False)


def test_members_with_different_numbers_are_mixed() -> None:
    from dubito.beliefs.prediction import DistributionPrediction
    from dubito.methods.ensembles.posterior import mixture

    outputs, y = torch.tensor([[0.3]], dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)
    parts = [likelihoods.NegativeBinomial(dispersion).predict(outputs) for dispersion in (0.2, 3.0)]
    mixed = mixture(list(parts))
    assert isinstance(mixed, DistributionPrediction)
    expected = torch.stack([part.log_prob(y).exp() for part in parts]).mean().log()
    assert float(mixed.log_prob(y)) == pytest.approx(float(expected), rel=1e-12)


def test_known_noise_is_exact_weighted_regression() -> None:
    """On a linear model: mean, covariance and evidence of Bayesian regression with one noise per datum."""
    from scipy import stats

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(15, 2, generator=generator, dtype=torch.float64)
    noise = 0.2 + torch.rand(15, generator=generator, dtype=torch.float64)
    y = x.sum(1) + noise * torch.randn(15, generator=generator, dtype=torch.float64)
    precision = x.T @ (x / noise.square()[:, None]) + 2 * torch.eye(2, dtype=torch.float64)
    model = models.KnownNoise(nn.Linear(2, 1, bias=False).double())
    model.network.weight.data = torch.linalg.solve(precision, x.T @ (y / noise.square()))[None]
    posterior = Laplace(structure="full", prior_precision=2.0).fit(
        model, ((x, noise), y), likelihood="heteroscedastic", progress=False
    )
    covariance = torch.diag(noise.square()) + x @ x.T / 2
    expected = stats.multivariate_normal.logpdf(y.numpy(), cov=covariance.numpy())
    assert float(posterior.log_evidence()) == pytest.approx(expected, rel=1e-8)
    prediction: Any = posterior.predict((x, noise))
    torch.testing.assert_close(prediction.aleatoric[:, 0], noise.square())
    wanted = torch.einsum("bi,ij,bj->b", x, torch.linalg.inv(precision), x)
    torch.testing.assert_close(prediction.epistemic[:, 0], wanted, rtol=1e-8, atol=1e-10)
    with pytest.raises(InputError, match="noise must have one number per datum"):
        model(x, noise[:4])


QUICK = {"epochs": 2, "lr": 0.01}
TABLE = {
    "a": X[:, 0].tolist(), "b": X[:, 1].tolist(),
    "number": NUMBERS[:, 0].tolist(), "count": COUNTS.tolist(), "grade": LABELS.tolist(),
    "which": (LABELS % 2).tolist(),
}  # fmt: skip
OF_TABLES = {
    "categorical": "grade", "bernoulli": "which", "ordinal": "grade", "gaussian": "number", "heteroscedastic": "number",
    "MultivariateGaussian(covariance=[0.3])": "number", "student-t": "number", "student-t(dof='learn')": "number",
    "quantile(level=0.8)": "number", "mixture-density": "number", "poisson": "count", "negative-binomial": "count",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The predictions for held-out rows are worse")  # two epochs are few
@pytest.mark.parametrize("likelihood", OF_TABLES)
def test_a_table_is_fitted_predicted_and_loaded(likelihood: str, tmp_path: Path) -> None:
    target = OF_TABLES[likelihood]
    table = {name: values for name, values in TABLE.items() if name in ("a", "b", target)}
    task = "classification" if target in ("grade", "which") else None  # counts look like classes, but a likelihood says
    run = dubito.runs.fit(
        {name: 2 * values for name, values in table.items()}, target, recipe=Laplace(), likelihood=likelihood,
        task=task, training=QUICK, held_out=0.4, progress=False,
    )  # fmt: skip
    assert run.task == (task or "regression")
    columns = run.predict(table).columns
    assert all(np.isfinite(values).all() for values in columns.values() if np.asarray(values).dtype.kind == "f")
    run.save(tmp_path / "run")
    again = dubito.runs.load(tmp_path / "run").predict(table).columns
    assert all(list(again[name]) == list(values) for name, values in columns.items())


NOISY = {name: 3 * TABLE[name] for name in ("a", "b", "number")} | {"sigma": torch.linspace(0.3, 1.2, 48).tolist()}


@pytest.mark.filterwarnings("ignore:The predictions for held-out rows are worse")  # two epochs are few
def test_the_noise_column_of_a_table_is_the_aleatoric_variance_also_beyond_its_range(tmp_path: Path) -> None:
    run = dubito.runs.fit(NOISY, "number", noise_column="sigma", recipe=Laplace(), training=QUICK, progress=False)
    wide = {**NOISY, "sigma": [9.0, *NOISY["sigma"][1:]]}
    columns = run.predict(wide).columns
    np.testing.assert_allclose(columns["aleatoric"], np.square(wide["sigma"]), rtol=1e-4)
    run.save(tmp_path / "run")
    again = dubito.runs.load(tmp_path / "run").predict(wide).columns
    assert all(list(again[name]) == list(values) for name, values in columns.items())
    with pytest.raises(InputError, match="must be positive, but row 0 holds -1"):
        run.predict({**NOISY, "sigma": [-1.0, *NOISY["sigma"][1:]]})


@pytest.mark.parametrize(
    ("column", "likelihood", "words"),
    [
        ([0.0] + [1.0] * 47, None, "must be positive, but a row holds"),
        ([None] + [1.0, 2.0, 3.0] * 16, None, "has missing values"),
        ([2.0] * 48, None, "same in all rows is a likelihood"),
        (["x", "y"] * 24, None, "must hold positive numbers"),
        (NOISY["sigma"], "student-t", "the noise of a Gaussian likelihood"),
    ],
)
def test_a_wrong_noise_column_is_one_sentence(column: list[Any], likelihood: str | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        dubito.runs.fit(
            {**NOISY, "sigma": column[:48]}, "number", noise_column="sigma", recipe=MAP(), likelihood=likelihood,
            training=QUICK, progress=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("likelihood", "target", "words"),
    [
        ("dirichlet", "number", "needs two target columns or more"),
        ("bradley-terry", "which", "A preference"),
        ("poisson", "number", "whole numbers of at least 0"),
        ("gaussian", "grade", "does not fit"),
    ],
)
def test_what_a_table_cannot_hold_is_one_sentence(likelihood: str, target: str, words: str) -> None:
    table = {name: values for name, values in TABLE.items() if name in ("a", "b", target)}
    task = "classification" if target in ("grade", "which") else "regression"
    with pytest.raises(InputError, match=words):
        dubito.runs.fit(table, target, recipe=MAP(), likelihood=likelihood, task=task, training=QUICK, progress=False)


@pytest.mark.parametrize("name", ["heteroscedastic", "multivariate", "student-t", "quantile", "dirichlet", "poisson"])
def test_an_estimator_takes_it(name: str) -> None:
    from dubito.sklearn import DubitoRegressor

    likelihood, _, targets, _ = CASES[name]
    regressor = DubitoRegressor(Laplace(), likelihood=likelihood, training=QUICK, held_out=0.0)
    mean, stddev = regressor.fit(X.numpy(), targets.numpy()).predict(X.numpy(), return_std=True)
    assert mean.shape == stddev.shape == tuple(targets.shape)
    assert (stddev > 0).all()
    if name == "dirichlet":
        np.testing.assert_allclose(mean.sum(1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("level", [0.1, 0.9])
def test_estimators_and_tables_predict_the_quantile(level: float) -> None:
    from dubito.sklearn import DubitoRegressor

    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(300, 2))
    truth = inputs[:, 0] + generator.exponential(size=300)
    likelihood, training = likelihoods.Quantile(level), {"epochs": 60, "lr": 0.01}
    regressor = DubitoRegressor(MAP(), likelihood=likelihood, training=training).fit(inputs, truth)
    assert abs((truth <= regressor.predict(inputs)).mean() - level) < 0.1
    table = {"a": list(inputs[:, 0]), "b": list(inputs[:, 1]), "y": list(truth)}
    run = dubito.runs.fit(table, "y", recipe=MAP(), likelihood=likelihood, training=training, progress=False)
    assert abs((truth <= run.predict(table)["prediction"]).mean() - level) < 0.1


def test_words_have_no_order() -> None:
    table = {"a": list(range(48)), "grade": ["low", "mid", "high"] * 16}
    with pytest.raises(InputError, match="classes whose order is known, but they are high, low, mid"):
        dubito.runs.fit(table, "grade", recipe=MAP(), likelihood="ordinal", training=QUICK, progress=False)
