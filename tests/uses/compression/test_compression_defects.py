"""What went wrong in earlier libraries for Bayesian compression, one test each."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from compression_cases import fit, table
from dubito.compression import compress
from torch import nn

from dubito import Laplace, Training, Variational, likelihoods, models, objectives, priors, rules, variational
from dubito.core.batches import Source
from dubito.fitting.inference import Problem


class Nested(nn.Module):
    """Layers whose names have dots."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"a": nn.Sequential(nn.Linear(5, 8), nn.ReLU()), "b": nn.Linear(8, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body["b"](self.body["a"](x))


@pytest.mark.parametrize("structure", ["weights", "units"])
def test_names_with_dots(structure) -> None:
    posterior = Laplace(structure="diag", prior_precision=1.0).fit(Nested(), table(), progress=False)
    made = compress(posterior, rules.SignalToNoise(target=0.4), structure=structure, data=table())
    assert list(made.plan.keep) == ["body.a.0.weight", "body.b.weight"]
    assert type(made.model) is Nested


def test_the_divergence_is_weighted_by_one_over_the_number_of_data() -> None:
    """Not by a constant found by hand: mean loss + KL/N, whatever the batch."""
    torch.manual_seed(0)
    module = variational.convert(nn.Linear(5, 3), prior=priors.LogUniform(), initial_scale=1e-8)
    x, y = table()
    loss = objectives.ELBO()(module, x, y, num_data=60_000, likelihood=likelihoods.Categorical())
    expected = nn.functional.cross_entropy(module.mean_module()(x), y) + module.kl() / 60_000
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)


def test_a_compressed_network_is_whole_and_plain() -> None:
    """No entries beside the network's own, no hooks, no masks; it can be nested, copied, switched and trained."""
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5))
    made.report(table(), seconds=0.001)
    assert list(made.model.state_dict()) == list(fit("diag").model.state_dict())
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in made.model.modules())
    nested = nn.Sequential(copy.deepcopy(made.model), nn.Softmax(1))
    assert nested.train() is nested
    assert nested.train(False) is nested
    nested(table()[0]).sum().backward()
    assert all(p.grad is not None for p in nested.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_follow_the_network(dtype: torch.dtype, tmp_path: Path) -> None:
    from compression_cases import point
    from dubito.compression import load

    model = copy.deepcopy(fit("point").model).to(dtype)
    made = compress(point(model), rules.Magnitude(0.5, scope="layer"), structure="units", example=table()[0].to(dtype))
    made.save(tmp_path / "net")
    for network in (made.model, load(tmp_path / "net", model)):
        assert {p.dtype for p in network.parameters()} == {dtype}


@pytest.mark.parametrize("prior", [priors.LogUniform(), priors.Normal(0.0, 0.5)])
def test_prior_and_posterior_have_the_same_names(prior: priors.Prior) -> None:
    """Else a bound that goes through both would pair one layer's weights with another's prior."""
    recipe = Variational(prior=prior)
    posterior = recipe.fit(Nested(), table(), training=Training(epochs=1), progress=False)
    names = list(dict(posterior.model.named_parameters()))
    assert [list(part) for part in posterior.marginals()] == [names, names]
    if not isinstance(prior, priors.LogUniform):  # which is improper
        assert [list(part) for part in posterior.prior()] == [names, names]


def test_a_loss_that_is_shown_holds_no_graph() -> None:
    """Sums of losses over an epoch would keep every batch's graph alive."""
    seen: list[torch.Tensor] = []
    recipe = Variational(prior=priors.LogUniform())
    training = Training(epochs=2, lr=1e-3, batch_size=30)
    source = Source(table(), batch_size=30)
    problem = Problem(Nested(), likelihoods.Categorical(), source, None, training, torch.Generator(), progress=False)
    inference = recipe.build(problem)
    state = inference.init({}, {}, torch.Generator().manual_seed(0))
    for batch in source.replay():
        state, info = inference.update(state, batch, torch.Generator().manual_seed(0))
        seen.append(info["loss"])
    assert len(seen) == 4
    assert all(loss.grad_fn is None for loss in seen)


def test_two_numbers_a_weight() -> None:
    """A mean and a scale: no further variables that only their product tells apart."""
    plain = nn.Linear(5, 3, bias=False)
    module = variational.convert(plain, prior=priors.LogUniform())
    assert sum(p.numel() for p in module.parameters()) == 2 * plain.weight.numel()


def test_nothing_is_written_beside_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = compress(fit("diag"), rules.SignalToNoise(target=0.5), data=table())
    made.report(seconds=0.001)
    made.sweep(targets=(0.0, 0.5))
    assert os.listdir() == []


def test_recurrent_networks_lose_words_and_gates() -> None:
    """Groups of an LSTM classifier: words of the embedding, inputs, hidden units and gates, by their masks."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 12, (60, 5))
    data = (tokens, (tokens == 3).any(1).long())
    model = models.lstm(12, 2, width=6)
    recipe = Variational(prior=priors.NormalJeffreys())
    posterior = recipe.fit(model, data, training=Training(epochs=2, lr=1e-2, batch_size=20), progress=False)
    kinds = {kind.name: kind for kind in posterior.groups()}
    made = compress(posterior, rules.GroupRelevance(target=0.3, scope="layer"), data=data)
    words = next(kind for name, kind in kinds.items() if kind.members[0].parameter == "tokens.weight")
    rows = made.plan.keep["tokens.weight"]
    assert torch.equal(rows.any(1), rows.all(1))  # whole words
    gone = (~rows.any(1)).nonzero().flatten()
    assert 0 in gone  # the row of the padding is zero: it counts as removed already
    gone = gone[gone != 0]
    assert words.relevance[gone].max() <= words.relevance[rows.any(1)].min()
    assert made.report(data, seconds=0.001).scores["after"]["accuracy"] > 0
