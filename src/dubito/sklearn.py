"""Estimators for scikit-learn: a recipe and a network that fit in pipelines, searches and cross-validation.

    from dubito.sklearn import DubitoRegressor

    model = DubitoRegressor(recipe="laplace(structure=kron)").fit(X, y)
    mean, std = model.predict(X_new, return_std=True)
    lower, upper = model.predict_interval(X_new, coverage=0.9).T

Both pass scikit-learn's `check_estimator`. Inputs and targets are standardised inside. Data frames may hold text,
categories, dates and missing values; they are then encoded as `dubito fit` encodes a table.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from dubito.beliefs.likelihoods import Likelihood, resolve
from dubito.beliefs.likelihoods.kinds import RegressionLikelihood
from dubito.beliefs.prediction import ClassPrediction, DistributionPrediction, Prediction, RegressionPrediction
from dubito.beliefs.prediction.base import frame
from dubito.core import grammar
from dubito.core.constraints import OpenProbability, check
from dubito.core.errors import InputError
from dubito.core.settings import Setting
from dubito.data import TableTransform
from dubito.fitting.posterior import Posterior
from dubito.fitting.recipe import Recipe
from dubito.fitting.training import Training
from dubito.methods.auto import Auto
from dubito.uses.array_fits import Array, ArrayFit, How, Network, fit_arrays, is_table
from dubito.uses.runs.default import LAPLACE

__all__ = ["DubitoClassifier", "DubitoRegressor"]

# Parameters whose settings can be reached with two underscores, as in ``recipe__structure``.
_SETTINGS = ("recipe", "training")


class _Estimator(BaseEstimator):
    """What both estimators share: parameters, checks, and predictions as distributions."""

    fit_: ArrayFit

    @property
    def posterior_(self) -> Posterior:
        """The posterior over the weights of the network, for standardised inputs and targets."""
        check_is_fitted(self)
        return self.fit_.posterior

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters; with `deep` also the settings of `recipe` and `training`."""
        found: dict[str, Any] = super().get_params(deep=deep)
        for name in _SETTINGS if deep else ():
            if isinstance(found[name], Setting):
                found |= {f"{name}__{field}": value for field, value in found[name].fields().items()}
        return found

    def set_params(self, **params: Any) -> Self:
        """Set parameters; ``recipe__structure="full"`` replaces one setting of the recipe.

        Without a recipe it is one of `Laplace`, or of `Auto` for a setting that only `Auto` has.
        """
        inside = {name: value for name, value in params.items() if name.startswith(tuple(f"{n}__" for n in _SETTINGS))}
        super().set_params(**{name: value for name, value in params.items() if name not in inside})
        for name in _SETTINGS:
            changes = {key.partition("__")[2]: value for key, value in inside.items() if key.startswith(f"{name}__")}
            if changes:
                now = getattr(self, name)
                default = Auto() if changes.keys() <= Auto().fields().keys() else LAPLACE
                found = _training(now) if name == "training" else _recipe(now) or default
                setattr(self, name, found.replace(**changes))
        return self

    def predict_distribution(self, X: Any) -> Prediction:
        """Return the prediction as a distribution in original units: `epistemic`, `aleatoric`, `log_prob` and so on."""
        check_is_fitted(self)
        return self.fit_.predict(self._validated(X, reset=False))

    def _how(self, likelihood: Likelihood, held_out: float, default: Recipe | None) -> How:
        training = _training(self.training)  # raises where it is nonsense
        given = dict(self.training or {}) if not isinstance(self.training, Training) else training.fields()
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        return How(
            _recipe(self.recipe) or default, self.network, likelihood, given, self.validation, held_out, seed,
            bool(self.verbose),
        )  # fmt: skip

    def _validated(self, X: Any, *, reset: bool) -> Any:
        """Return checked inputs: an array of numbers, or a table as it is."""
        table = is_table(X) if reset else isinstance(getattr(self, "fit_", None) and self.fit_.encoder, TableTransform)
        if table:
            return validate_data(self, X, reset=reset, skip_check_array=True)
        fewest = 2 if reset else 1
        return validate_data(self, X, reset=reset, dtype=(np.float64, np.float32), ensure_min_samples=fewest)

    def _check_targets(self, X: Any, y: Any) -> None:
        if y is None:
            raise InputError(f"This {type(self).__name__} estimator requires y to be passed, but the target y is None.")
        check_consistent_length(X, y)


