"""What goes wrong during a fit: the error says where, and carries the last good posterior."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.ensembles import BatchNormNoise, TestTimeAugmentation
from dubito.errors import InputError, NonFiniteError
from ensemble_cases import TRAINING, classes, dense, normalized

from dubito import MAP, SWAG, Ensemble, MCDropout, Snapshot
from dubito.fitting.gradient_training import GradientDescent
from oracles import weights_of

RECIPES = [
    Ensemble(members=2),
    Ensemble(members=2, together=False),
    Snapshot(2),
    SWAG(lr=1e308),
    MCDropout(0.2),
    BatchNormNoise(num_samples=2),
    TestTimeAugmentation(noise=0.1),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_a_loss_that_is_not_finite(recipe: Any) -> None:
    model = normalized() if isinstance(recipe, BatchNormNoise) else dense()
    training = TRAINING.replace(optimizer="sgd", lr=1e308)
    with pytest.raises(NonFiniteError, match="lower the learning rate") as caught:
        recipe.fit(model, classes(), training=training)
    probs = caught.value.posterior.predict(classes()[0], num_samples=2).probs
    assert bool(probs.isfinite().all())


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_data_that_do_not_fit_the_network(recipe: Any) -> None:
    x, y = classes()
    model = normalized() if isinstance(recipe, BatchNormNoise) else dense()
    with pytest.raises(InputError, match="cannot be called on a batch"):
        recipe.fit(model, (x[:, :3], y), training=TRAINING)
    with pytest.raises(InputError, match="NaN or infinite"):
        recipe.fit(model, (x / 0, y), training=TRAINING)
    with pytest.raises(InputError, match="is not one of the model's classes"):
        recipe.fit(model, (x, y + 5), training=TRAINING)


def test_every_member_stops_early_by_itself() -> None:
    validation = classes(30, seed=9)[0], (classes(30, seed=9)[1] + 1) % 3
    training = TRAINING.replace(epochs=8, lr=0.1, early_stopping=1)
    found: Any = Ensemble(members=2, start="model", perturbation=0.0).fit(
        normalized(), classes(), validation=validation, training=training, generator=torch.Generator().manual_seed(1)
    )
    alone = MAP().fit(
        normalized(), classes(), validation=validation, training=training, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(weights_of(found.members[0]), weights_of(alone))


@pytest.mark.parametrize("together", [True, False])
def test_what_is_wrong_for_every_member_is_said_before_any_work(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradientDescent, "update", None)
    with pytest.raises(InputError, match="needs validation data"):
        Ensemble(recipe=MAP(temperature="validation"), together=together).fit(dense(), classes())
    prior: Any = {"prior_precision": 1.0}
    for recipe in (
        Ensemble(recipe=MAP(**prior), together=together),
        Snapshot(2, **prior),
        SWAG(**prior),
        MCDropout(**prior),
    ):
        with pytest.raises(InputError, match="'adamw' is not a prior"):
            recipe.fit(dense(), classes(), training=TRAINING.replace(optimizer="adamw"))
