"""`Auto` chooses by held-out scores, explains itself, and is never far below the temperature-scaled network."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError, TrustWarning, UnsupportedError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import dubito
from dubito import MAP, Auto, Laplace, Training, likelihoods, select
from dubito.core.batches import Source
from dubito.core.randomness import Stream
from dubito.fitting import automatic, problems
from dubito.fitting.auto_explanation import AutoExplanation
from dubito.fitting.output_noise import best_temperature
from dubito.fitting.recipe import FitCall
from dubito.methods.auto.scores import DROPPED, dropped_scores, hold_out, placements, scores
from dubito.methods.auto.search import Search
from dubito.methods.auto.table import TEMPERATURE, AutoCandidate, ScoreTable
from oracles import class_data

TRAINING = Training(epochs=4, lr=0.02, batch_size=16)


def network(outputs: int = 3) -> nn.Module:
    with Stream(1).active():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def numbers(rows: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1].sin() + 0.1 * torch.randn(rows, 1, generator=torch.Generator().manual_seed(1))


def fit(recipe: Auto, data: Any = None, outputs: int = 3, **options: Any) -> Any:
    options = {"training": TRAINING, "progress": False, **options}
    return recipe.fit(network(outputs), class_data() if data is None else data, **options)


class TestChoice:
    def table(self, **columns: list[float]) -> ScoreTable:
        table = ScoreTable("calibration")
        table._scores = {name: [torch.tensor(column, dtype=torch.float64)] for name, column in columns.items()}
        table._add_temperature = lambda: None  # type: ignore[method-assign]
        return table

    def chosen(self, table: ScoreTable) -> str:
        names = [TEMPERATURE, "last layer", "Kronecker"]
        return table.choose([(AutoCandidate(name, MAP()), "") for name in names])[0].name

    def test_the_simplest_within_one_standard_error_of_the_best(self) -> None:
        sure = {TEMPERATURE: [0.0, 0.0, 0.0], "last layer": [0.9, 1.0, 1.1], "Kronecker": [1.0, 1.0, 1.0]}
        assert self.chosen(self.table(**sure)) == "last layer"
        vague = {TEMPERATURE: [0.0, 0.0, 0.0], "last layer": [-1.0, 0.0, 0.0], "Kronecker": [3.0, -1.0, -1.0]}
        assert self.chosen(self.table(**vague)) == TEMPERATURE

    def test_gains_and_errors_are_those_of_differences(self) -> None:
        table = self.table(**{TEMPERATURE: [0.0, 2.0], "last layer": [1.0, 5.0], "Kronecker": [0.0, 0.0]})
        row = table.choose([(AutoCandidate(name, MAP()), "") for name in (TEMPERATURE, "last layer", "Kronecker")])[1][
            1
        ]
        assert (row.score, row.gain, row.error) == pytest.approx((3.0, 2.0, 1 / math.sqrt(2)))

    def test_a_better_detector_with_worse_probabilities_is_not_the_best(self) -> None:
        table = self.table(
            **{TEMPERATURE: [0.5, 0.5, 0.6], "last layer": [0.5, 0.5, 0.6], "Kronecker": [0.9, 0.9, 0.9]}
        )
        table.goal = "ood"
        logs = {TEMPERATURE: [0.0, 0.0, 0.0], "last layer": [0.0, 0.0, 0.0], "Kronecker": [-1.0, -1.0, -1.1]}
        table._log_scores = {name: [torch.tensor(column)] for name, column in logs.items()}
        found = [(AutoCandidate(name, MAP()), "") for name in logs]
        chosen, rows = table.choose(found)
        explanation = AutoExplanation("ood", chosen.name, "AUROC", 3, "folds", tuple(rows))
        assert chosen.name == TEMPERATURE
        assert "Nothing has a better AUROC" in explanation.words
        assert str(explanation).endswith("(its log score is worse than that of temperature)")


class TestScores:
    def test_of_each_goal(self) -> None:
        data = class_data(40)
        posterior: Any = Laplace(structure="diag", prior_precision=1.0).fit(network(), data, progress=False)
        source = Source(data, batch_size=16, shuffle=False)
        expected = posterior.predict(data[0]).log_prob(data[1]).double()
        torch.testing.assert_close(scores("calibration", posterior, source), expected, rtol=1e-5, atol=1e-6)
        found = placements(posterior, source)
        flat = data[0]
        rows = torch.rand(flat.shape, generator=torch.Generator().manual_seed(0)).argsort(0)
        near, far = (posterior.predict(part).epistemic.double() for part in (flat, flat.gather(0, rows)))
        pairs = (far[None] > near[:, None]).double() + 0.5 * (far[None] == near[:, None]).double()
        torch.testing.assert_close(found, pairs.mean(1))

    def test_the_weights_with_the_smallest_ratio_are_dropped(self) -> None:
        data = class_data(40)
        posterior: Any = MAP(train=False).fit(network(), data, progress=False)
        weights = {name: value.detach().clone() for name, value in posterior.model.named_parameters()}
        both = torch.cat([weights[name].abs().flatten() for name in ("0.weight", "2.weight")])
        limit = both.sort().values[int(DROPPED * len(both)) - 1]
        kept = {name: value * ((value.abs() > limit) | (value.ndim == 1)) for name, value in weights.items()}
        outputs = torch.func.functional_call(posterior.model, kept, data[0])
        expected = -nn.functional.cross_entropy(outputs, data[1], reduction="none").double()
        torch.testing.assert_close(dropped_scores(posterior, Source(data, shuffle=False)), expected)

    def test_the_best_temperature_of_a_regression_is_the_ratio_of_noises(self) -> None:
        outputs, targets = torch.zeros(5, 1), torch.tensor([[1.0], [-1.0], [2.0], [0.5], [-2.0]])
        found = best_temperature([(outputs.double(), targets)], likelihoods.Gaussian(noise=0.5))
        assert found == pytest.approx(float(targets.square().mean().sqrt()) / 0.5, rel=1e-4)


class TestHeldOut:
    def test_folds_hold_out_every_example_once(self) -> None:
        x = torch.arange(50.0)[:, None]
        found = hold_out((x, x), None, trained=False, seed=3)
        assert (len(found.splits), found.one_network) == (5, False)
        together = torch.cat([split.held_out[0] for split in found.splits])  # type: ignore[index]
        assert torch.equal(together.sort(0).values, x)
        for split in found.splits:
            kept, held = split.data[0].flatten().tolist(), split.held_out[0].flatten().tolist()  # type: ignore[index]
            assert sorted(kept + held) == x.flatten().tolist()

    def test_large_validation_data_are_halved(self) -> None:
        x = torch.arange(600.0)[:, None]
        found = hold_out((x[:10], x[:10]), (x, x), trained=True, seed=0)
        assert (len(found.splits), found.one_network) == (2, True)
        first, second = found.splits
        assert torch.equal(first.validation[0], second.held_out[0])  # type: ignore[index]
        assert len(first.held_out[0]) == 300  # type: ignore[arg-type, index]

    def test_where_there_is_nothing_to_hold_out(self) -> None:
        x, y = class_data()
        with pytest.raises(InputError, match="the network is trained already"):
            fit(Auto(train=False))
        with pytest.raises(InputError, match="only 12 examples"):
            fit(Auto(), (x[:12], y[:12]))
        loader = DataLoader(TensorDataset(x, y), batch_size=8, sampler=WeightedRandomSampler([1.0] * 60, 60))
        with pytest.raises(InputError, match="cannot be chosen one by one"):
            fit(Auto(), loader)


@pytest.fixture(scope="module")
def posterior() -> Any:
    return fit(Auto())


@pytest.mark.slow
class TestFit:
    def test_it_explains_itself(self, posterior: Any) -> None:
        explanation = posterior.explanation
        names = [each.name for each in explanation.candidates]
        assert names[:2] == [TEMPERATURE, "last layer"]
        assert explanation.chosen in names
        assert explanation.num_rows == 60
        assert explanation.words.startswith(f"Chosen: {explanation.chosen}, ")
        assert all(name in str(explanation) for name in names)
        skipped = next(each for each in explanation.candidates if each.name == "variational")
        assert (skipped.score, skipped.problem) == (None, "needs a budget of epochs")

    def test_the_explanation_is_saved(self, posterior: Any, tmp_path: Path) -> None:
        posterior.save(tmp_path / "file")
        again = dubito.load(tmp_path / "file", network())
        assert again.explanation == posterior.explanation
        assert again.digest() == posterior.digest()

    def test_the_same_call_gives_the_same_result_and_leaves_the_model(self, posterior: Any) -> None:
        model, before, x = network().train(), network().state_dict(), class_data()[0]
        again: Any = Auto().fit(model, class_data(), training=TRAINING, progress=False)
        assert again.explanation == posterior.explanation
        assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)
        assert model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_a_trained_network_and_validation_data(self) -> None:
        data = class_data(90)
        trained = MAP().fit(network(), data, training=TRAINING.replace(epochs=20), progress=False).model
        found = fit(Auto(train=False), data, validation=class_data(40))
        assert found.explanation.held_out == "the validation data"
        assert all(each.problem for each in found.explanation.candidates if each.name in ("ensemble", "rank-1"))
        with pytest.warns(TrustWarning, match="well before it is trained"):
            Auto().fit(trained, data, training=TRAINING, progress=False)

    @pytest.mark.parametrize("goal", ["ood", "intervals", "small"])
    def test_the_other_goals(self, goal: Any) -> None:
        found = fit(Auto(goal=goal), numbers(), 1, likelihood="gaussian")
        scores = [each.score for each in found.explanation.candidates if each.score is not None]
        assert len(scores) >= 3
        assert all(math.isfinite(score) for score in scores)
        if goal == "ood":
            assert all(0 <= score <= 1 for score in scores)

    def test_a_budget_admits_more(self) -> None:
        found = fit(Auto(budget=4), training=TRAINING.replace(epochs=1))
        considered = {each.name for each in found.explanation.candidates if each.score is not None}
        assert {"rank-1", "variational"} <= considered
        assert "ensemble" not in considered

    def test_what_is_better_is_returned(self) -> None:
        class Noisy(nn.Linear):
            """A single network is a poor one: its weights are drawn far from anything useful."""

            def reset_parameters(self) -> None:
                nn.init.normal_(self.weight, std=4.0)
                nn.init.zeros_(self.bias)

        with Stream(3).active():
            model = nn.Sequential(Noisy(4, 30), nn.Tanh(), Noisy(30, 3))
        found: Any = Auto().fit(model, class_data(80), training=TRAINING.replace(epochs=2), progress=False)
        row = next(each for each in found.explanation.candidates if each.name == found.explanation.chosen)
        assert found.explanation.chosen != TEMPERATURE
        assert row.gain > row.error
        assert repr(found.recipe) == row.recipe

    def test_what_it_cannot_fit_is_said_in_the_explanation(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = network()

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x).tanh()  # no linear map makes the outputs

        found: Any = Auto().fit(Scaled(), class_data(), training=TRAINING, progress=False)
        row = next(each for each in found.explanation.candidates if each.name == "last layer")
        assert row.score is not None or row.problem.startswith("not possible: ")

    def test_an_interrupted_run_goes_on(self, tmp_path: Path, posterior: Any) -> None:
        training = TRAINING.replace(checkpoint=str(tmp_path / "run"))
        first = fit(Auto(), training=training)
        assert (tmp_path / "run.plain").is_file()
        assert fit(Auto(), training=training).digest() == first.digest() == posterior.digest()

    def test_the_number_of_epochs_is_looked_for_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that Ctrl-C soon after the search does not lose it."""
        monkeypatch.setattr(automatic, "MOST_STEPS", 30)
        monkeypatch.setattr(automatic, "FALLING", 100.0)
        training = Training(checkpoint=str(tmp_path / "run"))
        search = Search(Auto(), FitCall(network(), class_data(), training=training, progress=False))
        assert (tmp_path / "run.search").is_file()
        monkeypatch.setattr(problems, "resolve_training", None)  # would fail
        again = Search(Auto(), FitCall(network(), class_data(), training=training, progress=False))
        assert again.resolved == search.resolved
        assert again.resolved.found is not None
        monkeypatch.undo()
        assert again.run().fit_record.held_out_gain == again.resolved.found.gain  # for its diagnosis

    def test_bad_calls_are_one_sentence(self) -> None:
        with pytest.raises(InputError, match="is for regression"):
            fit(Auto(goal="intervals"))
        with pytest.raises(InputError, match="`goal` must be"):
            Auto(goal="speed")  # type: ignore[arg-type]
        with pytest.raises(InputError, match="`budget` must be"):
            Auto(budget=-1)
        with pytest.raises(InputError, match="training must be"):
            fit(Auto(), training={"epochs": 2})
        with pytest.raises(UnsupportedError, match="call fit instead"):
            Auto().build(None)  # type: ignore[arg-type]

    def test_its_name_in_text(self) -> None:
        assert dubito.parse("auto(goal=ood)") == Auto(goal="ood")
        assert select.last_layer() in {each.recipe.weights for each in _candidates()}


def _candidates() -> list[AutoCandidate]:
    from dubito.methods.auto.table import candidates

    return candidates(1000)
