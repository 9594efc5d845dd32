"""Dense layers of a training step as single nodes of the graph: the same numbers as the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito import BatchEnsemble, Rank1
from dubito.methods.rank1.layers import MANY_ROWS, BlockDense
from dubito.methods.rank1.module import Rank1Module, convert

TIGHT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}
ROWS = [2, MANY_ROWS - 1, MANY_ROWS, 2 * MANY_ROWS]


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("on_x", "on_weight"), [(True, True), (True, False), (False, True), (False, False)])
def test_slopes_are_those_of_the_plain_formula(rows: int, on_x: bool, on_weight: bool) -> None:
    torch.manual_seed(0)
    x, weight = values(3 * rows, 5).requires_grad_(on_x), values(4, 5).requires_grad_(on_weight)
    s, r, bias = (values(3, size).requires_grad_() for size in (5, 4, 4))
    given = [value for value in (x, weight, s, r, bias) if value.requires_grad]
    mine, by = BlockDense.apply(x, weight, s, r, bias), values(3 * rows, 4)
    by_row = [value.repeat_interleave(rows, 0) for value in (s, r, bias)]
    plain = (x * by_row[0]) @ weight.T * by_row[1] + by_row[2]
    torch.testing.assert_close(mine, plain, **TIGHT)
    found, expected = (torch.autograd.grad(out, given, by) for out in (mine, plain))
    torch.testing.assert_close(found, expected, **TIGHT)


RECIPES = {
    "BatchEnsemble": BatchEnsemble(members=4),
    "a draw for a batch": Rank1(components=4, sample="batch"),
    "a draw for each example": Rank1(components=4),
    "only inputs": BatchEnsemble(members=4, factors="input"),
    "only outputs": BatchEnsemble(members=4, factors="output"),
    "additive": Rank1(components=4, sample="batch", perturbation="additive"),
}


def slopes(module: Rank1Module, x: Tensor, blocks: list[tuple[int, int]], once: bool) -> list[Tensor]:
    torch.manual_seed(1)
    outputs = module.run(x, blocks, once=once)
    moving = [value for value in module.parameters() if value.requires_grad]
    loss = outputs.square().sum()
    return [outputs.detach(), *torch.autograd.grad(loss, moving, materialize_grads=True, allow_unused=True)]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("sizes", [(24, 24, 24, 24), (3, 3, 3, 3), (7, 6, 6, 6)])
def test_a_training_step_has_the_slopes_of_a_plain_pass(recipe: Any, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)).double()
    model[4].weight.requires_grad_(False)
    module = convert(model, recipe)
    blocks = [((k + 1) % 4, rows) for k, rows in enumerate(sizes)]
    x = values(sum(sizes), 6)
    torch.testing.assert_close(slopes(module, x, blocks, True), slopes(module, x, blocks, False), **TIGHT)


def test_other_passes_can_be_differentiated_twice() -> None:
    module, x = convert(nn.Linear(3, 2).double(), BatchEnsemble(members=2)), values(8, 3).requires_grad_()
    (slope,) = torch.autograd.grad(module(x).exp().sum(), x, create_graph=True)
    assert float(torch.autograd.grad(slope.sum(), x)[0].abs().sum()) > 0
