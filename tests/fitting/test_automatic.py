"""Training settings that are found: sizes, the number of epochs, the noise of a regression; and what is said of it."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dubito.errors import FileFormatError, NotConvergedWarning, TrustWarning
from sklearn.datasets import load_iris
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from dubito import MAP, Ensemble, Training, Variational
from dubito.core.randomness import Stream
from dubito.fitting import automatic, joint_search, problems, search
from dubito.fitting.automatic import chosen_batch_size, with_sizes
from oracles import class_data


def network(inputs: int = 4, outputs: int = 3, hidden: int = 8) -> nn.Module:
    with Stream(1).active():
        return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short searches."""
    monkeypatch.setattr(automatic, "MOST_STEPS", 200)
    monkeypatch.setattr(automatic, "FEWEST_STEPS", 1)


class _Scripted:
    """Runs whose held-out scores are given, by the number of looks; an epoch is as many steps as lie between two."""

    def __init__(self, totals: list[list[float]]) -> None:
        self.totals = totals
        length = SimpleNamespace(training=SimpleNamespace(epochs=100), source=SimpleNamespace(num_batches=25))
        self.runs: list[Any] = [SimpleNamespace(problem=length, held_out=[None], division=0, share=1.0) for _ in totals]

    def train(self, epoch: int, tick: Any) -> None:
        tick(25)

    def look(self, curves: list[list[search.Curve]], epoch: int) -> None:
        for (curve,), totals in zip(curves, self.totals, strict=True):
            curve.add(epoch, totals[epoch], 10, torch.full((10,), totals[epoch] / 10))


class TestSizes:
    @pytest.mark.parametrize(("rows", "size"), [(10, 16), (100, 16), (600, 32), (1000, 64), (100_000, 128)])
    def test_the_batch_size_is_near_a_sixteenth(self, rows: int, size: int) -> None:
        assert chosen_batch_size(Training(), rows) == size
        assert chosen_batch_size(Training(batch_size=7), rows) == 7

    def test_the_learning_rate_depends_on_the_network(self) -> None:
        assert with_sizes(Training(), network(), 50).lr == 3e-3
        assert with_sizes(Training(), nn.Linear(1000, 200), 50).lr == 1e-3
        assert with_sizes(Training(lr=0.5), network(), 50).lr == 0.5


