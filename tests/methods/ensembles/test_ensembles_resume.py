"""A run that is stopped goes on exactly, with the member at which it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.ensembles import BatchNormNoise, TestTimeAugmentation
from ensemble_cases import classes, dense, normalized
from torch.utils.data import DataLoader, TensorDataset

from dubito import MAP, SWAG, Ensemble, Laplace, MCDropout, Snapshot, Training
from interrupting import before_updates, interrupt_at

pytestmark = pytest.mark.slow


def loader() -> DataLoader[Any]:
    own = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(*classes()), batch_size=16, shuffle=True, generator=own)


# name: (recipe, data, network); 4 steps an epoch, 3 epochs
RUNS: dict[str, tuple[Any, Any, Any]] = {
    "apart": (Ensemble(members=3, together=False, bootstrap=True), classes, normalized),
    "loader": (Ensemble(members=3), loader, lambda: normalized(dropout=0.3)),
    "together": (Ensemble(members=3), classes, dense),
    "laplace": (Ensemble(members=2, recipe=Laplace()), loader, dense),
    "multi-swag": (Ensemble(members=2, recipe=SWAG(rank=3, collect_every=2)), classes, normalized),
    "snapshot": (Snapshot(cycles=3), classes, normalized),
    "swag": (SWAG(rank=2, collect_every=1), loader, normalized),
    "dropout": (MCDropout(0.3, repeats=2), classes, normalized),
    "concrete": (MCDropout(learn=True, prior_precision=1.0), classes, normalized),
    "statistics": (BatchNormNoise(num_samples=7), loader, normalized),
    "augmentation": (TestTimeAugmentation(noise=0.1), classes, normalized),
}


def start(name: str, checkpoint: Path | None = None, **settings: Any) -> Any:
    """Start a run as a new process would: everything is made anew."""
    recipe, data, network = RUNS[name]
    where = None if checkpoint is None else str(checkpoint)
    training = Training(epochs=3, batch_size=16, lr=1e-2, checkpoint=where, **settings)
    return recipe.fit(network(), data(), training=training, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_goes_on_exactly(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped after every fifth step until it is through."""
    expected, stops = start(name).digest(), 0
    for _ in range(20):
        try:
            with monkeypatch.context() as patch:
                interrupt_at(5, patch)
                found = start(name, tmp_path / "run", checkpoint_every=1e9)
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 2
    assert found.digest() == expected


def test_members_that_are_finished_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(12 + 5, patch)  # in the second member
        with pytest.raises(KeyboardInterrupt):
            start("apart", tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.member-0", "run.member-1"]
    steps: list[int] = []
    before_updates(steps.append, monkeypatch)
    found = start("apart", tmp_path / "run")
    assert len(steps) == 7 + 12
    assert found.digest() == start("apart").digest()
    steps.clear()
    assert start("apart", tmp_path / "run").digest() == found.digest()
    assert not steps


def test_the_same_generator_and_loader_can_be_used_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, data = torch.Generator().manual_seed(5), loader()
    training = Training(epochs=3, lr=1e-2, checkpoint=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        interrupt_at(17, patch)
        with pytest.raises(KeyboardInterrupt):
            RUNS["loader"][0].fit(normalized(0.3), data, training=training, generator=generator)
    found = RUNS["loader"][0].fit(normalized(0.3), data, training=training, generator=generator)
    assert found.digest() == start("loader").digest()


def test_learning_on_has_files_of_its_own(tmp_path: Path) -> None:
    found = start("together")
    training = Training(epochs=1, checkpoint=str(tmp_path / "run"))
    updated = found.update(classes(20, seed=4), training=training)
    assert len(list(tmp_path.iterdir())) == 3
    assert updated.digest() == found.update(classes(20, seed=4), training=training).digest()
    assert isinstance(updated.members[0].recipe, MAP)
