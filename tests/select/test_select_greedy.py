"""Greedy subnetworks against brute force, which inverts a matrix for every weight that might be added."""

from __future__ import annotations

import pytest
import torch
from subnetwork_cases import brute_greedy, captured, case, centred

from dubito import select
from dubito.core import limits
from dubito.select import choose as greedy
from oracles import Case, curvature, jacobian

pytestmark = pytest.mark.slow

PRIOR = 0.7


def ranked(one: Case, size: int, **options) -> list[int]:
    rule = select.subnetwork(size, rule="greedy", **options)
    return rule.rank(one.model, one.data, one.likelihood, PRIOR).order.tolist()


@pytest.mark.parametrize("name", ["categorical", "line", "gaussian, noise unknown", "bernoulli", "tied", "sequence"])
def test_the_order_is_that_of_brute_force(name: str) -> None:
    one = case(name)
    rows = centred(one, jacobian(one), one.targets)
    assert one.weights().num_weights in range(20, 35)
    assert ranked(one, 20) == brute_greedy(rows, curvature(one), PRIOR, 20)


def test_the_order_for_context_inputs() -> None:
    one = case("categorical")
    context = 3 * torch.randn(8, 3).double()
    rows = centred(one, jacobian(one, context))
    # beyond the rank of these rows every further gain is small, but still a gain
    assert ranked(one, 12, context=context) == brute_greedy(rows, curvature(one), PRIOR, 12)


def test_columns_in_small_blocks_and_rows_computed_again_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case("categorical")
    expected = ranked(one, 20)
    monkeypatch.setattr(greedy, "BLOCK", 2)
    assert ranked(one, 20) == expected
    with limits.using(kept_rows=4 * 10):
        assert ranked(one, 20) == expected


def test_a_smaller_size_is_a_beginning_of_a_larger_one() -> None:
    one = case("line")
    assert ranked(one, 5) == ranked(one, 15)[:5]


def test_the_prefilter_keeps_the_largest_scores() -> None:
    one = case("categorical")
    size, few = 4, 9
    best = select.subnetwork(few).rank(one.model, one.data, one.likelihood, PRIOR).order.tolist()
    rows, matrix = centred(one, jacobian(one)), curvature(one)
    inside = sorted(best)
    among = brute_greedy(rows[:, inside], matrix[inside][:, inside], PRIOR, size)
    assert ranked(one, size, prefilter=few) == [inside[i] for i in among]


def test_limits_per_layer() -> None:
    one = case("categorical")
    rows, matrix = centred(one, jacobian(one)), curvature(one)
    found = ranked(one, 8, per_layer={"2": 3})
    first = range(16)  # the weights of the first layer
    assert sum(d not in first for d in found) == 3
    chosen: list[int] = []
    for _ in range(8):
        full = sum(d not in first for d in chosen) == 3
        open_ = [d for d in range(len(matrix)) if d not in chosen and (d in first or not full)]
        chosen.append(max(open_, key=lambda d: captured(rows, matrix, PRIOR, [*chosen, d])))
    assert found == chosen


def test_greedy_captures_no_less_than_the_scores() -> None:
    one = case("categorical")
    rows, matrix = centred(one, jacobian(one)), curvature(one)
    scored = select.subnetwork(6).rank(one.model, one.data, one.likelihood, PRIOR).order.tolist()
    assert captured(rows, matrix, PRIOR, ranked(one, 6)) >= captured(rows, matrix, PRIOR, scored)
