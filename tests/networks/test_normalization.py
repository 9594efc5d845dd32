"""Running statistics recomputed at other weights: plain averages over batches, for every layer that keeps them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dubito.core.batches import Source
from dubito.networks.normalization import batch_norms, batch_statistics, recalibrate, running_norms


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm1d(3), nn.Dropout(0.5), nn.InstanceNorm1d(3, track_running_stats=True), nn.InstanceNorm1d(3),
        nn.Flatten(), nn.Linear(12, 2),
    ).double()  # fmt: skip


def test_recalibrated_statistics_are_averages_over_batches() -> None:
    torch.manual_seed(0)
    model, x = network(), 2 * torch.randn(24, 3, 4).double() + 1
    model[2].momentum = 0.3
    before = copy.deepcopy(model[5].state_dict())
    recalibrate(model, Source((x, torch.zeros(24).long()), batch_size=8, shuffle=False))
    parts = x.split(8)
    means = torch.stack([part.mean((0, 2)) for part in parts]).mean(0)
    variances = torch.stack([part.transpose(0, 1).flatten(1).var(1) for part in parts]).mean(0)
    torch.testing.assert_close(model[0].running_mean, means)
    torch.testing.assert_close(model[0].running_var, variances)
    # in training mode the BatchNorm normalizes by the statistics of its batch
    normal = [nn.functional.batch_norm(part, None, None, training=True) for part in parts]
    torch.testing.assert_close(model[2].running_mean, torch.stack([n.mean(2).mean(0) for n in normal]).mean(0))
    torch.testing.assert_close(model[2].running_var, torch.stack([n.var(2).mean(0) for n in normal]).mean(0))
    assert model[2].momentum == 0.3
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model[5].state_dict().items())


def test_which_layers_count() -> None:
    model = network()
    assert list(running_norms(model)) == ["0", "2"]
    assert list(batch_norms(model)) == ["0"]


def test_batch_statistics_leave_the_network_as_it_was() -> None:
    model, x = network(), torch.randn(5, 3, 4).double()
    before = copy.deepcopy(model.state_dict())
    found = batch_statistics(model, x)
    assert set(found) == {"0.running_mean", "0.running_var"}
    torch.testing.assert_close(found["0.running_var"], x.transpose(0, 1).flatten(1).var(1, correction=0))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("rows", [8, None])
def test_no_more_rows_than_asked_for(rows: int | None) -> None:
    seen: list[int] = []
    x = torch.randn(24, 3, 4).double()
    source = Source((x, torch.zeros(24).long()), batch_size=8)
    recalibrate(network(), source, call=lambda inputs: seen.append(len(inputs)), rows=rows)
    assert sum(seen) == (rows or 24)
