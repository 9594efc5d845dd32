"""The names and arguments that other people's scripts call: a changed spelling breaks them."""

from __future__ import annotations

import inspect
from typing import Any

import dubito
from dubito import likelihoods, objectives, priors, rules, select, variational
from dubito.fitting import posterior

RECIPES = (
    "Laplace", "Variational", "Rank1", "BatchEnsemble", "Ensemble", "Snapshot", "SWAG", "MCDropout", "SGMCMC", "HMC",
    "MAP",
)  # fmt: skip
FIT = ("likelihood", "validation", "training", "generator", "progress")
CALLS: list[tuple[Any, tuple[str, ...]]] = [
    (dubito.evaluate, ("posterior", "data", "ood", "shifts")),
    (dubito.report, ("results", "path")),
    (dubito.compress, ("posterior", "rule", "structure", "data")),
    (dubito.distill, ("posterior", "student", "data")),
    (dubito.acquire, ("posterior", "pool", "num", "method")),
    (dubito.load, ("path", "model")),
    (variational.convert, ("model", "prior", "estimator", "initial_scale", "biases")),
    (select.subnetwork, ("size", "rule", "context")),
    (select.largest_variance, ("size", "of")),
    (select.largest_magnitude, ("size",)),
    (select.random, ("size",)),
    (likelihoods.Gaussian, ("noise",)),
    (priors.Normal, ("loc", "scale")),
    (priors.Cauchy, ("loc", "scale")),
    (objectives.Renyi, ("alpha", "num_samples")),
]


def test_recipes_fit_alike() -> None:
    for name in RECIPES:
        given = inspect.signature(getattr(dubito, name).fit).parameters
        assert list(given)[:3] == ["self", "model", "data"], name
        assert {given[each].kind for each in FIT} == {inspect.Parameter.KEYWORD_ONLY}, name
        assert (given["likelihood"].default, given["progress"].default) == ("categorical", True), name


def test_arguments_are_in_order() -> None:
    for call, names in CALLS:
        given = [name for name in inspect.signature(call).parameters if name in names]
        assert tuple(given) == names, call


def test_everything_else_is_there() -> None:
    for home, names in {
        select: "all last_layer layers mask",
        likelihoods: "Categorical Bernoulli HeteroscedasticGaussian",
        priors: "Laplace StudentT ScaleMixture LogUniform ARD LogNormal HalfCauchy Horseshoe NormalJeffreys",
        objectives: "ELBO",
        rules: "ModelReduction SignalToNoise LogAlpha PosteriorDamage Magnitude Random",
        posterior.Posterior: "predict sample marginals log_evidence update save",
        dubito: "Training Posterior Prediction",
    }.items():
        assert not [name for name in names.split() if not hasattr(home, name)]
