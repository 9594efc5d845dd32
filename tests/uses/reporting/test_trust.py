"""Whether an evaluated posterior can be trusted: what the evaluated data show, each finding provoked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.likelihoods import Gaussian
from torch import nn

import dubito
from dubito import MAP

X = torch.linspace(-1, 1, 200).unsqueeze(1)
SIGNS, LABELS = X.sign(), (X[:, 0] > 0).long()


def classifier(scale: float, wrong: int) -> Any:
    """Return a network that is wrong about some of the labels, with logits of a given scale."""
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-scale], [scale]]))
        model.bias.zero_()
    labels = LABELS.clone()
    labels[:: 200 // wrong] ^= 1
    return MAP(train=False).fit(model, (SIGNS, LABELS), progress=False), (SIGNS, labels)


def evaluated(noise: float, rows: int = 200) -> Any:
    model = nn.Linear(1, 1)
    targets = X + torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    found = MAP(train=False).fit(model, (X, targets), likelihood=Gaussian(noise=noise), progress=False)
    return dubito.evaluate(found, (X[:rows], targets[:rows]))


@pytest.mark.filterwarnings("ignore::dubito.errors.TrustWarning")
class TestClasses:
    @pytest.mark.parametrize(
        ("scale", "wrong", "verdict", "told"),
        [
            (1e6, 40, "no", "worse than a guess among 2 classes"),
            (0.01, 100, "with care", "no better than a guess among 2 classes (NLL 0.693 against 0.693)"),
            (0.9, 66, "with care", "overconfident: 66% of these labels are right, but it is 86% sure"),
            (0.5, 1, "with care", "underconfident: 100% of these labels are right, but it is 73% sure"),
        ],
    )
    def test_findings(self, scale: float, wrong: int, verdict: str, told: str) -> None:
        posterior, data = classifier(scale, wrong)
        trust = dubito.evaluate(posterior, data).trust
        assert trust.verdict == verdict
        assert told in trust.findings[0]
        assert str(trust).startswith(f"Can it be trusted? {verdict.capitalize()}.\n- ")

    def test_nothing_is_wrong(self) -> None:
        posterior, data = classifier(2.0, 1)
        assert dubito.evaluate(posterior, data).trust.findings == ()

    def test_few_data(self) -> None:
        posterior, data = classifier(2.0, 1)
        trust = dubito.evaluate(posterior, tuple(part[:20] for part in data)).trust
        assert any("Only 20 targets were evaluated" in each for each in trust.findings)


class TestNumbers:
    def test_findings(self) -> None:
        assert evaluated(1.0).trust.verdict == "yes"
        assert "overconfident: its intervals of 90% hold" in evaluated(0.2).trust.findings[0]
        assert "underconfident: the root mean squared error is 0.965" in evaluated(2.5).trust.findings[0]


def test_what_was_not_fitted_is_not_trusted() -> None:
    """A posterior that was made by hand, without a fit, is unknown until it is evaluated."""
    posterior, data = classifier(2.0, 1)
    posterior.fit_record = None
    diagnosis = posterior.diagnose()
    assert (diagnosis.verdict, [finding.name for finding in diagnosis.findings]) == ("with care", ["not measured"])
    assert dubito.evaluate(posterior, data).trust.verdict == "yes"
