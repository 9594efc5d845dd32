"""MAP: the most probable weights, a temperature that validation data chooses, and a posterior that is a point."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.errors import FileFormatError, InputError, UnsupportedError
from dubito.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import MAP, Training
from dubito.core import params
from dubito.core.numeric import minimize_scalar
from dubito.core.settings import Setting, setting
from oracles import LinearRegression


@setting
class Holder(Setting):
    setting_name = "testing.Holder"
    posterior: Any


EXACT = Training(epochs=400, lr=0.1, batch_size=10_000, schedule="cosine")


def regression(size: int = 60, outputs: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, outputs, generator=generator, dtype=torch.float64)
    return x, x @ weight + 0.7 + 0.5 * torch.randn(size, outputs, generator=generator, dtype=torch.float64)


def classes(size: int = 80, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=generator)
    return x, (x[:, 0] + 0.8 * torch.randn(size, generator=generator) > 0).long()


def flat(posterior: dubito.Posterior) -> Tensor:
    return torch.cat([value.flatten() for value in posterior.mean().values()])


def nll(posterior: dubito.Posterior, data: tuple[Tensor, Tensor]) -> float:
    return -posterior.predict(data[0]).log_prob(data[1]).double().mean().item()


class TestRidge:
    @pytest.mark.parametrize("prior_precision", [0.0, 0.5, 20.0])
    @pytest.mark.parametrize("optimizer", ["adam", "sgd"])
    def test_linear_regression_with_a_prior_is_ridge_regression(self, prior_precision: float, optimizer: Any) -> None:
        x, y = regression()
        training = EXACT if optimizer == "adam" else EXACT.replace(optimizer="sgd", lr=0.01)
        recipe = MAP(prior_precision=prior_precision)
        posterior = recipe.fit(nn.Linear(3, 2).double(), (x, y), likelihood=Gaussian(noise=0.5), training=training)
        oracle = LinearRegression(x, y, noise=0.5, prior_precision=max(prior_precision, 1e-12))
        torch.testing.assert_close(flat(posterior), oracle.mean, rtol=1e-4, atol=1e-4)

    @pytest.mark.slow
    def test_the_prior_counts_once_whatever_the_batches(self) -> None:
        x, y = regression()
        training = Training(epochs=300, lr=0.03, batch_size=20)
        posterior = MAP(20.0).fit(nn.Linear(3, 2).double(), (x, y), likelihood=Gaussian(noise=0.5), training=training)
        oracle = LinearRegression(x, y, noise=0.5, prior_precision=20.0)
        torch.testing.assert_close(flat(posterior), oracle.mean, rtol=2e-2, atol=2e-2)

    def test_decoupled_decay_is_no_prior(self) -> None:
        with pytest.raises(InputError, match="'adamw' is not a prior"):
            MAP(1.0).fit(nn.Linear(3, 2), classes(), training=Training(optimizer="adamw"))


class TestNoise:
    def test_learned_noise_is_the_closed_form(self) -> None:
        x, y = regression()
        posterior = MAP().fit(nn.Linear(3, 2).double(), (x, y), likelihood="gaussian", training=EXACT)
        oracle = LinearRegression(x, y, noise=1.0, prior_precision=1e-12)
        residuals = y.flatten() - oracle.matrix @ oracle.mean
        assert posterior.likelihood.noise == pytest.approx(residuals.square().mean().sqrt().item(), rel=1e-5)

    @pytest.mark.parametrize("kind", ["pair", "loader"])
    def test_of_a_network_taken_as_it_is(self, kind: str) -> None:
        x, y = regression()
        model = nn.Linear(3, 2).double()
        data = (x, y) if kind == "pair" else DataLoader(TensorDataset(x, y), 7, shuffle=True)
        posterior = MAP(train=False).fit(model, data, likelihood="gaussian")
        expected = (model(x) - y).square().mean().sqrt().item()
        assert posterior.likelihood.noise == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(posterior.predict(x).stddev, torch.full_like(y, expected))

    def test_outputs_without_an_axis_of_their_own(self) -> None:
        class Squeezed(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).squeeze(-1)

        x, y = regression(outputs=1)
        model = Squeezed(3, 1).double()
        noises = [MAP(train=False).fit(model, (x, t), likelihood="gaussian").likelihood.noise for t in (y, y[:, 0])]
        assert noises[0] == noises[1] == pytest.approx((model(x) - y[:, 0]).square().mean().sqrt().item(), rel=1e-12)

    def test_given_noise_stays(self) -> None:
        posterior = MAP().fit(nn.Linear(3, 2).double(), regression(), likelihood=Gaussian(0.3), training=EXACT)
        assert posterior.likelihood == Gaussian(0.3)

    def test_a_perfect_fit_has_a_little_noise(self) -> None:
        x, _ = regression()
        model = nn.Linear(3, 2).double()
        posterior = MAP(train=False).fit(model, (x, model(x).detach()), likelihood="gaussian")
        assert 0 < posterior.likelihood.noise < 1e-5


def penalty(temperature: float, data: tuple[Tensor, Tensor]) -> float:
    return math.log1p((math.log(temperature) / 0.3) ** 2) / len(data[0])


class TestTemperature:
    def brute_force(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
        """Return the best of many temperatures and its loss, the mean loss and log(1 + (log T / 0.3)²) / N."""
        grid, logits = torch.logspace(-2, 2, 400).tolist(), model(data[0]).detach().double()
        losses = [float(cross_entropy(logits / each, data[1])) + penalty(each, data) for each in grid]
        best = min(range(400), key=losses.__getitem__)
        return grid[best], losses[best]

    def test_a_flawless_validation_set_does_not_make_it_certain(self) -> None:
        model = nn.Linear(1, 2)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[-1.0], [1.0]]))
            model.bias.zero_()
        x = torch.tensor([[-3.0], [-2.0], [2.0], [3.0]])
        data = (x, (x[:, 0] > 0).long())
        tuned = MAP(train=False, temperature="validation").fit(model, data, validation=data)
        assert 0.3 < tuned.temperature < 1.0

    @pytest.mark.parametrize("scale", [0.2, 1.0, 30.0])
    def test_it_minimizes_the_validation_loss(self, scale: float) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[0.0, 0.1, 0.0], [1.0, 0.0, 0.2]]) * scale)
        validation = classes(60, seed=1)

        def fit(temperature: Any) -> dubito.Posterior:
            return MAP(train=False, temperature=temperature).fit(model, classes(), validation=validation)

        tuned = fit("validation")
        temperature, loss = self.brute_force(model, validation)
        assert tuned.temperature == pytest.approx(temperature, rel=0.025)  # the grid's spacing
        assert nll(tuned, validation) + penalty(tuned.temperature, validation) <= loss + 1e-6
        assert torch.equal(tuned.predict(validation[0]).mode, fit(1.0).predict(validation[0]).mode)

    def test_of_a_regression_it_is_the_validation_noise(self) -> None:
        x, y = regression()
        model, validation = nn.Linear(3, 2).double(), regression(30)
        posterior = MAP(temperature="validation", train=False).fit(
            model, (x, y), likelihood=Gaussian(noise=0.1), validation=validation
        )
        expected = (model(validation[0]) - validation[1]).square().mean().sqrt().item()
        assert posterior.temperature * 0.1 == pytest.approx(expected, rel=1e-5)
        assert posterior.predict(x).stddev.mean().item() == pytest.approx(expected, rel=1e-5)

    def test_of_a_heteroscedastic_regression(self) -> None:
        x, y = regression()
        model = nn.Linear(3, 4).double()
        posterior = MAP(temperature="validation", train=False).fit(
            model, (x, y), likelihood=HeteroscedasticGaussian(), validation=(x, y)
        )
        means, log_variances = model(x).chunk(2, dim=-1)
        standardized = (y - means) * (-0.5 * log_variances).exp()
        assert posterior.temperature == pytest.approx(standardized.square().mean().sqrt().item(), rel=1e-5)

    def test_a_given_temperature(self) -> None:
        model, (x, y) = nn.Linear(3, 2), classes()
        posterior = MAP(train=False, temperature=3.0).fit(model, (x, y))
        torch.testing.assert_close(posterior.predict(x).probs, (model(x) / 3).softmax(-1))

    def test_tokens_of_different_lengths(self) -> None:
        torch.manual_seed(0)
        model = nn.Embedding(9, 3)
        inputs = [torch.randint(9, (4, length)) for length in (2, 5)]
        parts = [(x, torch.where(torch.rand(x.shape) < 0.3, 0, model(x).argmax(-1))) for x in inputs]
        posterior = MAP(train=False, temperature="validation").fit(model, parts, validation=parts)
        assert 0.02 < posterior.temperature < 50
        logits = torch.cat([model(x).flatten(0, 1) for x, _ in parts]).detach().double() / posterior.temperature
        labels = torch.cat([y.flatten() for _, y in parts])

        def loss(factor: float) -> float:
            doubt = math.log1p((math.log(posterior.temperature * factor) / 0.3) ** 2)
            return float(-Categorical().log_prob(logits / factor, labels).sum()) + doubt

        assert all(loss(1.0) <= loss(factor) for factor in (0.98, 1.02))

    def test_it_needs_data(self) -> None:
        with pytest.raises(InputError, match="temperature='validation' needs validation data: pass `validation=`"):
            MAP(temperature="validation").fit(nn.Linear(3, 2), classes())


@given(st.floats(-5, 5), st.floats(0.1, 3))
def test_golden_section(center: float, power: float) -> None:
    found = minimize_scalar(lambda x: abs(x - center) ** power, -6.0, 6.0, tolerance=1e-7)
    assert found == pytest.approx(center, abs=1e-6)


def test_one_row_is_too_small_for_a_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"A batch of 1 is too small for batch normalization.*batch_size"):
        MAP().fit(model, classes(1), training=Training(epochs=1, batch_size=16))


class TestAsItIs:
    @pytest.mark.parametrize("how", ["train=False", "epochs=0"])
    def test_the_weights_are_taken(self, how: str) -> None:
        model, (x, y) = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), classes()
        recipe, training = (MAP(train=False), None) if how == "train=False" else (MAP(), Training(epochs=0))
        posterior = recipe.fit(model, (x, y), training=training)
        for a, b in ((params.of, params.of), (params.buffers_of, params.buffers_of)):
            assert all(torch.equal(value, b(posterior.model)[name]) for name, value in a(model).items())
        torch.testing.assert_close(posterior.predict(x).probs, model.eval()(x).softmax(-1))

    def test_it_is_a_copy(self) -> None:
        model, (x, y) = nn.Linear(3, 2), classes()
        posterior = MAP(train=False).fit(model, (x, y))
        before = posterior.predict(x).probs
        model.weight.data.zero_()
        assert torch.equal(posterior.predict(x).probs, before)


class TestPosterior:
    @pytest.fixture
    def posterior(self) -> dubito.Posterior:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        return MAP(prior_precision=4.0, temperature=2.0).fit(model, classes(), training=Training(epochs=2))

    def test_a_point_has_no_spread(self, posterior: dubito.Posterior) -> None:
        mean, variance = posterior.marginals()
        assert all(torch.equal(mean[name], value) for name, value in params.of(posterior.model).items())
        assert all(bool((value == 0).all()) for value in variance.values())
        drawn = posterior.sample(3)
        assert all(torch.equal(drawn[name], value.expand(3, *value.shape)) for name, value in mean.items())
        assert bool((posterior.predict(classes()[0]).epistemic == 0).all())

    def test_the_prior_is_on_what_was_trained(self, posterior: dubito.Posterior) -> None:
        mean, variance = posterior.prior()
        assert all(bool((value == 0).all()) for value in mean.values())
        expected = {"0.weight": 0.0, "0.bias": 0.0, "2.weight": 0.25, "2.bias": 0.25}
        assert {name: value.unique().tolist() for name, value in variance.items()} == {
            name: [value] for name, value in expected.items()
        }

    def test_a_flat_prior_is_one_sentence(self) -> None:
        posterior = MAP(train=False).fit(nn.Linear(3, 2), classes())
        with pytest.raises(UnsupportedError, match="A flat prior has no variance: fit MAP with a positive"):
            posterior.prior()

    def test_an_unknown_option(self, posterior: dubito.Posterior) -> None:
        with pytest.raises(InputError, match="no predict option 'link'"):
            posterior.predict(classes()[0], link="probit")

    def test_saved_and_loaded(self, posterior: dubito.Posterior, tmp_path: Path) -> None:
        x, _ = classes()
        posterior.save(tmp_path / "point")
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        again = dubito.load(tmp_path / "point", model)
        assert again.digest() == posterior.digest()
        assert again.recipe == posterior.recipe
        assert again.num_data == 80
        assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)
        assert not torch.equal(model[0].weight, again.model[0].weight)

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), r"'2.weight' is \(2, 4\) in the file and"),
            (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "'1.weight' is missing in the file"),
            (nn.Linear(3, 2), "saved for another network"),
            (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), "'1.weight' is missing in the file"),
        ],
    )
    def test_another_network(self, posterior: dubito.Posterior, tmp_path: Path, model: Any, message: str) -> None:
        posterior.save(tmp_path / "point")
        with pytest.raises(FileFormatError, match=message):
            dubito.load(tmp_path / "point", model)

    def test_buffers_and_precision_come_from_the_file(self, tmp_path: Path) -> None:
        x, y = classes()
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        posterior = MAP().fit(model, (x, y), training=Training(epochs=2, batch_size=128))
        posterior.save(tmp_path / "point")
        again = dubito.load(tmp_path / "point", nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        assert again.dtype == torch.float64
        assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)
        assert again.model[1].num_batches_tracked == 2

    def test_an_unknown_family(self, posterior: dubito.Posterior, tmp_path: Path) -> None:
        posterior.family = "Oracle"  # type: ignore[misc]
        posterior.save(tmp_path / "point")
        with pytest.raises(FileFormatError, match="holds a 'Oracle' posterior, which this version lacks: upgrade it"):
            dubito.load(tmp_path / "point", posterior.model)

    def test_update_is_fine_tuning(self, posterior: dubito.Posterior) -> None:
        new = classes(40, seed=3)
        training = Training(epochs=30, lr=1e-2)
        before = posterior.digest()
        updated = posterior.update(new, training=training, progress=False)
        assert posterior.digest() == before
        assert updated.num_data == 80 + 40
        assert nll(updated, new) < nll(posterior, new)
        plain = posterior.recipe.fit(posterior.model, new, training=training)
        assert torch.equal(flat(updated), flat(plain))

    def test_a_network_that_draws_by_itself(self) -> None:
        class Noisy(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.dropout(super().forward(x), 0.5, training=True)

        x, y = classes()
        posterior = MAP(train=False).fit(Noisy(3, 2), (x, y))
        before = torch.get_rng_state()
        first, second = posterior.predict(x).probs, posterior.predict(x).probs
        assert torch.equal(first, second)
        other = posterior.predict(x, generator=torch.Generator().manual_seed(9)).probs
        assert not torch.equal(first, other)
        assert torch.equal(torch.get_rng_state(), before)

    def test_inside_a_setting_it_counts_by_its_content(self, posterior: dubito.Posterior) -> None:
        holders = [Holder(each) for each in (posterior, copy.deepcopy(posterior))]
        assert holders[0] == holders[1] == Setting.from_json(holders[0].to_json())
        posterior.model[2].bias.data += 1e-3
        assert Holder(posterior) != holders[1]

    def test_what_it_says_of_itself(self, posterior: dubito.Posterior) -> None:
        text = "<MAP posterior over 26 weights by MAP(prior_precision=4.0, temperature=2.0)>"
        assert repr(posterior) == text


@pytest.mark.parametrize(
    "wrong",
    [
        *({"prior_precision": value} for value in (-1.0, float("nan"), float("inf"))),
        *({"temperature": value} for value in (0, -1.0, "test", None, float("nan"))),
        {"start": "cold"},
        {"start": "fresh", "train": False},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        MAP(**wrong)
