"""What a subnetwork keeps of the full posterior, against dense matrices in float64."""

from __future__ import annotations

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from subnetwork_cases import captured, case, centred
from torch import Tensor

from dubito import select
from dubito.core import limits
from dubito.networks.selection import Selection
from dubito.select.report import SubnetworkReport
from dubito.select.rule import SelectionRule
from oracles import Case, curvature, jacobian

PRIOR = 0.7


def reported(one: Case, rule: SelectionRule, **options) -> SubnetworkReport:
    return rule.report(one.model, one.data, likelihood=one.likelihood, prior_precision=PRIOR, **options)


def wasserstein(first: Tensor, second: Tensor) -> float:
    """Between two Gaussians of the same mean, by square roots of whole matrices."""

    def root(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors * values.clamp_min(0).sqrt() @ vectors.mT

    half = root(second)
    return float((first + second - 2 * root(half @ first @ half)).trace())


@pytest.mark.parametrize("rule", ["output-variance", "greedy", "weight-variance", "magnitude", "sampled"])
@pytest.mark.parametrize("name", ["categorical", "line", "gaussian, noise unknown", "image"])
def test_every_size_by_brute_force(name: str, rule: str) -> None:
    one = case(name)
    setting = select.subnetwork(9, rule=rule)
    found = reported(one, setting)
    order = setting.rank(one.model, one.data, one.likelihood, PRIOR).order
    rows, matrix = centred(one, jacobian(one)), curvature(one)
    total = captured(rows, matrix, PRIOR, list(range(len(matrix))))
    shares = [captured(rows, matrix, PRIOR, order[: k + 1].tolist()) / total for k in range(9)]
    assert found.captured.tolist() == pytest.approx(shares, rel=1e-10)
    variance = 1 / (matrix.diagonal() + PRIOR)
    left = [float(variance.sum() - variance[order[: k + 1]].sum()) for k in range(9)]
    assert found.distance.tolist() == pytest.approx(left, rel=1e-10)
    assert found.total_variance == pytest.approx(float(variance.sum()), rel=1e-10)
    full, padded = torch.linalg.inv(matrix + PRIOR * torch.eye(len(matrix)).double()), torch.zeros_like(matrix)
    inside = torch.meshgrid(order, order, indexing="ij")
    padded[inside] = torch.linalg.inv(matrix[inside] + PRIOR * torch.eye(9).double())
    assert found.exact
    assert found.exact_distance == pytest.approx(wasserstein(full, padded), rel=1e-6)


def test_at_other_inputs_and_other_sizes() -> None:
    one = case("categorical")
    far = 4 * torch.randn(5, 3)
    found = reported(one, select.subnetwork(9), inputs=far, largest=0.5)
    rows, matrix = centred(one, jacobian(one, far.double())), curvature(one)
    order = select.subnetwork(9).rank(one.model, one.data, one.likelihood, PRIOR).order.tolist()
    total = captured(rows, matrix, PRIOR, list(range(31)))
    assert len(found.captured) == found.selection.num_weights == 16
    assert float(found.captured[8]) == pytest.approx(captured(rows, matrix, PRIOR, order) / total, rel=1e-10)
    by_context = reported(one, select.subnetwork(9, context=far))
    order = select.subnetwork(9, context=far).rank(one.model, one.data, one.likelihood, PRIOR).order.tolist()
    assert float(by_context.captured[-1]) == pytest.approx(captured(rows, matrix, PRIOR, order) / total, rel=1e-10)


def test_all_weights_capture_everything() -> None:
    one = case("categorical")
    found = reported(one, select.subnetwork(31))
    assert float(found.captured[-1]) == pytest.approx(1, abs=1e-10)
    assert float(found.distance[-1]) == pytest.approx(0, abs=1e-10)
    assert found.exact_distance == pytest.approx(0, abs=1e-6)


def test_the_recommended_size_is_the_smallest_that_is_enough() -> None:
    one = case("categorical")
    found = reported(one, select.subnetwork(31))
    enough = [k for k in range(1, 32) if found.captured[k - 1] >= 0.95 * found.captured[-1]]
    assert found.recommended == enough[0] < 31


def test_a_large_network_is_compared_with_a_kronecker_estimate() -> None:
    one = case("categorical")
    exact = reported(one, select.subnetwork(9))
    with limits.using(exact_report=8 * 30**2):
        rough = reported(one, select.subnetwork(9))
    assert not rough.exact
    assert rough.exact_distance is None
    assert "Kronecker-factored estimate" in str(rough)
    # the same subnetwork, another denominator
    torch.testing.assert_close(rough.captured / rough.captured[-1], exact.captured / exact.captured[-1])


def test_the_rule_of_the_paper_has_a_report_too() -> None:
    one = case("categorical")
    mine = select.largest_variance(9).report(one.model, one.data, prior_precision=PRIOR)
    assert torch.equal(mine.distance, reported(one, select.subnetwork(9, rule="weight-variance")).distance)
    # no rule has a smaller distance with independent weights, at any size
    assert bool((mine.distance <= reported(one, select.subnetwork(9)).distance + 1e-12).all())


def test_it_prints_and_draws() -> None:
    one = case("categorical")
    found = reported(one, select.subnetwork(9))
    text = str(found)
    assert text.startswith("Subnetwork of 9 of 31 weights by select.subnetwork(9)")
    assert f"{found.captured[-1]:.1%} of the full network's" in text
    assert f"recommended size               {found.recommended}" in text
    (axes,) = found.figure().axes
    curve, kept, line = axes.get_lines()
    assert curve.get_ydata() == pytest.approx(found.captured.tolist())
    assert kept.get_ydata() == pytest.approx((1 - found.distance / found.total_variance).tolist())
    assert line.get_xdata()[0] == found.recommended


def test_bad_inputs() -> None:
    one = case("categorical")
    with pytest.raises(InputError, match=r"cannot be called on these inputs of shape \(5, 2\)"):
        reported(one, select.subnetwork(9), inputs=torch.randn(5, 2))
    with pytest.raises(InputError, match="up to the 31 candidates"):
        reported(one, select.subnetwork(9), largest=32)


LAST = select.last_layer()


def same_end(first: SubnetworkReport, second: SubnetworkReport) -> None:
    """Whether two reports agree about the whole of the selection."""
    assert first.selection == second.selection
    assert float(first.captured[-1]) == pytest.approx(float(second.captured[-1]), rel=1e-12)
    assert float(first.distance[-1]) == pytest.approx(float(second.distance[-1]), rel=1e-12)
    assert first.total_variance == second.total_variance
    assert first.exact_distance == pytest.approx(second.exact_distance, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("rule", [LAST | select.subnetwork(12), select.subnetwork(12) | LAST], ids=["last", "first"])
def test_a_union_adds_the_ordered_weights_to_the_others(rule: SelectionRule) -> None:
    one = case("categorical")
    found = reported(one, rule)
    head = list(range(16, 31))
    order = select.subnetwork(12).rank(one.model, one.data, one.likelihood, PRIOR).order.tolist()
    order = head + [d for d in order if d not in head]
    assert 15 < len(order) < 27  # some of the twelve are in the last layer, some are not
    assert found.sizes == range(15, len(order) + 1)
    rows, matrix = centred(one, jacobian(one)), curvature(one)
    total = captured(rows, matrix, PRIOR, list(range(31)))
    shares = [captured(rows, matrix, PRIOR, order[:k]) / total for k in found.sizes]
    assert found.captured.tolist() == pytest.approx(shares, rel=1e-10)
    variance = 1 / (matrix.diagonal() + PRIOR)
    left = [float(variance.sum() - variance[order[:k]].sum()) for k in found.sizes]
    assert found.distance.tolist() == pytest.approx(left, rel=1e-10)
    enough = [k for k, share in zip(found.sizes, shares, strict=True) if share >= 0.95 * shares[-1]]
    assert found.recommended == enough[0]
    assert found.figure().axes[0].get_lines()[0].get_xdata().tolist() == list(found.sizes)
    same_end(found, reported(one, select.mask(rule.resolve(one.model, one.data, one.likelihood, PRIOR).masks())))


def without_a_sweep(rule: SelectionRule, why: str) -> tuple[SubnetworkReport, Selection]:
    """The report on weights of which there is one size only, and what the rule chose."""
    one = case("categorical")
    found, chosen = reported(one, rule), rule.resolve(one.model, one.data, one.likelihood, PRIOR)
    assert found.selection == chosen
    assert found.sizes == range(chosen.num_weights, chosen.num_weights + 1)
    for ask in (lambda: found.recommended, found.figure):
        with pytest.raises(UnsupportedError, match=why):
            ask()
    return found, chosen


@pytest.mark.parametrize(
    "rule",
    [
        LAST,
        select.layers("0") & select.subnetwork(20),
        ~select.subnetwork(9),
        select.subnetwork(4) | select.largest_magnitude(6),  # two orders are none
        LAST | select.layers("0.bias"),
    ],
    ids=repr,
)
def test_weights_without_an_order_have_no_sweep(rule: SelectionRule) -> None:
    found, chosen = without_a_sweep(rule, "come without an order in which to add them")
    one = case("categorical")
    rows, matrix = centred(one, jacobian(one)), curvature(one)
    where = torch.cat([m.flatten() for m in chosen.masks().values()]).nonzero().flatten().tolist()
    total = captured(rows, matrix, PRIOR, list(range(31)))
    assert found.captured.tolist() == pytest.approx([captured(rows, matrix, PRIOR, where) / total], rel=1e-10)
    assert "no sweep over sizes" in str(found)
    assert "recommended size  " not in str(found)


@pytest.mark.parametrize(
    "rule",
    [
        LAST | select.subnetwork(5, candidates=LAST),
        LAST | (select.layers("2.bias") | select.subnetwork(3, candidates="2.bias")),
        (select.layers("2.bias") | select.subnetwork(3, candidates="2.bias")) | LAST,
        select.layers("2.bias") | (select.layers("2.weight") | select.subnetwork(2, candidates="2.bias")),
    ],
    ids=repr,
)
def test_a_rule_with_a_size_that_adds_nothing_to_a_union_is_named(rule: SelectionRule) -> None:
    found, _ = without_a_sweep(rule, "adds no weight to the others")
    assert str(found).endswith(
        "because in this union the rule with a size adds no weight to the others: give it other candidates, or report "
        "on it alone."
    )


@pytest.mark.parametrize("rule", [LAST | select.subnetwork(1, candidates="0"), select.subnetwork(1)], ids=repr)
def test_one_ordered_weight_is_a_sweep(rule: SelectionRule) -> None:
    found = reported(case("categorical"), rule)
    assert list(found.sizes) == ([15, 16] if found.selection.num_weights == 16 else [1])
    assert found.recommended in found.sizes
    assert "recommended size  " in str(found)


@pytest.mark.parametrize("rule", ["output-variance", "greedy", "weight-variance", "magnitude", "random"])
def test_equal_selections_have_equal_reports(rule: str) -> None:
    one = case("line")
    ordered = reported(one, select.subnetwork(9, rule=rule))
    same_end(reported(one, select.mask(ordered.selection.masks())), ordered)
    same_end(reported(one, ~select.mask((~ordered.selection).masks())), ordered)


def test_rules_that_need_no_data_are_swept_too() -> None:
    one = case("categorical")
    for mine, other in ((select.random(9), "random"), (select.largest_magnitude(9), "magnitude")):
        found, known = reported(one, mine), reported(one, select.subnetwork(9, rule=other))
        assert found.selection == mine.resolve(one.model) == known.selection
        assert torch.equal(found.captured, known.captured)
        assert torch.equal(found.distance, known.distance)


def test_the_size_and_the_context_of_a_union_are_those_of_its_part() -> None:
    one, far = case("categorical"), 4 * torch.randn(5, 3).double()
    small, large = LAST | select.subnetwork(3, context=far), LAST | select.subnetwork(9, context=far)
    found, known = reported(one, small, largest=9), reported(one, large, inputs=far)
    assert repr(found.rule) == repr(large)
    assert torch.equal(found.captured, known.captured)
    assert not torch.equal(found.captured, reported(one, large, inputs=one.inputs).captured)
    nested = select.layers("2.bias") | (select.layers("2.weight") | select.subnetwork(9))
    same_end(reported(one, nested), reported(one, LAST | select.subnetwork(9)))
    assert reported(one, nested).sizes == reported(one, LAST | select.subnetwork(9)).sizes
    with pytest.raises(InputError, match="has no size, so `largest` cannot change it"):
        reported(one, LAST, largest=9)
    with pytest.raises(InputError, match="has several sizes"):
        reported(one, select.random(3) | select.subnetwork(3), largest=9)


def test_what_is_no_selection_of_trainable_weights() -> None:
    one = case("categorical")
    with pytest.raises(InputError, match="chooses directions, not weights"):
        reported(one, select.subspace(2))
    one.model[0].requires_grad_(False)
    with pytest.raises(InputError, match=r"selects weights of '0\.weight', which is frozen"):
        reported(one, select.mask({"0.weight": torch.ones(4, 3).bool()}) | select.subnetwork(3))
    with pytest.raises(InputError, match="selects no weight"):
        reported(one, LAST & select.layers("2.bias") & ~LAST)
