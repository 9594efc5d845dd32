"""`dubito.compare`: what recipes share, what a seed is, and what the result holds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn

import dubito
from dubito import MAP, Laplace, Training, Variational, data
from dubito.fitting.recipe import Recipe
from dubito.uses.comparison import Comparison, Failure, Run
from dubito.uses.comparison.compare import FitsOfSeed

pytestmark = pytest.mark.slow

DIGITS = data.load("digits", limit=60)


def network(seed: int = 0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))


def compare(recipes: dict[str, Any], model: Any = network, **options: Any) -> Comparison:
    chosen = {"test": DIGITS.test, "seeds": 2, "training": {"epochs": 1}, **options}
    return dubito.compare(model, DIGITS.train, recipes, **chosen)


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, Tensor]]:
    """Every fit of a comparison: the recipe, and the first weights of the network that it was given."""
    fit, calls = FitsOfSeed._fit, []

    def watched(self: FitsOfSeed, recipe: Recipe, model: nn.Module) -> Any:
        calls.append((recipe, next(model.parameters()).detach().clone()))
        return fit(self, recipe, model)

    monkeypatch.setattr(FitsOfSeed, "_fit", watched)
    return calls


class TestSharing:
    def test_recipes_after_training_share_the_network_of_the_first_map(self, fitted: list) -> None:
        trained, after = MAP(prior_precision=1.0), MAP(train=False)
        found = compare({"trained": trained, "after": after})
        assert [recipe for recipe, _ in fitted] == [trained, after] * 2  # nothing was trained twice
        scores = [run.evaluation.scores for run in found.runs]
        assert scores[0] == scores[1] != scores[2] == scores[3]

    def test_one_network_is_trained_per_seed_if_no_map_is_listed(self, fitted: list) -> None:
        after, hot = MAP(train=False), MAP(train=False, temperature=2.0)
        compare({"after": after, "hot": hot})
        assert [recipe for recipe, _ in fitted] == [MAP(), after, hot] * 2
        assert torch.equal(fitted[1][1], fitted[2][1])
        assert not torch.equal(fitted[0][1], fitted[1][1])

    def test_the_order_of_recipes_does_not_matter(self) -> None:
        recipes = {"map": MAP(), "laplace": Laplace(structure="diag", prior_precision=1.0)}
        backward = dict(reversed(recipes.items()))
        assert compare(recipes, seeds=1).evaluations == compare(backward, seeds=1).evaluations

    def test_all_start_from_the_same_weights_of_their_seed(self, fitted: list) -> None:
        compare({"cold": MAP(), "hot": MAP(temperature=2.0)})
        first, second, third, fourth = (weights for _, weights in fitted)
        assert torch.equal(first, second)
        assert torch.equal(third, fourth)
        assert not torch.equal(first, third)

    def test_a_trained_network_is_used_as_it_is_with_a_base_that_does_not_train(self) -> None:
        model = MAP().fit(network(), DIGITS.train, training=Training(epochs=3), progress=False).model
        laplace = Laplace(structure="diag", prior_precision=1.0)
        found = compare({"laplace": laplace}, model, base=MAP(train=False), seeds=1, training=None)
        expected = dubito.evaluate(laplace.fit(model, DIGITS.train, progress=False), DIGITS.test, name="laplace")
        assert found.evaluations == {"laplace": (expected,)}

    def test_a_recipe_says_whether_it_needs_a_trained_network(self) -> None:
        assert Laplace().needs_trained_model
        assert MAP(train=False).needs_trained_model
        assert not MAP().needs_trained_model
        assert not Variational().needs_trained_model


class TestSeeds:
    def test_a_comparison_is_what_fit_and_evaluate_give(self) -> None:
        model, recipe, training = network(), Variational(), Training(epochs=2)
        before = copy.deepcopy(model.state_dict())
        found = compare({"vi": recipe}, model, seeds=[7], training=training)
        generator = torch.Generator().manual_seed(7)
        posterior = recipe.fit(model, DIGITS.train, training=training, generator=generator, progress=False)
        assert found.evaluations["vi"] == (dubito.evaluate(posterior, DIGITS.test, name="vi"),)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_a_number_of_seeds_counts_from_zero(self) -> None:
        counted, listed = (compare({"map": MAP()}, seeds=seeds) for seeds in (2, (0, 1)))
        assert [run.seed for run in counted.runs] == [0, 1]
        assert counted.evaluations == listed.evaluations

    def test_every_seed_of_a_function_has_its_own_weights_and_the_users_generator_stays(self) -> None:
        state = torch.get_rng_state()
        first, second = compare({"map": MAP()}, training={"epochs": 0}).evaluations["map"]
        assert first != second
        assert torch.equal(torch.get_rng_state(), state)

    def test_every_seed_of_a_network_starts_from_its_weights(self) -> None:
        first, second = compare({"map": MAP()}, network(), training={"epochs": 0}).evaluations["map"]
        assert first == second

    @pytest.mark.parametrize("seeds", [0, -1, True, [], [0, 0], [0, -1], "01", 1.5, None])
    def test_bad_seeds(self, seeds: Any) -> None:
        with pytest.raises(InputError, match="`seeds` must"):
            compare({"map": MAP()}, seeds=seeds)


class TestTraining:
    def test_settings_replace_those_of_each_recipe(self) -> None:
        chosen: list[Recipe] = []

        def training(recipe: Recipe) -> Training:
            chosen.append(recipe)
            return recipe.default_training().replace(epochs=1)

        by_function = compare({"map": MAP(), "vi": Variational()}, seeds=1, training=training)
        assert chosen == [MAP(), Variational()]
        assert by_function.evaluations == compare({"map": MAP(), "vi": Variational()}, seeds=1).evaluations


class TestResult:
    def test_table_json_and_report(self, tmp_path: Path) -> None:
        shifts = data.shifts(DIGITS, ["rotation"], (1, 3))
        found = compare(
            {"plain": MAP(), "hot": MAP(temperature=2.0)}, ood={"noise": torch.rand(9, 1, 8, 8)}, shifts=shifts
        )
        lines = str(found).splitlines()
        assert lines[0].split("   ")[-1].strip().startswith("AUROC noise")
        assert [line.split()[0] for line in lines[1:]] == ["plain", "hot"]
        assert "±" in lines[1]
        saved = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert saved["summary"]["plain"]["seeds"] == 2
        assert len(saved["runs"]) == 4
        page = found.report(tmp_path / "report.html", data_name="digits").read_text()
        dubito.report(found.evaluations, tmp_path / "again.html", data_name="digits")
        assert page == (tmp_path / "again.html").read_text()
        assert "hot" in page
        assert repr(found) == "<Comparison of plain, hot: 4 runs, 0 failures>"

    def test_what_fails_is_told_and_left_out(self) -> None:
        failing = Laplace(structure="full", prior_precision="validation")  # there is no validation data
        with pytest.warns(UserWarning, match="'bad' failed with seed 0"):
            found = compare({"good": MAP(), "bad": failing})
        assert [run.name for run in found.runs] == ["good", "good"]
        assert [(failure.name, failure.seed) for failure in found.failures] == [("bad", 0)]
        assert "bad, seed 0, failed: " in str(found)

    def test_where_all_fail_the_first_error_is_raised(self) -> None:
        outcomes: list[Run | Failure] = []
        with pytest.raises(dubito.errors.DubitoError, match="validation"):
            compare({"bad": Laplace(prior_precision="validation")}, progress=outcomes.append)
        assert [outcome.name for outcome in outcomes] == ["bad"]

    def test_a_function_is_told_of_every_outcome_as_it_comes(self) -> None:
        outcomes: list[Run | Failure] = []

        def stop(outcome: Run | Failure) -> None:
            outcomes.append(outcome)
            if len(outcomes) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compare({"map": MAP(), "hot": MAP(temperature=2.0)}, progress=stop)
        assert list(Comparison.of(outcomes).evaluations) == ["map", "hot"]


@pytest.mark.parametrize(
    ("model", "recipes", "words"),
    [
        (3, {"map": MAP()}, "`model` must be a network or a function"),
        (nn.Linear, {"map": MAP()}, "`model` must be a network or a function"),
        (lambda seed: None, {"map": MAP()}, "must return a network"),
        (network, {}, "`recipes` must be a dict"),
        (network, [MAP()], "`recipes` must be a dict"),
        (network, {"map": MAP}, "each value a recipe"),
        (network, {1: MAP()}, "`recipes` must"),
    ],
)
def test_bad_input_is_one_sentence(model: Any, recipes: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        compare(recipes, model)


def test_regression_in_the_units_of_the_targets() -> None:
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y = x.sin()
    options: dict[str, Any] = {"test": (x, y), "likelihood": "gaussian", "training": {"epochs": 1}, "progress": False}
    model = nn.Linear(1, 1).double()
    small, large = (
        dubito.compare(model, (x, y), {"map": MAP()}, target_scale=scale, **options) for scale in (None, (5.0, 10.0))
    )
    rmse = [found.evaluations["map"][0].scores["rmse"] for found in (small, large)]
    assert rmse[1] == pytest.approx(10 * rmse[0], rel=1e-9)
    assert "RMSE" in str(small)
