"""Compiled networks and networks with compiled parts behave like the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import MAP, Ensemble, Laplace, MCDropout, Rank1, Training

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
DATA = (X, torch.arange(24) % 2)
QUICK = Training(epochs=1)


class Parts(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) * self.body.scale


class Body(nn.Sequential):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5))


def plain() -> Parts:
    torch.manual_seed(0)
    return Parts(Body())


def whole_compiled() -> nn.Module:
    return torch.compile(plain(), backend="eager")


def part_compiled() -> nn.Module:
    model = plain()
    model.body = torch.compile(model.body, backend="eager")
    return model


def compiled_in_place() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    model.body.compile(backend="eager")
    return model


def check_same(recipe, make, path: Path) -> None:
    options = {} if isinstance(recipe, Laplace) else {"training": QUICK}
    given = make()
    expected, found = recipe.fit(plain(), DATA, **options), recipe.fit(given, DATA, **options)
    a, b = expected.predict(X), found.predict(X)
    if make is not part_compiled or not isinstance(recipe, MCDropout):  # its noise depends on the names of layers
        torch.testing.assert_close(b.probs, a.probs)
        torch.testing.assert_close(b.epistemic, a.epistemic)
    assert list(found.mean()) == [name.removeprefix("_orig_mod.") for name, _ in given.named_parameters()]
    found.save(path)
    assert torch.equal(dubito.load(path, make()).predict(X).probs, b.probs)
    if isinstance(recipe, MCDropout):
        assert float(b.epistemic.mean()) > 0.01


@pytest.mark.slow
def test_compiled_networks_behave_like_plain_ones(tmp_path: Path) -> None:
    """In one test: importing torch's compiler takes seconds in each process."""
    for recipe in (MCDropout(0.5, train=False), Laplace(), Rank1(components=2), MAP()):
        for make in (whole_compiled, part_compiled, compiled_in_place):
            check_same(recipe, make, tmp_path / "posterior")
    members = Ensemble.of([whole_compiled(), whole_compiled()])
    torch.testing.assert_close(members.predict(X).probs, plain().eval()(X).softmax(-1))
    model = part_compiled()
    kind = type(model.body)
    MAP().fit(model, DATA, training=QUICK)
    assert type(model.body) is kind
