"""Units that a prior of groups has switched off go; gates also by the change of the evidence."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compression_cases import fit, table
from dubito.compression import compress
from dubito.errors import InputError, UnsupportedError
from dubito.rules import GroupRelevance, WeightStatistics
from scipy import integrate
from torch import nn

from dubito import MAP, Training, Variational, priors
from dubito.uses.compression.weight_statistics import default_rule


def kind(parameter: str, axis: int, relevance: list[float], threshold: float = 0.0, gain: Any = None) -> Any:
    member = SimpleNamespace(parameter=parameter, axis=axis)
    return SimpleNamespace(
        members=(member,), relevance=torch.tensor(relevance), threshold=threshold, evidence_gain=gain
    )


MEAN = {"0.weight": torch.ones(3, 2), "2.weight": torch.ones(2, 3)}


def test_a_weight_has_the_score_of_its_group() -> None:
    groups = (kind("0.weight", 1, [1.0, -2.0], 0.5), kind("0.weight", 0, [5.0, 0.2, 5.0]))
    statistics = WeightStatistics(MEAN, MEAN, {}, None, "", groups)
    scores = GroupRelevance().scores(statistics)
    assert torch.allclose(scores["0.weight"], torch.tensor([[0.5, -2.5], [0.2, -2.5], [0.5, -2.5]]).double())
    assert scores["2.weight"].isinf().all()
    keep = GroupRelevance().keep(GroupRelevance().relevance(statistics))
    assert keep["0.weight"].tolist() == [[True, False]] * 3
    assert keep["2.weight"].all()


def test_gates_by_their_evidence() -> None:
    groups = (kind("0.weight", 0, [9.0, 9.0, 9.0], gain=torch.tensor([-1.0, 2.0, -3.0])),)
    rule = GroupRelevance(by="evidence")
    keep = rule.keep(rule.relevance(WeightStatistics(MEAN, MEAN, {}, None, "", groups)))
    assert keep["0.weight"][:, 0].tolist() == [True, False, True]
    with pytest.raises(UnsupportedError, match="known only for gates"):
        rule.relevance(WeightStatistics(MEAN, MEAN, {}, None, "", (kind("0.weight", 0, [1.0, 1.0, 1.0]),)))


def evidence(likelihood: Any, low: float, high: float) -> float:
    """The evidence under a uniform prior of log z, by quadrature."""
    return integrate.quad(likelihood, low, high, epsabs=0, epsrel=1e-10, limit=200)[0] / (high - low)


@pytest.mark.parametrize("nats", [0.0, 1.0])
def test_gates_close_where_brute_force_finds_the_smaller_network_as_probable(nats: float) -> None:
    """A likelihood that is normal in log z has a truncated normal as its exact posterior; evidences are integrals.

    The smaller network has a gate known to be below 2⁻⁸. With equal odds it is the more probable one where its evidence
    is not below that of the larger one; a removal that may cost a nat gives it odds of e beforehand.
    """
    prior, cut = priors.TruncatedLogUniform(), -8 * math.log(2)
    grid = [(m, s) for m in (-19.0, -12.0, -7.0, -6.0, -5.0, -3.0, -1.0, 0.0) for s in (0.5, 2.0, 5.0, 20.0, 140.0)]
    wanted = []
    for mean, scale in grid:

        def likelihood(log_gate: float, mean: float = mean, scale: float = scale) -> float:
            return math.exp(-0.5 * ((log_gate - mean) / scale) ** 2)

        large, small = evidence(likelihood, prior.low, prior.high), evidence(likelihood, prior.low, cut)
        wanted.append(bool(small * math.exp(nats) < large))
    gain = prior.evidence_gain(*torch.tensor(grid, dtype=torch.float64).unbind(1))
    weights = {"0.weight": torch.ones(len(grid), 2)}
    rule = GroupRelevance(nats, by="evidence")
    groups = (kind("0.weight", 0, [9.0] * len(grid), gain=gain),)
    keep = rule.keep(rule.relevance(WeightStatistics(weights, weights, {}, None, "", groups)))
    assert keep["0.weight"].tolist() == [[stays] * 2 for stays in wanted]
    assert 0 < sum(wanted) < len(grid)


def test_a_gate_whose_removal_changes_no_evidence_goes() -> None:
    groups = (kind("0.weight", 0, [9.0, 9.0, 9.0], gain=torch.tensor([0.0, -1e-6, 1e-6])),)
    rule = GroupRelevance(by="evidence")
    keep = rule.keep(rule.relevance(WeightStatistics(MEAN, MEAN, {}, None, "", groups)))
    assert keep["0.weight"][:, 0].tolist() == [False, True, False]
    level = GroupRelevance()  # a relevance at its threshold stays
    keep = level.keep(
        level.relevance(WeightStatistics(MEAN, MEAN, {}, None, "", (kind("0.weight", 0, [0.0, -1.0, 1.0]),)))
    )
    assert keep["0.weight"][:, 0].tolist() == [True, False, True]


def test_other_posteriors_have_no_groups() -> None:
    with pytest.raises(UnsupportedError, match="needs a prior of groups"):
        compress(fit("diag"), GroupRelevance())
    with pytest.raises(InputError, match="'relevance' or 'evidence'"):
        GroupRelevance(by="size")  # type: ignore[arg-type]


@pytest.mark.parametrize("prior", [priors.NormalJeffreys(), priors.Horseshoe(), priors.TruncatedLogUniform()])
def test_groups_that_are_off_are_cut_out(prior: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    start = MAP().fit(model, table(), training=Training(epochs=10, lr=1e-2, batch_size=30), progress=False)
    training = Training(epochs=3, lr=1e-2, batch_size=30)
    posterior = Variational(prior=prior).fit(start.model, table(), training=training, progress=False)
    assert default_rule(posterior) == GroupRelevance()
    kinds = {one.name: one for one in posterior.groups()}
    half = {name: float((one.relevance - one.threshold).median()) for name, one in kinds.items()}
    made = compress(
        posterior, GroupRelevance({"0": half["2.inputs"], "2": half["4.inputs"]}), structure="units", data=table(1)
    )
    margins = {name: (one.relevance - one.threshold).double() for name, one in kinds.items()}
    for layer, inputs in (("0", "2.inputs"), ("2", "4.inputs")):
        needed = margins[inputs].clamp_max(margins[f"{layer}.inputs"].max())  # something goes out, something comes in
        assert torch.equal(made.plan.units[layer], needed >= half[inputs])
    assert made.model[2].in_features == int(made.plan.units["0"].sum())
