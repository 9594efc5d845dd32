"""Two processes that share the members find the ensemble that one process finds, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ensemble_cases import TRAINING, classes, dense, normalized
from torch.utils.data import DataLoader, TensorDataset

from dubito import SWAG, Ensemble, Laplace, MCDropout, Snapshot
from dubito.core import distributed
from two_processes import started

pytestmark = pytest.mark.slow


def results(checkpoint: str | None = None) -> dict[str, Any]:
    """Digests of ensembles, and predictions of recipes whose rows are divided."""
    found: dict[str, Any] = {}
    own = torch.Generator().manual_seed(3 + distributed.rank())  # that of the first process counts
    loader = DataLoader(TensorDataset(*classes()), batch_size=16, shuffle=True, generator=own)
    for name, recipe, data, model in (
        ("three of two", Ensemble(members=3, together=False), classes(), dense()),
        ("laplace", Ensemble(members=2, recipe=Laplace(prior_precision=1.0), bootstrap=True), loader, normalized()),
        ("one of two", Ensemble(members=1, recipe=SWAG(rank=2), start="model"), classes(), normalized()),
    ):
        generator = torch.Generator().manual_seed(5 + distributed.rank())
        training = TRAINING.replace(checkpoint=None if checkpoint is None else f"{checkpoint}-{name}")
        posterior: Any = recipe.fit(model, data, training=training, generator=generator)
        found[name] = [posterior.digest(), *(member.digest() for member in posterior.members)]
        found[f"{name} next"] = int(torch.randint(1000, (), generator=generator))
    x, _ = classes()
    for recipe in (Snapshot(2), SWAG(rank=2, collect_every=1)):
        found[repr(recipe)] = recipe.fit(dense(), classes(), training=TRAINING).predict(x, num_samples=4).log_probs
    dropped = MCDropout(0.3, learn=True).fit(dense(), classes(), training=TRAINING)
    found["weights are shared"] = dropped.mean()["0.weight"]
    return found


def shared(folder: Path) -> dict[str, Any]:
    """The same in each of two processes, with checkpoints of its own."""
    return results(str(folder / f"{distributed.rank()}-checkpoint"))


def test_two_processes_equal_one(tmp_path: Path) -> None:
    with started(__file__, "shared", tmp_path) as wait:
        expected = results()
        first, second = wait()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(first[name], second[name], rtol=0.0, atol=0.0)
            if name != "weights are shared":  # dropout noise belongs to each process's rows
                torch.testing.assert_close(first[name], value, rtol=1e-8, atol=1e-10)
        else:
            assert first[name] == second[name] == value, name
    written = {path.name.removeprefix("0-checkpoint-") for path in tmp_path.glob("0-checkpoint-three*")}
    assert written == {"three of two.member-0", "three of two.member-2"}  # each process keeps files of its own members


def test_alone_is_for_a_block() -> None:
    with distributed.alone():
        assert not distributed.is_active()
        assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.bytes_from(0, b"content") == b"content"
