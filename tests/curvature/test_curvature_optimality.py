"""What a step along the gradient would still gain: with a frozen base it is found without a copy of the network."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dubito import select
from dubito.beliefs.likelihoods import Categorical
from dubito.core import limits
from dubito.core.batches import Source
from dubito.core.params import Frozen
from dubito.curvature.optimality import steepest_gain


def test_the_gain_with_a_frozen_base_is_that_of_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(50, 4, dtype=torch.float64), torch.arange(50) % 3
    selection = (select.layers("2") | select.layers("4")).resolve(plain, (x, y))
    frozen = copy.deepcopy(plain)
    for name in ("weight", "bias"):
        setattr(frozen[0], name, Frozen.of(getattr(plain[0], name)))
    arguments = (Categorical(), Source((x, y), batch_size=20), selection)
    expected = steepest_gain(plain, *arguments)
    monkeypatch.setattr(Frozen, "__deepcopy__", lambda *_: pytest.fail("the base is copied"))
    assert steepest_gain(frozen, *arguments) == pytest.approx(expected, rel=1e-6)
    assert expected > 1e-3


def test_the_gradient_is_the_same_if_memory_allows_few_rows_at_a_time() -> None:
    """A row has the outputs of three layers, the last of which is the network's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(50, 4, dtype=torch.float64), torch.arange(50) % 3
    arguments = (Categorical(), Source((x, y), batch_size=50), select.all().resolve(model, (x, y)))
    rows: list[int] = []
    expected = steepest_gain(model, *arguments)
    watched = copy.deepcopy(model)
    watched.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    with limits.using(activations=4 * 10 * (6 + 6 + 3 + 3)):
        assert steepest_gain(watched, *arguments) == pytest.approx(expected, rel=1e-9)
    assert max(rows) == 10
    assert rows.count(10) == 3 * 5  # three gradients of 50 rows
