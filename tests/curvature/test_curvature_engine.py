"""Jacobians and gradients of the engine against one backward pass per output and example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvature.curvature_cases import (
    CASES,
    Case,
    build,
    engine_of,
    jacobian_matrix,
    jacobian_of,
    outputs_of,
    selections,
)
from dubito.core import params
from dubito.curvature import jacobian, output_columns
from oracles import close, normal

every_case = pytest.mark.parametrize("name", CASES)
every_selection = pytest.mark.parametrize("chosen", ["all", "some", "half", "few"])


def unit_columns(case: Case, outputs: Tensor) -> Tensor:
    return torch.cat(list(output_columns.identity(case.likelihood, outputs, 2)))


@every_case
@every_selection
def test_jacobian_is_exact(name: str, chosen: str) -> None:
    case = build(name)
    selection = selections(case.model)[chosen]
    tape = engine_of(case, selection.names).run(case.inputs)
    close(tape.outputs.detach(), outputs_of(case))
    factors = tape.pull(unit_columns(case, tape.outputs))
    close(jacobian(factors, selection), jacobian_matrix(case, selection))


@every_case
def test_gradients_of_any_column_are_exact(name: str) -> None:
    case = build(name)
    names = params.trainable(case.model)
    tape = engine_of(case, names).run(case.inputs)
    weights = normal(3, *case.likelihood.canonical(tape.outputs).shape)
    factors = tape.pull(case.likelihood.restore(weights, tape.outputs))
    expected = jacobian_of(case)
    for each in names:
        per_sample = torch.einsum("vbc,cb...->vb...", weights.flatten(2), expected[each])
        close(factors[each].per_sample(), per_sample)
        close(factors[each].per_sample(slice(1, 3)), per_sample[:, 1:3])
        close(factors[each].summed(), per_sample.sum(1))
