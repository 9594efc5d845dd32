"""Fitting under priors of groups: what the data do not need is found, and the posterior keeps its contract."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from dubito.errors import InputError, UnsupportedError
from torch import Tensor, nn

from dubito import Training, Variational, objectives, priors
from dubito.core import params
from dubito.methods.variational.groups import GroupPosterior
from dubito.networks.models.sequence import lstm

pytestmark = pytest.mark.slow

PRIORS = [priors.NormalJeffreys(), priors.Horseshoe(scale=1e-5), priors.TruncatedLogUniform()]
each_prior = pytest.mark.parametrize("prior", PRIORS, ids=lambda prior: prior.setting_name)
TRAINING = Training(epochs=60, lr=1e-2, batch_size=100)


def rows() -> tuple[Tensor, Tensor]:
    """Two inputs matter, four are noise."""
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] - x[:, 3] > 0).long()


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))


@cache
def fitted(prior: priors.GroupPrior, **options: Any) -> GroupPosterior:
    posterior = Variational(prior=prior, **options).fit(network(), rows(), training=TRAINING, progress=False)
    assert isinstance(posterior, GroupPosterior)
    return posterior


def silenced(posterior: GroupPosterior) -> nn.Module:
    """The network at the means without the groups that are not needed."""
    weights = posterior.mean()
    for kind in posterior.groups():
        for member in kind.members:
            shape = [-1 if axis == member.axis else 1 for axis in range(weights[member.parameter].ndim)]
            weights[member.parameter] *= kind.needed().reshape(shape)
    return params.load_(copy.deepcopy(posterior.model), weights)


@each_prior
class TestRelevance:
    def test_inputs_that_matter_are_found(self, prior: priors.GroupPrior) -> None:
        inputs = fitted(prior).groups()[0]
        assert inputs.name == "0.inputs"
        assert [(m.parameter, m.axis, m.side) for m in inputs.members] == [("0.weight", 1, "inputs")]
        others = [1, 2, 4, 5]
        assert float(inputs.relevance[[0, 3]].min()) > float(inputs.relevance[others].max()) + 1
        assert inputs.needed(float(inputs.relevance[others].max())).tolist() == [True, False, False, True, False, False]

    def test_what_is_not_needed_can_go(self, prior: priors.GroupPrior) -> None:
        (x, y), small = rows(), silenced(fitted(prior))
        with torch.no_grad():
            accuracy = (small(x).argmax(1) == y).double().mean().item()
        assert accuracy > 0.95

    def test_the_statistics_of_a_group(self, prior: priors.GroupPrior) -> None:
        kinds = fitted(prior).groups()
        assert kinds
        for kind in kinds:
            assert len(kind) == len(kind.mean) == len(kind.log_alpha)
            assert not kind.mean.requires_grad
            assert (kind.evidence_gain is None) == (not isinstance(prior, priors.TruncatedLogUniform))
            if kind.statistic == "log_snr":
                torch.testing.assert_close(kind.relevance, -0.5 * kind.log_alpha)
            elif kind.statistic == "-log_alpha":
                torch.testing.assert_close(kind.relevance, -kind.log_alpha)

    def test_a_validated_state_is_that_of_the_means(self, prior: priors.GroupPrior) -> None:
        training = TRAINING.replace(epochs=3, restore_best=True)
        posterior = Variational(prior=prior).fit(
            network(), rows(), validation=rows(), training=training, progress=False
        )
        assert posterior.predict(rows()[0], method="mean").log_prob(rows()[1]).isfinite().all()


class TestPosterior:
    def test_a_fresh_process_can_load_it(self) -> None:
        code = (
            "from dubito.core.settings import load_all; from dubito.fitting.posterior import Posterior; "
            "load_all(); print(*Posterior._families)"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert GroupPosterior.family in found.stdout.split()

    def test_the_model_is_at_the_means(self) -> None:
        posterior = fitted(priors.NormalJeffreys())
        drawn = posterior.sample(3000)
        mean, variance = posterior.marginals()
        for name in ("0.weight", "2.weight"):
            error = (drawn[name].mean(0) - mean[name]).abs()
            assert bool((error <= 6 * (variance[name] / 3000).sqrt()).all())
        assert torch.equal(drawn["0.bias"][0], mean["0.bias"])
        assert not variance["0.bias"].any()

    def test_evidence_where_the_prior_is_proper(self) -> None:
        assert fitted(priors.Horseshoe(scale=1e-5)).log_evidence() < 0
        assert fitted(priors.TruncatedLogUniform()).log_evidence() < 0
        with pytest.raises(UnsupportedError, match="improper"):
            fitted(priors.NormalJeffreys()).log_evidence()

    def test_what_it_cannot_give(self) -> None:
        posterior = fitted(priors.NormalJeffreys())
        with pytest.raises(UnsupportedError, match=r"posterior\.groups\(\)"):
            posterior.prior()
        with pytest.raises(UnsupportedError, match="fit again on all data"):
            posterior.update(rows())
        assert posterior.divergences() is None
        assert "Per datum" in str(posterior.diagnose())

    def test_gates_leave_the_weights_without_noise(self) -> None:
        posterior = fitted(priors.TruncatedLogUniform())
        drawn, mean = posterior.sample(1)["0.weight"][0], posterior.mean()["0.weight"]
        ratio = drawn / mean
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"objective": objectives.Renyi(0.5), "estimator": "weight"}, "objective"),
        ({"estimator": "flipout"}, "estimator"),
        ({"biases": "random"}, "biases"),
    ],
)
def test_what_does_not_go_with_groups(options: Any, named: str) -> None:
    with pytest.raises(InputError, match=f"has group scales and cannot be used with {named}"):
        Variational(prior=priors.NormalJeffreys(), **options)


def test_words_that_say_nothing_go() -> None:
    """Sequences of 6 words out of 20; the class is which of the words 1 and 2 occurs, the rest is chatter."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 20, (400, 6), generator=generator)
    labels = torch.randint(2, (400,), generator=generator)
    places = torch.randint(6, (400,), generator=generator)
    tokens[torch.arange(400), places] = labels + 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = lstm(20, 2, width=8, embedding=8, dropout=0.0)
    training = Training(epochs=40, lr=1e-2, batch_size=50)
    recipe = Variational(prior=priors.NormalJeffreys(), kl_warmup=0.3)
    posterior = recipe.fit(model, (tokens, labels), training=training, progress=False)
    assert isinstance(posterior, GroupPosterior)
    groups = {kind.name: kind for kind in posterior.groups()}
    assert groups.keys() == {"tokens.inputs", "lstm.inputs_l0", "lstm.hidden_l0", "lstm.gates_l0", "head.inputs"}
    assert (posterior.predict(tokens).probs.argmax(-1) == labels).double().mean() > 0.95
    words = groups["tokens.inputs"].relevance
    assert words[0] == torch.inf  # padding is a constant
    assert float(words[1:3].min()) > float(words[3:].max())
