"""Kronecker factors as leading eigenpairs and a diagonal."""

from __future__ import annotations

import torch
from torch import nn

from dubito.curvature.kronecker import reduce_factors, whole_factors

MODEL = nn.Linear(12, 5, bias=False).double()


def sums(rows: int) -> dict[str, dict[str, torch.Tensor]]:
    a = torch.randn(rows, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"weight": {"left": torch.eye(5, dtype=torch.float64)[None], "right": (a.mT @ a)[None]}}


def test_a_factor_of_low_rank_stays_exact() -> None:
    given = sums(rows=3)
    reduced = reduce_factors(given, 3, MODEL)["weight"]
    assert "right" not in reduced
    assert "left" in reduced  # not wide enough
    torch.testing.assert_close(whole_factors(reduced)["right"], given["weight"]["right"], rtol=1e-12, atol=1e-12)


def test_the_diagonal_stays_exact_and_the_rest_is_what_is_left() -> None:
    right = sums(rows=40)["weight"]["right"][0]
    found = whole_factors(reduce_factors(sums(rows=40), 3, MODEL)["weight"])["right"][0]
    values, vectors = torch.linalg.eigh(right)
    leading = (vectors[:, -3:] * values[-3:]) @ vectors[:, -3:].mT
    expected = leading + torch.diag((right - leading).diagonal())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.diagonal(), right.diagonal())
    assert float(torch.linalg.eigvalsh(found)[0]) > 0


def test_nothing_is_reduced_by_default_but_adapters() -> None:
    for rank in ("auto", None):
        assert reduce_factors(sums(rows=40), rank, MODEL)["weight"].keys() == {"left", "right"}
