"""A network that overwrites its inputs gives what the same network without that gives, and no data changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import MAP, Ensemble, Laplace, MCDropout, Rank1, Training, Variational
from dubito.networks.overwriting import keep_inputs, keeps_inputs, on_copies
from dubito.networks.twin import copied

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 3
RECIPES: list[Any] = [MAP(), Ensemble(members=2), Laplace(), Variational(), MCDropout(0.2), Rank1(components=2)]


class Centred(nn.Module):
    """Moves and scales its inputs, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.in_place = nn.Linear(4, 8), nn.Linear(8, 3), in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.sub_(0.5).mul_(1.5) if self.in_place else (x - 0.5) * 1.5
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_predictions_and_data_are_as_without(recipe: Any, tmp_path: Path) -> None:
    found = []
    for in_place in (False, True):
        x, new = INPUTS.clone(), INPUTS[:7] + 1
        training = None if recipe.needs_trained_model else Training(epochs=2, batch_size=20)
        posterior = recipe.fit(Centred(in_place), (x, LABELS), training=training, progress=False)
        found.append(posterior.predict(new).probs)
        posterior.save(tmp_path / "posterior.safetensors")
        loaded = dubito.load(tmp_path / "posterior.safetensors", Centred(in_place))
        assert torch.equal(loaded.predict(new).probs, found[-1])
        assert torch.equal(x, INPUTS)
        assert torch.equal(new, INPUTS[:7] + 1)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_only_networks_that_overwrite_get_copies() -> None:
    for in_place in (False, True):
        model, x = Centred(in_place), INPUTS.clone()
        _, overwrites = on_copies(model, x)
        assert overwrites == in_place
        assert torch.equal(x, INPUTS)
        assert not keeps_inputs(model)
    keep_inputs(model)
    model(x)
    copied(model)(x=x)
    assert keeps_inputs(copied(model))
    assert torch.equal(x, INPUTS)
