"""Rows outside of what training showed: exact mixtures over their readings, for any posterior."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dubito.errors import UnsupportedError
from run_cases import TOWNS, houses, run_of

import dubito
from dubito.beliefs.prediction import ClassPrediction, RegressionPrediction
from dubito.uses.runs.guard import GuardedPosterior

METHODS = ("map()", "laplace()")


def inputs(target: str, method: str, size: float, town: str) -> torch.Tensor:
    return run_of(target, method).encoder.encode({"size": [size], "town": [town]})


@pytest.mark.parametrize("method", METHODS)
def test_an_unseen_category_is_the_mixture_over_the_known_ones(method: str) -> None:
    posterior = run_of("price", method).posterior
    assert isinstance(posterior, GuardedPosterior)
    found = posterior.predict(inputs("price", method, 100.0, "Rom"))
    known = [posterior.predict(inputs("price", method, 100.0, town)) for town in TOWNS]  # each a quarter of the rows
    assert isinstance(found, RegressionPrediction)
    means = torch.stack([each.mean for each in known])
    torch.testing.assert_close(found.mean, means.mean(0))
    inside = torch.stack([each.epistemic for each in known]).mean(0)
    torch.testing.assert_close(found.epistemic, inside + means.var(0, correction=0))
    torch.testing.assert_close(found.aleatoric, known[0].aleatoric)
    assert float(found.epistemic) > 5 * float(max(each.epistemic for each in known))


@pytest.mark.parametrize("method", METHODS)
def test_a_number_outside_is_read_as_it_is_and_at_the_end_of_the_range(method: str) -> None:
    run = run_of("price", method)
    (size, _) = run.encoder.columns
    low, high = size.low, size.high
    for value, end in ((low - 50, low), (high + 500, high)):
        found = run.posterior.predict(inputs("price", method, value, "Ulm"))
        both = [run.posterior.posterior.predict(inputs("price", method, at, "Ulm")) for at in (value, end)]
        torch.testing.assert_close(found.mean, (both[0].mean + both[1].mean) / 2)
        spread = (both[0].epistemic + both[1].epistemic) / 2 + (both[0].mean - both[1].mean) ** 2 / 4
        torch.testing.assert_close(found.epistemic, spread)


def test_inside_of_the_range_nothing_changes() -> None:
    for target in ("price", "cheap"):
        run = run_of(target)
        rows = run.encoder.encode(
            {"size": [run.encoder.columns[0].low, 100, run.encoder.columns[0].high], "town": list(TOWNS)[:3]}
        )
        guarded, plain = run.posterior.predict(rows), run.posterior.posterior.predict(rows)
        for name, value in guarded.numpy().items():
            assert (value == plain.numpy()[name]).all()


@pytest.mark.parametrize("method", METHODS)
def test_classes_gain_the_information_between_class_and_reading(method: str) -> None:
    run = run_of("cheap", method)
    found = run.posterior.predict(inputs("cheap", method, 120.0, "Rom"))
    known = [run.posterior.predict(inputs("cheap", method, 120.0, town)) for town in TOWNS]
    assert isinstance(found, ClassPrediction)
    probs = torch.stack([each.probs for each in known])
    torch.testing.assert_close(found.probs, probs.mean(0))
    entropy = torch.special.entr(probs.mean(0)).sum(-1) - torch.special.entr(probs).sum(-1).mean(0)
    inside = torch.stack([each.epistemic for each in known]).mean(0)
    torch.testing.assert_close(found.epistemic, inside + entropy)
    torch.testing.assert_close(found.entropy, found.aleatoric + found.epistemic)
    assert (found.samples is None) == (known[0].samples is None)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    run = run_of()
    table = {"size": [100.0, 900.0, 50.0, 60.0], "town": ["Rom", "Ulm", "Bern", None]}
    together = run.predict(table)
    for row in range(4):
        alone = run.predict({name: values[row : row + 1] for name, values in table.items()})
        assert alone["prediction"][0] == pytest.approx(together["prediction"][row], rel=1e-6)
        assert alone["epistemic"][0] == pytest.approx(together["epistemic"][row], rel=1e-5)


def test_saved_and_loaded_it_predicts_the_same(tmp_path: Path) -> None:
    run = run_of()
    run.posterior.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", run.posterior.model)
    rows = run.encoder.encode({"size": [100.0, 900.0], "town": ["Rom", "Ulm"]})
    assert torch.equal(again.predict(rows).mean, run.posterior.predict(rows).mean)
    assert torch.equal(again.predict(rows).epistemic, run.posterior.predict(rows).epistemic)


def test_an_update_widens_the_range() -> None:
    run = run_of()
    table = houses(40, seed=3)
    table["size"] = [400 + size for size in table["size"]]
    pair = run.encoder.encode(table), run.encoder.encode_targets(table)
    assert run.posterior.known.outside(pair[0]).any(dim=1).all()
    updated = run.posterior.update(pair, progress=False)
    assert isinstance(updated, GuardedPosterior)
    assert not updated.known.outside(pair[0]).any()
    with pytest.raises(UnsupportedError, match="a pair"):
        run.posterior.update([pair, pair], progress=False)
