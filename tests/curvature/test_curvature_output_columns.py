"""Where products start: roots of the output Hessian, made piece by piece, and unit vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from torch import Tensor

from curvature.curvature_cases import CASES, build, output_hessian, outputs_of
from dubito.core import limits
from dubito.curvature import output_columns
from oracles import close

every_case = pytest.mark.parametrize("name", CASES)


def canonical(likelihood: Likelihood, columns: Tensor) -> Tensor:
    """``[V, B, C]`` over all canonical outputs of an example."""
    return torch.stack([likelihood.canonical(one).flatten(1) for one in columns])


@every_case
@pytest.mark.parametrize("most", [2, 100])
def test_columns_are_a_root_of_the_output_hessian(name: str, most: int) -> None:
    case = build(name)
    outputs = outputs_of(case)
    parts = list(output_columns.columns("ggn", case.likelihood, outputs, case.targets, most=most))
    assert max(len(part) for part in parts) <= most
    columns = canonical(case.likelihood, torch.cat(parts))
    close(torch.einsum("vbc,vbd->bcd", columns, columns), output_hessian(case))


def test_a_softmax_needs_one_column_fewer_than_classes_even_where_it_is_certain() -> None:
    logits = torch.tensor([[0.0, 300.0, -300.0], [300.0, 0.0, -300.0], [-300.0, 0.0, 300.0], [0.0, 0.0, 1.0]]).double()
    (columns,) = output_columns.columns("ggn", Categorical(), logits, torch.zeros(4, dtype=torch.int64))
    assert columns.shape == (2, 4, 3)
    probs = logits.softmax(-1)
    truth = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    torch.testing.assert_close(torch.einsum("vbc,vbd->bcd", columns, columns), truth, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Gaussian(noise=0.5), HeteroscedasticGaussian()])
def test_large_diagonal_roots_are_never_held_as_a_whole(
    likelihood: Likelihood, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    outputs = torch.randn(5, 6, dtype=torch.float64)
    targets = likelihood.sample(outputs)
    whole = torch.cat(list(output_columns.columns("ggn", likelihood, outputs, targets)))
    asked = []
    root = type(likelihood).hessian_root

    def counting(self: Likelihood, outputs: Tensor, *args: Any) -> Tensor:
        asked.append(len(outputs))
        return root(self, outputs, *args)

    monkeypatch.setattr(type(likelihood), "hessian_root", counting)
    with limits.using(chunk=4 * 2 * 6 * 6):
        close(torch.cat(list(output_columns.columns("ggn", likelihood, outputs, targets, most=4))), whole)
    assert asked == [2, 2, 1]


def test_outputs_that_interact_keep_their_whole_root(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    likelihood, outputs = Gaussian(noise=1.0), torch.randn(3, 4, dtype=torch.float64)
    mix = torch.randn(4, 4, dtype=torch.float64)
    coupled = lambda self, outputs, targets: mix[:, None].expand(-1, len(outputs), -1)  # noqa: E731
    monkeypatch.setattr(Gaussian, "hessian_root", coupled)
    with limits.using(chunk=4):
        found = torch.cat(list(output_columns.columns("ggn", likelihood, outputs, torch.zeros(3, 4), most=3)))
    close(found, mix[:, None].expand(4, 3, 4))


@every_case
@pytest.mark.parametrize("most", [2, 100])
def test_unit_vectors_for_all_examples_at_once(name: str, most: int) -> None:
    case = build(name)
    outputs = outputs_of(case)
    columns = canonical(case.likelihood, torch.cat(list(output_columns.identity(case.likelihood, outputs, most))))
    size = outputs[0].numel()
    close(columns, torch.eye(size, dtype=torch.float64)[:, None].expand(-1, len(outputs), -1))
    if outputs.ndim == 2:  # one set that all examples share
        assert next(output_columns.identity(case.likelihood, outputs, most)).stride(1) == 0


@pytest.mark.parametrize("name", ["mlp", "output_per_position", "output_map"])
def test_centred_unit_vectors(name: str) -> None:
    case = build(name)
    outputs = outputs_of(case)
    columns = canonical(
        case.likelihood, torch.cat(list(output_columns.identity(case.likelihood, outputs, 5, centred=True)))
    )
    classes = case.likelihood.canonical(outputs).shape[-1]
    blocks = columns[:, 0].unflatten(1, (-1, classes)).unflatten(0, (-1, classes))
    for position in range(blocks.shape[0]):
        close(blocks[position, :, position], torch.eye(classes, dtype=torch.float64) - 1 / classes)
        elsewhere = [other for other in range(blocks.shape[2]) if other != position]
        assert not blocks[position, :, elsewhere].any()
