"""A checkpoint answers for its own run only: other weights and other data are refused, and the sentence says which."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import FileFormatError
from fitting_cases import classification, network
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from dubito import MAP, Ensemble, Laplace, Posterior, Snapshot, Training
from interrupting import interrupt_at
from oracles import weights_of

pytestmark = pytest.mark.slow


class Plain(Dataset[Any]):
    """Examples that only a pass over them tells from others."""

    def __init__(self, last: float = 0.0) -> None:
        self.x, self.y = classification()
        self.x[-1] += last

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Stream(IterableDataset[Any]):
    def __init__(self, last: float = 0.0) -> None:
        self.inside = Plain(last)

    def __iter__(self) -> Any:
        return iter([self.inside[index] for index in range(50)])


def tensors(last: float) -> TensorDataset:
    inside = Plain(last)
    return TensorDataset(inside.x, inside.y)


def loader(dataset: Any, **settings: Any) -> DataLoader[Any]:
    own = torch.Generator().manual_seed(3)
    return DataLoader(dataset, **{"batch_size": 16, "shuffle": True, "generator": own, **settings})


# what gives data whose last example is moved by a number
DATA: dict[str, Callable[[float], Any]] = {
    "loader": lambda last: loader(Plain(last)),
    "workers": lambda last: loader(Plain(last), num_workers=1),
    "tensors": lambda last: loader(tensors(last)),
    "subset": lambda last: loader(Subset(tensors(last), range(10, 50))),
    "two": lambda last: loader(ConcatDataset([tensors(0.0), tensors(last)])),
    "dataset": Plain,
    "stream": lambda last: DataLoader(Stream(last), batch_size=16),
    "list": lambda last: list(loader(Plain(last), shuffle=False)),
    "dicts": lambda last: [{"x": x, "labels": y} for x, y in loader(Plain(last), shuffle=False)],
    "iterable": lambda last: type("Again", (), {"__iter__": lambda _: iter(loader(Plain(last), shuffle=False))})(),
}


class Wrapped(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Any) -> Tensor:
        out: Tensor = self.inside(x["x"] if isinstance(x, dict) else x)
        return out


def fit(path: Path, data: Any, recipe: Any = None, model: nn.Module | None = None, **options: Any) -> Posterior:
    training = Training(epochs=2, batch_size=16, checkpoint=str(path), **options.pop("training", {}))
    model = Wrapped(network()) if model is None else model
    found: Posterior = (recipe or MAP()).fit(model, data, training=training, num_data=50, **options)
    return found


@pytest.mark.parametrize("updates", [2, 5, 0], ids=["first epoch", "second epoch", "finished"])
@pytest.mark.parametrize("name", DATA)
def test_other_data_is_refused_and_the_same_goes_on(
    name: str, updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, make = tmp_path / "run", DATA[name]
    expected = weights_of(fit(tmp_path / "whole", make(0.0)))
    with monkeypatch.context() as patch:
        if updates:
            interrupt_at(updates, patch)
            with pytest.raises(KeyboardInterrupt):
                fit(path, make(0.0))
        else:
            fit(path, make(0.0))
    before = path.read_bytes()
    if updates == 2 and name in ("loader", "workers", "stream", "iterable"):
        # nobody can know yet: no batch so far has held the example that differs, so this is the run on the other data
        expected_of_other = weights_of(fit(tmp_path / "other", make(1.0)))
        assert torch.equal(weights_of(fit(path, make(1.0))), expected_of_other)
        path.write_bytes(before)
    else:
        with pytest.raises(
            FileFormatError, match=r"another run \(other (training data|batches from the loader)\): del"
        ):
            fit(path, make(1.0))
        assert path.read_bytes() == before
    assert torch.equal(weights_of(fit(path, make(0.0))), expected)


def test_the_same_tensors_in_another_order(tmp_path: Path) -> None:
    fit(tmp_path / "run", loader(tensors(0.0), shuffle=False))
    with pytest.raises(FileFormatError, match="other batches from the loader"):
        fit(tmp_path / "run", loader(tensors(0.0), shuffle=True))


def other_weights() -> nn.Module:
    model = Wrapped(network())
    nn.init.zeros_(next(model.parameters()))
    return model


@pytest.mark.parametrize("recipe", [MAP(), Laplace(), Snapshot(cycles=2), Ensemble(2, start="model")], ids=repr)
def test_other_weights_are_refused(recipe: Any, tmp_path: Path) -> None:
    fit(tmp_path / "run", classification(), recipe)
    with pytest.raises(FileFormatError, match="other initial weights of the network; seed torch before you create it"):
        fit(tmp_path / "run", classification(), recipe, other_weights())


@pytest.mark.parametrize("recipe", [MAP(start="fresh"), Ensemble(2), Ensemble(2, recipe=Laplace())], ids=repr)
def test_weights_that_are_drawn_anew_do_not_matter(recipe: Any, tmp_path: Path) -> None:
    """Such a run is the same whatever the weights were: a script that does not seed its network can go on."""
    first = fit(tmp_path / "run", loader(Plain()), recipe)
    assert fit(tmp_path / "run", loader(Plain()), recipe, other_weights()).digest() == first.digest()


def test_other_buffers_and_other_activations(tmp_path: Path) -> None:
    fit(tmp_path / "run", classification(), model=network())
    other = network()
    other[1].running_mean.add_(1.0)  # type: ignore[operator, union-attr]
    with pytest.raises(FileFormatError, match="other initial weights"):
        fit(tmp_path / "run", classification(), model=other)
    other = network()
    other[2] = nn.Tanh()
    with pytest.raises(FileFormatError, match="another network"):
        fit(tmp_path / "run", classification(), model=other)


@pytest.mark.parametrize("name", ["loader", "tensors", "list"])
def test_other_validation_data(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"training": {"early_stopping": 1}}
    make = DATA[name]
    first = fit(tmp_path / "run", classification(), validation=make(0.0), **options)
    options = {"training": {"early_stopping": 1}}
    with pytest.raises(FileFormatError, match="other validation data"):
        fit(tmp_path / "run", classification(), validation=make(1.0), **options)
    options = {"training": {"early_stopping": 1}}
    again = fit(tmp_path / "run", classification(), validation=make(0.0), **options)
    assert again.digest() == first.digest()


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("another recipe", {"recipe": MAP(prior_precision=2.0)}),
        ("other training settings", {"training": {"lr": 0.5}}),
        ("another likelihood", {"likelihood": "gaussian"}),
        ("another seed", {"generator": torch.Generator().manual_seed(9)}),
        ("another network", {"model": nn.Linear(4, 3)}),
    ],
)
def test_the_sentence_names_the_part(part: str, changes: dict[str, Any], tmp_path: Path) -> None:
    x, y = classification()
    fit(tmp_path / "run", (x, y))
    data = (x, torch.zeros(50, 3)) if "likelihood" in changes else (x, y)
    with pytest.raises(FileFormatError, match=rf"belongs to another run \({part}\): delete it or choose another file"):
        fit(tmp_path / "run", data, **changes)


def test_a_member_of_another_ensemble(tmp_path: Path) -> None:
    recipe = Ensemble(2, together=False)
    fit(tmp_path / "run", loader(Plain()), recipe)
    fit(tmp_path / "other", loader(Plain(1.0)), recipe)
    shutil.copy(tmp_path / "other.member-1", tmp_path / "run.member-1")
    with pytest.raises(FileFormatError, match=r"run.member-1' belongs to another run \(other batches"):
        fit(tmp_path / "run", loader(Plain()), recipe)
