"""The experiment behind the commands: how long methods train."""

from __future__ import annotations

import pytest
import torch
from dubito.likelihoods import Categorical

from dubito import MAP, Auto, data
from dubito.cli.delivery import Experiment
from dubito.cli.options import demo_experiment, scrambled
from dubito.fitting.recipe import Recipe


def experiment(*recipes: Recipe, **changes: object) -> Experiment:
    dataset = data.load("digits", limit=60)
    settings = {"training": {"epochs": 1}, "num_seeds": 2, **changes}
    return Experiment(dataset, "mlp(hidden=[5])", recipes, Categorical(), **settings)  # type: ignore[arg-type]


class TestTraining:
    def test_what_was_not_chosen_is_the_recipe_s(self) -> None:
        assert experiment(MAP(), training={"batch_size": 9}).training_of(MAP()).lr == MAP().default_training().lr
        dataset = data.load("digits")
        plan = Experiment(dataset, "mlp", (MAP(),), Categorical(), {"batch_size": 1})
        assert plan.training_of(MAP()).epochs == MAP().default_training().epochs

    @pytest.mark.parametrize("epochs", [0, 7])
    def test_what_was_chosen_is_kept(self, epochs: int) -> None:
        assert experiment(MAP(), training={"epochs": epochs}).training_of(MAP()).epochs == epochs


def test_scrambling_moves_every_pixel_and_changes_none() -> None:
    images = torch.arange(4 * 64.0).reshape(4, 1, 8, 8)
    mixed, _ = scrambled((images, torch.zeros(4)))
    assert torch.equal(mixed.flatten(1).sort(dim=1).values, images.flatten(1))
    assert (mixed != images).float().mean() > 0.9
    assert not torch.equal(mixed[0] - mixed[0].min(), mixed[1] - mixed[1].min())


def test_the_demo_compares_every_method() -> None:
    plan = demo_experiment(seed=2, epochs=7)
    assert plan.recipes[:2] == (Auto(), MAP())
    assert len(plan.names or ()) == len(plan.recipes)
    assert (plan.seeds, plan.training) == ((2,), {"epochs": 7})
    assert not torch.equal(plan.dataset.test[0], demo_experiment(seed=1, epochs=7).dataset.test[0])
