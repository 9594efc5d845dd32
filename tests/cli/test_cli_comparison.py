"""The comparison behind the commands: what methods share, and how long they train."""

from __future__ import annotations

import pytest
import torch
from dubito.likelihoods import Categorical

from dubito import data
from dubito.cli.comparison import Comparison, Run, needs_trained_model
from dubito.cli.options import demo_comparison, scrambled
from dubito.fitting.recipe import Recipe
from dubito.methods.map.recipe import MAP


def comparison(*recipes: Recipe, **changes: object) -> Comparison:
    dataset = data.load("digits", limit=60)
    settings = {"training": {"epochs": 1}, "num_seeds": 2, **changes}
    return Comparison(dataset, "mlp(hidden=[5])", recipes, Categorical(), **settings)  # type: ignore[arg-type]


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, torch.Tensor]]:
    """Every fit of a comparison: the recipe, and the first weights of the network that it was given."""
    fit, calls = Comparison.fit, []

    def watched(self: Comparison, recipe: Recipe, network: torch.nn.Module, seed: int) -> object:
        calls.append((recipe, next(network.parameters()).detach().clone()))
        return fit(self, recipe, network, seed)

    monkeypatch.setattr(Comparison, "fit", watched)
    return calls


class TestSharing:
    def test_methods_after_training_share_the_network_of_the_first_map(self, fitted: list) -> None:
        trained, after = MAP(prior_precision=1.0), MAP(train=False)
        runs = list(comparison(trained, after).runs())
        assert [recipe for recipe, _ in fitted] == [trained, after] * 2  # nothing was trained twice
        scores = [run.evaluation.scores for run in runs if isinstance(run, Run)]
        assert scores[0] == scores[1] != scores[2] == scores[3]

    def test_one_network_is_trained_per_seed_where_no_map_is_listed(self, fitted: list) -> None:
        after, hot = MAP(train=False), MAP(train=False, temperature=2.0)
        list(comparison(after, hot).runs())
        assert [recipe for recipe, _ in fitted] == [MAP(), after, hot] * 2
        assert torch.equal(fitted[1][1], fitted[2][1])
        assert not torch.equal(fitted[0][1], fitted[1][1])

    def test_the_order_of_methods_does_not_matter(self) -> None:
        forward = {r.method: r.evaluation for r in comparison(MAP(), MAP(train=False), num_seeds=1).runs()}
        backward = {r.method: r.evaluation for r in comparison(MAP(train=False), MAP(), num_seeds=1).runs()}
        assert forward == backward

    def test_all_start_from_the_same_weights_of_their_seed(self, fitted: list) -> None:
        list(comparison(MAP(), MAP(temperature=2.0)).runs())
        first, second, third, fourth = (weights for _, weights in fitted)
        assert torch.equal(first, second)
        assert torch.equal(third, fourth)
        assert not torch.equal(first, third)

    def test_a_recipe_says_whether_it_needs_a_trained_network(self) -> None:
        class After(MAP):
            needs_trained_model = True

        assert needs_trained_model(After())
        assert needs_trained_model(MAP(train=False))
        assert not needs_trained_model(MAP())


class TestTraining:
    def test_small_data_gets_at_least_2000_steps(self) -> None:
        plan = comparison(MAP(), training={"batch_size": 9})
        assert plan.training_of(MAP()).epochs == 334  # 54 rows are 6 steps

    def test_large_data_gets_the_epochs_of_the_recipe(self) -> None:
        assert comparison(MAP(), training={"batch_size": 9}).training_of(MAP()).lr == MAP().default_training().lr
        dataset = data.load("digits")
        plan = Comparison(dataset, "mlp", (MAP(),), Categorical(), {"batch_size": 1})
        assert plan.training_of(MAP()).epochs == MAP().default_training().epochs

    @pytest.mark.parametrize("epochs", [0, 7])
    def test_what_was_chosen_is_kept(self, epochs: int) -> None:
        assert comparison(MAP(), training={"epochs": epochs}).training_of(MAP()).epochs == epochs


def test_scrambling_moves_every_pixel_and_changes_none() -> None:
    images = torch.arange(4 * 64.0).reshape(4, 1, 8, 8)
    mixed, _ = scrambled((images, torch.zeros(4)))
    assert torch.equal(mixed.flatten(1).sort(dim=1).values, images.flatten(1))
    assert (mixed != images).float().mean() > 0.9
    assert not torch.equal(mixed[0] - mixed[0].min(), mixed[1] - mixed[1].min())


def test_the_demo_compares_every_method() -> None:
    plan = demo_comparison()
    assert plan.recipes[:2] == (MAP(), MAP(temperature="validation"))
    assert plan.num_seeds == 3
    assert list(plan.shifts) == list(data.KINDS)
