"""The estimators for scikit-learn: its own checks, and what its tools do with them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes, make_classification
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from dubito import MAP, Ensemble, Laplace, Training
from dubito.core.errors import InputError
from dubito.sklearn import DubitoClassifier, DubitoRegressor
from dubito.uses.array_fits import copies, draw_parts

pytestmark = pytest.mark.slow

LAPLACE = "laplace(structure=kron)"
QUICK = Training(epochs=30, lr=0.03, batch_size=32)
X, Y = make_classification(120, 5, n_informative=3, random_state=0)
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(400, 2))
NUMBERS = 50 + 10 * INPUTS[:, 0] + RNG.normal(size=400)


def classifier(**options: Any) -> DubitoClassifier:
    return DubitoClassifier(network="mlp(hidden=[10])", training=QUICK, **{"recipe": LAPLACE, **options})


def regressor(**options: Any) -> DubitoRegressor:
    return DubitoRegressor(network="mlp(hidden=[10])", training=QUICK, **{"recipe": LAPLACE, **options})


@pytest.mark.filterwarnings("ignore")  # those of the checks, which give the estimators strange data on purpose
@pytest.mark.parametrize("kind", [DubitoClassifier, DubitoRegressor])
def test_the_checks_of_scikit_learn_pass(kind: Any) -> None:
    estimator = kind(MAP(), "mlp(hidden=[10])", training={"epochs": 15, "lr": 0.05, "batch_size": 64})
    results = check_estimator(estimator, on_fail=None)
    assert len(results) > 50
    assert [r["check_name"] for r in results if r["status"] not in ("passed", "skipped")] == []


def test_pipelines_and_searches() -> None:
    search = GridSearchCV(
        make_pipeline(StandardScaler(), classifier(recipe=Laplace())),
        {"dubitoclassifier__recipe__structure": ["diag", "kron"], "dubitoclassifier__training__epochs": [1, 30]},
        scoring="neg_log_loss", cv=2,
    )  # fmt: skip
    search.fit(X, Y)
    assert search.best_params_["dubitoclassifier__training__epochs"] == 30
    assert search.best_estimator_[-1].recipe.structure in ("diag", "kron")


def test_cross_validation_in_several_processes() -> None:
    assert cross_val_score(regressor(recipe="map()"), INPUTS, NUMBERS, cv=2, n_jobs=2).min() > 0.9


def test_calibrated_classifiers() -> None:
    calibrated = CalibratedClassifierCV(classifier(recipe=MAP()), method="sigmoid", cv=2).fit(X, Y)
    assert (calibrated.predict(X) == Y).mean() > 0.8


def test_copies_and_files_predict_alike() -> None:
    model = classifier(recipe="ensemble(members=2)").fit(X, Y)
    again = pickle.loads(pickle.dumps(model))  # noqa: S301
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    other = clone(model)
    assert not hasattr(other, "fit_")
    assert other.get_params(deep=False) == model.get_params(deep=False)


def test_intervals_hold_what_they_promise() -> None:
    """Over many tables, intervals hold a share of k / (n + 1) of new rows, however bad the network is."""
    covered = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows = rng.normal(size=(260, 2))
        truth = 50 + 10 * rows[:, 0] + rng.normal(size=260)
        model = DubitoRegressor(
            MAP(), lambda i, o: nn.Linear(i, o), training={"epochs": 2}, held_out=0.3, random_state=seed
        ).fit(rows[:60], truth[:60])
        lower, upper = model.predict_interval(rows[60:], coverage=0.8).T
        covered.append(((truth[60:] >= lower) & (truth[60:] <= upper)).mean())
    assert abs(np.mean(covered) - 16 / 19) < 0.035  # 18 held-out rows; the deviation of the mean is 0.011


def test_means_deviations_and_draws() -> None:
    model = regressor(recipe=MAP()).fit(INPUTS, NUMBERS)
    mean, std = model.predict(INPUTS, return_std=True)
    assert np.abs(mean - NUMBERS).mean() < 1.5
    assert 0.5 < std.mean() < 2
    drawn = model.sample_y(INPUTS[:3], 20_000, random_state=1)
    np.testing.assert_allclose(drawn.mean(axis=1), mean[:3], atol=0.05)
    np.testing.assert_allclose(drawn.std(axis=1), std[:3], rtol=0.03)


def test_intervals_without_held_out_rows_warn() -> None:
    model = regressor(recipe=MAP(), held_out=0.0).fit(INPUTS, NUMBERS)
    with pytest.warns(UserWarning, match="without a guarantee"):
        assert model.predict_interval(INPUTS[:4]).shape == (4, 2)
    with pytest.raises(InputError, match="coverage"):
        model.predict_interval(INPUTS, coverage=1.5)


def test_several_outputs() -> None:
    both = np.stack([NUMBERS, -3 * NUMBERS], axis=1)
    model = regressor(recipe=MAP(), likelihood="heteroscedastic").fit(INPUTS, both)
    assert model.score(INPUTS, both) > 0.9
    assert model.predict_interval(INPUTS[:3]).shape == (3, 2, 2)
    assert model.sample_y(INPUTS[:3], 5).shape == (3, 2, 5)
    assert list(model.predict_frame(INPUTS[:3])) == [
        f"{name}_{o}" for name in ("prediction", "stddev", "lower", "upper", "epistemic", "aleatoric") for o in (0, 1)
    ]


def test_partial_fit_is_the_posterior_of_all_rows() -> None:
    """For a linear model with known noise and prior, two updates equal one fit in closed form."""
    inputs = np.concatenate([INPUTS, -INPUTS])  # both halves have the same scale, so that the model stays the same
    targets = np.concatenate([NUMBERS, 100 - NUMBERS])
    model = DubitoRegressor(
        Laplace(structure="full", prior_precision=1.0), lambda i, o: nn.Linear(i, o), validation=0.0, held_out=0.0,
        training={"epochs": 30, "lr": 0.1, "batch_size": 200}, random_state=0,
    )  # fmt: skip
    model.partial_fit(inputs, targets)
    before = model.posterior_.marginals()[1]["weight"]
    model.partial_fit(inputs, targets)
    after = model.posterior_.marginals()[1]["weight"]
    assert model.posterior_.num_data == 2 * len(targets)
    torch.testing.assert_close(after, before / 2, rtol=0.05, atol=0.0)
    with pytest.raises(InputError, match="shape"):
        model.partial_fit(inputs, np.stack([targets, targets], axis=1))


def test_partial_fit_of_classes() -> None:
    model = classifier().partial_fit(X[:60], Y[:60], classes=[0, 1, 2])
    assert model.predict_proba(X).shape == (120, 3)
    before = model.posterior_.num_data
    assert model.partial_fit(X[60:], Y[60:]).posterior_.num_data == before + 60
    with pytest.raises(InputError, match="class 7 is not one"):
        model.partial_fit(X, np.full(120, 7))


def test_data_frames_of_any_columns() -> None:
    frame = pd.DataFrame({
        "size": np.where(RNG.random(400) < 0.1, np.nan, INPUTS[:, 0]),
        "town": np.where(INPUTS[:, 1] > 0, "Ulm", "Bern"),
        "sold": pd.Timestamp("2024-01-01") + pd.to_timedelta(RNG.integers(0, 300, 400), unit="D"),
    }, index=np.arange(1000, 1400))  # fmt: skip
    target = NUMBERS + 30 * (frame["town"] == "Ulm").to_numpy()
    model = regressor(recipe=Laplace()).fit(frame, target)
    assert model.score(frame, target) > 0.8
    found = model.predict_frame(frame)
    assert list(found.index) == list(frame.index)
    assert list(found) == ["prediction", "stddev", "lower", "upper", "epistemic", "aleatoric"]
    unseen = model.predict_frame(frame.assign(town="Rom"))
    assert unseen["epistemic"].min() > 10 * found["epistemic"].median()  # the towns differ by 30
    labels = np.where(target > np.median(target), "dear", "cheap")
    classes = classifier(recipe=MAP()).fit(frame, labels)
    assert classes.score(frame, labels) > 0.8
    assert list(classes.predict_frame(frame))[:4] == ["prediction", "confidence", "p_cheap", "p_dear"]


def test_weights_and_classes_that_count_more() -> None:
    coin = np.arange(200) % 2  # which the inputs say nothing about
    heavy = classifier(recipe=MAP(), class_weight={0: 1, 1: 8}).fit(INPUTS[:200], coin)
    assert abs(heavy.predict_proba(INPUTS[:200])[:, 1].mean() - 8 / 9) < 0.05
    weights = np.where(INPUTS[:, 0] > 0, 0.0, 1.0)
    model = regressor(recipe=MAP()).fit(INPUTS, np.where(weights == 0, 1e6, NUMBERS), sample_weight=weights)
    assert np.abs(model.predict(INPUTS[weights > 0]) - NUMBERS[weights > 0]).mean() < 5


def test_weights_become_copies() -> None:
    weights = np.array([0.5, 1.5, 0.25, 1.75])
    drawn = np.stack([copies(weights, 4, seed) for seed in range(2000)])
    assert (drawn.sum(axis=1) == 4).all()
    np.testing.assert_allclose(drawn.mean(axis=0), weights, atol=0.05)
    assert (np.abs(drawn - weights) < 1).all()


def test_parts_depend_on_the_content_of_rows() -> None:
    rows, counts = RNG.normal(size=(100, 3)), RNG.integers(0, 4, size=100)
    order = RNG.permutation(100)
    one = draw_parts(rows, rows[:, 0], counts, 0.1, 0.2, seed=3)
    other = draw_parts(rows[order], rows[order, 0], counts[order], 0.1, 0.2, seed=3)
    repeated = np.repeat(rows, counts, axis=0)
    third = draw_parts(repeated, repeated[:, 0], np.ones(len(repeated), dtype=int), 0.1, 0.2, seed=3)
    for first, second, last in zip(one, other, third, strict=True):
        np.testing.assert_array_equal(rows[first], rows[order][second])
        np.testing.assert_array_equal(rows[first], repeated[last])
    assert not {*one.train} & {*one.held_out}
    assert sum(map(len, one)) == counts.sum()


def test_settings_and_networks_of_all_kinds() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = DubitoClassifier(Ensemble(2), module, training=QUICK).fit(X.astype(np.float32), Y)
    assert model.posterior_.dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert model.set_params(recipe__members=3, training__epochs=2).recipe.members == 3
    for wrong, told in (
        ({"recipe": "nonsense()"}, "nonsense"), ({"recipe": 3}, "recipe"), ({"network": 3}, "network"),
        ({"network": lambda i, o: None}, "network"), ({"training": 3}, "training"), ({"validation": 2.0}, "validation"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=told):
            clone(model).set_params(**wrong).fit(X, Y)
    with pytest.raises(InputError, match="likelihood of numbers"):
        regressor(likelihood="categorical").fit(INPUTS, NUMBERS)
    with pytest.raises(InputError, match="one class"):
        classifier().fit(X, np.zeros(120))


def test_the_default_beats_the_mean() -> None:
    inputs, targets = load_diabetes(return_X_y=True)
    training = {"epochs": 15, "lr": 0.02}
    model = DubitoRegressor(network="mlp(hidden=[10])", training=training).fit(inputs[:200], targets[:200])
    assert model.score(inputs[200:], targets[200:]) > 0.3
    assert model.posterior_.explanation is not None  # that of `Auto`
    few = clone(model).set_params(training={"epochs": 1}).fit(inputs[:12], targets[:12])
    assert few.posterior_.recipe == Laplace(structure="kron")  # too few rows to hold any out
    assert clone(model).set_params(recipe__goal="intervals").recipe.goal == "intervals"
    assert clone(model).set_params(recipe__structure="full").recipe == Laplace(structure="full")
