"""Decision rules are saved and loaded like posteriors, and decide the same afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decision_cases import blobs, classifier, line, network, regressor
from dubito.decisions import (
    Acquirer,
    ConformalIntervals,
    ConformalSets,
    DecisionRule,
    Detector,
    OnlineConformal,
    Rejector,
)

import dubito
from dubito.core.errors import FileFormatError, InputError
from dubito.uses import decisions

X = blobs(50, 9)[0]
LINE = line(50, 9)[0]


def rules() -> dict[str, tuple[DecisionRule, Any]]:
    """One rule of every kind, and what it decides."""
    classes, numbers, known = classifier("laplace"), regressor("variational"), blobs(200, 3)
    groups = torch.arange(200) % 2
    seeded = torch.Generator().manual_seed(5)
    drawn = ConformalSets(classes, known, method="aps", randomized=True, generator=seeded)
    intervals = ConformalIntervals(numbers, line(100, 3), method="quantile", target_scale=(3.0, 2.0), num_samples=5)
    return {
        "Rejector": (Rejector(classes, known, risk=0.1, generator=seeded), lambda rule: rule.predict(X).accepted),
        "scaled": (
            Rejector(numbers, line(200, 3), risk=9.0, target_scale=(3.0, 10.0)),
            lambda rule: rule.predict(LINE).prediction.mean,
        ),
        "Detector": (Detector(classes, known, score="variance"), lambda rule: rule.detect(X)),
        "ConformalSets": (drawn, lambda rule: rule.predict(X)),
        "grouped": (
            ConformalSets(classes, known, groups=groups, weights=torch.rand(200)),
            lambda rule: rule.predict(X, groups=torch.ones(50, dtype=torch.long), weights=torch.ones(50)),
        ),
        "ConformalIntervals": (intervals, lambda rule: torch.stack(rule.predict(LINE))),
        "OnlineConformal": (
            OnlineConformal(intervals, rate=0.1).observed(*line(7, 4)),
            lambda rule: torch.stack(rule.observed(*line(3, 5)).predict(LINE)),
        ),
        "Acquirer": (Acquirer(classes, "entropy", num_samples=7), lambda rule: rule.choose(X, 5)),
    }


@pytest.mark.parametrize("name", list(rules()))
def test_a_loaded_rule_decides_the_same(name: str, tmp_path: Path) -> None:
    rule, decide = rules()[name]
    alone, whole = tmp_path / "alone.safetensors", tmp_path / "whole.safetensors"
    rule.save(alone, with_posterior=False)
    rule.save(whole)
    expected = decide(rule)
    model = network(2, 3) if rule.posterior is classifier("laplace") else network(1, 1)
    for again in (dubito.load(whole, model), dubito.load(alone, rule.posterior), dubito.load(whole, rule.posterior)):
        assert type(again) is type(rule)
        assert repr(again) == repr(rule)
        assert torch.equal(decide(again), expected)
    assert alone.stat().st_size < whole.stat().st_size
    again.save(tmp_path / "again.safetensors", with_posterior=False)


def test_every_rule_is_tested() -> None:
    public = {getattr(decisions, name) for name in decisions.__all__}
    kinds = {one for one in public if isinstance(one, type) and issubclass(one, DecisionRule)} - {DecisionRule}
    assert kinds == {type(rule) for rule, _ in rules().values()}


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "rule.safetensors"
    Detector(classifier("laplace"), X).save(path, with_posterior=False)
    with pytest.raises(FileFormatError, match="without its posterior: give the posterior"):
        dubito.load(path, network(2, 3))
    with pytest.raises(FileFormatError, match="fitted with another posterior"):
        dubito.load(path, classifier("map"))
    classifier("map").save(tmp_path / "posterior.safetensors")
    with pytest.raises(InputError, match="holds a posterior: give the network"):
        dubito.load(tmp_path / "posterior.safetensors", classifier("map"))
    whole = tmp_path / "whole.safetensors"
    Detector(classifier("laplace"), X).save(whole)
    with pytest.raises(FileFormatError, match="saved for another network"):
        dubito.load(whole, network(2, 4))
    damaged = bytearray(whole.read_bytes())
    damaged[-1] ^= 1
    whole.write_bytes(damaged)
    with pytest.raises(FileFormatError, match="altered or damaged"):
        dubito.load(whole, network(2, 3))


@pytest.mark.parametrize("change", [{"threshold": None}, {"draws": {}}, {"score": 3}, {"false_positive_rate": "low"}])
def test_forged_rules_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    from dubito.core import io

    rule = Detector(classifier("laplace"), X)
    tree = {"rule": "Detector", "state": {**rule.state(), **change}, "of": rule.posterior.digest()}
    io.save(tmp_path / "forged.safetensors", "decision rule", tree)
    with pytest.raises(FileFormatError):
        dubito.load(tmp_path / "forged.safetensors", rule.posterior)
