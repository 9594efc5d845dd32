"""A network as its difference from another one: exact or rounded as before, small, and only with that one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from dubito.errors import FileFormatError
from torch import nn

from dubito import compression


def base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 3))


def changed() -> nn.Module:
    model = copy.deepcopy(base())
    with torch.no_grad():
        model[4].weight += 0.01  # type: ignore[operator, union-attr]
        model[2].weight += 0.01 * torch.randn(50, 60)  # type: ignore[operator, union-attr]
    return model


@pytest.mark.parametrize("form", ["dense", "csr", "coded"])
def test_only_what_changed_is_written(form: str, tmp_path: Path) -> None:
    model = changed()
    whole = compression.save(tmp_path / "whole", model, form)  # type: ignore[arg-type]
    small = compression.save(tmp_path / "small", model, form, base=base())  # type: ignore[arg-type]
    assert whole - small > 0.9 * 4 * 40 * 60  # the first layer is left out
    again = compression.load(tmp_path / "small", base())
    for one, other in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_differences_in_steps_take_fewer_bytes(tmp_path: Path) -> None:
    model, steps = changed(), {"2.weight": 0.002, "4.weight": 0.002}
    alone = compression.save(tmp_path / "alone", model, "coded", {**steps, "0.weight": 0.002})
    small = compression.save(tmp_path / "small", model, "coded", steps, base=base())
    assert small < alone / 2
    again = compression.load(tmp_path / "small", base())
    for name, value in again.named_parameters():
        assert (value - model.get_parameter(name)).abs().max() <= 0.001 * 1.01


def test_another_network_is_refused(tmp_path: Path) -> None:
    compression.save(tmp_path / "small", changed(), "dense", base=base())
    other = changed()
    nn.init.zeros_(other[0].weight)  # type: ignore[index, arg-type, union-attr]
    with pytest.raises(FileFormatError, match="difference from another network"):
        compression.load(tmp_path / "small", other)
    with pytest.raises(FileFormatError, match="another network"):
        compression.load(tmp_path / "small", nn.Sequential(nn.Linear(40, 60)))
