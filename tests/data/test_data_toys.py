from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from dubito.errors import InputError

from dubito import data
from dubito.data import toys
from oracles import seeded_generator


def test_moons_lie_on_their_circles():
    inputs, targets = toys.two_moons(1001, noise=0.0, generator=seeded_generator())
    assert targets.bincount().tolist() == [501, 500]
    upper, lower = inputs[targets == 0], inputs[targets == 1]
    torch.testing.assert_close(upper.norm(dim=1), torch.ones(501))
    torch.testing.assert_close((lower - torch.tensor([1.0, 0.5])).norm(dim=1), torch.ones(500))
    assert upper[:, 1].min() >= -1e-6
    assert lower[:, 1].max() <= 0.5 + 1e-6


def test_gap_sine():
    inputs, targets = toys.gap_sine(20_000, noise=0.1, gap=(-0.5, 2.0), generator=seeded_generator())
    assert not ((inputs > -0.5) & (inputs < 2.0)).any()
    assert inputs.min() >= -3
    assert inputs.max() <= 3
    left = (inputs < 0).double().mean().item()
    assert left == pytest.approx(2.5 / 3.5, abs=4 * math.sqrt(0.25 / 20_000))  # uniform over what is left
    residual = targets - (2 * inputs).sin()
    assert residual.std().item() == pytest.approx(0.1, rel=4 / math.sqrt(40_000))


def test_cubic_and_growing_noise():
    inputs, targets = toys.cubic(100, noise=0.0, generator=seeded_generator())
    torch.testing.assert_close(targets, inputs**3)
    assert inputs.abs().max() <= 4
    inputs, targets = toys.growing_noise(20_000, generator=seeded_generator())
    normal = (targets - (2 * inputs).sin()) / (0.05 + 0.15 * inputs.abs())
    assert normal.std().item() == pytest.approx(1.0, rel=4 / math.sqrt(40_000))


@pytest.mark.parametrize("generate", [toys.two_moons, toys.gap_sine, toys.cubic, toys.growing_noise])
def test_generation_is_seeded_and_checked(generate):
    first, again, other = (generate(10, generator=seeded_generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    with pytest.raises(InputError, match="`num` must be a whole number of at least 1"):
        generate(0)


def test_bad_gap():
    with pytest.raises(InputError, match="inside \\[-3, 3\\]"):
        toys.gap_sine(10, gap=(1.0, -1.0))


def test_toys_by_name():
    dataset = data.load("toy/gap-sine", split=3)
    x, x_test = (dataset.encoder.decode(part[0]) for part in (dataset.train, dataset.test))
    assert not ((x > -0.99) & (x < 0.99)).any()
    assert ((x_test > -0.99) & (x_test < 0.99)).any()
    assert not torch.equal(x, data.load("toy/gap-sine", split=4).encoder.decode(dataset.train[0]))
    assert data.load("toy/moons").class_names == ("upper", "lower")


def test_stored_toys(tiny_data: Path):
    assert [len(pair[1]) for pair in data.load("toy/agw", validation=0).parts.values()] == [16, 4]
    assert [len(pair[1]) for pair in data.load("toy/my", validation=0).parts.values()] == [20, 20]
