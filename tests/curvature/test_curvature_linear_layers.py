"""``JᵀJ`` of linear layers from products of pairs of layers is that of the rows of `J`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dubito import likelihoods
from dubito.core import limits
from dubito.curvature import Engine, output_columns
from dubito.curvature.linear_layers import FEWEST, linear_gram
from dubito.curvature.structures import jacobian
from dubito.networks.selection import Selection
from oracles import close


def network(last: nn.Module, inputs: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, inputs), nn.Tanh(), nn.Linear(inputs, 4, bias=False), nn.Tanh(), last).double()


@pytest.mark.parametrize(
    "names", [None, ["0.weight", "0.bias", "4.weight", "4.bias"], ["2.weight", "4.bias", "4.weight"]]
)
def test_products_of_pairs_are_those_of_rows(names: list[str] | None) -> None:
    model, x = network(nn.Linear(4, 6)), torch.randn(11, 3, dtype=torch.float64)
    selection = Selection.all_of(model, names)
    tape = Engine(model, selection.names).run(x)
    factors = tape.pull(torch.cat(list(output_columns.identity(likelihoods.Categorical(), tape.outputs, 6))))
    rows = jacobian(factors, selection).flatten(0, 1)
    with limits.using(chunk=4 * selection.num_weights**2):  # so that examples are added in parts, too
        found = linear_gram(factors, selection)
    assert found is not None
    close(found, rows.mT @ rows)


@pytest.mark.parametrize("case", ["few columns", "another layer", "too many weights"])
def test_otherwise_rows_are_formed(case: str) -> None:
    outputs = FEWEST - 1 if case == "few columns" else FEWEST
    last = nn.Linear(4, outputs)
    model = nn.Sequential(network(last), nn.LayerNorm(outputs).double()) if case == "another layer" else network(last)
    selection = Selection.all_of(model)
    tape = Engine(model, selection.names).run(torch.randn(7, 3, dtype=torch.float64))
    factors = tape.pull(torch.cat(list(output_columns.identity(likelihoods.Categorical(), tape.outputs, 6))))
    most = 1 if case == "too many weights" else selection.num_weights**2
    with limits.using(chunk=4 * most):
        assert linear_gram(factors, selection) is None