@pytest.mark.slow
def test_small_tables_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty epochs in large batches were twenty steps, and left this one at a third of the labels."""
    x, labels = (torch.tensor(part) for part in load_iris(return_X_y=True))
    x = ((x - x.mean(0)) / x.std(0)).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[30:], order[:30]
    monkeypatch.setattr(automatic, "MOST_STEPS", 800)  # of each of five searches
    posterior: Any = MAP().fit(network(x.shape[1]), (x[train], labels[train]), progress=False)
    assert float((posterior.predict(x[test]).mode == labels[test]).double().mean()) > 0.9


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
class TestSearch:
    def epochs(self, recipe: Any = None, data: Any = None, **options: Any) -> int:
        posterior = (recipe or MAP()).fit(network(), class_data() if data is None else data, progress=False, **options)
        return posterior.fit_record.epochs  # type: ignore[no-any-return]

    def test_it_is_the_same_for_the_same_call(self) -> None:
        assert self.epochs() == self.epochs() > 0

    def test_a_recipe_says_how_much_longer_it_trains(self) -> None:
        plain = self.epochs()
        found = math.floor(plain / (4 / 3) + 0.5)
        assert abs(self.epochs(Variational()) - max(3 * found, 1000 // 4)) <= 6
        assert self.epochs(Ensemble(members=2, start="model")) == plain

    def test_what_is_given_is_kept(self) -> None:
        assert self.epochs(training=Training(epochs=3)) == 3

    @pytest.mark.parametrize("task", ["classes", "numbers"])
    def test_folds_together_are_those_apart(self, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
        x, y = class_data(63)  # folds of 50 and 51 rows
        seen: list[Any] = []

        def both(together: Any, tick: Any) -> Any:
            apart = search.SeparateRuns(copy.deepcopy(together.runs))
            assert isinstance(together, joint_search.JointRuns)
            seen.extend(search.watch(runs, tick) for runs in (together, apart))
            return seen[0]

        monkeypatch.setattr(automatic, "watch", both)
        model, data = (network(), (x, y)) if task == "classes" else (network(outputs=1), (x, x[:, :1].sin()))
        kind = "categorical" if task == "classes" else "gaussian"
        validation = data[0][:12], data[1][:12]
        posterior = MAP().fit(model.double(), data, likelihood=kind, validation=validation, progress=False)
        assert posterior.fit_record.held_out == 63 + 12
        for one, other in zip(*seen, strict=True):
            for together, alone in zip(one, other, strict=True):
                assert together.epochs == alone.epochs
                assert together.num_rows == alone.num_rows
                assert together.totals == pytest.approx(alone.totals, rel=1e-9)

    def test_patience_is_that_of_the_sum(self) -> None:
        """A run that long training makes worse counts against long training, as long as any run gains."""
        worse = [-10.0, *(-3.0 - 2 * epochs for epochs in range(1, 61))]
        better = [-10.0 + min(epochs, 40) for epochs in range(61)]
        curves = search.watch(_Scripted([worse, better]), lambda steps: None)
        totals = [sum(of_all) for of_all in zip(worse, better, strict=True)]
        assert max(range(61), key=totals.__getitem__) == 1
        last = 2 + search.PATIENCE // search.LOOK_EVERY + 1  # twice the best, and 300 steps more
        assert [one.epochs[-1] for (one,) in curves] == [last, last]
        assert [one.totals for (one,) in curves] == [worse[: last + 1], better[: last + 1]]

    def test_the_median_of_the_divisions_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows: list[float] = []

        def scripted(curves: list[search.Curve], *, few: bool) -> int:
            rows.append(sum(curve.num_rows for curve in curves))
            return [8, 40, 16][len(rows) - 1]

        monkeypatch.setattr(automatic, "best_epochs", scripted)
        assert self.epochs() == math.ceil(16 * 4 / 3)
        assert rows == pytest.approx([60 / 3] * 3)  # each example counts once in all

    def test_where_nothing_can_be_held_out(self) -> None:
        x, y = class_data()
        loader = DataLoader(TensorDataset(x, y), batch_size=6, sampler=WeightedRandomSampler([1.0] * 60, 60))
        assert self.epochs(data=loader) == 100  # towards 2,000 steps, within 20 to 100 epochs
        assert self.epochs(data=(x[:8], y[:8])) == 100

    def test_large_data_are_not_searched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(automatic, "LARGE", 4 * 20)
        assert self.epochs() == 100

    def test_validation_data_decide(self) -> None:
        """The labels of the validation data are shuffled, so any training makes them worse."""
        x, y = class_data(600)
        wrong = y[torch.randperm(600, generator=torch.Generator().manual_seed(1))]
        assert self.epochs(validation=(x, wrong)) <= self.epochs(validation=(x, y))

    def test_a_training_that_still_improves_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(automatic, "MOST_STEPS", 60)
        with pytest.warns(NotConvergedWarning, match=r"still rose by 0\.\d+ nats per example"):
            MAP().fit(network(), class_data(), training=Training(lr=3e-3), progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error", NotConvergedWarning)
            MAP().fit(network(), class_data(), training=Training(epochs=30, lr=0.02), progress=False)

    def test_a_network_that_knows_the_data_is_said(self) -> None:
        x, y = class_data()
        trained = MAP().fit(network(), (x, y), training=Training(epochs=100, lr=0.03), progress=False).model
        with pytest.warns(TrustWarning, match="well before it is trained"):
            MAP().fit(trained, (x, y), progress=False)
        MAP(start="fresh").fit(trained, (x, y), progress=False)

    def test_it_is_made_once_for_a_run_with_a_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        training = Training(checkpoint=str(tmp_path / "run"))
        first = self.epochs(training=training)
        assert (tmp_path / "run.search").is_file()
        monkeypatch.setattr(problems, "resolve_training", None)  # would fail
        assert self.epochs(training=training) == first

    def test_a_full_disk_does_not_lose_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(path: Any, kind: str, tree: Any) -> None:
            if kind == "search":
                raise FileFormatError("Cannot write 'run.search': No space left on device.")

        monkeypatch.setattr(problems.io, "save", full)
        with pytest.warns(UserWarning, match=r"No space left on device. The run continues; an interrupted one"):
            assert self.epochs(training=Training(checkpoint=str(tmp_path / "run"))) > 0


@pytest.mark.slow
class TestNoise:
    def data(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        return x, x[:, :1] + 0.5 * torch.randn(40, 1, generator=torch.Generator().manual_seed(1))

    @pytest.mark.usefixtures("quick")
    def test_it_is_that_of_held_out_examples(self) -> None:
        """A network of 300 units fits 40 points closely; their noise is 0.5."""
        wide = network(outputs=1, hidden=300)
        found: Any = MAP().fit(wide, self.data(), likelihood="gaussian", progress=False)
        assert 0.35 < found.likelihood.noise < 1.0
        long = Training(epochs=400, lr=3e-3)
        fitted: Any = MAP().fit(wide, self.data(), likelihood="gaussian", training=long, progress=False)
        x, y = self.data()
        assert 3 * float((fitted.model(x).detach() - y).square().mean().sqrt()) < fitted.likelihood.noise < 1.0
        more = x + 0.01, x[:, :1] + 2.0
        fitted = MAP().fit(wide, self.data(), likelihood="gaussian", validation=more, training=long, progress=False)
        assert 1.5 < fitted.likelihood.noise < 2.5

    @pytest.mark.usefixtures("quick")
    def test_the_epistemic_part_is_subtracted(self) -> None:
        alone: Any = MAP().fit(network(outputs=1), self.data(), likelihood="gaussian", progress=False)
        members: Any = Ensemble(members=3, start="model", bootstrap=True).fit(
            network(outputs=1), self.data(), likelihood="gaussian", progress=False
        )
        prediction = members.predict(self.data()[0])
        total = float((prediction.aleatoric + prediction.epistemic).mean())
        assert total == pytest.approx(alone.likelihood.noise**2, rel=0.1)
        assert members.likelihood.noise < alone.likelihood.noise
