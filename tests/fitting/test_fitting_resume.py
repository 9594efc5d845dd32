"""A run that was stopped goes on exactly: the same weights, bit by bit, wherever it was stopped."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import FileFormatError, InputError
from dubito.likelihoods import Gaussian
from fitting_cases import Average, classification, network
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dubito import MAP, Posterior, Training
from dubito.core import io
from dubito.fitting import loop
from dubito.fitting.gradient_training import GradientDescent
from interrupting import before_updates, interrupt_at
from oracles import weights_of

pytestmark = pytest.mark.slow


class Augmented(Dataset[Any]):
    """Every example is drawn anew, from every global generator there is."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = classification()
        noise = 0.1 * torch.randn(4) + 0.1 * random.random() + 0.1 * float(np.random.rand())  # noqa: NPY002
        return x[index] + noise, y[index]


def loader() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))


# name: (recipe, data, further settings of the training)
RUNS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "pair": (MAP(), classification, {}),
    "fresh": (MAP(start="fresh"), classification, {}),
    "sgd": (MAP(), classification, {"optimizer": "sgd", "clip": 0.1}),
    "loader": (MAP(), loader, {}),
    "dataset": (MAP(), Augmented, {}),
    "early stopping": (MAP(temperature="validation"), loader, {"early_stopping": 2, "lr": 0.1}),
    "full batches": (Average(steps=5), loader, {}),
}


def start(name: str, checkpoint: Path | None = None, **changes: Any) -> Posterior:
    """Start a run as a new process would: everything is made anew."""
    recipe, data, settings = RUNS[name]
    settings = {"epochs": 3, "batch_size": 16, "lr": 1e-2, **settings, **changes}
    training = Training(checkpoint=None if checkpoint is None else str(checkpoint), **settings)
    torch.manual_seed(random.randrange(10**6))  # the state of the user's own generator does not matter
    generator = torch.Generator().manual_seed(5)
    x, y = classification(30, seed=9)
    contrary = x, (y + 1) % 3  # the first epoch is the best
    return recipe.fit(network(dropout=0.3), data(), validation=contrary, training=training, generator=generator)


