"""Units go one after the other while the layers that read them adapt: against brute force in float64."""

from __future__ import annotations

import pytest
import torch
from compression_cases import table
from dubito.compression import Budget, compress
from torch import Tensor, nn

from dubito import MAP, Laplace, Training, rules
from dubito.uses.compression.costs import LayerCosts
from dubito.uses.compression.elimination import BALANCE, RIDGE, Elimination, Reader, _Running, input_moments
from dubito.uses.compression.search import score_of
from dubito.uses.compression.units_by_fx import trace


def reader(inputs: int = 6, outputs: int = 4) -> tuple[Reader, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64)
    rows = torch.randn(50, inputs, generator=generator, dtype=torch.float64) @ mixed
    rows = torch.cat([rows, rows.new_ones(50, 1)], 1)
    moments = rows.mT @ rows / 50
    matrix = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    ridge = RIDGE * moments.diagonal().mean()
    made = Reader(
        torch.cat([matrix, matrix.new_zeros(outputs, 1)], 1),
        moments + ridge * torch.eye(inputs + 1, dtype=torch.float64),
        torch.rand(outputs, generator=generator, dtype=torch.float64),
    )
    return made, torch.cat([rows, (50 * ridge).sqrt() * torch.eye(inputs + 1, dtype=torch.float64)])


def loss(made: Reader, rows: Tensor, matrix: Tensor) -> Tensor:
    return 0.5 * (made.curvature * ((made.matrix - matrix) @ rows.mT).square().sum(1) / 50).sum()


def test_readers_adapt_by_least_squares() -> None:
    made, rows = reader()
    gone = torch.tensor([1, 4])
    stays = [0, 2, 3, 5, 6]
    best = torch.linalg.lstsq(rows[:, stays], rows @ made.matrix.mT).solution.mT
    adapted = made.without(gone)
    torch.testing.assert_close(adapted[:, stays], best, rtol=1e-9, atol=1e-9)
    assert not adapted[:, gone].any()


def test_damages_are_the_loss_after_adapting_also_after_earlier_removals() -> None:
    made, rows = reader()
    running = _Running(made.matrix.clone(), torch.linalg.inv(made.moments), made.curvature)
    before = torch.zeros((), dtype=torch.float64)
    gone: list[int] = []
    for pair in ([0, 1], [3, 5]):  # units of two columns each
        damage = running.damages(torch.tensor([pair]))
        running.remove(torch.tensor(pair))
        gone += pair
        after = loss(made, rows, made.without(torch.tensor(gone)))
        torch.testing.assert_close(damage[0], after - before, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(running.matrix, made.without(torch.tensor(gone)), rtol=1e-8, atol=1e-10)
        before = after


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_of_two_equal_units_only_the_first_is_free(kind: str) -> None:
    torch.manual_seed(0)
    linear = kind == "linear"
    first, second = (nn.Linear(5, 6), nn.Linear(6, 3)) if linear else (nn.Conv2d(2, 6, 3), nn.Conv2d(6, 3, 3))
    with torch.no_grad():
        first.weight[4], first.bias[4] = 2 * first.weight[1], 2 * first.bias[1]
    model = nn.Sequential(first, nn.ReLU(), second).double().eval()
    x = torch.randn(64, 5).double() if linear else torch.randn(8, 2, 9, 9).double()
    groups = trace(model, x) or []
    made = Elimination(model, groups, [x], {"2.weight": torch.ones_like(second.weight)}, None)
    rank = made.relevance["0"]
    early, late = sorted(rank[[1, 4]].tolist())
    assert early == 0
    assert late > 1
    kept = {"0": rank != 0}
    expected = model(x)
    found = made.adapted(model, kept)(x)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # up to the ridge
    assert not second.weight[:, ~kept["0"]].any()


def test_moments_are_over_examples_and_positions() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 1, 1)).eval()
    x = torch.randn(4, 2, 5, 5)
    rows = model[1](model[0](x)).movedim(1, -1).reshape(-1, 3)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1).double()
    found = input_moments(model, ["2"], [x[:1], x[1:]])["2"]
    torch.testing.assert_close(found, rows.mT @ rows / len(rows), rtol=1e-5, atol=1e-6)


def test_costs_follow_what_is_left() -> None:
    model = nn.Sequential(nn.Linear(100, 4), nn.ReLU(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    first, second = groups = trace(model, torch.randn(3, 100)) or []
    costs = LayerCosts(model, groups, "macs", torch.randn(3, 100))
    assert costs.of_unit(first) == pytest.approx(100 + 8)
    costs.remove(second, 4)
    assert costs.of_unit(first) == pytest.approx(100 + 4)
    assert costs.of_unit(second) == pytest.approx(4 + 2)


@pytest.mark.parametrize("budgeted", [True, False])
def test_no_layer_loses_far_more_than_the_others_for_a_budget(budgeted: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2)).double()
    x = torch.randn(200, 9).double()
    groups = trace(model, x) or []
    precision = {"2.weight": torch.ones(40, 40).double(), "4.weight": 1e-9 * torch.ones(2, 40).double()}
    costs = LayerCosts(model, groups, "macs", x) if budgeted else None
    ranks = list(Elimination(model, groups, [x], precision, costs).relevance.values())
    for rank in range(60):  # the units of the second layer are free
        first, second = (float((each > rank).double().mean()) for each in ranks)
        assert not budgeted or min(first, second) > BALANCE * (first + second) / 2 - 0.05
    assert (second < 0.1) == (not budgeted)


@pytest.mark.slow
def test_a_quarter_of_the_operations_costs_less_than_by_magnitude() -> None:
    data, held_out = table(), table(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(data[0].shape[1], 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3))
    trained = MAP().fit(model, data, training=Training(epochs=30, lr=0.01), progress=False)
    posterior = Laplace(structure="diag", prior_precision=1.0).fit(trained.model, data, progress=False)
    score = score_of(posterior, held_out)
    small, other = (
        compress(posterior, rule, budget=Budget(macs=0.1), data=held_out).model
        for rule in (None, rules.Magnitude(scope="layer"))
    )
    assert score(small) >= score(other)
    assert score(small) >= score(trained.model) - 0.05
