"""Natural gradients against the closed form of Bayesian linear regression, and what their steps promise."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from test_variational_fit import LIKELIHOOD, NOISE, PRECISION, PRIOR, blank_linear, classes, flat_mean
from torch import Tensor, nn
from variational_cases import NETWORKS, convolutional, mlp

from dubito import Training, Variational, likelihoods, objectives, priors, select
from dubito.core import params
from dubito.methods.variational import convert, natural
from dubito.methods.variational.natural import NaturalStep, Weights
from dubito.methods.variational.trainer import VariationalTrainer
from oracles import LinearRegression, fixed_normal, regression_data, seeded, seeded_layers

pytestmark = pytest.mark.slow

LONG = Training(epochs=1000, lr=1e-2, batch_size=1000)
SHORT = Training(epochs=2, lr=1e-3, batch_size=16)
SOME = select.random(0.4) & select.layers("*.weight")


def recipe(**options: Any) -> Variational:
    return Variational(**{"prior": PRIOR, "biases": "random", "optimizer": "natural", **options})


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_it_finds_the_closed_form(temperature: float) -> None:
    x, y = regression_data(20)
    oracle = LinearRegression(x, y, noise=NOISE, prior_precision=PRECISION, temperature=temperature)
    found: Any = recipe(temperature=temperature, objective=objectives.ELBO(2)).fit(
        blank_linear(), (x, y), likelihood=LIKELIHOOD, training=LONG
    )
    scale = oracle.precision.diagonal() ** -0.5
    # pairs of draws leave no noise in the gradient of a linear model
    assert float(((flat_mean(found) - oracle.mean) / scale).abs().max()) < 1e-6
    torch.testing.assert_close(found.scale, scale, rtol=0.1, atol=0)


def test_a_prior_of_each_weight_and_mini_batches() -> None:
    x, y = regression_data(60)
    center = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64)
    scale = torch.tensor([[0.05, 0.5, 5.0]], dtype=torch.float64)
    oracle = LinearRegression(
        x, y, noise=NOISE, prior_precision=torch.cat([scale.flatten() ** -2, torch.tensor([PRECISION])]),
        prior_mean=torch.cat([center.flatten(), torch.zeros(1)]),
    )  # fmt: skip
    prior = priors.ByName({"weight": priors.Normal(center, scale), "bias": PRIOR})
    found: Any = recipe(prior=prior, objective=objectives.ELBO(2)).fit(
        blank_linear(), (x, y), likelihood=LIKELIHOOD, training=LONG.replace(batch_size=30, epochs=500)
    )
    exact = oracle.precision.diagonal() ** -0.5
    assert float(((flat_mean(found) - oracle.mean) / exact).abs().max()) < 0.3
    torch.testing.assert_close(found.scale, exact, rtol=0.15, atol=0)


def one_layer(log_scale: float = -2.0) -> tuple[Weights, dict[str, Tensor]]:
    module = convert(seeded(lambda: nn.Linear(3, 2)), prior=priors.Normal(0.3, 2.0), estimator="weight")
    _, part = next(module.parts())
    part.log_scale.data.fill_(log_scale)
    precision = torch.full_like(part.log_scale, -2 * log_scale).exp().detach()
    state = {
        "mean": module.network.weight.detach().clone(), "precision": precision,
        "momentum": fixed_normal(2, 3, seed=1), "noise": torch.zeros(2, 3, dtype=torch.float64),
    }  # fmt: skip
    return Weights(part, module.network.weight, state, float(precision[0, 0])), state


class TestOneStep:
    def test_the_equations(self) -> None:
        weights, state = one_layer()
        before = params.clone(state)
        gradient, deviation = fixed_normal(2, 3, seed=2), 0.01 * fixed_normal(2, 3, seed=3)
        step = NaturalStep(rate=0.1, turnover=0.05, num_data=50.0, debias=0.271)
        weights.move(gradient, step, deviation)
        momentum = 0.9 * before["momentum"] + 0.1 * gradient
        x = 0.05 * (50.0 * deviation + 0.25 / before["precision"] - 1)
        precision = before["precision"] * (1 + (1 + x) ** 2) / 2
        slope = momentum / 0.271 + 0.25 / 50.0 * (before["mean"] - 0.3)
        mean = before["mean"] - 0.1 * before["precision"] / precision * slope
        for name, value in {"mean": mean, "precision": precision, "momentum": momentum}.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)

    def test_precisions_stay_positive_whatever_comes(self) -> None:
        weights, state = one_layer()
        for seed in range(50):
            weights.move(
                fixed_normal(2, 3, seed=seed), NaturalStep(0.1, 0.01, 1e3, 1.0), fixed_normal(2, 3, seed=seed + 1)
            )
            assert float(state["precision"].min()) > 0

    def test_a_precision_that_has_fallen_far_does_not_throw_its_mean_away(self) -> None:
        weights, state = one_layer(log_scale=-7.0)
        state["precision"].fill_(0.25)
        state["momentum"].zero_()
        before = state["mean"].clone()
        weights.move(torch.zeros_like(before), NaturalStep(0.1, 0.0, 50.0, 1.0), torch.zeros_like(before))
        slope = 0.25 / 50 * (before - 0.3)
        torch.testing.assert_close(before - state["mean"], natural.LONGEST * slope, rtol=1e-9, atol=0)

    def test_draws_come_in_mirrored_pairs(self, generator: torch.Generator) -> None:
        weights, state = one_layer()
        drawn = []
        for number in range(3):
            weights.draw(number, generator)
            drawn.append(weights.parameter.detach() - state["mean"])
        torch.testing.assert_close(drawn[1], -drawn[0])
        assert not torch.equal(drawn[2], drawn[0])

    def test_the_product_is_that_of_the_last_draw(self, generator: torch.Generator) -> None:
        gradient, step, states = fixed_normal(2, 3, seed=2), NaturalStep(0.1, 0.05, 50.0, 1.0), []
        for explicit in (False, True):
            weights, state = one_layer()
            weights.draw(0, generator.manual_seed(1))
            weights.move(gradient, step, weights.deviation() * gradient if explicit else None)
            states.append(state)
        for name in ("mean", "precision", "momentum"):
            torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-12, atol=0)

    def test_numbers_are_dealt_to_other_weights(
        self, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(natural, "MANY", 1)
        weights, state = one_layer()
        dealt = []
        for number in range(0, 2 * natural.DEALS, 2):
            weights.draw(number, generator)
            dealt.append(state["noise"].flatten().clone())
        for each in dealt[1:]:
            assert torch.equal(each.sort().values, dealt[0].sort().values)
        assert all(not torch.equal(a, b) for a, b in itertools.pairwise(dealt))
        weights.draw(2 * natural.DEALS, generator)
        assert not torch.equal(state["noise"].flatten().sort().values, dealt[0].sort().values)

    def test_draws_have_the_posterior_variance(self, generator: torch.Generator) -> None:
        weights, state = one_layer()
        total = torch.zeros(2, 3, dtype=torch.float64)
        for number in range(0, 8000, 2):
            weights.draw(number, generator)
            total += (weights.parameter.detach() - state["mean"]).square() / 4000
        torch.testing.assert_close(total * state["precision"], torch.ones_like(total), rtol=0.12, atol=0)


class TestTraining:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_any_network(self, name: str) -> None:
        make, x = NETWORKS[name]
        model = seeded(make)
        with torch.no_grad():
            outputs = params.call(model.eval(), x)
        task: Any = "gaussian" if outputs.ndim == 2 else "categorical"
        y = torch.zeros_like(outputs) if outputs.ndim == 2 else torch.zeros(outputs.shape[:-1], dtype=torch.long)
        before = params.of(model)
        found: Any = recipe().fit(model, (x, y), likelihood=task, training=SHORT)
        assert bool(torch.isfinite(found.scale).all())
        assert not torch.equal(flat_mean(found), found.selection.ravel(before))
        params.check_same(before, params.of(model))
        assert all(torch.equal(before[n], value) for n, value in model.named_parameters())

    def test_points_and_noise_are_trained_beside(self) -> None:
        x, _ = classes(100)
        target = x[:, :1] * 2 + 1
        start = seeded(lambda: nn.Linear(3, 1))
        found: Any = Variational(optimizer="natural").fit(
            start, (x, target), likelihood="gaussian", training=Training(epochs=200, lr=3e-2, batch_size=50)
        )
        assert found.selection.names == ["weight"]
        assert float(found.mean()["bias"]) == pytest.approx(1.0, abs=0.1)

    def test_single_weights(self) -> None:
        data = classes()
        start = seeded(mlp)
        held: Any = Variational(weights=SOME, optimizer="natural").fit(start, data, training=SHORT)
        _, variance = held.marginals()
        for name, before in params.of(start).items():
            moved = held.mean()[name] != before
            assert bool((moved == (variance[name] > 0)).all())
        fresh: Any = Variational(weights=SOME, optimizer="natural", start="fresh")
        found = fresh.fit(start, data, training=SHORT)
        assert 0 < found.selection.num_weights < 25
        assert bool(torch.isfinite(flat_mean(found)).all())

    def test_running_statistics(self) -> None:
        x = fixed_normal(40, 1, 4, 4)
        data = (x, torch.arange(40) % 3)
        found: Any = Variational(optimizer="natural").fit(seeded(convolutional), data, training=SHORT)
        assert float(found.model[1].running_mean.abs().max()) > 0

    def test_it_goes_on_from_a_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        training = Training(epochs=3, batch_size=20, checkpoint=str(tmp_path / "whole"), checkpoint_every=0.0)
        whole: Any = Variational(optimizer="natural").fit(seeded(mlp), classes(), training=training)
        broken = training.replace(checkpoint=str(tmp_path / "broken"))
        steps, update = [5], VariationalTrainer.update

        def interrupted(*args: Any) -> Any:
            steps[0] -= 1
            if steps[0] == 0:
                raise KeyboardInterrupt
            return update(*args)

        monkeypatch.setattr(VariationalTrainer, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Variational(optimizer="natural").fit(seeded(mlp), classes(), training=broken)
        resumed: Any = Variational(optimizer="natural").fit(seeded(mlp), classes(), training=broken)
        assert torch.equal(flat_mean(resumed), flat_mean(whole))
        assert torch.equal(resumed.scale, whole.scale)

    def test_an_update_has_the_posterior_as_prior(self) -> None:
        first: Any = Variational(optimizer="natural").fit(seeded(mlp), classes(), training=SHORT)
        second: Any = first.update(classes(seed=2), training=SHORT)
        assert torch.equal(torch.cat([p.loc.flatten() for p in second.priors.values()]), flat_mean(first))
        assert second.recipe.optimizer == "natural"

    def test_a_better_bound_than_adam_in_the_same_steps(self) -> None:
        data, training = classes(200), Training(epochs=30, batch_size=20)
        bounds = [
            float(Variational(optimizer=optimizer).fit(seeded(mlp), data, training=training).log_evidence())
            for optimizer in ("natural", "gradient")
        ]
        assert bounds[0] > bounds[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": priors.Laplace()}, "normal prior with a fixed scale"),
        ({"prior": priors.Normal(0, "learn")}, "normal prior with a fixed scale"),
        ({"objective": objectives.Renyi(0.5), "estimator": "weight"}, "needs objective ELBO"),
        ({"kl_warmup": 0.5}, "drop kl_warmup"),
        ({"scale_rate": 0.5}, "drop scale_rate"),
        ({"optimizer": "newton"}, "`optimizer` must be 'gradient' or 'natural'"),
    ],
)
def test_bad_settings_are_one_sentence(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Variational(**{"optimizer": "natural", **options})
    assert str(caught.value).endswith(".")


def test_it_cannot_be_clipped() -> None:
    with pytest.raises(InputError, match="cannot be clipped"):
        Variational(optimizer="natural").fit(seeded(mlp), classes(), training=SHORT.replace(clip=1.0))


def test_small_noise_does_not_throw_the_means_away() -> None:
    """Precisions start far too small here: without a limit on the steps the mean squared error ended above 1,000."""
    x = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    y = x[:, :1].sin()
    found = Variational(optimizer="natural").fit(
        seeded_layers(lambda: nn.Linear(5, 20), nn.ReLU, lambda: nn.Linear(20, 1)).float(), (x, y), progress=False,
        likelihood=likelihoods.Gaussian(noise=0.03), training=Training(epochs=100, lr=3e-3, batch_size=16),
    )  # fmt: skip
    assert float((found.predict(x).mean - y).square().mean()) < 0.1
