"""A converted module that was trained in a loop of one's own becomes the posterior that a fit would give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from test_variational_fit import SHORT, classes
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from variational_cases import mlp

import dubito
from dubito import Training, Variational, objectives, priors, select
from dubito.methods.variational import convert
from oracles import regression_data, seeded

NONE = Training(epochs=0)


class Stream(IterableDataset[Any]):
    """Data that cannot be counted."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*classes(), strict=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"estimator": "weight", "biases": "random", "prior": priors.Normal("model", 0.1)},
        {"prior": priors.Normal(0.0, "learn"), "weights": select.layers("2")},
        {"prior": priors.LogUniform(), "estimator": "flipout"},
        {"prior": priors.Mixture(4)},
        {"family": "full", "weights": select.last_layer()},
        {"prior": priors.Horseshoe()},
    ],
    ids=str,
)
def test_without_a_step_it_is_what_a_fit_gives(options: Any) -> None:
    settings = {"estimator": "local", "temperature": 1.0, **options}
    expected = Variational(**settings).fit(seeded(mlp), classes(), training=NONE)
    found = convert(seeded(mlp), **options).to_posterior(classes())
    assert found.recipe == expected.recipe
    assert found.digest() == expected.digest()
    assert str(found.diagnose()) == str(expected.diagnose())


def test_the_noise_of_a_regression_is_found() -> None:
    data = regression_data(30)
    model = nn.Linear(data[0].shape[1], 1).double()
    expected = Variational().fit(model, data, likelihood="gaussian", training=NONE)
    found = convert(model).to_posterior(data, likelihood="gaussian")
    assert found.likelihood == expected.likelihood
    assert found.likelihood.noise > 0  # type: ignore[attr-defined]


def test_correlations_are_kept() -> None:
    module: Any = convert(seeded(mlp), family="low-rank", rank=2)
    posterior = module.to_posterior(classes())
    assert torch.equal(posterior.factor, module.factor)
    assert (posterior.recipe.family, posterior.recipe.rank) == ("low-rank", 2)


class TestAfterALoop:
    def trained(self, **options: Any) -> Any:
        module, (x, y) = convert(seeded(mlp), **options), classes()
        optimizer, bound = torch.optim.Adam(module.parameters(), lr=1e-2), objectives.ELBO()
        torch.manual_seed(0)
        for _ in range(100):
            optimizer.zero_grad()
            bound(module, x, y, num_data=len(x), temperature=0.1).backward()
            optimizer.step()
        return module

    def test_it_holds_what_was_learned(self) -> None:
        module = self.trained()
        before = {name: value.clone() for name, value in module.state_dict().items()}
        posterior = module.train().to_posterior(classes(), temperature=0.1)
        assert module.training
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
        assert torch.equal(posterior.scale, module.scales())
        assert torch.equal(posterior.mean()["0.weight"], dict(module.network.named_parameters())["0.weight"])
        assert posterior.record.kl == pytest.approx(float(module.kl().detach()), rel=1e-12)
        start = convert(seeded(mlp)).to_posterior(classes())
        assert posterior.record.log_likelihood > start.record.log_likelihood
        assert posterior.diagnose().nll_at_start is None

    def test_it_is_a_posterior_like_any_other(self, tmp_path: Path) -> None:
        posterior, (x, _) = self.trained(prior=priors.LogUniform()).to_posterior(classes(), temperature=0.1), classes()
        posterior.save(tmp_path / "posterior")
        again = dubito.load(tmp_path / "posterior", seeded(mlp))
        assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)
        assert posterior.recipe.temperature == 0.1
        assert posterior.update(classes(seed=3), training=SHORT).num_data == 2 * len(x)

    def test_weights_that_were_chosen_before(self) -> None:
        network = seeded(mlp)
        chosen = select.layers("2").resolve(network)
        posterior = convert(network, weights=chosen, initial_scale={"2.weight": torch.full((2, 5), 0.1)}).to_posterior(
            classes()
        )
        assert posterior.selection.names == ["2.weight"]
        torch.testing.assert_close(posterior.scale, torch.full((10,), 0.1, dtype=torch.float64), rtol=1e-6, atol=0)

    def test_bad_data_are_one_sentence(self) -> None:
        x, y = classes()
        with pytest.raises(InputError, match="is not one of the model's classes"):
            convert(seeded(mlp)).to_posterior((x, y + 7))
        with pytest.raises(InputError, match="num_data="):
            convert(seeded(mlp)).to_posterior(DataLoader(Stream(), 20))
        assert convert(seeded(mlp)).to_posterior(DataLoader(Stream(), 20), num_data=len(x)).num_data == len(x)
        with pytest.raises(InputError, match="empty"):
            convert(seeded(mlp)).to_posterior((x[:0], y[:0]))
        with pytest.raises(InputError, match="temperature"):
            convert(seeded(mlp)).to_posterior((x, y), temperature=-1.0)
