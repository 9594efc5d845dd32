"""Explicit gradients in parts of any size are those of one einsum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dubito.core import limits
from dubito.curvature import Engine, products


@pytest.mark.parametrize("cached", [1, 20, 50, 200, 2**20])
def test_parts_of_any_size_make_up_the_whole(cached: int) -> None:
    grads, inputs = torch.randn(2, 5, 7, 4, dtype=torch.float64), torch.randn(5, 7, 3, dtype=torch.float64)
    whole = torch.einsum("vbto,bti->bvoi", grads, inputs).flatten(2)
    found, seen = torch.zeros_like(whole), torch.zeros(5, 12)
    with limits.using(cached_products=4 * cached):
        for examples, entries, part in products.explicit_products(grads, inputs):
            assert part.numel() <= max(cached, 2 * 3)  # one output of one example is the least
            found[examples, :, entries] = part
            seen[examples, entries] += 1
            part.fill_(torch.nan)  # the caller may do so
    torch.testing.assert_close(found, whole, atol=1e-12, rtol=1e-12)
    assert bool((seen == 1).all())


@pytest.mark.parametrize("cached", [1, 50, 2**20])
def test_squares_of_a_convolution(cached: int) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.ConvTranspose2d(3, 2, 2), nn.Flatten(), nn.Linear(50, 2))
    engine = Engine(nn.Sequential(*layers).double(), ["0.weight", "2.weight"])
    factors = engine.run(torch.randn(4, 2, 3, 3).double()).pull(torch.randn(3, 4, 2).double())
    for factor in factors.values():
        explicit, weight = factor.per_sample().flatten(2), torch.rand(factor.shape).double()
        with limits.using(cached_products=4 * cached):
            squares, weighted = factor.square_sum(), factor.weighted_square(weight)
        torch.testing.assert_close(squares, explicit.square().sum((0, 1)), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(weighted, explicit.square() @ weight.flatten(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cached", [24, 50, 2**20])
def test_squares_of_rotated_products(cached: int) -> None:
    """All columns side by side, whatever the order of the rows in memory."""
    grads, inputs = torch.randn(2, 5, 4, 7, dtype=torch.float64).mT, torch.randn(5, 7, 3, dtype=torch.float64)
    left = torch.randn(4, 4, dtype=torch.float64)
    rotated = torch.einsum("op,vbto,bti->vbpi", left, grads, inputs)
    with limits.using(cached_products=4 * cached):
        found = products.rotated_square_sum(grads, inputs, left)
    torch.testing.assert_close(found, rotated.square().sum((0, 1)).flatten(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("width", [1, 64, 65, 200])
def test_gram(width: int) -> None:
    rows = torch.randn(3, 7, width, dtype=torch.float64)
    torch.testing.assert_close(products.gram(rows), rows.mT @ rows, rtol=0, atol=1e-12)
    weights = torch.randn(5, 7, dtype=torch.float64)
    expected = torch.einsum("pn,ni,nj->pij", weights, rows[0], rows[0])
    torch.testing.assert_close(products.gram(rows[0], weights), expected, rtol=0, atol=1e-12)
