"""Eigendecompositions of large factors: in float32 where that is enough, side by side in threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito.curvature import kronecker
from dubito.curvature.matrices import base
from dubito.curvature.matrices import kronecker as blocks
from dubito.networks.selection import Selection

WIDTH = 40


def factor(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(seed))  # fewer rows: some eigenvalues are 0
    return (rows.mT @ rows).to(dtype)


def test_large_factors_are_decomposed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = factor(0)
    expected, _ = torch.linalg.eigh(matrix.double())
    for large in (WIDTH, WIDTH + 1):
        monkeypatch.setattr(base, "LARGE", large)
        values, vectors = base.eigh(matrix)
        assert vectors.dtype == (torch.float32 if large == WIDTH else torch.float64)
        assert values.dtype == torch.float64
        assert float(values.min()) >= 0
        torch.testing.assert_close(values, expected.clamp_min(0), rtol=1e-5, atol=1e-5 * float(expected.max()))
        again = (vectors.double() * values) @ vectors.double().mT
        torch.testing.assert_close(again, matrix.double(), rtol=0, atol=1e-5 * float(expected.max()))


@pytest.mark.parametrize("failure", ["raises", "wrong"])
def test_float64_where_float32_fails(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.linalg.eigh

    def fails(matrix: Tensor) -> Any:
        if matrix.dtype == torch.float64:
            return plain(matrix)
        if failure == "raises":
            raise RuntimeError("linalg.eigh: the algorithm failed to converge")
        values, vectors = plain(matrix)
        return values, vectors.flip(-1)

    monkeypatch.setattr(base, "LARGE", WIDTH)
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    values, vectors = base.eigh(factor(0))
    expected = plain(factor(0).double())
    assert torch.equal(values, expected[0].clamp_min(0))
    assert torch.equal(vectors, expected[1])


def test_threads_give_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    count = torch.tensor(30.0)
    sums = {f"{k}.weight": {"left": factor(k)[None], "right": factor(k + 9)[None], "count": count} for k in range(4)}
    monkeypatch.setattr(base, "LARGE", WIDTH)
    used: set[int] = set()
    both = threading.Barrier(2, timeout=60)

    def watched(matrix: Tensor) -> Any:
        if threading.get_ident() not in used and threading.current_thread() is not threading.main_thread():
            used.add(threading.get_ident())
            both.wait()  # until the other thread is there too
        return base.eigh(matrix)

    def values() -> list[Tensor]:
        return [block.values for block in kronecker.kronecker_matrix(sums, Selection.all_of(model), model).blocks]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = values()
        monkeypatch.setattr(kronecker, "PARALLEL", WIDTH)
        monkeypatch.setattr(blocks, "eigh", watched)
        torch.set_num_threads(2)
        found = values()
    finally:
        torch.set_num_threads(threads)
    assert len(used) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(other.max()))