@pytest.mark.parametrize(
    ("name", "step"),
    [(name, step) for name in RUNS for step in (1, 3, 4, 5, 8, 12) if step <= 5 or name != "full batches"],
)
def test_an_interrupted_run_goes_on_exactly(
    name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "run"
    expected = weights_of(start(name))
    with monkeypatch.context() as patch:
        interrupt_at(step, patch)
        with pytest.raises(KeyboardInterrupt):
            start(name, checkpoint, checkpoint_every=1e9)
    saved = io.load(checkpoint, "checkpoint")
    per_epoch = 1 if name == "full batches" else 4
    assert saved["epoch"] * per_epoch + saved["batch"] == step
    assert os.listdir(tmp_path) == ["run"]
    assert torch.equal(weights_of(start(name, checkpoint)), expected)


@pytest.mark.parametrize("name", RUNS)
def test_so_does_one_that_is_stopped_again_and_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found, stops = weights_of(start(name)), None, 0
    while found is None and stops < 20:
        with monkeypatch.context() as patch:
            interrupt_at(2, patch)
            try:
                found = weights_of(start(name, tmp_path / "run", checkpoint_every=1e9))
            except KeyboardInterrupt:
                stops += 1
    assert stops >= 2
    assert found is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize("place", ["loader", "validation"])
def test_an_interrupt_outside_of_an_update(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = weights_of(start("early stopping"))
    checkpoint = tmp_path / "run"

    def fail(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "loader":
            original, count = Augmented.__getitem__, iter(range(1000))
            patch.setattr(Augmented, "__getitem__", lambda self, i: fail() if next(count) == 90 else original(self, i))
        else:
            build = loop.build
            patch.setattr(loop, "build", lambda *args: build(*args)._replace(score=fail))
        with pytest.raises(KeyboardInterrupt):
            start("early stopping", checkpoint, checkpoint_every=1e9)
    assert torch.equal(weights_of(start("early stopping", checkpoint)), expected)


def test_in_another_thread(tmp_path: Path) -> None:
    """Signals are for the main thread only; a fit elsewhere leaves them alone."""
    found: list[Posterior] = []
    thread = threading.Thread(target=lambda: found.append(start("pair", tmp_path / "run")))
    thread.start()
    thread.join()
    assert torch.equal(weights_of(found[0]), weights_of(start("pair")))


def test_the_handler_of_the_user_is_called_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        interrupt_at(3, monkeypatch)
        assert torch.equal(weights_of(start("pair")), weights_of(start("pair")))
        assert callable(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


def test_the_first_loss_that_was_seen_is_seen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the end is the same: every step is."""
    losses: list[float] = []
    original = GradientDescent.update

    def update(self: GradientDescent, *args: Any) -> Any:
        state, info = original(self, *args)
        losses.append(float(info["loss"]))
        return state, info

    monkeypatch.setattr(GradientDescent, "update", update)
    start("loader")
    whole, losses[:] = list(losses), []
    with monkeypatch.context() as patch:
        interrupt_at(6, patch)
        with pytest.raises(KeyboardInterrupt):
            start("loader", tmp_path / "run")
    start("loader", tmp_path / "run")
    assert losses == whole


def test_the_same_generator_can_be_used_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    training = Training(epochs=3, batch_size=16, checkpoint=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        interrupt_at(6, patch)
        with pytest.raises(KeyboardInterrupt):
            MAP().fit(network(0.3), classification(), training=training, generator=generator)
    found = MAP().fit(network(0.3), classification(), training=training, generator=generator)
    other = torch.Generator().manual_seed(5)
    expected = MAP().fit(network(0.3), classification(), training=training.replace(checkpoint=None), generator=other)
    assert torch.equal(weights_of(found), weights_of(expected))
    assert torch.equal(generator.get_state(), other.get_state())


class TestFinished:
    def test_a_finished_run_returns_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoint = tmp_path / "run"
        first = start("early stopping", checkpoint)
        written = checkpoint.read_bytes()
        updates: list[int] = []
        before_updates(updates.append, monkeypatch)
        again = start("early stopping", checkpoint)
        assert updates == []
        assert torch.equal(weights_of(first), weights_of(again))
        assert first.digest() == again.digest()
        assert checkpoint.read_bytes() == written

    def test_the_best_is_what_is_finished(self, tmp_path: Path) -> None:
        plain = start("early stopping")
        assert torch.equal(weights_of(start("early stopping", tmp_path / "run")), weights_of(plain))

    def test_checkpoints_change_nothing(self, tmp_path: Path) -> None:
        for every in (0.0, 1e9):
            found = start("loader", tmp_path / f"run-{every}", checkpoint_every=every)
            assert torch.equal(weights_of(found), weights_of(start("loader")))


class TestAnotherRun:
    x, y = classification()

    def fit(self, path: Path, *, seed: int = 5, **changes: Any) -> Posterior:
        settings = {"epochs": 1, "batch_size": 16, "checkpoint": str(path), **changes.pop("training", {})}
        recipe = changes.pop("recipe", MAP())
        arguments = {"model": network(), "data": (self.x, self.y), "likelihood": "categorical", **changes}
        generator = torch.Generator().manual_seed(seed)
        return recipe.fit(**arguments, training=Training(**settings), generator=generator)  # type: ignore[no-any-return]

    @pytest.mark.parametrize(
        "changes",
        [
            {"recipe": MAP(prior_precision=1.0)},
            {"training": {"lr": 0.5}},
            {"training": {"epochs": 2}},
            {"seed": 6},
            {"model": nn.Linear(4, 3)},
            {"model": network().double()},
            {"data": (x + 1, y)},
            {"data": (x, (y + 1) % 3)},
            {"data": (x[:40], y[:40])},
            {"likelihood": Gaussian(), "data": (x, torch.zeros(50, 3))},
        ],
        ids=lambda changes: "-".join(changes),
    )
    def test_its_checkpoint_is_refused(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        path = tmp_path / "run"
        self.fit(path)
        before = path.read_bytes()
        with pytest.raises(FileFormatError, match=r"belongs to another run .* delete it or choose another file"):
            self.fit(path, **changes)
        assert path.read_bytes() == before

    @pytest.mark.parametrize("changes", [{}, {"training": {"checkpoint_every": 0.0}}])
    def test_how_often_it_is_written_does_not_matter(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        path = tmp_path / "run"
        assert self.fit(path).digest() == self.fit(path, **changes).digest()

    def test_what_is_written_the_same_is_the_same(self, tmp_path: Path) -> None:
        first = self.fit(tmp_path / "run", recipe=MAP(temperature=1))
        again = self.fit(tmp_path / "run", recipe=MAP(temperature=1.0))  # goes on from it, and is not refused
        assert torch.equal(weights_of(again), weights_of(first))

    def test_a_damaged_one(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        self.fit(path)
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(FileFormatError, match="truncated"):
            self.fit(path)

    def test_a_posterior_in_its_place(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        MAP(train=False).fit(network(), (self.x, self.y)).save(path)
        with pytest.raises(FileFormatError, match="holds a posterior, not a checkpoint"):
            self.fit(path)

    def test_a_folder_that_does_not_exist_is_noticed_before_training(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"The folder '.*' of the checkpoint does not exist"):
            self.fit(tmp_path / "missing" / "run")