class DubitoClassifier(ClassifierMixin, _Estimator):
    """A classifier with a posterior over the weights of its network.

    Args:
        recipe: How to find the posterior: a recipe, or its text such as ``"laplace(structure=kron)"``; by default
            `Auto`, which chooses the method that predicts held-out rows best.
        network: A network by name, such as ``"mlp(hidden=[50, 50])"``, a function of the numbers of inputs and outputs,
            or a module, which is copied.
        training: Training settings in place of the recipe's own: a `Training` or a dict such as ``{"epochs": 50}``.
        class_weight: ``"balanced"``, or a weight for each class.
        validation: The share of the rows that chooses settings such as the prior precision.
        random_state: A seed, or a numpy generator.
        verbose: Whether to show progress bars.

    Attributes:
        classes_: The classes.
        posterior_: The posterior; see `dubito.Posterior`.
        n_features_in_: The number of inputs.
        feature_names_in_: Their names, if the inputs were a data frame.
    """

    def __init__(
        self,
        recipe: Recipe | str | None = None,
        network: Network = "mlp",
        *,
        training: Training | Mapping[str, Any] | None = None,
        class_weight: str | Mapping[Any, float] | None = None,
        validation: float = 0.1,
        random_state: Any = 0,
        verbose: bool = False,
    ) -> None:
        self.recipe = recipe
        self.network = network
        self.training = training
        self.class_weight = class_weight
        self.validation = validation
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior to labelled rows; a weight of n counts as n equal rows."""
        return self._fit(X, y, None, sample_weight, None)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Learn from more rows, for which the posterior is the prior; the first call fits, and knows all `classes`.

        Without a recipe the first call fits a Laplace posterior over all weights.
        """
        if not hasattr(self, "fit_"):
            return self._fit(X, y, classes, sample_weight, LAPLACE)
        X, labels = self._validated(X, reset=False), self._labels(X, y)
        self.fit_ = self.fit_.updated(X, self._numbers(labels), self._weights(X, labels, sample_weight))
        return self

    def _fit(self, X: Any, y: Any, classes: Any, sample_weight: Any, default: Recipe | None) -> Self:
        X, labels = self._validated(X, reset=True), self._labels(X, y)
        self.classes_ = np.unique(labels if classes is None else np.concatenate([np.asarray(classes), labels]))
        if len(self.classes_) < 2:
            raise InputError(f"The targets have one class, {self.classes_[0]}; classification needs two classes.")
        weights, how = self._weights(X, labels, sample_weight), self._how(resolve("categorical"), 0.0, default)
        self.fit_ = fit_arrays(X, self._numbers(labels), weights, how, len(self.classes_))
        return self

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row."""
        number = self.predict_proba(X).argmax(axis=1)
        found: Array = self.classes_[number]
        return found

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class ``[N, classes]``."""
        found = self.predict_distribution(X)
        assert isinstance(found, ClassPrediction)
        probs = found.probs.double().numpy()
        return probs / probs.sum(axis=1, keepdims=True)

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of the probability of each class ``[N, classes]``."""
        found = self.predict_distribution(X)
        assert isinstance(found, ClassPrediction)
        return found.log_probs.double().numpy()

    def predict_frame(self, X: Any) -> Any:
        """Return a pandas frame, with the index of `X`: prediction, confidence, probabilities, parts of uncertainty."""
        found, probs = self.predict_distribution(X), self.predict_proba(X)
        columns = {"prediction": self.classes_[probs.argmax(axis=1)], "confidence": probs.max(axis=1)}
        columns |= {f"p_{name}": each for name, each in zip(self.classes_, probs.T, strict=True)}
        return _frame(X, columns, found)

    def _labels(self, X: Any, y: Any) -> Array:
        self._check_targets(X, y)
        labels: Array = column_or_1d(y, warn=True)
        check_classification_targets(labels)
        return labels

    def _numbers(self, labels: Array) -> Array:
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise InputError(
                f"The class {unknown[0]} is not one of the first fit's: {', '.join(map(str, self.classes_))}."
            )
        return np.searchsorted(self.classes_, labels)

    def _weights(self, X: Any, labels: Array, sample_weight: Any) -> Array | None:
        own = None if sample_weight is None else _check_sample_weight(sample_weight, X)
        if self.class_weight is None:
            return own
        of_classes: Array = compute_sample_weight(self.class_weight, labels)
        return of_classes if own is None else of_classes * own


class DubitoRegressor(RegressorMixin, _Estimator):
    """A regression with a posterior over the weights of its network, for one or several numbers.

    Args:
        recipe: How to find the posterior: a recipe, or its text such as ``"laplace(structure=kron)"``; by default
            `Auto`, which chooses the method that predicts held-out rows best.
        network: A network by name, such as ``"mlp(hidden=[50, 50])"``, a function of the numbers of inputs and outputs,
            or a module, which is copied.
        training: Training settings in place of the recipe's own: a `Training` or a dict such as ``{"epochs": 50}``.
        likelihood: ``"gaussian"``, ``"heteroscedastic"`` (noise that depends on the inputs) or a likelihood.
        validation: The share of the rows that chooses settings such as the prior precision.
        held_out: The share of the rows that calibrates `predict_interval` and is not trained on; 0 for none.
        random_state: A seed, or a numpy generator.
        verbose: Whether to show progress bars.

    Attributes:
        posterior_: The posterior; see `dubito.Posterior`.
        n_features_in_: The number of inputs.
        feature_names_in_: Their names, if the inputs were a data frame.
    """

    def __init__(
        self,
        recipe: Recipe | str | None = None,
        network: Network = "mlp",
        *,
        training: Training | Mapping[str, Any] | None = None,
        likelihood: str | Likelihood = "gaussian",
        validation: float = 0.1,
        held_out: float = 0.1,
        random_state: Any = 0,
        verbose: bool = False,
    ) -> None:
        self.recipe = recipe
        self.network = network
        self.training = training
        self.likelihood = likelihood
        self.validation = validation
        self.held_out = held_out
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior to rows with targets ``[N]`` or ``[N, O]``; a weight of n counts as n equal rows."""
        return self._fit(X, y, sample_weight, None)

    def _fit(self, X: Any, y: Any, sample_weight: Any, default: Recipe | None) -> Self:
        X, targets = self._validated(X, reset=True), self._targets(X, y)
        likelihood = resolve(self.likelihood)
        if not isinstance(likelihood, RegressionLikelihood):
            raise InputError(f"A regression needs a likelihood of numbers, such as 'gaussian', not {likelihood!r}.")
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, X)
        self.fit_ = fit_arrays(X, targets, weights, self._how(likelihood, self.held_out, default), None)
        self._shape = targets.shape[1:]
        return self

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from more rows, for which the posterior is the prior; the first call fits.

        The scales and the calibration of intervals stay those of the first rows. Without a recipe the first call fits
        a Laplace posterior over all weights.
        """
        if not hasattr(self, "fit_"):
            return self._fit(X, y, sample_weight, LAPLACE)
        X, targets = self._validated(X, reset=False), self._targets(X, y)
        if targets.shape[1:] != self._shape:
            raise InputError(f"The targets must have shape [N, {self._shape}] as before, got {targets.shape}.")
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, X)
        self.fit_ = self.fit_.updated(X, targets, weights)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean for each row, and with `return_std` the standard deviation as well.

        With `likelihoods.Quantile(level)` it is that quantile instead of the mean.
        """
        found = self.predict_distribution(X)
        assert isinstance(found, RegressionPrediction)
        point = self._shaped(found.point.numpy())
        return (point, self._shaped(found.stddev.numpy())) if return_std else point

    def predict_interval(self, X: Any, coverage: float = 0.9) -> Array:
        """Return the lower and the upper end of an interval for each row, ``[N, 2]`` or ``[N, O, 2]``.

        An interval holds the truth of a new row with at least the probability `coverage`, for each output, whatever the
        posterior: the ends are set by the held-out rows (split-conformal prediction). Where too few rows were held out
        it is the posterior's own interval, and a warning says so.
        """
        check("coverage", OpenProbability, coverage)
        found = self.predict_distribution(X)
        assert isinstance(found, RegressionPrediction)
        try:
            reach = self.fit_.reach(coverage) * found.stddev
            ends = found.mean - reach, found.mean + reach
        except InputError as error:
            warnings.warn(f"Intervals are the posterior's own, without a guarantee. {error}", stacklevel=2)
            ends = found.interval(coverage)
        return np.stack([self._shaped(end.numpy()) for end in ends], axis=-1)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Array:
        """Draw targets from the prediction for each row, ``[N, n_samples]`` or ``[N, O, n_samples]``.

        One draw uses the same posterior sample for all rows, as far as the posterior consists of samples.
        """
        found = self.predict_distribution(X)
        assert isinstance(found, RegressionPrediction)
        rng = check_random_state(random_state)
        if isinstance(found, DistributionPrediction):
            drawn = found.draw(n_samples, int(rng.randint(2**31))).numpy()
            return self._shaped(np.moveaxis(drawn, 0, -1))
        chosen = rng.randint(len(found.means), size=n_samples)
        scale = (found.noise_variance + found.function_variance).sqrt().numpy()[chosen]
        drawn = found.means.numpy()[chosen] + scale * rng.standard_normal(scale.shape)
        return self._shaped(np.moveaxis(drawn, 0, -1))

    def predict_frame(self, X: Any, coverage: float = 0.9) -> Any:
        """Return a pandas frame, with the index of `X`: prediction, stddev, lower, upper, parts of the uncertainty."""
        (mean, stddev), ends = self.predict(X, return_std=True), self.predict_interval(X, coverage)
        columns: dict[str, Any] = {}
        for name, values in (
            ("prediction", mean),
            ("stddev", stddev),
            ("lower", ends[..., 0]),
            ("upper", ends[..., 1]),
        ):
            columns |= _columns(name, values)
        return _frame(X, columns, self.predict_distribution(X))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _targets(self, X: Any, y: Any) -> Array:
        self._check_targets(X, y)
        return check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")

    def _shaped(self, values: Array) -> Array:
        """Return ``[N, O, ...]`` without the axis of outputs, if the targets had none."""
        return values if self._shape else values[:, 0]


def _recipe(given: Any) -> Recipe | None:
    if given is None:
        return None
    found = grammar.parse(given) if isinstance(given, str) else given
    if not isinstance(found, Recipe):
        raise InputError(f"`recipe` must be a recipe such as Laplace(), or text such as 'laplace()', got {given!r}.")
    return found


def _training(given: Any) -> Training:
    if isinstance(given, Training):
        return given
    if given is None or isinstance(given, Mapping):
        return Training(**(given or {}))
    raise InputError(f"`training` must be a Training(...) or a dict such as {{'epochs': 50}}, got {given!r}.")


def _frame(X: Any, columns: dict[str, Any], prediction: Any) -> Any:
    for name in ("epistemic", "aleatoric"):
        values = getattr(prediction, name).numpy()
        columns |= _columns(name, values[:, 0] if values.shape[1:] == (1,) else values)
    found = frame(columns)
    return found.set_index(X.index) if hasattr(X, "index") and hasattr(X, "columns") else found


def _columns(name: str, values: Array) -> dict[str, Array]:
    """Return values ``[N]`` or ``[N, O]`` as columns; several outputs are numbered."""
    return {name: values} if values.ndim == 1 else {f"{name}_{o}": column for o, column in enumerate(values.T)}
